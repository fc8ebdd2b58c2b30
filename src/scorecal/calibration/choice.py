"""Which candidate of each split does best on the inner folds of its dev part."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
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
from scorecal.calibration.solvers import Loss, Objective, Rows, mean_loss, newton, own_rows
from scorecal.functional.correlation import pearson, spearman
from scorecal.functional.scaling import rankable_score

_DECADES = 1.0  # how far from the default ridge a choice goes without evidence
# Nats of held-out likelihood that M, with its K² parameters, has to be worth. 0 to 6 were tried on
# halves of the dev parts of STS-B, SemRel and SummEval: 1 helps with 10 items, and changes little
# beyond 25.
_MIXING_NATS = 1.0
_BLOCK = 64  # problems whose logits are held at once


def fit_problems(
    problems: Problems,
    settings: HeadSettings,
    rows: Rows,
    loss: Loss,
    parents: Int[Tensor, " problems"] | None = None,
) -> HeadParameters:
    """Every problem's fitted head, without a trainer: what `Calibration` does by Newton's method.

    Losses other than nll start from its solution, as only cross-entropy is convex.

    Args:
        problems: what to fit.
        settings: what is learned.
        rows: all items.
        loss: the training loss.
        parents: the problem from whose solution each starts, itself for none: an inner fold is a
            few steps from the fit to all of its dev set.
    """
    roots = torch.arange(len(problems.train))
    parents = roots if parents is None else parents
    without = problems.ridge_mixing.isinf()
    if "mixing" in settings.learn and without.any():  # an infinite ridge is a smaller problem
        plain = replace(settings, learn=[name for name in settings.learn if name != "mixing"])
        if without.all():
            return fit_problems(problems, plain, rows, loss, parents)
        groups = [without.nonzero().flatten(), (~without).nonzero().flatten()]
        place = torch.cat(groups).argsort()
        place[groups[1]] -= len(groups[0])
        fitted = [
            fit_problems(problems.take(index), chosen, rows, loss, place[parents[index]])
            for index, chosen in zip(groups, (plain, settings), strict=True)
        ]
        order = torch.cat(groups).argsort()
        return HeadParameters(*(torch.cat(values)[order] for values in zip(*fitted, strict=True)))
    head = NaturalHead(problems, settings)
    natural = head.start()
    if settings.learn:
        root = parents == roots
        index, rest = root.nonzero().flatten(), (~root).nonzero().flatten()
        for stage in dict.fromkeys(("nll", loss)):
            objective = Objective(head.take(index), rows, stage)
            natural[index] = newton(objective, natural[index], exact=stage == loss)
        if len(rest):
            objective = Objective(head.take(rest), rows, loss)
            natural[rest] = newton(objective, natural[parents[rest]])
    return head.parameters(natural)


def parents_of(searches: list[Search]) -> Int[Tensor, " problems"]:
    """Each candidate's fit to all of its dev set, for it and for its inner folds."""
    pairs = [
        torch.stack([torch.cat([search.inner, search.full.unsqueeze(-1)], -1).flatten(),
                     search.full.repeat_interleave(search.inner.shape[1] + 1)])
        for search in searches
    ]  # fmt: skip
    problem, parent = torch.cat(pairs, -1)
    return parent[problem.argsort()]


def held_out_losses(
    heads: HeadParameters,
    problems: Problems,
    searches: list[Search],
    rows: Rows,
    by: By,
    *,
    temperature_on: str,
) -> Float[Tensor, " problems"]:
    """Held-out loss of each inner fold, NaN elsewhere: lower is better, correlations negated."""
    losses = rows.gold.new_full((len(problems.train),), torch.nan)
    inner = torch.cat([search.inner.flatten() for search in searches])
    for index in inner.split(_BLOCK):
        own, weights = own_rows(problems.held_out[index])
        mine = rows.take(own)
        logits = head_logits(
            heads.take(index), mine.logprobs, mine.assistant, temperature_on=temperature_on
        )
        if by == "spearman" or by == "pearson":
            correlation = spearman if by == "spearman" else pearson
            losses[index] = -correlation(rankable_score(logits, rows.values), mine.gold, weights)
        else:
            losses[index] = mean_loss(by, logits, mine.gold, rows.values, weights)
    return losses


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
        favour_default: multiply held-out likelihood by a log-normal around the default ridge and
            by odds against M, so that few items leave the default in place.
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
    prior = (distance / _DECADES).square() / 2
    return likelihood + prior + _MIXING_NATS * candidates.ridge_mixing.isfinite()
