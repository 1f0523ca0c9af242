"""Ids to text as it grows; stop strings."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...scheduler.request import SamplingParams


class TokenTexts(Protocol):
    """What a detokenizer needs of a tokenizer."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int, /) -> bytes: ...
    def decode(self, ids: Sequence[int], /, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What tokens that came together add to a sequence's text.

    `num_tokens` is how many of them count: those after the one that completed a stop string do not. `text_offsets`
    says for each that counts where its text begins: the number of characters before it, held-back ones included.
    """

    text: str
    num_tokens: int
    finish_reason: str | None = None
    stop_reason: str | None = None  # the stop string that ended it
    text_offsets: tuple[int, ...] = ()


class Detokenizer:
    """The text of one sequence, released as far as it is sure.

    Tokens are bytes, and text is those bytes read as UTF-8, so a character that spans tokens comes whole, with its last
    token. What is not UTF-8 becomes U+FFFD as in a decoder that sees all bytes at once (Unicode's "maximal subparts").
    The prompt's end is context: a cut character there is completed, and the space that SentencePiece drops at the
    start of a text is dropped only where the prompt has no text.

    Stop strings are searched character by character, so what is returned depends on the text alone and not on how it
    came in tokens: the stop string that is complete first ends the text, the longest of those complete together.
    Only what may still become a stop string is held back. A stop string counts if all of it comes after the
    first `min_tokens` tokens. The text of an end-of-sequence or stop token is never shown, unless
    `include_stop_str_in_output` asks for it (as in vLLM).
    """

    def __init__(self, tokenizer: TokenTexts, sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._skipped = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self._stops = [_StopString(s) for s in sampling.stop]
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A character has at most 4 bytes and a token at least 1: a cut one begins in the last 3 tokens.
        self._utf8.decode(b"".join(tokenizer.token_bytes(t) for t in prompt_token_ids[-3:] if t not in self._skipped))
        self._at_start = all(t in tokenizer.special_ids for t in prompt_token_ids)
        self._own = False  # a token of the sequence's has said something
        self._held = ""
        self._num_tokens = 0
        self._num_chars = 0

    def add(self, token_ids: Sequence[int], finish_reason: str | None = None) -> TextDelta:
        """Take in what the engine gained. With a `finish_reason`, or one in the result, this was the last call."""
        silent = len(token_ids) - 1 if finish_reason == "stop" and not self._sampling.include_stop_str_in_output else -1
        released: list[str] = []
        offsets: list[int] = []
        for i, token_id in enumerate(token_ids):
            offsets.append(self._num_chars)
            self._num_tokens += 1
            if i == silent or token_id in self._skipped:
                continue
            stop = self._take(self._utf8.decode(self._bytes(token_id)), released)
            if stop is not None:
                return TextDelta("".join(released), i + 1, "stop", stop, tuple(offsets))
        if finish_reason is not None:
            # A character that the prompt left cut, and that nothing followed, is the prompt's.
            stop = self._take(self._utf8.decode(b"", final=True) if self._own else "", released)
            if stop is not None:
                return TextDelta("".join(released), len(token_ids), "stop", stop, tuple(offsets))
            released.append(self._held)
            self._held = ""
        return TextDelta("".join(released), len(token_ids), finish_reason, None, tuple(offsets))

    def _bytes(self, token_id: int) -> bytes:
        raw = self._tokenizer.token_bytes(token_id)
        self._own = self._own or bool(raw)
        if self._at_start and raw:
            self._at_start = False
            if raw[:1] == b" " and self._tokenizer.decode([token_id], skip_special_tokens=False) == raw[1:].decode(
                errors="replace"
            ):
                return raw[1:]
        return raw

    def _take(self, text: str, released: list[str]) -> str | None:
        """Append to `released` what is sure now that `text` came. Returns the stop string that it completes, if any."""
        self._num_chars += len(text)
        if not self._stops or self._num_tokens <= self._sampling.min_tokens:
            released.append(text)
            return None
        held = self._held + text
        for end in range(len(self._held) + 1, len(held) + 1):
            complete = [s.text for s in self._stops if s.advance(held[end - 1])]
            if complete:
                stop = max(complete, key=len)
                released.append(held[: end if self._sampling.include_stop_str_in_output else end - len(stop)])
                self._held = ""
                return stop
        sure = len(held) - max(s.matched for s in self._stops)
        released.append(held[:sure])
        self._held = held[sure:]
        return None


class _StopString:
    """Follows one stop string through a text: Knuth, Morris and Pratt's automaton, its table made as far as it is used.

    `matched` is the length of the longest prefix of the stop string that the text so far ends with.
    """

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        self._borders = [0, 0]  # [k] is the length of the longest proper border of the first k characters

    def advance(self, character: str) -> bool:
        """True when this character completes the stop string; nothing may follow."""
        self.matched = self._extend(self.matched, character)
        if self.matched == len(self._borders):
            self._borders.append(self._extend(self._borders[-1], self.text[self.matched - 1]))
        return self.matched == len(self.text)

    def _extend(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._borders[length]
        return length + (self.text[length] == character)
