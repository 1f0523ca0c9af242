"""The ingress's side of the wire against actors that live in this process, and can die."""

import asyncio
import time
from dataclasses import replace

import pytest
import ray
import uvloop

from pagedray.cluster import cluster_client, global_scheduler
from pagedray.cluster.channel import ChannelServer
from pagedray.cluster.cluster_client import ClusterClient
from pagedray.cluster.config import SchedulerOptions
from pagedray.cluster.global_scheduler import SILENCE_SECONDS, Assignments, GlobalScheduler, GroupInfo, GroupReport
from pagedray.cluster.sharded_client import ShardedClient
from pagedray.cluster.token_stream import TokenFrame, TokenServer
from pagedray.scheduler.errors import EngineDead, GroupLost, InvalidRequest, Overloaded, RateLimited, ReaderTooSlow
from pagedray.scheduler.placement import GroupCapacity
from pagedray.scheduler.request import Request, SamplingParams, SequenceOutput
from pagedray.scheduler.shards import shard_of
from pagedray.scheduler.tenants import Tenant, TenantDirectory


class Handle:
    """As an actor handle: `handle.method.remote(...)` is awaitable. `kill()` makes every call fail from now on."""

    def __init__(self, actor):
        self._actor = actor
        self._dead = asyncio.Event()

    def __getattr__(self, method):
        return _Method(self, method)

    def kill(self):
        self._dead.set()
        if tokens := getattr(self._actor, "tokens", None):
            tokens.close()  # its connections end with a process
        if self._actor.server is not None:
            self.closing = asyncio.ensure_future(self._actor.server.close())


class _Method:
    def __init__(self, handle, name):
        self.handle, self.name = handle, name

    def remote(self, *args):
        return self._call(args)

    async def _call(self, args):
        await asyncio.sleep(0)
        died = ray.exceptions.ActorDiedError()
        if self.handle._dead.is_set():
            raise died
        work = asyncio.ensure_future(getattr(self.handle._actor, self.name)(*args))
        dead = asyncio.ensure_future(self.handle._dead.wait())
        try:
            await asyncio.wait((work, dead), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise died
            return work.result()
        finally:
            work.cancel()
            dead.cancel()


class FakeLeader:
    """Answers each request with its prompt backwards, a token a millisecond; `hold` keeps it from answering."""

    def __init__(self, hold=False):
        self.tokens = TokenServer("127.0.0.1", lambda ingress_id: None, lambda ingress_id, request_ids: None)
        self.server = ChannelServer("127.0.0.1", {"add_requests": self.add_requests})
        self.hold = hold
        self.requests = []
        self.aborted = []
        self.leaves_within = None
        self.tasks = []
        self.finished = lambda request_id: None

    async def add_requests(self, batch, shard=0):
        for ingress_id, request in batch:
            self.requests.append(request.request_id)
            if not self.hold:
                self.tasks.append(asyncio.create_task(self.answer(self.tokens.outbox(ingress_id), request)))

    async def answer(self, outbox, request):
        if request.prompt_token_ids == (666,):
            outbox.send(TokenFrame(failures=((request.request_id, InvalidRequest("no", "prompt")),)))
            return
        tokens = request.prompt_token_ids[::-1]
        for i, token in enumerate(tokens):
            await asyncio.sleep(0.001)
            last = "length" if i + 1 == len(tokens) else None
            outbox.send(TokenFrame((SequenceOutput(request.request_id, (token,), finish_reason=last),)))
        await self.finished(request.request_id)

    async def open_stream(self, ingress_id):
        return self.tokens.open(ingress_id)

    async def abort(self, request_ids):
        self.aborted += request_ids

    async def leave(self, seconds):
        self.leaves_within = seconds


class Cluster:
    """A global scheduler and a client; groups come by `add_group`."""

    def __init__(self):
        self.scheduler = self.new_scheduler()
        self.client = ClusterClient(Handle(self.scheduler))

    @staticmethod
    def new_scheduler(shard=0):
        scheduler = GlobalScheduler("test", shard)
        scheduler._tasks.cancel()  # they watch Serve, which is not here
        return scheduler

    def restart_scheduler(self):
        """As Ray does it: calls under way fail, the handle then reaches a new instance that knows nothing."""
        old = self.client.scheduler
        self.scheduler = self.new_scheduler()
        self.client.scheduler = Handle(self.scheduler)
        old.kill()

    def assigned(self):
        """How many requests the client knows the group of."""
        return sum(s.group_id is not None for s in self.client._streams.values())

    async def add_group(self, leader, name="g1", window=8, **info):
        handle = Handle(leader)
        leader.finished = lambda request_id: self.scheduler.report(GroupReport(name, (request_id,), None))
        info = GroupInfo(name, "m", GroupCapacity(window), 100, handle, channel=leader.server.address, **info)
        await self.scheduler.register_group(info)
        return handle


def request(name, tokens=(1, 2, 3)):
    return Request(name, tuple(tokens), SamplingParams(seed=0), model="m")


async def collect(client, req):
    return [token async for output in client.generate(req) for token in output.token_ids]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def held(cluster):
    """The task of a request, "r", that group g1 has and does not answer."""
    await cluster.add_group(FakeLeader(hold=True))
    answer = asyncio.create_task(collect(cluster.client, request("r")))
    await until(lambda: cluster.assigned() == 1)
    return answer


def run(test):
    async def bounded():
        await asyncio.wait_for(test(), 20)

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):  # actors have uvloop's
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(bounded())


