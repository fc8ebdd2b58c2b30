"""One judge's scores over several score ranges: what shifting the range does to them (paper 2)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scorecal.calibration.contrast import contrasts, greedy_score, shared
from scorecal.calibration.dev_sets import Answers, Method
from scorecal.calibration.methods import VANILLA, methods
from scorecal.evaluation.compare import Case, row_of
from scorecal.evaluation.evidence import fold_draws, numbered_groups
from scorecal.evaluation.intervals import Interval, interval
from scorecal.functional.correlation import kendall, pearson, spearman
from scorecal.functional.targets import interpolated_target
from scorecal.judging.table import Table
from scorecal.progress import tracked

_POOLED = ("spearman", "pearson", "kendall", "mse")
_PER_DOCUMENT = {"spearman": spearman, "pearson": pearson, "kendall": kendall}
_SHARED = ", shared across ranges"
# They say nothing about ranges that the default head doesn't, and their fits take most of the time.
_LEFT_OUT = ("batch of test inputs", "head with M", "auto")


class _OnScale(NamedTuple):
    """A method's figures on one scale, and the resamples they come from."""

    figures: dict[str, Interval]
    samples: dict[str, Float[Tensor, " resamples"]]
    answers: Answers


def ranges_record(cases: Sequence[Case], *, seed: int, resamples: int) -> dict[str, Any]:
    """Every method on every scale, its mean over them, and how much it depends on the scale.

    Resamples draw the same groups on every scale, so that means, gains and spreads over the scales
    are paired.

    Args:
        cases: one judge's judgements of the same items, on one scale each.
        seed: of the resamples.
        resamples: how many.
    """
    first = cases[0]
    drawn = first.resampled(resamples, torch.Generator().manual_seed(seed))
    draws = fold_draws(first.test.double(), drawn)
    documents = _Documents.of(first, drawn)
    found: dict[tuple[str, str], list[_OnScale]] = {}
    compared = _methods(cases)
    for answering in tracked(compared, "methods on all scales"):
        on_scales = []
        for case, method in zip(cases, answering, strict=True):
            row = row_of(case, method, draws, _POOLED)
            figures, samples = dict(row.figures), dict(row.samples)
            if documents is not None:
                own, drawn_own = documents.figures(row.answers.score)
                figures |= own
                samples |= drawn_own
            on_scales.append(_OnScale(figures, samples, row.answers))
        found[answering[0].name, answering[0].temperature] = on_scales
    records = []
    for method, *_ in compared:
        rows, baseline = found[method.name, method.temperature], found[method.baseline]
        records.append(
            {
                "name": method.name,
                "temperature": method.temperature,
                "settings": [row.answers.settings for row in rows],
                "figures": {
                    metric: _over_scales(metric, rows, baseline, first.groups)
                    for metric in rows[0].figures
                },
            }
        )
    table = first.table
    return {
        "task": first.task,
        "judge": first.judge,
        "table": table.name,
        "scales": [case.scale for case in cases],
        "labels": [list(case.table.labels) for case in cases],
        "assistants": list(table.assistants),
        "splits": len(first.test),
        "dev_items": [int(row.sum()) for row in first.sets.train],
        "test_items": [int(row.sum()) for row in first.test],
        "groups": first.groups,
        "documents": {} if documents is None else documents.counts,
        "label_mass": [case.table.label_mass.nanmean().item() for case in cases],
        "methods": records,
        "shares": [_shares(case) for case in cases],
        "logits": [_label_logits(case.table, case.test.any(0)) for case in cases],
    }


def _methods(cases: Sequence[Case]) -> list[list[Method]]:
    """Each method that all scales allow, as it answers on each."""
    of_scales = [
        {(one.name, one.temperature): one for one in methods(case.table)} for case in cases
    ]
    found = [
        [of_scale[key] for of_scale in of_scales]
        for key in of_scales[0]
        if key[0] not in _LEFT_OUT and all(key in of_scale for of_scale in of_scales)
    ]
    sets = [case.sets for case in cases]
    for assistant in cases[0].table.assistants:
        for (name, temperature), contrast in contrasts(assistant, VANILLA).items():
            method = Method(
                name + _SHARED, temperature, shared(contrast, sets), baseline=contrast.baseline
            )
            found.append([method] * len(cases))
    return found


