"""Offline inference, `LLM(...).generate(...)`, on a tiny model that has a tokenizer and a chat template."""

import json
import math
import os
import subprocess
import sys
import textwrap

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pagedray import LLM, SamplingParams
from pagedray.scheduler.errors import ContextLengthExceeded, InvalidRequest

CORPUS = ["the lighthouse keeper counted the ships that passed between the islands before dawn"] * 4
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if shout %}!{% endif %}"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def folder(tiny_llama, tmp_path):
    """A model of 300 tokens: three special ones, the 256 bytes, and merges; `add_bos` is off."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )
    wrapped.save_pretrained(tmp_path)
    tiny_llama(vocab_size=300, initializer_range=0.1).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def llm(folder):
    return make(folder)


def make(folder, **settings):
    settings = {"dtype": "float32", "num_kv_blocks": 64, "cpu_threads": 1, **settings}
    return LLM(model=str(folder), use_tqdm=False, **settings)


@pytest.fixture
def generate(llm):
    """llm.generate without a bar; afterwards nothing may be left in the engine."""

    def run(prompts, sampling_params=GREEDY):
        return llm.generate(prompts, sampling_params, use_tqdm=False)

    yield run
    assert_idle(llm)


def assert_idle(llm):
    assert not llm.engine.has_unfinished() and llm.engine.stats().num_used_blocks == 0
    llm.engine.scheduler.check_integrity()


def test_who_does_not_say_how_gets_what_the_models_makers_say(folder):
    said = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(said | {"temperature": 0.5, "top_k": 1}))
    llm = make(folder)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=1)
    texts = [llm.generate("the ships", p, use_tqdm=False)[0].outputs[0].text for p in (None, GREEDY)]
    assert texts[0] and texts[1].startswith(texts[0][:5])


def random_letters(llm, **changes):
    """Such that text is random lower-case letters, each a token: the text of a token is known, and nothing repeats."""
    bias = {llm.tokenizer.encode(c)[0]: 100.0 for c in "abcdefghijklmnopqrstuvwxyz"}
    return SamplingParams(temperature=2.0, seed=3, logit_bias=bias, ignore_eos=True, **changes)


# -- the call of the README -------------------------------------------------------------------------------------------


def test_the_call_of_the_readme(folder, capsys):
    llm = LLM(model=str(folder), tensor_parallel_size=1, trust_remote_code=True)
    outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.7, max_tokens=50))
    (output,) = outputs
    assert output.prompt == "Hello, my name is" and output.finished
    assert output.prompt_token_ids == llm.get_tokenizer().encode("Hello, my name is")
    (choice,) = output.outputs
    assert choice.index == 0 and choice.finish_reason in ("stop", "length") and choice.stop_reason is None
    assert 1 <= len(choice.token_ids) <= 50 and isinstance(choice.text, str)
    assert choice.logprobs is None and choice.cumulative_logprob is None
    bars = capsys.readouterr().err
    assert "Loading weights" in bars and "Generating" in bars
    assert_idle(llm)


def test_it_needs_no_ray(folder):
    script = """
        import sys
        from pagedray import LLM, SamplingParams
        assert "torch" not in sys.modules or "pagedray.cluster.llm" in sys.modules
        llm = LLM(model=sys.argv[1], tensor_parallel_size=1, cpu_threads=1, use_tqdm=False)
        (output,) = llm.generate(["the ships"], SamplingParams(temperature=0.7, max_tokens=5), use_tqdm=False)
        assert output.finished
        print(sorted(m for m in sys.modules if m.split(".")[0] in ("ray", "fastapi", "prometheus_client")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_all_forms_of_a_prompt_give_the_same(generate, llm):
    text = "the ships"
    ids = llm.tokenizer.encode(text)
    forms = [text, [text], ids, [ids], tuple(ids), {"prompt": text}, [{"prompt": text}], {"prompt_token_ids": ids}]
    answers = [generate(form) for form in forms]
    assert all(len(a) == 1 for a in answers)
    assert len({tuple(a.outputs[0].token_ids) for (a,) in answers}) == 1
    assert all(a.prompt_token_ids == ids for (a,) in answers)
    assert [a.prompt for (a,) in answers] == [text, text, None, None, None, text, text, None]


def test_outputs_come_in_the_order_of_the_prompts(generate):
    prompts = ["dawn", "the islands between the ships " * 5, "a", "keeper", "the islands", "passed that"]
    lengths = [9, 3, 1, 12, 2, 7]
    params = [GREEDY.clone(max_tokens=n) for n in lengths]
    together = generate(prompts, params)
    assert [o.prompt for o in together] == prompts
    assert [len(o.outputs[0].token_ids) for o in together] == lengths
    assert [int(o.request_id) for o in together] == list(range(6))
    for prompt, one, output in zip(prompts, params, together, strict=True):
        (alone,) = generate(prompt, one)
        assert alone.outputs == output.outputs


def test_mixed_forms_in_one_call_and_none_at_all(generate):
    outputs = generate(["a", [5, 6, 7], {"prompt": "b"}, {"prompt_token_ids": [8]}])
    assert [o.prompt for o in outputs] == ["a", None, "b", None]
    assert [o.prompt_token_ids for o in outputs][1::2] == [[5, 6, 7], [8]]
    assert generate([]) == []
    assert generate([], []) == []


def test_default_sampling_params(generate):
    (output,) = generate("the ships", None)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_a_repeated_prompt_is_found_in_the_prefix_cache(generate):
    ids = list(range(3, 43))
    assert generate(ids)[0].num_cached_tokens == 0
    assert generate(ids)[0].num_cached_tokens == 32


# -- choices and seeds ------------------------------------------------------------------------------------------------


def test_n_choices_differ_and_a_seed_repeats_them(generate, folder):
    params = SamplingParams(n=4, temperature=1.0, max_tokens=12, seed=11, ignore_eos=True)
    first, second = generate(["the ships", "dawn"], params)
    for output in (first, second):
        assert [c.index for c in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert generate("the ships", params)[0].outputs == first.outputs
    assert generate("the ships", params.clone(n=2))[0].outputs == first.outputs[:2]
    assert generate("the ships", params.clone(seed=12))[0].outputs != first.outputs


def test_without_seeds_calls_differ_and_the_engine_seed_repeats_them_all(folder):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)

    def three_calls(**settings):
        llm = make(folder, **settings)
        return [
            o.outputs[0].token_ids for _ in range(3) for o in llm.generate(["dawn", "dawn"], params, use_tqdm=False)
        ]

    tokens = three_calls()
    assert len(set(map(tuple, tokens))) == 6
    assert three_calls() == tokens
    assert three_calls(seed=5) != tokens


# -- text, stop strings and tokens ------------------------------------------------------------------------------------


def test_text_is_the_text_of_the_tokens(generate, llm):
    outputs = generate(["a", "b", "dawn"], random_letters(llm, max_tokens=20))
    for (choice,) in (o.outputs for o in outputs):
        assert len(choice.text) == 20 and choice.text.islower()
        assert choice.text == llm.tokenizer.decode(choice.token_ids)


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it(generate, llm):
    params = random_letters(llm, max_tokens=30)
    ((whole,),) = (o.outputs for o in generate("dawn", params))
    stop = whole.text[7:10]
    begin = whole.text.index(stop)
    for include in (False, True):
        (output,) = generate("dawn", params.clone(stop=["never", stop], include_stop_str_in_output=include))
        (choice,) = output.outputs
        assert choice.text == whole.text[: begin + 3 * include]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert choice.token_ids == whole.token_ids[: begin + 3]


def test_a_stop_string_ends_one_choice_and_not_its_siblings(generate, llm):
    params = random_letters(llm, n=3, max_tokens=24)
    (whole,) = generate("dawn", params)
    stop = whole.outputs[1].text[3:7]
    assert all(stop not in c.text for c in whole.outputs[::2])
    (stopped,) = generate("dawn", params.clone(stop=stop))
    assert stopped.outputs[0] == whole.outputs[0] and stopped.outputs[2] == whole.outputs[2]
    assert stopped.outputs[1].text == whole.outputs[1].text[:3] and stopped.outputs[1].stop_reason == stop


def test_a_stop_string_complete_with_the_last_token_and_one_that_is_not(generate, llm):
    params = random_letters(llm, max_tokens=10)
    text = generate("dawn", params)[0].outputs[0].text
    assert text[-3:] not in text[:-1]
    (choice,) = generate("dawn", params.clone(stop=text[-3:]))[0].outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[:-3], "stop", text[-3:])
    (choice,) = generate("dawn", params.clone(stop=text[-3:] + "?"))[0].outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "length", None)


