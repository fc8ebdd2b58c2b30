"""A run's results: as a table to read, as files to keep."""

import json
import math
import platform
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scorecal.calibration.fitted import Fitted
from scorecal.evaluation.evidence import Evaluation, verdict
from scorecal.evaluation.intervals import Interval
from scorecal.judging.records import replacing, write_records
from scorecal.judging.table import Table

_TITLES = {
    "spearman": "Spearman ↑",
    "pearson": "Pearson ↑",
    "kendall": "Kendall ↑",
    "mse": "MSE ↓",
    "mae": "MAE ↓",
    "bias": "bias → 0",
    "sdd": "SDD ↓",
    "rps": "RPS ↓",
    "qwk": "QWK ↑",
}
LOW_MASS = 0.5


def results(
    evaluation: Evaluation | None, fitted: Fitted, table: Table, seed: int
) -> dict[str, Any]:
    """The content of `results.json`; without an evaluation its figures are absent."""
    mass = table.label_mass[~table.label_mass.isnan()]
    return {
        "items": evaluation.items if evaluation else 0,
        **(evaluation.figures() if evaluation else {}),
        "head": fitted.describe(fitted.deploy),
        "heads": [fitted.describe(index) for index in fitted.evaluated],
        "judge": {**table.identity, **{f"engine {k}": v for k, v in table.engine.items()}},
        "data": {
            "table": table.name,
            "dev": int(fitted.train[fitted.deploy].sum()),
            "label_mass": mass.mean().item() if len(mass) else None,
            "censored_rows": int(table.censored.any(-1).sum()),
        },
        "seed": seed,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("scorecal", "torch", "lightning")},
        },
    }


def write_run(
    folder: Path, evaluation: Evaluation | None, fitted: Fitted, table: Table, seed: int
) -> None:
    """Write results.json, head.json and scores.parquet."""
    content = results(evaluation, fitted, table, seed)
    for name, value in (("results.json", content), ("head.json", content["head"])):
        with replacing(folder / name) as partial:
            partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", "utf-8")
    if evaluation:
        write_records(folder / "scores.parquet", evaluation.scores)


def _number(value: float, sign: str) -> str:
    return f"{value:{sign}.3f}"


def _short_number(value: float, sign: str) -> str:
    """Three digits that count, without the zero before the point."""
    decimals = 3 - min(3, len(str(int(abs(value))).lstrip("0")))
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{sign}.{decimals}f}")


def _figure(
    triple: Interval | None, number: Callable[[float, str], str] = _number, sign: str = ""
) -> str:
    if triple is None or math.isnan(triple[0]):
        return "–"
    known = triple[:1] if math.isnan(triple[1]) else triple
    point, *ends = (number(value, sign) for value in known)
    return f"{point} [{', '.join(ends)}]" if ends else point


def table_rows(
    evaluation: Evaluation, number: Callable[[float, str], str] = _number
) -> list[list[str]]:
    """Cells of the comparison, header first."""
    rows = [["", "raw", "calibrated", "difference", "constant", "ridge reference"]]
    for metric, title in _TITLES.items():
        figures = evaluation.methods
        rows.append(
            [
                title,
                *(_figure(figures[method].get(metric), number) for method in ("raw", "calibrated")),
                _figure(figures["gain"].get(metric), number, "+"),
                *(_figure(figures[method].get(metric), number)
                  for method in ("constant", "reference")),
            ]
        )  # fmt: skip
    return rows


def text(evaluation: Evaluation | None, fitted: Fitted, table: Table) -> str:
    """What `fit` and `test` print."""
    head = fitted.describe(fitted.deploy)
    bias = ", ".join(
        f"{label}: {value:+.2f}" for label, value in zip(head["labels"], head["bias"], strict=True)
    )
    alpha = f"α = {head['contrast']:.3g}, " if "contrast" in head else ""
    lines = [
        f"judge: {table.identity.get('judge', 'unknown (log-probabilities from a file)')}",
        f"head ({head['prior']}): λ = {head['lambda']:.3g}, T = {head['temperature']:.3g}, {alpha}"
        f"bias b = λB + δ: {bias}",
    ]
    mass = table.label_mass[~table.label_mass.isnan()]
    if len(mass):
        warning = " (low: the judge mostly wants to say something else)" if (
            mass.mean() < LOW_MASS
        ) else ""  # fmt: skip
        lines.append(f"label mass: mean {mass.mean():.2f}{warning}")
    if evaluation is None:
        return "\n".join(lines)
    rows = table_rows(evaluation, _short_number)
    lines.append(f"{evaluation.items} test items")
    shown = [row[:4] for row in rows]  # the width of a terminal
    widths = [max(len(row[column]) for row in shown) for column in range(4)]
    for row in shown:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    for column in (4, 5):
        figures = (f"{row[0].partition(' ')[0]} {row[column].partition(' ')[0]}"
                   for row in rows[1:] if row[0].startswith(("Spearman", "MSE")))  # fmt: skip
        lines.append(f"{rows[0][column]}: {', '.join(figures)}")
    return "\n".join([*lines, *verdict(evaluation)])
