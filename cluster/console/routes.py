"""The console's routes: a page that anybody may load, and the data behind the API keys."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, RedirectResponse

from ...scheduler.errors import InvalidRequest
from ...scheduler.tenants import Tenant
from ..global_scheduler import ClusterStats
from .state import cluster_state

# No script, style, font or picture but our own, nothing inline, no frame around it, and no call to anywhere else.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PAGES = {
    "": ("index.html", "text/html"),
    "console.js": ("console.js", "text/javascript"),
    "console.css": ("console.css", "text/css"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}


class NoSuchPage(InvalidRequest):
    status = 404
    code = "page_not_found"


def add_console(
    app: FastAPI,
    current: Callable[[], Awaitable[ClusterStats]],
    nodes: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
    models: Callable[[], Mapping[str, int]],
    may_sleep: Callable[[], Collection[str]],
    caller: Callable[[], Tenant],
    sees_all: Callable[[Tenant], bool],
) -> None:
    """Serve the console of this application. `sees_all` says who is shown other tenants by name."""
    static = files(__package__) / "static"
    bodies = {path: (static / name).read_bytes() for path, (name, _) in PAGES.items()}

    @app.get("/console/state")
    async def read_state() -> Response:
        tenant = caller()
        cluster, here = await asyncio.gather(current(), nodes())
        state = cluster_state(cluster, here, models(), may_sleep(), None if sees_all(tenant) else tenant.name)
        return JSONResponse(state, headers={"Cache-Control": "no-store"})

    @app.get("/console")
    async def open_console() -> Response:
        return RedirectResponse("console/", 308)

    @app.get("/console/{path:path}")
    async def read_page(path: str) -> Response:
        if path not in PAGES:
            raise NoSuchPage(f"the console has no page {path[:80]!r}")
        return Response(bodies[path], headers=_HEADERS, media_type=f"{PAGES[path][1]}; charset=utf-8")
