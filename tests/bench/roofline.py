"""A roofline of decode steps: what a step must read and compute, what the machine gives, the share that is reached.

    python tests/bench/roofline.py MODEL [--quantization int8] [--batches 1,4,16] [--contexts 128,1024,4096]

A step of the engine's rank, from plan to sampled tokens, with `batch` sequences that have `context` tokens each. It
must read all weights once and each sequence's KV once; it must compute 2 operations a weight and row, and 4 a head,
dimension and position in attention. That cannot take less than bytes / bandwidth, nor less than operations / rate; the
larger of both is the bound, and bound / measured time the share. Limits are read beside each measurement, since they
change by the minute.
(Williams, Waterman and Patterson, "Roofline", CACM 2009)
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from comparison.machine import Machine

from pagedray.scheduler.plan import NewSequence, ScheduledSequence, StepPlan
from pagedray.scheduler.request import SamplingParams
from pagedray.workers import kv_cache
from pagedray.workers.config import EngineConfig, ModelConfig
from pagedray.workers.worker import Worker

_WARM_UP = 2  # steps
_SECONDS = 1.5  # of steps for a measurement, at least
_LEAST = 5  # steps


@dataclass(frozen=True)
class Step:
    """The least that a decode step needs."""

    bytes: float
    operations: float

    def bound(self, bandwidth: float, rate: float) -> float:
        """Seconds: no machine with these limits does it in less."""
        return max(self.bytes / bandwidth, self.operations / rate if rate else 0.0)


def least(model: ModelConfig, weight_bytes: int, kv_bytes: int, batch: int, context: int) -> Step:
    """`weight_bytes`: of all that is multiplied; `kv_bytes`: of a token. One new token a sequence."""
    q = model.num_attention_heads * model.head_dim
    kv = model.num_key_value_heads * model.head_dim
    layer = model.hidden_size * (q + 2 * kv + q + 3 * model.intermediate_size)
    weights = model.num_hidden_layers * layer + model.vocab_size * model.hidden_size
    attention = 4 * model.num_hidden_layers * q * context
    return Step(weight_bytes + batch * context * kv_bytes, batch * (2 * weights + attention))


def bytes_of(weights: object) -> int:
    """All tensors in a tree of dataclasses, lists and tuples, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(weights)}
    return sum(storages.values())


def _tensors(node: object) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif is_dataclass(node):
        for f in fields(node):
            yield from _tensors(getattr(node, f.name))
    elif isinstance(node, list | tuple):
        for child in node:
            yield from _tensors(child)


def seconds_a_step(worker: Worker, batch: int, context: int) -> float:
    """The median over decode steps of `batch` sequences that have `context` tokens; what is in the cache is random."""
    size = worker.runner.block_size
    blocks = -(-(context + 1) // size)
    greedy = SamplingParams(temperature=0.0, seed=0)
    new = tuple(NewSequence(i, (0,) * context, context, greedy, 0) for i in range(batch))

    def decode(first: bool) -> StepPlan:
        """The same token again and again, so that the context keeps its length."""
        shares = (
            ScheduledSequence(i, context - 1, 1, (), tuple(range(i * blocks, (i + 1) * blocks)) if first else (), True)
            for i in range(batch)
        )
        return StepPlan(1, (), new if first else (), tuple(shares))

    times: list[float] = []
    worker.execute(decode(True))
    for _ in range(_WARM_UP):
        worker.execute(decode(False))
    while len(times) < _LEAST or sum(times) < _SECONDS:
        plan = decode(False)
        began = time.perf_counter()
        worker.execute(plan)
        times.append(time.perf_counter() - began)
    worker.execute(StepPlan(2, tuple(range(batch)), (), ()))
    return statistics.median(times)


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a .gguf file")
    parser.add_argument("--quantization", help="as EngineConfig has it")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16])
    parser.add_argument("--contexts", type=numbers, default=[128, 1024, 4096])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    # a block more a sequence than the context fills
    num_blocks = max(args.batches) * (max(args.contexts) // 16 + 2)
    quantization = {"quantization": args.quantization} if args.quantization else {}
    settings = {"max_model_len": max(args.contexts) + 16, "num_kv_blocks": num_blocks, "cpu_threads": args.threads}
    config = EngineConfig.from_kwargs("flags", model=args.model, **settings, **quantization)
    worker = Worker(config)
    worker.allocate(worker.num_blocks, worker.max_model_len)
    for cache in (tensor for pair in worker.runner.kv_caches for tensor in pair):
        cache.normal_()  # pages that were never written are all one page, which every cache holds
    model = worker.model_config
    decoder = worker.runner.model
    weight_bytes = bytes_of([decoder.stack.layers, decoder.stack.final_norm, decoder.lm_head])
    kv_bytes = kv_cache.bytes_per_token(model, worker.runner.kv_caches[0][0].dtype)
    machine = Machine(args.threads)

    print("| batch | context | MB | M operations | memory (GB/s) | T operations/s | bound (ms) | step (ms) | share |")
    print("|---|---|---|---|---|---|---|---|---|")
    for context in args.contexts:
        for batch in args.batches:
            step = least(model, weight_bytes, kv_bytes, batch, context)
            before = machine.bandwidth()
            seconds = seconds_a_step(worker, batch, context)
            bandwidth, rate = (before + machine.bandwidth()) / 2, machine.matrix_rate()
            bound = step.bound(bandwidth, rate)
            print(
                f"| {batch} | {context} | {step.bytes / 1e6:.0f} | {step.operations / 1e6:.0f} "
                f"| {bandwidth / 1e9:.1f} | {rate / 1e12:.2f} | {1e3 * bound:.1f} | {1e3 * seconds:.1f} "
                f"| {bound / seconds:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
