"""Runs and comparisons as parts of a page.

A further kind of folder is a further function beside `run_part` and `comparison_part`.
"""

import json
import math
from pathlib import Path
from typing import Any

from scorecal.evaluation import sections
from scorecal.evaluation.blocks import Drawing, Grid, Heading, Part
from scorecal.evaluation.drawing import described
from scorecal.evaluation.presentation import drawn, tables
from scorecal.evaluation.runs import Run
from scorecal.evaluation.sections import shown_interval


def run_part(run: Run, prefix: str = "") -> Part:
    """A run's sections; the names of its figures begin with `prefix`."""
    comparison = run.comparison()
    return [
        Heading(1, run.title),
        *sections.verdict_section(run),
        *sections.figures_section(run),
        *sections.number_bias_section(run, prefix),
        *sections.scores_section(run, comparison, prefix),
        *sections.learned_section(run, prefix),
        *sections.strength_section(run, comparison, prefix),
        *sections.mass_section(run, comparison),
        *sections.moved_section(run, comparison),
        *sections.identity_section(run),
    ]


def comparison_part(folder: Path, prefix: str = "") -> Part:
    """The tables and figures of what `compare` wrote.

    Raises:
        ValueError: its tables.json is damaged, or of another version.
    """
    path = folder / "tables.json"
    try:
        content = _with_nan(json.loads(path.read_text(encoding="utf-8")))
        _, *parts = tables(content["tasks"], content)
        result: Part = [Heading(1, f"Comparison: {', '.join(content['tasks'])}"), *parts]
        for task, records in content["tasks"].items():
            result.append(Heading(2, f"{task}: figures"))
            for name, figure in drawn(task, records):
                result.append(Drawing(prefix + name, figure, described(figure), ""))
    except (LookupError, TypeError, AttributeError, json.JSONDecodeError):
        raise ValueError(
            f"{str(path)!r} is damaged or of another version. Run `compare` again."
        ) from None
    return result


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value


def runs_part(runs: list[Run]) -> Part:
    """What comes before several runs: one row each."""
    rows = []
    for run in runs:
        methods, head = run.evaluation.methods, run.results["head"]
        cells = [
            shown_interval(methods[method][metric], "+" if method == "gain" else "")
            for metric in ("spearman", "mse")
            for method in ("raw", "calibrated", "gain")
        ]
        numbers = [f"{head[name]:.3g}" for name in ("lambda", "temperature")]
        rows.append([run.folder, run.title, f"{run.results['items']:,}", *numbers, *cells])
    header = ["run", "task and judge", "test items", "λ", "T"]
    for metric in ("Spearman", "MSE"):
        header += [f"{metric}, raw", f"{metric}, calibrated", f"{metric}, difference"]
    return [Heading(1, "The runs"), Grid(header, rows)]
