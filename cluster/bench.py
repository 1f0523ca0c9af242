"""`pagedray bench`: what a server, or the engine in this process, does under a given load.

The definitions are those of vLLM's `benchmark_serving`, so that figures compare:

    TTFT   from sending a request to its first token
    ITL    from one piece of a stream to the next (a piece may carry several tokens)
    TPOT   (end-to-end latency - TTFT) / (output tokens - 1), one value a request
    E2E    from sending a request to its last token

Token counts are the server's own (`usage`), not numbers of pieces. A request that fails is counted and shown, and its
times are in no average. While a run goes on, what comes is only kept with its time; it is read afterwards, so that
the client takes as little of the machine as it can.
"""

import asyncio
import collections
import json
import math
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..scheduler.errors import ConfigError, PagedRayError
from .chat_client import EndpointError, api_url, error_message, no_server

PERCENTILES = (50, 95, 99)


# The load.


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random prompts: the same seed gives the same ones. `vocab_size` None: words; else ids below it."""

    count: int
    input_len: tuple[int, int]  # words or ids, both ends included
    output_len: tuple[int, int]  # tokens, both ends included
    seed: int = 0
    vocab_size: int | None = None
    prefix_len: int = 0  # words or ids that all prompts begin with, before their own

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"--num-prompts must be at least 1, not {self.count}")
        if self.prefix_len < 0:
            raise ConfigError(f"--prefix-len must be at least 0, not {self.prefix_len}")
        if self.vocab_size is not None and self.vocab_size <= _FIRST_ID:
            raise ConfigError(f"--vocab-size must be over {_FIRST_ID}, not {self.vocab_size}")

    def draw(self, count: int | None = None, salt: str = "") -> list[tuple[str | list[int], int]]:
        """(prompt, tokens to generate) pairs; another `salt`, other prompts."""
        rng = random.Random(f"{self.seed}/{salt}")
        vocab_size = self.vocab_size

        def tokens(length: int) -> list:
            if vocab_size is None:
                return rng.choices(_WORDS, k=length)
            return [rng.randrange(_FIRST_ID, vocab_size) for _ in range(length)]

        prefix = tokens(self.prefix_len)
        drawn: list[tuple[str | list[int], int]] = []
        for _ in range(self.count if count is None else count):
            length, output = rng.randint(*self.input_len), rng.randint(*self.output_len)
            prompt = prefix + tokens(length)
            drawn.append((" ".join(prompt) if vocab_size is None else prompt, output))
        return drawn


_FIRST_ID = 256  # below it lie special tokens and single bytes
# Short and common, so that a word is about a token whatever the tokenizer.
_WORDS = (
    "the of and to in is was for on that with as it be by at from this have are not but had his they you which one we "
    "all her she there would their will when who him been has more if no out so up said what its about than into them "
    "can only other time new some could these two may first then do any like my now over such our man me even most "
    "made after also did many off before must well back through years where much your way down should because long "
    "each just state those people too how little good very make world still see own work men day get here between "
    "both life being under three never know same last another while us might great old year come since go came right "
    "used take small "
).split()


def parse_range(flag: str, text: str) -> tuple[int, int]:
    """ "128" or "32:512"; `ConfigError` naming the flag otherwise."""
    low, colon, high = text.partition(":")
    high = high if colon else low
    if low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high):
        return int(low), int(high)
    raise ConfigError(f"{flag} must be a length such as 128, or a range such as 32:512, not {text!r}")


@dataclass(frozen=True, slots=True)
class Load:
    """What to send where. Without `request_rate` all requests are sent at once, `max_concurrency` of them at a time."""

    url: str
    prompts: Prompts
    model: str | None = None  # None: the first that the server has
    api_key: str | None = None
    endpoint: str = "completions"  # or "chat"
    request_rate: float | None = None  # a second; Poisson arrivals
    max_concurrency: int | None = None
    warmup: int = 0  # requests, one after another, that are not measured
    ignore_eos: bool = True
    timeout: float = 600.0  # seconds a request

    def __post_init__(self) -> None:
        if self.request_rate is not None and not (self.request_rate > 0 and math.isfinite(self.request_rate)):
            raise ConfigError(f"--request-rate must be over 0, not {self.request_rate}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, not {self.max_concurrency}")
        if self.endpoint == "chat" and self.prompts.vocab_size is not None:
            raise ConfigError("--prompt-format ids goes with --endpoint completions only")


# One request.


@dataclass(slots=True)
class Recording:
    """What came, as it came. Times are seconds on one monotonic clock."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    status: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that was answered to the end, or, with `error`, one that was not."""

    error: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    e2e: float = 0.0
    itl: tuple[float, ...] = ()


