"""The sampler against plain Python: draws, adjustments in their order, masks, greedy ways, log-probabilities."""

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from pagedray.scheduler.request import MAX_SEED, SamplingParams
from pagedray.workers.sampler import Sampler, SeenTokens, TokenMatcher, draw

VOCAB = 40
EOS = (2, 5)
PROMPT = [7, 7, 8, 9]


@dataclass
class State:
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=lambda: list(PROMPT))
    num_prompt_tokens: int = len(PROMPT)
    index: int = 0
    matcher: TokenMatcher | None = None
    seen: SeenTokens | None = None


def random_logits(rows=1, vocab=VOCAB, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits, *states):
    return Sampler(EOS).sample(logits.clone(), states)


def sample_one(logits, *generated, **sampling):
    tokens, _ = sample(logits, State(SamplingParams(**{"temperature": 0.0, **sampling}), PROMPT + list(generated)))
    return tokens[0]


# -- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moving", ["seed", "index", "position"])
def test_draws_are_uniform_along_each_counter(moving):
    n, bins = 20000, 50
    draws = [draw(**{"seed": 3, "index": 1, "position": 17, moving: i}) for i in range(n)]
    assert all(0.0 <= u < 1.0 for u in draws)
    counts = Counter(int(u * bins) for u in draws)
    chi_square = sum((counts[b] - n / bins) ** 2 / (n / bins) for b in range(bins))
    assert chi_square < 49 + 5 * math.sqrt(2 * 49)  # 49 degrees of freedom; the inputs are fixed: does not flicker
    neighbors = sum((a - 0.5) * (b - 0.5) for a, b in zip(draws, draws[1:], strict=False)) / n
    assert abs(neighbors) < 5 / 12 / math.sqrt(n)  # 5 standard deviations of a product of independent ones


def test_draws_depend_on_nothing_but_their_counters():
    counters = [(s, i, p) for s in (0, 1, -1, 12345, MAX_SEED, -(2**63)) for i in range(5) for p in range(30)]
    draws = {c: draw(*c) for c in counters}
    assert len(set(draws.values())) == len(counters)
    random.Random(0).shuffle(counters)
    assert all(draw(*c) == draws[c] for c in counters)


def test_draws_have_53_random_bits():
    odd = sum(int(draw(0, 0, p) * 2**53) % 2 for p in range(2000))
    assert 850 < odd < 1150
    assert all((draw(0, 0, p) * 2**53).is_integer() for p in range(100))


# -- adjustments and filters ------------------------------------------------------------------------------------------


def oracle(logits, state):
    """The token, and how far the draw was from choosing another; in doubles, one token at a time."""
    p = state.sampling
    generated = state.token_ids[state.num_prompt_tokens :]
    adjusted = []
    for token, value in enumerate(logits):
        value += p.logit_bias.get(token, 0.0)
        is_end = token in p.stop_token_ids or (token in EOS and not p.ignore_eos)
        if is_end and len(generated) < p.min_tokens:
            value = -math.inf
        if token in state.token_ids:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        if token in generated:
            value -= p.presence_penalty + p.frequency_penalty * generated.count(token)
        adjusted.append(value)
    order = sorted(range(len(adjusted)), key=lambda t: -adjusted[t])
    if p.greedy:
        return order[0], adjusted[order[0]] - adjusted[order[1]]
    weights = {t: math.exp((adjusted[t] - adjusted[order[0]]) / p.temperature) for t in order[: p.top_k or None]}
    total, reached, kept, margin = sum(weights.values()), 0.0, {}, math.inf
    for token, weight in weights.items():
        margin = min(margin, abs(reached / total - p.top_p), abs(weight - p.min_p) if p.min_p else math.inf)
        if reached / total < p.top_p and weight >= p.min_p:
            kept[token] = weight
        reached += weight
    target = draw(p.seed, state.index, len(state.token_ids)) * sum(kept.values())
    below, chosen = 0.0, None
    for token in sorted(kept):
        below += kept[token]
        margin = min(margin, abs(below - target))
        if chosen is None and target < below:
            chosen = token
    return chosen, margin


