"""Text as it grows: the same text however it came, nothing shown too early, nothing lost."""

import pytest
import tokenizers
from fake_engine import BOS, EOS, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from pagedray.cluster.text.detokenizer import Detokenizer
from pagedray.scheduler.request import SamplingParams

TOKENIZER = byte_tokenizer()
EOS_ID, EOS2_ID = TOKENIZER.eos_token_ids


def ids(text, tokenizer=TOKENIZER):
    return tokenizer.encode(text, add_special_tokens=False)


def byte_ids(text):
    table = {TOKENIZER.token_bytes(i): i for i in range(256)}
    raw = text if isinstance(text, bytes) else text.encode()
    return [table[bytes([b])] for b in raw]


def run(token_ids, finish="length", cuts=None, prompt=(), tokenizer=TOKENIZER, **sampling):
    """Feed tokens one by one, or cut at `cuts`. Returns the deltas; the last call carries `finish`."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **sampling), prompt)
    cuts = range(1, len(token_ids)) if cuts is None else cuts
    edges = [0, *cuts, len(token_ids)]
    deltas = []
    for low, high in zip(edges, edges[1:], strict=False):
        deltas.append(detokenizer.add(token_ids[low:high], finish if high == len(token_ids) else None))
        if deltas[-1].finish_reason:
            break
    return deltas


def text_of(deltas):
    return "".join(d.text for d in deltas)


def test_characters_that_span_tokens_come_whole():
    deltas = run(byte_ids("né €🙂!"))
    assert [d.text for d in deltas] == ["n", "", "é", " ", "", "", "€", "", "", "", "🙂", "!"]


def test_a_cut_character_at_the_end_is_flushed_as_one_replacement():
    deltas = run(byte_ids("a🙂"[:2].encode()[:-1]))
    assert [d.text for d in deltas] == ["a", "", "", "\ufffd"]


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40), st.booleans())
def test_the_text_is_what_decoding_all_ids_gives(token_ids, skip):
    deltas = run(token_ids, skip_special_tokens=skip)
    assert text_of(deltas) == TOKENIZER.decode(token_ids, skip_special_tokens=skip)


@given(st.text(max_size=30))
def test_valid_text_never_shows_a_replacement_on_its_way(text):
    text = text.replace("\ufffd", "")
    for delta in run(byte_ids(text)):
        assert "\ufffd" not in delta.text


@pytest.mark.parametrize(("tokens", "finish"), [([], "length"), ([EOS_ID], "stop"), (ids(BOS), "length")])
@pytest.mark.parametrize("stop", [(), ("\ufffd",)])
def test_a_character_that_the_prompt_left_cut_is_not_the_answers(tokens, finish, stop):
    deltas = run(tokens, finish, prompt=byte_ids("é")[:1], stop=stop)
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop_reason) == ("", finish, None)


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_prompt_that_ends_inside_a_character_is_continued(finish):
    euro = byte_ids("€")
    assert text_of(run([*euro[2:], *ids("x"), EOS_ID], finish, prompt=[*ids("a"), *euro[:2]])) == "€x"


def reference(text, stops, include):
    """Character by character: the text up to the first stop string that is complete."""
    for end in range(len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300)
@given(
    st.text("abé🙂", max_size=25),
    st.lists(st.text("abé🙂", min_size=1, max_size=6), max_size=4),
    st.booleans(),
    st.data(),
)
def test_stop_strings_cut_the_text_however_it_came(text, stops, include, data):
    token_ids = byte_ids(text)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(token_ids) - 1)))) if len(token_ids) > 1 else []
    deltas = run(token_ids, cuts=cuts, stop=stops, include_stop_str_in_output=include)
    expected, stop = reference(text, stops, include)
    assert text_of(deltas) == expected
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (("stop", stop) if stop else ("length", None))
    counted = sum(d.num_tokens for d in deltas)
    if stop is None:
        assert counted == len(token_ids)
    else:  # no token after the one that completed it
        end = len(reference(text, stops, True)[0].encode())
        assert counted == end


def test_a_stop_string_over_several_tokens_is_never_shown_in_part():
    text = "the alphabet: abcdefgh and on"
    deltas = run(ids(text), stop="cdefgh")
    assert text_of(deltas) == "the alphabet: ab"
    assert not any("c" in d.text for d in deltas)
    assert text_of(run(ids(text), stop="cdefgh", include_stop_str_in_output=True)) == "the alphabet: abcdefgh"


def test_only_what_may_become_a_stop_is_held_back_and_is_released_at_once_when_it_cannot():
    deltas = run(byte_ids("xaaaby"), stop="aab")
    assert [d.text for d in deltas] == ["x", "", "", "a", ""]
    deltas = run(byte_ids("xaacaa"), stop="aab")
    assert [d.text for d in deltas] == ["x", "", "", "aac", "", "aa"]


def test_held_back_text_is_flushed_at_the_end():
    deltas = run(byte_ids("abc"), stop="abc" + "d" * 27)
    assert [d.text for d in deltas] == ["", "", "abc"]
    assert deltas[-1].finish_reason == "length"


def test_tokens_after_the_stop_are_dropped_and_not_counted():
    (delta,) = run(byte_ids("abcdef"), cuts=[], finish=None, stop=["cd"])
    assert (delta.text, delta.num_tokens, delta.finish_reason, delta.stop_reason) == ("ab", 4, "stop", "cd")


def test_a_stop_string_and_the_engines_end_on_the_same_token():
    deltas = run(byte_ids("ab"), finish="length", stop="b")
    assert (deltas[-1].text, deltas[-1].finish_reason, deltas[-1].stop_reason) == ("", "stop", "b")


def test_min_tokens_protects_the_first_tokens_text():
    deltas = run(byte_ids("abababab"), stop="a", min_tokens=8)
    assert (text_of(deltas), deltas[-1].finish_reason) == ("abababab", "length")
    assert text_of(run(byte_ids("abababab"), stop="a", min_tokens=3)) == "aba" + "b"
    assert text_of(run(byte_ids("abababab"), stop="ba", min_tokens=2)) == "aba"  # "ba" at 1 began too early


@pytest.mark.parametrize("skip", [True, False])
def test_the_end_of_sequence_leaves_no_text(skip):
    deltas = run([*ids("hi"), EOS2_ID], finish="stop", skip_special_tokens=skip)
    assert text_of(deltas) == "hi"
    assert sum(d.num_tokens for d in deltas) == len(ids("hi")) + 1


def test_the_end_is_shown_where_asked_for():
    ask = dict(finish="stop", include_stop_str_in_output=True)
    assert text_of(run([*ids("hi"), EOS_ID], skip_special_tokens=False, **ask)) == "hi" + EOS
    assert text_of(run([*ids("hi"), EOS_ID], skip_special_tokens=True, **ask)) == "hi"
    assert text_of(run(ids("hi!"), **ask)) == "hi!"  # a stop token that is ordinary text
    assert text_of(run(byte_ids("hi!"), finish="stop")) == "hi"


def test_special_tokens_inside_are_skipped_or_shown():
    inside = [*ids("a"), EOS_ID, *ids("b")]
    assert text_of(run(inside)) == "ab"
    assert text_of(run(inside, skip_special_tokens=False)) == f"a{EOS}b"


def test_text_offsets_count_characters_before_each_token():
    deltas = run(byte_ids("aé€b"), stop="€z")
    assert [o for d in deltas for o in d.text_offsets] == [0, 1, 1, 2, 2, 2, 3]


class SentencePiece:
    """Llama's scheme: ▁ for spaces, bytes as <0x..>, and a decoder that strips a text's first space."""

    def __init__(self):
        pieces = ["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁is", "▁my", "name", "▁▁", "."]
        self.vocab = {p: i for i, p in enumerate(pieces)}
        self.backend = tokenizers.Tokenizer(models.BPE(self.vocab, [], byte_fallback=True))
        self.backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
        self.backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self.special_ids = frozenset({0, 1})

    def token_bytes(self, token_id):
        if 2 <= token_id < 258:
            return bytes([token_id - 2])
        return self.backend.id_to_token(token_id).replace("▁", " ").encode()

    def decode(self, ids, skip_special_tokens=True):
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def ids(self, *pieces):
        return [self.vocab[p] for p in pieces]


def test_sentencepiece_keeps_spaces_after_a_prompt_and_drops_the_first_of_a_text():
    sp = SentencePiece()
    answer = sp.ids("▁is", "▁▁", "name", "▁", "<0xE2>", "<0x82>", "<0xAC>", "</s>", "▁is")
    prompt = sp.ids("<s>", "▁my", "name")
    after = text_of(run(answer, prompt=prompt, tokenizer=sp))
    assert after == " is  name € is" == sp.decode(prompt + answer).removeprefix(sp.decode(prompt))
    alone = text_of(run(answer, prompt=sp.ids("<s>"), tokenizer=sp))
    assert alone == "is  name € is" == sp.decode(answer)
    assert text_of(run(sp.ids("▁▁", "name"), tokenizer=sp)) == sp.decode(sp.ids("▁▁", "name")) == " name"
    assert text_of(run(sp.ids("▁", "name"), tokenizer=sp)) == sp.decode(sp.ids("▁", "name")) == "name"


def test_the_bos_of_a_prompt_is_no_text():
    prompt = TOKENIZER.encode("")
    assert TOKENIZER.token_text(prompt[0]) == BOS
    assert text_of(run(ids(" world"), prompt=prompt)) == " world"  # byte-level texts keep their first space


def test_the_demo_models_tokenizer_decodes_alike(demo_model):
    from pagedray.cluster.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(str(demo_model))
    text = "Grüße, 世界! \u200d👩‍🚀 code:\n\tx = {'a': 1}  # naïve\u2028…"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = run(token_ids, tokenizer=tokenizer)
    assert text_of(deltas) == text and not any("\ufffd" in d.text for d in deltas)
