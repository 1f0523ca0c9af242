"""Tokenizers: ids of a GGUF are those of the original pipeline; templates, special tokens, bytes."""

import json
import pickle
import re
import time

import gguf
import pytest
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from pagedray.cluster.text.tokenizer import Tokenizer
from pagedray.scheduler.errors import CheckpointError, InvalidRequest

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 days, isn't it? We'll see.",
    "def f(x):\n    return x + 1  # comment\n\n\tprint('hello world')\r\n",
    "L'été à la plage, où naïve Zoë dîne; Straße, Ünïcode, Ελληνικά, Русский язык.",
    "日本語のテキストと中文文本，한국어 텍스트。 ไทย हिन्दी العربية",
    "🎉🚀 emoji 👩‍👩‍👧 and symbols ∑∫√ → ½ ² Ⅷ ٣",
] * 3
TEXTS = [
    "",
    " ",
    "   \n\n \t x",
    "hello world",
    "  leading and trailing  ",
    "a1b22c333 4444 55555",
    "don't DON'T we'LL 'tis",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|> spaced <|im_end|>",
    "<|im_sta rt|>",
    "e\u0301 é \u00a0nbsp\u2003em\u200bzero",
    "\x00\x01\x7f",
    "x" * 500,
    "1" * 50,
    *CORPUS[:5],
    " ".join(CORPUS[:5]),
]

