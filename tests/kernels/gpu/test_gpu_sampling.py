"""Greedy choice and sampling in Triton: the tokens that the oracle gives."""

import pytest
import torch

from pagedray.kernels import reference
from pagedray.kernels.gpu import sampling

VOCAB = 700
FILTERS = [
    dict(),
    dict(top_k=1),
    dict(top_k=50),
    dict(top_k=VOCAB + 7),
    dict(top_k=VOCAB - 1, top_p=0.999),
    dict(top_p=0.9),
    dict(top_p=0.9999999),
    dict(top_p=0.0),
    dict(min_p=0.1),
    dict(min_p=1.0),
    dict(top_k=50, top_p=0.9, min_p=0.02),
    dict(temperature=0.5, top_p=0.95),
    dict(temperature=100.0, top_p=0.99),
    dict(temperature=9e-6),
]


def columns(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return [*(torch.full((rows,), value) for value in (temperature, top_k, top_p, min_p)), uniform]


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_what_the_oracle_draws(randn, filters, ties):
    logits = randn(2, VOCAB) * 3
    logits = logits.round() if ties else logits
    params = columns(2, **filters)
    assert torch.equal(sampling.sample(logits, *params), reference.sample(logits, *params))


def test_a_vocabulary_of_many_tiles(randn, monkeypatch):
    """As real ones are: here in tiles of 128 instead of 1024, with ties over their borders."""
    monkeypatch.setattr(sampling, "_BLOCK", 128)
    logits = (randn(3, VOCAB) * 3).round()
    params = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([300, 0, 0]), torch.tensor([0.99, 0.8, 1.0])]
    params += [torch.tensor([0.0, 0.01, 0.0]), columns(3)[-1]]
    assert torch.equal(sampling.sample(logits, *params), reference.sample(logits, *params))


def kept(logits, n=6, **filters):
    """The ids that a row of logits can give: an even grid of n draws."""
    *params, _ = columns(n, **filters)
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return sorted(set(sampling.sample(logits.expand(n, -1), *params, grid).tolist()))


def test_ties_at_a_cut_keep_the_lowest_ids():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0, 2.0]])
    assert kept(logits, top_k=3) == [0, 1, 5]
    assert kept(logits, top_k=4) == [0, 1, 2, 5]
    assert kept(torch.zeros(1, 100), 8, top_p=0.08) == list(range(8))
    assert kept(torch.tensor([[0.0, -0.0, 0.0, -1.0]]), top_k=2) == [0, 1]  # -0 equals 0


def test_filters_come_in_order():
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    assert kept(logits, top_k=2, top_p=0.5) == [3]
    assert kept(logits, top_p=0.95, min_p=0.6) == [2, 3]
    assert kept(logits, temperature=0.5, top_p=0.5) == [3]


def test_banned_tokens_are_never_drawn():
    logits = torch.full((1, 64), float("-inf"))
    logits[0, 5] = logits[0, 9] = 0.0
    for filters in (dict(top_k=20), dict(top_p=0.99)):
        assert kept(logits, **filters) == [5, 9]


def test_rows_of_all_kinds_together(randn):
    rows = 6
    logits, at = randn(rows, VOCAB) * 3, torch.arange(rows)
    params = [
        torch.tensor([0.0, 0.7, 1.9])[at % 3],
        torch.tensor([0, 5])[at % 2],
        torch.tensor([1.0, 0.9, 0.0, 0.5])[at % 4],
        torch.tensor([0.0, 0.05])[at // 2 % 2],
        columns(rows)[-1],
    ]
    assert torch.equal(sampling.sample(logits, *params), reference.sample(logits, *params))


@pytest.mark.parametrize("vocab", [3, 700, 20_000])
def test_greedy(randn, vocab):
    logits = (randn(3, vocab) * 4).round()  # many equals
    logits[0] = float("-inf")
    assert torch.equal(sampling.greedy(logits), logits.argmax(-1))
    assert sampling.greedy(logits[:0]).tolist() == [] and sampling.sample(logits[:0], *columns(0)).tolist() == []


def test_greedy_over_shards_of_the_vocabulary(randn):
    logits = (randn(3, 700) * 4).round()
    shards = [
        sampling.greedy_shard(part, first) for part, first in zip(logits.split(250, 1), (0, 250, 500), strict=True)
    ]
    values, ids = (torch.cat(parts, dim=1) for parts in zip(*shards, strict=True))
    assert torch.equal(sampling.greedy_combine(values, ids), logits.argmax(-1))
