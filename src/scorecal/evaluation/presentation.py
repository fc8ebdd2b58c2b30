"""A comparison on paper: tables and figures of its records."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scorecal.evaluation import figures
from scorecal.evaluation.blocks import Block, Grid, Heading, along, estimate, number, span
from scorecal.evaluation.drawing import save_figure
from scorecal.evaluation.order_tables import order_parts, position_parts
from scorecal.evaluation.range_tables import range_figures, range_parts

if TYPE_CHECKING:
    import matplotlib.figure

Record = dict[str, Any]

_METRICS = {
    "spearman": "Spearman (higher is better)",
    "pearson": "Pearson (higher is better)",
    "mse": "MSE, in squared points of gold (lower is better)",
    "sdd": "SDD, divergence from gold's distribution in nats (lower is better)",
}
_CURVES = {"spearman": "Spearman", "mse": "MSE"}
_DRAWN_ARMS = (
    "raw", "shrink to B", "shrink to 0", "shrink to B, labels permuted", "auto", "ridge regression"
)  # fmt: skip


def tables(tasks: dict[str, list[Record]], about: Record) -> list[Block]:
    """All tables of a comparison.

    Args:
        tasks: each task's records, one a judge.
        about: command, version, seed, resamples and draws.
    """
    parts: list[Block] = [
        Heading(1, "Comparison"),
        f"`{about['command']}`",
        f"scorecal {about['version']}, seed {about['seed']}. Intervals are 95 %, from "
        f"{about['resamples']:,} paired bootstrap resamples of groups with the fitted methods held "
        "fixed; figures over several folds are means over the folds. **Bold**: not reliably worse "
        "than the best of its column and reliably better than vanilla, at a false discovery rate "
        "of 5 % within task, judge and metric. T is the temperature that a method states, "
        "“learned” one that it fits. † reads the test items' log-probabilities (never their gold), "
        "and doesn't count as the best.",
    ]
    for task, records in tasks.items():
        on_scales = "scales" in records[0]
        parts += range_parts(task, records) if on_scales else _task_parts(task, records)
    return parts


def _task_parts(task: str, records: list[Record]) -> list[Block]:
    parts: list[Block] = [Heading(2, task), _overview(records)]
    for metric, title in _METRICS.items():
        parts += [Heading(3, f"{task}: {title}"), _methods_table(records, metric)]
    parts += _notes(records)
    parts += _strength_parts(task, records)
    parts += [
        Heading(3, f"{task}: can debiasing help?"),
        _excess_text(records),
        _excess_table(records),
    ]
    if any(record["label_mass_thirds"] for record in records):
        parts += [Heading(3, f"{task}: by label mass"), _mass_table(records)]
    parts += position_parts(task, records)
    for record in records:
        if "orders" in record:
            parts += order_parts(task, record)
    for record in records:
        if "learning" in record:
            parts += _learning_parts(task, record)
    return parts


def _overview(records: list[Record]) -> Grid:
    rows = []
    for record in records:
        dev, test = record["dev_items"], record["test_items"]
        rows.append(
            [
                record["title"],
                record["table"],
                f"{span(dev)} dev, {span(test)} test"
                + (f", {record['splits']} folds" if record["splits"] > 1 else ""),
                str(record["groups"]),
                number(record["label_mass"]),
            ]
        )
    return Grid(["judge", "table", "items", "groups in test", "mean label mass"], rows)


def _methods_table(records: list[Record], metric: str) -> Grid:
    names: dict[tuple[str, str], bool] = {}
    for record in records:
        for method in record["methods"]:
            names.setdefault((method["name"], method["temperature"]), method["transductive"])
    rows = []
    for (name, temperature), transductive in names.items():
        cells = []
        for record in records:
            found = _method(record, name, temperature)
            figure = found["figures"].get(metric) if found else None
            cells.append(estimate(figure, bold=bool(found and metric in found["bold"])))
        if any(cell != "–" for cell in cells):
            rows.append([name + (" †" if transductive else ""), temperature, *cells])
    return Grid(["method", "T", *(record["title"] for record in records)], rows)


def _method(record: Record, name: str, temperature: str) -> Record | None:
    return next(
        (
            method
            for method in record["methods"]
            if (method["name"], method["temperature"]) == (name, temperature)
        ),
        None,
    )


def _notes(records: list[Record]) -> list[str]:
    notes = []
    for record in records:
        isotonic = _method(record, "isotonic", "–")
        if isotonic:
            tied = isotonic["settings"]["tied"]
            notes.append(
                f"Isotonic regression gives {sum(tied) / len(tied):.0%} of the test items of "
                f"{record['title']} a score that another has too."
            )
        distribution = _method(record, "DC, dev mean", "1")
        if distribution and any(distribution["settings"]["one_cell"]):
            notes.append(
                f"DC, {record['title']}: gold of a dev part lies in one cell only, so its Beta has "
                "no maximum of likelihood and the concentration 1,000 instead."
            )
    return [" ".join(notes)] if notes else []


def _strength_parts(task: str, records: list[Record]) -> list[Block]:
    if not any(record["strength"] for record in records):
        return []
    prompts, ranges = [], []
    for temperature in ("0.2", "1"):
        for name in ("Deb-R", "Deb-T"):
            for count in (10, 100):
                cells = [_strength(record, name, count, 1.0, temperature) for record in records]
                prompts.append([f"{name}, {count} prompts", temperature, *cells])
            for largest in (1.0, 10.0):
                cells = [
                    _strength(record, name, 10, largest, temperature, chosen=True)
                    for record in records
                ]
                ranges.append([f"{name}, λ ≤ {largest:g}", temperature, *cells])
    header = ["method", "T", *(record["title"] for record in records)]
    return [
        Heading(3, f"{task}: number of random-number prompts, Spearman"),
        Grid(header, prompts),
        Heading(3, f"{task}: range of λ, Spearman (λ chosen on dev)"),
        Grid(header, ranges),
    ]


def _strength(
    record: Record,
    name: str,
    prompts: int,
    largest: float,
    temperature: str,
    *,
    chosen: bool = False,
) -> str:
    for found in record["strength"]:
        key = (found["name"], found["prompts"], found["largest"], found["temperature"])
        if key == (name, prompts, largest, temperature):
            values = sorted(set(found["lambda"]))
            shown = f" (λ {', '.join(f'{value:g}' for value in values)})" if chosen else ""
            return estimate(found["figures"]["spearman"]) + shown
    return "–"


def _excess_text(records: list[Record]) -> str:
    return (
        "Correlation over the labels between B and the judge's excess, log(mean p / gold share), "
        "both known on dev. Debiasing takes from a label what the judge gives it too much of only "
        "where the two run against each other: near -1 it can help, above 0 it adds to the bias. "
        "The gains beside it are against vanilla on test."
    )


def _excess_table(records: list[Record]) -> Grid:
    rows = []
    for record in records:
        for name in ("Deb-R", "Deb-T"):
            method = _method(record, name, "0.2")
            if name in record["excess"] and method:
                rows.append(
                    [
                        record["title"],
                        name,
                        number(record["excess"][name]["correlation"], "+"),
                        estimate(method["against_vanilla"].get("spearman"), sign="+"),
                        estimate(method["against_vanilla"].get("mse"), sign="+"),
                    ]
                )
    return Grid(
        ["judge", "method", "correlation with the excess", "gain in Spearman", "change in MSE"],
        rows,
    )


def _mass_table(records: list[Record]) -> Grid:
    rows = []
    for record in records:
        for third in record["label_mass_thirds"]:
            for name, figure in third["methods"].items():
                rows.append(
                    [
                        record["title"],
                        f"{third['third']} ({third['from']:.2f} to {third['to']:.2f})",
                        name,
                        number(figure["spearman"]),
                        number(figure["mse"]),
                    ]
                )
    return Grid(["judge", "third of test by label mass", "method", "Spearman", "MSE"], rows)


def _learning_parts(task: str, record: Record) -> list[Block]:
    learning = record["learning"]
    sizes = [f"{size:,}" for size in learning["sizes"]]
    parts: list[Block] = [
        Heading(3, f"{task}: learning curve, {record['title']}"),
        f"Scored dev items across; {learning['draws']} nested draws of whole groups, shared by all "
        "methods. Each resample picks one draw and resamples the test items, so the intervals hold "
        "both. At 0 a head is its start.",
    ]
    for metric, title in _CURVES.items():
        rows = [[name, *along(figures[metric])] for name, figures in learning["methods"].items()]
        parts.append(Grid([title, *sizes], rows))
        rows = [
            [name, *along(figures[metric], "+")]
            for name, figures in learning["against_B"].items()
            if name.startswith("shrink")
        ]
        if rows:
            parts.append(Grid([f"{title}, difference from shrinking to B", *sizes], rows))
        if metric in learning["auto_against_best"]:
            against = learning["auto_against_best"][metric]
            rows = [
                ["best single method", *against["best"]],
                ["auto minus it", *along(against, "+")],
            ]
            parts.append(Grid([f"{title} of auto", *sizes], rows))
    return parts


def draw(tasks: dict[str, list[Record]], folder: Path) -> list[Path]:
    """All figures of a comparison, PNG and SVG.

    Raises:
        ValueError: matplotlib is missing.
    """
    written = []
    for task, records in tasks.items():
        for name, figure in drawn(task, records):
            written += save_figure(figure, folder / name)
    return written


def drawn(task: str, records: list[Record]) -> Iterable[tuple[str, "matplotlib.figure.Figure"]]:
    """A task's figures by the names of their files."""
    figured = range_figures if "scales" in records[0] else _figures
    for name, figure in figured(task, records):
        yield f"{task}_{name}", figure


