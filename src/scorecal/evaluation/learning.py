"""Learning curves: what a method is worth with a few scored items.

Dev sets are nested draws of whole groups, shared by all methods. A resample picks one draw and one
resample of that draw's test items, so an interval holds both: which items were scored, and on which
they were tested. Ridges are chosen anew in every draw.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scorecal.calibration.dev_sets import Answers, DevSets, Method
from scorecal.calibration.methods import methods, shrinkage_arms
from scorecal.evaluation.compare import HIGHER_IS_BETTER, Case
from scorecal.evaluation.evidence import numbered_groups
from scorecal.evaluation.intervals import interval
from scorecal.functional.correlation import spearman
from scorecal.functional.metrics import mean_squared_error
from scorecal.progress import tracked

SIZES = (0, 10, 25, 50, 100, 200, 400)
_METRICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "spearman": spearman,
    "mse": mean_squared_error,
}
# They learn nothing but a λ, for which Deb-T stands.
_LEFT_OUT = ("vanilla", "CC", "DC", "batch", "Deb-R", "greedy", "generated")


class Draws(NamedTuple):
    """Nested dev sets and the split whose test items each draw is tested on."""

    sizes: list[int]
    train: Bool[Tensor, "sizes draws items"]
    split: Int[Tensor, " draws"]


def nested_draws(case: Case, count: int, seed: int) -> Draws:
    """Random orders of each dev part's groups, cut where a size is reached."""
    table, sets = case.table, case.sets
    smallest = int(sets.train.sum(-1).min())
    sizes = [size for size in SIZES if size <= smallest]
    units = numbered_groups(table) if sets.folds.by == "group" else torch.arange(len(table.ids))
    generator = torch.Generator().manual_seed(seed)
    split = torch.arange(count) % len(sets.train)
    train = torch.zeros(len(sizes), count, len(table.ids), dtype=torch.bool)
    for draw, number in enumerate(split.tolist()):
        dev = sets.train[number]
        names = units[dev].unique()
        order = names[torch.randperm(len(names), generator=generator)]
        place = torch.full((int(units.max()) + 1,), len(units))
        place[order] = torch.arange(len(order))
        items = torch.bincount(place[units[dev]], minlength=len(order)).cumsum(0)
        for index, size in enumerate(sizes):
            needed = int((items < size).sum()) + 1 if size else 0
            train[index, draw] = dev & (place[units] < needed)
    return Draws(sizes, train, split)


def learning_methods(case: Case) -> list[Method]:
    """The arms of the shrinkage target, and every method with something to learn, at T = 1."""
    usual = [
        method
        for method in methods(case.table)
        if method.temperature != "0.2"
        and not method.name.startswith(_LEFT_OUT)
        and method.name != "default head"  # one of the arms
    ]
    return [*shrinkage_arms(case.table), *usual]


def learning_record(case: Case, *, draws: int, resamples: int, seed: int) -> dict[str, Any]:
    """Every method's Spearman and MSE over the number of scored items, with intervals.

    `against` holds the differences from shrinking to B, and those of `auto` from the method that
    does best at each size.
    """
    drawn = nested_draws(case, draws, seed)
    generator = torch.Generator().manual_seed(seed)
    weights = case.resampled(resamples, generator)
    picked = torch.randint(draws, (resamples,), generator=generator)
    record: dict[str, Any] = {
        "sizes": drawn.sizes,
        "draws": draws,
        "methods": {},
        "against_B": {},
        "auto_against_best": {},
    }
    samples: dict[str, dict[str, list[Tensor]]] = {name: {} for name in _METRICS}
    points: dict[str, dict[str, list[float]]] = {name: {} for name in _METRICS}
    for size, train in zip(drawn.sizes, drawn.train, strict=True):
        sets = DevSets(case.table, train, case.sets.folds, seed)
        for method in tracked(learning_methods(case), f"learning curve, {size} items"):
            answering = method.answer if size else method.start
            answers = answering and answering(sets)
            for name, metric in _METRICS.items():
                point, sample = _tested(case, drawn, answers, metric, weights, picked)
                points[name].setdefault(method.name, []).append(point)
                samples[name].setdefault(method.name, []).append(sample)
    for name in _METRICS:
        of_size = [
            {arm: found[index] for arm, found in samples[name].items()}
            for index in range(len(drawn.sizes))
        ]
        for arm, estimates in points[name].items():
            record["methods"].setdefault(arm, {})[name] = _lists(
                [
                    interval(estimate, found[arm], case.groups)
                    for estimate, found in zip(estimates, of_size, strict=True)
                ]
            )
            if "shrink to B" in of_size[0] and arm != "shrink to B":
                record["against_B"].setdefault(arm, {})[name] = _lists(
                    [
                        _difference(points[name], of_size, arm, "shrink to B", index, case)
                        for index in range(len(drawn.sizes))
                    ]
                )
        if "auto" in points[name]:
            record["auto_against_best"][name] = _auto_against_best(
                points[name], of_size, name, case
            )
    return record


def _tested(
    case: Case,
    drawn: Draws,
    answers: Answers | None,
    metric: Callable[[Tensor, Tensor, Tensor], Tensor],
    weights: Float[Tensor, "resamples items"],
    picked: Int[Tensor, " resamples"],
) -> tuple[float, Float[Tensor, " resamples"]]:
    """Mean over the draws, and the resamples: each of its own draw and its own test items."""
    sample = weights.new_full((len(weights),), math.nan)
    if answers is None:
        return math.nan, sample
    points = []
    for draw, split in enumerate(drawn.split.tolist()):
        own = case.test[split].nonzero().flatten()
        score, gold = answers.score[draw, own], case.table.gold[own]
        points.append(metric(score, gold, torch.ones_like(gold)))
        index = (picked == draw).nonzero().flatten()
        if len(index):
            sample[index] = metric(score, gold, weights[index][:, own])
    return torch.stack(points).mean().item(), sample


def _difference(
    points: dict[str, list[float]],
    of_size: list[dict[str, Tensor]],
    method: str,
    other: str,
    index: int,
    case: Case,
) -> tuple[float, float, float]:
    estimate = points[method][index] - points[other][index]
    return interval(estimate, of_size[index][method] - of_size[index][other], case.groups)


def _auto_against_best(
    points: dict[str, list[float]], of_size: list[dict[str, Tensor]], metric: str, case: Case
) -> dict[str, Any]:
    sign = -1 if metric in HIGHER_IS_BETTER else 1
    names, found = [], []
    for index in range(len(of_size)):
        known = {
            name: sign * values[index]
            for name, values in points.items()
            if name != "auto" and not math.isnan(values[index])
        }
        if not known:
            names.append("–")
            found.append((math.nan, math.nan, math.nan))
            continue
        best = min(known, key=lambda name: known[name])
        names.append(best)
        found.append(_difference(points, of_size, "auto", best, index, case))
    return {"best": names, **_lists(found)}


def _lists(intervals: list[tuple[float, float, float]]) -> dict[str, list[float]]:
    return {
        name: [found[at] for found in intervals]
        for at, name in enumerate(("estimate", "low", "high"))
    }
