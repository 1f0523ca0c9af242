"""The outermost layer of the ingress: counts HTTP requests, opens their span, and routes to what is watched."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...scheduler.errors import InvalidRequest
from ..global_scheduler import ClusterStats
from ..tracing import Tracing
from . import exposition
from .catalog import PROCESS_LABELS
from .requests import RequestMetrics

_METHODS = frozenset(["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"])
_UNTRACED = ("/health", "/ready", "/metrics", "/console")  # whoever watches asks every few seconds


class NoSuchProcess(InvalidRequest):
    status = 404
    code = "process_not_found"


class HttpWatch:
    """Labels are bounded whatever clients send: routes as they are declared, known methods, statuses."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, tracing: Tracing):
        self.app, self.metrics, self.tracing = app, metrics, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        method = scope["method"] if scope["method"] in _METHODS else "other"
        tracing = self.tracing
        if scope["path"].startswith(_UNTRACED):
            tracing = Tracing()
        parent = Headers(scope=scope).get("traceparent", "")
        span = tracing.start(method, parent, {"http.request.method": method}, server=True)
        try:
            with tracing.within(span):
                await self.app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.add("http_requests", route, method, str(status or 499))
            span.set({"http.route": route, "http.response.status_code": status or 499})
            span.end(str(status) if status >= 500 else None)


def add_metric_routes(app: FastAPI, current: Callable[[], Awaitable[ClusterStats]]) -> None:
    """`/metrics/targets`, for Prometheus's HTTP service discovery, and what it points at."""

    @app.get("/metrics/targets")
    async def list_targets(request: Request) -> Response:
        found = exposition.targets(await current(), request.url.netloc, request.url.scheme)
        return JSONResponse(found)

    @app.get("/metrics/{kind}/{process}")
    async def read_process(kind: str, process: str) -> Response:
        cluster = await current()
        if (kind, process) not in exposition.processes(cluster):
            known = ", ".join(PROCESS_LABELS)
            raise NoSuchProcess(f"there is no process {kind[:40]}/{process[:80]} ({known}); see /metrics/targets")
        return metrics_response(exposition.render(cluster, process=(kind, process)))


def metrics_response(body: bytes) -> Response:
    return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")