# What the originals have, each in its own words.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIPELINES = {
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(_LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(_LLAMA3.replace("{1,3}", "")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def original(pre):
    """A tokenizer trained here, with the pipeline that tokenizers of this name have."""
    backend = Backend(models.BPE(ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(PIPELINES[pre])
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write(path, model, tokens, types, *, merges=None, scores=None, pre=None, template=None, ids=(), **flags):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if template is not None:
        writer.add_chat_template(template)
    for name, i in ids:
        getattr(writer, f"add_{name}_token_id")(i)
    for name, value in flags.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def export(path, backend, pre, **more):
    """As llama.cpp's converter writes a byte-level tokenizer."""
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens]
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    more = {"ids": (("bos", 1), ("eos", 2)), **more}
    return write(path, "gpt2", tokens, types, merges=merges, pre=pre, **more)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chat_file(tmp_path_factory):
    def make(template=CHATML, **more):
        path = tmp_path_factory.mktemp("gguf") / "chat.gguf"
        return export(path, original("smollm"), "smollm", template=template, **more)

    return make


@pytest.fixture(scope="module")
def chat(chat_file):
    return Tokenizer.load(chat_file())


# ids of byte-level GGUFs


@pytest.mark.parametrize("pre", PIPELINES)
def test_ids_are_those_of_the_original(tmp_path, pre):
    backend = original(pre)
    tokenizer = Tokenizer.load(export(tmp_path / "t.gguf", backend, pre, add_bos_token=False))
    assert len(backend.encode(" ".join(CORPUS)).ids) < len(" ".join(CORPUS))  # there are merges to get wrong
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids, text
        if pre != "qwen2":  # normalizes
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_pipelines_differ_on_these_texts():
    """Else the test above could not tell one from another."""
    texts = " ".join(TEXTS)
    pieces = {
        pre: tuple(p for p, _ in pre_tokenizers.Sequence(pipeline).pre_tokenize_str(texts))
        for pre, pipeline in PIPELINES.items()
    }
    assert len(set(pieces.values())) == len(pieces)


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="pre-tokenizer 'martian' is not supported; supported: gpt-2"):
        Tokenizer.load(export(tmp_path / "t.gguf", original("smollm"), "martian"))


def test_damaged_vocabularies_are_refused(tmp_path):
    path = tmp_path / "t.gguf"
    for tokens, merges, message in (
        (["a", "b", "a"], [], "holds a token twice"),
        (["a", "b", "c"], ["a x"], "cannot be built"),
        (["a", "b", "c"], ["ab"], "'ab', which is not two tokens"),
    ):
        file = write(path, "gpt2", tokens, [1, 1, 1], merges=merges, pre="gpt-2")
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.load(file)
    with pytest.raises(CheckpointError, match="2 tokens but 1 token types"):
        Tokenizer.load(write(path, "gpt2", ["a", "b"], [1], merges=["a b"], pre="gpt-2"))
    with pytest.raises(CheckpointError, match="bos_token is 7, but there are 3 tokens"):
        tokens = ["a", "b", "ab"]
        Tokenizer.load(write(path, "gpt2", tokens, [1, 1, 1], merges=["a b"], pre="gpt-2", ids=[("bos", 7)]))
    with pytest.raises(CheckpointError, match="tokenizer model 'rwkv' is not supported"):
        Tokenizer.load(write(path, "rwkv", ["a"], [1]))


# SentencePiece


def spm_vocabulary():
    """Pieces with scores: byte tokens, then merges as SentencePiece numbers them, best first."""
    pieces = [("<unk>", TokenType.UNKNOWN, 0.0), ("<s>", TokenType.CONTROL, 0.0), ("</s>", TokenType.CONTROL, 0.0)]
    pieces += [(f"<0x{byte:02X}>", TokenType.BYTE, 0.0) for byte in range(256)]
    merges = ["▁t", "he", "in", "▁the", "ing", "▁▁", "▁▁▁▁", "ab", "abab", "lo", "llo", "hello", "▁hello"]
    pieces += [(piece, TokenType.NORMAL, float(-rank)) for rank, piece in enumerate(merges)]
    characters = sorted({*"▁abcdefghilnoprtuwxyz.é日"})
    pieces += [(c, TokenType.NORMAL, float(-len(merges) - rank)) for rank, c in enumerate(characters)]
    return pieces


def export_spm(path, **more):
    tokens, types, scores = zip(*spm_vocabulary(), strict=True)
    more = {"ids": (("bos", 1), ("eos", 2), ("unk", 0)), **more}
    return write(path, "llama", list(tokens), list(types), scores=list(scores), **more)


def sentencepiece_bpe(text):
    """SentencePiece's algorithm, by its definition: the best-scored adjacent pair, leftmost first, again and again."""
    pieces = spm_vocabulary()
    ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    score = {piece: value for piece, kind, value in pieces if kind == TokenType.NORMAL}
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [(score[a + b], -i) for i, (a, b) in enumerate(zip(symbols, symbols[1:])) if a + b in score]  # noqa: B905
        if not pairs:
            break
        i = -max(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return [i for s in symbols for i in ([ids[s]] if s in ids else [ids[f"<0x{b:02X}>"] for b in s.encode()])]


SPM_TEXTS = [
    "",
    "hello",
    "the thing in the",
    "  two   three    four     five",
    " " * 23 + "x",
    "ababababab aba",
    "bytes: 🎉ü\n\t日本",
    "hello\nhello",
    "été",
]


def test_sentencepiece_ids_follow_its_algorithm(tmp_path):
    tokenizer = Tokenizer.load(export_spm(tmp_path / "t.gguf"))
    for text in SPM_TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [1, *sentencepiece_bpe(text)], text
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids[1:])) == (b" " if text else b"") + text.encode()


def test_sentencepiece_without_a_space_in_front(tmp_path):
    with_space = Tokenizer.load(export_spm(tmp_path / "a.gguf"))
    without = Tokenizer.load(export_spm(tmp_path / "b.gguf", add_space_prefix=False, add_bos_token=False))
    assert without.encode(" hello") == with_space.encode("hello")[1:]
    assert without.decode(without.encode("hello")) == "hello" != without.decode(without.encode(" hello"))


def test_bytes_of_sentencepiece_tokens(tmp_path):
    tokenizer = Tokenizer.load(export_spm(tmp_path / "t.gguf"))
    vocabulary = tokenizer.backend.get_vocab()
    assert tokenizer.token_bytes(vocabulary["<0xE2>"]) == b"\xe2"
    assert tokenizer.token_text(vocabulary["<0xE2>"]) == "\ufffd"
    assert tokenizer.token_bytes(vocabulary["▁the"]) == b" the"
    assert tokenizer.token_bytes(vocabulary["</s>"]) == b"</s>"
    assert tokenizer.token_bytes(10**6) == b""


# special tokens


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_bos_and_eos_are_added_where_the_file_says_so(chat_file, flags):
    tokenizer = Tokenizer.load(chat_file(**flags))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    end = [2] if "add_eos_token" in flags else []
    assert tokenizer.encode("hello") == [1, *plain, *end]
    assert tokenizer.encode("<|im_start|>hello") == [1, *plain, *end]  # spelled out: not doubled
    assert tokenizer.encode("<|im_start|><|im_start|>hello") == [1, 1, *plain, *end]
    assert tokenizer.encode("<|im_start|>hello", add_special_tokens=False) == [1, *plain]


def test_llama3_adds_bos_unless_the_file_says_otherwise(tmp_path):
    backend = original("llama-bpe")
    assert Tokenizer.load(export(tmp_path / "a.gguf", backend, "llama-bpe")).encode("hi")[0] == 1
    assert Tokenizer.load(export(tmp_path / "b.gguf", backend, "llama-bpe", add_bos_token=False)).encode("hi")[0] != 1


def test_special_ids_and_end_tokens(chat):
    assert chat.special_ids == {0, 1, 2} and chat.bos_token_id == 1
    assert chat.eos_token_ids == (2, 0)  # the file's, then <|endoftext|>
    ids = [*chat.encode("hi"), 2]
    assert chat.decode(ids) == "hi" and chat.decode(ids, skip_special_tokens=False) == "hi<|im_end|>"


def test_user_defined_tokens_are_tokens_but_not_special(tmp_path):
    tokens = ["a", "b", "<think>", "ab"]
    types = [TokenType.NORMAL, TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.NORMAL]
    tokenizer = Tokenizer.load(write(tmp_path / "t.gguf", "gpt2", tokens, types, merges=["a b"], pre="gpt-2"))
    assert tokenizer.encode("ab<think>b") == [3, 2, 1]
    assert tokenizer.special_ids == frozenset() and tokenizer.decode([2]) == "<think>"


def test_lone_surrogates_are_the_clients_fault(chat):
    with pytest.raises(InvalidRequest, match="lone surrogate at character 3"):
        chat.encode("abc\ud800")
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        chat.apply_chat_template([{"role": "user", "content": "\udfff"}])


def test_long_texts_take_linear_time(chat):
    """Twenty times the text takes far less than four hundred times as long."""

    def seconds(text):
        start = time.process_time()  # not the clock: other work on the machine does not count
        chat.encode(text)
        return time.process_time() - start

    for unit in ("a", " ", "1", "ab ", "<|im_end|>", " \n", "é"):
        few, many = 20_000 // len(unit), 400_000 // len(unit)
        long, short = (min(seconds(unit * count) for _ in range(3)) for count in (many, few))
        assert long < 100 * max(short, 2e-3), unit


# chat templates


def text_of(tokenizer, messages, **options):
    return tokenizer.decode(tokenizer.apply_chat_template(messages, **options), skip_special_tokens=False)


def test_chat_template(chat):
    assert chat.has_chat_template
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    ids = chat.apply_chat_template(messages)
    assert ids[0] == 1 and ids.count(2) == 2
    rendered = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.decode(ids, skip_special_tokens=False) == rendered
    assert ids == chat.encode(rendered, add_special_tokens=False)
    assert text_of(chat, messages, add_generation_prompt=False) == rendered.removesuffix("<|im_start|>assistant\n")


def test_final_message_can_be_continued(chat):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    text = text_of(chat, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nWell,")


def test_exactly_one_bos(chat_file):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.load(chat_file(template, add_bos_token=True))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids == [1, *tokenizer.encode("hi", add_special_tokens=False)]


def test_parts_are_joined_and_nothing_is_printed_as_python(chat):
    def content(value, **more):
        text = text_of(chat, [{"role": "user", "content": value, **more}], add_generation_prompt=False)
        return text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n")

    assert content([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]) == "one\ntwo"
    assert content(["one"]) == "one" and content([]) == ""
    assert content("x", name=None, tool_calls=None) == "x"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must not be empty"),
        (["hi"], "messages[0] must be an object with a role"),
        ([{"content": "hi"}], "messages[0] must be an object with a role"),
        ([{"role": "user", "content": {"text": "hi"}}], "messages[0].content must be a string"),
        ([{"role": "user", "content": 3}], "messages[0].content must be a string"),
        ([{"role": "user"}], "messages[0].content is required"),
        ([{"role": "user", "content": "x"}, {"role": "alien", "content": "x"}], "messages[1].role must be one of"),
        ([{"role": "", "content": "x"}], "messages[0].role must be one of"),
        ([{"role": "User", "content": "x"}], "messages[0].role must be one of"),
        ([{"role": "assistant"}, {"role": "user", "content": None}], "messages[1].content is required"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "part of type 'image_url'; this model takes text only",
        ),
        ([{"role": "assistant", "content": "x", "tool_calls": 5}], "tool_calls must be an array"),
    ],
)
def test_messages_without_a_text_form_are_refused(chat, messages, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        chat.apply_chat_template(messages)


def test_roles_are_openais_and_those_that_the_template_names(chat_file):
    named = """{% if m.role == 'ipython' or m.role == "critic" %}!{% endif %}"""
    template = f"{{% for m in messages %}}{named}{{{{ m.role }}}}{{% endfor %}}"
    tokenizer = Tokenizer.load(chat_file(template))
    for role in ("system", "user", "assistant", "tool"):
        assert text_of(tokenizer, [{"role": role, "content": "x"}]) == role
    for role in ("ipython", "critic"):
        assert text_of(tokenizer, [{"role": role, "content": "x"}]) == f"!{role}"
    with pytest.raises(InvalidRequest, match="another that the chat template of .* names, not 'aaa") as refused:
        tokenizer.apply_chat_template([{"role": "a" * 10_000, "content": "x"}])
    assert refused.value.param == "messages[0].role" and len(refused.value.message) < 1000


def test_roles_that_templates_do_not_name_go_under_those_that_they_know(chat_file):
    template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    roles = ("system", "user", "developer", "function", "developer")
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    assert text_of(Tokenizer.load(chat_file(template)), messages) == "system=0\n\n2\n\n4;user=1;tool=3;"
    names = Tokenizer.load(chat_file(template + "{% if messages[0].role == 'developer' %}!{% endif %}"))
    assert text_of(names, messages) == "system=0;user=1;developer=2;tool=3;developer=4;"


def test_reasoning_has_two_names(chat_file):
    tokenizer = Tokenizer.load(chat_file("{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"))
    assert text_of(tokenizer, [{"role": "assistant", "content": "x", "reasoning": "hm"}]) == "hm"
    assert text_of(tokenizer, [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]) == "hm"


def test_arguments_that_are_no_object_are_an_empty_one(chat_file, caplog):
    """A call that `max_tokens` cut off is in the history for ever."""
    template = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }};{% endfor %}"
    tokenizer = Tokenizer.load(chat_file(template))
    for arguments, printed in [('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a": 1}'), ("", "{}"), (None, "{}")]:
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        assert text_of(tokenizer, [{"role": "assistant", "tool_calls": calls}]) == f"{printed};"
    assert not caplog.records
    broken = ('{"a": ', "[" * 9**5, "[1]", "null")
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in broken]
    assert text_of(tokenizer, [{"role": "assistant", "tool_calls": calls}]) == "{};" * len(broken)
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "messages[0].tool_calls" in caplog.text


