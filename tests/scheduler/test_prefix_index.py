"""The prefix index against a plain model of it: sets of hashes by holder."""

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.scheduler.prefix_index import BlockEvents, Level, PrefixIndex, pack, unpack


def chain(name, count):
    return [hashlib.blake2b(f"{name}{i}".encode(), digest_size=16).digest() for i in range(count)]


def held(index, hashes):
    """name → blocks of the prompt it has."""
    found = {}
    for level in index.lookup(hashes):
        for name in index.names(level.holders):
            found[name] = max(found.get(name, 0), level.num_blocks)
    return found


def test_the_longest_prefix_of_each_holder():
    index, a = PrefixIndex(), chain("a", 6)
    for name, count in (("g1", 4), ("g2", 2), ("store:n1", 6)):
        index.add_holder(name)
        assert index.apply(name, BlockEvents(1, pack(a[:count])))
    assert held(index, a) == {"g1": 4, "g2": 2, "store:n1": 6}
    assert [level.num_blocks for level in index.lookup(a)] == [6, 4, 2] and index.lookup([]) == []
    assert index.num_held("g2", a) == 2 and held(index, chain("b", 3)) == {}
    index.check_integrity()


def test_the_end_of_a_prefix_goes_first():
    index, a = PrefixIndex(), chain("a", 4)
    index.add_holder("g")
    index.apply("g", BlockEvents(1, pack(a)))
    index.apply("g", BlockEvents(2, removed=pack(a[1:])))
    assert held(index, a) == {"g": 1}


def test_look_ups_can_be_limited_to_some_holders():
    index, a = PrefixIndex(), chain("a", 3)
    bits = {name: index.add_holder(name) for name in ("g1", "g2")}
    index.apply("g1", BlockEvents(1, pack(a)))
    index.apply("g2", BlockEvents(1, pack(a[:1])))
    assert index.lookup(a, bits["g2"]) == [Level(1, bits["g2"])]


def test_a_gap_is_noticed_and_a_snapshot_mends_it():
    index, a = PrefixIndex(), chain("a", 4)
    index.add_holder("g")
    assert index.apply("g", BlockEvents(1, pack(a[:2])))
    assert index.apply("g", BlockEvents(1, pack(a[:2])))  # again: known
    assert not index.apply("g", BlockEvents(3, pack(a[2:3])))
    assert not index.apply("g", BlockEvents(4, removed=a[1]))  # still awaits everything
    assert held(index, a) == {"g": 2}
    assert index.apply("g", BlockEvents(4, pack(a), snapshot=True))
    assert index.apply("g", BlockEvents(5, removed=a[3]))
    assert held(index, a) == {"g": 3}
    index.check_integrity()


def test_what_is_expected_counts_until_it_is_settled():
    index, a = PrefixIndex(), chain("a", 4)
    index.add_holder("g")
    index.expect("g", "r1", a[:3])
    index.expect("g", "r2", a)
    assert held(index, a) == {"g": 4}
    index.apply("g", BlockEvents(1, pack(a[:2])))
    index.settle("r2")
    assert held(index, a) == {"g": 3}
    index.settle("r1")
    assert held(index, a) == {"g": 2} and len(index) == 2
    index.settle("r1")
    index.check_integrity()


def test_a_holder_that_goes_leaves_nothing():
    index, a = PrefixIndex(), chain("a", 3)
    for name in ("g1", "g2"):
        index.add_holder(name)
        index.expect(name, f"r-{name}", a)
        index.apply(name, BlockEvents(1, pack(a[:1])))
    index.remove_holder("g1")
    assert held(index, a) == {"g2": 3}
    index.add_holder("g3")  # takes g1's bit
    assert held(index, a) == {"g2": 3}
    index.settle("r-g1")
    index.check_integrity()


def test_memory_is_bounded():
    index, a = PrefixIndex(max_blocks=3), chain("a", 5)
    index.add_holder("g")
    index.apply("g", BlockEvents(1, pack(a)))
    assert (len(index), index.num_untracked) == (3, 2)
    index.apply("g", BlockEvents(2, pack(a[2:]), removed=pack(a[2:3])))
    assert len(index) == 3
    index.check_integrity()


def test_packing():
    a = chain("a", 3)
    assert unpack(pack(a)) == a and unpack(b"") == []


BLOCKS = [(0,), (0, 1), (0, 1, 2), (0, 1, 3), (4,), (4, 5), (0, 1, 2, 6)]  # each stands for the prefix it spells
PROMPTS = [[(0,), (0, 1), (0, 1, 2), (0, 1, 2, 6)], [(0,), (0, 1), (0, 1, 3)], [(4,), (4, 5)], [(7,)]]


def closed(blocks):
    """With all those before them."""
    return {b[:i] for b in blocks for i in range(1, len(b) + 1)}


events = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "snapshot", "expect", "settle", "leave"]),
        st.sampled_from(["g1", "g2", "g3"]),
        st.sets(st.sampled_from(BLOCKS)),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(events)
@settings(max_examples=300, deadline=None)
def test_the_index_says_what_holders_have(events):
    index = PrefixIndex()
    has = {name: set() for name in ("g1", "g2", "g3")}
    expected, numbers = {}, dict.fromkeys(has, 0)
    for name in has:
        index.add_holder(name)
    for event, name, blocks, n in events:
        numbers[name] += event in ("store", "remove", "snapshot")
        if event == "remove":
            blocks = {b for b in has[name] if any(b[: len(r)] == r for r in blocks)}
        else:
            blocks = closed(blocks)
        if event == "store":
            assert index.apply_hashes(name, numbers[name], blocks)
            has[name] |= blocks
        elif event == "remove":
            assert index.apply_hashes(name, numbers[name], (), blocks)
            has[name] -= blocks
        elif event == "snapshot":
            assert index.apply_hashes(name, numbers[name], blocks, snapshot=True)
            has[name] = set(blocks)
        elif event == "expect" and f"r{n}" not in expected:
            index.expect(name, f"r{n}", PROMPTS[n])
            expected[f"r{n}"] = name, PROMPTS[n]
        elif event == "settle":
            index.settle(f"r{n}")
            expected.pop(f"r{n}", None)
        elif event == "leave":
            index.remove_holder(name)
            index.add_holder(name)
            has[name], numbers[name] = set(), 0
            expected = {r: e for r, e in expected.items() if e[0] != name}
        index.check_integrity()
        for prompt in PROMPTS:
            for name in has:
                all_blocks = has[name].union(*(b for at, b in expected.values() if at == name))
                depth = next((i for i, b in enumerate(prompt) if b not in all_blocks), len(prompt))
                assert index.num_held(name, prompt) == depth
