"""Structured outputs: which tokens may come next, so that the whole text fits a JSON schema, a regex or a grammar.

llguidance does the work: an Earley parser over the vocabulary that needs some 20 µs a token, one small wheel without
torch, and limits on what a grammar may cost. The masks of a step's sequences are computed while the model computes the
step that needs them, by another thread if that gets a core.
"""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from tokenizers import Tokenizer as Backend

from ...scheduler.errors import InvalidRequest
from ...scheduler.request import StructuredOutputsParams
from .tokenizer import TokenBytes, load_backend

logger = logging.getLogger(__name__)

MAX_GRAMMAR = 100_000  # characters
_TRIED_BYTES = 32  # of some text that fits: limits that no setting raises are met while one goes on
_MASK_SECONDS = 30.0  # for a step's; the limits below end one within some 20 ms
_COMPILE_SECONDS = 300.0  # for a grammar and those before it; the limits below end one within a second or two

# llguidance's units of work ("fuel"), about 14,000 to 50,000 a millisecond.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)

# llguidance makes a state for each remainder of a `multipleOf`, and of those that hold together for each pair,
# which none of its limits counts: ten thousand take 30 ms, a hundred thousand minutes, and gigabytes.
_MAX_MULTIPLE, _MAX_PLACES = 10_000, 10
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")

_SLICES = LLTokenizer.general_slices()  # of the vocabulary, for which masks are kept: what may stand in a string

# As `json.dumps` writes it. Free whitespace is where small models lose themselves.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _grammar(params: StructuredOutputsParams) -> str:
    if params.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_STYLE)
    if params.json is not None:
        return LLMatcher.grammar_from_json_schema(params.json, overrides=_JSON_STYLE)
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice:
        return grammar_from("choice", json.dumps(params.choice))
    return grammar_from("grammar", params.grammar or "")


def check_grammar(params: StructuredOutputsParams, param: str) -> None:
    """Raises `InvalidRequest` naming `param` where the grammar is wrong, too large, or uses what is not supported; and
    where nothing could be said: no text fits it, or the empty one alone."""
    size = sum(len(text) for text in (params.json, params.regex, params.grammar, *params.choice) if text)
    if size > MAX_GRAMMAR:
        raise InvalidRequest(f"{param} has {size} characters; at most {MAX_GRAMMAR} are allowed", param)
    if not _few_remainders(params.json or params.grammar or ""):
        raise InvalidRequest(
            f"{param} cannot be used as a {params.kind}: the least common multiple of its multipleOf must be at most "
            f"{_MAX_MULTIPLE}, in units of the last decimal place that one of them has",
            param,
        )
    try:
        wrong = _fault(LLMatcher(_bytes(), _grammar(params), log_level=0, limits=_LIMITS))
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise InvalidRequest(f"{param} cannot be used as a {params.kind}: {wrong[:300]}", param)


def _few_remainders(text: str) -> bool:
    """Of what `multipleOf` says, in a schema or in a grammar with schemas in it."""
    text = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)  # keys may be written so
    values = [Decimal(number) for number in set(_MULTIPLE_OF.findall(text))]
    places = max((-int(value.as_tuple().exponent) for value in values), default=0)
    if places > _MAX_PLACES or any(not 0 <= value <= _MAX_MULTIPLE for value in values):
        return False
    return math.lcm(*(int(value.scaleb(max(places, 0))) or 1 for value in values)) <= _MAX_MULTIPLE


def _fault(matcher: LLMatcher) -> str:
    """What is wrong with the grammar of a new matcher over single bytes; nothing: an empty text."""
    if matcher.is_error():
        return matcher.get_error()
    for length in range(_TRIED_BYTES):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        following = np.flatnonzero(mask[: _bytes().eos_token])
        if matcher.is_error():  # found while looking for the next byte
            too_complex = length or "TooComplex" in matcher.stop_reason()
            return f"it is too complex: {matcher.get_error().splitlines()[0]}" if too_complex else "no text fits it"
        if not len(following):
            return "" if length else "only the empty text fits it"
        matcher.consume_token(int(following[0]))
    return ""


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of the single bytes, then what ends a text."""
    return LLTokenizer("byte")


class _Tokens:
    """A byte-level tokenizer as llguidance takes it: what each token stands for, and how a text is cut into them.

    It reads these in half the time that it takes over a tokenizer.json, and holds the interpreter's lock for a third.
    """

    bos_token_id = None

    def __init__(self, backend: Backend, read: TokenBytes, eos_token_ids: Sequence[int]):
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.tokens = [read(i) for i in range(max(backend.get_vocab_size(), max(added, default=0) + 1))]
        self.special_token_ids = [i for i, token in added.items() if token.special]
        self._special = frozenset(self.special_token_ids)
        self.eos_token_id = eos_token_ids[0]
        self.of_bytes = {token[0]: i for i, token in enumerate(self.tokens) if len(token) == 1 and i not in added}

    def __call__(self, text: str) -> list[int]:
        """Of a text that a grammar forces. Byte by byte where the tokenizer would change it, or read a mark in it."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        wanted = text.encode()
        if b"".join(self.tokens[i] for i in ids) == wanted and self._special.isdisjoint(ids):
            return ids
        return [self.of_bytes[b] for b in wanted]