@pytest.mark.parametrize("include", [False, True])
def test_stop_tokens_and_the_end_of_sequence(generate, llm, include):
    eos = llm.tokenizer.encode("<eos>")[0]
    letter = llm.tokenizer.encode("q")[0]
    params = GREEDY.clone(min_tokens=0, ignore_eos=False, include_stop_str_in_output=include)
    (choice,) = generate("dawn", params.clone(stop_token_ids=[letter], logit_bias={letter: 100.0}))[0].outputs
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([letter], "stop", letter)
    assert choice.text == ("q" if include else "")
    (choice,) = generate("dawn", params.clone(logit_bias={eos: 100.0}))[0].outputs
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([eos], "stop", None)
    assert choice.text == ""  # a special token: not shown, included or not
    (choice,) = generate("dawn", params.clone(logit_bias={eos: 100.0}, min_tokens=3))[0].outputs
    assert len(choice.token_ids) == 4 and choice.token_ids[-1] == eos
    (choice,) = generate("dawn", params.clone(logit_bias={eos: 100.0}, ignore_eos=True, max_tokens=5))[0].outputs
    assert (choice.token_ids, choice.finish_reason, choice.text) == ([eos] * 5, "length", "")


# -- logprobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5])
def test_logprobs_of_each_token(generate, llm, k):
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=12, ignore_eos=True, logprobs=k, n=2)
    for choice in generate("the ships", params)[0].outputs:
        assert len(choice.logprobs) == len(choice.token_ids) == 12
        for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
            values = [entry.logprob for entry in position.values()]
            assert token_id in position and max(1, k) <= len(position) <= k + 1
            assert all(math.isfinite(v) and v <= 0 for v in values) and sum(map(math.exp, values)) <= 1 + 1e-6
            assert values[:k] == sorted(values, reverse=True)[:k]
            assert all(entry.decoded_token == llm.tokenizer.token_text(t) for t, entry in position.items())
        chosen = [p[t].logprob for p, t in zip(choice.logprobs, choice.token_ids, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(chosen))


def test_logprobs_stop_with_the_tokens(generate, llm):
    params = random_letters(llm, max_tokens=30, logprobs=2)
    text = generate("dawn", params)[0].outputs[0].text
    (choice,) = generate("dawn", params.clone(stop=text[7:10]))[0].outputs
    assert len(choice.logprobs) == len(choice.token_ids) == text.index(text[7:10]) + 3


@pytest.mark.parametrize("n", [1, 2])
def test_logprobs_of_the_prompt(generate, llm, n):
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=4, prompt_logprobs=3, n=n)
    asked, single, plain = generate(["the ships", "a", "a"], [params, params, GREEDY])
    assert len(asked.prompt_logprobs) == len(asked.prompt_token_ids) > 2 and asked.prompt_logprobs[0] is None
    for position, token_id in zip(asked.prompt_logprobs[1:], asked.prompt_token_ids[1:], strict=True):
        values = [entry.logprob for entry in position.values()]
        assert token_id in position and 3 <= len(position) <= 4 and values[:3] == sorted(values, reverse=True)[:3]
    (as_generated,) = generate([asked.prompt_token_ids[:-1]], GREEDY.clone(max_tokens=1, logprobs=3))[0].outputs
    last = asked.prompt_logprobs[-1]
    assert as_generated.logprobs[0].keys() <= last.keys()
    assert all(entry.logprob == pytest.approx(last[t].logprob) for t, entry in as_generated.logprobs[0].items())
    assert single.prompt_logprobs == [None] and plain.prompt_logprobs is None


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_answers_one_conversation_or_several(llm):
    hello = [{"role": "user", "content": "hello"}]
    longer = [*hello, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "the ships?"}]

    def ids(text):
        return llm.tokenizer.encode(text, add_special_tokens=False)

    (one,) = llm.chat(hello, GREEDY, use_tqdm=False)
    assert one.prompt_token_ids == ids("<|user|>hello<eos><|assistant|>")
    both = llm.chat([hello, longer], [GREEDY, GREEDY.clone(max_tokens=3)], use_tqdm=False)
    assert both[0].outputs == one.outputs
    assert both[1].prompt_token_ids == ids(
        "<|user|>hello<eos><|assistant|>yes<eos><|user|>the ships?<eos><|assistant|>"
    )
    assert len(both[1].outputs[0].token_ids) == 3
    (plain,) = llm.generate(one.prompt_token_ids, GREEDY, use_tqdm=False)
    assert plain.outputs == one.outputs
    (shouted,) = llm.chat(hello, GREEDY, use_tqdm=False, chat_template_kwargs={"shout": True})
    assert shouted.prompt_token_ids == ids("<|user|>hello<eos><|assistant|>!")
    (bare,) = llm.chat(hello, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt_token_ids == ids("<|user|>hello<eos>")
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat([hello, []], GREEDY, use_tqdm=False)
    assert_idle(llm)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_wrong_number_of_sampling_params_is_refused(generate):
    for count in (0, 1, 3):
        with pytest.raises(InvalidRequest, match=f"{count} sampling_params for 2 prompts"):
            generate(["a", "b"], [GREEDY] * count)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([3] * 128, ContextLengthExceeded, "context of 128"),
        ("ships " * 500, ContextLengthExceeded, "context of 128"),
        ([3, 300], InvalidRequest, "token id 300"),
        ([-1], InvalidRequest, "token id -1"),
        ([], InvalidRequest, "no tokens"),
        ("", InvalidRequest, "no tokens"),
        ("\ud800", InvalidRequest, "surrogate"),
        ({"text": "a"}, InvalidRequest, "prompt"),
        ([3, 4.5], InvalidRequest, "4.5"),
        ([3, "x"], InvalidRequest, "x"),
    ],
    ids=lambda v: str(v)[:20].encode("ascii", "replace").decode() if not isinstance(v, type) else v.__name__,
)
def test_a_refused_prompt_takes_its_siblings_along_and_the_llm_stays_usable(llm, bad, error, message):
    (before,) = llm.generate("dawn", GREEDY, use_tqdm=False)
    steps = llm.engine.stats().num_steps
    with pytest.raises(error, match=message):
        llm.generate(["dawn", "the ships", bad, "keeper"], GREEDY.clone(n=2), use_tqdm=False)
    assert_idle(llm)
    assert llm.engine.stats().num_steps == steps, "something ran"
    (after,) = llm.generate("dawn", GREEDY, use_tqdm=False)
    assert after.outputs == before.outputs


def test_an_interrupt_leaves_the_llm_usable(llm, monkeypatch):
    (before,) = llm.generate("dawn", GREEDY, use_tqdm=False)
    step = llm.engine.step
    calls: list[None] = []

    def interrupted():
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["dawn", "the ships"], GREEDY, use_tqdm=False)
    assert_idle(llm)
    (after,) = llm.generate("dawn", GREEDY, use_tqdm=False)
    assert after.outputs == before.outputs