def _over_scales(
    metric: str, rows: Sequence[_OnScale], baseline: Sequence[_OnScale], groups: int
) -> dict[str, Any]:
    """Figures of each scale, their mean, its relative gain over a baseline, and their spread.

    The spread is the largest minus the smallest figure over the scales. Over a mean that is not
    reliably above 0 there is no gain.
    """
    points = torch.tensor([row.figures[metric].estimate for row in rows], dtype=torch.float64)
    base = torch.tensor([row.figures[metric].estimate for row in baseline], dtype=torch.float64)
    resampled = all(metric in row.samples for row in (*rows, *baseline))
    nothing = torch.full((1,), math.nan, dtype=torch.float64)
    samples = torch.stack([row.samples[metric] for row in rows]) if resampled else nothing
    base_samples = torch.stack([row.samples[metric] for row in baseline]) if resampled else nothing

    def summed(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, of_base = values.mean(0), reference.mean(0)
        return mean, mean / of_base - 1, values.amax(0) - values.amin(0)

    estimates = summed(points, base)
    drawn = summed(samples, base_samples) if resampled else (nothing,) * 3
    mean, gain, spread = (
        interval(point.item(), sample, groups)
        for point, sample in zip(estimates, drawn, strict=True)
    )
    # A share of what may be nothing, or less, says nothing.
    if not resampled or not interval(base.mean().item(), base_samples.mean(0), groups).low > 0:
        gain = Interval(math.nan, math.nan, math.nan)
    return {
        "scales": [row.figures[metric]._asdict() for row in rows],
        "mean": mean._asdict(),
        "relative_gain": gain._asdict(),
        "spread": spread._asdict(),
    }


class _Documents(NamedTuple):
    """Test items by document, padded to the longest: correlations within documents."""

    places: Tensor
    """[documents, items of one]; padded with 0."""
    weights: Float[Tensor, "splits documents width"]
    gold: Float[Tensor, "documents width"]
    varies: Bool[Tensor, "splits documents"]
    """Whose gold is not constant; the others are left out for all methods."""
    drawn: Float[Tensor, "resamples documents"]
    counts: dict[str, int]
    groups: int

    @classmethod
    def of(cls, case: Case, drawn: Float[Tensor, "resamples items"]) -> "_Documents | None":
        """The documents of a case; None where every item is its own."""
        tested = case.test.any(0)
        used = tested.nonzero().flatten()
        numbers = numbered_groups(case.table.rows(tested))
        sizes = numbers.bincount()
        if int(sizes.max()) < 2:
            return None
        places = torch.zeros(len(sizes), int(sizes.max()), dtype=torch.long)
        inside = torch.zeros_like(places, dtype=torch.bool)
        for number, size in enumerate(sizes.tolist()):
            places[number, :size] = used[numbers == number]
            inside[number, :size] = True
        weights = (case.test[:, places] & inside).double()
        gold = case.table.gold[places]
        low = gold.where(weights > 0, math.inf).amin(-1)
        high = gold.where(weights > 0, -math.inf).amax(-1)
        varies = high > low
        counts = {
            "documents": len(sizes),
            "of_constant_gold": int((~varies & (weights.sum(-1) > 0)).any(0).sum()),
        }
        return cls(places, weights, gold, varies, drawn[:, places[:, 0]], counts, case.groups)

    def figures(
        self, score: Float[Tensor, "splits items"]
    ) -> tuple[dict[str, Interval], dict[str, Float[Tensor, " resamples"]]]:
        """Means over documents; a constant prediction counts as 0."""
        figures, samples = {}, {}
        for metric, function in _PER_DOCUMENT.items():
            each = function(score[:, self.places], self.gold, self.weights).nan_to_num(nan=0.0)
            each = each.where(self.varies, 0.0)
            shares = self.varies.double()
            point = (each.sum(-1) / shares.sum(-1)).mean().item()
            resampled = ((self.drawn @ each.mT) / (self.drawn @ shares.mT)).mean(-1)
            name = f"{metric}_per_document"
            samples[name] = resampled
            figures[name] = interval(point, resampled, self.groups)
        return figures, samples


def _shares(case: Case) -> dict[str, list[float]]:
    """Shares of each label on the test items: gold's, greedy answers', mean probabilities."""
    table, tested = case.table, case.test.any(0)
    levels = len(table.values)
    likeliest = greedy_score(table.logprobs[tested], table.values)
    places = (likeliest.unsqueeze(-1) - table.values).abs().argmin(-1)
    return {
        "gold": interpolated_target(table.gold[tested], table.values).mean(0).tolist(),
        "greedy": (places.bincount(minlength=levels) / int(tested.sum())).tolist(),
        "mean probability": table.logprobs[tested].softmax(-1).mean(0).tolist(),
    }


def _label_logits(table: Table, tested: Bool[Tensor, " items"]) -> dict[str, list[float]]:
    """Mean, lower and upper quartile of each label's logit; nothing where logits are unknown."""
    if table.logsumexp is None or table.logsumexp[tested].isnan().any():
        return {}
    logits = table.logprobs[tested] + table.logsumexp[tested].unsqueeze(-1)
    quartiles = torch.tensor([0.25, 0.75], dtype=torch.float64)
    low, high = logits.quantile(quartiles, dim=0)
    return {"mean": logits.mean(0).tolist(), "low": low.tolist(), "high": high.tolist()}
