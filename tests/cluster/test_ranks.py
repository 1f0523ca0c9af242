"""Which bundle of its placement group a rank gets, and what is in it."""

from hypothesis import given
from hypothesis import strategies as st

from pagedray.cluster.driver_ranks import bundles
from pagedray.cluster.ranks import assign_bundles
from pagedray.workers.config import EngineConfig


def stages(nodes, tensor_parallel_size):
    """The nodes of each stage's ranks."""
    ranks = [nodes[bundle] for bundle in assign_bundles(nodes, tensor_parallel_size)]
    return [ranks[i : i + tensor_parallel_size] for i in range(0, len(ranks), tensor_parallel_size)]


def test_stages_are_kept_on_a_node_where_they_fit():
    assert stages("abab", 2) == [["a", "a"], ["b", "b"]]
    assert stages("abbb", 2) == [["b", "b"], ["b", "a"]]
    assert stages("ab", 1) == [["a"], ["b"]]


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_rank_has_a_bundle_of_its_own_and_no_stage_is_split_without_need(tp, pp, data):
    nodes = data.draw(st.lists(st.sampled_from("abc"), min_size=tp * pp, max_size=tp * pp))
    assert sorted(assign_bundles(nodes, tp)) == list(range(tp * pp))
    whole = sum(len(set(stage)) == 1 for stage in stages(nodes, tp))
    assert whole >= sum(nodes.count(node) // tp for node in set(nodes))


def test_the_ranks_beside_a_driver_hold_a_gpu_each_where_they_are_to_use_one():
    split = {"model": "m", "tensor_parallel_size": 3}
    assert bundles(EngineConfig(**split, device="cuda")) == [{"CPU": 1, "GPU": 1}] * 2
    assert bundles(EngineConfig(**split)) == bundles(EngineConfig(**split, device="cpu")) == [{"CPU": 1}] * 2
