"""What a rank does differently on a CUDA GPU: which device, how much KV it can hold, decode steps as CUDA graphs, KV
copied beside what is computed.

Nothing here needs a GPU to be imported; what does is `measure`, `cuda_graph` and `CopyStream`, and no machine has run
those yet. What ranks exchange goes through `collectives.py`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.ops import AttentionMetadata
from ..scheduler.errors import ConfigError
from ..scheduler.plan import NewSequence, ScheduledSequence, StepPlan
from ..scheduler.request import SamplingParams
from .partition import Shard

# (run) -> (replay, output): `replay` does again what `run` does, into the same `output`
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, by the names that its host has for them; does not start CUDA."""
    if not torch.cuda.is_available():
        return ()
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = [n.strip() for n in names.split(",")] if names else list(map(str, range(torch.cuda.device_count())))
    return tuple(listed[: torch.cuda.device_count()])


def select_device(setting: str) -> torch.device:
    """`auto`, `cuda` or `cpu` to a device; `ConfigError` where there is no GPU for `cuda`."""
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError(
            f"device is cuda, but PyTorch {torch.__version__} sees no CUDA GPU here; say cpu or auto, or install a "
            "CUDA build of PyTorch and the driver"
        )
    return torch.device("cuda" if available and setting != "cpu" else "cpu")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a GPU's memory."""

    total: int
    others: int  # held outside PyTorch's allocator: other processes, the CUDA context, libraries
    peak: int  # the most that PyTorch held during the largest step, weights among it


def kv_budget(use: MemoryUse, utilization: float) -> int:
    """Bytes left for KV of the share of the GPU that `gpu_memory_utilization` allows; `ConfigError` if none are."""
    budget = int(use.total * utilization) - use.others - use.peak
    if budget <= 0:
        gib = 2**30
        raise ConfigError(
            f"gpu_memory_utilization is {utilization}: {use.total * utilization / gib:.1f} of {use.total / gib:.1f} "
            f"GiB; weights and the largest step take {use.peak / gib:.1f}, others hold {use.others / gib:.1f}; raise "
            "it, lower max_num_batched_tokens, or use more GPUs"
        )
    return budget


def measure(run_largest_step: Callable[[], object], device: torch.device) -> MemoryUse:
    """Run a step and see what it takes (vLLM's profiling run)."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(
        total=total,
        others=total - free - torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_reserved(device),
    )


class Alone:
    """Stands in for the other ranks while a rank runs its largest step by itself: tensors of the same sizes, with
    nothing in them. So ranks that load at different speeds need not wait for each other.
    """

    def __init__(self, shard: Shard, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.shard, self.vocab_size = shard, vocab_size
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device

    def reduce(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        return part.to(dtype)

    def gather_logits(self, logits: Tensor) -> Tensor | None:
        if self.shard.tp_rank:
            return None
        return torch.nn.functional.pad(logits, (0, self.vocab_size - logits.shape[1]))

    def send_hidden(self, step_id: int, hidden: Tensor) -> None:
        pass

    def receive_hidden(self, step_id: int, num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)

    def check(self) -> None:
        pass


def largest_step(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> tuple[list[StepPlan], int]:
    """The plans of the step that takes the most memory, and of its end, and the blocks they need.

    As many sequences as a step may have, and as many tokens, all of them sampled.
    """
    tokens = max(max_num_seqs, max_num_batched_tokens)
    lengths = [min(tokens // max_num_seqs + (i < tokens % max_num_seqs), max_model_len) for i in range(max_num_seqs)]
    sampling = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=0)
    new, scheduled, block = [], [], 0
    for i, length in enumerate(lengths):
        blocks = tuple(range(block, block + -(-length // block_size)))
        block += len(blocks)
        new.append(NewSequence(-1 - i, (0,) * length, length, sampling, 0))
        scheduled.append(ScheduledSequence(-1 - i, 0, length, (), blocks, True))
    ids = tuple(n.seq_id for n in new)
    return [StepPlan(-2, (), tuple(new), tuple(scheduled)), StepPlan(-1, ids, (), ())], block


def buckets(most: int) -> list[int]:
    """Batch sizes that have a graph: 1, 2, 4, then every 8, up to the first that holds `most`."""
    sizes = [1, 2, 4, *range(8, most + 8, 8)]
    return sizes[: next(i for i, size in enumerate(sizes) if size >= most) + 1]


def cuda_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """Capture what `run` launches. It is run before, so that kernels are compiled and libraries have started."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may ask for events meanwhile: NCCL's watchdog does.
    with torch.cuda.graph(graph, pool=_graph_pool(), capture_error_mode="thread_local"):
        output = run()
    return graph.replay, output