def test_many_sequences_get_their_own_tokens_in_order():
    async def test():
        cluster = Cluster()
        leaders = [FakeLeader(), FakeLeader()]
        for i, leader in enumerate(leaders):
            await cluster.add_group(leader, f"g{i}")
        wishes = [request(f"r{i}", range(i, i + 9)) for i in range(40)]
        answers = await asyncio.gather(*(collect(cluster.client, w) for w in wishes))
        assert answers == [list(w.prompt_token_ids[::-1]) for w in wishes]
        assert all(leader.requests for leader in leaders)

    run(test)


def test_a_request_waits_for_a_group_to_come():
    async def test():
        cluster = Cluster()
        answer = asyncio.create_task(collect(cluster.client, request("r")))
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 1})
        assert not answer.done()
        await cluster.add_group(FakeLeader())
        assert await answer == [3, 2, 1]

    run(test)


def test_leaving_early_cancels_wherever_the_request_is():
    async def test():
        cluster = Cluster()
        queued = asyncio.create_task(collect(cluster.client, request("queued")))
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 1})
        queued.cancel()
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {})
        leader = FakeLeader(hold=True)
        await cluster.add_group(leader)
        placed = asyncio.create_task(collect(cluster.client, request("placed")))
        await until(lambda: leader.requests == ["placed"])
        placed.cancel()
        await until(lambda: leader.aborted == ["placed"])
        cluster.scheduler.dispatcher.check_integrity()
        assert cluster.scheduler.ingress_of == {}

    run(test)


def test_refusals_reach_the_caller_as_they_are():
    async def test():
        cluster = Cluster()
        await cluster.add_group(FakeLeader())
        with pytest.raises(InvalidRequest, match="no"):
            await collect(cluster.client, request("bad", [666]))
        cluster.scheduler.dispatcher.max_queued_requests = 0
        with pytest.raises(Overloaded):
            await collect(cluster.client, request("one too many"))

    run(test)


def test_a_dead_group_fails_its_sequences_and_no_others():
    async def test():
        cluster = Cluster()
        doomed = await cluster.add_group(FakeLeader(hold=True), "doomed", window=1)
        lost = asyncio.create_task(collect(cluster.client, request("lost")))
        await until(lambda: cluster.assigned() == 1)
        await cluster.add_group(FakeLeader(), "alive")
        kept = asyncio.create_task(collect(cluster.client, request("kept", range(100))))
        await until(lambda: cluster.assigned() == 2)
        doomed.kill()
        with pytest.raises(GroupLost):
            await lost
        assert list(cluster.scheduler.groups) == ["alive"], "what is resumed could go to the dead one again"
        assert await kept == list(range(100))[::-1]
        assert await collect(cluster.client, request("after")) == [3, 2, 1]
        await until(lambda: list(cluster.scheduler.groups) == ["alive"])

    run(test)