def random_state(rng):
    def sometimes(value, otherwise):
        return value if rng.random() < 0.4 else otherwise

    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
        top_k=sometimes(rng.choice([2, 10, 39, 40, 1000]), 0),
        top_p=sometimes(rng.choice([0.3, 0.9]), 1.0),
        min_p=sometimes(rng.choice([0.02, 0.3]), 0.0),
        repetition_penalty=sometimes(rng.choice([0.5, 1.3, 5.0]), 1.0),
        presence_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        logit_bias=sometimes({t: rng.uniform(-6, 6) for t in rng.sample(range(VOCAB), 8)}, {}),
        min_tokens=sometimes(rng.choice([1, 5, 6, 30]), 0),
        max_tokens=50,
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=sometimes((rng.randrange(VOCAB), rng.randrange(VOCAB), 10**6), ()),
        seed=rng.randrange(-(2**63), 2**63),
        logprobs=sometimes(rng.randrange(4), None),
    )
    tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 15))]
    return State(sampling, tokens, rng.randrange(1, len(tokens) + 1), index=rng.randrange(128))


def test_every_setting_together_against_the_oracle():
    """Batches of sequences that want different things; each must get what it would get alone."""
    rng = random.Random(0)
    for batch in range(40):
        states = [random_state(rng) for _ in range(16)]
        logits = random_logits(len(states), seed=batch)
        if batch % 4 == 0:  # such that no row has to draw
            states = [State(s.sampling.clone(temperature=0.0), s.token_ids, s.num_prompt_tokens) for s in states]
        tokens, _ = sample(logits, *states)
        for row, state, token in zip(logits.tolist(), states, tokens, strict=True):
            expected, margin = oracle(row, state)
            assert token == expected or margin < 1e-5, (batch, state)


def test_logit_bias_forces_and_bans():
    logits = random_logits()
    assert sample_one(logits, logit_bias={31: 100.0}) == 31
    assert sample_one(logits, logit_bias={logits.argmax().item(): -100.0}) == logits[0].topk(2).indices[1]


def test_ends_are_masked_until_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 5, 11]] = torch.tensor([3.0, 2.0, 1.0])
    common = {"min_tokens": 2, "stop_token_ids": (5, 11)}
    assert sample_one(logits, **common) == 0
    assert sample_one(logits, 1, **common) == 0
    assert sample_one(logits, 1, 1, **common) == 2
    assert sample_one(logits, ignore_eos=True, **common) == 2  # ignored, it ends nothing: it may come
    assert sample_one(logits, min_tokens=2) == 11


def test_stop_tokens_outside_the_vocabulary_and_masks_of_everything_leave_a_token():
    logits = random_logits()
    assert sample_one(logits, min_tokens=1, stop_token_ids=(VOCAB, 2**31 - 1)) not in EOS
    for temperature in (0.0, 1.0):
        everything = tuple(range(VOCAB))
        token = sample_one(logits, temperature=temperature, min_tokens=1, stop_token_ids=everything, seed=1)
        assert 0 <= token < VOCAB


def test_seen_tokens_are_those_of_a_growing_sequence():
    rng, token_ids = random.Random(0), [rng_token % 90 for rng_token in range(0, 700, 7)]
    seen, prompt = SeenTokens(num_prompt_tokens=40), token_ids[:40]
    for _ in range(30):
        ids, counts = seen.read(token_ids)
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            token: token_ids[40:].count(token) for token in {*prompt, *token_ids[40:]}
        }
        token_ids += [rng.randrange(300) for _ in range(rng.randrange(9))]
    assert len(ids) > 64  # it has grown


def test_penalties_count_the_right_tokens():
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, [7, 20, 21]] = torch.tensor([3.0, 2.5, 1.5])
    assert sample_one(logits, presence_penalty=2.0, frequency_penalty=2.0) == 7  # the prompt does not count
    assert sample_one(logits, 7, presence_penalty=1.0) == 20
    assert sample_one(logits, 7, 7, 20, presence_penalty=1.6) == 21 and sample_one(logits, 7, 20) == 7
    assert sample_one(logits, 7, 7, 20, frequency_penalty=0.6) == 20  # 1.8, 1.9 and 1.5
    assert sample_one(logits, 20, repetition_penalty=1.5) == 7  # 7 stands in the prompt: 2, 1.67 and 1.5
    assert sample_one(logits, repetition_penalty=1.5) == 20
    logits[0, [7, 20, 21]] = torch.tensor([-1.0, -1.2, -1.4])
    assert sample_one(logits, repetition_penalty=1.3) == 20  # below zero it sinks too