def read_recording(recording: Recording) -> Outcome:
    """Read a server-sent event stream. However the network cut it, an event counts when its last byte came."""
    if recording.error is not None:
        return Outcome(error=recording.error)
    if recording.status != 200:
        return Outcome(error=error_message(recording.status, b"".join(b for _, b in recording.pieces)))
    times: list[float] = []
    usage: dict[str, Any] | None = None
    finished = None
    done = False
    for when, data in _events(recording.pieces):
        if data == b"[DONE]":
            done = True
            break
        try:
            event = json.loads(data)
        except ValueError:
            return Outcome(error=f"not JSON: {data[:60]!r}")
        if "error" in event:
            error = event["error"]
            return Outcome(error=str(error.get("message", error) if isinstance(error, dict) else error))
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                times.append(when)
                break
            if choice.get("finish_reason"):
                finished = when
    if not done:
        return Outcome(error="the stream broke off before [DONE]")
    if usage is None:
        return Outcome(error="the stream has no usage: token counts are not known")
    if not times:  # tokens without text, as special ones are
        times = [recording.pieces[-1][0] if finished is None else finished]
    return Outcome(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or 0,
        ttft=times[0] - recording.sent,
        e2e=times[-1] - recording.sent,
        itl=tuple(b - a for a, b in zip(times, times[1:], strict=False)),
    )


def _events(pieces: Iterable[tuple[float, bytes]]) -> Iterable[tuple[float, bytes]]:
    """(time of its last byte, data) of each `data:` line."""
    rest = b""
    for when, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line[5:].strip()


# A run against a server.


@dataclass(slots=True)
class Run:
    """What was done and what came of it. `seconds`: from the first request sent to the last answer's end."""

    title: str
    outcomes: list[Outcome]
    seconds: float
    settings: dict[str, Any]


def run_serve(load: Load) -> Run:
    """Send the load; every request comes back as an `Outcome`. `EndpointError` if there is no server."""
    return asyncio.run(_run_serve(load))


async def _run_serve(load: Load) -> Run:
    import httpx

    from .chat_client import auth_headers

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=auth_headers(load.api_key), timeout=load.timeout, limits=limits) as http:
        model = load.model or await _first_model(http, load.url)
        for prompt, output_len in load.prompts.draw(load.warmup, "warmup"):
            outcome = read_recording(await _send(http, load, model, prompt, output_len))
            if outcome.error:
                raise EndpointError(f"the warm-up request failed: {outcome.error}")

        prompts = load.prompts.draw()
        arrivals = random.Random(f"{load.prompts.seed}/arrivals")
        free = asyncio.Semaphore(load.max_concurrency or len(prompts))

        async def one(prompt: str | list[int], output_len: int) -> Recording:
            async with free:
                return await _send(http, load, model, prompt, output_len)

        began = due = time.perf_counter()
        tasks: list[asyncio.Task[Recording]] = []
        for prompt, output_len in prompts:
            if load.request_rate is not None and tasks:
                due += arrivals.expovariate(load.request_rate)  # on the clock, so that late wake-ups do not add up
                await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(one(prompt, output_len)))
        recordings = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
    settings = {
        "model": model,
        "endpoint": load.endpoint,
        "request_rate": load.request_rate,
        "max_concurrency": load.max_concurrency,
        **_lengths(load.prompts),
    }
    return Run(f"{model} at {load.url}", [read_recording(r) for r in recordings], seconds, settings)


async def _first_model(http: Any, url: str) -> str:
    import httpx

    try:
        response = await http.get(api_url(url, "models"))
        return response.json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_server(url, error, "--base-url") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise EndpointError(f"{url} names no model (HTTP {response.status_code}); say --model") from None


