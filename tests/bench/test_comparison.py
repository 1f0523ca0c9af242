"""The benchmark against peers, apart from the peers: workloads, recorded turns, the table, processes, models."""

import argparse
import sys
import time
from pathlib import Path

import peers
import pytest
import torch
from comparison import contestants, environments
from comparison.contestants import Place
from comparison.environments import Unavailable
from comparison.models import Models
from comparison.table import Turn, append_turn, markdown, read_turns
from comparison.workloads import BANDWIDTH, ITL, TTFT, WORKLOADS, Target
from roofline import bytes_of, least

from pagedray.workers.checkpoint.load import open_checkpoint
from pagedray.workers.config import ModelConfig


def turn(workload, contestant, value=None, bandwidth=20e9, **more):
    figures = {} if value is None else {WORKLOADS[workload].metric: value}
    unavailable = more.pop("unavailable", None)
    return Turn(workload, contestant, "abc", "2026-01-01T00:00:00", 1, bandwidth, figures | more, unavailable)


def row(table, start):
    rows = [line for line in table.splitlines() if f"| {start}" in line]
    assert len(rows) == 1, table
    return [cell.strip() for cell in rows[0].strip("|").split("|")]


def test_every_target_compares_two_that_take_part():
    for workload in WORKLOADS.values():
        for target in workload.targets:
            assert f"pagedray:{target.ours}" in workload.contestants
            assert target.peer in (*workload.contestants, "memory")


def test_rounds_have_prompts_of_their_own_and_everybody_the_same():
    for workload in WORKLOADS.values():
        assert workload.draw(1).draw() == workload.draw(1).draw() != workload.draw(2).draw()
    shared = [prompt[:1024] for prompt, _ in WORKLOADS["W3"].draw(1).draw()]
    assert len(shared) == 16
    assert all(prefix == shared[0] for prefix in shared)


def test_the_table_compares_medians_with_the_targets():
    ours = [turn("W2", "pagedray:bf16", v) for v in (300.0, 320.0, 900.0)]
    theirs = [turn("W2", "vllm:bf16", v) for v in (200.0, 100.0, 210.0)]
    table = markdown([*ours, *theirs])
    assert row(table, "PagedRay bf16")[2] == "320.0 (300.0-900.0, 3 turns)"
    assert row(table, "vLLM bf16")[-2:] == ["bf16 1.60; int8 not measured", "≥ 1.5 met; ≥ 2.2"]


def test_times_must_be_lower():
    ours = turn("W5", "pagedray:bf16", 150.0, **{TTFT: 80.0, ITL: 30.0})
    theirs = turn("W5", "vllm:bf16", 100.0, **{TTFT: 100.0, ITL: 20.0})
    assert row(markdown([ours, theirs]), "vLLM bf16")[-2:] == [
        "bf16 1.50; bf16 TTFT 0.80; bf16 ITL 1.50",
        "≥ 1.4 met; ≤ 1 met; ≤ 1 missed",
    ]


def test_the_memory_is_a_target_too():
    turns = [turn("W1-1B", "pagedray:bf16", 10.0, **{BANDWIDTH: share}) for share in (0.8, 0.9, 0.86)]
    assert row(markdown(turns), "PagedRay bf16")[-2:] == ["bf16 0.86 of the memory's bandwidth", "≥ 0.85 met"]


def test_who_could_not_be_measured_is_in_the_table_with_the_reason():
    turns = [turn("W4", "pagedray:bf16", 10.0), turn("W4", "vllm:bf16", unavailable="no | such\nwheel")]
    assert "| vLLM bf16 | not measured: no \\| such wheel |" in markdown(turns)
    turns.append(turn("W4", "vllm:bf16", 5.0))
    assert row(markdown(turns), "vLLM bf16")[2] == "5.0 (5.0-5.0, 1 turns)", "a later run found it"


def test_turns_come_back_from_their_file(tmp_path):
    path = tmp_path / "folder" / "turns.jsonl"
    assert read_turns(path) == []
    written = [turn("W1", "vllm:bf16", 1.5), turn("W2", "vllm:bf16", unavailable="why")]
    for one in written:
        append_turn(path, one)
    assert read_turns(path) == written


def test_a_target_is_met_at_its_ratio():
    assert Target("bf16", "vllm:bf16", 1.5).met(1.5)
    assert not Target("bf16", "vllm:bf16", 1.5).met(1.49)
    assert Target("bf16", "vllm:bf16", 1.0, TTFT).met(1.0)
    assert not Target("bf16", "vllm:bf16", 1.0, TTFT).met(1.01)


class Script(contestants._Server):
    """A process of Python code in the place of a server."""

    def __init__(self, tmp_path, code):
        place = Place(tmp_path, None, {}, 1)
        super().__init__("script:bf16", place, [sys.executable, "-c", code], {})


