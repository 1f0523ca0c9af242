"""One step of one rank: a `StepPlan` in, a `StepResult` out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels import ops
from ..scheduler.plan import NewSequence, PooledSequence, SampledToken, StepPlan, StepResult
from ..scheduler.request import Pooling, SamplingParams, TokenLogprobs
from .cuda import Alone, DecodeGraphs
from .models.decoder import Decoder
from .parallel import RankGroup
from .prompt_reader import PromptReader
from .sampler import Grammars, Sampler, SeenTokens, TokenMatcher

_PATIENCE = 0.02  # seconds that a step waits for grammars where all that it has to do waits for them


@dataclass(slots=True)
class SequenceState:
    """What a rank remembers of a sequence between steps."""

    sampling: SamplingParams
    index: int
    num_prompt_tokens: int
    token_ids: list[int]
    block_ids: list[int]
    matcher: TokenMatcher | None = None
    seen: SeenTokens | None = None
    pooling: Pooling | None = None
    reader: PromptReader | None = None  # until the prompt is computed, where its positions are wanted
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # from then on until the first token is drawn

    @classmethod
    def of(cls, new: NewSequence, grammars: Grammars | None) -> "SequenceState":
        state = cls(new.sampling, new.index, new.num_prompt_tokens, list(new.token_ids), [])
        if new.sampling.structured_outputs and grammars:
            state.matcher = grammars(new.sampling.structured_outputs, new.token_ids[new.num_prompt_tokens :])
        state.pooling, num_logprobs = new.pooling, new.sampling.prompt_logprobs
        if (new.pooling or num_logprobs is not None) and len(new.token_ids) == new.num_prompt_tokens:
            state.reader = PromptReader(new.token_ids, new.pooling, num_logprobs)
        return state

    @property
    def draws(self) -> bool:
        """Its tokens are generated, not pooled."""
        return self.pooling is None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tensors, built once and read by every layer."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: ops.AttentionMetadata
    sample_rows: Tensor  # [num_sampled] int64: the rows from which a token is drawn


class ModelRunner:
    """`group` is how the rank reaches the others; None where it is alone. Grammars are the sampling rank's alone."""

    def __init__(
        self,
        model: Decoder,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        block_size: int,
        eos_token_ids: Sequence[int],
        grammars: Grammars | None = None,
        group: RankGroup | Alone | None = None,
    ):
        self.device = kv_caches[0][0].device
        self.graphs: DecodeGraphs | None = None  # a worker on a GPU sets them
        self.model = model
        self.kv_caches = kv_caches
        self.block_size = block_size
        self.group = group
        self.sampler = Sampler(eos_token_ids, grammars)
        self.grammars = grammars
        self.states: dict[int, SequenceState] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Compute this rank's part of a step. Plans must come in the order in which they were made.

        The result comes from the rank that samples, the first of the last stage; None from the others.
        Raises `RankLost` where another rank is waited for in vain.
        """
        self._apply(plan)
        shard, group = self.model.shard, self.group
        nothing = StepResult(plan.step_id, ()) if shard.samples else None
        if not plan.scheduled:
            return nothing
        inputs = self._prepare(plan)
        if group is None or shard.first_stage:
            first = inputs.token_ids
        else:
            first = group.receive_hidden(plan.step_id, len(inputs.positions))
        if self.graphs is not None and self.graphs.holds(inputs.attention):
            hidden = self.graphs.run(first, inputs.positions, inputs.attention)
        else:
            hidden = self.forward(first, inputs.positions, inputs.attention)
        if group is not None and not shard.last_stage:
            group.send_hidden(plan.step_id, hidden)
            return None
        pooled = self._read_prompts(plan, hidden)
        sampled = [s.seq_id for s in plan.scheduled if s.sample and self.states[s.seq_id].draws]
        if not sampled:
            if group is not None and pooled:
                group.check()
            return StepResult(plan.step_id, (), pooled) if shard.samples else None
        logits = self._logits(hidden[inputs.sample_rows])
        if logits is None:
            return None
        whole = shard.first_stage and len(sampled) == len(plan.scheduled)  # no other step, no other sequence
        drawn, deferred = self._draw(sampled, logits, _PATIENCE if whole else 0.0)
        if group is not None:
            group.check()
        return StepResult(plan.step_id, drawn, pooled, deferred)

    def _draw(
        self, seq_ids: list[int], logits: Tensor, patience: float
    ) -> tuple[tuple[SampledToken, ...], tuple[int, ...]]:
        """A token each, of logits [n, vocab]; and the sequences whose grammars are not compiled yet."""
        states = [self.states[s] for s in seq_ids]
        rows = self.sampler.ready(states, patience)
        deferred: tuple[int, ...] = ()
        if len(rows) < len(seq_ids):
            deferred = tuple(s for row, s in enumerate(seq_ids) if row not in rows)
            seq_ids, states, logits = [seq_ids[r] for r in rows], [states[r] for r in rows], logits[rows]
        if not rows:
            return (), deferred
        tokens = []
        for seq_id, state, token, at in zip(seq_ids, states, *self.sampler.sample(logits, states), strict=True):
            tokens.append(SampledToken(seq_id, token, at, state.prompt_logprobs))
            state.prompt_logprobs = ()
        return tuple(tokens), deferred

    def _logits(self, hidden: Tensor) -> Tensor | None:
        """Of hidden states [n, hidden]: [n, vocab] in fp32 on the rank that samples, None on others of its stage."""
        logits = self.model.logits(hidden)
        return logits if self.group is None else self.group.gather_logits(logits)

    def _read_prompts(self, plan: StepPlan, hidden: Tensor) -> tuple[PooledSequence, ...]:
        """Let those read this step's rows [num_tokens, hidden] who want them; the embeddings of prompts that end here.

        All ranks of the last stage do so, in the plan's order: logits are theirs together.
        """
        pooled: list[PooledSequence] = []
        row = 0
        for share in plan.scheduled:
            state = self.states[share.seq_id]
            if state.reader is not None:
                state.reader.read(hidden[row : row + share.num_tokens], share.num_computed_tokens, self._logits)
                if share.sample and state.pooling:
                    pooled.append(PooledSequence(share.seq_id, state.reader.embedding()))
                elif share.sample:
                    state.prompt_logprobs = tuple(state.reader.logprobs)
                if share.sample:
                    state.reader = None
            row += share.num_tokens
        return tuple(pooled)

    def forward(self, first: Tensor, positions: Tensor, metadata: ops.AttentionMetadata) -> Tensor:
        """Run this rank's layers. `first`: token ids [num_tokens], or, at a later stage, [num_tokens, hidden]."""
        hidden = first if first.is_floating_point() else self.model.embed(first)
        return self.model.forward(hidden, positions, self.kv_caches, metadata)

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":  # else the copy waits for the host to stage it
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _apply(self, plan: StepPlan) -> None:
        for seq_id in plan.released:
            state = self.states.pop(seq_id)
            if state.matcher is not None:
                state.matcher.cancel()
        for new in plan.new:
            self.states[new.seq_id] = SequenceState.of(new, self.grammars)
        for share in plan.scheduled:
            state = self.states[share.seq_id]
            state.token_ids += share.new_token_ids
            state.block_ids += share.new_block_ids

    def _prepare(self, plan: StepPlan) -> StepInputs:
        shares = plan.scheduled
        states = [self.states[s.seq_id] for s in shares]
        starts = np.fromiter((s.num_computed_tokens for s in shares), np.int64, len(shares))
        lengths = np.fromiter((s.num_tokens for s in shares), np.int64, len(shares))
        ends = starts + lengths
        query_start = np.concatenate(([0], np.cumsum(lengths)))
        token_ids = np.fromiter(
            (
                token
                for s, state in zip(shares, states, strict=True)
                for token in state.token_ids[s.num_computed_tokens : s.num_computed_tokens + s.num_tokens]
            ),
            np.int64,
            int(query_start[-1]),
        )
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)
        block_tables = np.zeros((len(shares), max(len(state.block_ids) for state in states)), np.int32)
        for row, state in zip(block_tables, states, strict=True):
            row[: len(state.block_ids)] = state.block_ids
        rows = np.repeat(np.arange(len(shares)), lengths)
        slots = block_tables[rows, positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        drawn = [s.sample and state.draws for s, state in zip(shares, states, strict=True)]
        sample_rows = query_start[1:][drawn] - 1
        return StepInputs(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            attention=ops.AttentionMetadata(
                query_start_loc=self._tensor(query_start.astype(np.int32)),
                seq_lens=self._tensor(ends.astype(np.int32)),
                block_tables=self._tensor(block_tables),
                slot_mapping=self._tensor(slots),
                max_query_len=int(lengths.max()),
                max_seq_len=int(ends.max()),
            ),
            sample_rows=self._tensor(sample_rows),
        )
