from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from sklearn import metrics as sklearn_metrics

from scorecal.functional.metrics import (
    mean_absolute_error,
    mean_bias,
    mean_ranked_probability_score,
    mean_squared_error,
    quadratic_weighted_kappa,
    score_distribution_divergence,
)

f64 = partial(torch.tensor, dtype=torch.float64)
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12, equal_nan=True)
RNG = np.random.default_rng(0)
EVEN, UNEVEN = np.arange(6.0), np.array([0.0, 1.0, 3.0, 3.5, 8.0])
GOLD = RNG.integers(0, 26, size=30) / 5
SCORE = GOLD + RNG.normal(size=(3, 30)) * [[0.3], [1.0], [3.0]]  # problems, items
LOGITS = RNG.normal(size=(3, 30, 6)) * 3
TARGET = RNG.multinomial(10, RNG.dirichlet(np.full(6, 0.2), size=30)) / 10  # many zeros
WEIGHTS = RNG.integers(0, 4, size=(5, 30))


def nearest(scores, values):
    """Index of the nearest label value, the lower one where two are equally near."""
    return [min(range(len(values)), key=lambda k: (abs(values[k] - s), values[k])) for s in scores]


def sklearn_kappa(score, gold):
    labels = nearest(score, EVEN), nearest(gold, EVEN)
    return sklearn_metrics.cohen_kappa_score(*labels, labels=range(6), weights="quadratic")


def kappa_loop(score, gold):
    a, b = UNEVEN[nearest(score, UNEVEN)], UNEVEN[nearest(gold, UNEVEN)]
    observed = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a)
    expected = sum((x - y) ** 2 for x in a for y in b) / len(a) ** 2
    return 1 - observed / expected


def ranked_probability_loop(logits, target):
    cumulated = special.softmax(logits, -1).cumsum(-1) - target.cumsum(-1)
    return sum(sum(row[:-1] ** 2) / 5 for row in cumulated) / len(cumulated)


# name: the metric, its predictions [problems, items, …], its truth [items, …], the reference
METRICS = {
    "mean_squared_error": (
        mean_squared_error,
        SCORE,
        GOLD,
        sklearn_metrics.mean_squared_error,
    ),
    "mean_absolute_error": (
        mean_absolute_error,
        SCORE,
        GOLD,
        sklearn_metrics.mean_absolute_error,
    ),
    "mean_bias": (mean_bias, SCORE, GOLD, lambda score, gold: np.mean(score) - np.mean(gold)),
    "kappa_even": (
        partial(quadratic_weighted_kappa, values=f64(EVEN)),
        SCORE,
        GOLD,
        sklearn_kappa,
    ),
    "kappa_uneven": (
        partial(quadratic_weighted_kappa, values=f64(UNEVEN)),
        SCORE,
        GOLD,
        kappa_loop,
    ),
    "score_distribution_divergence": (
        score_distribution_divergence,
        LOGITS,
        TARGET,
        lambda logits, target: np.mean(stats.entropy(target, special.softmax(logits, -1), axis=-1)),
    ),
    "mean_ranked_probability_score": (
        mean_ranked_probability_score,
        LOGITS,
        TARGET,
        ranked_probability_loop,
    ),
}
every_metric = pytest.mark.parametrize(
    ("metric", "predicted", "truth", "reference"), METRICS.values(), ids=METRICS.keys()
)


@every_metric
def test_weights_repeat_items_in_every_cell_of_the_batch(metric, predicted, truth, reference):
    expected = [
        [reference(np.repeat(p, w, axis=0), np.repeat(truth, w, axis=0)) for w in WEIGHTS]
        for p in predicted
    ]
    actual = metric(f64(predicted)[:, None], f64(truth), f64(WEIGHTS))
    assert_close(actual, f64(expected))
    assert_close(metric(f64(predicted[0]), f64(truth), f64(WEIGHTS)), f64(expected[0]))
    assert_close(metric(f64(predicted), f64(truth), f64(WEIGHTS[0])), f64(expected)[:, 0])


@every_metric
def test_weights_have_no_unit_and_no_weight_at_all_is_nan(metric, predicted, truth, reference):
    weights = RNG.uniform(size=30) * [[1.0], [0.0]]
    value = metric(f64(predicted[0]), f64(truth), f64(weights))
    assert value.isnan().tolist() == [False, True]
    assert_close(metric(f64(predicted[0]), f64(truth), f64(weights / 7)), value)


@every_metric
def test_an_item_of_weight_zero_counts_for_nothing_even_without_a_value(
    metric, predicted, truth, reference
):
    kept, predicted, truth = np.arange(30) > 1, predicted[0].copy(), truth.copy()
    predicted[0], truth[1] = np.nan, np.nan
    expected = f64(reference(predicted[kept], truth[kept]))
    assert_close(metric(f64(predicted), f64(truth), f64(kept)), expected)