SERVER = """
import http.server, os, sys, subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def wait_for(pid, states):
    deadline = time.monotonic() + 20
    while state(pid) not in states:
        assert time.monotonic() < deadline, (pid, state(pid), states)
        time.sleep(0.02)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_who_has_no_turn_stands_still_and_leaves_nothing_behind(tmp_path):
    server = Script(tmp_path, SERVER)
    try:
        server.resume()
        pids = [server.process.pid, int(server.log.read_text().split()[0])]
        server.pause()
        for pid in pids:
            wait_for(pid, "T")
        server.resume()
        for pid in pids:
            wait_for(pid, "SR")
    finally:
        server.stop()
    for pid in pids:
        wait_for(pid, ("gone", "Z"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_who_dies_between_turns_is_found_out(tmp_path):
    server = Script(tmp_path, SERVER)
    try:
        server.resume()
        server.pause()
        server.process.kill()
        server.process.wait(20)
        with pytest.raises(Unavailable, match="ended between its turns"):
            server.resume()
    finally:
        server.stop()
    wait_for(int(server.log.read_text().split()[0]), ("gone", "Z"))


def test_a_server_that_ends_says_why(tmp_path):
    server = Script(tmp_path, "import sys; sys.exit('Error: no such flag')")
    with pytest.raises(Unavailable, match="the server ended: Error: no such flag"):
        server.resume()
    server.stop()


def test_an_offline_engine_that_fails_says_why(tmp_path):
    place = Place(tmp_path, None, {}, 1)
    engine = contestants._Offline("pagedray:bf16", place, sys.executable, "no/such/model", {}, {})
    with pytest.raises(Unavailable, match="the process ended: .*no/such/model"):
        engine.resume()
    engine.stop()


def test_a_peer_that_cannot_be_installed_says_why(tmp_path, monkeypatch):
    recipe = environments.Recipe(("./no-such-package",))
    monkeypatch.setitem(environments.RECIPES, "nobody", recipe)
    with pytest.raises(Unavailable, match="nobody could not be installed: ERROR: .*no-such-package"):
        environments.prepare("nobody", tmp_path, ["--no-index"], print)


def test_a_missing_peer_is_recorded_with_the_reason(tmp_path, monkeypatch):
    args = argparse.Namespace(rounds=1)
    machine = argparse.Namespace(bandwidth=lambda: 1e9)

    def nothing(name, workload, place):
        raise Unavailable(f"{name} is not here")

    monkeypatch.setattr(peers, "contestant", nothing)
    place = Place(tmp_path, None, {"llama.cpp": None}, 1)
    results = tmp_path / "turns.jsonl"
    peers.run(WORKLOADS["W3"], args, place, machine, {"vllm": "no wheel"}, results, {})
    assert {t.contestant: t.unavailable for t in read_turns(results)} == {
        "pagedray:bf16": "pagedray:bf16 is not here",
        "vllm:bf16": "no wheel",
        "llama.cpp:bf16": "llama.cpp:bf16 is not here",
    }, "transformers was left out"


@pytest.mark.slow
def test_all_formats_hold_the_same_weights(demo_model, tmp_path):
    models = Models(tmp_path, Path(demo_model), print)
    folder, gguf = models.huggingface("smollm2"), models.gguf("smollm2", "bf16")
    mine, theirs, original = (open_checkpoint(str(path)) for path in (folder, gguf, demo_model))
    assert mine.names() == theirs.names() == original.names()
    for name in sorted(mine.names()):
        if "layers." not in name or "layers.7." in name:
            wanted = original.read(name).bfloat16()
            assert torch.equal(mine.read(name).bfloat16(), wanted), name
            assert torch.equal(theirs.read(name).bfloat16(), wanted), name
    for key in ("hidden_size", "rms_norm_eps", "rope", "eos_token_ids", "bos_token_id", "vocab_size"):
        assert getattr(mine.config, key) == getattr(theirs.config, key) == getattr(original.config, key), key
    with pytest.raises(Unavailable, match="llama-quantize"):
        models.gguf("smollm2", "q4_0")


def test_what_a_decode_step_needs():
    model = ModelConfig("LlamaForCausalLM", 100, 8, 16, 3, 4, 2, 2, 1e-5, 64, True, "bfloat16")
    weights = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 100 * 8
    step = least(model, weight_bytes=1000, kv_bytes=10, batch=2, context=5)
    assert step.bytes == 1000 + 2 * 5 * 10
    assert step.operations == 2 * (2 * weights + 4 * 3 * 8 * 5)
    assert step.bound(bandwidth=100.0, rate=1e12) == step.bytes / 100
    assert step.bound(bandwidth=1e12, rate=100.0) == step.operations / 100


def test_bytes_count_each_storage_once():
    weight = torch.zeros(4, 4)
    assert bytes_of([weight, (weight[:2], None), torch.zeros(3, dtype=torch.bfloat16)]) == 64 + 6
