"""One model over two hosts, each with its own Ray node: the tokens are those of one rank; losing a host is survived."""

import json
import textwrap

import httpx
import pytest
from fake_engine import byte_tokenizer
from transformers import PreTrainedTokenizerFast
from waiting import wait_until

from pagedray import LLM, SamplingParams

pytestmark = pytest.mark.serve

# Run on the first host. Its only CPU is taken at first, so that the ranks beside this process are on the other one.
SCRIPT = """
    import json, sys
    import ray
    from ray.util import placement_group, remove_placement_group
    from pagedray import LLM, SamplingParams
    from pagedray.scheduler.errors import PagedRayError

    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    taken = placement_group([{"CPU": 1, "first": 1}])
    assert taken.wait(30)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for model, prompts, settings in json.loads(sys.argv[1]):
        if settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1) == 4 and taken:
            remove_placement_group(taken)
            taken = None
        settings = {"dtype": "float32", "cpu_threads": 1, "kv_cache_memory": "64MiB", "use_tqdm": False, **settings}
        try:
            with LLM(model, max_num_batched_tokens=32, **settings) as llm:
                outputs = llm.generate(prompts, greedy, use_tqdm=False)
                hosts = [p.host for p in llm.engine.executor.topology.peers]
                print("answer:", json.dumps([hosts, [o.outputs[0].token_ids for o in outputs]]), flush=True)
        except PagedRayError as error:
            print("answer:", json.dumps([type(error).__name__, str(error)]), flush=True)
"""
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[1, *range(40, 40 + 3 * n)] for n in (1, 5, 30)]


@pytest.fixture(scope="module")
def network(start_hosts):
    """Two hosts with two networks each, of which only the second is joined, and names that lead nowhere."""
    with start_hosts(2) as network:
        first, second = network.hosts
        for host in network.hosts:
            host.run("ip", "link", "add", "docker0", "type", "bridge")
            host.run("ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
            host.run("ip", "link", "set", "docker0", "up")
            (host.folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")  # Debian does so
        first.start_ray(num_cpus=1, first=1)
        second.start_ray(first, num_cpus=2)
        yield network


@pytest.fixture(scope="module")
def tiny_folder(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 5}
    tiny_llama(vocab_size=300, max_position_embeddings=256, initializer_range=0.1, **shape).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend).save_pretrained(folder)
    return folder


def answers(output):
    return [json.loads(line.removeprefix("answer:")) for line in output.splitlines() if line.startswith("answer:")]


def test_split_over_two_hosts_the_tokens_are_those_of_one_rank(network, tiny_folder, demo_model):
    first, second = network.hosts
    missing = ("/dev/shm/only-here", PROMPTS, {"pipeline_parallel_size": 2})  # first: later ranks find a CPU here too
    cases = [
        (str(tiny_folder), PROMPTS, {"tensor_parallel_size": 2}),
        (str(tiny_folder), PROMPTS, {"pipeline_parallel_size": 2}),
        (str(tiny_folder), PROMPTS, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        (str(demo_model), PROMPTS, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ]
    expected = {}
    for model in {model for model, _, _ in cases}:
        alone = LLM(model, dtype="float32", kv_cache_memory="64MiB", use_tqdm=False)
        expected[model] = [o.outputs[0].token_ids for o in alone.generate(PROMPTS, GREEDY, use_tqdm=False)]
    first.run("cp", "-r", str(tiny_folder), "/dev/shm/only-here")
    (kind, why), *given = answers(first.python(textwrap.dedent(SCRIPT), json.dumps([missing, *cases]), timeout=200))
    for (model, _, settings), (hosts, tokens) in zip(cases, given, strict=True):
        assert tokens == expected[model], settings
        others = [first.address, second.address, second.address] if len(hosts) == 4 else [second.address]
        assert hosts == [first.address, *others]
    assert kind in ("CheckpointError", "EngineDead") and "rank 1" in why and "/dev/shm/only-here" in why
    wait_until(lambda: not ranks_on(second), 20)


def ranks_on(host):
    return [name for name in host.processes().values() if name.startswith(("ray::Rank", "ray::Leader"))]


@pytest.fixture(scope="module")
def server(network, demo_model, tmp_path_factory):
    """The URL of a server whose two ranks are on two hosts. Its ingress is on the first, which stays on our side."""
    first = network.hosts[0]
    folder = tmp_path_factory.mktemp("server")
    config = {
        "model_loading_config": {"model_id": "demo", "model_source": str(demo_model)},
        "engine_kwargs": {"tensor_parallel_size": 2, "dtype": "float32", "max_model_len": 256, "cpu_threads": 1},
        "placement_group_config": {"bundle_per_worker": {"CPU": 1}, "strategy": "STRICT_SPREAD"},
    }
    ingress = {"ray_actor_options": {"num_cpus": 0, "resources": {"first": 0.01}}}
    (folder / "config.yaml").write_text(json.dumps({"llm_configs": [config], "ingress": ingress}))
    log = folder / "log"
    process = first.serve(folder / "config.yaml", log)
    wait_until(lambda: "ready" in log.read_text() or process.poll() is not None, 240, lambda: log.read_text())
    assert process.poll() is None, log.read_text()
    yield f"http://{first.address}:8000"
    process.kill()


def complete(url, seconds):
    body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=seconds)


def test_a_group_over_two_hosts_is_served_and_survives_a_partition(network, server, demo_model):
    first, second = network.hosts
    alone = LLM(str(demo_model), dtype="float32", max_model_len=256, use_tqdm=False)
    (expected,) = alone.generate("The capital of France is", GREEDY, use_tqdm=False)
    assert complete(server, 60).json()["choices"][0]["text"] == expected.outputs[0].text
    assert [len(ranks_on(host)) for host in network.hosts] == [1, 1]
    network.partition([first], [second])
    wait_until(lambda: httpx.get(f"{server}/health", timeout=10).status_code == 503, 15)
    network.heal()
    wait_until(lambda: httpx.get(f"{server}/health", timeout=10).status_code == 200, 100)
    assert complete(server, 60).json()["choices"][0]["text"] == expected.outputs[0].text
    wait_until(lambda: [len(ranks_on(host)) for host in network.hosts] == [1, 1], 20)
