"""What a JSON schema costs a token: the same engine with and without one, turn by turn, its grammar warm.

    python tests/bench/grammar_overhead.py MODEL [--tokens 64] [--rounds 9] [--cpu-time]

Seconds of a decode step, medians of a round's steps; of the rounds the median, and of the ratios within a round. With
--cpu-time, of all threads of the process, which then compute with one: what other work on the machine changes least.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

from pagedray.cluster.llm import LLM
from pagedray.scheduler.request import Request, SamplingParams, StructuredOutputsParams

# Neither ends before the tokens do.
SCHEMAS = {
    "an array of numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 500},
    "an array of objects": {
        "type": "array",
        "minItems": 100,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 30},
                "kind": {"enum": ["ship", "boat", "raft"]},
                "crew": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
                "length": {"type": "number"},
            },
            "required": ["name", "kind", "crew", "length"],
            "additionalProperties": False,
        },
    },
}
PROMPT = "A list of ships, as JSON:"


def decode_seconds(llm: LLM, sampling: SamplingParams, batch: int, name: str, clock: Callable[[], float]) -> float:
    """The median of the steps in which all sequences decode."""
    engine, prompt = llm.engine, tuple(llm.tokenizer.encode(PROMPT))
    for i in range(batch):
        engine.add_request(Request(f"{name}-{i}", prompt, sampling, index=i))
    seconds = []
    while engine.has_unfinished():
        began = clock()
        outputs = engine.step()
        if len(outputs) == batch:
            seconds.append(clock() - began)
    assert len(seconds) >= sampling.max_tokens - 1, "a sequence ended early"
    return statistics.median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    threads = 1 if args.cpu_time else None
    llm = LLM(args.model, max_model_len=1024, max_num_seqs=16, use_tqdm=False, cpu_threads=threads)
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=args.tokens, ignore_eos=True)
    print("| what | sequences | without, ms a step | with | with / without |\n|---|---|---|---|---|")
    for what, schema in SCHEMAS.items():
        form = StructuredOutputsParams(json=json.dumps(schema))
        formed = plain.clone(ignore_eos=False, structured_outputs=form)
        for batch in (1, 8):
            pairs = []
            for turn in range(args.rounds + 1):
                kinds = [(plain, "plain"), (formed, "formed")]
                took = {}
                for sampling, kind in kinds if turn % 2 else kinds[::-1]:
                    took[kind] = decode_seconds(llm, sampling, batch, f"{kind}-{turn}", clock)
                pairs.append((took["plain"], took["formed"]))
            pairs = pairs[1:]  # the first warms up
            without, with_ = (statistics.median(p[i] for p in pairs) * 1e3 for i in (0, 1))
            ratio = statistics.median(w / o for o, w in pairs)
            print(f"| {what} | {batch} | {without:.2f} | {with_:.2f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
