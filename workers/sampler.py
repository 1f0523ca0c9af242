"""Logits to tokens. A draw is a function of (seed, index, position): the same whatever the batch, after a preemption,
and on another worker group.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels import ops
from ..scheduler.request import SamplingParams, StructuredOutputsParams, TokenLogprobs


class TokenMatcher(Protocol):
    """A sequence's place in its grammar."""

    def forbidden(self, vocab_size: int) -> np.ndarray:
        """bool [vocab_size]: the tokens that may not come next."""
        ...

    def accept(self, token_id: int) -> None: ...


# Of a structured output and the tokens generated so far.
MatcherFactory = Callable[[StructuredOutputsParams, Sequence[int]], TokenMatcher]

# Of a model, the place of its tokenizer if that is another, and the tokens that end a text. It comes from above: this
# floor knows no text.
GrammarBackend = Callable[[str, str | None, Sequence[int]], MatcherFactory]


class SamplingState(Protocol):
    """What the sampler reads of a sequence."""

    sampling: SamplingParams
    index: int
    num_prompt_tokens: int
    token_ids: list[int]
    matcher: TokenMatcher | None


def draw(seed: int, index: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits, by hashing the counter."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, index, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    def __init__(self, eos_token_ids: Sequence[int]):
        self.eos_token_ids = list(eos_token_ids)

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Draw one token a row. logits: [len(states), vocab] fp32, changed in place."""
        asked = [i for i, s in enumerate(states) if s.sampling.logprobs is not None]
        model_logits = logits[asked].clone() if asked else None
        for row, state in zip(logits, states, strict=True):
            self._adjust(row, state)
        tokens = self._choose(logits, states)
        for token, state in zip(tokens.tolist(), states, strict=True):
            if state.matcher:
                state.matcher.accept(token)
        logprobs: list[TokenLogprobs | None] = [None] * len(states)
        if model_logits is not None:
            counts = [states[i].sampling.logprobs or 0 for i in asked]
            for i, row_logprobs in zip(asked, token_logprobs(model_logits, tokens[asked], counts), strict=True):
                logprobs[i] = row_logprobs
        return tokens.tolist(), logprobs

    def _adjust(self, row: Tensor, state: SamplingState) -> None:
        """Grammar, bias, minimum length, penalties: vLLM's order. Penalties are CTRL's (repetition) and OpenAI's."""
        sampling = state.sampling
        forbidden = state.matcher.forbidden(len(row)) if state.matcher else None
        if forbidden is not None:
            row[torch.from_numpy(forbidden)] = -torch.inf
        if sampling.logit_bias:
            row[list(sampling.logit_bias)] += torch.tensor(
                list(sampling.logit_bias.values()), dtype=row.dtype, device=row.device
            )
        if len(state.token_ids) - state.num_prompt_tokens < sampling.min_tokens:
            ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)]
            ends = [t for t in ends if t < len(row)]
            if forbidden is None or not np.delete(forbidden, ends).all():  # a grammar may have nothing left but its end
                row[ends] = -torch.inf
        if sampling.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(np.asarray(state.token_ids, np.int64)))
            values = row[seen]
            penalty = sampling.repetition_penalty
            row[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            generated = np.asarray(state.token_ids[state.num_prompt_tokens :], np.int64)
            ids, counts = (torch.from_numpy(a) for a in np.unique(generated, return_counts=True))
            row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(row.device, row.dtype)

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
