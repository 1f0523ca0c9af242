"""The engine as HTTP sees it, and a model that is served."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ...scheduler.request import Request, SequenceOutput
from ..text.tokenizer import Tokenizer


class EngineClient(Protocol):
    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        """Run one sequence. An item holds the tokens that came together; the last one has a `finish_reason`.

        Raises `PagedRayError`s: `Overloaded`, `EngineDead`, `InvalidRequest`. Closing or cancelling the generator
        before its end aborts the sequence; closing it after its last item does nothing.
        """
        ...


@dataclass(frozen=True)
class ServedModel:
    """`max_model_len` is in tokens, prompt and answer together; `created` in seconds since 1970."""

    id: str
    tokenizer: Tokenizer
    max_model_len: int
    created: int
    tool_call_parser: str | None = None  # how this model writes calls; see text/tool_calls.py
    reasoning_parser: str | None = None  # None: what it thinks is part of its answer
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # for requests that do not say
