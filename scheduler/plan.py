"""All that crosses from the leader to the ranks in a step, and back. Small, frozen, differences for what runs on."""

from dataclasses import dataclass

from .request import Pooling, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence the ranks do not know: sent in full, also when it comes back after a preemption."""

    seq_id: int
    token_ids: tuple[int, ...]  # prompt, and what was generated before a preemption
    num_prompt_tokens: int
    sampling: SamplingParams
    index: int  # which of the n choices; part of the draw's counter
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's share of a step: compute `num_tokens` tokens starting at `num_computed_tokens`.

    `sample` is set when these reach the sequence's last token, so that a next one is drawn, or its states are pooled.
    """

    seq_id: int
    num_computed_tokens: int
    num_tokens: int
    new_token_ids: tuple[int, ...]  # drawn since the last plan, for ranks that do not sample
    new_block_ids: tuple[int, ...]  # appended to the block table the rank holds
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    released: tuple[int, ...]  # seq_ids to forget: finished, aborted or preempted
    new: tuple[NewSequence, ...]
    scheduled: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    seq_id: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PooledSequence:
    seq_id: int
    embedding: bytes  # fp32, little endian


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    tokens: tuple[SampledToken, ...]
    pooled: tuple[PooledSequence, ...] = ()
    deferred: tuple[int, ...] = ()  # seq_ids: what may come next was not known yet, so no token was drawn
