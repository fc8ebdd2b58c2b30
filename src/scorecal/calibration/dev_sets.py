"""Dev sets that methods are fitted to, many at once, and what a method answers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scorecal.calibration.folds import Folds, partition
from scorecal.functional.correlation import spearman
from scorecal.functional.scaling import rankable_score
from scorecal.judging.table import Table


@dataclass
class DevSets:
    """One judge's items and the dev sets that methods are fitted to, one a problem."""

    table: Table
    train: Bool[Tensor, "problems items"]
    folds: Folds
    seed: int = 0
    known: dict[str, "Answers"] = field(default_factory=dict, init=False, repr=False)
    """Answers that came with another method's: `head with M` is fitted on the way to `auto`."""

    def dividing(self, problem: int) -> Folds:
        """How a problem's dev set is divided: by row where it is one group."""
        row = self.train[problem].tolist()
        groups = {group for group, own in zip(self.table.groups, row, strict=True) if own}
        by = self.folds.by if len(groups) > 1 else "row"
        return replace(self.folds, by=by, inner=max(2, min(self.folds.inner, sum(row))))

    def parts(self, problem: int) -> list[Float[Tensor, " items"]]:
        """The inner folds of a problem's dev set."""
        folds, row = self.dividing(problem), self.train[problem]
        return [
            part.double() for part in partition(self.table, row, folds.inner, folds.by, self.seed)
        ]


class Answers(NamedTuple):
    """A method's scores of all items under each problem; score-only methods have no logits."""

    score: Float[Tensor, "problems items"]
    logits: Float[Tensor, "problems items levels"] | None
    settings: dict[str, list[float]]
    """What was chosen or fitted, one number a problem."""


class Method(NamedTuple):
    """A way to score: its name in tables, the temperature it states, and how it is done."""

    name: str
    temperature: str
    answer: Callable[[DevSets], Answers]
    transductive: bool = False
    """It reads the test items' log-probabilities, not their gold."""
    start: Callable[[DevSets], Answers] | None = None
    """Where a learning curve starts, without any scored item; None: it can't say anything."""
    baseline: tuple[str, str] = ("raw", "1")
    """Name and temperature of the method that its relative gain over score ranges is against."""


def scored(
    logits: Float[Tensor, "problems items levels"], table: Table, settings: dict[str, list[float]]
) -> Answers:
    """Answers by expected score."""
    return Answers(rankable_score(logits, table.values), logits, settings)


def dev_spearman(
    scores: Float[Tensor, "candidates items"], sets: DevSets
) -> Float[Tensor, "problems candidates"]:
    """Spearman of each candidate's scores on each problem's own rows."""
    gold = sets.table.gold
    return torch.stack(
        [
            spearman(scores[:, row], gold[row], torch.ones(int(row.sum()), dtype=scores.dtype))
            for row in sets.train
        ]
    )


def best_points(figures: Float[Tensor, "problems candidates"]) -> list[int]:
    """Each problem's best candidate; ties, and undefined ones, to the earlier."""
    known = figures.nan_to_num(nan=-math.inf)
    best = known.max(-1, keepdim=True).values
    return (known >= best - 1e-12).double().argmax(-1).tolist()
