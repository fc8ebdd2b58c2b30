"""Many settings of the head, each scored on the inner folds of one dev part."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.calibration.choice import fit_problems, held_out_losses
from scorecal.calibration.folds import NUMERIC, By, Folds, Search, Split, make_problems, partition
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.solvers import Loss, Rows
from scorecal.judging.table import Table

HIGHER = ("spearman", "pearson")


class Trial(NamedTuple):
    """What a head starts from, learns and is fitted for."""

    head: HeadSettings
    loss: Loss


class DevPart:
    """The dev rows of one split, and their inner folds.

    A head that learns nothing is scored on all of dev, as `Select` does.
    """

    def __init__(
        self,
        table: Table,
        assistant: Float[Tensor, "items levels"],
        split: Split,
        folds: Folds,
        seed: int,
    ) -> None:
        self._table = table.rows(split.dev)
        self._rows = Rows(
            self._table.logprobs, assistant[split.dev], self._table.gold, self._table.values
        )
        everything = torch.ones(len(self._table.ids), dtype=torch.bool)
        self._split = Split(split.name, everything, ~everything)
        self._folds, self._seed = folds, seed
        self.count = len(partition(self._table, everything, folds.inner, folds.by, seed))
        """How many inner folds there are."""

    def digest(self) -> str:
        """Of everything that a score depends on but the trial."""
        rows = self._rows
        digest = hashlib.sha256(repr((self._folds, self._seed, self._table.ids)).encode())
        for values in (rows.logprobs, rows.assistant, rows.gold, rows.values):
            digest.update(values.numpy().tobytes())
        return digest.hexdigest()[:16]

    def scores(
        self, trials: Sequence[Trial], metrics: Sequence[By], fold: int | None = None
    ) -> Float[Tensor, "trials metrics folds"]:
        """Held-out metrics of trials, in their own direction; an undefined correlation is -1.

        Trials that differ in numbers alone are problems of one fit.

        Args:
            trials: what to fit.
            metrics: what to compute.
            fold: only this inner fold.
        """
        groups: dict[str, list[int]] = {}
        for index, trial in enumerate(trials):
            alike = {key: value for key, value in vars(trial.head).items() if key not in NUMERIC}
            groups.setdefault(repr((alike, trial.loss)), []).append(index)
        scores: Tensor | None = None
        for members in groups.values():
            found = self._of_group([trials[index] for index in members], metrics, fold)
            if scores is None:
                scores = found.new_empty(len(trials), *found.shape[1:])
            scores[members] = found
        assert scores is not None
        return scores

    def _of_group(
        self, trials: list[Trial], metrics: Sequence[By], fold: int | None
    ) -> Float[Tensor, "trials metrics folds"]:
        settings, loss = trials[0]
        problems, [search] = make_problems(
            self._table, [self._split], self._folds, settings, None, self._seed
        )
        inner = search.inner[0] if fold is None else search.inner[0, fold : fold + 1]
        count, size = len(inner), len(trials)
        numbers = {}
        for name in NUMERIC:
            values = [getattr(trial.head, name) for trial in trials]
            if values[0] != "auto":  # which nothing that is learned has
                numbers[name] = torch.tensor(values, dtype=torch.float64).repeat_interleave(count)
        problems = problems.take(inner.repeat(size))._replace(**numbers)
        heads = fit_problems(problems, settings, self._rows, loss)
        everyone = torch.arange(size * count).view(size, count)
        searches = [Search(self._split, everyone, everyone[:, 0])]
        scores = []
        for metric in metrics:
            losses = held_out_losses(
                heads, problems, searches, self._rows, metric,
                temperature_on=settings.temperature_on,
            )  # fmt: skip
            score = -losses.nan_to_num(nan=1.0) if metric in HIGHER else losses
            scores.append(score.view(size, count))
        return torch.stack(scores, 1)
