"""W1 to W5: what is asked for, and the ratios that PagedRay is to reach.

Prompts are random token ids, the same for everybody in a round and others in the next, so that no cache helps from one
round to the next. Decoding is greedy and goes on to the length that is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedray.cluster.bench import Prompts

OUTPUT = "output_throughput"  # tokens a second
INPUT = "input_throughput"  # tokens a second
TTFT = "median_ttft_ms"
ITL = "p95_itl_ms"
BANDWIDTH = "bandwidth_share"  # bytes of weights read a second, of what the memory gives in the same minute

LOWER_IS_BETTER = frozenset({TTFT, ITL})
_VOCAB_SIZE = 8192


@dataclass(frozen=True)
class Target:
    """PagedRay in precision `ours` against `peer`: `metric`'s ratio must be at least `ratio`, or at most, for times."""

    ours: str
    peer: str
    ratio: float
    metric: str = OUTPUT

    @property
    def words(self) -> str:
        return f"{'≤' if self.metric in LOWER_IS_BETTER else '≥'} {self.ratio:g}"

    def met(self, ratio: float) -> bool:
        return ratio <= self.ratio if self.metric in LOWER_IS_BETTER else ratio >= self.ratio


@dataclass(frozen=True)
class Workload:
    name: str
    about: str
    prompts: Mapping[str, Any]  # of `bench.Prompts`
    contestants: tuple[str, ...]  # "peer:precision", PagedRay's first
    targets: tuple[Target, ...]
    http: bool = False  # else all prompts are handed over at once
    concurrency: int | None = None
    metric: str = OUTPUT
    model: str = "smollm2"

    def draw(self, round_: int) -> Prompts:
        return Prompts(**self.prompts, seed=round_, vocab_size=_VOCAB_SIZE)

    def warm_up(self) -> Prompts:
        """One small request before each turn: what was stopped has to come back to the caches."""
        return Prompts(1, (64, 64), (8, 8), seed=-1, vocab_size=_VOCAB_SIZE)


_BF16 = ("pagedray:bf16", "vllm:bf16", "llama.cpp:bf16", "transformers:bf16")
_INT8 = ("pagedray:bf16", "pagedray:int8", *_BF16[1:])

WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "W1",
            "one stream, 128 in, 128 out, HTTP",
            {"count": 2, "input_len": (128, 128), "output_len": (128, 128)},
            (
                *("pagedray:bf16", "pagedray:int8", "pagedray:q8_0", "pagedray:q4_0"),
                *("vllm:bf16", "llama.cpp:bf16", "llama.cpp:q8_0", "llama.cpp:q4_0", "transformers:bf16"),
            ),
            (
                Target("bf16", "vllm:bf16", 2.5),
                Target("bf16", "llama.cpp:bf16", 1.1),
                Target("q8_0", "llama.cpp:q8_0", 1.1),
                Target("q4_0", "llama.cpp:q4_0", 1.1),
            ),
            http=True,
            concurrency=1,
        ),
        Workload(
            "W1-1B",
            "the same, 1.07B random bf16",
            {"count": 1, "input_len": (128, 128), "output_len": (128, 128)},
            _BF16[:3],
            (Target("bf16", "memory", 0.85, BANDWIDTH),),
            http=True,
            concurrency=1,
            model="1b",
        ),
        Workload(
            "W2",
            "16 requests, 32-512 in, 64-128 out",
            {"count": 16, "input_len": (32, 512), "output_len": (64, 128)},
            _INT8,
            (Target("bf16", "vllm:bf16", 1.5), Target("int8", "vllm:bf16", 2.2)),
        ),
        Workload(
            "W3",
            "16 requests sharing 1,024 tokens, 32 own, 32 out",
            {"count": 16, "prefix_len": 1024, "input_len": (32, 32), "output_len": (32, 32)},
            _BF16,
            (Target("bf16", "vllm:bf16", 1.3),),
        ),
        Workload(
            "W4",
            "2,048 in, 1 out",
            {"count": 1, "input_len": (2048, 2048), "output_len": (1, 1)},
            _INT8,
            (Target("bf16", "vllm:bf16", 1.2, INPUT), Target("int8", "vllm:bf16", 1.8, INPUT)),
            metric=INPUT,
        ),
        Workload(
            "W5",
            "HTTP, concurrency 8, 32 requests, 128 in, 64 out",
            {"count": 32, "input_len": (128, 128), "output_len": (64, 64)},
            _BF16[:3],
            (
                Target("bf16", "vllm:bf16", 1.4),
                Target("bf16", "vllm:bf16", 1.0, TTFT),
                Target("bf16", "vllm:bf16", 1.0, ITL),
            ),
            http=True,
            concurrency=8,
        ),
    )
}
