"""The fair queue: the stated bound, no hoarding, no starvation."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.scheduler.fairness import FairQueue

numbers = itertools.count()


def push(queue, tenant, name, at=0.0, weight=1.0):
    key = (at, next(numbers))
    queue.push(tenant, weight, key, (tenant, key, name))
    return key


def take(queue, cost, passed_over=None):
    found = queue.next(passed_over or {})
    if found is None:
        return None
    tenant, (_, key, name) = found
    queue.remove(tenant, key)
    queue.charge(tenant, cost)
    return name


def test_one_tenant_is_a_plain_queue():
    queue = FairQueue(quantum=10)
    for name, at in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        push(queue, "t", name, at)
    assert [take(queue, 100) for _ in range(4)] == ["a", "b", "c", None]


def test_a_flood_does_not_hold_up_the_other():
    queue = FairQueue(quantum=10)
    for i in range(50):
        push(queue, "flood", f"f{i}", at=i)
    for i in range(5):
        push(queue, "quiet", f"q{i}", at=100 + i)
    order = [take(queue, 10) for _ in range(20)]
    assert {f"q{i}" for i in range(5)} <= set(order[:12])


def test_weights_divide_the_service():
    queue = FairQueue(quantum=10)
    for _ in range(400):
        push(queue, "heavy", "heavy", weight=3.0)
        push(queue, "light", "light")
    order = [take(queue, 10) for _ in range(400)]
    assert abs(order.count("heavy") - 300) <= 4


def test_who_was_away_has_a_quantum_of_credit_and_keeps_its_debt():
    queue = FairQueue(quantum=10)
    push(queue, "away", "x")
    take(queue, 500)
    for i in range(300):
        push(queue, "busy", "busy", at=i)
    for _ in range(40):
        take(queue, 10)
    push(queue, "away", "away", at=1000.0)
    for _ in range(20):
        push(queue, "new", "new", at=1000.0)
    order = [take(queue, 10) for _ in range(30)]
    assert 13 <= order.count("new") <= 16
    assert "away" not in order[:18] and "away" in order  # 500 against the 400 that busy had


def test_others_go_a_quantum_ahead_where_one_waits_by_choice():
    queue = FairQueue(quantum=30)
    for _ in range(3):
        push(queue, "a", "a")
    for _ in range(9):
        push(queue, "b", "b", at=1.0)
    assert [take(queue, 10, {"a": 3}) for _ in range(6)] == ["b", "b", "b", "b", None, None]
    assert take(queue, 10) == "a"


def test_a_better_class_goes_first_within_the_quantum():
    queue = FairQueue(quantum=30)
    for i in range(9):
        queue.push("batch", 1.0, (0.0, i), ("batch", (0.0, i), "batch"), rank=1)
        queue.push("live", 1.0, (5.0, i), ("live", (5.0, i), "live"), rank=0)
    order = [take(queue, 10) for _ in range(18)]
    assert order[:4] == ["live"] * 4 and order[4:14].count("batch") == 5


COST, QUANTUM = 20.0, 15.0
WEIGHTS = {"t0": 1.0, "t1": 2.0, "t2": 0.5}
steps = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "take", "take", "serve", "hold", "leave"]),
        st.integers(0, 2),
        st.floats(0, 1),
        st.floats(0, 50),
    ),
    max_size=120,
)


@given(steps)
@settings(max_examples=400, deadline=None)
def test_the_stated_bound_holds_between_all_who_wait(steps):
    """Requests cost up to COST at once and up to COST as they are served; a tenant has at most two in flight."""
    queue = FairQueue(QUANTUM)
    running: dict[str, list[float]] = {t: [] for t in WEIGHTS}  # what each in flight may still cost
    waiting: dict[str, list] = {t: [] for t in WEIGHTS}
    served = dict.fromkeys(WEIGHTS, 0.0)
    since: dict[str, dict[str, float]] = {}  # tenant → everybody's service when it began to wait
    most = {t: 3 * COST / w for t, w in WEIGHTS.items()}  # U: one input, two outputs

    def charge(tenant, cost):
        queue.charge(tenant, cost)
        served[tenant] += cost / WEIGHTS[tenant]

    for event, n, share, at in steps:
        tenant = f"t{n}"
        if event == "push":
            if not waiting[tenant]:
                since[tenant] = dict(served)
            waiting[tenant].append(push(queue, tenant, "", at, WEIGHTS[tenant]))
        elif event == "take":
            passed = {t: len(w) for t, w in waiting.items() if len(running[t]) >= 2} | ({tenant: 1} if at > 40 else {})
            found = queue.next(passed)
            if found is not None:
                tenant, (_, key, _) = found
                queue.remove(tenant, key)
                waiting[tenant].remove(key)
                charge(tenant, share * COST)
                running[tenant].append(COST)
        elif event == "serve" and running[tenant]:
            part = share * running[tenant][0]
            running[tenant][0] -= part
            charge(tenant, part)
        elif event == "leave" and running[tenant]:
            running[tenant].pop(0)
        queue.check_integrity()
        counters = queue.counters()
        backlogged = queue.backlogged()
        for t in backlogged:
            assert queue.level - QUANTUM - 1e-6 <= counters[t] <= queue.level + QUANTUM + most[t] + 1e-6
        for a, b in itertools.permutations(backlogged, 2):
            start = max((since[a], since[b]), key=lambda s: sum(s.values()))  # when both waited
            gained = {t: served[t] - start[t] for t in (a, b)}
            assert gained[a] - gained[b] <= 2 * (2 * QUANTUM) + most[a] + most[b] + 1e-6


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_nobody_starves(costs, num_others):
    """Whoever waits is served before the others have had more than the bound together."""
    queue = FairQueue(QUANTUM)
    for i in range(num_others):
        for cost in costs:
            push(queue, f"o{i}", cost)
    push(queue, "last", 0, at=1e9)
    queue.charge("last", QUANTUM)  # it has had more than the others
    given_away = dict.fromkeys((f"o{i}" for i in range(num_others)), 0.0)
    while True:
        tenant, (_, key, cost) = queue.next({})
        queue.remove(tenant, key)
        if tenant == "last":
            break
        queue.charge(tenant, cost)
        given_away[tenant] += cost
        push(queue, tenant, cost)  # it always has more
        assert given_away[tenant] <= 3 * QUANTUM + 30
