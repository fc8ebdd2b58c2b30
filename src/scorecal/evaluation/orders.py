"""What the order of a rubric does to a judge's scores, as plain numbers (paper 3).

The judge under single orders, and under means over several, is scored on the same test items and
resamples as every other method, whatever orders the task itself averages.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from scorecal.calibration.dev_sets import Answers, DevSets, Method, scored
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.heads import head, with_known_prior
from scorecal.calibration.methods import shifted_logits
from scorecal.evaluation.compare import (
    HIGHER_IS_BETTER,
    Case,
    Comparison,
    Row,
    differences,
    row_of,
)
from scorecal.evaluation.evidence import numbered_groups
from scorecal.evaluation.intervals import Interval, interval
from scorecal.functional.positions import PERMUTATIONS, cramers_v, shift_test
from scorecal.functional.resampling import bootstrap_weights
from scorecal.functional.scaling import mean_logprobs
from scorecal.judging.positions import balanced_orders, fixed_order_mass, table_position_mass
from scorecal.judging.priors import prior_term
from scorecal.judging.rubric import rotations
from scorecal.judging.table import Table
from scorecal.progress import tracked

METRICS = ("spearman", "pearson", "mse")
_NUMBERS = (1, 2, 3, 5)  # of orders that are averaged, beside all K
_SUBSETS = 5  # at most, of each number above 1: each takes as long as a method
Answer = Callable[[DevSets], Answers]


def orders_record(comparison: Comparison) -> dict[str, Any] | None:
    """Everything about the rubric's orders; None where the table lacks a balanced one."""
    table = comparison.case.table
    if not table.written_order or not balanced_orders(table):
        return None
    resamples = sum(len(block) for block in comparison.draws[0].blocks)
    rows = Rows(comparison)
    return {
        "written": table.written_order,
        **position_record(table, resamples=resamples, seed=comparison.case.sets.seed),
        "single": single_record(rows),
        "by_number": number_record(rows),
        **one_order_record(rows),
    }


def position_record(table: Table, *, resamples: int, seed: int) -> dict[str, Any]:
    """Position prior and score prior over all items, which need no gold, V and the test's p.

    The position prior's intervals are from resamples of groups.
    """
    mass, groups = table_position_mass(table), numbered_groups(table)
    probs = torch.stack([table.by_order[order].softmax(-1) for order in balanced_orders(table)])
    count, prior = int(groups.max()) + 1, mass.mean(0)
    generator = torch.Generator().manual_seed(seed)
    weights = bootstrap_weights(groups, resamples=resamples, generator=generator)
    samples = weights @ mass / weights.sum(-1, keepdim=True)
    each = [
        interval(share, drawn, count)
        for share, drawn in zip(prior.tolist(), samples.T, strict=True)
    ]
    return {
        "items": len(mass),
        "groups": count,
        "position_prior": {name: [getattr(at, name) for at in each] for name in Interval._fields},
        "score_prior": probs.mean((0, 1)).tolist(),
        "cramers_v": cramers_v(prior).item(),
        "p": shift_test(mass, groups, generator=generator),
        "permutations": PERMUTATIONS,
    }


def in_orders(table: Table, orders: Sequence[str]) -> Table:
    """The table as a task that names these orders has it."""
    logprobs = table.by_order[orders[0]]
    if len(orders) > 1:
        logprobs = mean_logprobs(torch.stack([table.by_order[order] for order in orders]))
    return replace(table, logprobs=logprobs, orders=tuple(orders))


def _raw(sets: DevSets) -> Answers:
    table, none = sets.table, sets.table.values.new_zeros(len(sets.train), len(sets.table.labels))
    return scored(shifted_logits(table, none, 1.0), table, {})


def _default_head(sets: DevSets) -> Answers:
    return head(with_known_prior(HeadSettings(), sets.table))(sets)


def _position_prior(sets: DevSets) -> Answers:
    table, mass = sets.table, fixed_order_mass(sets.table)
    term = prior_term("position", {}, table.logprobs, sets.train.double(), mass=mass)
    return scored(shifted_logits(table, term, 1.0), table, {})


class Rows:
    """Ways to score on the mean over some orders, each scored once."""

    def __init__(self, comparison: Comparison) -> None:
        self.case, self.draws = comparison.case, comparison.draws
        self._known: dict[tuple[Answer, tuple[str, ...]], Row] = {}

    def of(self, orders: Sequence[str], answer: Answer = _raw, name: str = "") -> Row:
        """A row; the raw judge's by default."""
        key = (answer, tuple(orders))
        if key not in self._known:
            table = in_orders(self.case.table, orders)
            method = Method("", "", lambda sets: answer(replace(sets, table=table)))
            self._known[key] = row_of(self.case, method, self.draws, METRICS)
        row = self._known[key]
        return row._replace(method=row.method._replace(name=name or " | ".join(orders)))


def _averaged(rows: list[Row], name: str, groups: int) -> Row:
    """The mean of rows' figures, resample by resample."""
    figures, samples = {}, {}
    for metric in METRICS:
        estimates = [row.figures[metric].estimate for row in rows]
        point = sum(estimates) / len(rows)
        figures[metric] = Interval(point, math.nan, math.nan)
        if all(metric in row.samples for row in rows):
            samples[metric] = torch.stack([row.samples[metric] for row in rows]).mean(0)
            figures[metric] = interval(point, samples[metric], groups)
    return Row(rows[0].method._replace(name=name), rows[0].answers, figures, samples)


def _figures(row: Row) -> dict[str, dict[str, float]]:
    return {metric: figure._asdict() for metric, figure in row.figures.items()}


