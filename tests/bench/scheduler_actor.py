"""Requests a second through the global scheduler's actor: `python tests/bench/scheduler_actor.py`.

Four ingresses, processes of their own, each keep so many requests waiting and send what has piled up while their last
call was under way. Groups, processes too, take their batches, have done with them at once and report that as leaders
do, one report at a time. All is real but the engine: channels, pickled prompts, block hashes, news. Where there are
fewer cores than processes, the rate by the clock is the machine's; a second of the actor's own CPU says what one core
carries.
"""

import argparse
import asyncio
import os
import random
import tempfile
import time

import ray

from pagedray.cluster.channel import Channel, ChannelServer
from pagedray.cluster.global_scheduler import Assignments, GlobalScheduler, GroupInfo, GroupReport
from pagedray.scheduler.cost_model import CostModel
from pagedray.scheduler.placement import GroupCapacity, GroupLoad
from pagedray.scheduler.request import Request, SamplingParams
from pagedray.scheduler.step import SchedulerStats

MODEL, BLOCK = "m", 64  # tokens
_REPORT_SECONDS = 0.5
COST = CostModel(0.0, 1e-7, 0.0, 0.0, 0.0)  # groups so fast that nothing waits for them


class Scheduler(GlobalScheduler):
    async def cpu_seconds(self) -> float:
        return time.process_time()


class Leader:
    """A group that needs no time."""

    def __init__(self, schedulers, group_id):
        self.schedulers, self.group_id = schedulers, group_id
        self.num_received = [0] * len(schedulers)
        self.finished = [[] for _ in schedulers]
        self.wake = [asyncio.Event() for _ in schedulers]

    async def join(self):
        me = ray.get_runtime_context().current_actor
        capacity = GroupCapacity(512, 256, 1_000_000, BLOCK, 2048)
        self.channel = ChannelServer(ray.util.get_node_ip_address(), {"add_requests": self.add_requests})
        info = GroupInfo(self.group_id, MODEL, capacity, 131072, me, channel=self.channel.address)
        for scheduler in self.schedulers:
            await scheduler.register_group.remote(info)
        self.reporters = [asyncio.create_task(self._report_for_ever(shard)) for shard in range(len(self.schedulers))]

    async def add_requests(self, batch, shard):
        self.num_received[shard] += len(batch)
        self.finished[shard] += [request.request_id for _, request in batch]
        self.wake[shard].set()

    async def send_snapshot(self, _):
        pass

    async def _report_for_ever(self, shard):
        while True:
            try:
                await asyncio.wait_for(self.wake[shard].wait(), _REPORT_SECONDS)
            except TimeoutError:
                pass
            self.wake[shard].clear()
            finished, self.finished[shard] = self.finished[shard], []
            load = GroupLoad(self.num_received[shard], 0.0, 16, 30_000, 50_000, COST)
            stats = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0)
            report = GroupReport(self.group_id, tuple(finished), stats, load)
            await self.schedulers[shard].report.remote(report)


class Ingress:
    def __init__(self, scheduler, name, tokens):
        self.scheduler, self.name, self.count = scheduler, name, 0
        draw = random.Random(name)
        self.prompt = tuple(draw.randrange(50_000) for _ in range(tokens))
        self.hashes = [tuple(draw.randbytes(16) for _ in range(tokens // BLOCK)) for _ in range(200)]
        self.seen = ("", 0)
        self.channel = Channel(self._find)

    async def _find(self):
        return await self.scheduler.open_channel.remote()

    def _request(self):
        self.count += 1
        sampling = SamplingParams(seed=self.count, max_tokens=100)
        hashes = self.hashes[self.count % len(self.hashes)]
        return Request(f"{self.name}-{self.count}", self.prompt, sampling, MODEL, block_hashes=hashes)

    async def run(self, num_requests, in_flight):
        """Submit so many, with `in_flight` of them waiting for a group at any time; the size of the mean batch."""
        waiting, sent, calls = set(), 0, 0
        while waiting or sent < num_requests:
            batch = [self._request() for _ in range(min(in_flight - len(waiting), num_requests - sent))]
            waiting |= {r.request_id for r in batch}
            sent += len(batch)
            if batch:
                calls += 1
                answer = await self.channel.call("submit", self.name, batch, self.seen, timeout=60.0)
                news = Assignments.from_json(answer)
            else:
                news = await self.scheduler.assignments.remote(self.name, self.seen)
            self.seen = news.epoch, news.number
            assert not news.failed, news.failed[0][1]
            waiting -= {request_id for request_id, _ in news.assigned}
        return sent / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2, help="processes, too")
    parser.add_argument("--ingresses", type=int, default=4)
    parser.add_argument("--shards", type=int, default=1, help="actors; ingresses' requests are divided among them")
    parser.add_argument("--requests", type=int, default=8_000, help="in each round")
    parser.add_argument("--in-flight", type=int, default=64, help="requests of an ingress that wait for a group")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="pr", dir="/tmp") as folder:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder, configure_logging=False)
        try:
            measure(args)
        finally:
            ray.shutdown()


def measure(args) -> None:
    def actor(cls, *arguments):
        return ray.remote(cls).options(num_cpus=0, max_concurrency=1000).remote(*arguments)

    schedulers = [actor(Scheduler, "bench", shard) for shard in range(args.shards)]
    leaders = [actor(Leader, schedulers, f"g{i}") for i in range(args.groups)]

    def cpu_seconds():
        return ray.get([s.cpu_seconds.remote() for s in schedulers], timeout=60)

    ray.get([leader.join.remote() for leader in leaders], timeout=300)
    ingresses = [actor(Ingress, schedulers[i % args.shards], f"i{i}", args.tokens) for i in range(args.ingresses)]
    share = args.requests // args.ingresses
    for number in range(args.rounds + 1):
        before, began = cpu_seconds(), time.perf_counter()
        sizes = ray.get([i.run.remote(share, args.in_flight) for i in ingresses], timeout=300)
        seconds = time.perf_counter() - began
        used = max(now - then for now, then in zip(cpu_seconds(), before, strict=True))
        total = share * args.ingresses
        if number:  # the first one warms up
            print(
                f"{total / seconds:,.0f} requests/s, {total / used:,.0f} a second of the busiest actor's CPU; "
                f"{sum(sizes) / len(sizes):.0f} in a batch",
                flush=True,
            )


if __name__ == "__main__":
    main()
