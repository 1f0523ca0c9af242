"""Sequences that go on when their worker group is lost, over an engine that loses them as told."""

import asyncio

import pytest

from pagedray.cluster import resume
from pagedray.cluster.resume import ResumingEngine
from pagedray.scheduler.errors import EngineDead, GroupLost, InvalidRequest, PagedRayError
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


def generate(engine, limit=3):
    resumed = []

    async def collect():
        outputs = []
        try:
            async for output in ResumingEngine(engine, limit, resumed.append).generate(REQUEST):
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