def _against(rows: list[Row], reference: Row, case: Case) -> list[dict[str, dict[str, float]]]:
    """Each row's differences from the reference, with q over all the rows."""
    found: list[dict[str, dict[str, float]]] = [{} for _ in rows]
    for metric in METRICS:
        for record, gap in zip(
            found, differences(rows, metric, reference, case.groups), strict=True
        ):
            if not math.isnan(gap.interval.estimate):
                record[metric] = {**gap.interval._asdict(), "q": gap.q}
    return found


def _kinds(table: Table) -> dict[str, str]:
    """All orders that a table holds, the balanced ones first, and what each is.

    Of the orders of three scores none is other than balanced or reversed, of those of two scores
    none other than balanced.
    """
    balanced = balanced_orders(table)
    turned = [" ".join(order.split(" ")[::-1]) for order in balanced]
    reversed_ = [order for order in turned if order in table.by_order and order not in balanced]
    others = sorted(set(table.by_order) - {*balanced, *reversed_})
    return {
        **dict.fromkeys(balanced, "balanced"),
        **dict.fromkeys(reversed_, "reversed"),
        **dict.fromkeys(others, "random"),
    }


def single_record(rows: Rows) -> list[dict[str, Any]]:
    """The judge under each single order, raw and with the default head, against the written one."""
    kinds = _kinds(rows.case.table)
    records: list[dict[str, Any]] = [
        {"order": order, "kind": kind, "figures": {}, "against_written": {}}
        for order, kind in kinds.items()
    ]
    for name, answer in (("raw", _raw), ("default head", _default_head)):
        found = [rows.of([order], answer) for order in tracked(kinds, f"orders, {name}")]
        gaps = _against(found, found[0], rows.case)
        for record, row, gap in zip(records, found, gaps, strict=True):
            record["figures"][name] = _figures(row)
            record["against_written"][name] = gap
    return records


def number_record(rows: Rows) -> list[dict[str, Any]]:
    """The raw judge by how many orders are averaged: of the balanced ones, and of random ones.

    A figure is the mean over subsets of the orders; all K balanced ones are one subset. `subsets`
    says how many were taken, `of` how many there are.
    """
    case, kinds = rows.case, _kinds(rows.case.table)
    of_kind = {
        kind: [order for order, its in kinds.items() if its == kind]
        for kind in ("balanced", "random")
    }
    levels, records = len(case.table.labels), []
    for number in sorted({*(n for n in _NUMBERS if n < levels), levels}):
        record: dict[str, Any] = {"orders": number}
        means: dict[str, Row] = {}
        for kind, orders in of_kind.items():
            if len(orders) < number:
                continue
            subsets = _subsets(orders, number, case.sets.seed)
            each = [rows.of(subset) for subset in tracked(subsets, f"{number} {kind} orders")]
            means[kind] = _averaged(each, kind, case.groups)
            record[kind] = {
                "subsets": len(subsets),
                "of": math.comb(len(orders), number),
                "figures": _figures(means[kind]),
            }
        if len(means) == 2:
            [gap, _] = _against(list(means.values()), means["random"], case)
            record["balanced_against_random"] = gap
        records.append(record)
    return records


def _subsets(orders: list[str], number: int, seed: int) -> list[tuple[str, ...]]:
    """All subsets of that many orders, or so many drawn ones."""
    if number == 1 or math.comb(len(orders), number) <= _SUBSETS:
        return list(itertools.combinations(orders, number))
    generator, drawn = random.Random(seed), dict[tuple[str, ...], None]()
    while len(drawn) < _SUBSETS:
        chosen = set(generator.sample(range(len(orders)), number))
        drawn[tuple(order for at, order in enumerate(orders) if at in chosen)] = None
    return list(drawn)


def one_order_record(rows: Rows) -> dict[str, Any]:
    """The written order alone and corrected by the position prior, beside all balanced orders.

    `recovered` is the position prior's share in the gain of the balanced orders over the written
    one, raw, for each metric in which that gain is reliable. Measuring the prior takes all orders
    of the dev items, using it one order of every other item.
    """
    case = rows.case
    one = [case.table.written_order]
    every = rotations(one[0])
    position = head(HeadSettings(prior="position"))
    found = [
        rows.of(*given)
        for given in (
            (one, _raw, "one order"),
            (one, _position_prior, "one order, position prior"),
            (every, _raw, "balanced orders"),
            (one, _default_head, "one order, default head"),
            (one, position, "one order, default head with the position prior"),
            (every, _default_head, "balanced orders, default head"),
        )
    ]
    shares = {metric: _recovered(metric, found[:3], case.groups) for metric in METRICS}
    return {
        "one_order": [
            {
                "name": row.method.name,
                "orders": len(every) if row.method.name.startswith("balanced") else 1,
                "figures": _figures(row),
                "against_one": gap,
            }
            for row, gap in zip(found, _against(found, found[0], case), strict=True)
        ],
        "recovered": {
            metric: share._asdict() for metric, share in shares.items() if share is not None
        },
    }


def _recovered(metric: str, rows: list[Row], groups: int) -> Interval | None:
    """A share of a gain that is reliable by itself: its interval leaves out 0."""
    if any(metric not in row.samples for row in rows):
        return None
    one, corrected, every = (row.samples[metric] for row in rows)
    points = [row.figures[metric].estimate for row in rows]
    gain = interval(points[2] - points[0], every - one, groups)
    if not (gain.low > 0 if metric in HIGHER_IS_BETTER else gain.high < 0):
        return None
    share = (points[1] - points[0]) / (points[2] - points[0])
    gained = every - one
    return interval(share, (corrected - one) / gained.where(gained != 0, math.nan), groups)
