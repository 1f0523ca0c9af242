"""Output with reuse equals output without: real engines that share KV through a store made of the real parts."""

import random

import pytest
from groups import GREEDY, SAMPLED, config_for

from pagedray.scheduler.errors import KVTransferError
from pagedray.scheduler.kv_fetch import KVSource
from pagedray.scheduler.request import Request
from pagedray.scheduler.run_store import RunStore
from pagedray.workers.engine import Engine

SHAPE = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}


class Pair:
    """Two engines of one model and a store between them; what travels is late, lost or damaged as `rng` likes."""

    def __init__(self, engines, rng, budget):
        self.engines, self.rng = engines, rng
        self.store = RunStore(budget)
        self.now = 0.0
        self.travelling = []  # (steps left, what happens then)
        self.num_fetched = 0

    def later(self, action):
        self.travelling.append([self.rng.randint(0, 3), action])

    def step(self, engine):
        self.now += 1.0
        outputs = engine.step()
        for order in engine.take_fetches():
            self.later(lambda order=order: self.fetch(engine, order))
        for publication, seconds in engine.take_publications():
            self.publish(engine, publication, seconds)
        for item in list(self.travelling):
            item[0] -= 1
            if item[0] < 0:
                self.travelling.remove(item)
                item[1]()
        engine.scheduler.check_integrity()
        return outputs

    def publish(self, engine, publication, seconds):
        held = self.store.num_held(publication.hashes)
        parent = publication.hashes[held - 1] if held else publication.parent
        hashes = publication.hashes[held:]
        if hashes and self.store.holds(parent):
            size = len(hashes) * engine.block_bytes
            run, dropped = self.store.reserve(parent, hashes, size, seconds, self.now)
            for gone in dropped:
                for each in self.engines:
                    each.forget_published(gone.hashes)
            if run is not None:
                piece, data = engine.executor.worker.kv_port.pack(publication.block_ids[held:])
                data.flags.writeable = False
                assert piece.num_bytes == size
                self.store.add(run, (piece, data), size)
        taken = self.store.num_held(publication.hashes) == len(publication.hashes)
        self.later(lambda: engine.end_publication(publication.publication_id, taken))
        self.store.check_integrity()

    def fetch(self, engine, order):
        count = 0
        parts = self.store.read(order.hashes, self.now)
        for part in parts:
            trouble = self.rng.random()
            piece, data = part.run.payload
            if trouble < 0.05:  # lost
                break
            if trouble < 0.1:
                data = data.copy()
                data[self.rng.randrange(data.size)] ^= 255
            target = order.block_ids[count : count + part.count]
            try:
                engine.executor.worker.kv_port.unpack([(piece, data)], part.first, target)
            except KVTransferError:
                self.store.unpin([p.run for p in parts])
                for gone in self.store.drop(part.run):
                    for each in self.engines:
                        each.forget_published(gone.hashes)
                break
            count += part.count
        else:
            self.store.unpin([p.run for p in parts])
        self.num_fetched += count
        engine.end_fetch(order.fetch_id, count)

    def run(self, engine, requests):
        answers = {}
        for request in requests:
            engine.add_request(request)
        for _ in range(2000):
            for output in self.step(engine):
                tokens, logprobs = answers.setdefault(output.request_id, ([], []))
                tokens += output.token_ids
                logprobs += [p.logprob for p in output.logprobs]
            if not engine.has_unfinished() and not self.travelling:
                return [answers[r.request_id] for r in requests]
        raise AssertionError("not done")


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(**SHAPE).save_pretrained(folder)
    return folder


def engine_of(folder, num_blocks, kv_cache_dtype="auto", **settings):
    settings = {"publish_min_tokens": 8} | settings
    transfer = {"kv_connector_extra_config": settings}
    settings = {"kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": 64, "kv_transfer_config": transfer}
    config = config_for(folder, num_kv_blocks=num_blocks, **settings)
    return Engine(config, shares_kv=True)


@pytest.mark.parametrize(
    "num_blocks, budget_blocks, kept_in",
    [(40, 30, "auto"), (40, 10_000, "auto"), (96, 3, "auto"), (96, 10_000, "auto"), (40, 10_000, "int8")],
)
def test_output_with_reuse_equals_output_without(folder, num_blocks, budget_blocks, kept_in):
    rng = random.Random(num_blocks + budget_blocks)
    engines = [engine_of(folder, num_blocks, kept_in) for _ in range(2)]
    alone = engine_of(folder, 256, kept_in)
    pair = Pair(engines, rng, budget_blocks * alone.block_bytes)
    stems = [tuple(rng.randrange(3, 96) for _ in range(60)) for _ in range(8)]
    for round_number in range(40):
        requests = []
        for i in range(rng.randint(1, 3)):
            prompt = rng.choice(stems)[: rng.randint(4, 60)] + tuple(rng.randrange(3, 96) for _ in range(3))
            source = KVSource("s", rng.randint(1, 16), 5.0)
            sampling = rng.choice([GREEDY, SAMPLED])
            name = f"{round_number}-{i}"
            requests.append(Request(name, prompt, sampling, index=i, kv_source=source))
        expected = Pair([alone], rng, 0).run(alone, requests)
        alone.scheduler.pool.release(alone.scheduler.pool.allocate(256))  # it remembers nothing
        assert pair.run(rng.choice(engines), requests) == [
            (tokens, pytest.approx(logprobs, abs=1e-4)) for tokens, logprobs in expected
        ]
    assert pair.num_fetched > 20 or budget_blocks < 10
    for engine in engines:
        assert engine.scheduler.pool.num_free == num_blocks


def test_a_sequence_that_another_engine_goes_on_with_says_the_same(folder):
    """Prefill here, decode there, through the store; with what gets lost on the way."""
    rng = random.Random(0)
    prefill, decode, alone = engine_of(folder, 64), engine_of(folder, 64), engine_of(folder, 256)
    pair = Pair([prefill, decode], rng, 1 << 30)
    num_moved = 0
    for name in map(str, range(30)):
        prompt = tuple(rng.randrange(3, 96) for _ in range(rng.choice([1, 4, 17, 70, 120, 160])))
        sampling = rng.choice([GREEDY, SAMPLED])
        ((expected, _),) = Pair([alone], rng, 0).run(alone, [Request(name, prompt, sampling)])
        prefill.add_request(Request(name, prompt, sampling, hand_over=True))
        tokens = []
        while prefill.has_unfinished():
            for output in pair.step(prefill):
                tokens += output.token_ids
            if prefill.take_hand_overs():
                assert prefill.abort_request(name)
                source = KVSource("s", len(prompt) // 4, 5.0)
                moved = Request(name, prompt, sampling, kv_source=source, output_token_ids=tuple(tokens))
                ((rest, _),) = pair.run(decode, [moved])
                tokens += rest
                num_moved += 1
        assert tokens == expected
    assert num_moved > 20 and pair.num_fetched > 100


def test_a_prefix_that_one_engine_computed_another_need_not(folder):
    first, second = engine_of(folder, 96), engine_of(folder, 96)
    pair = Pair([first, second], random.Random(0), 1 << 30)
    pair.rng.random = lambda: 1.0  # no trouble
    prompt = tuple(range(3, 93)) + tuple(range(5, 15))
    (expected,) = pair.run(first, [Request("a", prompt, GREEDY)])
    request = Request("b", prompt, GREEDY, kv_source=KVSource("s", 25, 1.0))
    (given,) = pair.run(second, [request])
    assert given[0] == expected[0] and pair.num_fetched == 24
    assert second.stats().prefix_cache_hits == 96 and second.stats().num_steps < first.stats().num_steps
