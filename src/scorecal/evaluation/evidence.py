"""Raw beside calibrated on the same held-out items, with paired bootstrap intervals."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scorecal.calibration.calibrators import ridge_predict
from scorecal.calibration.fitted import Fitted
from scorecal.evaluation.intervals import Interval, interval
from scorecal.functional.correlation import kendall, pearson, spearman
from scorecal.functional.metrics import (
    mean_absolute_error,
    mean_bias,
    mean_ranked_probability_score,
    mean_squared_error,
    quadratic_weighted_kappa,
    score_distribution_divergence,
)
from scorecal.functional.resampling import bootstrap_weights
from scorecal.functional.scaling import rankable_score
from scorecal.functional.targets import interpolated_target
from scorecal.judging.table import Table
from scorecal.progress import tracked

RESAMPLES = 2000
_BLOCK = 150_000  # resampled numbers held at once: a few of them fit in a cache


class Predictions(NamedTuple):
    """One method's answers, of one problem or all; score-only methods have no logits."""

    score: Float[Tensor, "*problems items"]
    logits: Float[Tensor, "*problems items levels"] | None


class Truth(NamedTuple):
    """What the predictions are compared with."""

    gold: Float[Tensor, " items"]
    target: Float[Tensor, "items levels"]
    values: Float[Tensor, " levels"]


Metric = Callable[[Predictions, Truth, Tensor], Tensor]


def _of_score(function: Callable[..., Tensor]) -> Metric:
    return lambda made, truth, weights: function(made.score, truth.gold, weights)


def _of_logits(function: Callable[..., Tensor]) -> Metric:
    return lambda made, truth, weights: function(made.logits, truth.target, weights)


METRICS: dict[str, Metric] = {
    "spearman": _of_score(spearman),
    "pearson": _of_score(pearson),
    "kendall": _of_score(kendall),
    "mse": _of_score(mean_squared_error),
    "mae": _of_score(mean_absolute_error),
    "bias": _of_score(mean_bias),
    "sdd": _of_logits(score_distribution_divergence),
    "rps": _of_logits(mean_ranked_probability_score),
    "qwk": lambda made, truth, weights: quadratic_weighted_kappa(
        made.score, truth.gold, weights, truth.values
    ),
}
_METHODS = ("raw", "calibrated", "gain", "constant", "reference")
POINT_ONLY = ("kendall",)  # quadratic in the items


