"""The command line: what it says of flags, and that a server comes up, answers, fails and leaves as it should."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pytest

from pagedray.cluster import cli, demo_model, local_server
from pagedray.cluster.config import ApplicationConfig
from pagedray.cluster.local_server import PortReservation, ServerOptions, check_resources, free_port
from pagedray.scheduler.errors import ConfigError
from pagedray.workers.config import EngineConfig


def run(capsys, *argv):
    """Exit status, standard output, standard error."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    out, err = capsys.readouterr()
    return exit_.value.code or 0, out, err


@pytest.fixture
def served(monkeypatch):
    """What `pagedray serve` would start: a list of (arguments, options)."""
    calls = []
    monkeypatch.setattr(local_server, "serve", lambda arguments, options: calls.append((arguments, options)))
    return calls


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "required: COMMAND"),
        ("serv", "invalid choice: 'serv'"),
        ("serve --max-num-seq 3", "--max-num-seq is not a flag of pagedray serve; did you mean --max-num-seqs?"),
        ("serve --max-num-seqs=x", "invalid int value: 'x'"),
        ("serve a b", "unexpected argument 'b'"),
        ("serve org/a --max-num-seqs 0", "--max-num-seqs must be an integer of at least 1, not 0"),
        ("serve org/a --num-gpu-blocks-override 0", "--num-gpu-blocks-override must be an integer"),
        ("serve org/a --kv-cache-memory lots", "--kv-cache-memory must be a size"),
        ("serve org/a --dtype int8", "--dtype must be one of"),
        ("serve org/a --cpu-offload-gb 4", "--cpu-offload-gb must be 0 or left out (weights are not offloaded), not 4"),
        ("serve org/a --no-enable-chunked-prefill", "--enable-chunked-prefill must be True or left out"),
        ("generate org/a --prompt x --load-format dummy", "--load-format must be 'auto' or 'safetensors' or 'gguf'"),
        ("serve org/a --num-replicas 0", "num_replicas must be an integer of at least 1"),
        ("serve org/a --port 70000", "cannot listen on 127.0.0.1:70000"),
        ("serve none.yaml", "none.yaml: No such file"),
        ("serve none.yaml --max-num-seqs 3", "--max-num-seqs does not go with a config"),
        ("generate org/a", "required: --prompt"),
        ("generate org/a --prompt x --temperature 9", "temperature must be between 0 and 2, not 9.0"),
        ("bench", "required: serve|offline"),
        ("bench serve --input-len 5:3", "--input-len must be a length"),
        ("bench serve --prompt-format ids --endpoint chat", "--prompt-format ids goes with --endpoint completions"),
        (
            "bench serve --num-prompt 3",
            "--num-prompt is not a flag of pagedray bench serve; did you mean --num-prompts?",
        ),
    ],
)
def test_what_is_not_understood_is_one_line_and_status_2(argv, message, capsys):
    status, out, err = run(capsys, *argv.split())
    assert status == 2 and out == ""
    assert err.startswith("pagedray: error: ") and message in err and err.count("\n") == 1


