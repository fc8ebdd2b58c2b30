from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scorecal.functional.resampling import bootstrap_weights, percentile_interval

f64 = partial(torch.tensor, dtype=torch.float64)
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12, equal_nan=True)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@settings(max_examples=40, deadline=None)
@given(extra=st.lists(st.integers(0, 5), max_size=10), count=st.integers(6, 9), data=st.data())
def test_each_row_draws_as_many_groups_as_there_are_and_weighs_their_items_alike(
    extra, count, data
):
    groups = torch.tensor(data.draw(st.permutations([*range(count), *extra])))
    weights = bootstrap_weights(groups, resamples=7, generator=seeded())
    assert weights.shape == (7, len(groups))
    assert weights.dtype == torch.float64
    drawn = torch.stack([weights[:, groups == g].amax(1) for g in range(count)], 1)
    assert torch.equal(weights, drawn[:, groups])
    assert (drawn.sum(1) == count).all()
    assert ((weights >= 0) & (weights == weights.round())).all()


def test_a_single_group_is_always_drawn_once():
    groups = torch.zeros(3, dtype=torch.int64)
    weights = bootstrap_weights(groups, resamples=4, generator=seeded())
    assert torch.equal(weights, torch.ones(4, 3).double())


def test_group_counts_are_multinomial_whatever_the_sizes_of_the_groups():
    groups = torch.tensor([3, 0, 1, 2, 0, 0, 0])
    counts = bootstrap_weights(groups, resamples=20_000, generator=seeded())[:, [1, 2, 3, 0]]
    # four draws with chance 1/4: mean 1, variance 4 * 1/4 * 3/4, covariance -4 / 16
    assert_close(counts.mean(0), torch.ones(4).double(), rtol=0, atol=0.03)
    expected = torch.eye(4).double() - 0.25
    assert_close(counts.T.cov(), expected, rtol=0, atol=0.04)


def test_the_generator_alone_decides_the_weights():
    draw = partial(bootstrap_weights, torch.arange(20), resamples=5)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    generator = seeded(8)
    first, second = draw(generator=generator), draw(generator=generator)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(draw(generator=seeded(8)), first)
    assert not torch.equal(second, first)
    assert not torch.equal(draw(generator=seeded(9)), first)


def test_percentile_interval_of_a_hundred_and_one_steps_agrees_with_hand_work():
    # the quantile q of 0, 1, …, 100 is 100 q, whatever the order
    samples = torch.randperm(101, generator=seeded()).double()
    for options, expected in (({}, (2.5, 97.5)), ({"level": 0.8}, (10.0, 90.0))):
        low, high = percentile_interval(samples, **options)
        assert_close(torch.stack([low, high]), f64(expected))


@pytest.mark.parametrize("level", [0.0, 0.5, 0.95, 1.0])
def test_percentile_interval_ignores_missing_samples_as_numpy_does(level):
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(41, 3, 4))
    samples[rng.uniform(size=samples.shape) < 0.2] = np.nan
    samples[1:, 0, 0], samples[0, 0, 0] = np.nan, 7.0  # one sample left
    tails = [(1 - level) / 2, 1 - (1 - level) / 2]
    actual = torch.stack(percentile_interval(f64(samples), level=level))
    assert_close(actual, f64(np.nanquantile(samples, tails, axis=0)))


def test_percentile_interval_without_any_sample_is_nan_and_leaves_its_neighbours_alone():
    low, high = percentile_interval(f64([[torch.nan, 1.0], [torch.nan, 3.0]]), level=0.5)
    assert_close(torch.stack([low, high]), f64([[torch.nan, 1.5], [torch.nan, 2.5]]))


@settings(max_examples=30, deadline=None)
@given(
    levels=st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted), seed=st.integers(0, 99)
)
def test_a_higher_level_never_gives_a_narrower_interval(levels, seed):
    samples = torch.randn(23, 2, generator=seeded(seed), dtype=torch.float64)
    (low, high), (lower, higher) = (percentile_interval(samples, level=v) for v in levels)
    assert ((lower <= low + 1e-12) & (low <= high + 1e-12) & (high <= higher + 1e-12)).all()