@pytest.mark.parametrize("arguments", [0, 1.5, False, []], ids=repr)
def test_arguments_that_are_neither_text_nor_an_object_are_refused(chat_file, arguments):
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(InvalidRequest, match="arguments must be JSON text") as refused:
        Tokenizer.load(chat_file("{{ 1 }}")).apply_chat_template([{"role": "assistant", "tool_calls": calls}])
    assert refused.value.param == "messages[0].tool_calls"


def test_a_templates_own_words_reach_the_client(chat_file):
    tokenizer = Tokenizer.load(chat_file("{{ raise_exception('roles must alternate user/assistant') }}"))
    with pytest.raises(InvalidRequest, match="roles must alternate user/assistant") as refused:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert refused.value.param == "messages" and str(pickle.loads(pickle.dumps(refused.value)))


def test_a_template_that_fails_is_not_an_internal_error(chat_file):
    tokenizer = Tokenizer.load(chat_file("{{ messages[0].content + 1 }}"))
    with pytest.raises(InvalidRequest, match="the chat template refused the messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_without_a_template_the_operator_is_told_what_to_set(chat_file):
    tokenizer = Tokenizer.load(chat_file(None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="^chat.gguf has no chat template.*set tokenizer"):  # no folder's name
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_tools_and_variables_reach_the_template(chat_file):
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
        "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    )
    tokenizer = Tokenizer.load(chat_file(template))
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert text_of(tokenizer, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == "Oslo"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert json.loads(text_of(tokenizer, [{"role": "user", "content": ""}], tools=tools)) == tools
    assert text_of(tokenizer, [{"role": "user", "content": "x"}], enable_thinking=True) == "xTrue"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "bos_token", "return_dict"])
def test_clients_cannot_replace_the_template_or_its_basics(chat, name):
    with pytest.raises(InvalidRequest, match=f"may not set {name}"):
        chat.apply_chat_template([{"role": "user", "content": "hi"}], **{name: "{{ 1 }}"})


# Hugging Face folders


@pytest.fixture
def folder(tmp_path):
    from transformers import PreTrainedTokenizerFast

    backend = original("smollm")
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[1], eos_token=SPECIAL[2], chat_template=CHATML
    )
    wrapped.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 0}')
    return tmp_path


