"""Faults on a cluster of two hosts, twenty or two hundred, by a seed: no stream notices, and nothing is left behind.

`tests/bench/chaos.py` does the same with any model, and tells how long streams waited.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_model
from faults import DECK, SHORT_DECK, Chaos, Clients, Cluster, deal, leaks
from steady_load import answer

pytestmark = pytest.mark.serve

JOBS = [
    {"prompt": "One, two,", "temperature": 0, "max_tokens": 700},
    {"prompt": "abc" * 40, "temperature": 1.0, "seed": 5, "n": 2, "presence_penalty": 0.5, "max_tokens": 300},
    {"prompt": "x" * 300, "temperature": 0.8, "seed": 7, "max_tokens": 900, "logprobs": 1},
    {"prompt": "Dear", "temperature": 0.5, "seed": 9, "stop": ["zq"], "max_tokens": 500, "min_tokens": 8},
]


@pytest.fixture(scope="module")
def tiny_folder(tiny_llama, tmp_path_factory):
    return tiny_model.save(tiny_llama, tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048, eos_token_id=299)


def run(network, model, folder, faults, deck, groups, settle):
    seed = int(os.environ.get("PAGEDRAY_CHAOS_SEED", "1"))
    rng = random.Random(seed)
    engine = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory": "32MiB"}
    cluster = Cluster(network, folder, model, groups, ranks=2, engine=engine)
    cluster.wait_up()
    with ThreadPoolExecutor() as threads:
        expected = list(threads.map(lambda job: answer(cluster.url, {"model": "chaos", **job}), JOBS))
    before, began = cluster.state(), time.monotonic()
    clients = Clients(cluster.url, JOBS, expected, num=3, seed=seed)
    Chaos(cluster, clients, rng).run(deal(faults, rng, deck), settle)
    clients.finish()
    took = time.monotonic() - began
    print(f"{took:.0f} s, {clients.num_done} answers; after an edge had died {clients.num_again} times asked again")
    assert not clients.wrong, f"{len(clients.wrong)} of {clients.num_done}: {clients.wrong[:3]}"
    assert leaks(cluster, before) == []
    assert clients.num_done > 10


@pytest.mark.timeout(600)
def test_twenty_faults_are_not_noticed(start_hosts, tiny_folder, tmp_path):
    with start_hosts(2) as network:
        run(network, tiny_folder, tmp_path, 20, SHORT_DECK, groups=2, settle=0.3)


@pytest.mark.timeout(2400)
@pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes: set PAGEDRAY_LONG_TESTS=1")
def test_two_hundred_faults_are_not_noticed(start_hosts, tiny_folder, tmp_path):
    with start_hosts(2) as network:
        run(network, tiny_folder, tmp_path, 200, DECK, groups=4, settle=0.5)
