"""How far the learned numbers of a head would move with other dev items."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.calibration.choice import fit_problems
from scorecal.calibration.fitted import Fitted
from scorecal.calibration.folds import with_own_terms
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.solvers import Loss, Rows
from scorecal.evaluation.evidence import numbered_groups
from scorecal.evaluation.intervals import Interval, interval
from scorecal.functional.resampling import bootstrap_weights
from scorecal.judging.table import Table

REFITS = 200


class Learned(NamedTuple):
    """The head for new items, with intervals; NaN bounds where nothing was fitted."""

    strength: Interval
    temperature: Interval
    contrast: Interval
    bias: list[Interval]
    """b = λB + δ, one a label."""


def learned(
    fitted: Fitted,
    table: Table,
    assistant: Float[Tensor, "items levels"],
    settings: HeadSettings,
    loss: Loss,
    *,
    seed: int,
    refits: int = REFITS,
) -> Learned:
    """λ, T, α and b over resamples of dev by group, each refitted with the ridges held.

    All refits are the problems of one batched fit.
    """
    one = fitted.heads.take(torch.tensor([fitted.deploy]))
    dev = fitted.train[fitted.deploy]
    groups = numbered_groups(table.rows(dev))
    train = torch.zeros(1 + refits, len(table.ids), dtype=torch.float64)
    train[0] = dev.double()
    train[1:, dev] = bootstrap_weights(
        groups, resamples=refits, generator=torch.Generator().manual_seed(seed)
    )
    held = dict(zip(("ridge_bias", "ridge_mixing"), fitted.ridges[fitted.deploy], strict=True))
    for name in ("strength", "temperature", "contrast"):
        # What isn't learned was given, or chosen on dev; what is starts from the settings.
        start = torch.tensor(getattr(settings, name), dtype=torch.float64)
        held[name] = start if name in settings.learn else getattr(one, name)[0]
    settled = {name: value.expand(len(train)) for name, value in held.items()}
    nothing = train.new_zeros(train.shape)
    problems = with_own_terms(table, settings, seed, train, nothing, settled)
    rows = Rows(table.logprobs, assistant, table.gold, table.values)
    # From the solution of all of dev a resample's is a few steps away.
    heads = fit_problems(problems, settings, rows, loss, torch.zeros(len(train), dtype=torch.long))
    heads = heads.take(torch.arange(1, len(train)))

    def of(estimate: Tensor, samples: Tensor) -> Interval:
        moved = samples if len(samples.unique()) > 1 else samples[:0]
        return interval(estimate.item(), moved, int(groups.max()) + 1)

    return Learned(
        of(one.strength[0], heads.strength),
        of(one.temperature[0], heads.temperature),
        of(one.contrast[0], heads.contrast),
        [of(*pair) for pair in zip(one.total_bias()[0], heads.total_bias().mT, strict=True)],
    )
