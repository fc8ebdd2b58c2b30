"""Scores over several ranges on paper: tables and figures of `ranges_record`s."""

import math
from collections.abc import Iterable
from typing import Any

from scorecal.evaluation import figures
from scorecal.evaluation.blocks import Block, Grid, Heading, estimate, number, span

Record = dict[str, Any]

_METRICS = {
    "spearman": "Spearman",
    "spearman_per_document": "Spearman within documents",
    "pearson": "Pearson",
    "pearson_per_document": "Pearson within documents",
    "kendall": "Kendall's τ-b",
    "kendall_per_document": "Kendall's τ-b within documents",
    "mse": "MSE, in squared points of gold (lower is better)",
}


def range_parts(task: str, records: list[Record]) -> list[Block]:
    """All tables of a task on several scales.

    Args:
        task: its name.
        records: one a judge.
    """
    parts: list[Block] = [Heading(2, f"{task}: score ranges"), _overview(records)]
    for record in records:
        if record["documents"]:
            left_out = record["documents"]["of_constant_gold"]
            parts.append(
                f"{record['title']}: within documents, the mean over "
                f"{record['documents']['documents']:,} documents, a constant prediction counting "
                f"as 0; {left_out} documents of constant gold are left out in some fold."
            )
            break
    parts.append(
        "Mean: over the ranges. Relative gain: of that mean, over raw; of contrasts at T = 0.2 and "
        "of greedy and generated answers, over the same without contrast; none where what it is "
        "over is not reliably above 0. Spread: the largest minus the smallest figure over the "
        "ranges, never below 0. A point of the contrast that is shared across ranges is the one of "
        "best mean dev Spearman."
    )
    for record in records:
        for metric, title in _METRICS.items():
            if metric in record["methods"][0]["figures"]:
                parts += [
                    Heading(3, f"{task}: {title}, {record['title']}"), _methods(record, metric)
                ]  # fmt: skip
        if record["assistants"]:
            parts += [Heading(3, f"{task}: chosen λ and t, {record['title']}"), _points(record)]
    return parts


def _overview(records: list[Record]) -> Grid:
    rows = [
        [
            record["title"],
            record["table"],
            f"{span(record['dev_items'])} dev, {span(record['test_items'])} test"
            + (f", {record['splits']} folds" if record["splits"] > 1 else ""),
            str(record["groups"]),
            ", ".join(
                f"{number(mass)} on {scale}"
                for scale, mass in zip(record["scales"], record["label_mass"], strict=True)
            ),
        ]
        for record in records
    ]
    return Grid(["judge", "table", "items", "groups in test", "mean label mass"], rows)


def _stated(method: Record) -> str:
    temperature = method["temperature"]
    shown = f", T = {temperature}" if temperature not in ("–", "learned") else ""
    return f"{method['name']}{shown}"


def _methods(record: Record, metric: str) -> Grid:
    rows = []
    for method in record["methods"]:
        figure = method["figures"].get(metric)
        if figure is None or all(math.isnan(one["estimate"]) for one in figure["scales"]):
            continue
        gain = figure["relative_gain"]
        rows.append(
            [
                _stated(method),
                *(number(one["estimate"]) for one in figure["scales"]),
                estimate(figure["mean"]),
                _percent(gain),
                estimate(figure["spread"]),
            ]
        )
    return Grid(["method", *record["scales"], "mean", "relative gain", "spread"], rows)


def _percent(figure: Record) -> str:
    if math.isnan(figure["estimate"]):
        return "–"
    point = f"{figure['estimate']:+.1%}"
    if math.isnan(figure["low"]):
        return point
    return f"{point} [{figure['low']:+.1%}, {figure['high']:+.1%}]"


def _points(record: Record) -> Grid:
    """The points of the contrasts in paper 2's terms (its hyper-parameter tables)."""
    rows = []
    for method in record["methods"]:
        if "t" not in method["settings"][0]:
            continue
        cells = []
        for settings in method["settings"]:
            triples = zip(settings["alpha"], settings["lambda"], settings["t"], strict=True)
            points = sorted(set(triples))
            if len(points) > 3:
                alphas = [alpha for alpha, _, _ in points]
                cells.append(f"{len(points)} points, α {min(alphas):g} to {max(alphas):g}")
                continue
            cells.append("; ".join(f"λ {lam:g}, t {t:g} (α {a:.3g})" for a, lam, t in points))
        rows.append([_stated(method), *cells])
    return Grid(["method", *record["scales"]], rows)


def range_figures(task: str, records: list[Record]) -> Iterable[tuple[str, Any]]:
    """A task's figures by the names of their files, without the task's."""
    shares, labels, logits = {}, {}, {}
    columns = len(records[0]["scales"])  # a row a judge
    for record in records:
        for at, scale in enumerate(record["scales"]):
            panel = f"{record['title']}, {scale}"
            labels[panel] = record["labels"][at]
            shares[panel] = record["shares"][at]
            if found := record["logits"][at]:
                logits[panel] = list(zip(found["mean"], found["low"], found["high"], strict=True))
    yield (
        "range_shares",
        figures.score_share_figure(
            shares,
            labels,
            title=f"{task}: answers over the score ranges, on test",
            columns=columns,
        ),
    )
    if logits:
        yield (
            "range_logits",
            figures.label_logit_figure(
                logits,
                labels,
                title=f"{task}: label logits over the score ranges, on test",
                columns=columns,
            ),
        )
    for record in records:
        rows = []
        for method in record["methods"]:
            spread = method["figures"]["spearman"]["spread"]
            drawn = "shared across ranges" not in method["name"]  # near the same without it
            if drawn and not math.isnan(spread["estimate"]):
                rows.append((_stated(method), spread["estimate"], spread["low"], spread["high"]))
        yield (
            f"range_sensitivity_{record['slug']}",
            figures.interval_figure(
                sorted(rows, key=lambda row: row[1]),
                title=f"{task}: spread of Spearman over the ranges, {record['title']}",
                xlabel="Largest minus smallest Spearman", reference=None,
            ),
        )  # fmt: skip
