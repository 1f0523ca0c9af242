"""The global scheduler's state: bounds, order, groups that come and go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.scheduler.dispatcher import Dispatcher
from pagedray.scheduler.errors import Overloaded
from pagedray.scheduler.request import Request, SamplingParams


def request(name, model="m", priority=0):
    return Request(str(name), (1, 2), SamplingParams(seed=0), model=model, priority=priority)


def ids(batches):
    return {group: [r.request_id for r in batch] for group, batch in batches.items()}


def test_requests_wait_for_a_group_and_go_to_the_emptiest():
    d = Dispatcher()
    d.submit(request("a"), 0.0)
    assert d.dispatch() == {}
    d.add_group("g1", "m", window=4, now=0.0)
    d.add_group("other", "another model", window=4, now=0.0)
    assert ids(d.dispatch()) == {"g1": ["a"]}
    d.add_group("g2", "m", window=4, now=0.0)
    for name in "bcd":
        d.submit(request(name), 1.0)
    assert ids(d.dispatch()) == {"g2": ["b", "d"], "g1": ["c"]}
    d.check_integrity()


def test_the_queue_is_bounded_and_a_repeated_request_is_one():
    d = Dispatcher(max_queued_requests=2)
    d.submit(request("a"), 0.0)
    d.submit(request("a"), 0.0)
    d.submit(request("b"), 0.0)
    with pytest.raises(Overloaded):
        d.submit(request("c"), 0.0)
    d.submit(request("x", model="other"), 0.0)  # a bound per model
    assert d.num_queued() == {"m": 2, "other": 1}


def test_a_full_group_gets_no_more_but_a_higher_priority_passes():
    d = Dispatcher()
    d.add_group("g", "m", window=2, now=0.0)
    for name in "abc":
        d.submit(request(name, priority=5), 0.0)
    assert ids(d.dispatch()) == {"g": ["a", "b"]}
    d.submit(request("urgent"), 1.0)
    assert ids(d.dispatch()) == {"g": ["urgent"]}
    d.finished(["a", "b", "urgent"])
    assert ids(d.dispatch()) == {"g": ["c"]}


def test_a_lost_group_names_what_it_took_along():
    d = Dispatcher()
    d.add_group("g", "m", window=8, now=0.0)
    for name in "ab":
        d.submit(request(name), 0.0)
    d.dispatch()
    d.submit(request("c"), 0.0)
    assert sorted(d.remove_group("g")) == ["a", "b"]
    assert d.remove_group("g") == []
    assert d.num_queued() == {"m": 1}
    d.check_integrity()


def test_a_group_that_registers_again_keeps_its_requests():
    d = Dispatcher()
    d.submit(request("resent"), 0.0)
    d.add_group("g", "m", window=8, now=0.0, running=[request("resent"), request("running")])
    assert d.dispatch() == {}
    assert d.group_of("running") == d.group_of("resent") == "g"
    d.check_integrity()


def test_a_request_that_another_group_took_meanwhile_stays_there():
    d = Dispatcher()
    d.add_group("new", "m", window=8, now=0.0)
    d.submit(request("resent"), 0.0)
    d.dispatch()
    assert d.add_group("old", "m", 8, 1.0, [request("resent"), request("own")]) == ["resent"]
    assert (d.group_of("resent"), d.group_of("own")) == ("new", "old")
    d.check_integrity()


def test_what_waits_too_long_is_dropped():
    d = Dispatcher()
    d.submit(request("old"), 0.0)
    d.submit(request("new"), 9.0)
    assert d.expire(arrived_before=5.0) == ["old"]
    assert d.num_queued() == {"m": 1}


events = st.lists(
    st.tuples(st.sampled_from(["submit", "cancel", "finish", "up", "down", "dispatch"]), st.integers(0, 9)), max_size=60
)


@given(events)
@settings(max_examples=200, deadline=None)
def test_no_request_is_lost_or_doubled(events):
    d = Dispatcher(max_queued_requests=6)
    known, placed = set(), {}
    for step, (event, n) in enumerate(events):
        if event == "submit":
            try:
                d.submit(request(n, priority=n % 3), float(step))
                known.add(str(n))
            except Overloaded:
                assert d.num_queued()["m"] == 6
        elif event in ("cancel", "finish"):
            if event == "cancel":
                assert d.cancel(str(n)) == placed.get(str(n))
            else:
                d.finished([str(n)])
            known.discard(str(n))
            placed.pop(str(n), None)
        elif event == "up" and not d.has_group(f"g{n % 3}"):
            d.add_group(f"g{n % 3}", "m", window=2, now=0.0)
        elif event == "down":
            for lost in d.remove_group(f"g{n % 3}"):
                assert placed.pop(lost) == f"g{n % 3}"
                known.discard(lost)
        elif event == "dispatch":
            for group, batch in d.dispatch().items():
                for r in batch:
                    assert r.request_id in known and r.request_id not in placed
                    placed[r.request_id] = group
        d.check_integrity()
        assert d.num_queued().get("m", 0) + len(placed) == len(known)