def test_a_connection_that_breaks_fails_its_sequences_and_comes_again():
    async def test():
        cluster = Cluster()
        leader = FakeLeader(hold=True)
        await cluster.add_group(leader)
        lost = asyncio.create_task(collect(cluster.client, request("lost")))
        await until(lambda: leader.tokens.outbox(cluster.client.ingress_id)._socket is not None)
        leader.tokens.outbox(cluster.client.ingress_id).close()
        with pytest.raises(GroupLost):
            await lost
        await until(lambda: leader.aborted == ["lost"])  # it lives, and need not make what nobody hears
        leader.hold = False
        assert await collect(cluster.client, request("after")) == [3, 2, 1]
        assert list(cluster.scheduler.groups) == ["g1"]

    run(test)


def test_a_group_that_drains_asks_its_sequences_to_move_and_gets_no_more():
    async def test():
        cluster = Cluster()
        leader, other = FakeLeader(hold=True), FakeLeader()
        await cluster.add_group(leader)
        stays = cluster.client.generate(request("stays"))
        first = asyncio.ensure_future(anext(stays))
        await until(lambda: leader.requests == ["stays"])
        assert not await cluster.client.drain_group("g0", 1.0)
        assert await cluster.client.drain_group("g1", 1.0)
        await until(lambda: leader.leaves_within == 1.0)
        outbox = leader.tokens.outbox(cluster.client.ingress_id)
        outbox.send(TokenFrame((SequenceOutput("stays", (), moving=True),)))
        assert (await first).moving and not (await first).token_ids
        await cluster.add_group(other, "g2")
        assert await collect(cluster.client, request("after")) == [3, 2, 1]
        assert other.requests == ["after"] and leader.requests == ["stays"]
        (drained,) = (g for g in (await cluster.client.stats()).groups if g.draining)
        assert drained.group_id == "g1"

        # The scheduler forgets; the group tells.
        cluster.restart_scheduler()
        handle = await cluster.add_group(leader, draining=True)
        waits = asyncio.create_task(collect(cluster.client, request("waits")))
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 1})
        assert handle and leader.requests == ["stays"]
        waits.cancel()
        await stays.aclose()

    run(test)


def test_without_a_channel_calls_go_by_ray():
    async def test():
        cluster = Cluster()
        leader = FakeLeader()
        await cluster.add_group(leader)
        assert await collect(cluster.client, request("first")) == [3, 2, 1]
        await leader.server.close()
        await cluster.scheduler.server.close()
        assert await collect(cluster.client, request("second")) == [3, 2, 1]
        assert leader.requests == ["first", "second"] and list(cluster.scheduler.groups) == ["g1"]

    run(test)


def test_a_token_may_come_before_the_word_of_where_from():
    async def test():
        cluster = Cluster()
        await cluster.add_group(FakeLeader())
        assert await collect(cluster.client, request("first")) == [3, 2, 1]  # the connection stays
        submit = cluster.scheduler.submit

        async def slowly(*args):
            news = await submit(*args)
            await asyncio.sleep(0.1)
            return news

        cluster.scheduler.submit = slowly
        assert await collect(cluster.client, request("second", range(20))) == list(range(20))[::-1]

    run(test)


def test_queued_requests_survive_the_scheduler():
    async def test():
        cluster = Cluster()
        answer = asyncio.create_task(collect(cluster.client, request("r")))
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 1})
        cluster.restart_scheduler()
        await cluster.add_group(FakeLeader())
        assert await answer == [3, 2, 1]

    run(test)


def test_requests_that_a_scheduler_has_again_pass_no_limit_again_and_keep_their_places():
    async def test():
        cluster = Cluster()
        first = asyncio.create_task(collect(cluster.client, request("first")))
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 1})
        second = asyncio.create_task(collect(cluster.client, request("second")))
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 2})
        cluster.restart_scheduler()
        cluster.scheduler.dispatcher.max_queued_requests = 1
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 2})
        with pytest.raises(Overloaded):
            await collect(cluster.client, request("third"))
        leader = FakeLeader()
        await cluster.add_group(leader)
        assert await first == await second == [3, 2, 1] and leader.requests == ["first", "second"]

    run(test)


