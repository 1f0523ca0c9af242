"""Structured outputs: what a matcher forbids, what a grammar may not be, and whole answers of a real engine."""

import json
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import EOS, byte_tokenizer
from llguidance import LLMatcher, LLTokenizer

from pagedray import LLM, SamplingParams, StructuredOutputsParams
from pagedray.cluster.text import grammar
from pagedray.cluster.text.grammar import MAX_GRAMMAR, GrammarCompiler, check_grammar, read_vocabulary
from pagedray.cluster.text.tokenizer import Tokenizer
from pagedray.scheduler.errors import InvalidRequest
from pagedray.scheduler.request import Request

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

WIDE = {"type": "object", "properties": {f"k{i}": {} for i in range(600)}}


@pytest.fixture
def compiler(monkeypatch):
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(grammar, "load_backend", lambda model, name: tokenizer.backend)
    return GrammarCompiler("any", None, tokenizer.eos_token_ids)


def spell(text):
    return byte_tokenizer().encode(text, add_special_tokens=False)


def allowed(matcher):
    """The texts of the tokens that may come next."""
    assert matcher.ready(20)
    tokenizer = byte_tokenizer()
    bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
    assert not bits[tokenizer.vocab_size :].any()
    return {tokenizer.token_text(int(t)) for t in np.flatnonzero(bits)}


def test_a_matcher_follows_its_choices(compiler):
    matcher = compiler(StructuredOutputsParams(choice=("Hello", "cde")), ())
    assert allowed(matcher) == {"H", "He", "Hell", "Hello", "c", "cd", "cde"}
    compiler.accept([matcher], spell("cd"))
    assert allowed(matcher) == {"e"}
    compiler.accept([matcher], spell("e"))
    assert allowed(matcher) == {EOS, "<|eot|>"}  # complete: only its end, in either of the model's ways


def test_a_mask_does_not_wait_for_a_thread_that_is_not_given_a_core(compiler):
    matcher = compiler(StructuredOutputsParams(regex="(ab|cd)+e"), ())
    assert allowed(matcher) == {"a", "c", "cd", "cde"}
    go_on = threading.Event()
    compiler._thread.submit(go_on.wait, 20)
    for token, following in (("a", {"b"}), ("b", {"a", "c", "cd", "cde", "e"}), ("cde", {EOS, "<|eot|>"})):
        compiler.accept([matcher], spell(token))
        assert allowed(matcher) == following
    assert not go_on.is_set()
    go_on.set()
    other = compiler(StructuredOutputsParams(regex="(ab|cd)+e"), ())
    assert other.ready(20)
    compiler.accept([other], spell("a"))
    compiler.accept([other], spell("b"))  # before anybody asked what "a" led to
    assert allowed(other) == {"a", "c", "cd", "cde", "e"}


def test_a_matcher_takes_up_what_was_generated_elsewhere(compiler):
    params = StructuredOutputsParams(regex="(ab)+c")
    one, other = compiler(params, ()), compiler(params, spell("aba"))
    assert one.ready(20) and other.ready(20)
    for token in spell("aba"):
        compiler.accept([one], [token])
    assert allowed(one) == allowed(other) == {"b"}


def test_sequences_of_a_step_go_on_together(compiler):
    forms = [StructuredOutputsParams(regex=r) for r in ("(ab|cd)+e", "a+b", "cd?e")]
    one, two, three = matchers = [compiler(form, ()) for form in forms]
    assert all(m.ready(20) for m in matchers)
    compiler.accept(matchers, [*spell("a"), *spell("a"), *spell("c")])
    assert [allowed(m) for m in matchers] == [{"b"}, {"a", "b"}, {"d", "e"}]
    compiler.accept([three, one], [*spell("d"), *spell("b")])
    assert [allowed(m) for m in matchers] == [{"a", "c", "cd", "cde", "e"}, {"a", "b"}, {"e"}]


