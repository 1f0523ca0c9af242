"""What a prompt's own positions tell, read chunk by chunk as they are computed: its tokens' log-probabilities, and its
hidden states as one (an embedding).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..scheduler.request import Pooling, TokenLogprobs
from .sampler import token_logprobs

_ROWS = 64  # of logits at a time: a vocabulary of 150,000 in fp32 takes 38 MB for them


class PromptReader:
    """Of one sequence, on a rank of the last stage. A sequence that is preempted on the way begins anew.

    `logprobs` has one entry for each token after the first, up to where the prompt is computed; none on ranks that do
    not sample.
    """

    def __init__(self, prompt: Sequence[int], pooling: Pooling | None, num_logprobs: int | None):
        """`num_logprobs`: how many of the likeliest tokens to give at each position; None: no log-probabilities."""
        self.logprobs: list[TokenLogprobs] = []
        self._prompt = prompt
        self._pooling = pooling
        self._num_logprobs = num_logprobs
        self._state: Tensor | None = None  # fp64 [hidden]: the sum so far, or the last row

    def read(self, hidden: Tensor, start: int, logits: Callable[[Tensor], Tensor | None]) -> None:
        """Take in hidden [n, hidden], the normalized states of positions `start` and on.

        `logits` gives those of some rows [m, vocab], or None where another rank has them; each rank of the stage makes
        the same calls.
        """
        if self._pooling == "last":
            self._state = hidden[-1].double()
        elif self._pooling == "mean":  # in fp64, so that chunks make no difference that fp32 would show
            total = hidden.double().sum(0)
            self._state = total if self._state is None else self._state + total
        if self._num_logprobs is None:
            return
        following = self._prompt[start + 1 : start + 1 + len(hidden)]
        for first in range(0, len(following), _ROWS):
            tokens = torch.tensor(following[first : first + _ROWS], device=hidden.device)
            rows = logits(hidden[first : first + len(tokens)])
            if rows is not None:
                self.logprobs += token_logprobs(rows, tokens, [self._num_logprobs] * len(tokens))

    def embedding(self) -> bytes:
        """The pooled state, scaled to length 1, in fp32. (A mean and a sum differ in their length alone.)"""
        assert self._state is not None, "nothing was read"
        return torch.nn.functional.normalize(self._state, dim=0).float().cpu().numpy().astype("<f4").tobytes()
