"""Which heads, columns, vocabulary rows and layers are whose: one `Shard` a rank, by arithmetic on `ModelConfig` alone.

Ranks are numbered stage by stage: rank = pp_rank * tensor_parallel_size + tp_rank. Within a stage the split is that of
Megatron (Shoeybi 2019): q, k, v, gate and up by rows, o and down by columns, embedding and head by vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..scheduler.errors import ConfigError
from .config import EngineConfig, ModelConfig

COLUMN_GROUP = 32  # intermediate columns and vocabulary rows are dealt out in such groups, which the kernels work in


@dataclass(frozen=True, slots=True)
class Range:
    """[start, stop) of a dimension that is `total` long."""

    start: int
    stop: int
    total: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def whole(self) -> bool:
        return len(self) == self.total

    def scaled(self, factor: int) -> "Range":
        """The same share of a dimension `factor` times as long: of heads, the rows that they are."""
        return Range(self.start * factor, self.stop * factor, self.total * factor)

    def respects(self, group: int) -> bool:
        """Whether weights quantized in groups of `group` along this dimension can be cut here as they are."""
        return self.start % group == 0 and (self.stop % group == 0 or self.stop == self.total)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    layers: Range
    heads: Range  # query heads
    kv_heads: Range
    intermediate: Range
    vocab: Range  # rows of the embedding and of the head

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def samples(self) -> bool:
        """Whether this is the rank that has all logits and draws tokens."""
        return self.last_stage and self.tp_rank == 0


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What a step's parts cost, in any one unit of time."""

    layer: float
    embedding: float
    head: float  # final norm, head and sampling

    @classmethod
    def of_bytes(cls, config: ModelConfig) -> "StageCosts":
        """By the weights that a decode step reads, for it is memory that limits it."""
        heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        layer = config.hidden_size * (heads + 3 * config.intermediate_size)
        return cls(layer, 0.0, config.hidden_size * config.vocab_size)


def whole_model(config: ModelConfig) -> Shard:
    """The shard of a rank that is alone."""
    sizes = (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
        config.vocab_size,
    )
    return Shard(0, 1, 0, 1, *(Range(0, size, size) for size in sizes))


def check_degrees(config: ModelConfig, engine: EngineConfig) -> None:
    """Raise `ConfigError`, saying what would work, where the model cannot be split as the settings ask."""
    tp, pp = engine.tensor_parallel_size, engine.pipeline_parallel_size
    heads, kv_heads, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
    # Ranks beyond the number of KV heads share one: each key and value head then lies on as many ranks.
    degrees = [*range(1, kv_heads + 1), *(kv_heads * n for n in range(2, heads // kv_heads + 1))]
    degrees = [d for d in degrees if d <= min(config.intermediate_size, config.vocab_size)]
    if tp not in degrees:
        raise ConfigError(
            f"tensor_parallel_size is {tp}, but {heads} query heads in {kv_heads} groups cannot be split so; "
            f"{', '.join(map(str, degrees))} would work"
        )
    if pp > layers:
        raise ConfigError(
            f"pipeline_parallel_size is {pp}, but the model has {layers} layers; 1 to {layers} would work"
        )
    stages = engine.pipeline_stage_layers
    if stages is not None and sum(stages) != layers:
        raise ConfigError(
            f"pipeline_stage_layers is {list(stages)}, {sum(stages)} layers in all; the model has {layers}"
        )


def partition(
    config: ModelConfig, engine: EngineConfig, costs: StageCosts | None = None, column_group: int = COLUMN_GROUP
) -> tuple[Shard, ...]:
    """Every rank's shard, by rank. Raises `ConfigError` as `check_degrees`.

    `costs` say how long layers, embedding and head take, to balance the stages; without them bytes count.
    `column_group`: quantization groups of the down projection, where they are wider than the kernels' own.
    """
    check_degrees(config, engine)
    tp, pp = engine.tensor_parallel_size, engine.pipeline_parallel_size
    weights = engine.tensor_parallel_weights or (1.0,) * tp
    heads, kv_heads = _split_heads(config, weights)
    intermediate = _split_in_groups(config.intermediate_size, weights, column_group)
    vocab = _split_in_groups(config.vocab_size, weights, COLUMN_GROUP)
    counts = engine.pipeline_stage_layers or balance(config.num_hidden_layers, pp, costs or StageCosts.of_bytes(config))
    stages = _ranges(counts)
    return tuple(
        Shard(t, tp, p, pp, stages[p], heads[t], kv_heads[t], intermediate[t], vocab[t])
        for p in range(pp)
        for t in range(tp)
    )


def balance(num_layers: int, num_stages: int, costs: StageCosts) -> list[int]:
    """Layers of each stage, so that the slowest takes as little time as can be; of equals the evenest.

    The first stage has the embedding to do as well, the last the head. Every stage gets a layer at least.
    """
    counts = [1] * num_stages
    times = [costs.layer] * num_stages
    times[0] += costs.embedding
    times[-1] += costs.head
    for _ in range(num_layers - num_stages):
        # One to the stage that is done first with it: with equal layers no other order ends lower.
        fastest = min(range(num_stages), key=lambda stage: (times[stage], stage))
        counts[fastest] += 1
        times[fastest] += costs.layer
    return counts


def apportion(units: int, weights: Sequence[float]) -> list[int]:
    """Deal `units` out by weight, at least one each, the rest by largest remainder (the lower rank of equals)."""
    spare, total = units - len(weights), sum(weights)
    exact = [max(0.0, units * w / total - 1) for w in weights]
    scale = spare / sum(exact) if sum(exact) else 0.0
    shares = [int(e * scale + 1e-9) for e in exact]
    order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i] * scale, i))
    for i in order[: spare - sum(shares)]:
        shares[i] += 1
    return [1 + share for share in shares]


def _ranges(lengths: Sequence[int]) -> list[Range]:
    ends = list(accumulate(lengths))
    return [Range(end - length, end, ends[-1]) for length, end in zip(lengths, ends, strict=True)]


def _split_in_groups(size: int, weights: Sequence[float], group: int) -> list[Range]:
    """In whole groups where there are enough of them, the last one maybe short; else as it comes."""
    while group > 1 and -(-size // group) < len(weights):
        group = COLUMN_GROUP if group > COLUMN_GROUP else 1
    ranges = _ranges(apportion(-(-size // group), weights))
    return [Range(min(r.start * group, size), min(r.stop * group, size), size) for r in ranges]


def _split_heads(config: ModelConfig, weights: Sequence[float]) -> tuple[list[Range], list[Range]]:
    """Query heads and key-value heads by rank: whole groups, or, with more ranks than groups, parts of one each."""
    heads, kv_heads, tp = config.num_attention_heads, config.num_key_value_heads, len(weights)
    group = heads // kv_heads
    if tp <= kv_heads:
        kv = _ranges(apportion(kv_heads, weights))
        return [r.scaled(group) for r in kv], kv
    sharers = tp // kv_heads
    parts: list[int] = []
    for g in range(kv_heads):
        parts += apportion(group, weights[g * sharers : (g + 1) * sharers])
    return _ranges(parts), [Range(t // sharers, t // sharers + 1, kv_heads) for t in range(tp)]