def test_what_fails_is_one_line_and_status_1(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: a connection is refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        status, _, err = run(capsys, "chat", "--url", url)
        assert (status, err.count("\n")) == (1, 1) and "no server at" in err
        status, _, err = run(capsys, "bench", "serve", "--base-url", url)
        assert (status, err.count("\n")) == (1, 1) and "no server at" in err


def test_version(capsys):
    from pagedray import __version__

    assert run(capsys, "--version")[:2] == (0, f"pagedray {__version__}\n")


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "bench serve", "bench offline"])
def test_help(command, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    status, out, _ = run(capsys, *command.split(), "--help")
    assert status == 0 and "usage: pagedray" in out and "sk-secret" not in out


def test_flags_become_arguments(served, capsys):
    flags = "--host 0.0.0.0 --port 0 --served-model-name mine --max_model_len 64 --kv-cache-memory-bytes 1048576"
    more = "--no-enable-prefix-caching --num-replicas 2 --max-queued-requests 9 --ray-address auto --start-timeout 5"
    more += " --files-path /a/b -tp 2 -pp 3 --tensor-parallel-weights 2,1.5 --pipeline-stage-layers 3,2,1"
    assert run(capsys, "serve", "org/name", *flags.split(), *more.split())[0] == 0
    arguments, options = served[0]
    assert options == ServerOptions("0.0.0.0", 0, "auto", 5.0)
    assert arguments == {
        "llm_configs": [
            {
                "model_loading_config": {"model_id": "mine", "model_source": "org/name"},
                "engine_kwargs": {
                    "max_model_len": 64,
                    "kv_cache_memory": "1048576",
                    "tensor_parallel_size": 2,
                    "pipeline_parallel_size": 3,
                    "tensor_parallel_weights": [2, 1.5],
                    "pipeline_stage_layers": [3, 2, 1],
                    "enable_prefix_caching": False,
                },
                "deployment_config": {"num_replicas": 2},
            }
        ],
        "scheduler": {"max_queued_requests": 9},
        "files": {"path": "/a/b"},
    }


def test_vllms_flags_that_change_nothing_are_taken_with_a_line(served, capsys):
    given = {"--swap-space": ["4"], "--compilation-config": ['{"level": 3}'], "--distributed-executor-backend": ["ray"]}
    given |= {"--enable-chunked-prefill": [], "--enable-auto-tool-choice": [], "--trust-remote-code": []}
    argv = [part for flag, value in given.items() for part in (flag, *value)]
    status, _, err = run(capsys, "serve", *argv, "org/a", "--no-use-tqdm-on-load", "--block-size=32")
    assert status == 0 and served[0][0]["llm_configs"][0]["engine_kwargs"] == {"block_size": 32}
    for flag in (*given, "--use-tqdm-on-load"):
        assert err.count(f"pagedray: {flag} changes nothing here: ") == 1


def test_a_degree_that_cannot_work_is_refused_before_anything_starts(served, capsys, tiny_llama, tmp_path):
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path)  # 4 query heads, 2 KV heads
    capsys.readouterr()  # a progress bar, perhaps
    status, _, err = run(capsys, "serve", str(tmp_path), "-tp", "3")
    assert (
        status == 2 and err.startswith("pagedray: error: --tensor-parallel-size is 3") and "1, 2, 4 would work" in err
    )
    status, _, err = run(capsys, "generate", str(tmp_path), "--prompt", "a", "--pipeline-parallel-size", "3")
    assert (
        status == 2 and err.startswith("pagedray: error: --pipeline-parallel-size is 3") and "1 to 2 would work" in err
    )
    config = tmp_path / "config.yaml"
    loading = {"model_id": "tiny", "model_source": str(tmp_path)}
    content = {"llm_configs": [{"model_loading_config": loading, "engine_kwargs": {"tensor_parallel_size": 5}}]}
    config.write_text(json.dumps(content))
    status, _, err = run(capsys, "serve", str(config))
    assert status == 2 and f"{config}: llm_configs[0].engine_kwargs.tensor_parallel_size is 5" in err
    status, _, err = run(capsys, "serve", str(tmp_path), "--tensor-parallel-weights", "2,x")
    assert status == 2 and "--tensor-parallel-weights" in err
    assert not served


def test_without_a_model_it_is_the_demo_model(served, capsys, monkeypatch, tmp_path):
    path = tmp_path / "fetched.gguf"
    monkeypatch.setattr(demo_model, "fetch", lambda progress: path)
    assert run(capsys, "serve")[0] == 0
    loading = served[0][0]["llm_configs"][0]["model_loading_config"]
    assert loading == {"model_id": demo_model.DEMO_MODEL_ID, "model_source": str(path)}
    assert served[0][1] == ServerOptions()


def test_a_config_that_names_the_demo_model_fetches_it(served, capsys, monkeypatch, tmp_path):
    fetched = []

    def fetch(progress):
        fetched.append(tmp_path / "model.gguf")
        fetched[0].touch()
        monkeypatch.setenv("PAGEDRAY_DEMO_MODEL", str(fetched[0]))

    monkeypatch.setattr(demo_model, "fetch", fetch)
    config = Path(__file__).parents[2] / "configs" / "serve-local.yaml"
    assert run(capsys, "serve", str(config), "--port", "1")[0] == 0
    assert fetched and served[0][1] == ServerOptions("127.0.0.1", 1)


