"""The engine on tiny seeded models: transformers' tokens and log-probabilities, however the work is cut up.

What is right comes from transformers' `generate`; comparisons are in fp32 and to 1e-4 where nothing else is said.
"""

import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from pagedray.kernels import reference
from pagedray.scheduler.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from pagedray.scheduler.request import Request, SamplingParams, TokenLogprobs
from pagedray.workers.config import EngineConfig
from pagedray.workers.engine import Engine

TOLERANCE = 1e-4
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=5, seed=0)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, seed=7, ignore_eos=True)

# initializer_range: attention that prefers some tokens to others, so that a wrong position or block shows.
CONTEXT = {"max_position_embeddings": 256, "initializer_range": 0.1}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {"tie_word_embeddings": True},
    "as many kv heads, untied": {"num_key_value_heads": 4},
    "one kv head, wide heads": {"num_key_value_heads": 1, "head_dim": 32},
    "odd sizes": {"vocab_size": 101, "hidden_size": 60, "intermediate_size": 75, "num_attention_heads": 6},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "Qwen2: biases of q, k, v": {"kind": "Qwen2", "tie_word_embeddings": True},
    "Mistral, deep": {"kind": "Mistral", "num_hidden_layers": 5, "sliding_window": None},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


def lengths_around(chunk):
    return [chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 5 * chunk + 3]


def random_prompts(lengths, vocab_size=96, seed=0):
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, vocab_size) for _ in range(n)) for n in lengths]


PROMPTS = random_prompts(lengths_around(8))


@pytest.fixture
def save(tiny_llama, tmp_path):
    """Save a tiny model; returns it and its folder."""

    def save(**config):
        model = tiny_llama(**{**CONTEXT, **config})
        model.save_pretrained(tmp_path)
        return model, tmp_path

    return save


def engine_for(folder, **settings):
    settings = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 256, "cpu_threads": 1, **settings}
    return Engine(EngineConfig.from_kwargs(model=str(folder), **settings))


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0


def greedy(prompts):
    return [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]


