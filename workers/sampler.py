"""Logits to tokens. A draw is a function of (seed, index, position): the same whatever the batch, after a preemption,
and on another worker group.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels import ops
from ..scheduler.request import SamplingParams, StructuredOutputsParams, TokenLogprobs


class TokenMatcher(Protocol):
    """A sequence's place in its grammar."""

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether its grammar has been compiled, within `timeout` seconds; only then what it allows may be asked."""
        ...

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        ...

    def allowed(self) -> np.ndarray:
        """uint32 [words]: the tokens that may come next, as `ops.mask_tokens` reads them. Valid until the next one.

        A token that the words have no bit for may not come.
        """
        ...


class Grammars(Protocol):
    def __call__(self, params: StructuredOutputsParams, token_ids: Sequence[int]) -> TokenMatcher:
        """The place of a sequence that has generated these tokens."""
        ...

    def accept(self, matchers: Sequence[Any], token_ids: Sequence[int]) -> None:
        """Each of the matchers, which this made, goes on by its token."""
        ...

    def prepare(self) -> None:
        """Begin, in the background, what the first grammar would have to wait for."""
        ...


# Of a model, the place of its tokenizer if that is another, and the tokens that end a text. It comes from above: this
# floor knows no text.
GrammarBackend = Callable[[str, str | None, Sequence[int]], Grammars]


class SeenTokens:
    """A sequence's tokens, each once, with how often it was generated; a growing sequence is read on from where it was.

    Penalties look at them in every step: to go through a long context each time would take as long as a layer does.
    """

    def __init__(self, num_prompt_tokens: int):
        self.num_prompt_tokens = num_prompt_tokens
        self._num_read = 0
        self._places: dict[int, int] = {}  # token → where it is in the arrays
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.int64)

    def read(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and counts [number of different tokens] of these, which begin with those of the last time."""
        places = self._places
        for position in range(self._num_read, len(token_ids)):
            token = token_ids[position]
            place = places.setdefault(token, len(places))
            if place == len(self._ids):
                self._ids, self._counts = (np.concatenate((a, np.zeros_like(a))) for a in (self._ids, self._counts))
            self._ids[place] = token
            self._counts[place] += position >= self.num_prompt_tokens
        self._num_read = len(token_ids)
        return self._ids[: len(places)], self._counts[: len(places)]


class SamplingState(Protocol):
    """What the sampler reads of a sequence, and keeps with it."""

    sampling: SamplingParams
    index: int
    num_prompt_tokens: int
    token_ids: list[int]
    matcher: TokenMatcher | None
    seen: SeenTokens | None  # None: not needed yet