# -- grammars ---------------------------------------------------------------------------------------------------------


class Allows:
    """A matcher that always allows the same tokens, once it is ready: at once, or when it is asked so often again."""

    def __init__(self, *tokens, ready_after=0, num_words=-(-VOCAB // 32)):
        self.tokens = tokens
        self.ready_after, self.num_words = ready_after, num_words
        self.waits = []

    def ready(self, timeout=0.0):
        self.waits.append(timeout)
        return len(self.waits) > self.ready_after

    def allowed(self):
        words = np.zeros(self.num_words, np.uint32)
        for token in self.tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words


class Accepted(list):
    """Grammars that note what they are told."""

    def accept(self, matchers, token_ids):
        self.append([(m.tokens, t) for m, t in zip(matchers, token_ids, strict=True)])


def test_rows_with_a_grammar_keep_to_it_and_others_do_not_notice():
    logits = random_logits(6)
    settings = [SamplingParams(temperature=t, seed=1, logprobs=1) for t in (0.0, 1.0, 2.0) * 2]
    matchers = [Allows(31, num_words=1), None, Allows(0, 39), Allows(*range(VOCAB)), None, Allows(32, 33, 5)]
    free, _ = sample(logits, *map(State, settings))
    grammars = Accepted()
    states = [State(s, matcher=m) for s, m in zip(settings, matchers, strict=True)]
    tokens, logprobs = Sampler(EOS, grammars).sample(logits.clone(), states)
    for token, alone, matcher in zip(tokens, free, matchers, strict=True):
        assert token in matcher.tokens if matcher else token == alone
    assert tokens[3] == free[3]
    assert grammars == [[(m.tokens, t) for m, t in zip(matchers, tokens, strict=True) if m]]
    assert all(got.top[0][0] == row.argmax() for got, row in zip(logprobs, logits, strict=True))  # the model's own


def test_rows_wait_for_their_own_grammar_alone():
    greedy = SamplingParams(temperature=0.0)
    slow, quick = Allows(3, ready_after=3), Allows(4)
    states = [State(greedy, matcher=slow), State(greedy), State(greedy, matcher=quick)]
    sampler = Sampler(EOS, Accepted())
    assert sampler.ready(states) == [1, 2]
    assert sampler.ready(states[:1], patience=0.5) == []
    assert slow.waits == [0.0, 0.0, 0.5]
    assert sampler.ready(states, patience=0.5) == [0, 1, 2]
    assert slow.waits == [0.0, 0.0, 0.5, 0.0]


def test_min_tokens_bans_the_ends_that_a_grammar_allows_among_others():
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 5, 11]] = torch.tensor([3.0, 2.0, 1.0])
    for left, expected in (((2, 5, 11, 33), 11), ((2, 5, 33), 33), ((2, 5), 2), ((5,), 5)):
        state = State(SamplingParams(temperature=0.0, min_tokens=2), matcher=Allows(*left))
        assert Sampler(EOS, Accepted()).sample(logits.clone(), [state])[0] == [expected]


# -- greedy -----------------------------------------------------------------------------------------------------------

GREEDY_WAYS = [
    {"temperature": 0.0},
    {"temperature": 1e-9},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.7, "top_p": 0.0},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.1, "min_p": 0.5},
]


@pytest.mark.parametrize("company", [{}, {"temperature": 1.0}], ids=["all greedy", "amid sampling"])
def test_all_ways_to_be_greedy_are_the_same(company):
    for seed in range(20):
        logits = random_logits(seed=seed).repeat(len(GREEDY_WAYS) + 1, 1)
        states = [State(SamplingParams(seed=seed, **way)) for way in [*GREEDY_WAYS, company or GREEDY_WAYS[0]]]
        tokens, _ = sample(logits, *states)
        assert tokens[: len(GREEDY_WAYS)] == [logits[0].argmax().item()] * len(GREEDY_WAYS)


