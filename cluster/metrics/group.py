"""What a worker group's leader measures of its requests and steps."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...scheduler.histogram import Histogram
from ...scheduler.request import Request, SequenceOutput
from ..tracing import Tracing, now_ns
from .catalog import FAMILIES
from .reports import GroupTimes


@dataclass(slots=True)
class _Underway:
    request: Request
    came: float
    came_ns: int
    first: float = 0.0  # when its first token was there; 0: not yet
    first_ns: int = 0
    num_tokens: int = 0


class GroupClock:
    """Times requests and steps. The engine's thread calls `stepped`, the event loop the rest; neither waits."""

    def __init__(self, group_id: str, tracing: Tracing):
        self.group_id = group_id
        self.tracing = tracing
        self._underway: dict[str, _Underway] = {}
        self._num_tokens = 0
        self._step_seconds, self._step_tokens, self._prefill, self._decode = (
            Histogram(FAMILIES[name].bounds)
            for name in ("step_seconds", "step_tokens", "request_prefill_time_seconds", "request_decode_time_seconds")
        )

    def received(self, requests: Iterable[Request]) -> None:
        now, now_in_ns = time.monotonic(), now_ns()
        for request in requests:
            self._underway[request.request_id] = _Underway(request, now, now_in_ns)

    def stepped(self, began: float, outputs: Sequence[SequenceOutput], num_tokens: int) -> None:
        """A step that began at `began` (monotonic) has ended. `num_tokens` were computed since the group began."""
        now = time.monotonic()
        if num_tokens > self._num_tokens:
            self._step_seconds.observe(now - began)
            self._step_tokens.observe(num_tokens - self._num_tokens)
            self._num_tokens = num_tokens
        for output in outputs:
            underway = self._underway.get(output.request_id)
            if underway is None:
                continue
            underway.num_tokens += len(output.token_ids)
            if not underway.first:
                underway.first, underway.first_ns = now, now_ns()
                self._prefill.observe(now - underway.came)
            if output.finish_reason:
                self._decode.observe(now - underway.first)

    def ended(self, request_id: str) -> int:
        """A request has ended, however. Its spans are sent now, when nobody waits for anything.

        Returns how many tokens were made for it.
        """
        underway = self._underway.pop(request_id, None)
        if underway is None:
            return 0
        if not underway.request.traceparent:
            return underway.num_tokens
        parent, end = underway.request.traceparent, now_ns()
        attributes: dict[str, Any] = {"pagedray.group": self.group_id, "pagedray.request_id": request_id}
        self.tracing.record("prefill", parent, underway.came_ns, underway.first_ns or end, attributes)
        if underway.first_ns:
            tokens = {"gen_ai.usage.output_tokens": underway.num_tokens}
            self.tracing.record("decode", parent, underway.first_ns, end, attributes | tokens)
        return underway.num_tokens

    def times(self) -> GroupTimes:
        return GroupTimes(
            self._step_seconds.so_far(), self._step_tokens.so_far(), self._prefill.so_far(), self._decode.so_far()
        )
