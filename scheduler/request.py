"""What a caller may ask for: `SamplingParams`, `Request`; and what comes back: `SequenceOutput`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from json import dumps
from typing import Any, Literal

from .errors import InvalidRequest
from .kv_fetch import KVSource

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 4
MAX_SEED = 2**63 - 1

# How the hidden states of a prompt's tokens, after the last layer and its norm, become one: their mean, or the last's.
Pooling = Literal["mean", "last"]


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value!r}", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, not {value!r}", name)
    return float(value)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, not {value!r}", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}", name)
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form that an answer must have: exactly one of these, with vLLM's names.

    `json` is a JSON schema (text, or an object, which becomes text); `json_object` any JSON object; `regex` matches the
    whole answer; `choice` lists the possible answers; `grammar` is a Lark or GBNF grammar. Whether they make sense is
    for whoever can read them to check.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", dumps(self.json))
        choice: Any = () if self.choice is None else self.choice
        if choice != () and not (choice and isinstance(choice, list | tuple) and all(_is_text(c) for c in choice)):
            raise InvalidRequest(
                "structured_outputs: choice must be a list of one or more non-empty strings", "structured_outputs"
            )
        object.__setattr__(self, "choice", tuple(choice))
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False, ())]
        if len(given) != 1:
            asked = f"not {', '.join(given)} together" if given else "and none is set"
            raise InvalidRequest(
                "structured_outputs must have one of json, json_object, regex, choice and grammar, " + asked,
                "structured_outputs",
            )
        for name in ("json", "regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequest(f"structured_outputs: {name} must be a string", "structured_outputs")
        if not isinstance(self.json_object, bool):
            raise InvalidRequest("structured_outputs: json_object must be true or false", "structured_outputs")

    @property
    def kind(self) -> str:
        names = {"json": "JSON schema", "json_object": "JSON object", "regex": "regular expression"}
        name = next(f.name for f in fields(self) if getattr(self, f.name) not in (None, False, ()))
        return names.get(name, name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are vLLM's (`top_k` 0 or -1 means off).

    Values out of range raise `InvalidRequest` naming the field. `temperature` under 1e-5 means greedy.
    `stop` strings are matched on text, by whoever holds the text; the engine knows token ids only.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = 16  # None: as far as the context allows
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k likeliest ones'
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - frozen
        _integer("n", self.n, 1, MAX_N)
        put("temperature", _number("temperature", self.temperature, 0, 2))
        put("top_p", _number("top_p", self.top_p, 0, 1))
        put("top_k", max(0, _integer("top_k", self.top_k, -1, 2**31 - 1)))
        put("min_p", _number("min_p", self.min_p, 0, 1))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 1e-2, 1e2))
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2, 2))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2, 2))
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), MAX_SEED)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop may hold at most {MAX_STOP_STRINGS} strings, not {len(stop)}", "stop")
        if any(not isinstance(s, str) or not s for s in stop):
            raise InvalidRequest("stop must hold non-empty strings", "stop")
        put("stop", stop)
        put("stop_token_ids", tuple(_integer("stop_token_ids", t, 0, 2**31 - 1) for t in self.stop_token_ids or ()))
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens ({self.min_tokens}) is over max_tokens ({self.max_tokens})", "min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        bias = {}
        for token, value in (self.logit_bias or {}).items():
            bias[_integer("logit_bias", token, 0, 2**31 - 1)] = _number("logit_bias", value, -100, 100)
        put("logit_bias", bias)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequest("structured_outputs must be a StructuredOutputsParams", "structured_outputs")
        if self.structured_outputs and self.ignore_eos:
            raise InvalidRequest("ignore_eos does not go with a structured output, which has an end", "ignore_eos")

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is always taken, whatever the other fields say."""
        return self.temperature < 1e-5 or self.top_k == 1 or self.top_p == 0.0

    def clone(self, **changes: Any) -> "SamplingParams":
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. A call with n choices becomes n requests that differ in `index` (and id).

    `sampling.seed` is always set by the time a request reaches a scheduler, so that a draw is a function of
    (seed, index, position) and a request that is preempted or resumed elsewhere continues with the same draws.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    model: str = ""
    index: int = 0
    priority: int = 0  # lower goes first, as in vLLM
    background: bool = False  # of a batch: what anybody waits for goes first
    tenant: str = "default"
    cache_salt: str = ""  # requests share cached prefixes only with the same salt
    block_hashes: tuple[bytes, ...] = ()  # of the prompt's full blocks; without them it is placed by load alone
    ttft_target: float | None = None  # seconds to the first token, past which it is worth nothing
    pooling: Pooling | None = None  # its embedding is wanted, and no token
    kv_source: KVSource | None = None  # where its group should fetch blocks from; the global scheduler says
    hand_over: bool = False  # its group gives it away once a store has what was computed; the global scheduler says
    # Of one that goes on after its worker group, or the scheduler that had it, was lost: the tokens it has made, how
    # many groups were lost with it, and the seconds since it came.
    output_token_ids: tuple[int, ...] = ()
    attempt: int = 0
    age: float = 0.0
    traceparent: str = ""  # of the span that it belongs to (W3C Trace Context); empty: it is not traced

    @property
    def admitted(self) -> bool:
        """Long ago: it passes no limit again, and keeps its place."""
        return self.attempt > 0 or self.age > 0

    @property
    def reads_prompt(self) -> bool:
        """Every position of the prompt tells something, so none may be taken from a prefix cache."""
        return self.pooling == "mean" or self.sampling.prompt_logprobs is not None

    @property
    def num_tokens(self) -> int:
        """Of `token_ids`."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that must be computed before its next token."""
        return self.prompt_token_ids + self.output_token_ids


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token, from the model's distribution before any sampling setting.

    `top` holds the `logprobs` likeliest (token id, logprob), likeliest first. Values are finite.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one sequence gained in one step. The last one of a sequence has a `finish_reason`.

    finish_reason: "length", or "stop" (end of sequence or a stop token, which is the last of `token_ids`; a prompt that
    is pooled).
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_token_id: int | None = None  # the stop_token_ids entry that ended it, None for end-of-sequence
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    moving: bool = False  # no news: its group will leave, and asks that the sequence go on at another one
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first output: of the prompt's tokens but the first
    embedding: bytes = b""  # of a request with `pooling`: fp32, little endian, of length 1