def draw(seed: int, index: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits, by hashing the counter."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, index, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    def __init__(self, eos_token_ids: Sequence[int], grammars: Grammars | None = None):
        """Sequences with a matcher are those for which `grammars` made one."""
        self.eos_token_ids = list(eos_token_ids)
        self.grammars = grammars

    def ready(self, states: Sequence[SamplingState], patience: float = 0.0) -> list[int]:
        """The rows for which a token can be drawn; where there is none, after up to `patience` seconds. The others'
        grammars are still being compiled."""

        def rows(timeout: float) -> list[int]:
            return [row for row, state in enumerate(states) if state.matcher is None or state.matcher.ready(timeout)]

        return rows(0.0) or rows(patience / len(states))

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Draw one token a row. logits: [len(states), vocab] fp32, changed in place."""
        asked = [i for i, s in enumerate(states) if s.sampling.logprobs is not None]
        model_logits = logits[asked].clone() if asked else None
        matchers = {row: state.matcher for row, state in enumerate(states) if state.matcher}
        allowed = {row: matcher.allowed() for row, matcher in matchers.items()}
        if allowed:
            masks = np.zeros((len(allowed), max(map(len, allowed.values()))), np.uint32)
            for mask, words in zip(masks, allowed.values(), strict=True):
                mask[: len(words)] = words
            ops.mask_tokens(logits, torch.tensor(list(allowed)), torch.from_numpy(masks.view(np.int32)))
        for i, (row, state) in enumerate(zip(logits, states, strict=True)):
            self._adjust(row, state, allowed.get(i))
        tokens = self._choose(logits, states)
        if self.grammars is not None and matchers:
            self.grammars.accept(list(matchers.values()), tokens[list(matchers)].tolist())
        logprobs: list[TokenLogprobs | None] = [None] * len(states)
        if model_logits is not None:
            counts = [states[i].sampling.logprobs or 0 for i in asked]
            for i, row_logprobs in zip(asked, token_logprobs(model_logits, tokens[asked], counts), strict=True):
                logprobs[i] = row_logprobs
        return tokens.tolist(), logprobs

    def _adjust(self, row: Tensor, state: SamplingState, allowed: np.ndarray | None) -> None:
        """Grammar, bias, minimum length, penalties: vLLM's order.

        `allowed`: what the grammar, which has been applied, left.
        """
        sampling = state.sampling
        if sampling.logit_bias:
            row[list(sampling.logit_bias)] += torch.tensor(
                list(sampling.logit_bias.values()), dtype=row.dtype, device=row.device
            )
        if len(state.token_ids) - state.num_prompt_tokens < sampling.min_tokens:
            ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)]
            ends = [t for t in ends if t < len(row)]
            if allowed is None or _any_but(ends, allowed):  # a grammar may have nothing left but its end
                row[ends] = -torch.inf
        if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
            _penalize(row, state)

    def _choose(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        params = [s.sampling for s in states]
        if all(p.greedy for p in params):
            return ops.greedy(logits)
        return ops.sample(
            logits,
            temperature=torch.tensor([0.0 if p.greedy else p.temperature for p in params]),
            top_k=torch.tensor([p.top_k for p in params]),
            top_p=torch.tensor([p.top_p for p in params]),
            min_p=torch.tensor([p.min_p for p in params]),
            uniform=torch.tensor(
                [draw(s.sampling.seed or 0, s.index, len(s.token_ids)) for s in states], dtype=torch.float64
            ),
        )


def _penalize(row: Tensor, state: SamplingState) -> None:
    """CTRL's repetition penalty (arXiv:1909.05858), which counts the prompt; OpenAI's presence and frequency penalties,
    which do not."""
    repetition, presence = state.sampling.repetition_penalty, state.sampling.presence_penalty
    frequency = state.sampling.frequency_penalty
    state.seen = state.seen or SeenTokens(state.num_prompt_tokens)
    ids, counts = state.seen.read(state.token_ids)
    if repetition != 1.0:
        seen = torch.from_numpy(ids)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / repetition, values * repetition)
    if presence or frequency:
        generated = counts > 0
        times = torch.from_numpy(counts[generated]).to(row.device, row.dtype)
        row[torch.from_numpy(ids[generated])] -= presence + frequency * times


def _any_but(token_ids: Sequence[int], allowed: np.ndarray) -> bool:
    others = allowed.copy()
    for token in token_ids:
        if token // 32 < len(others):
            others[token // 32] &= ~np.uint32(1 << token % 32)
    return bool(others.any())


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Of tokens [n] in logits [n, vocab], each with the `counts[i]` likeliest of its row."""
    chosen, top_values, top_ids = ops.log_probs(logits, tokens, min(max(counts), logits.shape[-1]))
    rows = zip(chosen.tolist(), top_ids.tolist(), top_values.tolist(), counts, strict=True)
    return [
        TokenLogprobs(logprob, _chosen_first(token, logprob, ids, values)[:count])
        for token, (logprob, ids, values, count) in zip(tokens.tolist(), rows, strict=True)
    ]


def _chosen_first(token: int, logprob: float, ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens, with the chosen one ahead of its equals: of several at the top any may come first."""
    top = list(zip(ids, values, strict=True))
    if top and values[0] == logprob and ids[0] != token:
        top = [(token, logprob), *((t, v) for t, v in top if t != token)][: len(top)]
    return tuple(top)
