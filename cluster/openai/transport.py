"""Bytes in and out: JSON bodies, event streams, error answers, and clients that leave."""

import asyncio
import errno
import json
import logging
import math
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...scheduler.errors import InvalidRequest, Overloaded, PagedRayError
from .protocol import error_envelope, short

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_SECONDS = 2  # after a 503: something is being built anew
_LONG_TEXT = 20_000  # characters; some milliseconds of tokenizing


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class BodyTooLarge(InvalidRequest):
    """`unsent`: the client waits to hear whether it should send the body (Expect: 100-continue)."""

    status = 413
    code = "body_too_large"
    unsent = False


class StorageFull(PagedRayError):
    status = 507
    type = "service_unavailable_error"
    code = "storage_full"


class ClientLeft(Exception):
    """The client closed its connection; nobody reads the answer."""


# -- in ----------------------------------------------------------------------------------------------------------------


async def read_json(request: Request, max_bytes: int) -> Any:
    """The body, parsed. Raises `InvalidRequest` (400, 413, 415) for what is not JSON as RFC 8259 has it, in UTF-8."""
    content_type = request.headers.get("content-type", "")
    media_type, _, parameters = (part.strip().lower() for part in content_type.partition(";"))
    if media_type != "application/json" or not re.fullmatch(r'(charset="?utf-?8"?)?', parameters):
        raise UnsupportedMediaType(f"Content-Type must be application/json in UTF-8, not {short(content_type)!r}")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise UnsupportedMediaType(f"the body must not be compressed (Content-Encoding {short(coding)!r})")
    return parse_json(await _read(request, max_bytes))


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = BodyTooLarge(f"the body is larger than {max_bytes} bytes, the most this server reads")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
        too_large.unsent = "expect" in request.headers
        raise too_large
    chunks, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_json(body: bytes) -> Any:
    """Stricter than `json.loads`: no NaN, no byte order mark, no repeated key, no half of a surrogate pair."""
    constants: list[str] = []

    def constant(name: str) -> float:
        constants.append(name)
        return math.nan

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InvalidRequest(f"the body repeats the key {short(again)!r}")
        return result

    try:
        text = body.decode()
        if text.startswith("\ufeff"):
            raise InvalidRequest("the body begins with a byte order mark, which JSON does not have")
        parsed = json.loads(text, parse_constant=constant, object_pairs_hook=unique)
        if re.search(r"\\u[dD]", text):  # an escaped surrogate: fine in pairs, which become one character
            json.dumps(parsed, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise InvalidRequest("the body holds half of a surrogate pair (\\ud800 to \\udfff), no character") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError:
        raise InvalidRequest("the body holds an integer of thousands of digits") from None
    if constants:
        fields = parsed.items() if isinstance(parsed, dict) else ()
        name = next((short(key) for key, value in fields if value != value), None)
        where = f" ({name})" if name else ""
        raise InvalidRequest(f"{constants[0]} is not a JSON number{where}; numbers must be finite", name)
    return parsed


async def off_loop(size: int, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`work`, on another thread where `size` characters would keep the event loop, and with it all streams, waiting."""
    if size < _LONG_TEXT:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


# -- out ---------------------------------------------------------------------------------------------------------------


def json_response(content: BaseModel) -> Response:
    return Response(content.model_dump_json(), media_type="application/json")


def error_response(error: PagedRayError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif error.status == 503:
        headers["Retry-After"] = str(_RETRY_SECONDS)
    if isinstance(error, BodyTooLarge) and error.unsent:
        headers["Connection"] = "close"  # it would be taken for the body, whatever comes next
    return JSONResponse(error_envelope(error), error.status, headers)


def as_public(error: Exception) -> PagedRayError:
    """What a client may know of an error: those raised on purpose as they are; of others nothing, they are logged."""
    if isinstance(error, PagedRayError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        logger.error("the disk is full: %s", error)
        return StorageFull("the server's disk is full, so nothing can be kept; the operator must make room")
    logger.error("unexpected error while answering", exc_info=error)
    return PagedRayError("the server failed to answer; the operator finds the reason in its log")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and has ended, when the client leaves first: then raises `ClientLeft`.

    Servers differ in what they do when a client leaves: some tell by `receive` only, some cancel. Both work.
    """

    async def leaving() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(leaving())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. `events` yields them framed (`data: …\\n\\n`) and is closed whatever happens.

    The status is sent with the first event, so that an error before it gets a status of its own. An error after it
    becomes a last event `data: {"error": {…}}`, without `[DONE]`: clients of OpenAI raise on it.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        async def put(event: str, more: bool = True) -> None:
            try:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": more})
            except OSError:
                raise ClientLeft from None

        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = ""
            try:
                await put(first)
                async for event in events:
                    await put(event)
            except ClientLeft:
                raise
            except Exception as error:
                last = f"data: {json.dumps(error_envelope(as_public(error)))}\n\n"
            await put(last, more=False)


class ErrorEnvelopes:
    """Next to the routes: what nothing else caught becomes an answer in the envelope, and a line in the log."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except ClientLeft:
            if not started:
                await Response(status_code=499)(scope, receive, watched)  # for the server's own books
        except Exception as error:
            if started or scope["type"] != "http":
                raise  # the server breaks the connection
            await error_response(as_public(error))(scope, receive, send)