def read_vocabulary(model: str, tokenizer: str | None, eos_token_ids: Sequence[int]) -> LLTokenizer:
    backend = load_backend(model, tokenizer)
    read = TokenBytes(backend)
    ends = list(eos_token_ids)
    if read.byte_level and ends and read(backend.encode("a", add_special_tokens=False).ids[0]) == b"a":
        tokens = _Tokens(backend, read, ends)
        if len(tokens.of_bytes) == 256:
            # In two steps, between which other threads have the lock.
            return LLTokenizer(TokenizerWrapper(tokens), eos_token=ends, slices=[]).with_slices(_SLICES)
    return LLTokenizer(backend.to_str(), eos_token=ends)


class GrammarCompiler:
    """Makes a matcher for each sequence that has a grammar. One thread does the work of all of them.

    No token is drawn for a sequence until its grammar is compiled, which may take a second. The vocabulary, some
    0.3 s of work, is read when that is asked for, in the background, or with the first grammar.
    """

    def __init__(self, model: str, tokenizer: str | None, eos_token_ids: Sequence[int]):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._ends = eos_token_ids

        @cache  # and called in that thread alone
        def vocabulary() -> LLTokenizer | None:
            try:
                return read_vocabulary(model, tokenizer, eos_token_ids)
            except Exception:  # llguidance does not know every tokenizer; that must not end anybody else's answer
                logger.exception("structured outputs will be empty: the vocabulary of %s cannot be read", model)
                return None

        self._vocabulary = vocabulary

    def prepare(self) -> None:
        self._thread.submit(self._vocabulary)

    def __call__(self, params: StructuredOutputsParams, token_ids: Sequence[int]) -> "GrammarMatcher":
        """`token_ids`: what the sequence has generated before, on another worker or before a preemption."""
        return GrammarMatcher(self._vocabulary, self._ends, self._thread, params, token_ids)

    def accept(self, matchers: Sequence["GrammarMatcher"], token_ids: Sequence[int]) -> None:
        """The tokens that were drawn; their successors are found in the background."""
        for matcher in matchers:
            matcher.finish()  # where nobody asked what it allows

        def advance() -> None:
            for matcher, token_id in zip(matchers, token_ids, strict=True):
                matcher.advance(token_id)

        job = _Job(self._thread, advance)
        for matcher in matchers:
            matcher.job = job


class _Job:
    """Work of the grammars' thread, that whoever waits for it may do instead."""

    def __init__(self, thread: ThreadPoolExecutor, work: Callable[[], None]):
        self._work: Callable[[], None] | None = work
        self._future = thread.submit(work)

    def finish(self) -> None:
        """Return when it is done."""
        if self._work is None:
            return
        if self._future.cancel():
            # The thread has not come to it: it compiles a grammar, or other processes have the cores. To do it here
            # takes less time than to wait.
            self._work()
        else:
            self._future.result(_MASK_SECONDS)
        self._work = None


class GrammarMatcher:
    """One sequence's place in its grammar."""

    def __init__(
        self,
        vocabulary: Callable[[], LLTokenizer | None],
        ends: Sequence[int],
        thread: ThreadPoolExecutor,
        params: StructuredOutputsParams,
        token_ids: Sequence[int],
    ):
        self.job: _Job | None = None  # since the last token
        self._matcher: LLMatcher | None = None
        self._allowed = np.zeros(max(ends) // 32 + 1, np.uint32)
        for token in ends:
            self._allowed[token // 32] |= np.uint32(1 << token % 32)
        self._deadline = time.monotonic() + _COMPILE_SECONDS

        def compile_grammar() -> tuple[LLMatcher, np.ndarray] | None:
            tokens = vocabulary()
            if tokens is None:
                return None
            matcher = LLMatcher(tokens, _grammar(params), log_level=0, limits=_LIMITS)
            matcher.consume_tokens(list(token_ids))
            allowed = np.empty(-(-tokens.vocab_size // 32), np.uint32)
            _look(matcher, allowed)
            return matcher, allowed

        self._compiling: Future[tuple[LLMatcher, np.ndarray] | None] | None = thread.submit(compile_grammar)

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether the grammar has been compiled, within `timeout` seconds; what it allows may be asked from then on.

        One that takes minutes, or fails, allows the end of the text and nothing else.
        """
        if self._compiling is None:
            return True
        try:
            if compiled := self._compiling.result(timeout):
                self._matcher, self._allowed = compiled
        except TimeoutError:
            if time.monotonic() < self._deadline:
                return False
            self._compiling.cancel()
            logger.error("a structured output ends here: its grammar was not compiled in %.0f s", _COMPILE_SECONDS)
        except Exception:
            logger.exception("a structured output ends here: its grammar cannot be compiled")
        self._compiling = None
        return True

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self._compiling is not None:
            self._compiling.cancel()

    def finish(self) -> None:
        """Wait for what the last token led to."""
        if self.job is not None:
            self.job.finish()

    def allowed(self) -> np.ndarray:
        """uint32 [words]: a bit for each token that may come next; of a complete text, its ends. Until `accept`."""
        self.finish()
        return self._allowed

    def advance(self, token_id: int) -> None:
        if self._matcher is not None:
            self._matcher.consume_token(token_id)
            _look(self._matcher, self._allowed)


def _look(matcher: LLMatcher, allowed: np.ndarray) -> None:
    """Fill in what may come next."""
    if matcher.is_error():  # a limit was met on the way: its mask allows nothing but the end
        logger.warning("a structured output ended early: %s", matcher.get_error())
    matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
