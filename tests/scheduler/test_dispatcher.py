"""The global scheduler's state: bounds, order, groups that come and go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.scheduler.cost_model import CostModel
from pagedray.scheduler.dispatcher import Dispatcher, DispatchOptions, _too_late
from pagedray.scheduler.errors import DeadlineUnmeetable, EngineDead, ModelNotFound, Overloaded, RateLimited
from pagedray.scheduler.placement import GroupCapacity, GroupLoad
from pagedray.scheduler.prefix_index import BlockEvents
from pagedray.scheduler.request import Request, SamplingParams
from pagedray.scheduler.tenants import Quotas, Tenant, TenantDirectory


def request(name, model="m", priority=0):
    return Request(str(name), (1, 2), SamplingParams(seed=0), model=model, priority=priority)


def ids(batches):
    return {group: [r.request_id for r in batch] for group, batch in batches.items()}


def test_requests_wait_for_a_group_and_go_to_the_emptiest():
    d = Dispatcher()
    d.submit(request("a"), 0.0)
    assert d.dispatch(1.0) == {}
    d.add_group("g1", "m", GroupCapacity(window=4), now=0.0)
    d.add_group("other", "another model", GroupCapacity(window=4), now=0.0)
    assert ids(d.dispatch(1.0)) == {"g1": ["a"]}
    d.add_group("g2", "m", GroupCapacity(window=4), now=0.0)
    for name in "bcd":
        d.submit(request(name), 1.0)
    assert ids(d.dispatch(1.0)) == {"g2": ["b", "d"], "g1": ["c"]}
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
    d.add_group("g", "m", GroupCapacity(window=2), now=0.0)
    for name in "abc":
        d.submit(request(name, priority=5), 0.0)
    assert ids(d.dispatch(1.0)) == {"g": ["a", "b"]}
    d.submit(request("urgent"), 1.0)
    assert ids(d.dispatch(1.0)) == {"g": ["urgent"]}
    d.finished(["a", "b", "urgent"])
    assert ids(d.dispatch(1.0)) == {"g": ["c"]}


def test_a_lost_group_names_what_it_took_along():
    d = Dispatcher()
    d.add_group("g", "m", GroupCapacity(window=8), now=0.0)
    for name in "ab":
        d.submit(request(name), 0.0)
    d.dispatch(1.0)
    d.submit(request("c"), 0.0)
    assert sorted(d.remove_group("g")) == ["a", "b"]
    assert d.remove_group("g") == []
    assert d.num_queued() == {"m": 1}
    d.check_integrity()


def test_a_group_that_drains_keeps_what_it_has_and_gets_no_more():
    d = Dispatcher()
    for name in ("g1", "g2"):
        d.add_group(name, "m", GroupCapacity(window=8), now=0.0)
    d.submit(request("a"), 0.0)
    ((group, _),) = ids(d.dispatch(1.0)).items()
    other = {"g1": "g2", "g2": "g1"}[group]
    d.drain_group(group)
    for name in "bcd":
        d.submit(request(name), 1.0)
    assert ids(d.dispatch(1.0)) == {other: ["b", "c", "d"]}
    d.drain_group(other)
    d.submit(request("e"), 2.0)
    assert d.dispatch(2.0) == {} and d.group_of("a") == group, "with no group left, it waits"
    d.remove_group(group)
    d.add_group("new", "m", GroupCapacity(window=8), now=3.0)
    assert ids(d.dispatch(3.0)) == {"new": ["e"]}
    d.check_integrity()


def test_the_prefixes_of_a_group_that_drains_draw_nobody_there():
    d = Dispatcher()
    chain = tuple(b"%016d" % i for i in range(10))
    for name in ("warm", "cold"):
        d.add_group(name, "m", GroupCapacity(window=8), now=0.0, cost=SLOW)
    assert d.block_events("warm", BlockEvents(1, b"".join(chain), snapshot=True))
    d.submit(long("a", 200, hashes=chain), 0.0)
    assert ids(d.dispatch(0.0)) == {"warm": ["a"]}
    d.drain_group("warm")
    d.submit(long("b", 200, hashes=chain), 0.0)
    assert ids(d.dispatch(0.0)) == {"cold": ["b"]}
    d.check_integrity()


def test_a_group_that_registers_again_keeps_its_requests():
    d = Dispatcher()
    d.submit(request("resent"), 0.0)
    d.add_group("g", "m", GroupCapacity(window=8), now=0.0, running=[request("resent"), request("running")])
    assert d.dispatch(1.0) == {}
    assert d.group_of("running") == d.group_of("resent") == "g"
    d.check_integrity()


def test_a_request_that_another_group_took_meanwhile_stays_there():
    d = Dispatcher()
    d.add_group("new", "m", GroupCapacity(window=8), now=0.0)
    d.submit(request("resent"), 0.0)
    d.dispatch(1.0)
    assert d.add_group("old", "m", GroupCapacity(8), 1.0, [request("resent"), request("own")]) == ["resent"]
    assert (d.group_of("resent"), d.group_of("own")) == ("new", "old")
    d.check_integrity()


def test_what_waits_too_long_is_dropped():
    d = Dispatcher()
    d.submit(request("old"), 0.0)
    d.submit(request("new"), 9.0)
    ((name, error),) = d.expire(now=105.0, max_queue_seconds=100.0)
    assert name == "old" and isinstance(error, EngineDead)
    assert d.num_queued() == {"m": 1}


def long(name, num_tokens=1000, tenant="default", hashes=(), **fields):
    sampling = SamplingParams(seed=0, max_tokens=10)
    return Request(str(name), tuple(range(num_tokens)), sampling, "m", tenant=tenant, block_hashes=hashes, **fields)


SLOW = CostModel(base=0.0, token=1e-3)  # a second for 1000 tokens


def groups(d, *names, window=8, **capacity):
    for name in names:
        d.add_group(name, "m", GroupCapacity(window, **capacity), 0.0, cost=SLOW)


def test_a_warm_group_is_preferred_until_its_queue_costs_more():
    d = Dispatcher()
    groups(d, "cold", "warm", window=64)
    hashes = tuple(b"%016d" % i for i in range(60))  # 960 of 1000 tokens, in blocks of 16
    assert d.block_events("warm", BlockEvents(1, b"".join(hashes)))
    placed = []
    for i in range(40):
        d.submit(long(i, hashes=hashes), 0.0)
        placed += [g for g, batch in d.dispatch(0.0).items() for _ in batch]
    assert placed == ["warm"] * len(placed) and placed
    assert d.num_queued() == {"m": 40 - len(placed)}  # the others wait for it: half a second is cheaper than a second
    assert 0.0 < d.next_dispatch_at < 0.1
    d.check_integrity()


def test_a_hot_prefix_spreads_and_the_decision_itself_makes_a_holder():
    d = Dispatcher()
    groups(d, "g1", "g2", window=64)
    hashes = tuple(b"%016d" % i for i in range(60))
    d.block_events("g1", BlockEvents(1, b"".join(hashes[:30])))
    for i in range(12):
        d.submit(long(i, hashes=hashes), 0.0)
    now, placed = 0.0, []
    while len(placed) < 12 and now < 60:
        placed += [g for g, batch in d.dispatch(now).items() for _ in batch]
        now = max(d.next_dispatch_at, now + 0.01)
    assert placed[0] == "g1" and d.index.num_held("g1", hashes) == 60
    assert {"g1", "g2"} >= set(placed) and len(placed) == 12
    d.finished([str(i) for i in range(12)], now)
    assert d.index.num_held("g1", hashes) == 30  # the group never told of the rest
    d.check_integrity()


def test_reports_are_doubted_the_older_they_get():
    d = Dispatcher()
    groups(d, "fresh", "silent")
    d.report("fresh", GroupLoad(0, backlog_seconds=0.04, cost=SLOW), 5.0)
    d.submit(long("r"), 5.0)
    assert ids(d.dispatch(5.0)) == {"fresh": ["r"]}


def test_a_report_counts_what_was_still_on_its_way():
    d = Dispatcher()
    groups(d, "g1", "g2")
    d.submit(long("a", 400), 0.0)
    assert ids(d.dispatch(0.0)) == {"g1": ["a"]}
    d.report("g1", GroupLoad(0), 0.01)  # it had not got it yet
    d.submit(long("b", 400), 0.01)
    assert ids(d.dispatch(0.01)) == {"g2": ["b"]}
    d.report("g1", GroupLoad(1), 0.02)  # now it had, and nothing is left of it
    d.submit(long("c", 400), 0.02)
    assert ids(d.dispatch(0.02)) == {"g1": ["c"]}


def test_what_cannot_be_in_time_is_refused_early():
    d = Dispatcher()
    groups(d, "g")
    with pytest.raises(DeadlineUnmeetable, match="after about 1.00 s; ttft_target is 0.5 s") as refused:
        d.submit(long("hopeless", ttft_target=0.5), 0.0)
    assert refused.value.retry_after >= 1.0
    d.submit(long("first", ttft_target=1.5), 0.0)
    assert ids(d.dispatch(0.0)) == {"g": ["first"]}
    d.report("g", GroupLoad(1, backlog_seconds=1.0), 0.1)
    d.submit(long("second", ttft_target=2.5), 0.1)
    assert d.dispatch(0.1) == {} and d.take_refused() == []
    d.report("g", GroupLoad(1, backlog_seconds=3.0), 0.2)  # slower than it seemed
    assert d.dispatch(0.2) == {}
    assert [name for name, _ in d.take_refused()] == ["second"]
    assert d.num_queued() == {} and d.take_refused() == []
    d.check_integrity()


def test_a_full_group_refuses_a_deadline_in_finite_time():
    d = Dispatcher()
    groups(d, "g", window=1)
    d.submit(long("first"), 0.0)
    d.dispatch(0.0)
    for i in range(4):  # until there is no room at all
        try:
            d.submit(long(f"more {i}", ttft_target=1e9), 0.0)
        except DeadlineUnmeetable as refused:
            assert "no group has room" in str(refused) and refused.retry_after == 60.0
    assert _too_late(float("inf"), 1.0).retry_after == 60.0


def test_a_model_that_has_served_may_be_woken_again_after_a_failure():
    d = Dispatcher()
    groups(d, "g")
    d.remove_group("g")
    d.fail_model("m", "the hub does not answer", now=10.0)
    with pytest.raises(EngineDead, match="the hub does not answer"):
        d.submit(long("soon", 10), 60.0)
    d.submit(long("later", 10), 70.0)
    assert d.num_queued() == {"m": 1}
    d = Dispatcher()
    d.fail_model("m", "no such model", now=10.0)
    with pytest.raises(EngineDead):
        d.submit(long("ever", 10), 1e6)


def tenants(*declared, **options):
    return Dispatcher(quotas=Quotas(TenantDirectory(declared)), **options)


def test_a_tenants_limits_hold_and_a_refusal_leaves_no_trace():
    d = tenants(Tenant("t", max_concurrent_requests=2, requests_per_minute=3, models=("m",)))
    groups(d, "g")
    d.submit(long(1, 10, "t"), 0.0)
    d.submit(long(2, 10, "t"), 0.0)
    with pytest.raises(RateLimited, match="2 concurrent"):
        d.submit(long(3, 10, "t"), 0.0)
    d.dispatch(0.0)
    d.finished(["1"], 1.0)
    d.submit(long(3, 10, "t"), 1.0)
    d.finished(["2"], 1.0)
    with pytest.raises(RateLimited, match="3 requests per minute") as refused:
        d.submit(long(4, 10, "t"), 2.0)
    assert refused.value.retry_after == 58.0 and d.rate_limits("t", 2.0).remaining_requests == 0
    d.submit(long(4, 10, "t"), 60.5)
    d.submit(long(4, 10, "t"), 60.5)  # known: not counted again
    with pytest.raises(ModelNotFound):
        d.submit(request("x", model="other").__class__("x", (1,), SamplingParams(), "other", tenant="t"), 61.0)
    d.check_integrity()


def test_tokens_are_charged_as_they_may_be_used_and_settled_as_they_were():
    d = tenants(Tenant("t", tokens_per_minute=1000))
    groups(d, "g")
    left = lambda: d.rate_limits("t", 0.0).remaining_tokens  # noqa: E731

    def ask(name, max_tokens, **resumed):
        d.submit(Request(name, (1,) * 100, SamplingParams(max_tokens=max_tokens), "m", tenant="t", **resumed), 0.0)

    ask("said", 300)
    assert left() == 600
    ask("not said", None)  # the usual answer is 256 tokens
    assert left() == 244
    with pytest.raises(RateLimited, match="756 used, 1000 asked"):
        ask("much", 3899)
    d.dispatch(0.0)
    assert d.cancel("said") == "g" and left() == 244  # who left early is charged when its group has told
    d.settle("t", "said", 110)
    d.finished(["not said"])
    d.settle("t", "not said", 700)
    assert left() == 190
    ask("said~1", 300, attempt=1, output_token_ids=(1,) * 10)  # it goes on elsewhere, and no limit holds it up
    assert left() == 0 and d.quotas.counts("t") == (1, 1)
    d.cancel("said~1")  # it never ran
    assert left() == 190
    d.check_integrity()


def test_tenants_share_while_both_want_more():
    d = tenants(Tenant("flood"), Tenant("quiet"), options=DispatchOptions(quantum=300.0))
    groups(d, "g", window=2)
    for i in range(200):
        d.submit(long(f"f{i}", 100, "flood"), 0.0)
    order, now, done = [], 0.0, 0
    for i in range(200):
        if i % 20 == 10:
            d.submit(long(f"q{i}", 100, "quiet"), now)
        for batch in d.dispatch(now).values():
            order += [r.request_id for r in batch]
        if done < len(order):
            d.finished([order[done]], now)
            done += 1
        d.report("g", GroupLoad(len(order)), now)
        now += 0.01
        if i % 20 == 19:  # 200 of the flood wait, and this one came long after them
            assert f"q{i - 9}" in order


def test_a_tenant_that_comes_to_a_slow_group_is_not_let_ahead_for_long():
    """It has a quantum of credit; in tokens alone that would be half a minute of what this group does."""
    d = tenants(Tenant("flood"), Tenant("quiet"))
    groups(d, "g", window=4, max_num_seqs=2, chunk=512)  # a token a millisecond
    order, running, now, given = [], [], 0.0, 0

    def serve(seconds):
        nonlocal now, given
        end = now + seconds
        while now < end:
            for batch in d.dispatch(now).values():
                order.extend(r.request_id for r in batch)
                running.extend(r.request_id for r in batch)
                given += len(batch)
            now += 0.1
            if running:
                done = running.pop(0)
                d.served("m", "flood" if done[0] == "f" else "quiet", 10)
                d.finished([done], now)
            d.report("g", GroupLoad(given, 0.1 * len(running), cost=SLOW), now)
            d.check_integrity()

    for i in range(60):  # the quiet one alone
        d.submit(long(f"a{i}", 100, "quiet"), now)
        serve(0.2)
    for i in range(200):
        d.submit(long(f"f{i}", 100, "flood"), now)
    serve(2.0)
    before = len(order)
    d.submit(long("q", 100, "quiet"), now)
    serve(2.0)
    assert order.index("q") <= before + 4


def test_priorities_rule_within_a_tenant_and_its_class():
    d = tenants(Tenant("batch", priority_class="batch"), Tenant("live", priority_class="interactive"))
    for name, tenant, priority in (("b", "batch", -1000), ("l", "live", 1000), ("first", "live", -5)):
        d.submit(long(name, 10, tenant, priority=priority), 0.0)
    groups(d, "g")
    assert ids(d.dispatch(0.0)) == {"g": ["first", "l", "b"]}


def test_a_low_priority_is_not_passed_for_ever():
    """What comes 10 s a level later, and a head start at most, no longer passes it: the stated bound."""
    d = Dispatcher()
    groups(d, "g", window=1)
    d.submit(request("holds the group"), 0.0)
    d.dispatch(0.0)
    d.submit(request("low", priority=3), 0.0)
    d.submit(request("passes", priority=0), 29.0)
    d.submit(request("comes too late", priority=0), 33.0)
    order = []
    for now in (34.0, 35.0, 36.0):
        d.finished(order[-1:] or ["holds the group"], now)
        d.report("g", GroupLoad(len(order) + 1), now)
        order += ids(d.dispatch(now)).get("g", [])
    assert order == ["passes", "low", "comes too late"]


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "cancel", "finish", "up", "down", "drain", "dispatch", "report", "blocks", "expire"]
        ),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(events)
@settings(max_examples=300, deadline=None)
def test_every_request_ends_once_and_the_books_balance_after_every_event(events):
    limit = 4
    tenant = Tenant("t1", requests_per_minute=5, tokens_per_minute=500)
    d = tenants(Tenant("t0", max_concurrent_requests=limit), tenant, max_queued_requests=6)
    known, placed, numbers, admitted, draining = {}, {}, {}, [], set()
    chains = [tuple(b"%08d%08d" % (n % 3, i) for i in range(n)) for n in range(10)]
    for step, (event, n) in enumerate(events):
        now, group = 5.0 * step, f"g{n % 3}"
        if event == "submit":
            tenant, was_known = f"t{n % 2}", str(n) in known
            try:
                d.submit(long(n, 200, tenant, chains[n], priority=n % 3, ttft_target=90.0 if n == 7 else None), now)
                known[str(n)] = tenant
                admitted += [] if was_known else [(now, tenant)]
            except (DeadlineUnmeetable, RateLimited):
                assert not was_known
            except Overloaded:
                assert d.num_queued()["m"] == 6
        elif event == "cancel":
            assert d.cancel(str(n), now) == placed.pop(str(n), None)
            known.pop(str(n), None)
        elif event == "finish":
            d.finished([str(n)], now)
            d.settle("t1", str(n), 200)
            known.pop(str(n), None)
            placed.pop(str(n), None)
        elif event == "up" and not d.has_group(group):
            d.add_group(group, "m", GroupCapacity(2, kv_tokens=500), now, cost=SLOW)
            numbers[group] = 0
            draining.discard(group)
        elif event == "drain" and d.has_group(group):
            d.drain_group(group)
            draining.add(group)
        elif event == "down":
            for lost in d.remove_group(group):
                assert placed.pop(lost) == group
                del known[lost]
        elif event == "report" and d.has_group(group):
            d.report(group, GroupLoad(n // 3, 0.1 * n, n % 4, 10 * n, 50 * n), now)
        elif event == "blocks" and d.has_group(group):
            numbers[group] += 1
            assert d.block_events(group, BlockEvents(numbers[group], b"".join(chains[n]), snapshot=True))
        elif event == "dispatch":
            for at, batch in d.dispatch(now).items():
                assert at not in draining
                for r in batch:
                    assert r.request_id in known and r.request_id not in placed
                    placed[r.request_id] = at
            for name, _ in d.take_refused():
                del known[name]
                assert name not in placed
        elif event == "expire":
            for name, _ in d.expire(now, 40.0):
                del known[name]
                assert name not in placed
        d.check_integrity()
        assert d.num_queued().get("m", 0) + len(placed) == len(known)
        assert list(known.values()).count("t0") <= limit
        assert sum(t == "t1" and at > now - 60.0 for at, t in admitted) <= 5