def test_an_ingress_that_was_held_up_until_its_news_were_thrown_away_asks_again(monkeypatch):
    monkeypatch.setattr(cluster_client, "KEEP_NEWS_SECONDS", 0.01)
    monkeypatch.setattr(global_scheduler, "_POLL_SECONDS", 0.05)

    async def test():
        cluster = Cluster()
        answer = asyncio.create_task(collect(cluster.client, request("r")))
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 1})
        cluster.scheduler._forget(["r"])
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 1})
        await cluster.add_group(FakeLeader())
        assert await answer == [3, 2, 1]

    run(test)


def test_what_a_group_has_finished_is_no_word_about_what_waits():
    """After a restart of the scheduler the same request may be there twice: at a group, and waiting for one."""

    async def test():
        cluster = Cluster()
        await cluster.add_group(FakeLeader(hold=True), window=1)
        holder = asyncio.create_task(collect(cluster.client, request("holder")))
        await until(lambda: cluster.assigned() == 1)
        waits = asyncio.create_task(collect(cluster.client, request("waits")))
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 1})
        await cluster.scheduler.report(GroupReport("g1", ("waits",), None))
        assert cluster.scheduler.dispatcher.num_queued() == {"m": 1}
        await cluster.scheduler.report(GroupReport("g1", ("holder",), None))
        await until(lambda: cluster.assigned() == 2)
        for task in (holder, waits):
            task.cancel()

    run(test)


def test_a_scheduler_that_cannot_be_asked_fails_what_waits_for_it():
    async def test():
        cluster = Cluster()

        async def broken(*_):
            raise RuntimeError("a mistake of ours")

        cluster.scheduler.submit = broken
        with pytest.raises(EngineDead, match="cannot be asked"):
            await collect(cluster.client, request("r"))

    run(test)


def test_a_scheduler_that_hangs_is_started_anew(monkeypatch):
    async def test():
        cluster = Cluster()
        monkeypatch.setattr(cluster_client, "CALL_TIMEOUT", 0.1)
        monkeypatch.setattr(ray, "kill", lambda handle, no_restart: no_restart or cluster.restart_scheduler())
        hangs = cluster.scheduler
        hangs.submit = hangs.stats = hangs.assignments = lambda *_: asyncio.sleep(60)
        answer = asyncio.create_task(collect(cluster.client, request("r")))
        await until(lambda: cluster.scheduler is not hangs)
        await cluster.add_group(FakeLeader())
        assert await answer == [3, 2, 1]

    run(test)


def test_a_scheduler_that_has_ended_for_good_has_another_in_its_place(monkeypatch):
    async def test():
        cluster = Cluster()
        cluster.client = ClusterClient(Handle(cluster.scheduler), "app", 3)
        cluster.client.scheduler.kill()
        cluster.scheduler = cluster.new_scheduler()
        found = {("app", 3): Handle(cluster.scheduler)}
        monkeypatch.setattr(global_scheduler, "connect", lambda *place: found[place])
        answer = asyncio.create_task(collect(cluster.client, request("r")))
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 1})
        await cluster.add_group(FakeLeader())
        assert await answer == [3, 2, 1]

    run(test)


def test_a_scheduler_is_forgotten_after_a_time_in_which_it_ran(monkeypatch):
    async def test():
        left = []
        monkeypatch.setattr(global_scheduler, "_WATCH_SECONDS", 0.001)
        monkeypatch.setattr(global_scheduler, "FORGOTTEN_SECONDS", 0.02)
        monkeypatch.setattr(GlobalScheduler, "_leave", lambda self: left.append(self))
        scheduler = GlobalScheduler("test")
        time.sleep(0.1)  # as a process that is stopped: nobody could call it
        for _ in range(30):
            await asyncio.sleep(0.001)
            await scheduler.stats()
        assert not left
        await until(lambda: left)
        scheduler._tasks.cancel()

    run(test)


