"""Methods × metrics of one judge on one task, and what the judge's number bias has to do with them.

Everything is computed on each split's own held-out rows; with several splits a figure is the mean
over them. Groups are drawn once a resample and all methods and splits recomputed: comparisons are
paired, and the fitted methods are held fixed.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scorecal.calibration.folds import Folds, make_splits, partition, refuse_constant
from scorecal.calibration.methods import (
    VANILLA,
    Answers,
    DevSets,
    Method,
    methods,
)
from scorecal.evaluation.evidence import (
    METRICS,
    POINT_ONLY,
    FoldDraws,
    Predictions,
    Truth,
    fold_draws,
    numbered_groups,
    resampled,
)
from scorecal.evaluation.intervals import Interval, adjusted, difference_p, interval
from scorecal.functional.resampling import bootstrap_weights
from scorecal.functional.targets import interpolated_target
from scorecal.judging.table import Table
from scorecal.progress import tracked

RELIABLE = 0.05  # the false discovery rate of what is called reliable
HIGHER_IS_BETTER = ("spearman", "pearson", "kendall", "qwk")
_RANKED = ("spearman", "pearson", "mse", "mae", "sdd", "rps", "qwk")


@dataclass
class Case:
    """One judge's judgements of one task, and how they are divided."""

    task: str
    judge: str
    table: Table
    sets: DevSets
    test: Bool[Tensor, "splits items"]
    scale: str = ""

    @classmethod
    def of(cls, task: str, table: Table, folds: Folds, seed: int, scale: str = "") -> "Case":
        """Divide a table as `fit` does.

        Raises:
            ValueError: it can't be divided so, a dev part's gold is constant, or there is no test.
        """
        splits = [split for split in make_splits(table, folds, seed) if split.test.any()]
        if not splits:
            raise ValueError(
                f"table {table.name!r} has no test items. Add a test split, or set "
                "`data.folds.outer: 5` in its config."
            )
        for split in splits:
            partition(table, split.dev, folds.inner, folds.by, seed)
            refuse_constant(table.gold[split.dev].tolist())
        dev = torch.stack([split.dev for split in splits])
        test = torch.stack([split.test for split in splits])
        judge = table.identity.get("judge", table.name)
        return cls(task, judge, table, DevSets(table, dev, folds, seed), test, scale)

    @cached_property
    def groups(self) -> int:
        """Groups that have test items."""
        tested = self.test.any(0).tolist()
        return len({group for group, used in zip(self.table.groups, tested, strict=True) if used})

    def resampled(self, count: int, generator: torch.Generator) -> Float[Tensor, "resamples items"]:
        """How often each item is drawn: groups that have test items, as many as there are."""
        tested = self.test.any(0)
        weights = torch.zeros(count, len(tested), dtype=torch.float64)
        weights[:, tested] = bootstrap_weights(
            numbered_groups(self.table.rows(tested)), resamples=count, generator=generator
        )
        return weights

    @cached_property
    def truth(self) -> Truth:
        """What scores are compared with."""
        table = self.table
        return Truth(table.gold, interpolated_target(table.gold, table.values), table.values)


class Row(NamedTuple):
    """A method's figures, the resamples they come from, and what it states about itself."""

    method: Method
    answers: Answers
    figures: dict[str, Interval]
    samples: dict[str, Float[Tensor, " resamples"]]


class Comparison(NamedTuple):
    """All methods on one case."""

    case: Case
    rows: list[Row]
    draws: list[FoldDraws]


def compare(case: Case, *, seed: int, resamples: int) -> Comparison:
    """Fit every method that the case has evidence for, and resample its figures."""
    drawn = case.resampled(resamples, torch.Generator().manual_seed(seed))
    draws = fold_draws(case.test.double(), drawn)
    rows = [row_of(case, method, draws) for method in tracked(methods(case.table), "methods")]
    return Comparison(case, rows, draws)


