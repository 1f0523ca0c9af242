"""What a worker group costs and gains on this machine: reduces, control, step times, bubbles.

    python tests/bench/groups.py MODEL [--rounds 5] [--steps 60] [--batch 16] [--variants "one rank" "TP=2" ...]

Every rank has one thread. Variants take turns within a round; figures are medians over the rounds.
"""

import argparse
import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from pagedray.kernels import ops
from pagedray.kernels.cpu.shared_group import SharedGroup
from pagedray.scheduler.plan import StepPlan
from pagedray.scheduler.request import Request, SamplingParams
from pagedray.workers import wire
from pagedray.workers.collectives import CollectiveGroup
from pagedray.workers.config import EngineConfig
from pagedray.workers.engine import Engine
from pagedray.workers.executor import GroupExecutor

VARIANTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, 2 threads": {"cpu_threads": 2},
    "TP=2": {"tensor_parallel_size": 2},
    "TP=2 over gloo": {"tensor_parallel_size": 2},
    "PP=2, equal stages": {"pipeline_parallel_size": 2, "pipeline_stage_layers": "equal"},
    "PP=2, balanced": {"pipeline_parallel_size": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for rows in (1, 16, 256):
        shared, gloo = time_reduce(rows, 576)
        print(f"reduce {rows} x 576 over 2 ranks: shared memory {shared:.1f} us, gloo {gloo:.0f} us", flush=True)
    groups = {name: Variant(name, args) for name in args.variants}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in groups}
    for i in range(args.rounds):
        for name, variant in groups.items():
            measured[name].append(variant.measure(args.steps))
            print(f"round {i + 1}, {name}: {measured[name][-1]['step ms']:.1f} ms a step", flush=True)
    for name, rounds in measured.items():
        keys = rounds[0]
        print(f"{name}: " + ", ".join(f"{key} {statistics.median(r[key] for r in rounds):.2f}" for key in keys))
    if (balanced := groups.get("PP=2, balanced")) is not None:
        print("layers of the stages, balanced:", balanced.stages())
        control(balanced, args.batch)
    for variant in groups.values():
        variant.engine.close()


class Variant:
    """An engine with a batch of sequences that decode for ever."""

    def __init__(self, name: str, args: argparse.Namespace):
        settings: dict[str, Any] = {
            "cpu_threads": 1,
            "max_model_len": 2048,
            "max_num_seqs": args.batch,
            **VARIANTS[name],
        }
        if settings.get("pipeline_stage_layers") == "equal":
            settings["pipeline_stage_layers"] = [15, 15]
        config = EngineConfig.from_kwargs(model=args.model, **settings)
        self.threads = settings["cpu_threads"]
        self.executor: Any = None
        if config.world_size > 1:
            self.executor = GroupExecutor(config, road="gloo" if "gloo" in name else None)
        self.engine = Engine(config, executor=self.executor)
        self.executor = self.engine.executor
        sampling = SamplingParams(temperature=0.0, max_tokens=1900, seed=0, ignore_eos=True)
        for i in range(args.batch):
            self.engine.add_request(Request(str(i), tuple(range(100 * i + 5, 100 * i + 69)), sampling))
        for _ in range(20):
            self.engine.step()
        self.sent = self.computed = 0.0
        members = getattr(self.executor, "_members", None)
        if members is not None:
            members.send_all = self._timed(members.send_all, "sent")
        self.executor.worker.execute = self._timed(self.executor.worker.execute, "computed")

    def stages(self) -> list[int]:
        return [len(shard.layers) for shard in self.executor.topology.shards]

    def measure(self, steps: int) -> dict[str, float]:
        """Milliseconds a batch-wide token; of it the leader's; and how idle each rank is, by its processor time."""
        torch.set_num_threads(self.threads)
        self.sent = self.computed = 0.0
        members = getattr(self.executor, "_members", None)
        pids = [h.process.pid for h in members._handles.values()] if members else []
        used, tokens = [-_cpu_seconds(pid) for pid in pids], 0
        own, began = -time.thread_time(), time.perf_counter()
        in_flight = self.executor.max_in_flight
        for _ in range(steps * in_flight):
            tokens += len(self.engine.step())
        wall = time.perf_counter() - began
        own += time.thread_time()
        used = [u + _cpu_seconds(pid) for u, pid in zip(used, pids, strict=True)]
        found = {
            "step ms": 1000 * wall / steps,
            "tokens/s": tokens / wall,
            "leader: sending ms": 1000 * self.sent / steps,
            "computing ms": 1000 * self.computed / steps,
            "the rest ms": 1000 * (wall - self.sent - self.computed) / steps,
        }
        for rank, seconds in enumerate([own, *used]):
            if pids:
                found[f"idle of rank {rank}"] = 1 - seconds / wall
        return found

    def _timed(self, call: Callable[..., Any], total: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                setattr(self, total, getattr(self, total) + time.perf_counter() - began)

        return timed


def control(pipeline: Variant, batch: int) -> None:
    """The way of a plan to a rank and of a result back, and what pickling a decode step's plan takes."""
    engine, executor = pipeline.engine, pipeline.executor
    while engine.scheduler.num_in_flight:
        engine.scheduler.update(executor.collect())
    for _ in range(20):
        engine.step()
    while engine.scheduler.num_in_flight:
        engine.scheduler.update(executor.collect())
    engine.scheduler.max_in_flight = 1  # all sequences in one plan
    plan = engine.scheduler.schedule()
    assert plan is not None and len(plan.scheduled) == batch
    data = pickle.dumps(plan, protocol=5)
    dump = median_us(lambda: wire.frame(plan))
    load = median_us(lambda: pickle.loads(data))
    empty = StepPlan(plan.step_id, (), (), ())

    def round_trip() -> None:
        executor.submit(empty)
        executor.collect()

    trip = median_us(round_trip)
    print(
        f"control of a step of {batch} sequences: a plan of {len(data)} bytes, pickled in {dump:.0f} us, read in "
        f"{load:.0f} us, an empty one there and its result back {trip:.0f} us; "
        f"out to the rank {dump + load + trip / 2:.0f} us"
    )


def time_reduce(rows: int, hidden: int) -> tuple[float, float]:
    """Microseconds of a reduce in shared pages and over gloo, two processes in step."""
    native = ops.native_library()
    file = SharedGroup.create(native, 2, 4 * rows * hidden)
    os.set_inheritable(file, True)
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def loop(rank: int, port: int) -> tuple[float, float]:
        part = torch.ones(rows, hidden)
        shared = SharedGroup(native, file, rank, 2, 4 * rows * hidden)
        mine = store if rank == 0 else TCPStore("127.0.0.1", port, is_master=False)
        gloo = CollectiveGroup("gloo", mine, "127.0.0.1", rank, 2, torch.device("cpu"))
        return (
            median_us(lambda: shared(part, torch.float32), 2000),
            median_us(lambda: gloo(part, torch.float32), 300),
        )

    child = multiprocessing.get_context("fork").Process(target=loop, args=(1, store.port))
    child.start()
    figures = loop(0, store.port)
    child.join()
    os.close(file)
    return figures


def median_us(call: Callable[[], object], times: int = 500) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return 1e6 * statistics.median(took)


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