@pytest.mark.parametrize("which", ["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def test_a_vocabulary_read_as_tokens_gives_the_masks_of_the_whole_tokenizer(which, request, monkeypatch):
    """Along texts that a grammar forces in part, with characters of several bytes."""
    if which == "tiny":
        ours = byte_tokenizer()
        monkeypatch.setattr(grammar, "load_backend", lambda model, name: ours.backend)
        model = "any"
    else:
        model = str(request.getfixturevalue("demo_model"))
        ours = Tokenizer.load(model)
    ends = ours.eos_token_ids
    fast, whole = read_vocabulary(model, None, ends), LLTokenizer(ours.backend.to_str(), eos_token=list(ends))
    text = '{"name": "Zoë 🙂 \\" x", "age": 7}'
    schema = SCHEMA | {"properties": SCHEMA["properties"] | {"name": {"type": "string"}}}
    for params in (
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(choice=(text, text[:5] + "m")),
        StructuredOutputsParams(regex=".*"),
    ):
        one, other = (LLMatcher(v, grammar._grammar(params), log_level=0) for v in (fast, whole))
        for token in [*ours.encode(text, add_special_tokens=False), ends[0]]:
            assert one.compute_bitmask() == other.compute_bitmask(), params
            assert one.consume_token(token) == other.consume_token(token)
        assert one.stop_reason() == other.stop_reason() != "InternalError"


def test_a_forced_text_that_the_tokenizer_would_change_goes_byte_by_byte(compiler):
    """An end of sequence spelt out is text, here as in a prompt's grammar; so is what normalizing would join."""
    matcher = compiler(StructuredOutputsParams(choice=(f"a{EOS}b", f"a{EOS}c")), ())
    for byte in f"a{EOS}".encode():
        text = chr(byte)
        assert text in allowed(matcher), text
        compiler.accept([matcher], spell(text))
    assert allowed(matcher) == {"b", "c"}


def test_a_vocabulary_read_ahead_is_read_once(monkeypatch):
    tokenizer, times = byte_tokenizer(), []
    monkeypatch.setattr(grammar, "load_backend", lambda model, name: times.append(model) or tokenizer.backend)
    compiler = GrammarCompiler("any", None, tokenizer.eos_token_ids)
    assert times == []
    compiler.prepare()
    compiler._thread.submit(lambda: None).result(20)
    assert times == ["any"]
    assert allowed(compiler(StructuredOutputsParams(regex="a"), ())) == {"a"}
    assert times == ["any"]


def test_a_grammar_is_compiled_beside_the_steps_and_given_up_in_time(compiler, monkeypatch, caplog):
    go_on = threading.Event()
    compiler._thread.submit(go_on.wait, 20)  # as a grammar that takes long
    params = StructuredOutputsParams(regex="ab")
    waits = compiler(params, ())
    assert not waits.ready() and not waits.ready(0.01)
    monkeypatch.setattr(grammar, "_COMPILE_SECONDS", 0.0)
    late = compiler(params, ())
    assert late.ready() and "not compiled in" in caplog.text
    assert allowed(late) == {EOS, "<|eot|>"}
    assert not waits.ready()
    go_on.set()
    assert allowed(waits) == {"a"}
    compiler.accept([waits, late], [*spell("a"), byte_tokenizer().eos_token_ids[0]])
    assert allowed(waits) == {"b"} and allowed(late) == {EOS, "<|eot|>"}


def test_a_grammar_that_nobody_waits_for_is_not_compiled(compiler):
    go_on = threading.Event()
    compiler._thread.submit(go_on.wait, 20)
    forgotten = compiler(StructuredOutputsParams(regex="a"), ())
    forgotten.cancel()
    go_on.set()
    assert allowed(compiler(StructuredOutputsParams(regex="b"), ())) == {"b"}
    assert forgotten._compiling.cancelled()


def test_a_grammar_that_cannot_be_compiled_ends_its_own_text_alone(compiler, caplog):
    assert allowed(compiler(StructuredOutputsParams(regex="(a"), ())) == {EOS, "<|eot|>"}
    assert allowed(compiler(StructuredOutputsParams(regex="a"), ())) == {"a"}


def test_a_broken_matcher_allows_the_end_and_nothing_else(compiler):
    matcher = compiler(StructuredOutputsParams(choice=("Hello",)), spell("x"))
    assert allowed(matcher) == {EOS, "<|eot|>"}


def test_a_vocabulary_that_cannot_be_read_ends_the_text_and_nothing_else(monkeypatch, caplog):
    monkeypatch.setattr(grammar, "load_backend", lambda model, name: 1 / 0)
    compiler = GrammarCompiler("any", None, byte_tokenizer().eos_token_ids)
    compiler.prepare()
    matcher = compiler(StructuredOutputsParams(regex="a"), ())
    assert allowed(matcher) == {EOS, "<|eot|>"} and "ZeroDivisionError" in caplog.text
    compiler.accept([matcher], byte_tokenizer().eos_token_ids[:1])
    assert allowed(matcher) == {EOS, "<|eot|>"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "(("}, "regular expression"),
        ({"json": '{"type": "nope"}'}, "nope"),
        ({"json": "{"}, "JSON schema"),
        ({"json": {"$ref": "http://example.org/x"}}, "does not fetch"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": ""}, "No 'root' rule"),
        ({"grammar": "root ::="}, "only the empty text fits it"),
        ({"grammar": 'start: ""'}, "only the empty text fits it"),
        ({"grammar": 'root ::= root "a"'}, "no text fits it"),
        ({"regex": ""}, "only the empty text fits it"),
        ({"regex": "a{0}"}, "only the empty text fits it"),
        ({"regex": r"[^\s\S]"}, "no text fits it"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"regex": "a" * (MAX_GRAMMAR + 1)}, "at most"),
        ({"json": {"multipleOf": 2147483648}}, "multipleOf must be at most 10000"),
        ({"json": {"items": {"allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}}}, "multipleOf must be at most"),
        ({"json": {"multipleOf": 1.000003}}, "multipleOf must be at most"),
        ({"json": '{"multipleOf": 1e-999999999}'}, "multipleOf must be at most"),
        ({"json": '{"multipleOf": 1e999999999}'}, "multipleOf must be at most"),
        ({"grammar": r'start: %json {"multi\u0070leOf": 999983}'}, "multipleOf must be at most"),
        ({"json": WIDE}, "too complex"),
        ({"json": {"type": "array", "items": WIDE, "minItems": 1}}, "too complex"),
        ({"json": "{}", "regex": "a"}, "together"),
        ({}, "none is set"),
        ({"choice": "ab"}, "list of one or more non-empty strings"),
        ({"choice": ["a", ""]}, "list of one or more non-empty strings"),
        ({"choice": []}, "list of one or more non-empty strings"),
        ({"choice": {"a": 1}}, "list of one or more non-empty strings"),
        ({"regex": 3}, "regex must be a string"),
        ({"json_object": 1}, "true or false"),
    ],
)
def test_what_is_no_grammar_is_refused(params, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refused:
        check_grammar(StructuredOutputsParams(**params), "structured_outputs")
    assert len(refused.value.message) < 500


def test_a_multiple_of_cents_and_of_hundreds_is_allowed():
    fields = {
        "price": {"multipleOf": 0.01},
        "share": {"multipleOf": 0.25},
        "lot": {"type": "integer", "multipleOf": 100},
    }
    check_grammar(StructuredOutputsParams(json={"type": "object", "properties": fields}), "structured_outputs")


@pytest.mark.parametrize("num_optional, num_required", [(300, 0), (0, 2000)])
def test_an_object_may_have_hundreds_of_fields(num_optional, num_required):
    names = [f"k{i}" for i in range(num_optional + num_required)]
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, {"type": "string"}),
        "required": names[num_optional:],
    }
    check_grammar(StructuredOutputsParams(json=schema), "structured_outputs")


@pytest.mark.parametrize("params", [{"regex": "a?"}, {"grammar": 'root ::= "a"?'}, {"json": {"const": ""}}])
def test_a_text_that_may_be_empty_is_a_form(params):
    check_grammar(StructuredOutputsParams(**params), "structured_outputs")


def test_ignore_eos_does_not_go_with_a_form():
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True), ignore_eos=True)


