"""Sequences that go on when their worker group is lost, over an engine that loses them as told."""

import asyncio
from dataclasses import replace

import pytest

from pagedray.cluster import resume
from pagedray.cluster.resume import ResumingEngine
from pagedray.scheduler.errors import (
    ContextLengthExceeded,
    EngineDead,
    GroupDrained,
    GroupLost,
    InvalidRequest,
    PagedRayError,
    ReaderTooSlow,
)
from pagedray.scheduler.request import Request, SamplingParams, SequenceOutput

ANSWER = (11, 12, 13, 14, 15)
REQUEST = Request("r", (1, 2, 3), SamplingParams(seed=0), model="m", ttft_target=9.0)


class Engine:
    """Makes `ANSWER`, each time up to where `ends` says: a number of tokens, and the error that comes then."""

    def __init__(self, *ends):
        self.ends = list(ends)
        self.requests = []
        self.num_closed = 0

    async def generate(self, request):
        self.requests.append(request)
        made = len(request.output_token_ids)
        upto, error = self.ends.pop(0) if self.ends else (len(ANSWER), None)
        try:
            for i in range(made, upto):
                last = "length" if i + 1 == len(ANSWER) else None
                cached = 2 if made == 0 else 7
                yield SequenceOutput(request.request_id, ANSWER[i : i + 1], (), last, num_cached_tokens=cached)
            if error is not None:
                raise error
        finally:
            self.num_closed += 1


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(resume, "_BACKOFF_SECONDS", 0.0)


def generate(engine, limit=3, request=REQUEST):
    resumed = []

    async def collect():
        outputs = []
        try:
            async for output in ResumingEngine(engine, limit, resumed.append).generate(request):
                outputs.append(output)
        except PagedRayError as error:
            return outputs, error
        return outputs, None

    outputs, error = asyncio.run(collect())
    return outputs, error, len(resumed)


@pytest.mark.parametrize("cuts", [(), (0,), (2,), (4,), (0, 0, 0), (1, 2, 4), (3, 3)])
def test_wherever_groups_are_lost_the_client_gets_each_token_once(cuts):
    engine = Engine(*((cut, GroupLost("gone")) for cut in cuts))
    outputs, error, num_resumed = generate(engine)
    assert error is None and num_resumed == len(cuts)
    assert tuple(t for o in outputs for t in o.token_ids) == ANSWER
    assert {o.request_id for o in outputs} == {"r"} and outputs[-1].finish_reason == "length"
    assert len({o.num_cached_tokens for o in outputs}) == 1, "usage changed half-way"
    assert engine.num_closed == len(engine.requests) == len(cuts) + 1
    for attempt, (cut, again) in enumerate(zip(cuts, engine.requests[1:], strict=True), start=1):
        assert (again.attempt, again.output_token_ids) == (attempt, ANSWER[:cut])
        assert again.request_id == f"r~{attempt}" and again.age > 0
        assert again.ttft_target == (None if cut else 9.0)


def test_a_request_that_loses_group_after_group_is_given_up():
    engine = Engine(*((1, GroupLost("gone")) for _ in range(9)))
    outputs, error, num_resumed = generate(engine, limit=2)
    assert [o.token_ids for o in outputs] == [(11,)]
    assert type(error) is EngineDead and "3 worker groups" in str(error)
    assert num_resumed == 2 and len(engine.requests) == 3


def test_an_answer_without_a_bound_ends_where_the_next_group_has_no_room_for_it():
    full = ContextLengthExceeded("it does not fit")
    endless = replace(REQUEST, sampling=SamplingParams(seed=0, max_tokens=None))
    outputs, error, _ = generate(Engine((3, GroupLost("gone")), (3, full)), request=endless)
    assert error is None and tuple(t for o in outputs for t in o.token_ids) == ANSWER[:3]
    assert [o.finish_reason for o in outputs] == [None, None, None, "length"]
    for engine, request in ((Engine((0, full)), endless), (Engine((3, GroupLost("gone")), (3, full)), REQUEST)):
        assert generate(engine, request=request)[1] is full
    slow = ReaderTooSlow("what came was thrown away")
    assert generate(Engine((3, GroupLost("gone")), (4, slow)), request=endless)[1] is slow