@every_metric
@pytest.mark.parametrize("missing", ["predicted", "truth"])
def test_a_missing_value_of_a_weighted_item_makes_the_metric_nan(
    metric, predicted, truth, reference, missing
):
    values = {"predicted": f64(predicted[0]), "truth": f64(truth)}
    values[missing][4] = torch.nan
    assert metric(values["predicted"], values["truth"], f64(np.ones(30))).isnan()


@pytest.mark.parametrize(
    ("metric", "expected"),
    # errors 1, -.5, 2 with weights 2, 1, 1
    [(mean_squared_error, 6.25 / 4), (mean_absolute_error, 4.5 / 4), (mean_bias, 3.5 / 4)],
)
def test_errors_of_three_items_agree_with_hand_work(metric, expected):
    assert_close(metric(f64([2, 1.5, 5]), f64([1, 2, 3]), f64([2, 1, 1])), f64(expected))


@pytest.mark.parametrize(
    ("score", "gold", "expected"),
    [
        # observed (0 + 0 + 1 + 0) / 4; by chance (6 + 2 + 6 + 6) / 16
        ([0, 1, 2, 2], [0, 1, 1, 2], 0.8),
        ([0, 1, 2, 2], [0, 1, 2, 2], 1.0),
        ([0.5, 1.5, 2, 9], [0, 1, 2, 2], 1.0),  # ties go down, beyond the end is the end
        ([0, 1, 2, 2], [0.5, 1.5, 2, 2.4], 1.0),  # and so for gold
        ([-3, -1, 2, 2], [2, 2, 0, 0], -1.0),
        ([1, 1, 1, 1], [2, 2, 2, 2], 0.0),  # no better than chance
        ([1, 1, 1, 1], [0.9, 1, 1.1, 1.5], np.nan),  # chance already agrees in everything
    ],
)
def test_quadratic_weighted_kappa_agrees_with_hand_work(score, gold, expected):
    actual = quadratic_weighted_kappa(f64(score), f64(gold), torch.ones(4).double(), f64([0, 1, 2]))
    assert_close(actual, f64(expected))


def test_kappa_is_nan_when_both_sides_hold_one_label_whose_weighted_mean_is_not_exact():
    flat, weights = torch.full((3,), 0.1).double(), f64([[0.7, 0.3, 1.1], [1, 1, 1], [0, 0.9, 0]])
    assert quadratic_weighted_kappa(flat, flat, weights, f64([0.1, 0.2, 0.4])).isnan().all()


def test_a_tie_between_unevenly_spaced_labels_goes_to_the_lower_one():
    # 5.5 lies between 1 and 10; the third item's weight of zero takes it out of chance too
    score, gold, weights = f64([5.5, 0, 10]), f64([1, 0, 0]), f64([1, 1, 0])
    assert_close(quadratic_weighted_kappa(score, gold, weights, f64([0, 1, 10])), f64(1.0))


@pytest.mark.parametrize(
    ("probs", "target", "expected"),
    [
        ([[0.25, 0.75]], [[1, 0]], 2 * np.log(2)),
        ([[0.25, 0.75]], [[0.5, 0.5]], np.log(2) - np.log(3) / 2),
        ([[1.0, 0.0]], [[1, 0]], 0.0),  # 0 * log 0 = 0, on both sides
        ([[1.0, 0.0]], [[0.5, 0.5]], np.inf),
        ([[0.05, 0.15], [0.5, 0.5]], [[1, 0], [0.5, 0.5]], np.log(2)),  # mean of log 4 and 0
    ],
)
def test_score_distribution_divergence_agrees_with_hand_work(probs, target, expected):
    weights = torch.ones(len(probs)).double()
    actual = score_distribution_divergence(f64(probs).log(), f64(target), weights)
    assert_close(actual, f64(expected))


def test_an_infinite_divergence_of_an_item_with_weight_zero_counts_for_nothing():
    logits, target = f64([[0.0, -torch.inf], [0.0, 0.0]]), f64([[0, 1], [0, 1]])
    assert_close(score_distribution_divergence(logits, target, f64([0, 1])), f64(np.log(2)))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), shift=st.floats(-300, 300))
def test_divergence_and_ranked_score_are_zero_only_at_the_target_and_ignore_shifts(seed, shift):
    rng = np.random.default_rng(seed)
    target, weights = f64(rng.dirichlet(np.ones(5), size=4)), f64(rng.uniform(0.1, 1, size=4))
    logits = f64(rng.normal(size=(4, 5)))
    for metric in (score_distribution_divergence, mean_ranked_probability_score):
        assert_close(metric(target.log() + shift, target, weights), f64(0.0))
        value = metric(logits, target, weights)
        assert value > 0
        assert_close(metric(logits + shift, target, weights), value)
