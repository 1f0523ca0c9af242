"""Prefill and decode on groups of their own: who gets what, when a request is given away, what happens without them."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from test_kv_traffic import Traffic
from test_step import Run, alone, make, request, workloads

from pagedray.scheduler.cost_model import CostModel
from pagedray.scheduler.dispatcher import Dispatcher
from pagedray.scheduler.kv_publish import Publisher
from pagedray.scheduler.kv_sources import FetchOutcome
from pagedray.scheduler.placement import GroupCapacity
from pagedray.scheduler.prefix_index import BlockEvents
from pagedray.scheduler.request import Request, SamplingParams
from pagedray.scheduler.roles import ROLES, Roles

SLOW = CostModel(base=0.0, token=1e-3)  # a second for 1000 tokens
HASHES = tuple(b"%016d" % i for i in range(62))  # of a prompt of 1,000 tokens, in blocks of 16


def add(dispatcher, *names):
    """Groups whose names begin with their roles."""
    for name in names:
        role = name.rstrip("0123456789")
        capacity = GroupCapacity(window=8, role=role, local_tokens=256, block_bytes=1_000_000, node="n" + name)
        dispatcher.add_group(name, "m", capacity, 0.0, cost=SLOW)


def ask(dispatcher, name, num_tokens=1000, made=(), now=1.0):
    """(group, the request as it was sent there), of a request that has ended by then."""
    sampling = SamplingParams(seed=0, max_tokens=100)
    hashes = HASHES[: num_tokens // 16]
    goes_on = {"output_token_ids": made, "attempt": int(bool(made))}
    dispatcher.submit(Request(name, (1,) * num_tokens, sampling, "m", block_hashes=hashes, **goes_on), now)
    ((group, (sent,)),) = dispatcher.dispatch(now).items()
    dispatcher.check_integrity()
    dispatcher.finished([name], now)
    return group, sent


def stored(dispatcher, num_blocks=62):
    dispatcher.sources.add("store", "nprefill1")
    assert dispatcher.block_events("store", BlockEvents(1, b"".join(HASHES[:num_blocks])))


def slow(dispatcher, seconds=60.0):
    """What fetches take."""
    for num_blocks in (1, 60) * 50:
        outcome = FetchOutcome("store", False, num_blocks, 1_000_000 * num_blocks, seconds, 1.0)
        dispatcher.sources.learn(outcome, 0.0)


def test_a_prompt_is_computed_by_one_group_and_gone_on_with_by_another_that_fetches_it():
    d = Dispatcher()
    add(d, "decode1", "prefill1", "decode2")
    group, sent = ask(d, "a")
    assert (group, sent.hand_over, sent.kv_source) == ("prefill1", True, None)
    stored(d)
    group, sent = ask(d, "a~1", made=(5,), now=2.0)
    assert group in ("decode1", "decode2") and not sent.hand_over
    assert (sent.kv_source.store, sent.kv_source.num_blocks) == ("store", 62)


def test_what_was_given_away_is_fetched_even_where_computing_it_would_be_faster():
    d = Dispatcher()
    add(d, "decode1", "prefill1")
    stored(d)
    slow(d)
    assert ask(d, "a~1", made=(5,))[1].kv_source is not None
    assert ask(d, "b", num_tokens=200)[1].kv_source is None  # the same prefix in a prompt of its own


def test_a_short_prompt_or_the_end_of_a_known_one_is_computed_where_it_is_decoded():
    d = Dispatcher()
    add(d, "prefill1", "decode1", "decode2")
    group, sent = ask(d, "short", num_tokens=250)
    assert group.startswith("decode") and not sent.hand_over
    assert ask(d, "long", num_tokens=300)[0] == "prefill1"
    d.block_events("decode2", BlockEvents(1, b"".join(HASHES[:50])))  # 800 of 1,000 tokens
    assert ask(d, "turn")[0] == "decode2"
    d.block_events("prefill1", BlockEvents(1, b"".join(HASHES[:50])))
    assert ask(d, "again")[0] == "decode2", "a group that has as much would have to give it away"


def test_who_can_fetch_most_of_a_prompt_need_not_have_it_computed():
    d = Dispatcher()
    add(d, "prefill1", "decode1")
    stored(d, 60)
    slow(d, 1e-3)
    for i in range(5):  # the prefill group is busy
        d.submit(Request(f"other{i}", (2,) * 4000, SamplingParams(seed=0), "m"), 1.0)
        d.dispatch(1.0)
    assert ask(d, "a")[0] == "decode1"


def test_without_a_group_of_the_right_kind_any_takes_it_and_keeps_it():
    d = Dispatcher()
    add(d, "prefill1")
    group, sent = ask(d, "a")
    assert (group, sent.hand_over) == ("prefill1", False), "nobody is there to give it to"
    assert ask(d, "b~1", made=(5,))[0] == "prefill1"
    d = Dispatcher()
    add(d, "decode1")
    group, sent = ask(d, "a")
    assert (group, sent.hand_over) == ("decode1", False)
    add(d, "prefill1")
    assert ask(d, "b")[0] == "prefill1"
    d.remove_group("prefill1")
    assert ask(d, "c")[0] == "decode1"


def test_mixed_groups_take_either_and_help_out():
    d = Dispatcher()
    add(d, "mixed1", "prefill1")
    for i in range(2):
        sampling = SamplingParams(seed=0)
        d.submit(Request(f"long{i}", (1,) * 1000, sampling, "m"), 1.0)
    batches = d.dispatch(1.0)
    assert batches.keys() == {"mixed1", "prefill1"}
    assert all(r.hand_over == (group == "prefill1") for group, batch in batches.items() for r in batch)
    d.finished(["long0", "long1"], 1.0)
    assert ask(d, "a~1", made=(5,))[0] == "mixed1"


@given(st.lists(st.tuples(st.sampled_from(ROLES), st.booleans(), st.integers(0, 20)), max_size=6), st.data())
@settings(deadline=None)
def test_whoever_fits_is_there_and_the_right_ones_come_first(groups, data):
    roles, alive = Roles(), {}
    for i, (role, fetches, local) in enumerate(groups):
        roles.add(1 << i, role, fetches, local)
        alive[1 << i] = role, fetches, local
    for bit in data.draw(st.sets(st.sampled_from(sorted(alive)))) if alive else ():
        roles.remove(bit)
        del alive[bit]
    num_blocks, num_stored = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 40))
    held = {bit: data.draw(st.integers(0, num_blocks)) for bit in alive}
    levels = [(n, sum(b for b in held if held[b] >= n)) for n in sorted(set(held.values()) - {0}, reverse=True)]
    for goes_on in (False, True):
        fit = roles.fit(goes_on, num_blocks, levels, num_stored)
        assert bool(fit) == bool(alive) and not fit & ~sum(alive)
        for bit, (role, fetches, local) in alive.items():
            others = {r for b, (r, _, _) in alive.items() if b != bit}
            missing = num_blocks - max(held[bit], num_stored if fetches else 0)
            if role == "mixed":
                assert fit & bit
            elif role == "decode" and (goes_on or missing <= local):
                assert fit & bit
            elif (
                role == "decode"
                and others & {"prefill", "mixed"}
                and all(num_blocks > most for r, _, most in alive.values() if r == "decode")
            ):
                assert not fit & bit
            elif role == "prefill" and goes_on and others & {"decode", "mixed"}:
                assert not fit & bit
            assert not roles.hands_over(bit) or role == "prefill"
            if role == "prefill":
                able = any(r != "prefill" and f for r, f, _ in alive.values())
                assert roles.hands_over(bit) == able


def publisher(pool):
    return Publisher(pool, 3, min_tokens=1000, min_run_tokens=8)


def handing_over(name, prompt, max_tokens=20):
    plain = request(name, prompt, max_tokens)
    return Request(plain.request_id, plain.prompt_token_ids, plain.sampling, hand_over=True)


def test_a_sequence_runs_on_until_the_store_has_all_of_its_prompt():
    scheduler = make(publisher=publisher)
    run = Traffic(scheduler, random.Random(0))
    run.add(handing_over("a", 22))
    plan = scheduler.schedule()
    run.execute(plan)
    assert not scheduler.take_hand_overs(), "its prompt is not computed"
    run.take_in(run.in_flight.popleft())
    assert not scheduler.take_hand_overs(), "nothing of it is offered"
    first, second = scheduler.publisher.take()
    assert [len(p.hashes) for p in (first, second)] == [3, 2]
    scheduler.publisher.end(first.publication_id)
    assert not scheduler.take_hand_overs()
    scheduler.publisher.end(second.publication_id)
    assert scheduler.take_hand_overs() == ["a"] and not scheduler.take_hand_overs()
    # the next one with this prompt need not wait
    run.add(handing_over("b", 22))
    run.step()
    run.step()
    assert scheduler.take_hand_overs() == ["b"]


def test_what_no_store_takes_stays_and_what_has_ended_is_not_given_away():
    scheduler = make(publisher=publisher)
    run = Traffic(scheduler, random.Random(0))
    run.add(handing_over("refused", 22, max_tokens=4))
    run.execute(scheduler.schedule())
    run.take_in(run.in_flight.popleft())
    for publication in scheduler.publisher.take():
        scheduler.publisher.end(publication.publication_id, taken=False)
    assert not scheduler.take_hand_overs()
    run.add(handing_over("ended", [9] * 22, max_tokens=2))
    while scheduler.has_unfinished():
        Run.step(run)
    for publication in scheduler.publisher.take():
        scheduler.publisher.end(publication.publication_id)
    assert not scheduler.take_hand_overs() and len(run.finish) == 2
    run.add(handing_over("tiny", 5))  # too little for a run: another group computes it as fast
    Run.step(run)
    assert scheduler.take_hand_overs() == ["tiny"]


@given(workloads(), st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_sequences_that_move_while_they_run_say_what_they_would_have_said(work, rng, run_blocks):
    """Two schedulers; what the first gives away the second goes on with."""

    def small(pool):
        return Publisher(pool, run_blocks, min_tokens=8, min_run_tokens=1)

    first = Traffic(make(**work["scheduler"], publisher=small), rng)
    second = Traffic(make(**work["scheduler"]), rng)
    todo, moved = list(work["requests"]), set()
    for _ in range(5_000):
        if todo and rng.random() < 0.4:
            req = todo.pop(0)
            first.add(Request(req.request_id, req.prompt_token_ids, req.sampling, hand_over=rng.random() < 0.8))
        first.step()
        for request_id in first.scheduler.take_hand_overs():
            assert first.scheduler.abort(request_id)
            (req,) = [r for r in work["requests"] if r.request_id == request_id]
            tokens = first.tokens[request_id]
            made = tuple(tokens[len(req.prompt_token_ids) :])
            assert made and request_id not in first.finish
            moved.add(request_id)
            second.add(Request(request_id, req.prompt_token_ids, req.sampling, output_token_ids=made))
            second.tokens[request_id] = list(tokens)
        second.step()
        if not todo and not first.scheduler.has_unfinished() and not second.scheduler.has_unfinished():
            break
    first.to_the_end()
    second.to_the_end()
    for req in work["requests"]:
        run = second if req.request_id in moved else first
        assert run.tokens[req.request_id] == alone(req, run.scheduler.max_model_len)
