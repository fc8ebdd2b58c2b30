"""Debiasing terms from what a judge answers when there is nothing to judge."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scorecal.judging.priors import Evidence, latent_bias, prior_term

LEVELS = 4
f64 = partial(torch.tensor, dtype=torch.float64)
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def draw(*shape, seed=0):
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double() * 2
    return logits.log_softmax(-1) - 0.7  # half of the mass lies outside the labels


@pytest.fixture
def evidence():
    perplexity = f64([9.0, 2.0, 5.0, 2.0, 7.0])
    return {
        "random": Evidence(draw(5, LEVELS, seed=1), perplexity),
        "random_task": Evidence(draw(5, LEVELS, seed=2), perplexity),
        "content_free": Evidence(draw(3, LEVELS, seed=3), None),
    }


def term_by_hand(rows, temperature=1.0):
    """B(y) = log(1/K) - log of the mean over prompts of the label-renormalised probability."""
    means = [0.0] * LEVELS
    for row in rows.tolist():
        powers = [math.exp(x / temperature) for x in row]
        for level, power in enumerate(powers):
            means[level] += power / sum(powers) / len(rows)
    return [math.log(1 / LEVELS) - math.log(max(mean, 1e-12)) for mean in means]


@pytest.mark.parametrize("kind", ["random", "random_task", "content_free"])
@pytest.mark.parametrize("problems", [1, 3])
def test_a_prior_from_prompts_is_the_same_for_every_problem(kind, problems, evidence):
    term = prior_term(kind, evidence, draw(6, LEVELS), torch.ones(problems, 6).double(), prompts=5)
    expected = f64([term_by_hand(evidence[kind].logprobs)] * problems)
    assert_close(term, expected)


@pytest.mark.parametrize(
    ("prompts", "kept"),
    [(1, [1]), (2, [1, 3]), (3, [1, 3, 2]), (4, [1, 3, 2, 4]), (5, range(5)), (100, range(5))],
)
def test_the_prompts_of_lowest_perplexity_count(prompts, kept, evidence):
    rows = evidence["random"].logprobs
    term = prior_term("random", evidence, rows, torch.ones(1, 5).double(), prompts=prompts)
    expected = f64([term_by_hand(rows[list(kept)])])
    assert_close(term, expected)


def test_without_perplexities_all_prompts_count(evidence):
    rows = evidence["random"].logprobs
    bias = latent_bias(Evidence(rows, None), prompts=2)
    torch.testing.assert_close(bias, rows.softmax(-1).mean(0))


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_the_prior_has_a_temperature_of_its_own(temperature, evidence):
    rows = evidence["random_task"].logprobs
    train = torch.ones(1, 5).double()
    term = prior_term("random_task", evidence, rows, train, prompts=5, temperature=temperature)
    expected = f64([term_by_hand(rows, temperature)])
    assert_close(term, expected)


def test_batch_is_measured_on_each_problems_own_train_rows():
    logprobs = draw(6, LEVELS)
    train = f64([[1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 0, 1], [1] * 6, [0] * 6])
    term = prior_term("batch", {}, logprobs, train)
    for row, own in zip(term[:3], train, strict=False):
        expected = f64(term_by_hand(logprobs[own > 0]))
        assert_close(row, expected)
    torch.testing.assert_close(term[3], torch.zeros(LEVELS).double())  # nothing to measure


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(0.01, 50))
def test_batch_knows_weights_by_proportion_only(scale):
    logprobs, train = draw(6, LEVELS), f64([[1.0, 2, 0, 0, 1, 0]])
    torch.testing.assert_close(
        prior_term("batch", {}, logprobs, train * scale), prior_term("batch", {}, logprobs, train)
    )


def test_none_is_no_term():
    term = prior_term("none", {}, draw(6, LEVELS), torch.ones(2, 6).double())
    assert term.tolist() == [[0.0] * LEVELS] * 2


@pytest.mark.parametrize("seed", range(20))
def test_permuted_is_the_task_term_with_its_labels_shuffled(seed, evidence):
    options = {"logprobs": draw(6, LEVELS), "train": torch.ones(2, 6).double(), "prompts": 3}
    [term, again] = prior_term("permuted", evidence, **options, seed=seed)
    [real, _] = prior_term("random_task", evidence, **options)
    assert term.tolist() == again.tolist()
    assert sorted(term.tolist()) == sorted(real.tolist())
    assert term.tolist() != real.tolist()  # a placebo that moves nothing would be the drug
    repeated = prior_term("permuted", evidence, **options, seed=seed)
    assert repeated[0].tolist() == term.tolist()


def test_an_unlikely_label_is_floored_and_stays_finite():
    rows = f64([[0.0, -1e4, -1e4, -1e4]])
    term = prior_term("random", {"random": Evidence(rows, None)}, rows, torch.ones(1, 1).double())
    assert term[0].tolist() == pytest.approx(
        [math.log(0.25)] + [math.log(0.25) - math.log(1e-12)] * 3
    )


@pytest.mark.parametrize("kind", ["random", "random_task", "content_free", "permuted"])
def test_missing_evidence_names_the_priors_that_need_none(kind):
    with pytest.raises(ValueError, match=rf"prior '{kind}' needs.*batch` or `none`"):
        prior_term(kind, {}, draw(3, LEVELS), torch.ones(1, 3).double())


def test_an_unknown_prior_is_refused(evidence):
    with pytest.raises(ValueError, match="postion"):
        prior_term("postion", evidence, draw(3, LEVELS), torch.ones(1, 3).double())
