"""OpenTelemetry traces over all that a request passes: ingress → global scheduler → worker group.

    POST                           ingress; continues the caller's trace (W3C `traceparent`)
      generate                     ingress: a sequence, from here to its last token
        schedule                   global scheduler: from arrival to being handed to a group
        prefill, decode            worker group

Off unless `observability.otlp_traces_endpoint` is set: then nothing of OpenTelemetry is imported, and a request carries
an empty `traceparent`. What is not sampled at the ingress is nobody's work further on. Spans say ids, names and
numbers, never text. A thread of their own sends them, in batches; a collector that is away costs spans, not requests.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..scheduler.errors import ConfigError
from .config import ObservabilityOptions

logger = logging.getLogger(__name__)

now_ns = time.time_ns
Attributes = Mapping[str, str | int | float | bool]

current_traceparent: ContextVar[str] = ContextVar("current_traceparent", default="")


class Span:
    """A span that is open. `traceparent` is for those that come under it; empty: it is not recorded."""

    traceparent = ""

    def set(self, attributes: Attributes) -> None:
        pass

    def end(self, error: str | None = None) -> None:
        """Close it; `error` names the kind of failure. Once."""


class Tracing:
    """Makes spans. This one makes none."""

    def start(self, name: str, parent: str, attributes: Attributes, server: bool = False) -> Span:
        """Open a span under `parent`, a `traceparent`; without one it is a trace's first."""
        return Span()

    def record(self, name: str, parent: str, began_ns: int, ended_ns: int, attributes: Attributes) -> None:
        """A span that is over already. Without `parent` there is none."""

    def close(self) -> None:
        """Send what is left."""

    @contextmanager
    def within(self, span: Span) -> Iterator[None]:
        """Spans that are started under `current_traceparent` come under this one."""
        token = current_traceparent.set(span.traceparent)
        try:
            yield
        finally:
            current_traceparent.reset(token)


OFF = Tracing()


def make_tracing(process: str, options: ObservabilityOptions, exporter: Any = None) -> Tracing:
    """For a process of this kind: "ingress", "scheduler" or "group". `exporter` takes the place of OTLP's.

    Raises `ConfigError` where traces are asked for and what sends them is not installed.
    """
    if options.otlp_traces_endpoint is None and exporter is None:
        return OFF
    try:
        return _OpenTelemetry(process, options, exporter)
    except ImportError as error:
        raise ConfigError(
            f"observability.otlp_traces_endpoint needs OpenTelemetry's exporter ({error.name} is not installed): "
            "pip install pagedray[trace]"
        ) from None


class _OpenTelemetry(Tracing):
    def __init__(self, process: str, options: ObservabilityOptions, exporter: Any):
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=options.otlp_traces_endpoint)
        self.trace = trace
        self.propagator = TraceContextTextMapPropagator()
        self.provider = TracerProvider(
            resource=Resource.create({"service.name": f"pagedray-{process}"}),
            sampler=ParentBased(TraceIdRatioBased(options.trace_sample_ratio)),
            shutdown_on_exit=False,  # a process that is killed sends nothing anyhow, and one that ends must not wait
        )
        self.provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self.tracer = self.provider.get_tracer("pagedray")

    def start(self, name: str, parent: str, attributes: Attributes, server: bool = False) -> Span:
        kind = self.trace.SpanKind.SERVER if server else self.trace.SpanKind.INTERNAL
        span = self.tracer.start_span(name, self._context(parent), kind, attributes)
        return _OpenSpan(self, span) if span.is_recording() else Span()

    def record(self, name: str, parent: str, began_ns: int, ended_ns: int, attributes: Attributes) -> None:
        if parent:
            span = self.tracer.start_span(
                name, self._context(parent), self.trace.SpanKind.INTERNAL, attributes, start_time=began_ns
            )
            span.end(ended_ns)

    def close(self) -> None:
        self.provider.shutdown()

    def _context(self, parent: str) -> Any:
        return self.propagator.extract({"traceparent": parent} if parent else {})


class _OpenSpan(Span):
    def __init__(self, tracing: _OpenTelemetry, span: Any):
        self._tracing, self._span = tracing, span
        carrier: dict[str, str] = {}
        tracing.propagator.inject(carrier, tracing.trace.set_span_in_context(span))
        self.traceparent = carrier["traceparent"]

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, error: str | None = None) -> None:
        if error is not None:
            self._span.set_status(self._tracing.trace.StatusCode.ERROR, error)
        self._span.end()
