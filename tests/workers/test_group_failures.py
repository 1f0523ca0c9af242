"""A rank, or the leader, dies or stops in the middle of a step: all others know within 5 s, and nothing is left."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from groups import config_for, greedy, group, is_running, rank_pids, traces

from pagedray.scheduler.errors import CheckpointError, ConfigError, EngineDead
from pagedray.workers import rank, wire
from pagedray.workers.engine import Engine
from pagedray.workers.executor import GroupExecutor
from pagedray.workers.members import LocalRank
from pagedray.workers.messages import GroupAddress
from pagedray.workers.wire import WireError

SHAPE = {"num_hidden_layers": 4, "max_position_embeddings": 256}
KNOWN_WITHIN = 5.0


@pytest.fixture
def model(tiny_llama, tmp_path):
    tiny_llama(**SHAPE).save_pretrained(tmp_path)
    return tmp_path


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def run_for_ever(engine):
    """Steps without end, until one raises; returns what."""
    try:
        while True:
            if not engine.scheduler.has_unfinished():
                for request in greedy([(5, 6, 7), (8, 9, 10)]):
                    engine.add_request(request)
            engine.step()
    except EngineDead as error:
        return error


LOSSES = [
    ({"tensor_parallel_size": 2}, None, 1),
    ({"tensor_parallel_size": 2}, "gloo", 1),
    ({"pipeline_parallel_size": 3}, None, 1),
    ({"pipeline_parallel_size": 3}, "link", 1),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, None, 3),
]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(("settings", "road", "victim"), LOSSES, ids=str)
def test_a_lost_rank_is_noticed_by_all(settings, road, victim, how, model):
    before = traces()
    config = config_for(model, **settings)
    executor = group(config, link="gloo") if road == "link" else group(config, road=road)
    pids = rank_pids(executor)
    others = [pid for rank, pid in enumerate(pids, 1) if rank != victim]
    engine = Engine(config, executor=executor)
    try:
        found = []
        thread = threading.Thread(target=lambda: found.append(run_for_ever(engine)), daemon=True)
        thread.start()
        assert wait_until(lambda: engine.stats().num_steps > 50, 60)
        lost_at = time.monotonic()
        os.kill(pids[victim - 1], how)
        thread.join(KNOWN_WITHIN)
        assert found, "the leader did not notice"
        assert f"rank {victim} of {config.world_size} is lost" in str(found[0])
        left = KNOWN_WITHIN - (time.monotonic() - lost_at)
        assert wait_until(lambda: not any(map(is_running, others)), left), "another rank did not notice"
        with pytest.raises(EngineDead, match=f"rank {victim}"):
            engine.step()
    finally:
        engine.close()
    assert not any(map(is_running, pids))
    assert traces() <= before


LEADER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from groups import config_for, greedy, group, rank_pids
from pagedray.workers.engine import Engine
config = config_for(sys.argv[2], tensor_parallel_size=2, pipeline_parallel_size=2)
executor = group(config)
engine = Engine(config, executor=executor)
print(*rank_pids(executor), flush=True)
while True:
    if not engine.has_unfinished():
        for request in greedy([(5, 6, 7), (8, 9, 10)]):
            engine.add_request(request)
    engine.step()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_ranks_end_with_their_leader(how, model):
    before = traces()
    command = [sys.executable, "-c", LEADER, os.path.dirname(__file__), str(model)]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in leader.stdout.readline().split()]
        assert len(pids) == 3
        time.sleep(0.5)  # into the steps
        assert all(map(is_running, pids))
        os.kill(leader.pid, how)
        assert wait_until(lambda: not any(map(is_running, pids)), KNOWN_WITHIN)
    finally:
        leader.kill()
        leader.communicate()
    assert traces() <= before


def test_an_executor_that_nobody_holds_takes_its_ranks_with_it(model):
    executor = group(config_for(model, tensor_parallel_size=2))
    (pid,) = rank_pids(executor)
    del executor
    assert wait_until(lambda: not is_running(pid), 10)


def test_a_closed_group_takes_no_more_steps(model):
    config = config_for(model, tensor_parallel_size=2)
    engine = Engine(config, executor=group(config))
    engine.close()
    engine.close()
    engine.add_request(greedy([(5, 6)])[0])
    with pytest.raises(EngineDead, match="closed"):
        engine.step()


class Stub:
    """A rank that never comes."""

    def __init__(self, ended=None):
        self.ended, self.stops = ended, 0

    def poll(self):
        return self.ended

    def stop(self, timeout):
        self.stops += 1


def test_a_rank_that_ends_before_it_joins_is_named_with_its_reason(model):
    stubs = {1: Stub(), 2: Stub("its process ended with exit code 7")}
    with pytest.raises(EngineDead, match="rank 2 of 3 did not join: its process ended with exit code 7"):
        GroupExecutor(config_for(model, pipeline_parallel_size=3), lambda _, rank: stubs[rank])
    assert [stub.stops for stub in stubs.values()] == [1, 1]


def test_a_rank_that_does_not_join_in_time_is_named(model):
    with pytest.raises(EngineDead, match="rank 1 of 2 did not join within 0 s"):
        GroupExecutor(config_for(model, tensor_parallel_size=2), lambda *_: Stub(), join_timeout=0.3)


def test_a_rank_compiles_its_kernels_before_it_connects(monkeypatch):
    """The leader waits seconds for a word from who has connected, and compiling takes longer."""
    order = []

    def connect(*_):
        order.append("connect")
        raise WireError("nobody there")

    monkeypatch.setattr(rank.ops, "native_library", lambda: order.append("compile"))
    monkeypatch.setattr(rank.Connection, "connect", connect)
    with pytest.raises(EngineDead, match="rank 1 cannot join its group: nobody there"):
        rank.run(GroupAddress("127.0.0.1", 1, b"key"), 1)
    assert order == ["compile", "connect"]


def test_who_connects_and_says_nothing_is_sent_away(model, monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.2)
    sent_away = []

    def launch(address, _):
        connection = wire.Connection.connect(address.host, address.port, address.key, 5)
        try:
            connection.receive(5)
        except WireError as error:
            sent_away.append(str(error))
        return Stub()

    def later(address, rank):
        thread = threading.Thread(target=launch, args=(address, rank), daemon=True)
        thread.start()
        return Stub()

    with pytest.raises(EngineDead, match="did not join"):
        GroupExecutor(config_for(model, tensor_parallel_size=2), later, join_timeout=1.5)
    assert sent_away == ["its connection closed"]


def test_a_degree_that_cannot_work_is_refused_before_anything_starts(model):
    started = []
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3, .* 1, 2, 4 would work"):
        GroupExecutor(config_for(model, tensor_parallel_size=3), lambda *_: started.append(1))
    assert not started


def test_what_keeps_a_rank_from_loading_is_raised_as_it_is(model, tmp_path):
    def elsewhere(address, rank):
        (model / "model.safetensors").rename(tmp_path / "hidden")
        return LocalRank(address, rank)

    with pytest.raises(CheckpointError, match="has neither model.safetensors"):
        group(config_for(model, tensor_parallel_size=2), launch=elsewhere)


def test_groups_that_start_at_once_do_not_collide(model):
    config = config_for(model, tensor_parallel_size=2)
    executors = [None] * 3

    def start(i):
        executors[i] = group(config, road="gloo" if i == 2 else None)

    threads = [threading.Thread(target=start, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    try:
        assert all(executors)
        for executor in executors:
            executor.warm_up()
    finally:
        for executor in filter(None, executors):
            executor.close()
