"""A group of two ranks behind a real server: it says what one rank says, a rank dies or hangs, the group comes back."""

import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from real_server import descendants
from test_failures import Stream, answers_again, process_of

from pagedray import LLM, SamplingParams

pytestmark = pytest.mark.serve

_FLAGS = ("--served-model-name", "demo", "--max-model-len", "1024", "--dtype", "float32")
_OF_THE_GROUP = ("ray::Rank", "ray::Leader", "ray::ServeReplica:pagedray:WorkerGroup")


@pytest.fixture(scope="module")
def server(start_server, demo_model):
    return start_server(str(demo_model), *_FLAGS, "-tp", "2")


@pytest.fixture(scope="module")
def undisturbed(server):
    return Stream(server).answer()


def group_processes(server):
    return {p for p, name in descendants(server.process.pid).items() if name.startswith(_OF_THE_GROUP)}


def health(server):
    return httpx.get(f"{server.url}/health", timeout=10).status_code


def test_two_ranks_say_what_one_says(server, demo_model):
    question = [{"role": "user", "content": "What is the capital of France, and of Italy?"}]
    body = {"model": "demo", "messages": question, "temperature": 0, "max_tokens": 24}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    alone = LLM(str(demo_model), dtype="float32", max_model_len=1024, use_tqdm=False)
    (expected,) = alone.chat(question, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert len(group_processes(server)) == 3


@pytest.mark.parametrize(
    ("who", "how"), [("Rank", signal.SIGKILL), ("Rank", signal.SIGSTOP), ("Leader", signal.SIGSTOP)]
)
def test_a_rank_is_lost_and_its_streams_go_on_when_the_group_is_back(server, undisturbed, who, how):
    stream = Stream(server)
    before = group_processes(server)
    os.kill(process_of(server, who), how)
    lost = time.monotonic()
    # Nobody is told that all is well before it is.
    while health(server) == 200 and group_processes(server) & before:
        assert time.monotonic() - lost < 20, "/health says all is well"
        time.sleep(0.1)
    assert stream.answer() == undisturbed
    answers_again(server, 90)
    assert health(server) == 200
    after = group_processes(server)
    assert len(after) == 3 and not after & before
    assert not [p for p in before if Path(f"/proc/{p}").exists()], "what was stopped is still there"
    server.wait_idle(10)
