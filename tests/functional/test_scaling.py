from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from scorecal.functional.scaling import debiasing_term, expected_score, latent_number_bias

f64 = partial(torch.tensor, dtype=torch.float64)
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
quick = settings(max_examples=30, deadline=None)
finite_logits = arrays(
    np.float64,
    array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=6),
    elements=st.floats(-30, 5),
)


def softmax_loop(logits):
    """Normalised exponentials of each row, by the definition."""
    rows = []
    for row in logits:
        mass = [np.exp(value - max(row)) for value in row]
        rows.append([m / sum(mass) for m in mass])
    return np.array(rows)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # label masses .4 and .8 are divided out: mean of (1/2, 1/2) and (1/8, 7/8)
        ({}, [0.3125, 0.6875]),
        # squared and renormalised: mean of (1/2, 1/2) and (1/50, 49/50)
        ({"temperature": 0.5}, [0.26, 0.74]),
        # .3125 is lifted to the floor and the sum is left at 1.0875
        ({"floor": 0.4}, [0.4, 0.6875]),
    ],
)
def test_latent_number_bias_of_two_prompts_agrees_with_hand_work(options, expected):
    logprobs = f64([[0.2, 0.2], [0.1, 0.7]]).log()
    assert_close(latent_number_bias(logprobs, **options), f64(expected))


def test_a_label_that_no_prompt_ever_yields_gets_the_floor_and_its_debiasing_term_is_finite():
    probs = latent_number_bias(f64([[0.0, -torch.inf], [-3.0, -torch.inf]]))
    assert_close(probs, f64([1.0, 1e-12]), rtol=0, atol=0)
    # log(1/2) - log(1e-12) = 12 log 10 - log 2
    assert_close(debiasing_term(probs), f64([-np.log(2), 12 * np.log(10) - np.log(2)]))


@quick
@given(logprobs=finite_logits, temperature=st.floats(0.2, 5), shift=st.floats(-20, 20))
def test_latent_number_bias_is_the_mean_normalised_distribution(logprobs, temperature, shift):
    expected = np.maximum(softmax_loop(logprobs / temperature).mean(0), 1e-12)
    shifts = shift * np.arange(len(logprobs))[:, None]  # unknown label mass, one a prompt
    for rows in (logprobs, logprobs + shifts, logprobs[::-1].copy()):
        actual = latent_number_bias(f64(rows), temperature=temperature)
        assert_close(actual, f64(expected))


@quick
@given(logprobs=finite_logits, cold=st.floats(0.3, 1), factor=st.floats(1, 5))
def test_a_higher_temperature_never_raises_the_largest_share(logprobs, cold, factor):
    one_prompt = f64(logprobs[:1])
    peak = latent_number_bias(one_prompt, temperature=cold).max()
    assert latent_number_bias(one_prompt, temperature=cold * factor).max() <= peak + 1e-12


def test_debiasing_term_agrees_with_hand_work_over_batch_axes():
    # K = 4: log(.25 / p)
    probs = f64([[0.25, 0.25, 0.25, 0.25], [0.5, 0.125, 0.125, 0.25]])
    expected = np.log(2) * f64([[0, 0, 0, 0], [-1, 1, 1, 0]])
    assert_close(debiasing_term(probs), expected)
    assert_close(debiasing_term(probs[None]), expected[None])


@quick
@given(logprobs=finite_logits)
def test_adding_the_debiasing_term_of_a_distribution_to_it_gives_the_uniform_one(logprobs):
    probs = latent_number_bias(f64(logprobs))
    uniform = torch.full_like(probs, 1 / len(probs))
    assert_close((probs.log() + debiasing_term(probs)).exp(), uniform)


@pytest.mark.parametrize(
    ("probs", "values", "expected"),
    [
        ([0.1, 0.2, 0.7], [0, 1, 2], 1.6),
        ([0.1, 0.2, 0.7], [-1, 0, 10], 6.9),  # uneven steps
        ([0.02, 0.04, 0.14], [0, 1, 2], 1.6),  # label mass .2 does not matter
        ([0.0, 1.0, 0.0], [2, 3, 4], 3.0),  # logits of minus infinity
    ],
)
def test_expected_score_agrees_with_hand_work(probs, values, expected):
    assert_close(expected_score(f64(probs).log(), f64(values)), f64(expected))


@quick
@given(logits=finite_logits, shift=st.floats(-500, 500), seed=st.integers(0, 99))
def test_expected_score_is_the_label_mean_whatever_the_shift_or_order(logits, shift, seed):
    rng = np.random.default_rng(seed)
    values, order = np.sort(rng.normal(size=logits.shape[1])), rng.permutation(logits.shape[1])
    expected = [
        sum(p * v for p, v in zip(row, values, strict=True)) for row in softmax_loop(logits)
    ]
    for rows, labels in (
        (logits, values),
        (logits + shift, values),
        (logits[:, order], values[order]),
    ):
        assert_close(expected_score(f64(rows), f64(labels)), f64(expected))
    assert_close(expected_score(f64(logits)[:, None], f64(values)), f64(expected)[:, None])