def test_a_config_that_is_wrong_is_named(served, capsys, tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("llm_configs: [{model_loading_config: {model_id: a}, engine_kwargs: {max_num_seq: 1}}]")
    status, _, err = run(capsys, "serve", str(path))
    assert status == 2 and not served
    assert f"{path}: llm_configs[0].engine_kwargs.max_num_seq is not a setting; did you mean max_num_seqs?" in err


def test_a_context_that_the_model_was_not_made_for_is_refused_before_anything_starts(demo_model):
    local_server.check_local_model(EngineConfig.from_kwargs(model=str(demo_model), max_model_len=2048))
    with pytest.raises(ConfigError, match="max_model_len is 9000, but the model was made for at most 8192"):
        local_server.check_local_model(EngineConfig.from_kwargs(model=str(demo_model), max_model_len=9000))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_refused(seconds):
    for name in ("start_timeout", "grace_period"):
        with pytest.raises(ConfigError, match=f"{name} must be seconds, 0 or more, not {seconds}"):
            ServerOptions(**{name: seconds})


@pytest.mark.slow
def test_generate(demo_model, capsys):
    wish = ["--prompt", "The capital of France is", "--max-tokens", "8", "--temperature", "0"]
    status, out, _ = run(capsys, "generate", str(demo_model), *wish, "--max-model-len", "64")
    assert status == 0 and "Paris" in out


def test_a_port_in_use_is_told_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            free_port("127.0.0.1", port)
    assert free_port("127.0.0.1", port) == port
    assert free_port("127.0.0.1", 0) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_a_port_that_another_server_is_about_to_take_is_refused():
    first = PortReservation("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"{first.port}: another server"):
        PortReservation("127.0.0.1", first.port)
    assert PortReservation("127.0.0.1", 0).port != first.port


def test_a_local_model_that_is_missing_is_refused_before_ray_starts(tmp_path):
    command = [sys.executable, "-m", "pagedray", "serve", str(tmp_path / "model.gguf"), "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "model.gguf does not exist" in run.stderr and "starting Ray" not in run.stderr


@pytest.mark.parametrize("path", ["/proc/nope", "/dev/null", "/dev/null/x", "/proc"])
def test_a_folder_that_keeps_no_files_is_refused_before_ray_starts(path):
    config = ApplicationConfig.for_model("org/name") | {"files": {"path": path}}
    with pytest.raises(ConfigError, match=f"files.path is '{path}', where no files can be kept"):
        local_server.serve(config, ServerOptions(port=0))


# -- a server, with a small Serve application in the place of the real one

APPLICATION = """
import sys, threading, time
from fastapi import FastAPI
from pagedray.cluster.config import ApplicationConfig
from pagedray.cluster.local_server import PagedRayError, ServerOptions, serve
from pagedray.scheduler.errors import CheckpointError

def build(config, listen):
    from ray import serve
    from pagedray.cluster.http_server import HttpServer
    app = FastAPI()

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Group:
        def __init__(self):
            print("pagedray: 50% of the weights", file=sys.stderr, flush=True)
            if MODE == "damaged":
                raise CheckpointError("model.safetensors lacks lm_head.weight")
            if MODE == "bug":
                raise ZeroDivisionError("never divide")
            if MODE == "slow":
                time.sleep(600)

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    @serve.ingress(app)
    class Ingress:
        async def __init__(self, group):
            self.http = HttpServer(app, listen)
        @app.get("/health")
        def health(self): return {}

    return Ingress.bind(Group.options(max_constructor_retry_count=1).bind())

MODE = sys.argv[1]
try:
    serve(ApplicationConfig.for_model("org/name"), ServerOptions(port=0, start_timeout=float(sys.argv[2])), build)
except PagedRayError as error:
    print("error:", error)
    sys.exit(1)
"""


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="processes are counted in /proc")


class Command:
    """A command in a process group of its own, as in a terminal, with its own HOME and no RAY_ variable."""

    def __init__(self, temporary, *argv):
        self.temporary = temporary
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            env=env | {"HOME": str(temporary), "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""
        self.seen: set[int] = set()
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.output += line

    def until(self, text, seconds=120):
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} after {seconds} s:\n{self.output}"
            time.sleep(0.1)

    def family(self):
        """Every process below the command now; remembered, for later they may belong to nobody."""
        level, found = [self.process.pid], set()
        while level:
            level = [c for p in level for c in local_server.children(p)]
            found |= set(level)
        self.seen |= found
        return found

    def wait(self, seconds=90):
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"it did not end:\n{self.output}") from None
        self.reader.join(10)
        left = {p for p in self.seen if local_server.alive(p)}
        assert not left, f"processes {left} were left:\n{self.output}"
        return status


@pytest.fixture
def server(tmp_path):
    script = tmp_path / "application.py"
    script.write_text(APPLICATION)
    commands: list[Command] = []
    temporary = tempfile.mkdtemp(prefix="t", dir="/tmp")  # pytest's own is too long for Ray's sockets

    def start(mode, timeout=120.0):
        commands.append(Command(Path(temporary), str(script), mode, str(timeout)))
        return commands[-1]

    yield start
    for command in commands:
        command.family()
        if command.process.poll() is None:
            command.process.kill()
        local_server.kill_all([p for p in command.seen if local_server.alive(p)])
        command.reader.join(10)
    shutil.rmtree(temporary)


@needs_proc
@pytest.mark.serve
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_server_comes_up_answers_and_leaves_no_process(server, number):
    command = server("good")
    command.until("curl http")
    for line in ("starting Ray", "starting Serve", "loading org/name", "50% of the weights", "ready"):
        assert f"pagedray: {line}\n" in command.output
    url = re.search(r"http://127.0.0.1:\d+", command.output)[0]
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    assert len(command.family()) > 5
    running = b" ".join(cmdline(p) for p in command.family())
    assert not [n for n in (b"dashboard/dashboard.py", b"log_monitor.py", b"/monitor.py") if n in running]
    # Ctrl-C reaches all of a terminal's foreground, and many a supervisor signals the whole group.
    os.killpg(command.process.pid, number)
    began = time.monotonic()
    assert command.wait() == 0
    assert time.monotonic() - began < 30, "Ray waits a minute for a daemon that is gone"
    assert not list(command.temporary.iterdir())
    assert "ray::" not in command.output and "(raylet)" not in command.output and "Traceback" not in command.output
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=5)


