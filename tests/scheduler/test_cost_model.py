"""Coefficients that made the steps are found again from the steps."""

import random

import pytest

from pagedray.scheduler.cost_model import CostFitter, CostModel, StepWork, fit

TRUE = CostModel(base=8e-3, token=4e-5, attention=2e-9, sequence=2e-4, kv=5e-8)


def steps(count, seed=0, noise=0.0):
    draw = random.Random(seed)
    for _ in range(count):
        n = draw.choice([0, 0, draw.randrange(1, 2048)])
        b = draw.randrange(0, 64) if n else draw.randrange(1, 64)
        work = StepWork(n, float(n * draw.randrange(0, 30000)), b, b * draw.randrange(10, 20000))
        yield work, TRUE.step_seconds(work) * draw.uniform(1 - noise, 1 + noise)


def test_least_squares_finds_them():
    assert fit(steps(200)).coefficients() == pytest.approx(TRUE.coefficients(), rel=1e-6)


def test_what_never_happened_costs_nothing():
    found = fit((StepWork(n, 0.0, 0, 0), 1e-3 + 1e-5 * n) for n in range(1, 50))
    assert found.coefficients() == pytest.approx((1e-3, 1e-5, 0.0, 0.0, 0.0))


def test_no_coefficient_is_negative():
    found = fit((StepWork(n, 0.0, b, 0), 1e-5 * n - 1e-6 * b + 1e-3) for n in range(10, 50) for b in range(3))
    assert min(found.coefficients()) == 0.0


def test_the_fitter_converges_and_follows_a_group_that_slows_down():
    fitter = CostFitter()
    for work, seconds in steps(2000, noise=0.1):
        fitter.add(work, seconds)
    for factor in (1.0, 2.0):
        for work, seconds in steps(2500, seed=1, noise=0.1):
            fitter.add(work, factor * seconds)
        for work, seconds in steps(50, seed=2):
            assert fitter.model.step_seconds(work) == pytest.approx(factor * seconds, rel=0.15)
