"""Structured outputs: which tokens may come next, so that the whole text fits a JSON schema, a regex or a grammar.

llguidance does the work: an Earley parser over the vocabulary that needs some 50 µs a token, one small wheel without
torch, and limits on what a grammar may cost. A mask is computed while the model computes the step that needs it,
by another thread if that gets a core.
"""

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from ...scheduler.errors import InvalidRequest
from ...scheduler.request import StructuredOutputsParams
from .tokenizer import load_backend

logger = logging.getLogger(__name__)

MAX_GRAMMAR = 100_000  # characters
_MASK_SECONDS = 60.0  # the limits below end a mask within some 20 ms; the first may wait for the tokenizer

# llguidance's units of work ("fuel"), about 14,000 to 50,000 a millisecond.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)

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
    """Raises `InvalidRequest` naming `param` where the grammar is wrong, too large, or uses what is not supported."""
    size = sum(len(text) for text in (params.json, params.regex, params.grammar, *params.choice) if text)
    if size > MAX_GRAMMAR:
        raise InvalidRequest(f"{param} has {size} characters; at most {MAX_GRAMMAR} are allowed", param)
    try:
        wrong = LLMatcher.validate_grammar(_grammar(params), limits=_LIMITS)
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise InvalidRequest(f"{param} cannot be used as a {params.kind}: {wrong[:300]}", param)


class GrammarCompiler:
    """Makes a matcher for each sequence that has a grammar. One thread does the work of all of them.

    The vocabulary is read with the first one: about a second that a start does not wait for.
    """

    def __init__(self, model: str, tokenizer: str | None, eos_token_ids: Sequence[int]):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

        @cache  # and called in that thread alone
        def vocabulary() -> LLTokenizer:
            return LLTokenizer(load_backend(model, tokenizer).to_str(), eos_token=list(eos_token_ids))

        self._vocabulary = vocabulary

    def __call__(self, params: StructuredOutputsParams, token_ids: Sequence[int]) -> "GrammarMatcher":
        """`token_ids`: what the sequence has generated before, on another worker or before a preemption."""
        return GrammarMatcher(self._vocabulary, self._thread, params, token_ids)


class GrammarMatcher:
    """One sequence's place in its grammar: `accept` a token, then ask which are `forbidden` next."""

    def __init__(
        self,
        vocabulary: Callable[[], LLTokenizer],
        thread: ThreadPoolExecutor,
        params: StructuredOutputsParams,
        token_ids: Sequence[int],
    ):
        self._thread = thread

        def start() -> np.ndarray:
            self._matcher = LLMatcher(vocabulary(), _grammar(params), log_level=0, limits=_LIMITS)
            self._matcher.consume_tokens(list(token_ids))
            return self._mask()

        self._next: Future[np.ndarray] = thread.submit(start)
        self._advance: Callable[[], np.ndarray] | None = None  # what `_next` does, where nothing goes before it

    def accept(self, token_id: int) -> None:
        """The token that was drawn; its successors are found in the background."""

        def advance() -> np.ndarray:
            self._matcher.consume_token(token_id)
            return self._mask()

        self._advance = advance if self._next.done() else None
        self._next = self._thread.submit(advance)

    def forbidden(self, vocab_size: int) -> np.ndarray:
        """bool [vocab_size]: the tokens that may not come next. Of a complete text, all but its ends."""
        if self._advance is not None and self._next.cancel():
            # The thread has not come to it, because other processes have the cores: to do it here takes less time than
            # to wait until they let it.
            allowed = self._advance()
        else:
            allowed = self._next.result(_MASK_SECONDS)
        mask = np.ones(vocab_size, bool)
        mask[: len(allowed)] = allowed[:vocab_size] == 0
        return mask

    def _mask(self) -> np.ndarray:
        if self._matcher.is_error():  # a limit was met on the way: its mask allows nothing but the end
            logger.warning("a structured output ended early: %s", self._matcher.stop_reason())
        return np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