# -- a real engine


@pytest.fixture(scope="module")
def llm(demo_model):
    return LLM(str(demo_model), use_tqdm=False, max_model_len=512, num_kv_blocks=40, max_num_seqs=4)


def answer(llm, params, text="Write about Ann, who is 7.", **more):
    sampling = SamplingParams(structured_outputs=params, max_tokens=60, seed=1, **more)
    return llm.chat([{"role": "user", "content": text}], sampling, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_keep_to_a_schema(llm, temperature):
    output = answer(llm, StructuredOutputsParams(json=SCHEMA), temperature=temperature)
    value = json.loads(output.text)
    assert output.finish_reason == "stop" and len(value["name"]) <= 5 and value["age"] <= 99


def test_answers_keep_to_a_regex_a_choice_and_a_grammar(llm):
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", answer(llm, StructuredOutputsParams(regex="[0-9]{3}-[0-9]{4}")).text)
    assert answer(llm, StructuredOutputsParams(choice=("red", "green"))).text in ("red", "green")
    assert answer(llm, StructuredOutputsParams(grammar='start: "x" ("+" "y")*\n'), temperature=2).text[0] == "x"


def test_min_tokens_does_not_outlast_a_grammar(llm):
    output = answer(llm, StructuredOutputsParams(choice=("red",)), min_tokens=20)
    assert (output.text, output.finish_reason) == ("red", "stop")


def test_logprobs_stay_the_models(llm):
    output = answer(llm, StructuredOutputsParams(choice=("zebra",)), temperature=0, logprobs=2)
    assert all(-100 < p.logprob <= 0 for at in output.logprobs for p in at.values())


def test_a_preempted_answer_goes_on_in_its_grammar(llm):
    """Four long answers do not fit 40 blocks of 16 tokens: some are computed again, with the same text."""
    params = StructuredOutputsParams(regex="([a-z]{3}, ){30}end")
    prompt = "word " * 130
    sampling = SamplingParams(structured_outputs=params, max_tokens=200, temperature=0.0)
    alone = llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].text
    before = llm.engine.stats().num_preemptions
    together = llm.generate([f"{i} {prompt}" for i in range(4)], sampling, use_tqdm=False)
    assert llm.engine.stats().num_preemptions > before
    for text in [alone, *(o.outputs[0].text for o in together)]:
        assert re.fullmatch("([a-z]{3}, ){30}end", text)


