"""What starting takes, and which second goes to what:

    python tests/bench/startup.py [MODEL] [--runs 3]

    start    `pagedray serve`, from the command to the first token of an answer
    wake     a request for a model that sleeps (min_replicas: 0), to its first token
    more     more requests than a group takes, until a second group computes some of them

What the start of a group consists of it says itself ("a group of ... is up after ..."); when it was decided on stands
in the log of Serve's controller.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from pagedray.cluster.demo_model import find
from pagedray.cluster.local_server import free_port

Marks = list[tuple[str, float]]  # what has ended, and when (seconds on the wall clock), in order
_TOKENS = 1200  # of each of the many requests
_REQUESTS = 12


class Server:
    """`pagedray serve` with a Ray of its own; each line that it says is kept with its time."""

    def __init__(self, model: str, deployment: dict[str, Any]):
        self.folder = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))  # short: Ray has sockets there
        section = {
            "model_loading_config": {"model_id": "m", "model_source": model},
            "engine_kwargs": {"max_model_len": 2048, "max_num_seqs": 4},
            "deployment_config": deployment,
        }
        config, port = self.folder / "config.yaml", free_port("127.0.0.1", 0)
        config.write_text(json.dumps({"llm_configs": [section]}))
        self.url = f"http://127.0.0.1:{port}"
        self.began = time.time()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagedray", "serve", str(config), "--port", str(port)],
            env=os.environ | {"TMPDIR": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[tuple[str, float]] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait(lambda: self.said("curl") or self.process.poll() is not None, 300)
        if self.process.poll() is not None:
            raise SystemExit("".join(line for line, _ in self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((line, time.time()))

    def said(self, text: str) -> float:
        """When; 0: not yet."""
        return next((at for line, at in self.lines if text in line), 0.0)

    def ask(self, max_tokens: int = 4) -> float:
        """When the first token of an answer came."""
        body = {"model": "m", "prompt": "One, two,", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        first = 0.0
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                if not first and line.startswith("data: {"):
                    first = time.time()
        return first or sys.exit(f"no token came: {answer.status_code}")

    def load(self) -> None:
        with suppress(httpx.HTTPError):  # it is broken off
            self.ask(_TOKENS)

    def groups(self) -> list[Marks]:
        """What each group's start consisted of, the latest last."""
        starts = []
        for path in self.folder.glob("pagedray-*/session_2*/logs/worker-*.err"):
            if found := re.search(r"a group of m is up after ([\d.]+) s \((.+)\)", path.read_text()):
                up = path.stat().st_mtime  # it is the last that a leader says
                ended = up - float(found[1])
                marks = [("its replica's process", ended)]
                for part in found[2].split(", "):
                    name, seconds = part.rsplit(" ", 1)
                    marks.append((name, ended := ended + float(seconds)))
                starts.append(marks)
        return sorted(starts, key=lambda marks: marks[-1][1])

    def decided(self, numbers: str) -> float:
        """When the controller was told to have another number of groups."""
        for path in self.folder.glob("pagedray-*/session_2*/logs/serve/controller_*.log"):
            if line := re.search(rf"(\d{{4}}-\d\d-\d\d [\d:,]+).* m: from {numbers} groups", path.read_text()):
                return datetime.strptime(line[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        raise SystemExit(f"nobody decided on {numbers} groups")

    def num_computing(self) -> int:
        groups = httpx.get(f"{self.url}/console/state", timeout=30).json()["groups"]
        return sum(group["num_computed_tokens"] > 0 for group in groups)

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


def wait(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not so within {seconds:g} s")
        time.sleep(0.02)


def start(model: str) -> tuple[float, Marks]:
    server = Server(model, {})
    try:
        first = server.ask()
        said = [("command", "starting Ray"), ("Ray", "starting Serve"), ("Serve", "loading m")]
        marks = [(name, server.said(f"pagedray: {line}")) for name, line in said]
        return server.began, [*marks, *server.groups()[0], ("ready", server.said("pagedray: ready")), ("token", first)]
    finally:
        server.close()


def wake_and_more(model: str) -> tuple[tuple[float, Marks], tuple[float, Marks]]:
    server = Server(model, {"autoscaling_config": {"min_replicas": 0, "max_replicas": 2}})
    try:
        asked = time.time()
        token = server.ask()
        wait(lambda: len(server.groups()) == 1, 10)
        wake = asked, [("decision", server.decided("0 to 1")), *server.groups()[0], ("token", token)]
        asked = time.time()
        for _ in range(_REQUESTS):
            threading.Thread(target=server.load, daemon=True).start()
        wait(lambda: server.num_computing() == 2, 120)
        works = time.time()
        return wake, (asked, [("decision", server.decided("1 to 2")), *server.groups()[1], ("first step", works)])
    finally:
        server.close()


def row(what: str, runs: list[tuple[float, Marks]]) -> str:
    """Medians of what each part took, and of the whole with its range."""
    parts: dict[str, list[float]] = {}
    for began, marks in runs:
        before = began
        for name, at in marks:
            parts.setdefault(name, []).append(at - before)
            before = at
    whole = sorted(marks[-1][1] - began for began, marks in runs)
    of_which = ", ".join(f"{name} {statistics.median(seconds):.1f}" for name, seconds in parts.items())
    return f"| {what} | {statistics.median(whole):.1f} ({whole[0]:.1f} to {whole[-1]:.1f}) | {of_which} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the demo model")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    model = str(args.model or find())
    print(f"| from … to …, s | median of {args.runs} (range) | of which |\n|---|---|---|", flush=True)
    print(row("the command to the first token", [start(model) for _ in range(args.runs)]), flush=True)
    wakes, mores = zip(*(wake_and_more(model) for _ in range(args.runs)), strict=True)
    print(row("a request to its first token, from no group", list(wakes)))
    print(row("too many requests to a second group's first step", list(mores)))


if __name__ == "__main__":
    main()
