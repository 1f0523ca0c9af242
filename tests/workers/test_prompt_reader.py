"""What a prompt's positions tell equals what transformers says, however the prompt is cut up and over many ranks."""

import os
import random

import pytest
import torch
from groups import config_for, engine_over, group

from pagedray.scheduler.request import Request, SamplingParams
from pagedray.workers.engine import Engine
from pagedray.workers.prompt_reader import PromptReader

LONG = pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="set PAGEDRAY_LONG_TESTS=1")
SHAPE = {"num_hidden_layers": 3, "max_position_embeddings": 256, "initializer_range": 0.1, "vocab_size": 96}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, seed=0, ignore_eos=True)
K = 3


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(**SHAPE)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(3)
    first = [tuple(rng.randrange(3, 96) for _ in range(n)) for n in (1, 2, 9, 40, 90, 160)]
    return [*first, first[4][:64] + first[3]]  # the last shares a prefix


def requests_for(prompts):
    """Of every prompt: both embeddings, its log-probabilities, and a plain answer beside them."""
    none = GREEDY.clone(max_tokens=1)
    for i, prompt in enumerate(prompts):
        yield Request(f"mean-{i}", prompt, none, pooling="mean")
        yield Request(f"plain-{i}", prompt, GREEDY)
        yield Request(f"last-{i}", prompt, none, pooling="last")
        yield Request(f"told-{i}", prompt, GREEDY.clone(prompt_logprobs=K, logprobs=0))


def run(engine, prompts, urgent=()):
    """request id -> (tokens, prompt's log-probabilities, embedding). `urgent` ones come when two steps are done."""
    answers = {}
    for request in requests_for(prompts):
        engine.add_request(request)
        answers[request.request_id] = ([], [], [])
    num_steps = 0
    while engine.has_unfinished():
        for request in urgent if num_steps == 2 else ():
            engine.add_request(request)
            answers[request.request_id] = ([], [], [])
        num_steps += 1
        for output in engine.step():
            tokens, told, embedding = answers[output.request_id]
            assert not output.prompt_logprobs or (not tokens and not told), "told again, or late"
            tokens += output.token_ids
            told += output.prompt_logprobs
            if output.embedding:
                embedding += torch.frombuffer(bytearray(output.embedding), dtype=torch.float32).tolist()
                assert output.finish_reason == "stop" and not output.token_ids
        engine.scheduler.check_integrity()
    engine.step()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return answers


@pytest.fixture(scope="module")
def check(model, prompts):
    """A function that holds answers against transformers'."""
    rights = []
    for prompt in prompts:
        with torch.inference_mode():
            out = model.model(torch.tensor([prompt])).last_hidden_state[0].double()
            logits = model.lm_head(out.float()).log_softmax(-1)
        unit = torch.nn.functional.normalize(torch.stack([out.mean(0), out[-1]]), dim=1)
        rights.append((*unit, logits))

    def compare(answers, which=None):
        for i, (prompt, (mean, last, logprobs)) in enumerate(
            (prompts[w], rights[w]) for w in which or range(len(prompts))
        ):
            tokens, told, _ = answers[f"told-{i}"]
            assert tokens == answers[f"plain-{i}"][0] and len(tokens) == GREEDY.max_tokens
            for kind, right in (("mean", mean), ("last", last)):
                assert answers[f"{kind}-{i}"][0] == [] and not answers[f"{kind}-{i}"][1]
                assert answers[f"{kind}-{i}"][2] == pytest.approx(right.tolist(), abs=1e-5)
            assert len(told) == len(prompt) - 1
            for row, token, at in zip(logprobs, prompt[1:], told, strict=False):
                assert at.logprob == pytest.approx(row[token].item(), abs=1e-4)
                values, ids = row.topk(K)
                assert [v for _, v in at.top] == pytest.approx(values.tolist(), abs=1e-4)
                assert {t for t, _ in at.top} == set(ids.tolist())

    return compare


def test_equals_transformers(folder, prompts, check):
    engine = Engine(config_for(folder, max_num_batched_tokens=512))
    check(run(engine, prompts))
    hits = engine.stats().prefix_cache_hits
    check(run(engine, prompts))  # the prefix cache is warm, and does not keep positions back
    assert engine.stats().prefix_cache_hits > hits


@pytest.mark.parametrize("chunk", [5, 64])
def test_in_chunks(folder, prompts, check, chunk):
    check(run(Engine(config_for(folder, max_num_batched_tokens=chunk)), prompts))


def preempt(engine, prompts):
    """Answers of which the first were interrupted: the pool holds no two of these prompts."""
    urgent = [Request(f"urgent-{i}", prompts[0][::-1], GREEDY, priority=-100) for i in range(2)]
    answers = run(engine, prompts, urgent)
    assert engine.stats().num_preemptions > 0
    return answers


def test_after_preemptions(folder, prompts, check):
    longest_first = [prompts[5], prompts[6], prompts[4]]
    engine = Engine(config_for(folder, num_kv_blocks=44, max_model_len=176, max_num_batched_tokens=32))
    check(preempt(engine, longest_first), [5, 6, 4])


def test_after_its_worker_group_was_lost_a_sequence_tells_nothing_twice(folder, prompts):
    engine = Engine(config_for(folder))
    sampling = GREEDY.clone(prompt_logprobs=0)
    engine.add_request(Request("a", prompts[2], sampling, output_token_ids=(5, 6), attempt=1))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert len(outputs) == 4 and not any(o.prompt_logprobs for o in outputs)


@pytest.mark.parametrize(
    ("settings", "road"),
    [
        ({"tensor_parallel_size": 2}, None),
        pytest.param({"pipeline_parallel_size": 2}, None, marks=LONG),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "gloo", marks=LONG),
        pytest.param({"pipeline_parallel_size": 3}, None, marks=LONG),
    ],
    ids=str,
)
def test_over_ranks(folder, prompts, check, settings, road):
    config = config_for(folder, max_num_batched_tokens=512, **settings)
    executor = group(config, road=road)
    try:
        check(run(engine_over(executor, config), prompts))
        check(run(engine_over(executor, config, max_num_batched_tokens=7), prompts))
        small = engine_over(executor, config, num_blocks=44, max_num_batched_tokens=32)
        check(preempt(small, [prompts[5], prompts[6], prompts[4]]), [5, 6, 4])
    finally:
        executor.close()


def test_a_mean_does_not_depend_on_its_chunks():
    hidden = torch.randn(300, 32, generator=torch.Generator().manual_seed(0)) * 100
    whole, cut = PromptReader(range(300), "mean", None), PromptReader(range(300), "mean", None)
    whole.read(hidden, 0, None)
    for start in range(0, 300, 7):
        cut.read(hidden[start : start + 7], start, None)
    assert whole.embedding() == cut.embedding()
    assert sum(x * x for x in torch.frombuffer(bytearray(cut.embedding()), dtype=torch.float32).tolist()) == (
        pytest.approx(1.0)
    )