@pytest.mark.parametrize("company", [{}, {"temperature": 1.0}], ids=["all greedy", "amid sampling"])
def test_of_equals_greedy_takes_the_lowest_id(company):
    logits = torch.zeros(1, VOCAB)
    logits[0, [12, 30, 33]] = 1.0
    states = [State(SamplingParams(seed=1, **way)) for way in [*GREEDY_WAYS, company or GREEDY_WAYS[0]]]
    assert sample(logits.repeat(len(states), 1), *states)[0][: len(GREEDY_WAYS)] == [12] * len(GREEDY_WAYS)


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_unmodified_distribution():
    logits = random_logits(6)
    changing = {"logit_bias": {3: 100.0, 4: -100.0}, "repetition_penalty": 3.0, "presence_penalty": 2.0}
    states = [
        State(SamplingParams(temperature=0.0, logprobs=5)),
        State(SamplingParams(temperature=0.3, top_k=2, seed=1, logprobs=5)),
        State(SamplingParams(temperature=2.0, top_p=0.1, seed=1, logprobs=20)),
        State(SamplingParams(temperature=0.0, logprobs=3, **changing), [*PROMPT, 3, 3]),
        State(SamplingParams(temperature=1.0, seed=1)),
        State(SamplingParams(temperature=0.0, logprobs=0, min_tokens=1, stop_token_ids=tuple(range(1, VOCAB)))),
    ]
    tokens, logprobs = sample(logits, *states)
    assert logprobs[4] is None
    assert tokens[3] == 3 and tokens[5] == 0
    for row, state, token, got in zip(logits.tolist(), states, tokens, logprobs, strict=True):
        if got is None:
            continue
        log_sum = math.log(sum(map(math.exp, row)))
        assert got.logprob == pytest.approx(row[token] - log_sum, abs=1e-5)
        likeliest = sorted(range(VOCAB), key=lambda t: -row[t])[: state.sampling.logprobs]
        assert [t for t, _ in got.top] == likeliest
        assert [v for _, v in got.top] == pytest.approx([row[t] - log_sum for t in likeliest], abs=1e-5)
        assert sum(math.exp(v) for _, v in got.top) <= 1 + 1e-6


def test_logprobs_of_the_impossible_are_finite():
    logits = torch.full((1, 4), -30000.0)
    logits[0, 1] = 0.0
    state = State(SamplingParams(temperature=0.0, logprobs=20, logit_bias={1: -100.0}), [1] * 5, 4)
    _, (got,) = Sampler(()).sample(logits.clone(), [state])
    assert got.top[0] == (1, 0.0) and len(got.top) == 4  # a vocabulary smaller than what was asked for
    assert [v for _, v in got.top[1:]] == [-9999.0] * 3
    state = State(SamplingParams(temperature=0.0, logprobs=0, min_tokens=1, stop_token_ids=(1,)))
    _, (got,) = Sampler(()).sample(logits, [state])
    assert got.logprob == -9999.0 and got.top == ()


def test_the_greedy_token_is_the_first_of_the_top_logprobs_among_equals_too():
    logits = torch.zeros(1, 5000)
    logits[0, [77, 1234, 4000]] = 1.0
    for k in (1, 2, 5):
        tokens, (got,) = sample(logits, State(SamplingParams(temperature=0.0, logprobs=k)))
        assert tokens == [77] and got.top[0][0] == 77


def test_rows_do_not_depend_on_their_company_or_order():
    rng = random.Random(1)
    states = [random_state(rng) for _ in range(24)]
    logits = random_logits(len(states), seed=9)
    together = list(zip(*sample(logits, *states), strict=True))
    order = list(range(len(states)))
    rng.shuffle(order)
    shuffled = list(zip(*sample(logits[order], *(states[i] for i in order)), strict=True))
    assert [shuffled[order.index(i)] for i in range(len(states))] == together
    for i, state in enumerate(states):
        (token,), (logprobs,) = sample(logits[i : i + 1], state)
        assert (token, logprobs) == together[i]