_pool: Any = None


def _graph_pool() -> Any:
    """One pool for all graphs: they never run together."""
    global _pool
    _pool = _pool or torch.cuda.graph_pool_handle()
    return _pool


class DecodeGraphs:
    """A step of one token a sequence, captured once for each bucket of batch sizes and replayed with other inputs.

    Inputs are copied into tensors that the graphs read; a batch is padded to its bucket with sequences of one token
    whose keys go nowhere (slot -1) and whose results nobody reads. Launch grids depend on the bucket and on
    max_model_len alone; lengths and tables are read on the device. The collectives of the ranks of a stage are part of
    the graphs: all must capture the same ones together, and replay them in the same order.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, AttentionMetadata], Tensor],  # first, positions, metadata -> [T, hidden]
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        capture: Capture = cuda_graph,
        hidden: tuple[int, torch.dtype] | None = None,
    ):
        """`hidden`: size and dtype of what a stage is handed on, which comes in instead of token ids."""
        self.forward = forward
        self.max_model_len = max_model_len
        self.capture = capture
        self.buckets = buckets(max_num_seqs)
        most = self.buckets[-1]

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.first = zeros(most, hidden[0], dtype=hidden[1]) if hidden else zeros(most, dtype=torch.int64)
        self.positions = zeros(most, dtype=torch.int64)
        self.slot_mapping = zeros(most, dtype=torch.int64)
        self.seq_lens = zeros(most, dtype=torch.int32)
        self.block_tables = zeros(most, -(-max_model_len // block_size), dtype=torch.int32)
        self.query_start_loc = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.captured: dict[int, tuple[Callable[[], object], Tensor]] = {}

    def holds(self, metadata: AttentionMetadata) -> bool:
        """Whether a graph can do this step."""
        return metadata.max_query_len == 1 and len(metadata.slot_mapping) == len(metadata.seq_lens) <= self.buckets[-1]

    def capture_all(self) -> None:
        """The largest first, whose memory the others share."""
        for size in reversed(self.buckets):
            self._fill_padding(0, size)
            self._captured(size)

    def run(self, first: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Hidden states [num_seqs, hidden], which the next call overwrites."""
        count = len(first)
        size = next(b for b in self.buckets if b >= count)
        self.first[:count].copy_(first, non_blocking=True)
        self.positions[:count].copy_(positions, non_blocking=True)
        self.slot_mapping[:count].copy_(metadata.slot_mapping, non_blocking=True)
        self.seq_lens[:count].copy_(metadata.seq_lens, non_blocking=True)
        self.block_tables[:count, : metadata.block_tables.shape[1]].copy_(metadata.block_tables, non_blocking=True)
        self._fill_padding(count, size)
        replay, output = self._captured(size)
        replay()
        return output[:count]

    def _fill_padding(self, start: int, end: int) -> None:
        self.first[start:end] = 0
        self.positions[start:end] = 0
        self.slot_mapping[start:end] = -1
        self.seq_lens[start:end] = 1
        self.block_tables[start:end] = 0

    def _captured(self, size: int) -> tuple[Callable[[], object], Tensor]:
        if size not in self.captured:
            metadata = AttentionMetadata(
                self.query_start_loc[: size + 1],
                self.seq_lens[:size],
                self.block_tables[:size],
                self.slot_mapping[:size],
                1,
                self.max_model_len,
            )
            self.captured[size] = self.capture(lambda: self.forward(self.first[:size], self.positions[:size], metadata))
        return self.captured[size]


class CopyStream:
    """Copies between a GPU and pinned memory of the host, beside the steps. Any thread may use it."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is begun within follows the steps begun so far, and has ended when the context has."""
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def host_bytes(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def to_device(self, values: Tensor) -> Tensor:
        return values.contiguous().pin_memory().to(self._device, non_blocking=True)