def row_of(
    case: Case,
    method: Method,
    draws: list[FoldDraws],
    metrics: tuple[str, ...] = tuple(METRICS),
) -> Row:
    """One method's figures."""
    answers = method.answer(case.sets)
    everything = Predictions(answers.score, answers.logits)
    # Points of the test items alone: Kendall's is quadratic in the items.
    used, all_truth = case.test.any(0), case.truth
    logits = None if answers.logits is None else answers.logits[:, used]
    made, weights = Predictions(answers.score[:, used], logits), case.test[:, used].double()
    truth = Truth(all_truth.gold[used], all_truth.target[used], all_truth.values)
    figures, samples = {}, {}
    for metric in metrics:
        if answers.logits is None and metric in ("sdd", "rps"):
            continue
        function = METRICS[metric]
        point = function(made, truth, weights).mean().item()
        figures[metric] = Interval(point, math.nan, math.nan)
        if metric not in POINT_ONLY and not math.isnan(point) and case.groups > 1:
            samples[metric] = resampled(function, everything, all_truth, draws)
            figures[metric] = interval(point, samples[metric], case.groups)
    return Row(method, answers, figures, samples)


class Difference(NamedTuple):
    """A method's metric minus another's, and the q of its being 0 among all methods."""

    interval: Interval
    q: float

    def better(self, metric: str) -> bool:
        """Reliably better at the false discovery rate."""
        gain = self.interval.estimate if metric in HIGHER_IS_BETTER else -self.interval.estimate
        return self.q < RELIABLE and gain > 0

    def worse(self, metric: str) -> bool:
        """Reliably worse at the false discovery rate."""
        return Difference(self.interval._replace(estimate=-self.interval.estimate), self.q).better(
            metric
        )


def differences(rows: list[Row], metric: str, reference: Row, groups: int) -> list[Difference]:
    """Every method against a reference, with q-values over all of them."""
    nothing = Interval(math.nan, math.nan, math.nan)
    intervals, p_values = [], []
    for row in rows:
        if row is reference or metric not in row.samples or metric not in reference.samples:
            intervals.append(nothing)
            p_values.append(math.nan)
            continue
        samples = row.samples[metric] - reference.samples[metric]
        estimate = row.figures[metric].estimate - reference.figures[metric].estimate
        intervals.append(interval(estimate, samples, groups))
        # Two methods that never differ are no discovery.
        p_values.append(difference_p(samples, groups) if samples.any() else 1.0)
    return [Difference(*pair) for pair in zip(intervals, adjusted(p_values), strict=True)]


def best_row(rows: list[Row], metric: str) -> Row | None:
    """The best estimate among the methods that see no test input."""
    known = [
        row
        for row in rows
        if not row.method.transductive
        and not math.isnan(row.figures.get(metric, Interval(math.nan, 0, 0)).estimate)
    ]
    sign = -1 if metric in HIGHER_IS_BETTER else 1
    return min(known, key=lambda row: sign * row.figures[metric].estimate, default=None)


def find(rows: list[Row], name: str, temperature: str) -> Row | None:
    """The row of a method at a temperature."""
    return next(
        (row for row in rows if (row.method.name, row.method.temperature) == (name, temperature)),
        None,
    )


def methods_record(comparison: Comparison) -> list[dict[str, Any]]:
    """Every method's figures, its differences from vanilla and raw, and what is bold."""
    case, rows = comparison.case, comparison.rows
    records: list[dict[str, Any]] = [
        {
            "name": row.method.name,
            "temperature": row.method.temperature,
            "transductive": row.method.transductive,
            "settings": row.answers.settings,
            "figures": {metric: figure._asdict() for metric, figure in row.figures.items()},
            "against_vanilla": {},
            "against_raw": {},
            "against_best": {},
            "bold": [],
        }
        for row in rows
    ]
    vanilla, raw = find(rows, "vanilla", f"{VANILLA:g}"), find(rows, "raw", "1")
    assert vanilla is not None
    assert raw is not None
    for metric in _RANKED:
        best = best_row(rows, metric)
        if best is None:
            continue
        over = differences(rows, metric, vanilla, case.groups)
        behind = differences(rows, metric, best, case.groups)
        beside = differences(rows, metric, raw, case.groups)
        for record, row, gain, gap, change in zip(records, rows, over, behind, beside, strict=True):
            for key, found in (
                ("against_vanilla", gain), ("against_raw", change), ("against_best", gap),
            ):  # fmt: skip
                if not math.isnan(found.interval.estimate):
                    record[key][metric] = {**found.interval._asdict(), "q": found.q}
            if gain.better(metric) and (row is best or not gap.worse(metric)):
                record["bold"].append(metric)
    return records
