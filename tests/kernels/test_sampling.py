"""Sampling, greedy and log-probabilities: exact inverse CDF, filters and their ties, rows and their company."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from pagedray.kernels import ops, reference

VOCAB = 5000


@pytest.fixture
def sample(backend):
    """sample(logits, **parameters), scalars being the same for every row."""

    def run(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5):
        rows = len(logits)

        def column(value, dtype):
            return value.to(dtype) if isinstance(value, torch.Tensor) else torch.full((rows,), value, dtype=dtype)

        return backend.sample(
            logits,
            column(temperature, torch.float32),
            column(top_k, torch.int64),
            column(top_p, torch.float32),
            column(min_p, torch.float32),
            column(uniform, torch.float64),
        )

    return run


def random_logits(rows, vocab=VOCAB, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def grid(n):
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def kept(sample, logits, **parameters):
    """The ids that a row of logits can give."""
    n = 400
    return sorted(set(sample(logits.expand(n, -1), uniform=grid(n), **parameters).tolist()))


def test_draws_are_the_inverse_cdf_in_id_order(sample):
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.0, 0.3, 0.4]]))
    expected = {0.0: 0, 0.0999: 0, 0.1001: 1, 0.2999: 1, 0.3001: 3, 0.5999: 3, 0.6001: 4, 1 - 2**-53: 4}
    uniform = torch.tensor(list(expected), dtype=torch.float64)
    assert sample(logits.expand(len(expected), -1), uniform=uniform).tolist() == list(expected.values())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_frequencies_over_a_grid_are_the_probabilities(sample, temperature):
    """An even grid of uniforms must hit each token as often as its probability says, to one draw."""
    n = 1000
    logits = random_logits(1, 300)
    counts = torch.bincount(sample(logits.expand(n, -1), temperature, uniform=grid(n)), minlength=300)
    expected = (logits[0] / temperature).double().softmax(-1) * n
    assert (counts - expected).abs().max() < 1.01


@pytest.mark.parametrize(
    "filters", [dict(top_k=7), dict(top_p=0.7), dict(min_p=0.05), dict(top_k=40, top_p=0.8)], ids=str
)
def test_random_draws_pass_chi_square(sample, filters):
    n, logits = 3000, random_logits(1, 60, seed=5)
    uniform = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(sample(logits.expand(n, -1), uniform=uniform, **filters), minlength=60).double()
    p = filtered(logits[0].double().numpy(), **filters)
    assert counts[torch.tensor(p == 0)].sum() == 0
    expected = torch.tensor(p[p > 0] * n)
    chi_square = ((counts[torch.tensor(p > 0)] - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees) + 5  # the seed is fixed: this does not flicker


def filtered(x, top_k=0, top_p=1.0, min_p=0.0):
    """The filtered distribution, written down once more from its definition."""
    p = np.exp(x - x.max())
    order = np.argsort(-x, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[1:][before[1:] >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


FILTERS = [
    dict(top_k=1),
    dict(top_k=50),
    dict(top_k=VOCAB),
    dict(top_k=VOCAB + 7),
    dict(top_k=VOCAB - 1, top_p=0.999),
    dict(top_p=0.9),
    dict(top_p=0.9999999),  # nearly all tokens: more than the first selection holds
    dict(top_p=0.0),
    dict(min_p=0.1),
    dict(min_p=1.0),
    dict(top_k=50, top_p=0.9, min_p=0.02),
    dict(temperature=0.5, top_p=0.95),
    dict(temperature=100.0, top_p=0.99),
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_native_draws_what_the_oracle_draws(native, filters):
    n = 30
    logits = random_logits(n)
    uniform = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    values = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) | filters
    params = [torch.full((n,), value) for value in values.values()]
    assert torch.equal(native.sample(logits, *params, uniform), reference.sample(logits, *params, uniform))


def test_ties_at_a_cut_keep_the_lowest_ids(sample):
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0, 2.0]])
    assert kept(sample, logits, top_k=1) == [1]
    assert kept(sample, logits, top_k=3) == [0, 1, 5]
    assert kept(sample, logits, top_k=4) == [0, 1, 2, 5]
    assert kept(sample, torch.zeros(1, 700), top_k=9) == list(range(9))
    assert kept(sample, torch.zeros(1, 1000), top_p=0.11) == list(range(110))


def test_filters_come_in_order(sample):
    # Of 0.4, 0.3, 0.2, 0.1, top-k 2 leaves 4/7 and 3/7: top-p 0.5 of that needs one, of the whole it would need two.
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    assert kept(sample, logits, top_k=2, top_p=0.5) == [3]
    assert kept(sample, logits, top_p=0.5) == [2, 3]
    assert kept(sample, logits, top_p=0.95, min_p=0.6) == [2, 3]
    # The temperature comes first: squared, the four are 16 : 9 : 4 : 1.
    assert kept(sample, logits, temperature=0.5, top_p=0.5) == [3]


def test_extreme_parameters_keep_the_likeliest(sample):
    logits = random_logits(4)
    likeliest = logits.argmax(-1)
    for parameters in (dict(top_p=0.0), dict(top_k=1), dict(min_p=1.0), dict(temperature=0.0), dict(temperature=9e-6)):
        for uniform in (0.0, 0.5, 1 - 2**-53):
            assert torch.equal(sample(logits, uniform=uniform, **parameters), likeliest), parameters


def test_banned_tokens_are_never_drawn(sample):
    logits = torch.full((1, 64), float("-inf"))
    logits[0, 5] = logits[0, 9] = 0.0
    for filters in (dict(), dict(top_k=20), dict(top_p=0.99), dict(min_p=0.1), dict(top_k=20, top_p=0.999)):
        assert kept(sample, logits, **filters) == [5, 9]


def test_a_row_is_the_same_in_any_company(sample):
    """Greedy, filtered and unfiltered rows together, in any order, give what each gives alone."""
    rows = 24
    logits = random_logits(rows)
    pattern = torch.arange(rows)
    columns = dict(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.9])[pattern % 4],
        top_k=torch.tensor([0, 5, 3000])[pattern % 3],
        top_p=torch.tensor([1.0, 0.9, 0.0, 0.99999, 0.5])[pattern % 5],
        min_p=torch.tensor([0.0, 0.05])[pattern // 2 % 2],
        uniform=grid(rows),
    )
    together = sample(logits, **columns)
    assert torch.equal(together[columns["temperature"] == 0], logits[columns["temperature"] == 0].argmax(-1))
    backwards = sample(logits.flip(0), **{name: column.flip(0) for name, column in columns.items()})
    assert torch.equal(backwards.flip(0), together)
    for r in range(rows):
        alone = sample(logits[r : r + 1], **{name: column[r : r + 1] for name, column in columns.items()})
        assert alone.item() == together[r].item()


def test_an_empty_batch_gives_nothing(sample):
    assert sample(torch.empty(0, 10)).tolist() == []


@pytest.mark.parametrize(("vocab", "words"), [(64, 2), (70, 3), (70, 2), (1, 1), (33, 4), (5000, 157), (5, 0)])
def test_mask_tokens(backend, vocab, words):
    """Rows in any order; words that are full, empty and mixed; a vocabulary that ends within a word, or after them."""
    rows = torch.tensor([3, 0, 2])
    bits = torch.rand(3, 32 * words, generator=torch.Generator().manual_seed(vocab)) < 0.5
    bits[0] |= torch.arange(32 * words) // 32 % 2 == 0
    bits[1] &= torch.arange(32 * words) // 32 % 2 == 0
    allowed = (bits.view(3, words, 32).long() << torch.arange(32)).sum(-1).to(torch.int32)  # a set bit 31 is negative
    logits = random_logits(5, vocab + 3)[:, :vocab]  # rows apart from each other
    expected = logits.clone()
    for row, mask in zip(rows.tolist(), bits, strict=True):
        for token in range(vocab):
            if token >= 32 * words or not mask[token]:
                expected[row, token] = float("-inf")
    backend.mask_tokens(logits, rows, allowed)
    assert torch.equal(logits, expected)


def test_mask_tokens_of_no_row_and_of_wrong_tensors(native):
    logits = random_logits(2, 64)
    native.mask_tokens(logits, torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int32))
    assert torch.equal(logits, random_logits(2, 64))
    for rows, allowed in (([0, 1], torch.zeros(1, 2, dtype=torch.int32)), ([0], torch.zeros(1, 2))):
        with pytest.raises(ValueError, match="mask_tokens"):
            native.mask_tokens(logits, torch.tensor(rows), allowed)


def test_greedy_takes_the_lowest_of_equals():
    assert ops.greedy(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0]])).tolist() == [1, 0]


def test_log_probs():
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, float("-inf"), 5.0]])
    chosen, values, ids = ops.log_probs(logits, torch.tensor([0, 1]), 2)
    expected = logits.log_softmax(-1)
    assert_close(chosen, torch.tensor([expected[0, 0].item(), -9999.0]))
    assert_close(values, torch.tensor([[expected[0, 2], expected[0, 1]], [math.log(0.5)] * 2]))
    assert ids[0].tolist() == [2, 1] and sorted(ids[1].tolist()) == [0, 2]
    assert ops.log_probs(logits, torch.tensor([0, 1]), 0)[1].shape == (2, 0)
