"""The books of a KV store: within the budget, whole prefixes, the least valuable first, nothing that is read."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.scheduler.run_store import HALF_LIFE, RunStore


def put(store, hashes, parent=None, num_bytes=10, seconds=1.0, now=0.0):
    run, evicted = store.reserve(parent, hashes, num_bytes, seconds, now)
    if run is not None:
        assert store.add(run, "payload", num_bytes)
    return run, evicted


def test_a_prefix_is_found_in_parts_and_no_further_than_it_goes():
    store = RunStore(100)
    put(store, ["a", "b", "c"])
    put(store, ["d", "e"], parent="c")
    put(store, ["x"], parent="b")
    assert [(p.first, p.count) for p in store.read(["a", "b", "c", "d"], 1.0)] == [(0, 3), (0, 1)]
    assert [(p.run.hashes, p.first, p.count) for p in store.read(["a", "b", "x", "y"], 1.0)] == [
        (("a", "b", "c"), 0, 2),
        (("x",), 0, 1),
    ]
    assert [(p.first, p.count) for p in store.read(["b", "c", "z"], 1.0)] == [(1, 2)]  # the reader has "a" already
    assert not store.read(["z"], 1.0) and not store.read([], 1.0)
    assert store.num_held(["a", "b", "q"]) == 2


def test_the_least_valuable_leaf_goes_and_never_what_is_read_or_followed():
    store = RunStore(30)
    first, _ = put(store, ["a"], seconds=0.1)
    put(store, ["b"], parent="a", seconds=5.0)
    cheap, _ = put(store, ["c"], seconds=1.0)
    _, evicted = put(store, ["d"], seconds=2.0)
    assert evicted == [cheap]  # "a" is worth less, but "b" follows it
    parts = store.read(["a", "b"], 1.0) + store.read(["d"], 1.0)
    assert put(store, ["e"], now=1.0) == (None, [])  # all that could go is read
    store.unpin([p.run for p in parts])
    _, evicted = put(store, ["e"], seconds=1.0, now=1.0)
    assert [r.hashes for r in evicted] == [("d",)]
    _, evicted = put(store, ["f"], seconds=1.0, now=1.0)
    assert [r.hashes for r in evicted] == [("e",)]  # used once
    later = 1.0 + 5 * HALF_LIFE
    store.unpin([p.run for p in store.read(["f"], later)])
    _, evicted = put(store, ["g"], seconds=1.0, now=later)
    assert [r.hashes for r in evicted] == [("b",)]  # worth five times as much, but that was long ago
    store.check_integrity()
    assert first.num_pins == 0


def test_what_does_not_fit_follows_nothing_here_or_is_here_is_refused():
    store = RunStore(30)
    assert put(store, ["a"], num_bytes=31)[0] is None
    assert put(store, ["a"], parent="nobody")[0] is None
    put(store, ["a"])
    assert put(store, ["a"])[0] is None
    run, _ = store.reserve(None, ["b"], 20, 1.0, 0.0)
    assert store.reserve(None, ["b"], 1, 1.0, 0.0)[0] is None  # it is on its way
    assert store.num_bytes == 30
    store.cancel(run)
    assert store.num_bytes == 10
    store.check_integrity()


def test_what_was_lost_goes_with_all_that_follows_it_even_on_its_way():
    store = RunStore(100)
    a, _ = put(store, ["a"])
    put(store, ["b"], parent="a")
    coming, _ = store.reserve("b", ["c"], 10, 1.0, 0.0)
    store.log.take()
    assert [r.hashes for r in store.drop(a)] == [("b",), ("a",)]
    assert not store.add(coming, "payload", 10) and store.drop(a) == []
    assert store.num_bytes == 0 and sorted(store.log.take()[1]) == ["a", "b"]
    store.check_integrity()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_books_balance_whatever_comes(data):
    """Prefixes are paths "0.1.1…" of a tree, so that many share beginnings."""
    store, told, read, coming, now = RunStore(60), set(), [], [], 0.0
    for _ in range(40):
        now += data.draw(st.sampled_from([0.0, 1.0, HALF_LIFE]))
        path, hashes = "", []
        for step in data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)):
            path += f".{step}"
            hashes.append(path)
        match data.draw(st.sampled_from(["put", "reserve", "finish", "read", "unread", "drop"])):
            case "put" | "reserve" as what:
                held = store.num_held(hashes)
                parent = hashes[held - 1] if held else None
                size, seconds = data.draw(st.integers(1, 25)), data.draw(st.sampled_from([0.5, 1.0, 3.0]))
                run, evicted = store.reserve(parent, hashes[held:], size, seconds, now)
                assert not any(r.num_pins for r in evicted)
                if run is not None:
                    coming.append(run)
                    if what == "put":
                        store.add(coming.pop(), "payload", size)
            case "finish" if coming:
                run = coming.pop(data.draw(st.integers(0, len(coming) - 1)))
                clashes = any(store.num_held([h]) for h in run.hashes)
                store.cancel(run) if clashes or data.draw(st.booleans()) else store.add(run, "p", run.num_bytes)
            case "read":
                parts = store.read(hashes, now)
                assert sum(p.count for p in parts) == store.num_held(hashes)
                assert [h for p in parts for h in p.run.hashes[p.first : p.first + p.count]] == hashes[
                    : store.num_held(hashes)
                ]
                read += [p.run for p in parts]
            case "unread" if read:
                store.unpin([read.pop()])
            case "drop" if len(store):
                parts = store.read(hashes, now)
                store.unpin([p.run for p in parts])
                if parts:
                    store.drop(parts[0].run)
        assert store.num_bytes <= store.budget
        store.check_integrity()
        stored, removed = store.log.take()
        assert not told & set(stored) and set(removed) <= told
        told = (told | set(stored)) - set(removed)
        assert told == set(store._where)
    assert set(store.hashes()) == told