async def _send(http: Any, load: Load, model: str, prompt: str | list[int], output_len: int) -> Recording:
    import httpx

    what = {"messages": [{"role": "user", "content": prompt}]} if load.endpoint == "chat" else {"prompt": prompt}
    body: dict[str, Any] = {"model": model, **what, "max_tokens": output_len, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if load.ignore_eos:
        body["ignore_eos"] = True
    url = api_url(load.url, "chat/completions" if load.endpoint == "chat" else "completions")
    recording = Recording(sent=time.perf_counter())
    try:
        # httpx's own timeout is for each read; a server that trickles must end too
        async with asyncio.timeout(load.timeout), http.stream("POST", url, json=body) as response:
            recording.status = response.status_code
            async for piece in response.aiter_bytes():
                recording.pieces.append((time.perf_counter(), piece))
    except TimeoutError:
        recording.error = f"no end after {load.timeout:g} s"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        recording.error = f"{type(error).__name__}: {error}".rstrip(": ")
    return recording


# A run in this process.


def run_offline(model: str, prompts: Prompts, engine_kwargs: dict[str, Any]) -> Run:
    """Give all prompts to an `LLM` at once. Only throughput is known: the offline engine has no arrivals."""
    from .llm import LLM, SamplingParams

    llm = LLM(model, use_tqdm=sys.stderr.isatty(), **engine_kwargs)
    llm.generate(["warm up"], SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
    drawn = prompts.draw()
    sampling = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for _, n in drawn]
    began = time.perf_counter()
    outputs = llm.generate([p for p, _ in drawn], sampling, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - began
    outcomes = [
        Outcome(prompt_tokens=len(o.prompt_token_ids), output_tokens=sum(len(c.token_ids) for c in o.outputs))
        for o in outputs
    ]
    return Run(f"{model}, offline", outcomes, seconds, {"model": model, **engine_kwargs, **_lengths(prompts)})


def _lengths(prompts: Prompts) -> dict[str, Any]:
    lengths = {"input_len": list(prompts.input_len), "output_len": list(prompts.output_len)}
    return {"num_prompts": prompts.count, "prefix_len": prompts.prefix_len, **lengths, "seed": prompts.seed}


# The figures.


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, linear between the closest ranks, as numpy's default; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = q / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarize(run: Run) -> dict[str, Any]:
    """All figures by name: throughputs a second, times in milliseconds (None where nothing was measured)."""
    good = [o for o in run.outcomes if o.error is None]
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    figures: dict[str, Any] = {
        "completed": len(good),
        "failed": len(run.outcomes) - len(good),
        "errors": dict(collections.Counter(o.error for o in run.outcomes if o.error is not None)),
        "duration_s": run.seconds,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / run.seconds,
        "output_throughput": output / run.seconds,
        "total_token_throughput": (prompt + output) / run.seconds,
    }
    timed = [o for o in good if o.e2e]
    for name, values in (
        ("ttft", [o.ttft for o in timed]),
        ("tpot", [(o.e2e - o.ttft) / (o.output_tokens - 1) for o in timed if o.output_tokens > 1]),
        ("itl", [gap for o in timed for gap in o.itl]),
        ("e2el", [o.e2e for o in timed]),
    ):
        figures[f"mean_{name}_ms"] = 1000 * sum(values) / len(values) if values else None
        for q in PERCENTILES:
            label = "median" if q == 50 else f"p{q}"
            figures[f"{label}_{name}_ms"] = 1000 * percentile(values, q) if values else None
    return figures


def report(run: Run, file: Path | None = None) -> int:
    """Print the figures, write them to `file` as JSON; the exit status: 1 if any request failed."""
    figures = summarize(run)
    print(f"\n{run.title}\n")
    for label, key, form in _ROWS:
        print(f"{label:<32}{figures[key]:>12{form}}")
    for name, label in _TIMES:
        if figures[f"mean_{name}_ms"] is not None:
            print(f"\n{label + ' (ms)':<32}" + "".join(f"{s:>10}" for s in _STATISTICS))
            print(" " * 32 + "".join(f"{figures[f'{s}_{name}_ms']:>10.2f}" for s in _STATISTICS))
    for error, count in figures["errors"].items():
        print(f"\n{count} failed: {error}")
    if file is not None:
        try:
            file.write_text(json.dumps({**run.settings, **figures}, indent=2) + "\n")
        except OSError as error:
            raise PagedRayError(f"cannot write {file}: {error.strerror}") from None
    return 1 if figures["failed"] else 0


_STATISTICS = ("mean", *("median" if q == 50 else f"p{q}" for q in PERCENTILES))
_TIMES = (
    ("ttft", "Time to first token"),
    ("tpot", "Time per output token"),
    ("itl", "Inter-token latency"),
    ("e2el", "End-to-end latency"),
)
_ROWS = (
    ("Successful requests", "completed", "d"),
    ("Failed requests", "failed", "d"),
    ("Duration (s)", "duration_s", ".2f"),
    ("Input tokens", "total_input_tokens", "d"),
    ("Output tokens", "total_output_tokens", "d"),
    ("Requests (1/s)", "request_throughput", ".2f"),
    ("Output tokens (1/s)", "output_throughput", ".2f"),
    ("All tokens (1/s)", "total_token_throughput", ".2f"),
)
