"""How many groups a model has: bounds, no flapping, reactions in time, sleep and waking; and a simulated day."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.scheduler.autoscaling import Demand, Scaler, ScalingOptions
from pagedray.scheduler.cost_model import CostModel
from pagedray.scheduler.dispatcher import Dispatcher
from pagedray.scheduler.errors import ConfigError, EngineDead
from pagedray.scheduler.placement import GroupCapacity, GroupLoad
from pagedray.scheduler.request import Request, SamplingParams
from pagedray.scheduler.simulation.group import GroupSpec
from pagedray.scheduler.simulation.scaling import ScalingSimulation
from pagedray.scheduler.simulation.traces import TraceRequest

OPTIONS = ScalingOptions(min_groups=1, max_groups=8, utilization=0.5, upscale_delay=3.0, downscale_delay=60.0)


def load(groups, num_groups=8, **fields):
    """A demand that needs so many groups, for prefill."""
    return Demand(num_groups=num_groups, num_running=1, work_rate=OPTIONS.utilization * groups, **fields)


def run(scaler, demand, target, seconds, start=0.0, step=1.0):
    """The targets, one a step, with groups that are there at once."""
    targets = []
    for i in range(int(seconds / step) + 1):
        target = scaler.decide(replace(demand, num_groups=target), target, start + i * step).num_groups
        scaler.check_integrity()
        targets.append(target)
    return targets


# -- what a load needs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("demand", "need", "reason"),
    [
        (Demand(work_rate=1.0), 2.0, "prefill"),
        (Demand(backlog_seconds=60.0), 2.0, "prefill"),  # a start takes 30 s
        (Demand(work_rate=1.0, backlog_seconds=30.0), 3.0, "prefill"),
        (Demand(kv_tokens=2400.0, kv_tokens_per_group=1000.0), 3.0, "kv"),
        (Demand(num_queued=10, num_running=6, seqs_per_group=8), 2.5, "slots"),
        (Demand(), 0.0, "slots"),
    ],
)
def test_need_is_the_largest_of_prefill_kv_and_slots(demand, need, reason):
    assert Scaler(OPTIONS).need(demand) == (pytest.approx(need), reason)


def test_late_first_tokens_ask_for_one_more_only_where_they_waited_for_long():
    late = {"ttft": 5.0, "num_queued": 3}
    for fields, expected in (
        ({**late, "wait": 4.0}, 3),
        ({**late, "wait": 1.0}, 2),  # their own prefill takes so long
        ({**late, "wait": 4.0, "num_queued": 0}, 2),  # it is over
        ({**late, "wait": 2.0, "ttft": 2.1}, 2),
    ):
        scaler = Scaler(OPTIONS, startup_seconds=20.0)
        assert run(scaler, load(1.5, **fields), 2, 18)[-1] == 2
        assert run(scaler, load(1.5, **fields), 2, 10, start=19.0)[-1] == expected


def test_what_was_too_few_for_a_load_is_not_tried_again_until_it_is_less():
    scaler = Scaler(OPTIONS, startup_seconds=3.0)
    assert run(scaler, load(1.5, ttft=5.0, wait=4.0, num_queued=1), 2, 8)[-1] == 3
    assert set(run(scaler, load(1.5), 3, 1000, start=9)) == {3}
    assert run(scaler, load(1.2), 3, 61, start=1010)[-1] == 2


def test_groups_that_are_on_their_way_are_waited_for():
    scaler = Scaler(OPTIONS, startup_seconds=3.0)
    late = load(1.5, num_groups=2, ttft=9.0, wait=9.0, num_queued=1)
    targets = [2]
    for now in range(60):
        targets.append(scaler.decide(late, targets[-1], float(now)).num_groups)
    assert targets[-1] == 3, "late because of what there is, not of what comes"


def test_a_start_that_took_longer_is_counted_on():
    scaler = Scaler(OPTIONS)
    assert [scaler.decide(load(2.0, num_groups=1), 1, float(t)).num_groups for t in range(4)][-1] == 2
    scaler.decide(load(2.0, num_groups=2), 2, 93.0)
    assert scaler.startup_seconds == pytest.approx(60.0)
    assert scaler.need(Demand(backlog_seconds=60.0))[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong", [{"min_groups": 2}, {"max_groups": 0, "min_groups": 0}, {"utilization": 0.0}, {"ttft_target": 0.0}]
)
def test_options_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError):
        ScalingOptions(**wrong)


# -- properties --------------------------------------------------------------------------------------------------------

demands = st.builds(
    Demand,
    num_groups=st.integers(0, 12),
    num_queued=st.integers(0, 2000),
    num_running=st.integers(0, 2000),
    work_rate=st.floats(0, 50),
    backlog_seconds=st.floats(0, 10_000),
    kv_tokens=st.floats(0, 1e7),
    kv_tokens_per_group=st.sampled_from([math.inf, 1e4, 1e6]),
    seqs_per_group=st.sampled_from([math.inf, 8, 256]),
    ttft=st.none() | st.floats(0, 100),
    wait=st.none() | st.floats(0, 100),
    idle_seconds=st.floats(0, 1000),
)


@given(
    st.lists(st.tuples(demands, st.floats(0.0, 100.0)), max_size=40),
    st.integers(0, 3),
    st.integers(3, 9),
    st.integers(0, 20),
    st.floats(0, 20),
    st.floats(0, 200),
)
@settings(max_examples=200, deadline=None)
def test_never_outside_the_bounds(steps, least, most, target, up, down):
    scaler = Scaler(ScalingOptions(least, most, upscale_delay=up, downscale_delay=down, idle_delay=down))
    now = 0.0
    for demand, seconds in steps:
        now += seconds
        before, target = target, scaler.decide(demand, target, now).num_groups
        scaler.check_integrity()
        assert least <= target <= most
        if target == 0 and before > 0:
            assert before == 1 and not demand.num_queued and not demand.num_running
        if before == 0 and least == 0:
            assert target == min(1, demand.num_queued)


@given(
    st.floats(0.01, 9.0),
    st.lists(st.floats(-1.0, 1.0), min_size=400, max_size=400),
    st.integers(1, 8),
    st.sampled_from([0.3, 1.0, 2.5]),
)
@settings(max_examples=60, deadline=None)
def test_no_flapping_while_the_load_varies_by_the_tolerance(groups, noise, target, step):
    scaler = Scaler(OPTIONS)
    targets = [target]
    for i, n in enumerate(noise):
        demand = load(groups * (1.0 + OPTIONS.tolerance * n), num_groups=targets[-1])
        targets.append(scaler.decide(demand, targets[-1], i * step).num_groups)
    changes = [b - a for a, b in zip(targets, targets[1:], strict=False) if a != b]
    assert all(c > 0 for c in changes) or all(c < 0 for c in changes), targets
    final = max(1, min(8, math.ceil(groups)))
    assert targets[-1] == final or abs(groups - round(groups)) <= 2 * OPTIONS.tolerance * groups


@given(st.floats(0.01, 9.0), st.floats(0.01, 9.0), st.integers(1, 8), st.floats(0.0, 300.0))
@settings(max_examples=100, deadline=None)
def test_reactions_are_bounded(before, after, target, when):
    """Up within its delay, down within its own, whatever came before; a second or two are for the steps."""
    scaler = Scaler(OPTIONS)
    target = run(scaler, load(before), target, when)[-1]
    targets = run(scaler, load(after), target, OPTIONS.downscale_delay + 3.0, start=math.floor(when) + 1.0)
    least = max(1, min(8, math.ceil(after / (1 + OPTIONS.tolerance) - 1e-9)))
    most = max(1, min(8, math.ceil(after / (1 - OPTIONS.tolerance) - 1e-9)))
    assert all(t >= least for t in targets[int(OPTIONS.upscale_delay) + 2 :])
    assert least <= targets[-1] <= max(least, most)
    floor = min(target, most)
    assert all(t >= min(floor, least) for t in targets), "never fewer than both loads need"


# -- sleep -------------------------------------------------------------------------------------------------------------

SLEEPY = replace(OPTIONS, min_groups=0, idle_delay=100.0)


def test_a_model_sleeps_when_nobody_wants_it_and_wakes_at_once():
    scaler = Scaler(SLEEPY)
    assert run(scaler, load(0.001), 1, 1000)[-1] == 1, "somebody uses it, however little"
    targets = []
    target = 1
    for i in range(200):
        target = scaler.decide(Demand(num_groups=target, idle_seconds=float(i)), target, 1001.0 + i).num_groups
        targets.append(target)
    assert targets.index(0) == 100 and set(targets[100:]) == {0}
    decision = scaler.decide(Demand(num_queued=3), 0, 1300.0)
    assert (decision.num_groups, decision.reason) == (1, "wake")


def test_what_is_there_goes_to_one_before_it_sleeps():
    targets = run(Scaler(SLEEPY), Demand(idle_seconds=500.0), 5, 70)
    assert sorted(set(targets), reverse=True) == [5, 1, 0]


# -- what the dispatcher says ------------------------------------------------------------------------------------------


def ask(name, num_tokens=1000, **fields):
    return Request(str(name), tuple(range(num_tokens)), SamplingParams(seed=0, max_tokens=100), "m", **fields)


SLOW = CostModel(base=0.0, token=1e-3)


def test_demand_of_a_model_without_a_group():
    d = Dispatcher()
    assert d.demand("m", 5.0) == Demand(), "nobody has asked for it"
    assert d.demand("m", 25.0).idle_seconds == 20.0
    d.submit(ask("a"), 30.0)
    demand = d.demand("m", 30.0)
    assert (demand.num_groups, demand.num_queued, demand.idle_seconds) == (0, 1, 0.0)
    assert demand.kv_tokens == 1100
    d.check_integrity()


def test_demand_counts_measured_prefill_kv_and_slots():
    d = Dispatcher()
    for name in ("g", "h"):
        d.add_group(name, "m", GroupCapacity(8, 4, kv_tokens=5000), 0.0, cost=SLOW)
    d.report("g", GroupLoad(0, backlog_seconds=2.0, kv_tokens_used=700, cost=SLOW), 1.0)
    for i in range(3):
        d.submit(ask(i), 1.0)
    assert d.demand("m", 1.0).work_rate == pytest.approx(3 * 1.0 / 30, rel=0.05)
    d.dispatch(1.0)
    demand = d.demand("m", 1.0)
    assert demand.num_groups == 2 and demand.num_queued + demand.num_running == 3
    assert demand.backlog_seconds == pytest.approx(5.0, rel=0.05)
    assert demand.kv_tokens == 700 + 3 * 1100
    assert (demand.kv_tokens_per_group, demand.seqs_per_group) == (5000, 4)
    d.drain_group("g")
    assert d.demand("m", 1.0) == replace(demand, num_groups=1), "what is there still has to be done"
    assert d.demand("other", 1.0).num_groups == 0


def test_lateness_is_of_requests_that_came_after_the_last_group():
    d = Dispatcher()
    for i in range(20):
        d.submit(ask(f"early{i}"), 0.0)
    d.add_group("g", "m", GroupCapacity(64, 64), 50.0, cost=SLOW)
    for i in range(20):
        d.dispatch(50.0 + i)
    assert d.demand("m", 70.0).num_queued == 0 and d.demand("m", 70.0).ttft is None
    for i in range(20):
        d.submit(ask(f"late{i}", 100), 100.0 + i)
        assert d.dispatch(100.0 + i)
    demand = d.demand("m", 120.0)
    assert demand.ttft == pytest.approx(0.1) and demand.wait == pytest.approx(0.0)
    assert d.demand("m", 240.0).ttft is None, "that was long ago"


def test_a_request_waits_for_a_model_to_wake_and_then_for_its_turn():
    d = Dispatcher()
    d.submit(ask("a"), 0.0)
    assert d.expire(200.0, 120.0, 300.0) == []
    ((name, error),) = d.expire(301.0, 120.0, 300.0)
    assert name == "a" and isinstance(error, EngineDead) and "300" in str(error)
    d.submit(ask("b"), 400.0)
    d.add_group("g", "m", GroupCapacity(0), 690.0)  # one that takes nothing
    assert d.expire(800.0, 120.0, 300.0) == []
    ((name, _),) = d.expire(811.0, 120.0, 300.0)
    assert name == "b"
    d.check_integrity()


def test_a_model_that_cannot_start_is_refused_until_a_group_comes():
    d = Dispatcher()
    d.submit(ask("a"), 0.0)
    d.submit(replace(ask("b"), model="other"), 0.0)
    ((name, error),) = d.fail_model("m", "no such file")
    assert name == "a" and "no such file" in str(error)
    with pytest.raises(EngineDead, match="no such file"):
        d.submit(ask("c"), 1.0)
    assert d.failures() == {"m": "no such file"} and d.num_queued() == {"other": 1}
    d.add_group("g", "m", GroupCapacity(4), 2.0)
    d.submit(ask("d"), 2.0)
    d.check_integrity()
    assert d.fail_model("m", "another group could not start") == [] and d.failures() == {}
    d.check_integrity()


def test_a_start_that_fails_for_a_passing_reason_is_waited_for():
    d = Dispatcher()
    d.submit(ask("a"), 0.0)
    assert d.fail_model("m", "a rank was lost", final=False, num_tries=2) == [] and d.failures() == {}
    assert [name for name, _ in d.fail_model("m", "again", final=False, num_tries=2)] == ["a"]
    d.mend_model("m")
    d.submit(ask("b"), 0.0)
    d.add_group("g", "m", GroupCapacity(0), 1.0)
    d.remove_group("g")
    for _ in range(3):
        assert d.fail_model("m", "who has served is built until it works", final=False, num_tries=1) == []
    assert [name for name, _ in d.fail_model("m", "the file is gone")] == ["b"]
    d.check_integrity()


# -- simulated ---------------------------------------------------------------------------------------------------------

SPEC = GroupSpec("test", CostModel(4e-3, 2e-4, 0.0, 1e-4, 1e-8), kv_tokens=200_000, max_num_seqs=64)


def day(phases, seed=0):
    """Requests of about 1,000 tokens (0.2 s of prefill) at the rates of (seconds, requests a second)."""
    draw = random.Random(seed)
    trace, begin = [], 0.0
    for seconds, rate in phases:
        at = begin
        while rate and (at := at + draw.expovariate(rate)) < begin + seconds:
            trace.append(TraceRequest(at, draw.randrange(500, 1500), draw.randrange(5, 40), ()))
        begin += seconds
    return trace


def test_a_simulated_day():
    """Little, then six times as much, then nothing, then a little again."""
    trace = day([(200, 1.0), (600, 8.0), (400, 0.2), (300, 0.0), (100, 1.0)])
    options = ScalingOptions(0, 8, upscale_delay=3.0, downscale_delay=120.0, idle_delay=60.0)
    simulation = ScalingSimulation(trace, 0, SPEC, Dispatcher, options=options, startup_seconds=20.0)
    result = simulation.run()
    assert len(result.outcomes) == len(trace) and all(o.error is None for o in result.outcomes)
    changes = [(at, d.num_groups) for at, d in simulation.decisions]
    assert changes[0][1] == 1 and changes[0][0] <= trace[0].arrival + 1.0
    busy = [num for at, num in changes if 200 <= at < 800]
    assert 2 <= max(busy) <= 5 and len(busy) <= 5, changes
    assert max(at for at, num in changes if num == max(busy)) < 300, "as many as it takes, soon"
    steady = [o.ttft for o in result.outcomes if 300 <= o.arrival < 800]
    assert sorted(steady)[int(0.95 * len(steady))] < options.ttft_target
    assert [num for at, num in changes if 1200 <= at < 1500][-1] == 0, "asleep"
    woken = min((o for o in result.outcomes if o.arrival > 1500), key=lambda o: o.arrival)
    assert 20.0 <= woken.ttft < 23.0
    assert simulation.group_seconds < 0.75 * 1600 * max(busy)