@needs_proc
@pytest.mark.serve
@pytest.mark.parametrize(
    ("mode", "timeout", "message"),
    [
        ("damaged", 120, "error: Group: model.safetensors lacks lm_head.weight\n"),
        ("bug", 120, "error: Group: ZeroDivisionError: never divide\n"),
        ("slow", 15, "error: not ready after 15 s (--start-timeout)."),
    ],
)
def test_a_server_that_does_not_come_up_says_why(server, mode, timeout, message):
    command = server(mode, timeout)
    command.until("loading org/name")
    command.family()
    assert command.wait() == 1
    assert message in command.output and "Traceback" not in command.output
    assert "Ray's logs are in " in command.output


@needs_proc
@pytest.mark.serve
def test_a_signal_in_the_middle_of_the_start(server):
    command = server("good")
    command.until("starting Ray")
    time.sleep(1)
    command.family()
    command.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert command.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - began < 10  # Ray alone takes longer to start on a busy machine
    assert command.output.endswith("pagedray: stopped before it was ready\n")
    assert not list(command.temporary.iterdir())


@needs_proc
@pytest.mark.serve
def test_a_second_signal_kills_at_once(server):
    command = server("good")
    command.until("curl http")
    assert len(command.family()) > 5
    os.kill(raylet_of(command), signal.SIGSTOP)  # or the first signal may have had its way before the second comes
    command.process.send_signal(signal.SIGINT)
    command.until("stopping")
    command.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert command.wait() == 130
    assert time.monotonic() - began < 5
    assert not list(command.temporary.iterdir())


@needs_proc
@pytest.mark.serve
def test_a_cluster_that_dies_ends_the_server(server):
    command = server("good")
    command.until("curl http")
    command.family()
    os.kill(raylet_of(command), signal.SIGKILL)
    assert command.wait() == 1
    assert "of the Ray cluster ended by itself" in command.output


def raylet_of(command):
    (found,) = [p for p in local_server.children(command.process.pid) if b"raylet/raylet" in cmdline(p).split(b" ")[0]]
    return found


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")


def test_a_group_that_takes_what_this_machine_lacks_is_refused():
    """For a config of Ray's own documentation, on a machine without its GPU."""

    def check(machine, **section):
        loading = {"model_id": "q", "model_source": "Qwen/Qwen2.5-0.5B-Instruct"}
        config = ApplicationConfig.parse({"llm_configs": [{"model_loading_config": loading, **section}]})
        check_resources(config, {"CPU": 8, "memory": 10**9, **machine})

    with pytest.raises(ConfigError) as error:
        check({}, accelerator_type="A10G")
    assert "takes a node with A10G and 1 GPU (here: 0); serve it on a Ray cluster that has that" in str(error.value)
    assert "or say device: cpu and no accelerator_type" in str(error.value)
    split = {"tensor_parallel_size": 4, "device": "cuda"}
    with pytest.raises(ConfigError, match=r"takes 4 GPU \(here: 2\)"):
        check({"GPU": 2}, engine_kwargs=split)
    check({"GPU": 4}, engine_kwargs=split)
    check({"GPU": 1, "accelerator_type:A10G": 1}, accelerator_type="A10G")
    check({}, engine_kwargs={"tensor_parallel_size": 16})  # CPUs are only counted
    with pytest.raises(
        ConfigError, match=r"takes 1 disk \(here: 0\); serve it on a Ray cluster that has that \(.*deploy\)$"
    ):
        check({}, deployment_config={"ray_actor_options": {"resources": {"disk": 1}}})


def test_why_a_deployment_failed_is_its_error_and_not_where_a_traceback_begins():
    message = "tried twice:\nValueError: no such thing\n\nRuntimeError: Traceback (most recent call last):\n  cut off"
    assert local_server._why({"Group": message}) == "Group: ValueError: no such thing"
    assert "cut off" in local_server._why({"Group": "RuntimeError: Traceback (most recent call last):\n  cut off"})
