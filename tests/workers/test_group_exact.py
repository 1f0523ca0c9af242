"""A model over several ranks gives, in fp32, the tokens that one rank gives: however it and the work are cut up."""

import os
import random

import pytest
from groups import GREEDY, config_for, engine_over, greedy, group, run, sampled

from pagedray.scheduler.request import Request
from pagedray.workers.engine import Engine

# initializer_range: attention that prefers some tokens to others, so that a wrong position or block shows.
LONG = pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="set PAGEDRAY_LONG_TESTS=1")
SHAPE = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 5,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
ONE_KV_HEAD = {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 1}
CASES = {
    "TP=2": ({"tensor_parallel_size": 2}, {}, None),
    "TP=2 over gloo": ({"tensor_parallel_size": 2}, {}, "gloo"),
    "TP=3, weights": ({"tensor_parallel_size": 3, "tensor_parallel_weights": [2, 1, 1]}, {}, None),
    "TP=3 over gloo, biases": (
        {"tensor_parallel_size": 3},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "gloo",
    ),
    "TP=2, biases, tied, odd sizes": (
        {"tensor_parallel_size": 2, "tensor_parallel_weights": [1, 2]},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "intermediate_size": 75},
        None,
    ),
    "TP=2, vocabulary of 32,001": ({"tensor_parallel_size": 2}, {"vocab_size": 32001}, None),
    "TP=2, one KV head": ({"tensor_parallel_size": 2}, ONE_KV_HEAD, None),
    "PP=2, 5 layers": ({"pipeline_parallel_size": 2}, {}, None),
    "PP=2, KV in int8": ({"pipeline_parallel_size": 2, "kv_cache_dtype": "int8"}, {}, None),
    "PP=3, tied": ({"pipeline_parallel_size": 3}, {"tie_word_embeddings": True}, None),
    "TP=2, PP=2": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}, None),
    "TP=2, PP=2 over gloo": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, ONE_KV_HEAD, "gloo"),
    "PP=3 over gloo between stages": ({"pipeline_parallel_size": 3}, {}, "link"),
}


def prompts_for(vocab_size, lengths=(1, 7, 8, 9, 17, 43, 90), seed=0):
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, vocab_size) for _ in range(n)) for n in lengths]


@pytest.mark.parametrize("case", CASES)
def test_equals_one_rank(case, tiny_llama, tmp_path):
    settings, shape, road = CASES[case]
    model = tiny_llama(**{**SHAPE, **shape})
    model.save_pretrained(tmp_path)
    prompts = prompts_for(model.config.vocab_size)
    alone = config_for(tmp_path, max_num_batched_tokens=256, kv_cache_dtype=settings.get("kv_cache_dtype", "auto"))
    expected = run(Engine(alone), greedy(prompts))
    expected_draws = run(Engine(alone), sampled(prompts))
    growing = [Request(f"growing-{i}", p[:9], GREEDY.clone(max_tokens=40)) for i, p in enumerate(prompts)]
    expected_growing = run(Engine(alone), growing)
    config = config_for(tmp_path, max_num_batched_tokens=256, **settings)
    executor = group(config, link="gloo") if road == "link" else group(config, road=road)
    try:
        executor.warm_up()
        # All at once, twice over the same prefix cache.
        engine = engine_over(executor, config)
        assert_equal(run(engine, greedy(prompts)), expected)
        assert run.most_in_flight == config.pipeline_parallel_size - 1  # once the earliest is collected
        again = run(engine, greedy(prompts))
        assert_equal(again, expected)
        assert [cached for _, _, (cached,) in again] == [(len(p) - 1) // 4 * 4 for p in prompts]
        # In chunks.
        for chunk in (5, 32):
            engine = engine_over(executor, config, max_num_batched_tokens=chunk, enable_prefix_caching=False)
            assert_equal(run(engine, greedy(prompts)), expected)
        # Where blocks run out.
        engine = engine_over(executor, config, num_blocks=16, max_num_batched_tokens=32)
        assert_equal(run(engine, growing), expected_growing)
        assert engine.stats().num_preemptions > 0
        # Drawn, with penalties that need to know all tokens.
        assert [t for t, _, _ in run(engine_over(executor, config), sampled(prompts))] == [
            t for t, _, _ in expected_draws
        ]
    finally:
        executor.close()


def assert_equal(answers, expected):
    for (tokens, logprobs, _), (right_tokens, right_logprobs, _) in zip(answers, expected, strict=True):
        assert tokens == right_tokens
        assert logprobs == pytest.approx(right_logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 2}, marks=LONG),
        pytest.param({"pipeline_parallel_size": 2}, marks=LONG),
        pytest.param({"pipeline_parallel_size": 3}, marks=LONG),
    ],
    ids=str,
)
def test_the_demo_model(settings, demo_model):
    limits = {"max_model_len": 512, "num_kv_blocks": 64, "block_size": 16, "max_num_batched_tokens": 128}
    prompts = prompts_for(49152, (5, 60, 130, 200))
    prompts.append(prompts[3][:150] + prompts[1])
    requests = [Request(str(i), p, GREEDY.clone(max_tokens=16)) for i, p in enumerate(prompts)]
    growing = [Request(f"growing-{i}", p[:20], GREEDY.clone(max_tokens=48)) for i, p in enumerate(prompts)]
    alone = Engine(config_for(demo_model, **limits))
    expected, expected_growing = ([tokens for tokens, _, _ in run(alone, r)] for r in (requests, growing))
    config = config_for(demo_model, **limits, **settings)
    executor = group(config)
    try:
        assert [tokens for tokens, _, _ in run(engine_over(executor, config), requests)] == expected
        small = engine_over(executor, config, num_blocks=16, max_num_batched_tokens=48, block_size=16)
        assert [tokens for tokens, _, _ in run(small, growing)] == expected_growing
        assert small.stats().num_preemptions > 0
    finally:
        executor.close()
