"""Which candidate of each split does best on the inner folds of its dev part."""

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.calibration.folds import By, Search
from scorecal.calibration.head import (
    RIDGE,
    HeadParameters,
    HeadSettings,
    NaturalHead,
    Problems,
    head_logits,
)
from scorecal.calibration.solvers import Loss, Objective, Rows, mean_loss, newton
from scorecal.functional.correlation import spearman
from scorecal.functional.scaling import expected_score

_DECADES = 1.0  # how far from the default ridge a choice goes without evidence
_BLOCK = 64  # problems whose logits are held at once


def fit_problems(
    problems: Problems, settings: HeadSettings, rows: Rows, loss: Loss
) -> HeadParameters:
    """Every problem's fitted head, without a trainer: what `Calibration` does by Newton's method.

    Losses other than nll start from its solution, as only cross-entropy is convex.
    """
    head = NaturalHead(problems, settings)
    natural = head.start()
    if settings.learn:
        for stage in dict.fromkeys(("nll", loss)):
            natural = newton(Objective(head, rows, stage), natural, steps=50)
    return head.parameters(natural)


def held_out_losses(
    heads: HeadParameters, problems: Problems, rows: Rows, by: By, *, temperature_on: str
) -> Float[Tensor, " problems"]:
    """Each problem's held-out loss: lower is better, correlations negated."""
    result = []
    for index in torch.arange(len(heads.strength)).split(_BLOCK):
        logits = head_logits(
            heads.take(index), rows.logprobs, rows.assistant, temperature_on=temperature_on
        )
        weights = problems.held_out[index]
        if by == "spearman":
            result.append(-spearman(expected_score(logits, rows.values), rows.gold, weights))
        else:
            result.append(mean_loss(by, logits, rows.gold, rows.values, weights))
    return torch.cat(result)


def choose(
    searches: list[Search], problems: Problems, losses: Float[Tensor, " problems"], by: By,
    *, favour_default: bool,
) -> list[int]:  # fmt: skip
    """The number of each split's best candidate by mean held-out loss; ties go to the earlier.

    Args:
        searches: the problems of each split.
        problems: all of them.
        losses: of each problem, on its held-out rows.
        by: what the losses are.
        favour_default: multiply held-out likelihood by a log-normal around the default ridge, so
            that few items leave the default in place.
    """
    chosen = []
    for search in searches:
        # A correlation that is undefined on a fold says nothing for the candidate.
        score = losses[search.inner].nan_to_num(nan=1.0).mean(-1)
        if favour_default:
            score = _with_ridge_prior(score, problems.take(search.full), by)
        chosen.append(int((score <= score.min() + 1e-12).nonzero()[0]))
    return chosen


def _with_ridge_prior(score: Tensor, candidates: Problems, by: By) -> Tensor:
    items = candidates.train[0].sum()
    if by == "nll":
        likelihood = items * score
    elif by == "pearson":
        likelihood = items / 2 * (1 - score.clamp(max=0).square()).clamp(min=1e-12).log()
    else:  # of a squared loss, n/2 · log(loss) is minus the log-likelihood, its scale profiled
        likelihood = items / 2 * score.clamp(min=1e-12).log()
    distance = (candidates.ridge_bias / RIDGE).log10()
    return likelihood + (distance / _DECADES).square() / 2