def run(engine, requests, between_steps=None):
    """Run requests together, the books checked after every step. `between_steps(engine)` may interfere."""
    answers = {r.request_id: Answer() for r in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        for output in engine.step():
            answer = answers[output.request_id]
            assert answer.finish_reason is None, "an output after the last one"
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.finish_reason = output.finish_reason
            answer.num_cached_tokens = output.num_cached_tokens
        engine.scheduler.check_integrity()
        if between_steps:
            between_steps(engine)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    engine.step()  # tells the rank what to forget
    assert not engine.executor.worker.runner.states
    return list(answers.values())


def record_plans(engine):
    """The list that every plan of `engine` is appended to from now on."""
    plans = []
    execute = engine.executor.worker.execute

    def recording(plan):
        plans.append(plan)
        return execute(plan)

    engine.executor.worker.execute = recording
    return plans


def transformers_answer(model, prompt, max_new_tokens=MAX_TOKENS):
    """Greedy tokens, and log-probabilities of the whole vocabulary at each of them: [len(tokens), vocab]."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).log_softmax(-1)


def assert_equal(answers, expected):
    """Same tokens as transformers; chosen and top log-probabilities within the tolerance."""
    assert len(answers) == len(expected)
    for answer, (token_ids, logprobs) in zip(answers, expected, strict=True):
        assert answer.token_ids == token_ids
        assert answer.finish_reason == ("stop" if token_ids[-1] == 2 else "length")
        assert len(answer.logprobs) == len(token_ids)
        for token_id, got, row in zip(token_ids, answer.logprobs, logprobs, strict=True):
            assert got.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
            ids = [t for t, _ in got.top]
            assert len(set(ids)) == 5
            # By value, so that two that are as good as equal may change places.
            assert [v for _, v in got.top] == pytest.approx(row[ids].tolist(), abs=TOLERANCE)
            assert [v for _, v in got.top] == pytest.approx(row.topk(5).values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers(shape, save):
    model, folder = save(**SHAPES[shape])
    prompts = random_prompts(sorted({*lengths_around(8), *lengths_around(32)}), model.config.vocab_size)
    expected = [transformers_answer(model, p) for p in prompts]
    for chunk in (8, 32, 512):
        engine = engine_for(folder, max_num_batched_tokens=chunk)
        assert_equal(run(engine, greedy(prompts)), expected)


def test_one_at_a_time_equals_all_at_once_amid_decodes(save):
    model, folder = save()
    expected = [transformers_answer(model, p) for p in PROMPTS]
    for chunk in (8, 32, 512):
        engine = engine_for(folder, max_num_batched_tokens=chunk, enable_prefix_caching=False)
        alone = [answer for request in greedy(PROMPTS) for answer in run(engine, [request])]
        assert_equal(alone, expected)
        plans = record_plans(engine)
        assert_equal(run(engine, greedy(PROMPTS)), expected)
        if chunk == 8:
            kinds = [{s.num_tokens > 1 for s in plan.scheduled} for plan in plans]
            assert {True, False} in kinds, "no step had both a prefill and a decode"
            assert max(plan.num_tokens for plan in plans) <= chunk


def test_a_prefix_hit_that_ends_inside_a_chunk(save):
    model, folder = save()
    common, *tails = random_prompts([22, 19, 3, 1, 30])
    prompts = [common, *(common + tail for tail in tails)]
    expected = [transformers_answer(model, p) for p in prompts]
    for chunk in (8, 32, 512):
        engine = engine_for(folder, max_num_batched_tokens=chunk)
        assert_equal(run(engine, greedy(prompts[:1])), expected[:1])
        answers = run(engine, greedy(prompts[1:]))
        assert_equal(answers, expected[1:])
        assert [a.num_cached_tokens for a in answers] == [20] * 4  # five blocks of 4: not a multiple of any chunk


def test_a_cold_and_a_warm_prefix_cache_give_the_same(save):
    model, folder = save()
    expected = [transformers_answer(model, p) for p in PROMPTS]
    engine = engine_for(folder, max_num_batched_tokens=8)
    cold = run(engine, greedy(PROMPTS))
    assert_equal(cold, expected)
    assert all(a.num_cached_tokens == 0 for a in cold)
    warm = run(engine, greedy(PROMPTS))
    assert_equal(warm, expected)
    # All full blocks but the one that holds the last token, which is always computed.
    assert [a.num_cached_tokens for a in warm] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]


def test_only_equal_prefixes_share_blocks(save):
    model, folder = save()
    begin, other, end = random_prompts([4, 4, 9])
    assert begin != other
    first = begin + end
    prompts = [first, other + end, end, (*begin[:3], other[3]) + end]  # equal blocks, or nearly so, in other places
    engine = engine_for(folder)
    answers = [answer for request in greedy(prompts) for answer in run(engine, [request])]
    assert_equal(answers, [transformers_answer(model, p) for p in prompts])
    assert all(a.num_cached_tokens == 0 for a in answers)
    # Nor do requests of different salts, though theirs are equal.
    for salt, cached in (("", 12), ("a", 0), ("b", 0), ("a", 12)):
        (answer,) = run(engine, [Request("0", first, GREEDY, cache_salt=salt)])
        assert (answer.token_ids, answer.num_cached_tokens) == (answers[0].token_ids, cached)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunk", [8, 32, 512])
def test_preemptions_change_nothing(save, chunk, caching):
    model, folder = save()
    expected = [transformers_answer(model, p) for p in PROMPTS]
    engine = engine_for(
        folder, max_num_batched_tokens=chunk, max_model_len=60, num_kv_blocks=15, enable_prefix_caching=caching
    )
    plans = record_plans(engine)
    assert_equal(run(engine, greedy(PROMPTS)), expected)
    assert engine.stats().num_preemptions > 0
    assert any(len(new.token_ids) > new.num_prompt_tokens for plan in plans for new in plan.new), "none was resumed"


def test_an_answer_that_takes_the_whole_pool(save):
    model, folder = save()
    engine = engine_for(folder, num_kv_blocks=8)
    assert engine.max_model_len == 32
    (prompt,) = random_prompts([5])
    request = Request("0", prompt, GREEDY.clone(max_tokens=None, ignore_eos=True))
    (answer,) = run(engine, [request])
    assert len(answer.token_ids) == 27 and answer.finish_reason == "length"
    model.generation_config.eos_token_id = None
    assert answer.token_ids == transformers_answer(model, prompt, 27)[0]
    for prompt_len, max_tokens in ((32, 1), (33, None), (20, 13)):
        with pytest.raises(ContextLengthExceeded, match="32 tokens"):
            engine.add_request(Request("1", (3,) * prompt_len, GREEDY.clone(max_tokens=max_tokens)))
    assert len(run(engine, [Request("2", prompt, GREEDY.clone(max_tokens=1))])[0].token_ids) == 1


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_across_a_preemption(save):
    _, folder = save()
    (prompt,) = random_prompts([13])
    choices = [Request(f"choice-{i}", prompt, SAMPLED, index=i) for i in range(4)]
    engine = engine_for(folder, enable_prefix_caching=False)
    alone = [run(engine, [choice])[0].token_ids for choice in choices]
    assert len({tuple(tokens) for tokens in alone}) == 4, "choices must differ"
    assert run(engine, [Request("0", prompt, SAMPLED.clone(seed=8))])[0].token_ids != alone[0]

    company = [Request(f"company-{i}", p, GREEDY) for i, p in enumerate(PROMPTS)]
    engine = engine_for(folder, max_num_batched_tokens=16)
    assert [a.token_ids for a in run(engine, [*company, *reversed(choices)])[:-5:-1]] == alone

    engine = engine_for(folder, max_model_len=60, num_kv_blocks=15)
    plans = record_plans(engine)
    assert [a.token_ids for a in run(engine, choices)] == alone
    resumed = {n.index for plan in plans for n in plan.new if len(n.token_ids) > n.num_prompt_tokens}
    assert resumed, "none was preempted after its first token"


@pytest.mark.parametrize("seed", range(4))
def test_aborts_between_steps_free_all_blocks_and_leave_the_rest_alone(save, seed):
    _, folder = save()
    settings = {"max_num_batched_tokens": 16, "max_model_len": 60, "num_kv_blocks": 20, "max_num_seqs": 5}
    requests = [Request(str(i), p, SAMPLED.clone(max_tokens=17)) for i, p in enumerate([*PROMPTS, *PROMPTS])]
    undisturbed = run(engine_for(folder, **settings), requests)
    rng = random.Random(seed)
    aborted = set()

    def abort_some(engine):
        known = engine.scheduler.request_ids()
        if rng.random() < 0.2 and known:
            victim = rng.choice(known)
            assert engine.abort_request(victim) and not engine.abort_request(victim)
            aborted.add(int(victim))
        assert not engine.abort_request("never heard of")
        engine.scheduler.check_integrity()

    answers = run(engine_for(folder, **settings), requests, abort_some)
    assert 0 < len(aborted) < len(requests)
    for i, (answer, whole) in enumerate(zip(answers, undisturbed, strict=True)):
        if i in aborted:
            assert answer.finish_reason is None and answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        else:
            assert answer == Answer(whole.token_ids, [], "length", answer.num_cached_tokens)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SAMPLED.clone(top_p=0.9, logprobs=2),
        SAMPLED.clone(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, min_tokens=20),
        SAMPLED.clone(ignore_eos=False, min_tokens=6),
    ],
)
def test_a_sequence_goes_on_in_another_engine_wherever_it_was_cut(save, sampling):
    """As after the loss of a worker group: another engine gets the tokens that are out, and makes the rest."""
    _, folder = save()
    prompt = PROMPTS[3]
    (whole,) = run(engine_for(folder), [Request("whole", prompt, sampling, index=2)])
    num_tokens = len(whole.token_ids)
    assert num_tokens > 5
    cuts = range(num_tokens)
    rest = [
        Request(str(cut), prompt, sampling, index=2, output_token_ids=tuple(whole.token_ids[:cut]), attempt=1)
        for cut in cuts
    ]
    answers = run(engine_for(folder, max_num_batched_tokens=16), rest)
    for cut, answer in zip(cuts, answers, strict=True):
        assert whole.token_ids[:cut] + answer.token_ids == whole.token_ids
        assert answer.finish_reason == whole.finish_reason
        for mine, expected in zip(answer.logprobs, whole.logprobs[cut:], strict=True):
            assert mine.logprob == pytest.approx(expected.logprob, abs=TOLERANCE)


def test_a_sequence_that_had_all_its_tokens_is_not_resumed(save):
    _, folder = save()
    engine = engine_for(folder)
    with pytest.raises(InvalidRequest, match="2 tokens already"):
        engine.add_request(Request("a", (5, 6), GREEDY.clone(max_tokens=2), output_token_ids=(7, 8), attempt=1))
    assert not engine.scheduler.has_unfinished()


def test_an_abort_before_the_first_step_and_of_the_last_request(save):
    _, folder = save()
    engine = engine_for(folder)
    engine.add_request(Request("0", PROMPTS[0], GREEDY))
    assert engine.abort_request("0") and not engine.has_unfinished()
    assert engine.step() == []
    engine.add_request(Request("0", PROMPTS[0], GREEDY))
    engine.step()
    assert engine.abort_request("0") and not engine.has_unfinished()
    assert engine.stats().num_used_blocks == 0
    assert engine.step() == [] and not engine.executor.worker.runner.states
    assert len(run(engine, greedy(PROMPTS[:1]))[0].token_ids) == MAX_TOKENS


def test_requests_with_ids_outside_the_vocabulary_are_refused_and_the_rest_unaffected(save):
    model, folder = save(vocab_size=101)
    expected = [transformers_answer(model, p) for p in PROMPTS]
    bad = [(Request("bad", (5, wrong, 6), GREEDY), "prompt", str(wrong)) for wrong in (-1, 101, 2**31, 2**64)] + [
        (Request("bad", (5, 6), GREEDY.clone(logit_bias={3: 1.0, wrong: 1.0})), "logit_bias", str(wrong))
        for wrong in (101, 2**31 - 1)
    ]

    def refuse(engine):
        for request, param, wrong in bad:
            with pytest.raises(InvalidRequest, match=f"{param} has token id {wrong}; the vocabulary has 101") as caught:
                engine.add_request(request)
            assert caught.value.param == param
        with pytest.raises(InvalidRequest, match="no tokens"):
            engine.add_request(Request("bad", (), GREEDY))
        assert "bad" not in engine.scheduler.request_ids()

    engine = engine_for(folder, max_num_batched_tokens=16)
    refuse(engine)
    assert_equal(run(engine, greedy(PROMPTS), refuse), expected)
    # The last id of an odd vocabulary is as good as any.
    (answer,) = run(engine, [Request("last", (100, 5, 100), GREEDY.clone(logit_bias={100: 100.0}, max_tokens=3))])
    assert answer.token_ids == [100] * 3


def test_an_id_that_is_in_use_is_refused_and_its_owner_unaffected(save):
    model, folder = save()
    engine = engine_for(folder)

    def again(engine):
        if engine.has_unfinished():
            with pytest.raises(InvalidRequest, match="in use"):
                engine.add_request(Request("0", PROMPTS[1], GREEDY))

    assert_equal(run(engine, greedy(PROMPTS[:1]), again), [transformers_answer(model, PROMPTS[0])])


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_bfloat16_is_close_to_float32(save, kind):
    """Log-probabilities of what the bf16 engine generated; transformers has the same rounded weights, in fp32."""
    model, folder = save(kind=kind)
    answers = run(engine_for(folder, dtype="bfloat16", max_num_batched_tokens=32), greedy(PROMPTS))
    model = model.bfloat16().float()
    errors = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
        rows = logits.log_softmax(-1)
        for token_id, got, row in zip(answer.token_ids, answer.logprobs, rows, strict=True):
            assert got.top[0][1] == got.logprob  # bf16 logits are often equal, so not always the same token
            errors += [abs(got.logprob - row[token_id].item()), row.max().item() - row[token_id].item()]
    assert max(errors) < 0.15 and sum(errors) / len(errors) < 0.02


def test_kv_in_int8(save, round_kv):
    """Its log-probabilities are of transformers with keys and values rounded so; company and cache change none."""
    model, folder = save(initializer_range=0.1)
    answers = run(engine_for(folder, kv_cache_dtype="int8", max_num_batched_tokens=512), greedy(PROMPTS))

    def differences():
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
            rows = logits.log_softmax(-1)
            for token_id, got, row in zip(answer.token_ids, answer.logprobs, rows, strict=True):
                yield abs(got.logprob - row[token_id].item())

    plain = list(differences())
    round_kv(model, lambda rows: reference.dequantize_kv(reference.quantize_kv(rows), torch.float32))
    rounded = list(differences())
    print(f"to rounded {max(rounded):.6f}, to plain {max(plain):.6f}")
    assert max(rounded) < 0.1 * max(plain) < 0.01
    engine = engine_for(folder, kv_cache_dtype="int8", max_num_batched_tokens=8)
    for again in (run(engine, greedy(PROMPTS)), run(engine, greedy(PROMPTS))):
        assert [(a.token_ids, a.logprobs) for a in again] == [(a.token_ids, a.logprobs) for a in answers]
    assert again[-1].num_cached_tokens > 0


def test_kv_in_what_no_kernel_reads_is_refused(save):
    _, folder = save()
    with pytest.raises(
        ConfigError, match="kv_cache_dtype is fp8, which the kernels for cpu do not read: say auto or int8"
    ):
        engine_for(folder, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, int8, fp8, not 'int4'"):
        engine_for(folder, kv_cache_dtype="int4")


def test_warm_up_leaves_nothing_behind(save):
    model, folder = save()
    engine = engine_for(folder)
    engine.warm_up()
    assert not engine.executor.worker.runner.states
    assert_equal(run(engine, greedy(PROMPTS)), list(map(partial(transformers_answer, model), PROMPTS)))