def test_news_that_got_lost_on_the_way_comes_again():
    async def test():
        cluster = Cluster()
        answer = asyncio.create_task(collect(cluster.client, request("r")))
        await until(lambda: cluster.scheduler.dispatcher.num_queued() == {"m": 1})
        take_news, lost = cluster.scheduler._take_news, []

        def lose_the_first(*args):
            news = take_news(*args)
            if news.assigned and not lost:
                lost.append(news)
                raise ray.exceptions.ActorUnavailableError("lost", None)
            return news

        cluster.scheduler._take_news = lose_the_first
        await cluster.add_group(FakeLeader())
        assert await answer == [3, 2, 1] and lost

    run(test)


def test_running_streams_do_not_notice_the_scheduler_restart():
    async def test():
        cluster = Cluster()
        await cluster.add_group(FakeLeader())
        answer = asyncio.create_task(collect(cluster.client, request("r", range(200))))
        await until(lambda: cluster.assigned() == 1)
        cluster.restart_scheduler()
        assert await answer == list(range(200))[::-1]

    run(test)


def test_a_group_that_is_given_up_before_it_had_a_request_is_heard_of():
    async def test():
        cluster = Cluster()
        answer = await held(cluster)
        await cluster.scheduler.remove_group("g1", "unanswering")  # its connection to us is as it was
        with pytest.raises(GroupLost):
            await asyncio.wait_for(answer, 5)

    run(test)


def test_a_sequence_that_nobody_has_is_aborted_at_its_group():
    async def test():
        cluster = Cluster()
        leader = FakeLeader()
        await cluster.add_group(leader)
        assert await collect(cluster.client, request("r")) == [3, 2, 1]
        leader.tokens.outbox(cluster.client.ingress_id).send(TokenFrame((SequenceOutput("stray", (1,)),)))
        await until(lambda: "stray" in leader.aborted)

    run(test)


def test_a_sequence_that_two_groups_have_goes_on_as_another():
    async def test():
        cluster = Cluster()
        answer = await held(cluster)
        cluster.client._take(Assignments("another scheduler", 1, (("r", "g2"),), (), ()))
        with pytest.raises(GroupLost):
            await answer
        await until(lambda: not cluster.scheduler.ingress_of)

    run(test)


def test_what_another_group_has_now_is_not_finished_by_the_first():
    async def test():
        cluster = Cluster()
        answer = await held(cluster)
        await cluster.add_group(FakeLeader(hold=True), "g2")
        await cluster.scheduler.report(GroupReport("g2", ("r",), None))
        assert await cluster.scheduler.num_unfinished() == 1
        await cluster.scheduler.report(GroupReport("g1", ("r",), None))
        assert await cluster.scheduler.num_unfinished() == 0
        answer.cancel()

    run(test)


def test_what_waits_for_an_ingress_that_is_gone_is_given_up(monkeypatch):
    monkeypatch.setattr(global_scheduler, "_DEAF_SECONDS", 0.1)

    async def test():
        cluster = Cluster()
        answer = asyncio.create_task(collect(cluster.client, request("r")))
        await until(lambda: cluster.client._waiter)
        cluster.client._waiter.cancel()  # it is held up, or dead
        watch = asyncio.create_task(cluster.scheduler._watch_for_ever())
        await until(lambda: not cluster.scheduler.ingress_of)
        assert cluster.scheduler.dispatcher.num_queued() == {}
        watch.cancel()
        await cluster.add_group(FakeLeader())
        assert await collect(cluster.client, request("another")) == [3, 2, 1]
        with pytest.raises(GroupLost):  # should it live: the resumption sends it again
            await answer

    run(test)


def test_a_queue_without_a_group_is_given_up_after_a_while():
    async def test():
        cluster = Cluster()
        cluster.scheduler.options = SchedulerOptions(max_queue_seconds=0.0, max_wake_seconds=0.0)
        watch = asyncio.create_task(cluster.scheduler._watch_for_ever())
        with pytest.raises(EngineDead, match="no worker group"):
            await collect(cluster.client, request("r"))
        watch.cancel()

    run(test)


