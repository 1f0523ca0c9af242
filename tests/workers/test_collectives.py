"""What ranks exchange through torch.distributed: the class that NCCL goes through, over gloo, in threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from groups import config_for
from torch.distributed import HashStore, TCPStore
from torch.testing import assert_close

from pagedray.kernels.ops import RankLost
from pagedray.scheduler.errors import ConfigError
from pagedray.scheduler.plan import NewSequence, ScheduledSequence, StepPlan
from pagedray.scheduler.request import SamplingParams
from pagedray.workers import cuda
from pagedray.workers.checkpoint.load import load_weights, open_checkpoint
from pagedray.workers.collectives import CollectiveGroup, interface_of
from pagedray.workers.config import EngineConfig
from pagedray.workers.executor import _choose_gpus
from pagedray.workers.parallel import HostIdentity, Peer, Topology, assign_gpus, choose_road, connect
from pagedray.workers.partition import partition
from pagedray.workers.worker import Worker

CPU = torch.device("cpu")


def together(size, work, ordered=True):
    """What `work(rank, group)` gives on each rank of a group."""
    store = HashStore()

    def run(rank):
        return work(rank, CollectiveGroup("gloo", store, "127.0.0.1", rank, size, CPU, ordered))

    with ThreadPoolExecutor(size) as threads:
        return [f.result(60) for f in [threads.submit(run, rank) for rank in range(size)]]


def parts(size, rows=5, columns=7):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, columns, generator=generator) for _ in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_all_parts(dtype):
    given = parts(3)
    sums = together(3, lambda rank, group: group(given[rank].clone(), dtype))
    for total in sums:  # in the order of the ranks, rounded once
        assert torch.equal(total, (given[0] + given[1] + given[2]).to(dtype))
    sums = together(3, lambda rank, group: group(given[rank].clone(), dtype), ordered=False)
    for total in sums:
        assert total.dtype == dtype and torch.equal(total, sums[0])
        assert_close(total.float(), sum(given), atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0.02)


def test_uneven_columns_come_together_on_the_first_rank():
    wide = parts(1, columns=9)[0]
    columns = [4, 3, 2]
    pieces = wide.split(columns, 1)
    first, *others = together(3, lambda rank, group: group.gather(pieces[rank], columns))
    assert torch.equal(first, wide) and others == [None, None]


def test_what_is_sent_arrives_in_order():
    def work(rank, group):
        if rank == 0:
            for value in (1.0, 2.0):
                group.send(torch.full((3, 4), value).t())  # not contiguous
            return None
        return [group.receive(torch.empty(4, 3))[0, 0].item() for _ in range(2)]

    assert together(2, work)[1] == [1.0, 2.0]


@pytest.mark.parametrize("call", ["sum", "receive", "send"])
def test_an_aborted_wait_ends_and_so_do_all_later_ones(call):
    def work(rank, group):
        if rank == 1:
            return over.wait(30)  # it never comes
        threading.Timer(0.3, group.abort).start()
        began = time.monotonic()
        calls = {"sum": lambda: group(torch.ones(2, 2), torch.float32), "receive": lambda: group.receive(torch.ones(9))}
        calls["send"] = lambda: group.send(torch.ones(10_000_000))  # more than a socket takes
        for _ in range(2):
            with pytest.raises(RankLost, match="aborted"):
                calls[call]()
        with pytest.raises(RankLost, match="aborted"):
            group.check()
        over.set()
        return time.monotonic() - began

    over = threading.Event()
    assert together(2, work)[0] < 10


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") is None  # ranks that meet there are on one host
    assert interface_of("203.0.113.7") is None


def peer(*gpus, host="a"):
    return Peer("10.0.0.1", 0, HostIdentity(host, 1), False, gpus)


def test_no_two_ranks_have_one_gpu():
    assert assign_gpus([peer("0"), peer("1")]) == (0, 0), "as Ray shows them"
    assert assign_gpus([peer("0", "1"), peer("0", "1")]) == (0, 1), "each process sees all"
    assert assign_gpus([peer("0", "1", "2"), peer("1"), peer("0")]) == (2, 0, 0), "a driver, and actors"
    assert assign_gpus([peer("0"), peer("0", host="b")]) == (0, 0)
    assert assign_gpus([peer("0"), peer("0")]) == () == assign_gpus([peer("0"), peer()])
    assert choose_road([peer("0"), peer("1")], on_gpus=True) == "nccl"


def test_a_group_that_has_too_few_gpus(caplog):
    def choose(device, *peers):
        return _choose_gpus(EngineConfig.from_kwargs(model="x", device=device, tensor_parallel_size=2), peers)

    assert choose("cuda", peer("0", "1"), peer("0", "1")) == (0, 1)
    assert choose("auto", peer("0", "1"), peer("1", "0")) == (0, 0)
    assert choose("cpu", peer("0"), peer("1")) == ()
    with pytest.raises(ConfigError, match="2 ranks need a GPU each, of their own: rank 0 sees 1, rank 1 sees 0"):
        choose("cuda", peer("0"), peer())
    assert choose("auto", peer("0"), peer()) == () and "computes on CPUs: 2 ranks need" in caplog.text
    assert choose("auto", peer(), peer()) == ()
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no CUDA GPU"):
            choose("cuda", peer(), peer())


SHAPE = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3, "hidden_size": 96}


def replayed(run):
    """A graph's contract without a graph: the same work again, into the same tensor."""
    output = run()
    return lambda: output.copy_(run()), output


