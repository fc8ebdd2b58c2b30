from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from scorecal.functional.losses import (
    negative_pearson,
    ranked_probability_score,
    soft_cross_entropy,
    squared_error,
)

f64 = partial(torch.tensor, dtype=torch.float64)
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12, equal_nan=True)
RNG = np.random.default_rng(0)
VALUES = np.array([0.0, 1.0, 2.0, 4.0, 8.0])
LOGITS = RNG.normal(size=(3, 12, 5)) * 2  # problems, items, levels
TARGET = RNG.dirichlet(np.full(5, 0.3), size=12)
GOLD = TARGET @ VALUES
WEIGHTS = RNG.integers(0, 4, size=(2, 12))
PROBS = special.softmax(LOGITS, -1)


def cross_entropy_loop(probs, target, gold):
    return -sum(q * np.log(p) for p, q in zip(probs, target, strict=True) if q > 0)


def squared_error_loop(probs, target, gold):
    return (sum(p * v for p, v in zip(probs, VALUES, strict=True)) - gold) ** 2


def ranked_probability_loop(probs, target, gold):
    steps = range(1, len(probs))
    return np.mean([(sum(probs[:k]) - sum(target[:k])) ** 2 for k in steps])


ITEM_LOSSES = {
    "soft_cross_entropy": (lambda z: soft_cross_entropy(z, f64(TARGET)), cross_entropy_loop),
    "squared_error": (lambda z: squared_error(z, f64(GOLD), f64(VALUES)), squared_error_loop),
    "ranked_probability_score": (
        lambda z: ranked_probability_score(z, f64(TARGET)),
        ranked_probability_loop,
    ),
}
every_item_loss = pytest.mark.parametrize(
    ("loss", "loop"), ITEM_LOSSES.values(), ids=ITEM_LOSSES.keys()
)


@every_item_loss
def test_a_loss_gives_one_value_per_item_that_a_plain_loop_also_gives(loss, loop):
    expected = [[loop(*row) for row in zip(p, TARGET, GOLD, strict=True)] for p in PROBS]
    assert_close(loss(f64(LOGITS)), f64(expected))
    assert_close(loss(f64(LOGITS[0])), f64(expected[0]))


@every_item_loss
def test_a_loss_ignores_a_constant_added_to_an_items_logits(loss, loop):
    shift = f64(RNG.normal(size=(3, 12, 1)) * 50)
    assert_close(loss(f64(LOGITS) + shift), loss(f64(LOGITS)))


@pytest.mark.parametrize(
    "loss",
    [
        *(loss for loss, _ in ITEM_LOSSES.values()),
        lambda z: negative_pearson(z, f64(GOLD), f64(VALUES), f64(WEIGHTS[0])),
    ],
    ids=[*ITEM_LOSSES.keys(), "negative_pearson"],
)
def test_gradients_agree_with_finite_differences(loss):
    assert torch.autograd.gradcheck(loss, f64(LOGITS).requires_grad_(), fast_mode=True)


@pytest.mark.parametrize(
    ("probs", "target", "expected"),
    [
        ([0.25, 0.75], [0.5, 0.5], 2 * np.log(2) - 0.5 * np.log(3)),
        ([0.5, 0.25, 0.25], [0, 0, 1], 2 * np.log(2)),
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0], np.log(2)),  # 0 * log 0 = 0
        ([1.0, 0.0], [1, 0], 0.0),
        ([1.0, 0.0], [0.5, 0.5], np.inf),  # what was ruled out happened
    ],
)
def test_soft_cross_entropy_agrees_with_hand_work(probs, target, expected):
    assert_close(soft_cross_entropy(f64(probs).log(), f64(target)), f64(expected))


def test_the_gradient_of_soft_cross_entropy_is_probabilities_minus_target_even_at_log_zero():
    logits = f64([1.0, 0.0, -torch.inf]).requires_grad_()
    target = f64([0.25, 0.75, 0.0])
    soft_cross_entropy(logits, target).backward()
    assert_close(logits.grad, logits.detach().softmax(-1) - target)


@pytest.mark.parametrize(
    ("probs", "target", "expected"),
    [
        # cumulated 1/3, 2/3 against 1, 1: (4/9 + 1/9) / 2
        ([1 / 3, 1 / 3, 1 / 3], [1, 0, 0], 5 / 18),
        # cumulated .5, .75 against 0, 1: (1/4 + 1/16) / 2
        ([0.5, 0.25, 0.25], [0, 1, 0], 5 / 32),
        ([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 1], 1.0),  # the worst there is
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5], 0.0),
        ([0.25, 0.75], [1, 0], 9 / 16),  # two levels: the Brier score of one of them
    ],
)
def test_ranked_probability_score_agrees_with_hand_work_in_both_directions(probs, target, expected):
    logits, target = f64(probs).log(), f64(target)
    assert_close(ranked_probability_score(logits, target), f64(expected))
    assert_close(ranked_probability_score(logits.flip(-1), target.flip(-1)), f64(expected))


def test_negative_pearson_is_minus_scipys_on_the_repeated_items_for_every_problem_and_weighting():
    expected = [
        [-stats.pearsonr(np.repeat(p @ VALUES, w), np.repeat(GOLD, w)).statistic for w in WEIGHTS]
        for p in PROBS
    ]
    actual = negative_pearson(f64(LOGITS)[:, None], f64(GOLD), f64(VALUES), f64(WEIGHTS))
    assert_close(actual, f64(expected))
    one = negative_pearson(f64(LOGITS[0]), f64(GOLD), f64(VALUES), f64(WEIGHTS[0]))
    assert_close(one, f64(expected[0][0]))


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(0.01, 100), slope=st.floats(0.1, 10), shift=st.floats(-50, 50))
def test_negative_pearson_ignores_the_units_of_weights_and_gold(scale, slope, shift):
    weights, gold = f64(RNG.uniform(size=12)), f64(GOLD)
    actual = negative_pearson(f64(LOGITS), slope * gold + shift, f64(VALUES), scale * weights)
    assert_close(actual, negative_pearson(f64(LOGITS), gold, f64(VALUES), weights))


def test_negative_pearson_is_undefined_where_gold_or_every_score_is_constant():
    logits, values = f64(LOGITS[:2, :, :4]), f64([0, 1, 2, 3])
    logits[0] = 0  # every score is exactly 1.5
    ones = torch.ones(12).double()
    flat = negative_pearson(logits, f64(GOLD), values, ones)
    assert flat.isnan().tolist() == [True, False]
    assert negative_pearson(logits[1], torch.full_like(ones, 0.1), values, ones / 3).isnan()


def test_an_item_of_weight_zero_counts_for_nothing_in_negative_pearson_even_without_gold():
    gold, weights = f64(GOLD), f64(RNG.uniform(0.1, 1, size=12))
    gold[4], weights[4] = torch.nan, 0
    kept = torch.arange(12) != 4
    actual = negative_pearson(f64(LOGITS[0]), gold, f64(VALUES), weights)
    expected = negative_pearson(f64(LOGITS[0])[kept], gold[kept], f64(VALUES), weights[kept])
    assert_close(actual, expected)
