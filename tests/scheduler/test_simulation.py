"""The simulator: traces as they come, groups that behave, faults, and the claims about tenants."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pagedray.scheduler.cost_model import CostModel
from pagedray.scheduler.dispatcher import Dispatcher
from pagedray.scheduler.errors import ConfigError
from pagedray.scheduler.simulation.baselines import POLICIES
from pagedray.scheduler.simulation.group import GroupSpec
from pagedray.scheduler.simulation.simulator import Fault, Simulation
from pagedray.scheduler.simulation.study import compare, picture, table
from pagedray.scheduler.simulation.traces import TraceRequest, at_rate, read_trace
from pagedray.scheduler.tenants import Quotas, Tenant, TenantDirectory

TRACES = Path(__file__).parents[2] / "../shared/data/traces"
SPEC = GroupSpec("test", CostModel(4e-3, 5e-5, 1e-9, 1e-4, 1e-8), kv_tokens=200_000, max_num_seqs=64)


def chats(count=300, rate=6.0, seed=0):
    """Conversations: each turn begins with all the turns before it."""
    draw = random.Random(seed)
    histories: list[tuple[bytes, ...]] = []
    at, requests = 0.0, []
    for i in range(count):
        at += draw.expovariate(rate)
        if histories and draw.random() < 0.7:
            turn = draw.randrange(len(histories))
        else:
            turn = len(histories)
            histories.append(())
        histories[turn] += tuple(b"%08d%08d" % (i, k) for k in range(draw.randrange(1, 6)))
        blocks = histories[turn]
        requests.append(TraceRequest(at, 512 * len(blocks) + draw.randrange(1, 512), draw.randrange(1, 300), blocks))
    return requests


def simulate(trace, groups=3, policy="pagedray", **options):
    return Simulation(trace, groups, SPEC, lambda: POLICIES[policy](0), **options).run()


# -- traces -----------------------------------------------------------------------------------------------------------


def test_mooncake(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        b'{"timestamp": 5000, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]}\r\n'
        b'{"timestamp": 5500, "input_length": 600, "output_length": 9, "hash_ids": [0, 7]}'
    )
    first, second = read_trace(path)
    assert (first.arrival, first.input_tokens, first.output_tokens) == (0.0, 1100, 3)
    assert len(first.block_hashes) == 2 and second.block_hashes == first.block_hashes[:1]
    assert second.arrival == 0.5


def test_azure(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319612,3180,8"
    )
    first, second = read_trace(path)
    assert second.arrival == pytest.approx(0.0520012, abs=1e-6)
    assert (first.input_tokens, second.output_tokens, first.block_hashes) == (4808, 8, ())


def test_burstgpt(tmp_path):
    path = tmp_path / "t.csv"
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path.write_text(f"{head}45,ChatGPT,12,0,12,API log\n50,GPT-4,472,18,490,Conversation log\n")
    (only,) = read_trace(path)  # an answer of no tokens failed
    assert (only.arrival, only.input_tokens, only.output_tokens) == (0.0, 472, 18)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no trace"),
        ("a,b\n1,2\n", "is no trace"),
        ('{"timestamp": 0, "input_length": "x", "output_length": 1, "hash_ids": []}', "near line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,5,1\nyesterday,5,1\n", "near line 3"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, message):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "count", "tokens"),
    [("mooncake_conversation.jsonl", 12031, 144_793_823), ("azure_llm_code_2023.csv", 8819, 18_060_000)],
)
def test_published_traces(name, count, tokens):
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not here")
    requests = read_trace(TRACES / name)
    assert len(requests) == count and sum(r.input_tokens for r in requests) == pytest.approx(tokens, rel=0.01)
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_once_and_the_same_seed_gives_the_same(policy):
    trace = chats()
    result = simulate(trace, policy=policy)
    assert sorted(o.arrival for o in result.outcomes) == [r.arrival for r in trace]
    assert all(o.ttft > 0 and o.finished_at >= o.arrival + o.ttft for o in result.outcomes)
    assert simulate(trace, policy=policy).outcomes == result.outcomes


def test_a_lone_request_takes_what_the_model_says():
    (outcome,) = simulate([TraceRequest(0.0, 1000, 11)]).outcomes
    assert outcome.ttft == pytest.approx(SPEC.cost.prefill_seconds(1000, 0) + SPEC.cost.base, abs=5e-3)
    assert outcome.inter_token == pytest.approx(SPEC.cost.decode_seconds(1, 1006), rel=0.01)


def test_locality_is_found_and_load_is_spread():
    trace = chats(800, rate=8.0)
    ours, blind = simulate(trace), simulate(trace, policy="round_robin")
    assert ours.hit_rate > 1.5 * blind.hit_rate
    assert ours.ttft(0.5) < blind.ttft(0.5) and ours.ttft(0.99) < blind.ttft(0.99)


@pytest.mark.parametrize(
    "fault", [Fault("lost", 10.0, 1, 15.0), Fault("slow", 10.0, 1, 20.0, 4.0), Fault("restart", 10.0)]
)
def test_faults_lose_nothing(fault):
    trace = chats(400, rate=8.0)
    routers = []

    def make():
        routers.append(Dispatcher(max_queued_requests=10_000))
        return routers[-1]

    simulation = Simulation(trace, 3, SPEC, make, [fault])
    result = simulation.run()
    assert sorted(o.arrival for o in result.outcomes) == [r.arrival for r in trace]
    assert all(o.ttft is not None for o in result.outcomes)
    assert (max(o.num_tries for o in result.outcomes) > 1) == (fault.kind == "lost")
    for router in routers:
        router.check_integrity()


def test_after_a_restart_the_index_is_complete_again():
    """Twice the report interval later it holds what the groups hold."""
    routers = []

    def make():
        routers.append(Dispatcher(max_queued_requests=10_000))
        return routers[-1]

    trace = [r for r in chats(400, rate=8.0) if r.arrival < 20.0]
    simulation = Simulation(trace, 3, SPEC, make, [Fault("restart", 10.0)])
    checked = []

    def check():
        held = {g: set(group.pool._cached) for g, group in simulation.groups.items()}
        known = {g: routers[-1].index.blocks_of(g) for g in held}
        checked.append(sum(len(held[g] - known[g]) for g in held) / sum(len(b) for b in held.values()))

    simulation._at(11.01, check)
    simulation.run()
    assert len(routers) == 2 and checked[0] < 0.1  # what was stored in the last half second is still to be told


def test_a_slow_group_gets_less():
    trace = [replace(r, block_hashes=()) for r in chats(600, rate=8.0)]
    fast = simulate(trace)
    slow = simulate(trace, faults=[Fault("slow", 0.0, 0, 1e9, 3.0)])
    blind = simulate(trace, policy="round_robin", faults=[Fault("slow", 0.0, 0, 1e9, 3.0)])
    assert fast.ttft(0.9) < slow.ttft(0.9) < 0.7 * blind.ttft(0.9)


def test_deadlines_trade_refusals_for_being_in_time():
    trace = at_rate([replace(r, block_hashes=()) for r in chats(600)], 40.0)  # far too many
    kept = simulate(trace, ttft_target=2.0)
    in_time = [o for o in kept.outcomes if o.ttft is not None and o.ttft <= 2.2]
    refused = [o for o in kept.outcomes if o.ttft is None]
    assert {o.error for o in refused} == {"deadline_unmeetable"}
    assert len(in_time) > 0.9 * (len(kept.outcomes) - len(refused))
    assert len(in_time) > sum(o.ttft <= 2.2 for o in simulate(trace).outcomes)


def tenants_router():
    directory = TenantDirectory([Tenant("quiet"), Tenant("flood")])
    return Dispatcher(max_queued_requests=100_000, quotas=Quotas(directory))


def test_a_flood_of_twenty_shares_costs_the_other_tenant_at_most_half_again():
    """The quiet tenant asks for half of its share, first alone, then beside a flood of twenty shares."""
    spec, draw = replace(SPEC, kv_tokens=1_000_000), random.Random(1)
    share = 2.8  # requests a second: half of what two groups serve of this load

    def load(tenant, rate):
        at = 0.0
        while (at := at + draw.expovariate(rate)) < 60.0:
            yield TraceRequest(at, draw.randrange(4000, 8000), 100, tenant=tenant)

    quiet, flood = list(load("quiet", share / 2)), list(load("flood", 20 * share))
    alone = Simulation(quiet, 2, spec, tenants_router).run()
    beside = Simulation(sorted(quiet + flood, key=lambda r: r.arrival), 2, spec, tenants_router).run()
    assert 2.2 * share > beside.throughput()  # it is a share
    assert beside.ttft(0.95, "quiet") <= 1.5 * alone.ttft(0.95, "quiet")
    assert beside.ttft(0.5, "flood") > 20 * beside.ttft(0.5, "quiet")


def test_the_table_and_the_picture():
    rows = compare(chats(60), 5.0, 2, SPEC, ["pagedray", "round_robin"])
    lines = table(rows).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1 and "pagedray" in lines[2]
    svg = picture(rows, "a & b")
    assert svg.startswith("<svg") and "a &amp; b" in svg and svg.count("<polyline") == 4