def test_a_group_that_falls_silent_is_given_up():
    async def test():
        cluster = Cluster()
        await cluster.add_group(FakeLeader(hold=True))
        watch = asyncio.create_task(cluster.scheduler._watch_for_ever())
        answer = asyncio.create_task(collect(cluster.client, request("r")))
        await until(lambda: cluster.assigned() == 1)
        take_news, failed = cluster.scheduler._take_news, []  # the client acknowledges them at once

        def noted(*args):
            news = take_news(*args)
            failed.extend(request_id for request_id, _ in news.failed)
            return news

        cluster.scheduler._take_news = noted
        cluster.scheduler.last_heard["g1"] -= SILENCE_SECONDS
        await until(lambda: not cluster.scheduler.groups)
        with pytest.raises(GroupLost):
            await answer
        assert set(failed) == {"r"}
        assert (await cluster.scheduler.stats()).groups == ()
        watch.cancel()

    run(test)


def test_a_reader_that_falls_behind_is_dropped(monkeypatch):
    monkeypatch.setattr(cluster_client, "_MAX_UNREAD", 5)

    async def test():
        cluster = Cluster()
        leader = FakeLeader()
        await cluster.add_group(leader)
        outputs = cluster.client.generate(request("slow", range(300)))
        assert (await anext(outputs)).token_ids == (299,)
        other = asyncio.create_task(collect(cluster.client, request("quick", range(200))))
        await until(lambda: leader.aborted == ["slow"])
        assert cluster.client._streams["slow"].news.qsize() == 1, "what nobody reads is kept"
        with pytest.raises(ReaderTooSlow):
            await anext(outputs)
        assert await other == list(range(200))[::-1]
        assert not cluster.client._streams

    run(test)


def test_several_schedulers_share_the_tenants():
    async def test():
        tenants = tuple(Tenant(f"t{i}", max_concurrent_requests=2 if i % 2 else None) for i in range(8))
        schedulers = [Cluster.new_scheduler(shard) for shard in range(3)]
        client = ShardedClient([Handle(s) for s in schedulers], TenantDirectory(tenants))
        await client.configure(SchedulerOptions(scheduler_shards=3), tenants)
        leader = FakeLeader(hold=True)
        received = []
        add_requests = leader.add_requests

        async def noted(batch, shard):
            received.extend((r.request_id, r.tenant, shard) for _, r in batch)
            await add_requests(batch)

        leader.add_requests = noted
        for scheduler in schedulers:
            await scheduler.register_group(GroupInfo("g", "m", GroupCapacity(64), 100, Handle(leader)))
        asks = [
            asyncio.create_task(collect(client, replace(request(f"{t.name}-{i}"), tenant=t.name)))
            for t in tenants
            for i in range(2)
        ]
        await until(lambda: len(received) == 16)
        assert {(tenant, shard) for _, tenant, shard in received} == {(t.name, shard_of(t, "m", 3)) for t in tenants}
        assert len({shard for _, _, shard in received}) == 3
        with pytest.raises(RateLimited):  # whatever else it asks for, its own scheduler counts it
            await collect(client, replace(request("t1-2"), tenant="t1"))
        assert client.rate_limits.get("t0") is None

        stats = await client.stats()
        assert [g.group_id for g in stats.groups] == ["g"] and not stats.num_queued
        known = schedulers[0].groups.pop("g")  # it began anew, and has yet to hear of it
        assert not await client.drain_group("g", 5.0) and not any(s.groups["g"].draining for s in schedulers[1:])
        schedulers[0].groups["g"] = known
        assert await client.drain_group("g", 5.0) and leader.leaves_within == 5.0
        asks += [
            asyncio.create_task(collect(client, replace(request(f"{name}-late"), tenant=name))) for name in ("t0", "t2")
        ]
        await until(lambda: sum(s.dispatcher.num_queued().get("m", 0) for s in schedulers) == 2)
        assert (await client.stats()).num_queued == {"m": 2} and len(received) == 16
        for ask in asks:
            ask.cancel()

    run(test)
