from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pagedray.scheduler.shards import shard_of
from pagedray.scheduler.tenants import Tenant

names = st.text(min_size=1, max_size=8)


@given(names, names, st.integers(1, 16))
def test_a_new_shard_takes_from_all_and_nothing_else_moves(tenant, model, num_shards):
    before, after = (shard_of(Tenant(tenant), model, n) for n in (num_shards, num_shards + 1))
    assert after in (before, num_shards)


@given(names, st.lists(names, min_size=2), st.integers(1, 16))
def test_all_that_is_counted_for_a_tenant_goes_to_one(tenant, models, num_shards):
    limited = Tenant(tenant, requests_per_minute=5)
    assert len({shard_of(limited, model, num_shards) for model in models}) == 1


def test_shards_are_about_equally_full():
    counts = Counter(shard_of(Tenant(f"tenant-{i}"), "m", 4) for i in range(4000))
    assert all(900 < count < 1100 for count in counts.values()), counts


def test_models_of_a_tenant_without_limits_are_spread():
    assert {shard_of(Tenant("t"), f"m{i}", 4) for i in range(50)} == {0, 1, 2, 3}
