"""What a rank does on a GPU, as far as a CPU can tell: settings, memory arithmetic, batches padded to their graph."""

import pytest
import torch
from torch.testing import assert_close

from pagedray.kernels import ops
from pagedray.kernels.reference import AttentionMetadata
from pagedray.scheduler.errors import ConfigError
from pagedray.workers import cuda
from pagedray.workers.config import EngineConfig
from pagedray.workers.engine import Engine
from pagedray.workers.worker import Worker

GIB = 2**30
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
def test_a_gpu_that_is_not_there():
    assert cuda.select_device("auto").type == cuda.select_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="sees no CUDA GPU"):
        cuda.select_device("cuda")


@pytest.mark.parametrize(
    "settings, message",
    [(dict(device="gpu"), "device must be one of"), (dict(gpu_memory_utilization=1.5), "at most 1")],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_kwargs(model="x", **settings)


@pytest.mark.parametrize("setting", ["quantization", "kv_cache_dtype"])
def test_fp8_takes_a_gpu_that_has_it(monkeypatch, setting):
    monkeypatch.setattr(ops, "linear_formats", lambda device_type: ("int8", "fp8"))
    monkeypatch.setattr(ops, "kv_cache_formats", lambda device_type: ("fp8",))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    worker = object.__new__(Worker)
    worker.config, worker.device = EngineConfig("m", **{setting: "fp8"}), torch.device("cuda")
    check = worker._format if setting == "quantization" else worker._check_cache_format
    for capability, right in (((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        if right:
            check()
        else:
            with pytest.raises(ConfigError, match=f"{setting} is fp8, which NVIDIA A10"):
                check()


def test_blocks_are_larger_on_gpus():
    sizes = [EngineConfig.from_kwargs(model="x", device=d).block_size for d in ("cuda", "cpu", "auto")]
    assert sizes == [64, 16, 16] and EngineConfig.from_kwargs(model="x", device="cuda", block_size=32).block_size == 32


def test_kv_budget():
    use = cuda.MemoryUse(total=80 * GIB, others=1 * GIB, peak=17 * GIB)
    assert cuda.kv_budget(use, 0.9) == 54 * GIB
    with pytest.raises(ConfigError, match="gpu_memory_utilization is 0.2: 16.0 of 80.0 GiB"):
        cuda.kv_budget(use, 0.2)


def test_buckets():
    assert cuda.buckets(1) == [1]
    assert cuda.buckets(3) == [1, 2, 4]
    assert cuda.buckets(17) == [1, 2, 4, 8, 16, 24]


@pytest.fixture
def engine(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    settings = dict(max_num_seqs=6, max_num_batched_tokens=20, max_model_len=64, num_kv_blocks=24, block_size=8)
    return Engine(EngineConfig.from_kwargs(model=str(tmp_path), dtype="float32", cpu_threads=1, **settings))


def test_the_largest_step_runs_and_leaves_nothing(engine):
    plans, num_blocks = cuda.largest_step(6, 20, 64, 8)
    assert sum(s.num_tokens for s in plans[0].scheduled) == 20 and num_blocks <= 24
    first, last = (engine.executor.worker.execute(plan) for plan in plans)
    assert len(first.tokens) == 6 and not last.tokens and not engine.executor.worker.runner.states


def replayed(run):
    """A graph's contract without a graph: the same work again, into the same tensor."""
    output = run()
    return lambda: output.copy_(run()), output


@pytest.mark.parametrize("capture_first", [False, True])
def test_a_padded_batch_gives_what_the_batch_gives(engine, capture_first):
    runner = engine.executor.worker.runner
    generator = torch.Generator().manual_seed(0)
    for pair in runner.kv_caches:
        for cache in pair:
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def forward(token_ids, positions, metadata):
        return runner.model.forward(runner.model.embed(token_ids), positions, runner.kv_caches, metadata)

    graphs = cuda.DecodeGraphs(forward, 6, 64, 8, torch.device("cpu"), capture=replayed)
    if capture_first:
        graphs.capture_all()
        assert sorted(graphs.captured) == graphs.buckets == [1, 2, 4, 8]
    for count in (5, 1, 3, 6, 2):  # a larger batch leaves its numbers behind for a smaller one
        lengths = torch.randint(1, 20, (count,), generator=generator, dtype=torch.int32)
        tables = torch.randperm(24, generator=generator)[: 3 * count].int().view(count, 3)
        positions = lengths.long() - 1
        slots = tables[torch.arange(count), positions // 8] * 8 + positions % 8
        metadata = AttentionMetadata(
            torch.arange(count + 1, dtype=torch.int32), lengths, tables, slots, 1, int(lengths.max())
        )
        token_ids = torch.randint(0, 96, (count,), generator=generator)
        assert graphs.holds(metadata)
        before = [[cache.clone() for cache in pair] for pair in runner.kv_caches]
        expected = forward(token_ids, positions, metadata).clone()
        after = [[cache.clone() for cache in pair] for pair in runner.kv_caches]
        for pair, old in zip(runner.kv_caches, before, strict=True):
            for cache, values in zip(pair, old, strict=True):
                cache.copy_(values)
        assert_close(graphs.run(token_ids, positions, metadata), expected)
        for pair, values in zip(runner.kv_caches, after, strict=True):
            for cache, value in zip(pair, values, strict=True):
                assert_close(cache, value)  # padding has written nothing


def test_steps_without_a_graph():
    graphs = cuda.DecodeGraphs(None, 2, 64, 8, torch.device("cpu"), capture=replayed)

    def step(query_lens):
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        lengths = torch.tensor(query_lens, dtype=torch.int32)
        return AttentionMetadata(starts, lengths, None, torch.zeros(sum(query_lens)), max(query_lens), max(query_lens))

    assert graphs.holds(step([1, 1]))
    assert not graphs.holds(step([2])) and not graphs.holds(step([1, 1, 1]))