def _figures(task: str, records: list[Record]) -> Iterable[tuple[str, Any]]:
    labels = records[0]["labels"]
    known = [record for record in records if record["latent_bias"]]
    if known:
        yield (
            "latent_bias",
            figures.latent_bias_figure(
                {record["title"]: record["latent_bias"] for record in known},
                labels,
                title=f"{task}: latent number bias",
            ),
        )
        yield (
            "excess",
            figures.excess_figure(
                {
                    f"{record['title']}, {name}": figures.Excess(
                        record["excess"][name]["term"],
                        record["excess"]["excess"],
                        record["excess"][name]["correlation"],
                    )
                    for record in known
                    for name in ("Deb-R", "Deb-T")
                    if name in record["excess"]
                },
                labels,
                title=f"{task}: what B gives and what the judge has too much of, on dev",
            ),
        )
        yield (
            "strength",
            figures.strength_figure(
                {record["title"]: strength_curves(record["curves"]) for record in known},
                title=f"{task}: Spearman over the strength λ",
            ),
        )
    yield (
        "score_shares",
        figures.score_share_figure(
            {record["title"]: record["shares"] for record in records},
            labels,
            title=f"{task}: predicted and gold scores on test",
        ),
    )
    yield (
        "reliability",
        figures.reliability_figure(
            {
                record["title"]: {
                    name: (bins[0], bins[1]) for name, bins in record["reliability"].items()
                }
                for record in records
            },
            title=f"{task}: reliability of the expected score",
            low=records[0]["values"][0],
            high=records[0]["values"][-1],
        ),
    )
    for record in records:
        yield f"spearman_{record['slug']}", figures.interval_figure(
            _ranked(record), title=f"{task}: {record['title']}", xlabel="Spearman",
            reference=_raw_spearman(record),
        )  # fmt: skip
    ordered = {record["title"]: record["orders"] for record in records if "orders" in record}
    if ordered:
        yield (
            "positions",
            figures.position_figure(
                {
                    title: figures.PositionShares(
                        **orders["position_prior"], association=orders["cramers_v"], p=orders["p"]
                    )
                    for title, orders in ordered.items()
                },
                title=f"{task}: probability by position in the rubric",
            ),
        )
    learned = [record for record in records if "learning" in record]
    for metric, title in _CURVES.items():
        if learned:
            yield (
                f"learning_{metric}",
                figures.learning_curve_figure(
                    {
                        record["title"]: {
                            name: figures.LearningCurve(
                                record["learning"]["sizes"],
                                curve["estimate"],
                                curve["low"],
                                curve["high"],
                            )
                            for name in _DRAWN_ARMS
                            if name in record["learning"]["methods"]
                            for curve in [record["learning"]["methods"][name][metric]]
                        }
                        for record in learned
                    },
                    title=f"{task}: what scored items are worth",
                    metric=title,
                ),
            )


def strength_curves(curves: Record) -> dict[str, figures.StrengthCurve]:
    """What `curves_record` found, with the λ that all splits chose."""
    return {
        name: figures.StrengthCurve(
            curve["strengths"],
            curve["dev"],
            curve["test"],
            curve["chosen"][0] if len(set(curve["chosen"])) == 1 else math.nan,
        )
        for name, curve in curves.items()
    }


def _ranked(record: Record) -> list[tuple[str, float, float, float]]:
    rows = []
    for method in record["methods"]:
        figure = method["figures"]["spearman"]
        if not math.isnan(figure["estimate"]):
            stated = (
                ""
                if method["temperature"] in ("–", "learned")
                else f", T = {method['temperature']}"
            )
            rows.append(
                (method["name"] + stated, figure["estimate"], figure["low"], figure["high"])
            )
    return sorted(rows, key=lambda row: -row[1])


def _raw_spearman(record: Record) -> float | None:
    raw = _method(record, "raw", "1")
    value = raw["figures"]["spearman"]["estimate"] if raw else math.nan
    return None if math.isnan(value) else value
