"""Errors and divergences of weighted samples, in gold's units; see `correlation` for weights."""

from jaxtyping import Float
from torch import Tensor

from scorecal.functional.correlation import weighted_sum
from scorecal.functional.losses import ranked_probability_score, soft_cross_entropy


def _mean(
    values: Float[Tensor, "*#batch items"], weights: Float[Tensor, "*#batch items"]
) -> Tensor:
    return weighted_sum(values, weights) / weights.sum(-1)


def mean_squared_error(
    score: Float[Tensor, "*#batch items"],
    gold: Float[Tensor, " items"],
    weights: Float[Tensor, "*#batch items"],
) -> Float[Tensor, "*batch"]:
    """Weighted mean of (score - gold)²."""
    return _mean((score - gold).square(), weights)


def mean_absolute_error(
    score: Float[Tensor, "*#batch items"],
    gold: Float[Tensor, " items"],
    weights: Float[Tensor, "*#batch items"],
) -> Float[Tensor, "*batch"]:
    """Weighted mean of |score - gold|."""
    return _mean((score - gold).abs(), weights)


def mean_bias(
    score: Float[Tensor, "*#batch items"],
    gold: Float[Tensor, " items"],
    weights: Float[Tensor, "*#batch items"],
) -> Float[Tensor, "*batch"]:
    """Weighted mean of score - gold: positive where the judge is too generous."""
    return _mean(score - gold, weights)


def quadratic_weighted_kappa(
    score: Float[Tensor, "*#batch items"],
    gold: Float[Tensor, " items"],
    weights: Float[Tensor, "*#batch items"],
    values: Float[Tensor, " levels"],
) -> Float[Tensor, "*batch"]:
    """Cohen's kappa of scores rounded to the nearest label (ties down), weights (v_i - v_j)²."""
    score = values[(score.unsqueeze(-1) - values).abs().argmin(-1)].where(~score.isnan(), score)
    gold = values[(gold.unsqueeze(-1) - values).abs().argmin(-1)].where(~gold.isnan(), gold)
    score_mean, gold_mean = _mean(score, weights), _mean(gold, weights)
    score_variance = _mean((score - score_mean.unsqueeze(-1)).square(), weights)
    gold_variance = _mean((gold - gold_mean.unsqueeze(-1)).square(), weights)
    # Expected disagreement of two independent raters with these marginals.
    expected = score_variance + gold_variance + (score_mean - gold_mean).square()
    noise = 1e-28 * _mean(score.square() + gold.square(), weights)
    return 1 - _mean((score - gold).square(), weights) / expected.where(
        expected > noise, float("nan")
    )


def score_distribution_divergence(
    logits: Float[Tensor, "*#batch items levels"],
    target: Float[Tensor, "items levels"],
    weights: Float[Tensor, "*#batch items"],
) -> Float[Tensor, "*batch"]:
    """Weighted mean of KL(target ‖ softmax(logits)) (paper 1, eq. 5)."""
    entropy = -target.xlogy(target).sum(-1)
    return _mean(soft_cross_entropy(logits, target) - entropy, weights)


def mean_ranked_probability_score(
    logits: Float[Tensor, "*#batch items levels"],
    target: Float[Tensor, "items levels"],
    weights: Float[Tensor, "*#batch items"],
) -> Float[Tensor, "*batch"]:
    """Weighted mean of `ranked_probability_score`."""
    return _mean(ranked_probability_score(logits, target), weights)
