"""Blocks that come from elsewhere and go elsewhere, while sequences run: nobody ever reads what is not theirs."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from test_step import Run, alone, chaotic, make, request, workloads

from pagedray.scheduler.block_pool import BlockPool, hash_prompt, root_hash
from pagedray.scheduler.kv_fetch import KVSource
from pagedray.scheduler.kv_publish import Publisher
from pagedray.scheduler.request import Request, SamplingParams

ROOT = root_hash("")


class Traffic(Run):
    """A run whose ranks also fill and hand out blocks, as late and as incompletely as `rng` likes."""

    def __init__(self, scheduler, rng, next_token=chaotic):
        super().__init__(scheduler, next_token)
        self.rng = rng
        self.now = 0.0
        self.fetching, self.publishing = [], []
        self.prefixes = {}  # block hash → the tokens up to its end, of all prompts
        self.published = {}  # block hash → parent
        self.num_fetched = 0

    def add(self, req, now=0.0):
        super().add(req, now)
        self.know(req.prompt_token_ids)

    def know(self, tokens):
        size = self.scheduler.block_size
        for i, block_hash in enumerate(hash_prompt(tokens, size, ROOT)):
            self.prefixes[block_hash] = tuple(tokens[: (i + 1) * size])

    def write(self, block, block_hash, garbage):
        size = self.scheduler.block_size
        tokens = self.prefixes[block_hash]
        for i in range(size):
            self.kv[block, i] = "garbage" if garbage else tokens[: len(tokens) - size + i + 1]

    def step(self):
        scheduler, rng = self.scheduler, self.rng
        self.now += 0.5
        scheduler.check_integrity()
        for tokens in self.tokens.values():
            self.know(tokens)
        for order in scheduler.take_fetches(self.now):
            assert not {b for b, _ in self.fetching for b in b.block_ids} & set(order.block_ids)
            self.fetching.append((order, rng.randint(0, 30)))
        for item in list(self.fetching):
            order, left = item
            self.fetching.remove(item)
            if left:  # half written, as far as anybody may tell
                for block, block_hash in zip(order.block_ids, order.hashes, strict=True):
                    self.write(block, block_hash, garbage=True)
                self.fetching.append((order, left - 1))
                continue
            count = rng.choice([0, len(order.hashes), rng.randint(0, len(order.hashes))])
            for i, (block, block_hash) in enumerate(zip(order.block_ids, order.hashes, strict=True)):
                self.write(block, block_hash, garbage=i >= count)
            self.num_fetched += count
            scheduler.end_fetch(order.fetch_id, count)
        if scheduler.publisher is not None:
            if self.rng.random() < 0.1:
                scheduler.publish_running()
            scheduler.publisher.sweep()
            self.publishing += [(p, rng.randint(0, 20)) for p in scheduler.publisher.take()]
            for item in list(self.publishing):
                publication, left = item
                self.publishing.remove(item)
                if left:
                    self.publishing.append((publication, left - 1))
                else:
                    self.read(publication)
        if scheduler.has_unfinished() or self.in_flight or scheduler.fetches.users():
            plan = scheduler.schedule()
            if plan is not None:
                self.execute(plan)
            if self.in_flight and (plan is None or len(self.in_flight) == scheduler.max_in_flight):
                self.take_in(self.in_flight.popleft())
        scheduler.check_integrity()

    def read(self, publication):
        """What is handed out is what its hash says, and the store knows what it follows."""
        parent = publication.parent
        for block, block_hash in zip(publication.block_ids, publication.hashes, strict=True):
            tokens, size = self.prefixes[block_hash], self.scheduler.block_size
            assert len(tokens) <= publication.num_tokens_before + len(publication.hashes) * size
            for i in range(size):
                assert self.kv[block, i] == tokens[: len(tokens) - size + i + 1], "wrong KV is published"
            self.published[block_hash] = parent
            parent = block_hash
        self.scheduler.publisher.end(publication.publication_id, self.rng.random() < 0.8)

    def to_the_end(self, limit=5_000):
        for _ in range(limit):
            busy = self.scheduler.has_unfinished() or self.in_flight or self.fetching or self.publishing
            self.step()
            if not busy and not self.fetching and not self.publishing and not self.scheduler.is_publishing:
                break
        else:
            raise AssertionError(f"not done after {limit} steps: {self.scheduler.stats()}")
        self.scheduler.schedule()
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks


@given(workloads(), st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_fetches_and_publications_never_change_what_is_generated(work, rng, run_blocks):
    def publisher(pool):
        return Publisher(pool, run_blocks, min_tokens=8, min_run_tokens=1)

    scheduler = make(**work["scheduler"], publisher=publisher, kv_fetch_timeout=5.0)
    run = Traffic(scheduler, rng)
    todo = list(work["requests"])
    aborted = set()
    step = 0
    while todo or scheduler.has_unfinished():
        if todo and rng.random() < 0.4:
            req = todo.pop(0)
            source = KVSource("s", rng.randint(0, 40), rng.random()) if rng.random() < 0.7 else None
            run.add(
                Request(req.request_id, req.prompt_token_ids, req.sampling, priority=req.priority, kv_source=source),
                run.now,
            )
        victim = str(work["aborts"].get(step, ""))
        if victim in run.tokens and victim not in run.finish and scheduler.abort(victim):
            aborted.add(victim)
        run.step()
        step += 1
        assert step < 5_000, "somebody waits for ever"
    run.to_the_end()
    for req in work["requests"]:
        if req.request_id not in aborted:
            assert run.tokens[req.request_id] == alone(req, scheduler.max_model_len)


def fetched(prompt, num_blocks, name="r", **fields):
    sampling = SamplingParams(max_tokens=1, seed=0)
    return Request(name, tuple(prompt), sampling, kv_source=KVSource("s", num_blocks, 0.0), **fields)


def test_who_waits_for_blocks_holds_nobody_up_and_shares_them_when_they_come():
    scheduler = make(block_size=4, max_num_seqs=2)
    run = Run(scheduler)
    prompt = tuple(range(1, 22))
    run.add(fetched(prompt, 5, "first"))
    run.add(fetched(prompt, 5, "second"))
    run.add(request("other", [9] * 6, max_tokens=2))
    (order,) = scheduler.take_fetches(0.0)  # one for both
    assert len(order.hashes) == 5 and scheduler.stats().num_waiting_for_kv == 1
    for _ in range(2):
        run.step()
    assert run.finish == {"other": "length"}
    run.execute(scheduler.schedule())  # tells the ranks to forget it
    run.take_in(run.in_flight.popleft())
    assert scheduler.schedule() is None  # nothing to do but wait
    for at in range(20):
        run.kv[order.block_ids[at // 4], at % 4] = prompt[: at + 1]
    scheduler.end_fetch(order.fetch_id, 5)
    plan = run.step()
    assert [(s.num_computed_tokens, s.num_tokens) for s in plan.scheduled] == [(20, 1), (20, 1)]


def test_after_its_deadline_a_prefix_is_computed_and_the_blocks_come_back_only_when_the_ranks_say_so():
    scheduler = make(num_blocks=32, block_size=4)
    scheduler.add(fetched(range(1, 22), 5), now=10.0)
    (order,) = scheduler.take_fetches(10.0)
    assert scheduler.schedule() is None
    assert order.deadline == 11.0  # a second of slack over what was reckoned
    assert not scheduler.take_fetches(11.0)
    plan = scheduler.schedule()
    assert plan.num_tokens == 21 and not set(plan.scheduled[0].new_block_ids) & set(order.block_ids)
    scheduler.end_fetch(order.fetch_id, 5)  # late, but good: what is here already stays
    scheduler.check_integrity()
    assert scheduler.pool.num_cached == 5


def test_without_room_nothing_is_fetched():
    scheduler = make(num_blocks=6, block_size=4)
    scheduler.add(request("a", 20, max_tokens=4), 0.0)
    scheduler.schedule()
    scheduler.add(fetched([5] * 12, 2, "b"), 0.0)
    assert not scheduler.take_fetches(0.0)
    scheduler.check_integrity()


def test_what_steps_in_flight_may_write_is_not_filled_before_they_are_back():
    scheduler = make(num_blocks=16, block_size=4, max_in_flight=2)
    run = Run(scheduler)
    run.add(request("a", 30, max_tokens=4))
    run.execute(scheduler.schedule())
    scheduler.abort("a")  # its blocks are free; a step that writes them is under way
    scheduler.add(fetched([5] * 40, 9, "b"), 0.0)
    assert not scheduler.take_fetches(0.0)
    run.take_in(run.in_flight.popleft())
    assert len(scheduler.take_fetches(0.0)) == 1


# -- publishing -----------------------------------------------------------------------------------------------------


def cached(pool, hashes):
    blocks = pool.allocate(len(hashes))
    for i, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
        pool.cache(block, block_hash, hashes[i - 1] if i else None)
    pool.release(blocks)
    return blocks


def chain(name, count):
    return [f"{name}{i}".encode() for i in range(count)]


def test_long_prefixes_are_offered_at_once_in_even_runs_and_short_ones_when_seen_again():
    pool = BlockPool(64, 4)
    publisher = Publisher(pool, run_blocks=4, min_tokens=32, min_run_tokens=8)
    long, short = chain("long", 9), chain("short", 5)
    blocks = cached(pool, long)
    cached(pool, short)
    publisher.computed(long, 0)
    runs = publisher.take()
    assert [len(r.hashes) for r in runs] == [3, 3, 3] and [r.parent for r in runs] == [None, long[2], long[5]]
    assert [b for r in runs for b in r.block_ids] == blocks and [r.num_tokens_before for r in runs] == [0, 12, 24]
    assert pool.num_free == 64 - 9
    publisher.computed(short, 0)
    publisher.computed(long, 9)
    assert not publisher.take()
    publisher.computed(short, 3)
    (run,) = publisher.take()
    assert list(run.hashes) == short[:3]
    for r in (*runs, run):
        publisher.end(r.publication_id)
    assert pool.num_free == 64
    publisher.forget(long[6:])
    publisher.computed(long, 9)
    (again,) = publisher.take()
    assert list(again.hashes) == long[6:] and again.parent == long[5]
    publisher.check_integrity()


def test_what_is_about_to_be_evicted_is_offered():
    pool = BlockPool(8, 4)
    publisher = Publisher(pool, run_blocks=4, min_tokens=1000, min_run_tokens=8)
    hashes = chain("p", 2)
    cached(pool, hashes)
    for _ in range(2):
        publisher.sweep()
    (run,) = publisher.take()
    assert list(run.hashes) == hashes
    publisher.check_integrity()


def test_what_was_not_taken_is_offered_with_its_next_use():
    pool = BlockPool(8, 4)
    publisher = Publisher(pool, run_blocks=4, min_tokens=8, min_run_tokens=8)
    hashes = chain("p", 2)
    cached(pool, hashes)
    publisher.computed(hashes, 0)
    publisher.end(publisher.take()[0].publication_id, taken=False)
    publisher.sweep()
    assert not publisher.take()  # that it is about to go is no use
    publisher.computed(hashes, 0)
    assert len(publisher.take()) == 1


def test_a_quarter_of_the_pool_travels_at_most_and_the_rest_follows():
    pool = BlockPool(16, 4)
    publisher = Publisher(pool, run_blocks=3, min_tokens=4, min_run_tokens=4)
    names = [chain("a", 5), chain("b", 3)]
    for hashes in names:
        cached(pool, hashes)
        publisher.computed(hashes, 0)
    given, under_way = [], publisher.take()
    while under_way:
        publisher.check_integrity()
        run = under_way.pop(0)
        given.append(run)
        publisher.end(run.publication_id)
        under_way += publisher.take()
    assert [h for run in given for h in run.hashes] == [h for hashes in names for h in hashes]
    assert [len(run.hashes) for run in given] == [3, 2, 3] and pool.num_free == 16


def test_offers_are_remembered_within_bounds():
    pool = BlockPool(16, 4)
    publisher = Publisher(pool, run_blocks=4, min_tokens=4, min_run_tokens=4)
    rng = random.Random(0)
    for i in range(200):
        hashes = chain(f"{i}-", rng.randint(1, 4))
        cached(pool, hashes)
        publisher.computed(hashes, 0)
        for run in publisher.take():
            publisher.end(run.publication_id)
        publisher.check_integrity()
        pool.check_integrity()