def test_what_is_lost_again_and_again_waits_longer_each_time_within_bounds(monkeypatch):
    monkeypatch.setattr(resume, "_BACKOFF_SECONDS", 0.25)
    waits, sleep = [], asyncio.sleep

    async def noted(seconds):
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    generate(Engine(*((1, GroupLost("gone")) for _ in range(9))), limit=9)
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def test_with_a_limit_of_none_the_first_loss_is_told():
    _, error, num_resumed = generate(Engine((2, GroupLost("gone"))), limit=0)
    assert isinstance(error, EngineDead) and num_resumed == 0


@pytest.mark.parametrize("error", [InvalidRequest("no"), EngineDead("the global scheduler cannot be reached")])
def test_other_errors_are_not_resumed(error):
    engine = Engine((2, error))
    _, raised, num_resumed = generate(engine)
    assert raised is error and num_resumed == 0 and len(engine.requests) == 1


def test_leaving_early_closes_what_runs():
    async def leave():
        engine = Engine((1, GroupLost("gone")))
        outputs = ResumingEngine(engine, 3, lambda request: None).generate(REQUEST)
        assert [(await anext(outputs)).token_ids for _ in range(3)] == [(11,), (12,), (13,)]
        await outputs.aclose()
        return engine

    engine = asyncio.run(leave())
    assert engine.num_closed == 2


class Moving:
    """Two groups: the first asks its sequences to leave after `asks_after` tokens, and ends them after `ends_after`.

    `ready` is set when the second one may answer what is only meant to make it ready.
    """

    def __init__(self, asks_after, ends_after=9, ahead_fails=()):
        self.asks_after, self.ends_after = asks_after, ends_after
        self.ahead_fails = list(ahead_fails)
        self.ready = asyncio.Event()
        self.requests = []
        self.open = set()

    async def generate(self, request):
        self.requests.append(request)
        self.open.add(request.request_id)
        made = len(request.output_token_ids)
        try:
            if "ahead" in request.request_id:
                await self.ready.wait()
                if self.ahead_fails:
                    raise self.ahead_fails.pop(0)
                assert request.sampling.max_tokens == made + 1
                yield SequenceOutput(request.request_id, (99,), finish_reason="length")
                return
            for i in range(made, len(ANSWER)):
                if request.attempt == 0 and i == self.asks_after:
                    yield SequenceOutput(request.request_id, (), moving=True)
                    yield SequenceOutput(request.request_id, (), moving=True)  # told twice, it is one wish
                if request.attempt == 0 and i == self.ends_after:
                    raise GroupDrained("its time is over")
                await asyncio.sleep(0)
                last = "length" if i + 1 == len(ANSWER) else None
                yield SequenceOutput(request.request_id, ANSWER[i : i + 1], (), last)
        finally:
            self.open.discard(request.request_id)


def move(engine, ready_after=0, limit=0):
    counts = {"resumed": 0, "moved": 0}

    def count(what):
        counts[what] += 1

    async def collect():
        resuming = ResumingEngine(
            engine, limit, lambda _: count("resumed"), lambda _: count("moved"), block_size=lambda model: 2
        )
        outputs = []
        async for output in resuming.generate(REQUEST):
            outputs.append(output)
            if len(outputs) > ready_after:
                engine.ready.set()
                for _ in range(5):
                    await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not engine.open, "something runs on"
        return outputs

    outputs = asyncio.run(collect())
    assert tuple(t for o in outputs for t in o.token_ids) == ANSWER
    assert {o.request_id for o in outputs} == {"r"} and not any(o.moving for o in outputs)
    return [r.request_id for r in engine.requests], counts


