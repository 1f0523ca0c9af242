"""Who calls: API keys at the door, the tenant of the call in hand, and what is left to it, in OpenAI's headers."""

import math
from collections.abc import Callable
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...scheduler.errors import InvalidApiKey
from ...scheduler.tenants import RateLimits, Tenant, TenantDirectory
from .transport import error_response

_NOBODY = Tenant("default")
current_tenant: ContextVar[Tenant] = ContextVar("current_tenant", default=_NOBODY)
_OPEN_PATHS = frozenset(["/health", "/ready", "/metrics", "/version"])  # for whoever watches the server
_OPEN_FOLDERS = ("/metrics/",)
_OPEN_PAGES = frozenset(f"/console{page}" for page in ("", "/", "/console.js", "/console.css", "/icon.svg"))  # no data


def caller() -> Tenant:
    """Whose call is in hand. (A class that names the variable itself could not be pickled.)"""
    return current_tenant.get()


class TenantGate:
    """Around all routes: 401 without a valid key where keys are configured; sets `current_tenant` for all within.

    `limits` gives what is known to be left to a tenant; None: it has no limits.
    """

    def __init__(self, app: ASGIApp, directory: TenantDirectory, limits: Callable[[Tenant], RateLimits | None]):
        self.app = app
        self.directory = directory
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        try:
            tenant = self.directory.authenticate(_bearer(Headers(scope=scope)))
        except InvalidApiKey as error:
            response = error_response(error)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return

        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = self.limits(tenant)
                if limits is not None:
                    MutableHeaders(scope=message).update(_headers(limits))
            await send(message)

        token = current_tenant.set(tenant)
        try:
            await self.app(scope, receive, with_limits)
        finally:
            current_tenant.reset(token)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path in _OPEN_PAGES or path.startswith(_OPEN_FOLDERS)


def _bearer(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def _headers(limits: RateLimits) -> dict[str, str]:
    headers = {}
    for kind in ("requests", "tokens"):
        limit = getattr(limits, f"limit_{kind}")
        if limit is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(getattr(limits, f"remaining_{kind}"))
            headers[f"x-ratelimit-reset-{kind}"] = f"{math.ceil(getattr(limits, f'reset_{kind}'))}s"
    return headers
