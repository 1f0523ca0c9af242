"""Fetch or compute: which stores can give what, what that takes, and what is done."""

import pytest

from pagedray.scheduler.cost_model import CostModel
from pagedray.scheduler.dispatcher import Dispatcher
from pagedray.scheduler.kv_sources import FetchOutcome, KVSources, Offer, TransferModel
from pagedray.scheduler.placement import GroupCapacity, GroupLoad
from pagedray.scheduler.prefix_index import BlockEvents, PrefixIndex, pack
from pagedray.scheduler.request import Request, SamplingParams

HASHES = tuple(b"%016d" % i for i in range(64))
SLOW = CostModel(5e-3, 1e-3, 0.0, 1e-4, 0.0)  # a millisecond a token: 1.024 s for all
FAST = CostModel(1e-4, 1e-6, 0.0, 1e-6, 0.0)


def dispatcher(cost=SLOW, block_bytes=100_000, stores=(("far", "node 2", 64),), **capacity):
    d = Dispatcher()
    d.add_group("g", "m", GroupCapacity(8, node="node 1", block_bytes=block_bytes, **capacity), 0.0, cost=cost)
    for name, at, count in stores:
        d.sources.add(name, at)
        d.block_events(name, BlockEvents(1, pack(HASHES[:count])))
    return d


def send(d, name="r", now=0.0, **fields):
    d.submit(Request(name, tuple(range(1024)), SamplingParams(seed=0), "m", block_hashes=HASHES, **fields), now)
    batches = d.dispatch(now)
    d.check_integrity()
    return batches["g"][0] if batches else None


def test_what_a_store_has_is_fetched_where_computing_takes_longer():
    source = send(dispatcher()).kv_source
    assert (source.store, source.num_blocks) == ("far", 64) and 0.0 < source.seconds < 0.1
    assert send(dispatcher(cost=FAST)).kv_source is None
    assert send(dispatcher(block_bytes=0)).kv_source is None  # a group that does not fetch
    assert send(dispatcher(stores=())).kv_source is None


def test_what_waiting_counts_against_computing_is_the_operators_choice():
    assert send(dispatcher(cost=FAST, fetch_weight=0.0)).kv_source is not None
    assert send(dispatcher(fetch_weight=50.0)).kv_source is None


def test_decisions_are_counted():
    d = dispatcher()
    send(d)
    assert d.num_fetches() == {"m": (1, 0)}
    d = dispatcher(cost=FAST)
    send(d)
    assert d.num_fetches() == {"m": (0, 1)}
    d = dispatcher(stores=())
    send(d)
    assert d.num_fetches() == {"m": (0, 0)}


def test_only_what_the_group_has_not_is_fetched():
    d = dispatcher()
    d.block_events("g", BlockEvents(1, pack(HASHES)))
    assert send(d).kv_source is None and d.num_fetches() == {"m": (0, 0)}


def test_the_near_store_is_preferred_unless_the_far_one_has_so_much_more():
    def chosen(near, far):
        return send(dispatcher(stores=(("near", "node 1", near), ("far", "node 2", far)))).kv_source.store

    assert chosen(64, 64) == "near" and chosen(10, 64) == "far" and chosen(63, 64) == "near"


def test_a_fetch_delays_the_first_token_but_keeps_nobody_from_being_sent():
    d = dispatcher(block_bytes=2_000_000)  # 128 MB: 0.44 s, beyond the lead that a group is given work ahead
    assert send(d).kv_source is not None
    # and its deadline counts it: computing would take 1.06 s
    assert send(dispatcher(block_bytes=2_000_000), ttft_target=0.6).kv_source is not None


def test_what_is_learned_changes_the_decision():
    d = dispatcher(block_bytes=1_000_000)
    assert send(d, "first").kv_source is not None
    for _ in range(10):
        d.sources.learn(FetchOutcome("far", False, 64, 64_000_000, 6.0, 0.2), 1.0)
    d.finished(["first"], 1.0)
    d.report("g", GroupLoad(1, cost=SLOW), 1.0)
    assert send(d, "second", 1.0).kv_source is None


def test_a_store_that_failed_is_left_alone_for_a_while():
    d = dispatcher()
    d.sources.learn(FetchOutcome("far", False, 0, 0, 1.0, 0.1, "unreachable"), 0.0)
    assert send(d, "a", 5.0).kv_source is None
    d.finished(["a"], 5.0)
    d.report("g", GroupLoad(1, cost=SLOW), 15.0)
    assert send(d, "b", 15.0).kv_source is not None


def test_a_store_that_is_gone_offers_nothing():
    d = dispatcher()
    d.sources.remove("far")
    assert send(d).kv_source is None and "far" not in d.sources
    d.sources.remove("far")


def test_offers_name_the_most_there_is_and_the_most_on_the_node():
    sources = KVSources(PrefixIndex())
    for name, node, count in (("a", "1", 4), ("b", "2", 9), ("c", "1", 6)):
        sources.add(name, node)
        sources.index.apply(name, BlockEvents(1, pack(HASHES[:count])))
    levels = sources.lookup(HASHES, 0.0)
    assert list(sources.offers(levels, 0, "1")) == [Offer("b", 9, False), Offer("c", 6, True)]
    assert list(sources.offers(levels, 7, "1")) == [Offer("b", 9, False)]
    assert list(sources.offers(levels, 9, "1")) == []
    assert list(sources.offers(levels, 0, "3")) == [Offer("b", 9, False)]
    assert sources.lookup((), 0.0) == ()


def test_latency_and_bandwidth_are_learned_apart():
    model = TransferModel(latency=0.01, bytes_per_second=1e9)
    assert model.seconds(1_000_000_000) == pytest.approx(1.01)
    for i in range(200):
        size = 1_000_000 * (1 + i % 20)
        model.learn(size, 0.05 + size / 2e8)
    assert model.seconds(0) == pytest.approx(0.05, rel=0.05)
    assert model.seconds(2_000_000_000) == pytest.approx(10.05, rel=0.05)


def test_sizes_that_are_all_alike_still_give_their_own_time():
    model = TransferModel(latency=0.01, bytes_per_second=1e9)
    for _ in range(300):
        model.learn(8_000_000, 0.3)
    assert model.seconds(8_000_000) == pytest.approx(0.3, rel=0.02)
    assert 0.0 <= model.seconds(1_000) and model.seconds(80_000_000) >= 0.3


def test_a_group_that_has_measured_nothing_is_taken_for_like_the_others():
    d = dispatcher()
    d.report("g", GroupLoad(0, cost=FAST), 0.0)
    d.add_group("new", "m", GroupCapacity(8), 0.0)
    d.report("new", GroupLoad(0), 0.0)
    placement = d._groups["new"].placement
    assert placement.groups["new"].cost == FAST
