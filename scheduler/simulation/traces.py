"""Traces of real requests, in the formats in which they are published.

    Mooncake    JSON lines: timestamp (ms), input_length, output_length, hash_ids (one for each 512 tokens)
    Azure LLM 2023   CSV: TIMESTAMP (7 fractional digits), ContextTokens, GeneratedTokens
    BurstGPT    CSV: Timestamp (s), Model, Request tokens, Response tokens, …; answers of 0 tokens failed, left out

Reading is strict: a line that is not as it should be is an error that names it.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from ..errors import ConfigError

TRACE_BLOCK_SIZE = 512  # tokens


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`arrival` in seconds from the first one; `block_hashes` of its full blocks, empty where the trace has none."""

    arrival: float
    input_tokens: int
    output_tokens: int
    block_hashes: tuple[bytes, ...] = ()
    tenant: str = "default"


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace, in order of arrival, its format told from its first line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    lines = text.splitlines()  # CRLF or LF, with or without a newline at the end
    first = lines[0] if lines else ""
    read: Callable[[Sequence[str]], Iterator[TraceRequest]]
    if first.startswith("{"):
        read, start = _mooncake, 1
    elif first.startswith("TIMESTAMP,ContextTokens,GeneratedTokens"):
        read, start = _azure, 2
    elif first.startswith("Timestamp,"):
        read, start = _burstgpt, 2
    else:
        raise ConfigError(f"{path} is no trace of Mooncake, Azure LLM 2023 or BurstGPT; it begins {first[:60]!r}")
    requests: list[TraceRequest] = []
    try:
        for request in read(lines):
            if request.input_tokens < 1 or request.output_tokens < 0:
                raise ValueError("token counts must not be negative")
            if request.output_tokens:
                requests.append(request)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} near line {len(requests) + start}: {error!r}") from None
    requests.sort(key=lambda r: r.arrival)
    begin = requests[0].arrival if requests else 0.0
    return [replace(r, arrival=r.arrival - begin) for r in requests[:limit]]


def _mooncake(lines: Sequence[str]) -> Iterator[TraceRequest]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            num_full = row["input_length"] // TRACE_BLOCK_SIZE  # a block that is not full is never shared
            hashes = tuple(int(h).to_bytes(16, "big") for h in row["hash_ids"][:num_full])
            yield TraceRequest(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), hashes)


def _azure(lines: Sequence[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(lines):
        whole, _, fraction = row["TIMESTAMP"].partition(".")  # datetime takes six digits, here are seven
        seconds = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
        yield TraceRequest(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burstgpt(lines: Sequence[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(lines):
        yield TraceRequest(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


def at_rate(requests: Iterable[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests in the same pattern, sped up or slowed down to so many a second on average."""
    requests = list(requests)
    factor = (len(requests) / rate) / requests[-1].arrival if requests and requests[-1].arrival else 0.0
    return [replace(r, arrival=r.arrival * factor) for r in requests]
