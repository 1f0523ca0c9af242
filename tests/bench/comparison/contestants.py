"""Whoever is measured, as processes that start, take their turn, and stand still while others have theirs.

Over HTTP PagedRay, vLLM and llama.cpp are servers. Offline PagedRay, vLLM and transformers are `offline.py` in
processes of their own; llama.cpp, which has no offline engine that batches, gets all prompts at once over HTTP, with as
many slots.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pagedray.cluster import bench

from .environments import Environment, Unavailable
from .models import Models
from .workloads import Workload

MAX_MODEL_LEN = 4096
_START_SECONDS = 600.0  # vLLM compiles for a minute and a half
_TURN_SECONDS = 300.0
_STOP_SECONDS = 6.0  # whoever sends SIGTERM may send SIGKILL after 10
_RAY_STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Place:
    """What a contestant needs to know of where it runs."""

    folder: Path
    models: Models
    environments: Mapping[str, Environment]  # by peer; PagedRay's is this process's own
    threads: int

    def model(self, workload: Workload, precision: str, gguf: bool) -> str:
        if not gguf:
            return str(self.models.huggingface(workload.model))
        llama = self.environments.get("llama.cpp")
        quantize = llama.program("llama-quantize") if llama else None
        return str(self.models.gguf(workload.model, precision, quantize))


def contestant(name: str, workload: Workload, place: Place) -> "Contestant":
    """`name` is "peer:precision". Raises `Unavailable` where its model or its program is not to be had."""
    peer, precision = name.split(":")
    if peer == "llama.cpp":
        return _Server(name, place, *_llama_server(workload, precision, place))
    if peer == "pagedray":
        gguf = precision.startswith("q")
        model = place.model(workload, precision, gguf)
        quantization = {"quantization": precision} if not gguf and precision != "bf16" else {}
        if not workload.http:
            settings = {"max_model_len": MAX_MODEL_LEN, "cpu_threads": place.threads, **quantization}
            return _Offline(name, place, sys.executable, model, settings, {})
        command = [sys.executable, "-m", "pagedray", "serve", model, "--max-model-len", str(MAX_MODEL_LEN)]
        command += [word for key, value in quantization.items() for word in (f"--{key}", value)]
        # Ray takes a process group that stands still for one that is lost: it starts anew each turn.
        return _Server(name, place, [*command, "--cpu-threads", str(place.threads)], {}, freeze=False)
    environment, model = place.environments[peer], place.model(workload, precision, gguf=False)
    python = str(environment.python)
    if peer == "transformers":
        return _Offline(name, place, python, model, {"threads": place.threads}, environment.variables)
    variables = {
        **environment.variables,
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # else it computes on one core of two
        "VLLM_CACHE_ROOT": str(place.folder / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not workload.http:
        settings = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
        return _Offline(name, place, python, model, settings, variables)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--disable-uvicorn-access-log"]
    return _Server(name, place, command, variables)


def _llama_server(workload: Workload, precision: str, place: Place) -> tuple[list[str], dict[str, str]]:
    program = place.environments["llama.cpp"].program("llama-server")
    model = place.model(workload, precision, gguf=True)
    slots = workload.concurrency or workload.prompts["count"]
    threads = str(place.threads)
    command = [str(program), "-m", model, "-t", threads, "-tb", threads, "--parallel", str(slots)]
    if precision != "bf16":
        command.append("--no-repack")  # with weights that it repacks, this build ends by a segmentation fault
    # Each slot holds the longest request; saving idle slots' prompts elsewhere only costs time here.
    return [*command, "-c", str(slots * MAX_MODEL_LEN // (1 if slots == 1 else 2)), "--cache-ram", "0"], {}


class Contestant:
    """`prepare`, then `resume`, `measure` and `pause` for a turn; `stop` in the end. Each may raise `Unavailable`."""

    freeze = True  # stand still between turns; else start anew each time

    def __init__(self, name: str, place: Place, what: Sequence[str]):
        self.key = (name, *what)  # two of the same key are the same process
        self.name = name
        self.place = place
        self.process: subprocess.Popen | None = None
        self.stopping = False
        self.log = place.folder / "log" / f"{name.replace(':', '-')}.log"

    def start(self) -> None:
        """Until it is ready."""
        raise NotImplementedError

    def measure(self, workload: Workload, prompts: bench.Prompts) -> dict[str, Any]:
        """Figures by `bench.summarize`'s names, and `input_throughput`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Start it, if it has not started, and have it stand still: nobody's turn pays for what takes minutes."""
        if self.freeze and self.process is None:
            self.start()
            self.pause()

    def resume(self) -> None:
        if self.process is None:
            self.start()
        elif self.process.poll() is not None:
            raise self._failed("it ended between its turns")
        else:
            _signal(self.process, signal.SIGCONT)

    def pause(self) -> None:
        if not self.freeze:
            self.stop()
        elif self.process is not None:
            _signal(self.process, signal.SIGSTOP)

    def ask_to_stop(self) -> None:
        """So that several can end at the same time."""
        if self.process is not None and not self.stopping:
            self.stopping = True
            _signal(self.process, signal.SIGCONT)
            _signal(self.process, signal.SIGINT)

    def stop(self) -> None:
        if self.process is None:
            return
        self.ask_to_stop()
        for patience in (_STOP_SECONDS if self.freeze else _RAY_STOP_SECONDS, 1.0):
            try:
                self.process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                _signal(self.process, signal.SIGINT)  # a second one: at once
        _signal(self.process, signal.SIGKILL)  # what is left of its group
        self.process.wait(10)
        self.process, self.stopping = None, False

    def _launch(self, command: list[str], variables: dict[str, str], pass_fds: tuple[int, ...] = ()) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # vLLM asks that OMP_NUM_THREADS be left alone; everybody is told the number of threads, and has no other cores
        ours_alone = {"OMP_NUM_THREADS", *(() if self.name.startswith("pagedray") else ("PYTHONPATH",))}
        inherited = {k: v for k, v in os.environ.items() if k not in ours_alone}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=inherited | {"HF_HUB_OFFLINE": "1"} | variables,
                pass_fds=pass_fds,
                start_new_session=True,
            )

    def _failed(self, what: str) -> Unavailable:
        assert self.process is not None
        try:
            self.process.wait(1)  # its last words come after its socket closed
        except subprocess.TimeoutExpired:
            pass
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        return Unavailable(f"{what}: {(errors or lines or ['no output'])[-1][:300]}")


def _signal(process: subprocess.Popen, how: int) -> None:
    """To the process alone for SIGINT, so that it can end its children; to its group otherwise."""
    try:
        if how == signal.SIGINT:
            process.send_signal(how)
        else:
            os.killpg(process.pid, how)
    except ProcessLookupError:
        pass


class _Server(Contestant):
    def __init__(self, name: str, place: Place, command: list[str], variables: dict[str, str], freeze: bool = True):
        super().__init__(name, place, command)
        self.command, self.variables, self.freeze = command, variables, freeze

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._launch([*self.command, "--host", "127.0.0.1", "--port", str(port)], self.variables)
        assert self.process is not None
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self._failed("the server ended")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.25)
        raise self._failed(f"the server was not ready after {_START_SECONDS:.0f} s")

    def measure(self, workload: Workload, prompts: bench.Prompts) -> dict[str, Any]:
        load = bench.Load(self.url, prompts, max_concurrency=workload.concurrency, timeout=_TURN_SECONDS)
        try:
            figures = bench.summarize(bench.run_serve(load))
        except bench.EndpointError as error:
            raise self._failed(str(error)) from None
        if figures["failed"]:
            raise Unavailable(f"{figures['failed']} requests failed: {next(iter(figures['errors']))}")
        wanted = sum(n for _, n in prompts.draw())
        if figures["total_output_tokens"] != wanted:
            raise Unavailable(f"it generated {figures['total_output_tokens']} tokens where {wanted} were asked for")
        return figures | {"input_throughput": figures["total_input_tokens"] / figures["duration_s"]}


class _Offline(Contestant):
    def __init__(
        self, name: str, place: Place, python: str, model: str, settings: dict[str, Any], variables: dict[str, str]
    ):
        super().__init__(name, place, [python, model, json.dumps(settings)])
        self.python, self.model, self.settings, self.variables = python, model, settings, variables

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            engine = self.name.split(":")[0]
            command = [self.python, str(Path(__file__).with_name("offline.py")), engine, self.model]
            command += [json.dumps(self.settings), str(theirs.fileno())]
            self._launch(command, self.variables, (theirs.fileno(),))
        self.connection = ours
        self.lines = ours.makefile("rw")
        self._receive(_START_SECONDS)

    def measure(self, workload: Workload, prompts: bench.Prompts) -> dict[str, Any]:
        requests = prompts.draw()
        step = workload.concurrency or len(requests)
        seconds, tokens = 0.0, 0
        for first in range(0, len(requests), step):
            answer = self._ask(requests[first : first + step])
            seconds, tokens = seconds + answer["seconds"], tokens + answer["output_tokens"]
        wanted = sum(n for _, n in requests)
        if tokens != wanted:
            raise Unavailable(f"it generated {tokens} tokens where {wanted} were asked for")
        inputs = sum(len(prompt) for prompt, _ in requests)
        return {"output_throughput": tokens / seconds, "input_throughput": inputs / seconds, "duration_s": seconds}

    def stop(self) -> None:
        if self.process is not None:
            self.lines.close()  # the end of its input
            self.connection.close()
        super().stop()

    def _ask(self, requests: list) -> dict[str, Any]:
        try:
            print(json.dumps(requests), file=self.lines, flush=True)
        except OSError as error:
            raise self._failed(f"the process takes no requests: {error}") from None
        return self._receive(_TURN_SECONDS)

    def _receive(self, seconds: float) -> dict[str, Any]:
        self.connection.settimeout(seconds)
        try:
            line = self.lines.readline()
        except TimeoutError:
            raise self._failed(f"no answer after {seconds:.0f} s") from None
        except OSError as error:
            raise self._failed(str(error)) from None
        if not line:
            raise self._failed("the process ended")
        return json.loads(line)