def plans(vocab_size):
    """Two prompts of different lengths, then both decode, then one does."""
    greedy = SamplingParams(temperature=0.0, seed=0, logprobs=2)
    prompts = [tuple(range(3, 3 + n)) for n in (5, 9)]
    new = tuple(NewSequence(i, prompt, len(prompt), greedy, 0) for i, prompt in enumerate(prompts))
    blocks = [(0, 1, 2), (3, 4, 5, 6)]
    begin = tuple(ScheduledSequence(i, 0, len(p), (), blocks[i], True) for i, p in enumerate(prompts))
    steps = [StepPlan(0, (), new, begin)]
    for step in range(1, 4):
        both = range(2) if step < 3 else range(1)
        shares = tuple(ScheduledSequence(i, len(prompts[i]) + step - 1, 1, (step + i,), (), True) for i in both)
        steps.append(StepPlan(step, (), (), shares))
    return steps


@pytest.mark.parametrize("ordered", [True, False])
def test_ranks_that_replay_graphs_with_collectives_in_them_equal_one_rank(tiny_llama, tmp_path, ordered):
    """As on GPUs: everything between ranks is the backend's, and decode steps are replayed, on every stage."""
    tiny_llama(**SHAPE).save_pretrained(tmp_path)
    lone = config_for(tmp_path, num_kv_blocks=16, max_num_seqs=2, max_model_len=32)
    config = config_for(
        tmp_path, num_kv_blocks=16, max_num_seqs=2, max_model_len=32, tensor_parallel_size=2, pipeline_parallel_size=2
    )
    alone = Worker(lone)
    alone.allocate(16, 32)
    steps = plans(96)
    expected = [alone.execute(plan) for plan in steps]
    checkpoint = open_checkpoint(tmp_path)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peers = (Peer("127.0.0.1", 0, HostIdentity("a", 1), False),) * 4
    shards = partition(checkpoint.config, config, None)
    topology = Topology(shards, peers, ("gloo", "gloo"), "t", store.port, link="gloo")
    num_replayed = [0] * 4

    def run(rank):
        group = connect(
            topology,
            rank,
            b"",
            checkpoint.config,
            config,
            torch.float32,
            None,
            TCPStore("127.0.0.1", store.port, is_master=False),
            60.0,
            lambda: None,
        )
        group.reduce.ordered = ordered
        worker = Worker(config, None, open_checkpoint(tmp_path), topology, rank)
        worker.allocate(16, 32, group)
        hidden = None if worker.shard.first_stage else (96, torch.float32)

        def capture(run):
            replay, output = replayed(run)

            def counted():
                num_replayed[rank] += 1
                replay()

            return counted, output

        with torch.inference_mode():
            graphs = cuda.DecodeGraphs(worker.runner.forward, 2, 32, 4, CPU, capture, hidden)
            graphs.capture_all()
        worker.runner.graphs = graphs
        return [worker.execute(plan) for plan in steps]

    with ThreadPoolExecutor(4) as threads:
        results = [f.result(120) for f in [threads.submit(run, rank) for rank in range(4)]]
    assert num_replayed == [3] * 4
    assert [r is None for r in results[0] + results[1] + results[3]] == [True] * 12
    for got, right in zip(results[2], expected, strict=True):
        assert [t.token_id for t in got.tokens] == [t.token_id for t in right.tokens]
        for mine, theirs in zip(got.tokens, right.tokens, strict=True):
            assert mine.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)


def test_each_rank_can_run_its_largest_step_without_the_others(tiny_llama, tmp_path):
    """How a GPU's memory is measured: ranks that load at different speeds do not wait for each other."""
    tiny_llama(**SHAPE).save_pretrained(tmp_path)
    settings = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_kv_blocks": 64, "max_model_len": 64}
    config = config_for(tmp_path, max_num_seqs=3, max_num_batched_tokens=20, **settings)
    checkpoint = open_checkpoint(tmp_path)
    topology = Topology(
        partition(checkpoint.config, config, None), tuple(peer() for _ in range(4)), ("gloo",) * 2, "", 0
    )
    for rank, shard in enumerate(topology.shards):
        worker = Worker(config, None, checkpoint, topology, rank)
        weights = load_weights(checkpoint, torch.float32, None, shard, config.quantization)
        model, results = worker.profile(weights, 64, lambda run, device: run())
        assert model.shard == shard
        assert [r and len(r.tokens) for r in results] == ([3, 0] if shard.samples else [None, None])