@dataclass
class Evaluation:
    """Figures of every method: metric -> estimate, low, high (NaN: undefined or not resampled)."""

    items: int
    methods: dict[str, dict[str, Interval]]
    scores: list[dict[str, Any]]

    @classmethod
    def from_results(cls, content: dict[str, Any]) -> "Evaluation":
        """Read the figures of a `results.json`; the scores are in another file."""
        methods = {
            method: {
                metric: Interval(
                    **{name: math.nan if x is None else x for name, x in figure.items()}
                )
                for metric, figure in content[method].items()
            }
            for method in (*_METHODS, "gain_over_constant")
        }
        return cls(content["items"], methods, [])

    def figures(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """The same as JSON, NaN as null."""
        return {
            method: {
                metric: {
                    name: None if math.isnan(value) else value
                    for name, value in figure._asdict().items()
                }
                for metric, figure in figures.items()
            }
            for method, figures in self.methods.items()
        }


def evaluate(
    fitted: Fitted,
    table: Table,
    assistant: Float[Tensor, "items levels"],
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> Evaluation:
    """Every method on each problem's own held-out rows.

    With several folds a figure is the mean over the folds of the fold's figure. Groups are drawn
    once a resample and all folds recomputed; the fitted heads are held fixed.

    Raises:
        ValueError: there are no held-out rows, or a head was fitted on one of them.
    """
    rows = fitted.test_rows(table)
    used = rows.any(0)
    if not used.any():
        raise ValueError(
            "no held-out rows to evaluate. Add a test split, or set `--data.folds.outer 5`, "
            "or `--evaluate_test false`."
        )
    rows, table, assistant = rows[:, used], table.rows(used), assistant[used]
    truth = Truth(table.gold, interpolated_target(table.gold, table.values), table.values)
    made = _predictions(fitted, table, assistant)
    generator = torch.Generator().manual_seed(seed)
    groups = numbered_groups(table)
    count = int(groups.max()) + 1
    draws = fold_draws(rows, bootstrap_weights(groups, resamples=resamples, generator=generator))
    methods: dict[str, dict[str, Interval]] = {name: {} for name in _METHODS}
    methods["gain_over_constant"] = {}
    for metric, function in tracked(METRICS.items(), "bootstrap"):
        samples: dict[str, Tensor] = {}
        points: dict[str, float] = {}
        for method, predictions in made.items():
            if predictions.logits is None and metric in ("sdd", "rps"):
                continue
            points[method] = function(predictions, truth, rows).mean().item()
            if metric in POINT_ONLY or math.isnan(points[method]) or count == 1:
                samples[method] = torch.full((1,), math.nan, dtype=torch.float64)
            else:
                samples[method] = resampled(function, predictions, truth, draws)
        points["gain"] = points["calibrated"] - points["raw"]
        samples["gain"] = samples["calibrated"] - samples["raw"]
        if metric == "mse":
            points["gain_over_constant"] = points["calibrated"] - points["constant"]
            samples["gain_over_constant"] = samples["calibrated"] - samples["constant"]
        for method, point in points.items():
            methods[method][metric] = interval(point, samples[method], count)
    return Evaluation(int(used.sum()), methods, _score_rows(fitted, table, made, rows))


def held_out_intervals(
    logits: Float[Tensor, "problems items levels"],
    rows: Float[Tensor, "problems items"],
    table: Table,
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> dict[str, Interval]:
    """Spearman and MSE of inner held-out rows, means over the inner folds.

    Groups are drawn once a resample and all folds recomputed; the inner fits are held fixed. Where
    most resamples leave a fold without a group there is no interval.
    """
    used = rows.any(0)
    logits, rows, table = logits[:, used], rows[:, used], table.rows(used)
    truth = Truth(table.gold, interpolated_target(table.gold, table.values), table.values)
    made = Predictions(rankable_score(logits, table.values), logits)
    groups = numbered_groups(table)
    generator = torch.Generator().manual_seed(seed)
    draws = fold_draws(rows, bootstrap_weights(groups, resamples=resamples, generator=generator))
    found = {}
    for metric in ("spearman", "mse"):
        point = METRICS[metric](made, truth, rows).mean().item()
        samples = resampled(METRICS[metric], made, truth, draws)
        if samples.isnan().sum() > resamples / 2:  # the rest differ too little from each other
            samples = samples[:0]
        found[metric] = interval(point, samples, int(groups.max()) + 1)
    return found


def score_shares(
    logits: Mapping[str, Float[Tensor, "problems items levels"]],
    target: Float[Tensor, "items levels"],
    rows: Float[Tensor, "problems items"],
) -> dict[str, list[float]]:
    """Gold's share of each label beside mean predicted probabilities (paper 1, figure 4).

    Gold between two labels counts for both by proximity; with several problems the mean over them.
    """
    weights = rows / rows.sum(-1, keepdim=True)
    shares = {"gold": (weights @ target).mean(0).tolist()}
    for name, predicted in logits.items():
        mean = torch.einsum("pi,pik->pk", weights, predicted.softmax(-1))
        shares[name] = mean.mean(0).tolist()
    return shares


def numbered_groups(table: Table) -> Int[Tensor, " items"]:
    """Each item's group, numbered from 0 in order of appearance."""
    number = {group: index for index, group in enumerate(dict.fromkeys(table.groups))}
    return torch.tensor([number[group] for group in table.groups])


class FoldDraws(NamedTuple):
    """A fold's own rows, and how often each resample draws them, in blocks of resamples."""

    own: Int[Tensor, " own"]
    blocks: Sequence[Float[Tensor, "block own"]]


def fold_draws(
    rows: Float[Tensor, "folds items"], drawn: Float[Tensor, "resamples items"]
) -> list[FoldDraws]:
    """What every metric of every method is resampled by, laid out once."""
    owns = [row.nonzero().flatten() for row in rows]
    return [FoldDraws(own, drawn[:, own].split(max(1, _BLOCK // max(1, len(own))))) for own in owns]


def resampled(
    function: Metric, made: Predictions, truth: Truth, draws: list[FoldDraws]
) -> Float[Tensor, " resamples"]:
    """The metric of every resample: mean over the folds, each on its own rows."""
    folds = []
    for fold, (own, blocks) in enumerate(draws):
        logits = None if made.logits is None else made.logits[fold, own]
        mine = Predictions(made.score[fold, own], logits)
        truth_here = Truth(truth.gold[own], truth.target[own], truth.values)
        folds.append(torch.cat([function(mine, truth_here, block) for block in blocks]))
    return torch.stack(folds).mean(0)


def _predictions(fitted: Fitted, table: Table, assistant: Tensor) -> dict[str, Predictions]:
    evaluated = torch.tensor(fitted.evaluated)
    shape = (len(evaluated), len(table.ids))
    normalised = table.logprobs.log_softmax(-1)
    logits = fitted.logits(table.logprobs, assistant)[evaluated]
    reference = [ridge_predict(fitted.reference[index], normalised) for index in fitted.evaluated]

    return {
        "raw": Predictions(
            rankable_score(normalised, table.values).expand(shape),
            normalised.expand(*shape, -1),
        ),
        "calibrated": Predictions(rankable_score(logits, table.values), logits),
        "constant": Predictions(fitted.constant[evaluated].unsqueeze(-1).expand(shape), None),
        "reference": Predictions(torch.stack(reference), None),
    }


def _score_rows(
    fitted: Fitted, table: Table, made: dict[str, Predictions], rows: Tensor
) -> list[dict[str, Any]]:
    raw, calibrated = made["raw"].score.tolist(), made["calibrated"].score.tolist()
    gold = table.gold.tolist()
    return [
        {
            "id": table.ids[item],
            "problem": fitted.names[problem],
            "gold": gold[item],
            "raw": raw[line][item],
            "calibrated": calibrated[line][item],
        }
        for line, problem in enumerate(fitted.evaluated)
        for item in rows[line].nonzero().flatten().tolist()
    ]


def verdict(evaluation: Evaluation) -> list[str]:
    """What the intervals say, in sentences."""
    figures = evaluation.methods
    lines = []
    if math.isnan(figures["gain"]["mse"][1]):
        return ["One test group gives no interval: nothing can be said reliably."]
    point, low, high = figures["gain"]["spearman"]
    if math.isnan(point):
        lines.append("Ranking: undefined, a prediction or gold is constant.")
    else:
        says = (
            "a reliable gain" if low > 0 else "a reliable loss" if high < 0 else "no reliable gain"
        )
        lines.append(f"Ranking: {says} in Spearman, {point:+.3f} [{low:+.3f}, {high:+.3f}].")
    raw, constant = figures["raw"]["mse"][0], figures["constant"]["mse"][0]
    rival = "gain" if raw <= constant else "gain_over_constant"
    name = "the raw judge" if raw <= constant else "the constant predictor"
    point, low, high = figures[rival]["mse"]
    says = "a reliable gain" if high < 0 else "a reliable loss" if low > 0 else "no reliable gain"
    lines.append(f"Error: {says} in MSE over {name}, {point:+.3f} [{low:+.3f}, {high:+.3f}].")
    if raw > constant:
        lines.append(
            f"The raw judge's MSE {raw:.3f} is worse than that of always predicting the dev mean, "
            f"{constant:.3f}."
        )
    lines.append(
        "Intervals are 95 % paired bootstrap over groups, with the fitted head held fixed."
    )
    return lines