def test_a_grammar_that_takes_long_to_compile_holds_up_its_own_answer_alone(llm):
    engine, prompt = llm.engine, tuple(range(300, 340))
    form = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]{6}"), seed=1, prompt_logprobs=0)
    free = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
    engine.executor.prepare_grammars()
    engine.executor.worker.grammars._thread.submit(int).result(60)

    def run(slow):
        go_on = threading.Event()
        if slow:
            engine.executor.worker.grammars._thread.submit(go_on.wait, 60)
        engine.add_request(Request("form", prompt, form))
        engine.add_request(Request("free", prompt[:9], free))
        tokens, told, ended = {"form": [], "free": []}, [], []
        while engine.has_unfinished():
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
                told += output.prompt_logprobs
                ended += [output.request_id] * (output.finish_reason is not None)
            if "free" in ended:
                go_on.set()
        return tokens, told, ended

    *undisturbed, ended = run(slow=False)
    assert ended == ["form", "free"] and len(undisturbed[1]) == 39
    *held_up, ended = run(slow=True)
    assert ended == ["free", "form"] and held_up == undisturbed


def test_a_model_without_a_token_that_ends_a_text_takes_no_grammar(llm, monkeypatch):
    endless = replace(llm.engine.executor.model_config, eos_token_ids=())
    monkeypatch.setattr(llm.engine.executor, "model_config", endless)
    form = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), seed=1)
    with pytest.raises(InvalidRequest, match="a token that ends a text"):
        llm.engine.add_request(Request("endless", (300, 301), form))
    assert not llm.engine.has_unfinished()
