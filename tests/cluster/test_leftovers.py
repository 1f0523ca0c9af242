"""What worker groups leave in a Ray cluster when they go, in whatever way: nothing."""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap

import pytest
from fake_engine import byte_tokenizer
from real_server import isolated_env
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.serve

# In a process of its own, which is the driver of a Ray of its own.
SCRIPT = """
    import contextlib, json, os, signal, sys, time
    from collections import Counter
    sys.path.insert(0, os.path.dirname(sys.argv[2]))
    import ray
    from ray import serve
    from ray._private.state import actors
    from ray.util import placement_group_table
    from real_server import descendants
    from pagedray.cluster.app import build

    OURS = ("ray::Rank", "ray::Leader", "ray::ServeReplica", "ray::GlobalScheduler")

    def processes(titles=OURS):
        return [p for p, name in descendants(os.getpid()).items() if name.startswith(titles)]

    def sockets():
        # TCP ports that listen and named unix sockets of this Ray's processes, workers that idle left out
        inodes = set()
        for pid, name in descendants(os.getpid()).items():
            if not name.startswith("ray::IDLE"):
                with contextlib.suppress(OSError):
                    inodes |= {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        lines = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
        tcp = [x[1] for x in lines if x[3] == "0A" and f"socket:[{x[9]}]" in inodes]
        lines = [line.split() for line in open("/proc/net/unix").readlines()[1:]]
        return sorted(tcp + [x[7] for x in lines if len(x) > 7 and f"socket:[{x[6]}]" in inodes])

    def state():
        return {
            "placement groups": [t["name"] for t in placement_group_table().values() if t["state"] != "REMOVED"],
            "actors": sorted(a["ActorClassName"] for a in actors().values() if a["State"] != "DEAD"),
            "processes": processes(),
            "shared memory": sorted(os.listdir("/dev/shm")),
            "sockets": sockets(),
        }

    def wait_for_end(before):
        # what is more than before; idle workers of Ray's own come and go
        deadline = time.monotonic() + 90
        while left := {k: list(more) for k, now in state().items() if (more := Counter(now) - Counter(before[k]))}:
            if time.monotonic() > deadline:
                sys.exit(f"there is left: {json.dumps(left)}")
            time.sleep(0.2)

    def deploy(**engine):
        engine = {"max_model_len": 64, "kv_cache_memory": "1MiB", "cpu_threads": 1, **engine}
        model = {"model_id": "tiny", "model_source": sys.argv[1]}
        options = {"graceful_shutdown_wait_loop_s": 0.1}
        config = {"model_loading_config": model, "engine_kwargs": engine, "deployment_config": options}
        serve.run(build({"llm_configs": [config]}), name="app", route_prefix=None)

    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[3])
    serve.start(proxy_location="Disabled")
    before = state()
    for _ in range(int(sys.argv[4])):
        deploy(tensor_parallel_size=2)
        assert len(processes(("ray::Rank", "ray::Leader"))) == 2
        serve.delete("app")

    try:
        deploy(tensor_parallel_size=2, kv_cache_memory=1)
        sys.exit("it holds no block, and was deployed")
    except RuntimeError:
        assert "kv_cache_memory holds no block" in str(serve.status())
    serve.delete("app")

    deploy(tensor_parallel_size=2, pipeline_parallel_size=2)
    (leader,) = processes("ray::Leader")
    os.kill(leader, signal.SIGKILL)
    serve.delete("app")
    wait_for_end(before)  # once: the global scheduler goes half a minute after its application
    ray.shutdown()
    print("nothing is left")
"""


OFFLINE = """
    import os, sys, time
    sys.path.insert(0, os.path.dirname(sys.argv[2]))
    from real_server import descendants
    from pagedray import LLM, SamplingParams
    from pagedray.cluster.local_server import adopt_orphans

    adopt_orphans()  # so that what is left is seen
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    settings = {"dtype": "float32", "cpu_threads": 1, "kv_cache_memory": "1MiB", "use_tqdm": False}
    prompts = [[5, 6, 7], list(range(40))]
    alone = LLM(sys.argv[1], **settings).generate(prompts, greedy, use_tqdm=False)
    assert "ray" not in sys.modules
    with LLM(sys.argv[1], tensor_parallel_size=2, pipeline_parallel_size=2, **settings) as llm:
        together = llm.generate(prompts, greedy, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    import ray
    assert not ray.is_initialized()
    deadline = time.monotonic() + 20
    while left := list(descendants(os.getpid()).values()):
        assert time.monotonic() < deadline, left
        while left and os.waitpid(-1, os.WNOHANG)[0]:
            pass
        time.sleep(0.2)
    print("nothing is left")
"""


@pytest.fixture(scope="module")
def tiny_folder(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(vocab_size=300, initializer_range=0.1).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend).save_pretrained(folder)
    return folder


def run(script, folder, home, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(folder), __file__, *arguments],
        env=isolated_env(home) | {"RAY_worker_niceness": "0"},  # Ray's default is to run behind all others
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.stdout.rstrip().endswith("nothing is left"), done.stdout + done.stderr


@pytest.mark.timeout(920)
def test_nothing_is_left_in_ray(tiny_folder, tmp_path, short_folder):
    times = "10" if os.environ.get("PAGEDRAY_LONG_TESTS") else "2"
    run(SCRIPT, tiny_folder, tmp_path, short_folder, times)


def test_nothing_is_left_of_an_offline_llm(tiny_folder, tmp_path, short_folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", short_folder)
    run(OFFLINE, tiny_folder, tmp_path)


@pytest.fixture
def short_folder():
    """For Ray, whose sockets lie deep in it: their paths may have 107 characters."""
    folder = tempfile.mkdtemp(prefix="pr-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
