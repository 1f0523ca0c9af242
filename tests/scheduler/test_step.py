"""StepScheduler: properties over random arrivals, then the cases that froze or starved other engines."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.scheduler.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from pagedray.scheduler.plan import PooledSequence, SampledToken, StepResult
from pagedray.scheduler.request import Request, SamplingParams
from pagedray.scheduler.step import StepScheduler

EOS = 0


def make(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=None, **kwargs):
    max_model_len = max_model_len or num_blocks * block_size
    return StepScheduler(
        num_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len, eos_token_ids=(EOS,), **kwargs
    )


def request(name, prompt, max_tokens=None, priority=0, **sampling):
    prompt = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    return Request(str(name), prompt, SamplingParams(max_tokens=max_tokens, seed=0, **sampling), priority=priority)


class Run:
    """Drives a scheduler with a model whose next token is a function of the tokens so far, and checks every step.

    Of every `defers` draws one is put off to the next step, as for a grammar that is not compiled yet; 0: none.
    """

    def __init__(self, scheduler, next_token=lambda tokens: 7, defers=0):
        self.defers = defers
        self.num_draws = 0
        self.scheduler = scheduler
        self.next_token = next_token
        self.tokens = {}  # request id -> prompt and output
        self.finish = {}
        self.pooling = set()  # seq_ids
        self.embeddings = {}
        self.first_step = {}  # request id -> the step of its first token
        self.token_steps = {}
        self.ranks = {}  # seq_id -> token ids, as a rank would know them
        self.blocks = {}  # seq_id -> block ids
        self.kv = {}  # (block, offset) -> the token prefix whose KV it holds
        self.in_flight = deque()  # results that the scheduler has not been told

    def add(self, req, now=0.0):
        self.scheduler.add(req, now)
        self.tokens[req.request_id] = list(req.prompt_token_ids)

    def step(self):
        s = self.scheduler
        s.check_integrity()
        plan = s.schedule()
        s.check_integrity()
        if plan is None:
            assert self.in_flight or not s.has_unfinished(), "work is left and nothing is scheduled"
        else:
            self.execute(plan)
        if self.in_flight and (plan is None or len(self.in_flight) == s.max_in_flight):
            self.take_in(self.in_flight.popleft())
        return plan

    def execute(self, plan):
        """What ranks do. Plans are executed in order, so doing it at once is as good as doing it in a pipeline."""
        s = self.scheduler
        assert plan.num_tokens <= s.max_num_batched_tokens
        assert plan.scheduled or plan.released
        for seq_id in plan.released:
            del self.ranks[seq_id], self.blocks[seq_id]
        for new in plan.new:
            assert new.seq_id not in self.ranks
            if new.pooling:
                self.pooling.add(new.seq_id)
            if new.pooling == "mean" or (
                new.sampling.prompt_logprobs is not None and not new.token_ids[new.num_prompt_tokens :]
            ):
                first = next(s for s in plan.scheduled if s.seq_id == new.seq_id)
                assert first.num_computed_tokens == 0, "positions that were to be read come from a cache"
            self.ranks[new.seq_id], self.blocks[new.seq_id] = list(new.token_ids), []
        for share in plan.scheduled:
            self.ranks[share.seq_id] += share.new_token_ids
            self.blocks[share.seq_id] += share.new_block_ids
        # As on a rank: within a step all keys and values are written before any are read.
        for share in plan.scheduled:
            tokens, blocks = self.ranks[share.seq_id], self.blocks[share.seq_id]
            for i in range(share.num_computed_tokens, share.num_computed_tokens + share.num_tokens):
                self.kv[blocks[i // s.block_size], i % s.block_size] = tuple(tokens[: i + 1])
        drawn, pooled, deferred = [], [], []
        for share in plan.scheduled:
            tokens, blocks = self.ranks[share.seq_id], self.blocks[share.seq_id]
            for i in range(share.num_computed_tokens + share.num_tokens):
                assert self.kv[blocks[i // s.block_size], i % s.block_size] == tuple(tokens[: i + 1]), (
                    "wrong KV is read"
                )
            assert share.sample == (share.num_computed_tokens + share.num_tokens == len(tokens))
            if share.sample and share.seq_id in self.pooling:
                pooled.append(PooledSequence(share.seq_id, bytes(tokens)))
            elif share.sample:
                self.num_draws += 1
                if self.defers and self.num_draws % self.defers == 0:
                    deferred.append(share.seq_id)
                else:
                    drawn.append(SampledToken(share.seq_id, self.next_token(tokens)))
        self.in_flight.append(StepResult(plan.step_id, tuple(drawn), tuple(pooled), tuple(deferred)))

    def take_in(self, result):
        for output in self.scheduler.update(result):
            assert output.request_id not in self.finish
            self.tokens[output.request_id] += output.token_ids
            self.first_step.setdefault(output.request_id, result.step_id)
            self.token_steps.setdefault(output.request_id, []).append(result.step_id)
            self.embeddings[output.request_id] = output.embedding
            if output.finish_reason:
                self.finish[output.request_id] = output.finish_reason
        self.scheduler.check_integrity()

    def to_the_end(self, limit=20_000):
        for _ in range(limit):
            if not self.scheduler.has_unfinished() and not self.in_flight:
                self.step()  # tells the ranks what to forget
                assert not self.ranks
                assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.stats()}")


def chaotic(tokens):
    return (sum(tokens) * 31 + len(tokens) * 17) % 23  # EOS now and then


def alone(req, max_model_len):
    tokens = list(req.prompt_token_ids)
    end = max_model_len if req.sampling.max_tokens is None else len(tokens) + req.sampling.max_tokens
    while len(tokens) < end:
        tokens.append(chaotic(tokens))
        if tokens[-1] == EOS:
            break
    return tokens


@st.composite
def workloads(draw):
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_blocks = draw(st.integers(3, 40))
    capacity = num_blocks * block_size
    max_model_len = draw(st.integers(2, min(capacity, 120)))
    requests = []
    for i in range(draw(st.integers(1, 12))):
        prompt_len = draw(st.integers(1, max_model_len - 1))
        shared = draw(st.integers(0, prompt_len))
        prompt = [5] * shared + draw(
            st.lists(st.integers(1, 4), min_size=prompt_len - shared, max_size=prompt_len - shared)
        )
        max_tokens = draw(st.none() | st.integers(1, max_model_len - prompt_len))
        told = draw(st.sampled_from([None, None, None, 0]))
        req = request(i, prompt, max_tokens, priority=draw(st.integers(0, 2)), prompt_logprobs=told)
        requests.append(replace(req, pooling=draw(st.sampled_from([None, None, None, "mean", "last"]))))
    return dict(
        scheduler=dict(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.integers(1, 40)),
            enable_prefix_caching=draw(st.booleans()),
            priority_weight=draw(st.sampled_from([0.0, 1.0, 10.0])),
            max_in_flight=draw(st.integers(1, 4)),
        ),
        requests=requests,
        arrivals=draw(st.lists(st.integers(0, 6), min_size=len(requests), max_size=len(requests))),
        aborts=draw(st.dictionaries(st.integers(0, 40), st.integers(0, 11), max_size=4)),
        defers=draw(st.sampled_from([0, 0, 2, 3, 7])),
    )


@given(workloads())
@settings(max_examples=150, deadline=None)
def test_every_request_ends_with_its_own_tokens_and_all_blocks_come_back(work):
    scheduler = make(**work["scheduler"])
    run, aborted, step = Run(scheduler, chaotic, work["defers"]), set(), 0
    todo = list(zip(work["requests"], work["arrivals"], strict=True))
    wait = 0
    while todo or scheduler.has_unfinished():
        while todo and wait >= todo[0][1]:
            run.add(todo.pop(0)[0], now=step * 0.1)
            wait = 0
        wait += 1
        victim = str(work["aborts"].get(step, ""))
        if victim in run.tokens and victim not in run.finish and scheduler.abort(victim):
            aborted.add(victim)
        run.step()
        step += 1
        assert step < 30_000
    run.to_the_end()
    for req in work["requests"]:
        if req.request_id not in aborted:
            right = list(req.prompt_token_ids) if req.pooling else alone(req, scheduler.max_model_len)
            assert run.tokens[req.request_id] == right
            assert run.embeddings[req.request_id] == (bytes(right) if req.pooling else b"")
            assert run.finish[req.request_id] in ("stop", "length")


def test_a_sequence_that_waits_for_its_grammar_holds_up_nobody():
    scheduler = make()
    run = Run(scheduler)
    for name in "ab":
        run.add(request(name, [1, 2, 3], 4, ignore_eos=True))
    for step in range(4):
        plan = scheduler.schedule()
        waits, runs = (share.seq_id for share in plan.scheduled)
        assert plan.scheduled[0].num_computed_tokens == (2 if step else 0)
        outputs = scheduler.update(StepResult(plan.step_id, (SampledToken(runs, 7),), (), (waits,)))
        assert [o.request_id for o in outputs] == ["b"]
        scheduler.check_integrity()
    plan = scheduler.schedule()
    assert [(s.num_computed_tokens, s.num_tokens, s.new_token_ids) for s in plan.scheduled] == [(2, 1, ())]
    (output,) = scheduler.update(StepResult(plan.step_id, (SampledToken(waits, 7),)))
    assert output.request_id == "a" and output.token_ids == (7,)


def test_a_request_that_can_never_fit_is_refused_and_others_go_on():
    scheduler = make(num_blocks=32, block_size=16)  # 512 tokens
    run = Run(scheduler)
    for name, prompt, max_tokens in (("a", 600, 1), ("b", 400, 400), ("c", 512, 1), ("d", 512, None)):
        with pytest.raises(ContextLengthExceeded, match="512"):
            run.add(request(name, prompt, max_tokens))
    for i in range(5):
        run.add(request(i, 8, 4))
    run.to_the_end()
    assert list(run.finish) == [str(i) for i in range(5)]


def test_a_request_may_fill_the_pool_to_the_last_token():
    scheduler = make(num_blocks=32, block_size=16)
    run = Run(scheduler)
    run.add(request("exact", 511, 1))
    run.add(request("long", 400, ignore_eos=True))
    run.to_the_end()
    assert len(run.tokens["exact"]) == len(run.tokens["long"]) == 512
    assert run.finish == {"exact": "length", "long": "length"}


def test_more_work_than_blocks_all_finishes_with_few_preemptions():
    scheduler = make(num_blocks=32, block_size=16, max_num_batched_tokens=128)
    run = Run(scheduler)
    for i in range(8):
        run.add(request(i, [i + 1] * 120, 300, ignore_eos=True))
    run.to_the_end()
    stats = scheduler.stats()
    assert len(run.finish) == 8
    assert 0 < stats.num_preemptions <= 16
    assert stats.num_running == stats.num_waiting == stats.num_used_blocks == 0


def test_a_pool_smaller_than_the_context_is_refused_at_start():
    with pytest.raises(ConfigError, match="max_model_len is 513 tokens but the KV pool holds 512"):
        make(num_blocks=32, block_size=16, max_model_len=513)


def test_short_prompts_do_not_wait_for_a_long_one():
    scheduler = make(num_blocks=200, block_size=16, max_num_seqs=16, max_num_batched_tokens=64)
    run = Run(scheduler)
    run.add(request("long", 1500, 1))
    for _ in range(3):
        run.step()
    for i in range(10):
        run.add(request(i, [i + 2] * 8, 4))
    begin = scheduler.stats().num_steps
    run.to_the_end()
    assert max(run.first_step[str(i)] for i in range(10)) - begin <= 6  # 80 tokens through half of 64 a step
    assert run.first_step["long"] <= 1500 / 32 + 12


def test_decodes_keep_emitting_under_a_stream_of_prompts():
    scheduler = make(num_blocks=400, block_size=16, max_num_seqs=32, max_num_batched_tokens=64)
    run = Run(scheduler)
    for i in range(4):
        run.add(request(f"decode{i}", [i + 1] * 8, 100, ignore_eos=True))
    for step in range(120):
        if step % 4 == 0:
            run.add(request(f"prompt{step}", [step % 90 + 1] * 300, 1))
        run.step()
    for i in range(4):
        steps = run.token_steps[f"decode{i}"]
        assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) == 1
    run.to_the_end()


def test_a_long_prompt_finishes_while_short_ones_flood():
    scheduler = make(num_blocks=400, block_size=16, max_num_seqs=16, max_num_batched_tokens=64)
    run = Run(scheduler)
    run.add(request("long", 1500, 1))
    for step in range(80):
        for i in range(4):  # 4 x 32 tokens a step: twice what fits
            run.add(request(f"{step}-{i}", [step % 90 + 2, i] * 16, 1))
        run.step()
    assert run.first_step["long"] <= 1500 / 32 + 2
    run.to_the_end()


def test_more_decodes_than_the_budget_take_turns():
    scheduler = make(num_blocks=100, block_size=4, max_num_seqs=20, max_num_batched_tokens=8)
    run = Run(scheduler)
    for i in range(20):
        run.add(request(i, [i + 1], 10, ignore_eos=True))
    run.to_the_end()
    for i in range(20):
        steps = run.token_steps[str(i)]
        assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= 4


def test_a_higher_priority_starts_at_once_and_its_victim_is_unchanged():
    scheduler = make(max_num_seqs=2, num_blocks=300)
    run = Run(scheduler, chaotic_no_eos)
    for i in range(2):
        run.add(request(f"low{i}", [i + 1] * 4, 500, priority=10, ignore_eos=True), now=i)
    for _ in range(50):
        run.step()
    run.add(request("high", [9] * 4, 5, priority=0), now=5.0)
    run.step()
    assert run.first_step["high"] == scheduler.stats().num_steps - 1
    run.to_the_end()
    assert scheduler.stats().num_preemptions == 1
    for i in range(2):
        assert run.tokens[f"low{i}"] == expected_chaotic([i + 1] * 4, 500)


def test_a_higher_priority_preempts_for_blocks_too():
    scheduler = make(num_blocks=10, block_size=4, max_num_seqs=8)
    run = Run(scheduler, chaotic_no_eos)
    run.add(request("low", [1] * 30, 10, priority=1, ignore_eos=True), now=0.0)
    for _ in range(4):
        run.step()
    run.add(request("high", [2] * 30, 2, priority=0, ignore_eos=True), now=1.0)
    run.step()
    assert "high" in run.first_step and "low" not in run.finish
    run.to_the_end()
    assert run.tokens["low"] == expected_chaotic([1] * 30, 10)


def test_equal_priorities_are_first_come_first_served():
    scheduler = make(max_num_seqs=1, num_blocks=100)
    run = Run(scheduler)
    for i in range(5):
        run.add(request(i, [i + 1] * 4, 3), now=float(i))
    run.to_the_end()
    assert list(run.finish) == ["0", "1", "2", "3", "4"]
    assert scheduler.stats().num_preemptions == 0


def test_a_low_priority_outwaits_a_stream_of_high_ones():
    scheduler = make(max_num_seqs=1, num_blocks=100, priority_weight=10.0)
    run = Run(scheduler)
    run.add(request("low", [1] * 4, 2, priority=1), now=0.0)
    for second in range(40):
        run.add(request(f"high{second}", [2] * 4, 2), now=float(second))
        run.step()
    # Ten seconds outweigh one level: it goes before the high one that came in its eleventh second.
    finished = list(run.finish)
    assert finished.index("low") <= 11


def test_sequences_that_share_a_prefix_compute_it_once():
    scheduler = make(num_blocks=400, block_size=16, max_num_seqs=16, max_num_batched_tokens=256)
    run = Run(scheduler)
    for i in range(16):
        run.add(request(i, [5] * 1024 + [i + 10] * 32, 4, ignore_eos=True))
    computed = 0
    while scheduler.has_unfinished():
        computed += run.step().num_tokens
    run.to_the_end()
    assert computed <= 1024 + 16 * (32 + 4) + 64


def test_a_cache_salt_keeps_prefixes_apart():
    scheduler = make()
    run = Run(scheduler)
    for salt in ("a", "b", "a"):
        req = Request(
            f"{salt}{scheduler.stats().num_steps}", (3,) * 17, SamplingParams(max_tokens=1, seed=0), cache_salt=salt
        )
        run.add(req)
        run.to_the_end()
    assert scheduler.stats().prefix_cache_hits == 16  # the second "a" alone


def test_min_tokens_stop_tokens_and_ignore_eos():
    cases = {
        "eos": (dict(max_tokens=9), [EOS], "stop"),
        "min": (dict(max_tokens=9, min_tokens=3), [EOS, EOS, EOS], "stop"),
        "ignore": (dict(max_tokens=3, ignore_eos=True), [EOS, EOS, EOS], "length"),
        "token": (dict(max_tokens=9, stop_token_ids=(EOS,), ignore_eos=True), [EOS], "stop"),
    }
    run = Run(make(), next_token=lambda tokens: EOS)
    for name, (sampling, _, _) in cases.items():
        run.add(request(name, [4, 4], **sampling))
    run.to_the_end()
    for name, (_, output, reason) in cases.items():
        assert (run.tokens[name][2:], run.finish[name]) == (output, reason), name


def test_bad_requests_are_refused():
    scheduler = make()
    with pytest.raises(InvalidRequest, match="no tokens"):
        scheduler.add(request("empty", []), 0.0)
    scheduler.add(request("twice", 3, 1), 0.0)
    with pytest.raises(InvalidRequest, match="in use"):
        scheduler.add(request("twice", 3, 1), 0.0)
    assert not scheduler.abort("unknown")


def test_a_late_token_of_an_aborted_sequence_is_dropped():
    scheduler = make(max_num_seqs=1)
    scheduler.add(request("low", 3, 5, priority=5), 0.0)
    plan = scheduler.schedule()
    scheduler.abort("low")
    scheduler.check_integrity()
    late = StepResult(plan.step_id, (SampledToken(plan.scheduled[0].seq_id, 7),))
    assert scheduler.update(late) == []
    assert scheduler.schedule().released == (plan.scheduled[0].seq_id,)
    scheduler.check_integrity()


def test_who_is_in_flight_is_preempted_only_when_its_step_is_back():
    scheduler = make(max_num_seqs=1, max_in_flight=2)
    scheduler.add(request("low", 3, 5, priority=5), 0.0)
    plan = scheduler.schedule()
    low = plan.scheduled[0].seq_id
    scheduler.add(request("high", 3, 1), 0.1)
    assert scheduler.schedule() is None
    (output,) = scheduler.update(StepResult(plan.step_id, (SampledToken(low, 7),)))
    assert (output.request_id, output.token_ids) == ("low", (7,))
    after = scheduler.schedule()
    assert after.released == (low,) and [new.num_prompt_tokens for new in after.new] == [3]
    scheduler.check_integrity()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_decodes_of_a_pipeline_are_dealt_out_evenly(stages):
    run = Run(make(num_blocks=256, max_num_seqs=16, max_in_flight=stages))
    for i in range(13):
        run.add(request(i, [i + 1], 40, ignore_eos=True))
    sizes = [plan.num_tokens for plan in (run.step() for _ in range(60)) if plan is not None]
    settled = sizes[4 * stages : -2 * stages]
    assert min(settled) > 0 and max(settled) - min(settled) <= 1
    run.to_the_end()


def test_a_long_prompt_of_a_pipeline_is_cut_for_all_its_stages():
    run = Run(make(num_blocks=256, max_num_batched_tokens=512, max_in_flight=2))
    run.add(request("long", [9] * 400, 2))
    assert [run.step().num_tokens for _ in range(2)] == [200, 200]
    run.to_the_end()
    short = Run(make(max_num_batched_tokens=512, max_in_flight=4))
    short.add(request("short", [9] * 60, 2))
    assert short.step().num_tokens == 60
    short.to_the_end()


def chaotic_no_eos(tokens):
    return (sum(tokens) * 31 + len(tokens) * 17) % 23 + 1


def expected_chaotic(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(chaotic_no_eos(tokens))
    return tokens


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_what_is_pooled_ends_with_its_prompt_and_cached_positions_are_read_again(max_in_flight):
    driver = Run(make(max_num_batched_tokens=16, max_in_flight=max_in_flight))
    driver.add(request("first", 40, max_tokens=2))
    driver.to_the_end()
    for name, pooling in (("mean", "mean"), ("last", "last")):
        driver.add(Request(name, tuple(range(1, 41)), SamplingParams(max_tokens=1, seed=0), pooling=pooling))
    driver.add(request("told", 40, max_tokens=3, prompt_logprobs=0))
    driver.add(request("other", [9] * 30, max_tokens=2))
    driver.to_the_end()
    for name in ("mean", "last"):
        assert driver.embeddings[name] == bytes(range(1, 41)) and driver.finish[name] == "stop"
        assert len(driver.tokens[name]) == 40
    assert driver.tokens["told"][40:] == [7] * 3 and driver.tokens["other"][30:] == [7] * 2
    assert driver.first_step["last"] < driver.first_step["mean"], "its prefix was there"


def test_what_is_pooled_survives_preemption():
    driver = Run(make(num_blocks=24, max_num_batched_tokens=16))
    driver.add(Request("pooled", tuple(range(1, 81)), SamplingParams(max_tokens=1, seed=0), pooling="mean"), 100.0)
    for _ in range(3):
        driver.step()
    driver.add(request("urgent", [9] * 60, max_tokens=4), 0.0)
    driver.to_the_end()
    assert driver.scheduler.stats().num_preemptions == 1
    assert driver.embeddings["pooled"] == bytes(range(1, 81)) and driver.tokens["urgent"][60:] == [7] * 4
