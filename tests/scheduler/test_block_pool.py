"""Property test of the block pool against a plain model of what it promises."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pagedray.scheduler.block_pool import BlockPool, hash_block, root_hash


class PoolMachine(RuleBasedStateMachine):
    """Users hold lists of blocks; blocks get hashes; whatever happens, contents under a hash never change silently."""

    holders = Bundle("holders")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(num_blocks=8, block_size=4)
        self.content = {}  # block -> what its user wrote last
        self.written = 0

    @rule(target=holders, count=st.integers(1, 5))
    def allocate(self, count):
        if count > self.pool.num_free:
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            return []
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        for block in blocks:
            self.written += 1
            self.content[block] = self.written
        return blocks

    @rule(blocks=holders, name=st.integers(0, 9))
    def cache(self, blocks, name):
        if blocks and self.pool.lookup([bytes([name])]) == []:
            self.pool.cache(blocks[0], bytes([name]))
            found = self.pool.lookup([bytes([name])])
            assert found in ([], [blocks[0]])  # empty: the block has another name already

    @rule(target=holders, names=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def share(self, names):
        blocks = self.pool.lookup([bytes([n]) for n in names])
        free_before, unused = self.pool.num_free, self.pool.num_unused(blocks)
        before = [self.content[b] for b in blocks]
        self.pool.share(blocks)
        assert self.pool.num_free == free_before - unused
        assert [self.content[b] for b in blocks] == before
        return blocks

    @rule(blocks=consumes(holders))
    def release(self, blocks):
        self.pool.release(blocks)

    @invariant()
    def sound(self):
        self.pool.check_integrity()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    pool = BlockPool(num_blocks=4, block_size=2)
    old, young = pool.allocate(2), pool.allocate(2)
    for i, block in enumerate(old + young):
        pool.cache(block, bytes([i]))
    pool.release(old)
    pool.release(young)
    pool.allocate(1)
    assert pool.lookup([b"\0", b"\1"]) == old[:1]
    assert pool.lookup([b"\2", b"\3"]) == young


def test_blocks_without_a_hash_are_handed_out_before_cached_ones():
    pool = BlockPool(num_blocks=3, block_size=2)
    cached, plain = pool.allocate(1), pool.allocate(1)
    pool.cache(cached[0], b"x")
    pool.release(cached)
    pool.release(plain)
    pool.allocate(2)
    assert pool.lookup([b"x"]) == cached


def test_hashes_tell_parents_models_and_salts_apart():
    roots = {root_hash("m"), root_hash("m", "a"), root_hash("ma"), root_hash("", "m"), root_hash("m", "b")}
    assert len(roots) == 5
    root = root_hash("m")
    one, other = hash_block(root, [1, 2]), hash_block(root, [1, 3])
    assert hash_block(one, [5, 6]) != hash_block(other, [5, 6])
    assert len(one) >= 16


def test_hashes_are_the_same_in_every_process():
    assert hash_block(root_hash("model", "salt"), [1, 2, 3]).hex() == "4cc92f54b2917d37f827e46ef190e989"


def test_caching_can_be_switched_off():
    pool = BlockPool(num_blocks=2, block_size=2, enable_caching=False)
    (block,) = pool.allocate(1)
    pool.cache(block, b"x")
    assert pool.lookup([b"x"]) == []


def test_what_continues_a_lost_prefix_is_lost_too():
    pool = BlockPool(4, 2)
    first, double, tail = pool.allocate(3)
    pool.cache(first, b"a")
    pool.cache(double, b"a")  # computed twice at the same time: the first stays known
    pool.cache(tail, b"ab", b"a")
    assert pool.log.take() == ([b"a", b"ab"], [])
    pool.release([first])
    pool.allocate(2)  # takes the place of a
    assert pool.lookup([b"a", b"ab"]) == [] and pool.num_cached == 0
    assert sorted(pool.log.take()[1]) == [b"a", b"ab"]
    pool.cache(tail, b"ab", b"a")
    assert pool.num_cached == 0
    pool.check_integrity()


def test_changes_are_told_once_and_come_and_go_is_none():
    pool = BlockPool(1, 2)
    (block,) = pool.allocate(1)
    pool.cache(block, b"a")
    pool.release([block])
    pool.allocate(1)
    assert pool.log.take() == ([], [])
    pool.cache(block, b"b")
    assert pool.cached_hashes() == [b"b"] and pool.log.take() == ([], [])
