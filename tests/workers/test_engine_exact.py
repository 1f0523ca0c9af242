"""Greedy output equals transformers', token for token in fp32, however the work is cut up.

transformers is asked once per prompt, over the prompt and our output together: if its likeliest token at every position
is the one we gave, its greedy generation gives the same tokens.
"""

import pytest
import torch

from pagedray.scheduler.request import Request, SamplingParams
from pagedray.workers.checkpoint.load import open_checkpoint
from pagedray.workers.config import EngineConfig
from pagedray.workers.engine import Engine

pytestmark = pytest.mark.slow

MAX_TOKENS = 32

SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."}
STORY = "The lighthouse keeper counted the ships that passed between the islands before dawn. "


def chat(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


CONVERSATIONS = [
    chat("Hi"),
    chat("What is the capital of France?"),
    chat("Write a haiku about rain."),
    chat("List three prime numbers."),
    chat("def fibonacci(n):"),
    chat("Explain photosynthesis to a child."),
    chat("What is 17 + 25?"),
    chat("Give me a synonym for 'happy'."),
    # an empty system prompt
    [{"role": "system", "content": ""}, *chat("Who are you?")],
    [{"role": "system", "content": ""}, *chat("Name a color.")],
    [{"role": "system", "content": ""}, *chat("Translate 'water' to Spanish.")],
    [SYSTEM, *chat("Why is the sky blue?")],
    # several turns
    chat("My name is Ada.", "Nice to meet you, Ada!", "What is my name?"),
    chat("Think of a number.", "I thought of 7.", "Double it.", "14.", "And once more?"),
    chat("Tell me a joke.", "Why did the chicken cross the road?", "Why?"),
    [SYSTEM, *chat("Hello", "Hello! How can I help?", "What is two times three?", "Six.", "Plus one?")],
    # other languages
    chat("Wie heißt die Hauptstadt von Österreich?"),
    chat("¿Cuántos días tiene una semana?"),
    chat("Quelle est la couleur du cheval blanc d'Henri IV ?"),
    chat("日本で一番高い山は何ですか？"),
    chat("你好，请介绍一下北京。"),
    chat("Какой сегодня день?"),
    chat("مرحبا، كيف حالك؟"),
    chat("한국의 수도는 어디입니까? 🙂"),
    # digits, spaces, code
    chat("Sort: 10 9 8 777 65536 3.14159"),
    chat("    indented\n\n\ttabs  and   runs"),
    chat("SELECT name FROM users WHERE age > 30;"),
    chat('{"a": [1, 2, {"b": null}]}'),
]


@pytest.fixture(scope="module")
def prompts(demo_model):
    """32 prompts as token ids, four of them of 1,000 tokens."""
    from pagedray.cluster.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(str(demo_model))
    ids = [tokenizer.apply_chat_template(c) for c in CONVERSATIONS]
    story = tokenizer.encode(STORY * 80)
    ids += [
        tokenizer.encode(f"Chapter {i}. ")[:10] + story[: 1000 - min(10, len(tokenizer.encode(f"Chapter {i}. ")))]
        for i in range(4)
    ]
    assert len(ids) == 32 and sum(len(p) == 1000 for p in ids) == 4
    return [tuple(p) for p in ids]


def engine_for(demo_model, **settings):
    # One thread: two that wait for each other at every operation crawl where something else keeps the cores busy.
    settings = {"max_model_len": 1200, "num_kv_blocks": 2048, "cpu_threads": 1, **settings}
    return Engine(EngineConfig.from_kwargs(model=str(demo_model), dtype="float32", **settings))


def run(engine, prompts, one_at_a_time=False, **sampling):
    """Greedy outputs of all prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, seed=0, **sampling)
    outputs = {str(i): [] for i in range(len(prompts))}
    todo = [Request(str(i), p, params) for i, p in enumerate(prompts)]
    while todo or engine.has_unfinished():
        while todo and not (one_at_a_time and engine.has_unfinished()):
            engine.add_request(todo.pop(0))
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return list(outputs.values())


@pytest.fixture(scope="module")
def alone(demo_model, prompts):
    return run(engine_for(demo_model, enable_prefix_caching=False), prompts, one_at_a_time=True)


def test_equals_transformers(demo_model, prompts, alone, transformers_config):
    checkpoint = open_checkpoint(str(demo_model))
    model = transformers_model(checkpoint, transformers_config(checkpoint.config))
    for i, (prompt, output) in enumerate(zip(prompts, alone, strict=True)):
        with torch.inference_mode():
            logits = model(torch.tensor([list(prompt) + output]), logits_to_keep=len(output) + 1).logits[0, :-1]
        assert logits.argmax(-1).tolist() == output, f"prompt {i}"
        assert len(output) == MAX_TOKENS or output[-1] in checkpoint.config.eos_token_ids


def test_all_batched_together(demo_model, prompts, alone):
    engine = engine_for(demo_model, enable_prefix_caching=False, max_num_seqs=32)
    assert run(engine, prompts) == alone


def test_prefill_in_chunks_of_16(demo_model, prompts, alone):
    engine = engine_for(demo_model, enable_prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=32)
    assert run(engine, prompts) == alone


def test_prefix_cache_cold_and_warm(demo_model, prompts, alone):
    engine = engine_for(demo_model, max_num_batched_tokens=100)
    assert run(engine, prompts) == alone
    hits = engine.stats().prefix_cache_hits
    assert run(engine, prompts) == alone
    assert engine.stats().prefix_cache_hits - hits >= 4 * 992


def test_preemptions(demo_model, prompts, alone):
    # 1,052 tokens for all: the largest request fits, barely, and small blocks run out one by one.
    engine = engine_for(
        demo_model, max_model_len=1050, block_size=4, num_kv_blocks=263, max_num_seqs=32, max_num_batched_tokens=128
    )
    assert run(engine, prompts) == alone
    assert engine.stats().num_preemptions > 0


def transformers_model(checkpoint, config):
    """SmolLM2 as transformers runs it, in fp32, with the weights of our loader."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(config).eval()
    state = {name: checkpoint.read(name).to(torch.float32) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model