def test_a_sequence_moves_when_another_group_is_ready_and_runs_on_until_then():
    engine = Moving(asks_after=1)
    ids, counts = move(engine, ready_after=2)
    assert ids == ["r", "r~1~ahead1", "r~1"] and counts == {"resumed": 0, "moved": 1}
    ahead, again = engine.requests[1:]
    assert ahead.output_token_ids == ANSWER[:1] and again.output_token_ids == ANSWER[:3]
    assert len(again.block_hashes) == 3, "of all six tokens: what is found need not be computed"
    assert again.block_hashes[:2] == ahead.block_hashes


def test_another_group_is_made_ready_again_until_little_is_left(monkeypatch):
    """Rounds begin when a block (of two tokens) has just become full, and there are three of them at most."""
    monkeypatch.setitem(globals(), "ANSWER", tuple(range(11, 41)))
    monkeypatch.setattr(resume, "_FEW_TOKENS", 1)
    engine = Moving(asks_after=1)
    ids, counts = move(engine, ready_after=5)
    assert ids == ["r", "r~1~ahead1", "r~1~ahead2", "r~1"] and counts == {"resumed": 0, "moved": 1}
    lengths = [len(r.output_token_ids) for r in engine.requests[1:]]
    assert lengths[0] == 1 and (3 + lengths[1]) % 2 == 0 and lengths[1] >= 5 and lengths[2] == lengths[1] + 1
    monkeypatch.setattr(resume, "_FEW_TOKENS", 0)
    engine = Moving(asks_after=1)
    assert move(engine)[0] == ["r", *(f"r~1~ahead{i}" for i in (1, 2, 3)), "r~1"]


def test_a_sequence_that_ends_before_another_group_is_ready_stays():
    ids, counts = move(Moving(asks_after=1), ready_after=99)
    assert ids == ["r", "r~1~ahead1"] and counts == {"resumed": 0, "moved": 0}


def test_a_sequence_without_a_token_moves_at_once():
    ids, counts = move(Moving(asks_after=0))
    assert ids == ["r", "r~1"] and counts["moved"] == 1


def test_a_group_that_is_lost_while_it_is_made_ready_is_not_the_last():
    ids, counts = move(Moving(asks_after=1, ahead_fails=[GroupLost("gone")]), limit=1)
    assert ids == ["r", "r~1~ahead1", "r~1~ahead2", "r~1"] and counts["moved"] == 1


def test_a_request_that_kills_whatever_is_made_ready_for_it_is_not_sent_on_for_ever():
    deaths = [GroupDrained("it leaves, too"), *[GroupLost("gone")] * 9]
    ids, counts = move(Moving(asks_after=1, ahead_fails=deaths), limit=2)
    assert ids == ["r", *(f"r~1~ahead{i}" for i in (1, 2, 3, 4))] and counts["moved"] == 0


def test_where_no_group_can_be_made_ready_the_sequence_stays():
    ids, counts = move(Moving(asks_after=1, ahead_fails=[EngineDead("no group could take it")]))
    assert ids == ["r", "r~1~ahead1"] and counts["moved"] == 0


def test_a_group_whose_time_is_over_is_no_loss_that_counts():
    ids, counts = move(Moving(asks_after=1, ends_after=3), ready_after=99, limit=0)
    assert ids == ["r", "r~1~ahead1", "r~1"] and counts == {"resumed": 1, "moved": 0}


def test_leaving_early_ends_what_was_asked_of_another_group():
    async def leave():
        engine = Moving(asks_after=1)
        outputs = ResumingEngine(engine, 3, lambda request: None).generate(REQUEST)
        await anext(outputs)
        await anext(outputs)
        assert engine.open == {"r", "r~1~ahead1"}
        await outputs.aclose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return engine

    assert not asyncio.run(leave()).open
