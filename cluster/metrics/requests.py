"""What an ingress counts, times, traces and logs of its requests. A sequence counts as a request: n choices are n."""

import logging
import time
from dataclasses import replace

from ...scheduler.errors import PagedRayError
from ...scheduler.histogram import Histogram
from ...scheduler.request import Request, SequenceOutput
from ..tracing import OFF, Tracing, current_traceparent
from .catalog import FAMILIES
from .reports import Count

request_logger = logging.getLogger("pagedray.requests")


class RequestMetrics:
    """Running totals by name and labels, which the catalog has. Lives on one event loop."""

    def __init__(self, tracing: Tracing = OFF):
        self.tracing = tracing
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}

    def add(self, name: str, *labels: str, by: float = 1.0) -> None:
        key = name, labels
        self._values[key] = self._values.get(key, 0.0) + by

    def histogram(self, name: str, *labels: str) -> Histogram:
        key = name, labels
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = Histogram(FAMILIES[name].bounds)
        return found

    def counts(self) -> tuple[Count, ...]:
        values = tuple((name, labels, value) for (name, labels), value in self._values.items())
        histograms = tuple((name, labels, h.so_far()) for (name, labels), h in self._histograms.items())
        return values + histograms

    def watch(self, request: Request) -> "RequestWatch":
        """A request begins."""
        return RequestWatch(self, request)


class RequestWatch:
    """One request from here to its end. `request` is what should be sent on: it says which span it belongs to."""

    def __init__(self, metrics: RequestMetrics, request: Request):
        self._metrics = metrics
        self._by = by = request.model, request.tenant
        self._began = self._last = time.monotonic()
        self._first: float | None = None  # seconds to the first token
        self._num_tokens = 0
        self._num_cached = 0
        self._reason = "abort"
        self._failure: str | None = None
        self._inter_token = metrics.histogram("inter_token_latency_seconds", *by)
        self._span = metrics.tracing.start(
            "generate",
            current_traceparent.get(),
            {
                "gen_ai.request.model": request.model,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "pagedray.request_id": request.request_id,
                "pagedray.tenant": request.tenant,
            },
        )
        traceparent = self._span.traceparent
        self.request = replace(request, traceparent=traceparent) if traceparent else request
        metrics.add("prompt_tokens", *by, by=len(request.prompt_token_ids))
        metrics.add("num_requests_in_flight", *by)

    def output(self, output: SequenceOutput) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now - self._began
            self._metrics.histogram("time_to_first_token_seconds", *self._by).observe(self._first)
            self._num_cached = output.num_cached_tokens
            self._metrics.add("cached_prompt_tokens", *self._by, by=self._num_cached)
        else:
            self._inter_token.observe(now - self._last)
        self._last = now
        self._num_tokens += len(output.token_ids)
        self._metrics.add("generation_tokens", *self._by, by=len(output.token_ids))
        if output.finish_reason:
            self._reason = output.finish_reason
            self._metrics.histogram("e2e_request_latency_seconds", *self._by).observe(now - self._began)

    def failed(self, error: PagedRayError) -> None:
        self._failure = error.code or error.type

    def end(self) -> None:
        """However it ended."""
        metrics, model = self._metrics, self._by[0]
        metrics.add("num_requests_in_flight", *self._by, by=-1)
        if self._failure is not None:
            metrics.add("request_failed", *self._by, self._failure)
        else:
            metrics.add("request_success", *self._by, self._reason)
            metrics.histogram("request_prompt_tokens", model).observe(len(self.request.prompt_token_ids))
            metrics.histogram("request_generation_tokens", model).observe(self._num_tokens)
        self._span.set(
            {
                "gen_ai.usage.output_tokens": self._num_tokens,
                "gen_ai.latency.time_to_first_token": self._first or 0.0,
                "pagedray.cached_tokens": self._num_cached,
                "pagedray.finish_reason": self._failure or self._reason,
            }
        )
        self._span.end(self._failure)
        if request_logger.isEnabledFor(logging.INFO):
            self._log()

    def _log(self) -> None:
        """Whose it was, how it ended and what it took; never what it said."""
        request = self.request
        fields = {
            "request_id": request.request_id,
            "tenant": request.tenant,
            "model": request.model,
            "outcome": self._failure or self._reason,
            "prompt_tokens": len(request.prompt_token_ids),
            "cached_tokens": self._num_cached,
            "generated_tokens": self._num_tokens,
            "ttft_seconds": None if self._first is None else round(self._first, 6),
            "seconds": round(time.monotonic() - self._began, 6),
        }
        if request.traceparent:
            fields["trace_id"] = request.traceparent.split("-")[1]
        level = logging.INFO if self._failure is None else logging.WARNING
        request_logger.log(level, "request ended", extra={"fields": fields})
