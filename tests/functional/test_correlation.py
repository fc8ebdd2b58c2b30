from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scorecal.functional.correlation import kendall, pearson, spearman

f64 = partial(torch.tensor, dtype=torch.float64)
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12, equal_nan=True)
SCIPY = {pearson: stats.pearsonr, spearman: stats.spearmanr, kendall: stats.kendalltau}
every_correlation = pytest.mark.parametrize("correlation", SCIPY, ids=lambda f: f.__name__)


def on_repeated_items(correlation, x, y, weights):
    """Scipy's figure on the sample with each item written out as often as its weight says."""
    x, y = np.repeat(x, weights), np.repeat(y, weights)
    if len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return np.nan
    return SCIPY[correlation](x, y).statistic


def pearson_loop(x, y, w):
    mean_x, mean_y = (sum(w * a) / sum(w) for a in (x, y))
    covariance, spread_x, spread_y = 0.0, 0.0, 0.0
    for a, b, weight in zip(x - mean_x, y - mean_y, w, strict=True):
        covariance += weight * a * b
        spread_x += weight * a * a
        spread_y += weight * b * b
    return covariance / np.sqrt(spread_x * spread_y)


def kendall_loop(x, y, w):
    agreement, untied_x, untied_y = 0.0, 0.0, 0.0
    for i in range(len(x)):
        for j in range(i):
            a, b, weight = np.sign(x[i] - x[j]), np.sign(y[i] - y[j]), w[i] * w[j]
            agreement += weight * a * b
            untied_x += weight * a * a
            untied_y += weight * b * b
    return agreement / np.sqrt(untied_x * untied_y)


@pytest.mark.parametrize(
    ("correlation", "expected"),
    [
        # deviations of x -1.5 -.5 .5 1.5, of y -1.25 .75 -.25 .75: 2.5 / sqrt(5 * 2.75)
        (pearson, 2.5 / np.sqrt(13.75)),
        # ranks of y 1 3.5 2 3.5, deviations -1.5 1 -.5 1: 3 / sqrt(5 * 4.5)
        (spearman, 3 / np.sqrt(22.5)),
        # four pairs agree, one disagrees, one ties in y: 3 / sqrt(6 * 5)
        (kendall, 3 / np.sqrt(30)),
    ],
)
def test_correlations_of_four_items_agree_with_hand_work(correlation, expected):
    actual = correlation(f64([1, 2, 3, 4]), f64([1, 3, 2, 3]), torch.ones(4).double())
    assert_close(actual, f64(expected))


@every_correlation
def test_integer_weights_repeat_heavily_tied_items_in_every_cell_of_the_batch(correlation):
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 4, size=(3, 60)), rng.integers(0, 3, size=60)
    x[0] += y
    weights = rng.integers(0, 4, size=(8, 60))
    weights[0], weights[1], weights[1, 7] = 0, 0, 5  # nothing left; one item left
    expected = [[on_repeated_items(correlation, row, y, w) for w in weights] for row in x]
    assert_close(correlation(f64(x)[:, None], f64(y), f64(weights)), f64(expected))
    assert_close(correlation(f64(x[0]), f64(y), f64(weights)), f64(expected[0]))
    assert_close(correlation(f64(y), f64(x), f64(weights[2])), f64(expected)[:, 2])


@every_correlation
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_any_small_sample_agrees_with_scipy_and_is_nan_where_undefined(correlation, rows):
    x, y, weights = np.array(rows).T
    expected = f64(on_repeated_items(correlation, x, y, weights))
    assert_close(correlation(f64(x), f64(y), f64(weights)), expected)


@pytest.mark.parametrize(
    ("correlation", "loop"), [(pearson, pearson_loop), (kendall, kendall_loop)]
)
def test_fractional_weights_agree_with_a_plain_loop_and_have_no_unit(correlation, loop):
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 5, size=(2, 25)) / 10
    weights = rng.uniform(0, 2, size=(4, 25)) * rng.integers(0, 2, size=(4, 25))
    expected = f64([loop(x, y, w) for w in weights])
    for unit in (1, 1e-3, 70.0):
        assert_close(correlation(f64(x), f64(y), unit * f64(weights)), expected)


@pytest.mark.parametrize(
    ("correlation", "transform"),
    [
        (pearson, lambda x: 1e-6 * x),
        (pearson, lambda x: 3 * x + 1e4),
        (spearman, lambda x: x**3),
        (kendall, lambda x: x.exp() - 9),
    ],
)
def test_correlations_are_symmetric_and_keep_their_value_under_the_maps_that_they_ignore(
    correlation, transform
):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    weights = torch.randint(0, 3, (30,), generator=generator).double()
    value = correlation(x, y, weights)
    assert_close(correlation(y, x, weights), value)
    assert_close(correlation(transform(x), y, weights), value, rtol=1e-9)
    assert_close(correlation(-x, y, weights), -value)
    assert_close(correlation(x, transform(x) * 0 + x, weights), f64(1.0))


@every_correlation
@pytest.mark.parametrize(
    "weights",
    [[0.7, 0.3, 1.1, 0.0], [0.0, 0.9, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
    ids=["weighted items constant", "one item", "no item"],
)
def test_a_correlation_without_variation_among_the_weighted_items_is_nan(correlation, weights):
    # .1 has no exact mean: a variance that is only nearly zero must not pass for variation
    flat, varied = f64([0.1, 0.1, 0.1, 5.0]), f64([3.0, 1.0, 2.0, 4.0])
    x, y = torch.stack([flat, varied]), torch.stack([varied, flat])
    assert correlation(x, y, f64(weights)).isnan().all()


@every_correlation
def test_an_item_of_weight_zero_counts_for_nothing_even_without_a_value(correlation):
    x, y, kept = f64([3, 1, torch.nan, 2, 5, 4]), f64([1, 2, 4, 2, 9, torch.nan]), [0, 1, 3, 4]
    weights = f64([1, 2, 0, 1, 3, 0])
    assert_close(correlation(x, y, weights), correlation(x[kept], y[kept], weights[kept]))


@every_correlation
@pytest.mark.parametrize("position", range(4))
def test_a_missing_value_of_a_weighted_item_makes_the_correlation_nan(correlation, position):
    x, y, weights = f64([3, 1, 2, 5]), f64([1, 2, 4, 2]), f64([1, 2, 1, 3])
    x[position] = torch.nan
    assert correlation(x, y, weights).isnan()
    assert correlation(y, x, weights).isnan()
