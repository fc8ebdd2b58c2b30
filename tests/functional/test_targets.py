from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scorecal.functional.targets import interpolated_target

f64 = partial(torch.tensor, dtype=torch.float64)
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("gold", "values", "expected"),
    [
        (3.7, [0, 1, 2, 3, 4, 5], [0, 0, 0, 0.3, 0.7, 0]),  # the paper's example
        (0.0, [0, 1, 2], [1, 0, 0]),
        (1.0, [0, 1, 2], [0, 1, 0]),
        (2.0, [0, 1, 2], [0, 0, 1]),
        (4.0, [0, 1, 10], [0, 2 / 3, 1 / 3]),  # (10 - 4) / 9 and (4 - 1) / 9
        (-1.5, [-2, 0, 3], [0.75, 0.25, 0]),
        (37.5, [0, 25, 50, 75, 100], [0, 0.5, 0.5, 0, 0]),
    ],
)
def test_gold_is_shared_by_its_two_neighbours_by_proximity(gold, values, expected):
    assert_close(interpolated_target(f64(gold), f64(values)), f64(expected))
    assert_close(interpolated_target(f64([[gold]] * 2), f64(values)), f64([[expected]] * 2))


@settings(max_examples=100, deadline=None)
@given(
    start=st.floats(-10, 10),
    steps=st.lists(st.floats(0.01, 20), min_size=1, max_size=8),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_the_target_is_a_distribution_on_at_most_two_neighbours_whose_mean_is_gold(
    start, steps, shares
):
    values = np.cumsum([start, *steps])
    span = values[-1] - values[0]
    gold = np.clip([values[0] + share * span for share in shares], values[0], values[-1])
    target = interpolated_target(f64(gold), f64(values)).numpy()
    assert (target >= 0).all()
    np.testing.assert_allclose(target.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(target @ values, gold, rtol=1e-9, atol=1e-9)
    for row, score in zip(target, gold, strict=True):
        held = np.flatnonzero(row)
        assert len(held) == 1 or held[1] - held[0] == 1 == len(held) - 1
        assert values[held[0]] - 1e-9 <= score <= values[held[-1]] + 1e-9


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3).map(lambda v: round(v, 1)), min_size=2, unique=True).map(
        sorted
    )
)
def test_gold_on_a_value_is_exactly_one_hot(values):
    assert torch.equal(
        interpolated_target(f64(values), f64(values)), torch.eye(len(values)).double()
    )


@pytest.mark.parametrize(
    ("gold", "named"),
    [(5.5, r"5\.5"), (-0.25, r"-0\.25"), (torch.inf, "inf"), (torch.nan, "(?i)nan")],
)
def test_gold_that_is_off_the_scale_or_missing_is_refused_and_named(gold, named):
    with pytest.raises(ValueError, match=named):
        interpolated_target(f64([1.0, gold, 2.0]), f64([0, 1, 2, 3, 4, 5]))
