"""`pagedray chat`: a conversation with any OpenAI endpoint, on plain stdin and stdout."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

from ..scheduler.errors import PagedRayError


class EndpointError(PagedRayError):
    """The server cannot be reached, refused, or broke off."""

    code = "endpoint_error"


def api_url(url: str, path: str) -> str:
    """`url` with or without its /v1, which is how people give it."""
    return f"{url.rstrip('/').removesuffix('/v1')}/v1/{path}"


def server_root(url: str) -> str:
    """Where a server's own routes are, of the address that was given: OpenAI's base URL will do."""
    return url.rstrip("/").removesuffix("/v1")


def auth_headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def no_server(url: Any, error: Exception, flag: str = "--url") -> EndpointError:
    """What to raise where nobody answers at an address, which `flag` would change."""
    why = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return EndpointError(f"no server at {url} ({why}): is it running? Another address goes into {flag}")


def error_message(status: int, body: bytes) -> str:
    """What a refusal says: the message in OpenAI's envelope, or the beginning of whatever came."""
    try:
        return f"HTTP {status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {' '.join(body.decode(errors='replace').split())[:200] or 'no message'}"


class ChatClient:
    """One conversation's end of the wire. `model` None: the first that the server has."""

    def __init__(self, url: str, model: str | None, api_key: str | None = None, wish: dict[str, Any] | None = None):
        self.url = url
        # a queue may be long before the first token; after it, silence means that something is wrong
        self.http = httpx.Client(headers=auth_headers(api_key), timeout=httpx.Timeout(10.0, read=600.0))
        self.wish = wish or {}
        self.model = model or self._first_model()

    def __enter__(self) -> "ChatClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()

    def _first_model(self) -> str:
        try:
            response = self.http.get(api_url(self.url, "models"))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise no_server(self.url, error) from None
        if response.status_code != 200:
            raise EndpointError(error_message(response.status_code, response.content))
        try:
            return response.json()["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise EndpointError(f"{self.url} names no model; say --model") from None

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The pieces of the answer as they come. Raises `EndpointError` if it does not come to its end."""
        body = {"model": self.model, "messages": messages, "stream": True, **self.wish}
        try:
            with self.http.stream("POST", api_url(self.url, "chat/completions"), json=body) as response:
                if response.status_code != 200:
                    raise EndpointError(error_message(response.status_code, response.read()))
                for event in events(response.iter_lines()):
                    if "error" in event:
                        raise EndpointError(str(event["error"].get("message", event["error"])))
                    for choice in event.get("choices") or []:
                        if text := choice.get("delta", {}).get("content"):
                            yield text
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointError(f"{self.url}: {error or type(error).__name__}") from None


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, until [DONE]; `EndpointError` where that never comes."""
    for line in lines:
        if not line.startswith("data:"):
            continue  # comments, event names and the empty lines between events
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            yield json.loads(data)
        except ValueError:
            raise EndpointError(f"the server sent {data[:100]!r}, which is not JSON") from None
    raise EndpointError("the server broke the answer off")


def converse(client: ChatClient, system: str | None = None) -> int:
    """Read a line, stream the answer, again; until the end of input. Returns the exit status.

    Ctrl-C stops an answer. With input from a file or a pipe there is no prompt, and an error ends it.
    """
    asked_by_person = sys.stdin.isatty()
    history = [{"role": "system", "content": system}] if system else []
    if asked_by_person:
        print(f"{client.model} at {client.url}; Ctrl-D leaves", flush=True)
    while True:
        try:
            line = input("> " if asked_by_person else "").strip()
        except EOFError:
            if asked_by_person:
                print()
            return 0
        if not line:
            continue
        history.append({"role": "user", "content": line})
        answer = ""
        try:
            for piece in client.answer(history):
                answer += piece
                print(piece, end="", flush=True)
        except EndpointError as error:
            if not asked_by_person:
                raise
            print(f"{error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not asked_by_person:
                raise
        print(flush=True)
        if answer:
            history.append({"role": "assistant", "content": answer})
        else:
            history.pop()  # nothing was said: as if it had not been asked
