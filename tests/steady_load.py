"""Clients of an OpenAI endpoint whose answers are known: completions at a constant rate, each compared.

expected = [answer(url, job) for job in jobs]
with SteadyLoad(url, jobs, expected, rate=20.0) as load:
    ...                      # whatever may not be noticed
assert not load.wrong and load.num_done > 100
"""

import itertools
import json
import threading
import time
from collections import defaultdict
from http.client import HTTPConnection
from typing import Any

PATIENCE = 120.0  # seconds without a byte after which a stream is said to hang


class Broken(Exception):
    """An answer that is none: a status, an error event, a stream that broke off."""


class Stream:
    """One streamed completion; iterating gives its chunks. A connection of its own: nothing is retried."""

    def __init__(self, url: str, job: dict[str, Any]):
        body = {"stream": True, "stream_options": {"include_usage": True}, **job}
        self.connection = HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        self.connection.request("POST", "/v1/completions", json.dumps(body), headers)

    def __iter__(self):
        with self.connection.getresponse() as response:
            if response.status != 200:
                raise Broken(f"status {response.status}: {response.read().decode()[:500]}")
            for raw in response:
                line = raw.decode().rstrip()
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise Broken(chunk["error"]["message"])
                    yield chunk
        raise Broken("the stream broke off")


def collect(chunks) -> Any:
    """All that a stream says: texts, logprobs, ends, usage; comparable with another one's."""
    texts: dict[int, str] = defaultdict(str)
    logprobs: dict[int, list[Any]] = defaultdict(list)
    reasons, ids, usage = {}, set(), None
    for chunk in chunks:
        ids.add(chunk["id"])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            logprobs[choice["index"]] += (choice.get("logprobs") or {}).get("tokens", [])
            reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
    if len(ids) != 1 or usage is None:
        raise Broken(f"{len(ids)} ids in one stream, usage {usage}")
    return dict(texts), dict(logprobs), reasons, usage["prompt_tokens"], usage["completion_tokens"]


def answer(url: str, job: dict[str, Any]) -> Any:
    return collect(Stream(url, job))


class SteadyLoad:
    """Asks `jobs` in turns, `rate` a second whatever is answered, each in a thread of its own, until left."""

    def __init__(self, url: str, jobs: list[dict[str, Any]], expected: list[Any], rate: float):
        self.url, self.jobs, self.expected, self.rate = url, jobs, expected, rate
        self.wrong: list[str] = []
        self.num_done = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._open: list[threading.Thread] = []

    def __enter__(self) -> "SteadyLoad":
        self._pacer = threading.Thread(target=self._pace)
        self._pacer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pacer.join()
        for thread in self._open:
            thread.join(2 * PATIENCE)
            if thread.is_alive():
                self.wrong.append("a stream hangs")

    def _pace(self) -> None:
        began = time.monotonic()
        for number in itertools.count():
            if self._over.wait(max(0.0, began + number / self.rate - time.monotonic())):
                return
            self._open = [t for t in self._open if t.is_alive()]
            self._open.append(threading.Thread(target=self._ask, args=(number % len(self.jobs),), daemon=True))
            self._open[-1].start()

    def _ask(self, index: int) -> None:
        began = time.monotonic()
        try:
            said = answer(self.url, self.jobs[index])
            wrong = "" if said == self.expected[index] else f"{said} instead of {self.expected[index]}"
        except Exception as error:
            wrong = repr(error)
        with self._lock:
            self.num_done += 1
            if wrong:
                self.wrong.append(f"after {time.monotonic() - began:.1f} s, {self.jobs[index]['prompt']!r}: {wrong}")