def test_folder_gives_the_same_ids_as_transformers(folder):
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(str(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode("hi") == theirs.encode("hi") == [1, *ours.encode("hi", add_special_tokens=False)]
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_folder_and_gguf_agree(folder, chat_file):
    ours, gguf_file = Tokenizer.load(str(folder)), Tokenizer.load(chat_file(add_bos_token=True))
    for text in TEXTS:
        assert ours.encode(text) == gguf_file.encode(text)
    assert ours.vocab_size == gguf_file.vocab_size > 500
    for i in range(ours.vocab_size):
        assert ours.token_bytes(i) == gguf_file.token_bytes(i)


def test_end_tokens_of_a_folder(folder):
    assert Tokenizer.load(str(folder)).eos_token_ids == (0, 2)  # config.json's, and the tokenizer's own
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Tokenizer.load(str(folder)).eos_token_ids == (2, 0)


def test_a_lengths_limit_of_training_is_lifted(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(content))
    assert len(Tokenizer.load(str(folder)).encode("hello " * 100)) > 100


def test_tokenizer_from_elsewhere(folder, tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text('{"eos_token_id": 1}')
    tokenizer = Tokenizer.load(str(model), tokenizer=str(folder))
    assert tokenizer.vocab_size == Tokenizer.load(str(folder)).vocab_size and tokenizer.eos_token_ids == (1,)


def test_folder_without_a_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer: none of tokenizer\.json"):
        Tokenizer.load(str(folder))


def test_damaged_tokenizer_json(folder):
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        Tokenizer.load(str(folder))


# the demo model


def test_demo_model(demo_model):
    tokenizer = Tokenizer.load(str(demo_model))
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2, 0))
    assert len(tokenizer.special_ids) == 17
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert [tokenizer.token_text(i) for i in tokenizer.encode("Hello world 123")] == ["Hello", " world", " ", *"123"]
    assert text_of(tokenizer, [{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_demo_model_ids_are_those_of_the_original_pipeline(demo_model):
    """Vocabulary and merges from the file, read by llama.cpp's package, in the pipeline of SmolLM2's tokenizer.json."""
    fields = gguf.GGUFReader(demo_model).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(PIPELINES["smollm"])
    backend.add_special_tokens(tokens[:17])
    tokenizer = Tokenizer.load(str(demo_model))
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids, text
