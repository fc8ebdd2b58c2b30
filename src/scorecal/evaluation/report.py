"""Runs, studies and comparisons as parts of a page."""

import json
import math
from pathlib import Path
from typing import Any

from scorecal.calibration.trials import HIGHER
from scorecal.evaluation import figures, sections
from scorecal.evaluation.blocks import Drawing, Grid, Heading, Part
from scorecal.evaluation.drawing import NoFigures, described
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
        ValueError: its tables.json is damaged, of another version, or empty.
    """
    path = folder / "tables.json"
    try:
        content = _with_nan(json.loads(path.read_text(encoding="utf-8")))
        if not content["tasks"]:
            raise ValueError(f"{str(path)!r} holds no task. Run `compare` again.")
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


def read_study(folder: Path, prefix: str = "") -> tuple[dict[str, Any], Part]:
    """A study's study.json, and what a page says of it.

    Raises:
        ValueError: it is damaged, or the best trial was never fitted.
    """
    path = folder / "study.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        part = _study_part(content, prefix)
    except NoFigures:
        raise
    except (LookupError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{str(path)!r} is damaged. Run `study` again.") from None
    if not isinstance(content.get("run"), str):
        raise ValueError(
            f"study {str(folder)!r} ended before its best trial was fitted. Run `study` again."
        )
    return content, part


def _study_part(content: dict[str, Any], prefix: str) -> Part:
    """What a study tried, what came of it and what mattered."""
    splits, metrics = content["splits"], content["metrics"]
    titles = {split: "" if len(splits) == 1 else split for split in splits}
    counts = [sum(trial["state"] == "complete" for trial in one["trials"])
              for one in splits.values()]  # fmt: skip
    pruned = sum(trial["state"] == "pruned" for one in splits.values() for trial in one["trials"])
    each = "" if len(splits) == 1 else f" for each of {len(splits)} dev parts"
    result: Part = [
        Heading(1, f"Study {content['name']}"),
        f"{max(counts):,} trials{each}, proposed by {content['sampler']} and scored by "
        f"{' and '.join(metrics)} on the inner folds of dev"
        + (f"; {pruned:,} more were given up." if pruned else "."),
        Heading(2, "The chosen trials"),
        _chosen(content),
        Heading(2, "History"),
    ]
    for at, metric in enumerate(metrics):
        history = {
            titles[split]: [(trial["number"], trial["values"][at]) for trial in one["trials"]
                            if trial["state"] == "complete"]
            for split, one in splits.items()
        }  # fmt: skip
        figure = figures.history_figure(
            history, title=f"{content['name']}: {metric} of the trials", metric=metric,
            higher_is_better=metric in HIGHER,
        )  # fmt: skip
        best = ", ".join(f"{one['best']['values'][at]:.4f}" for one in splits.values())
        alt = f"{metric} of {max(counts)} trials; the chosen one has {best}"
        result.append(Drawing(f"{prefix}history_{metric}", figure, alt, ""))
    shares = {
        " ".join(filter(None, (titles[split], metric))): {
            key.rpartition(".")[2]: found[at] for key, found in one["importances"].items()
        }
        for split, one in splits.items()
        for at, metric in enumerate(metrics)
        if one["importances"]
    }
    if shares:
        figure = figures.importance_figure(shares, title=f"{content['name']}: what mattered")
        alt = ". ".join(
            f"{title}: " + ", ".join(f"{key} {share:.2f}" for key, share in found.items())
            for title, found in shares.items()
        )
        caption = "Each option's share in what separates good trials from the rest (PED-ANOVA)."
        result += [
            Heading(2, "Importance"),
            Drawing(f"{prefix}importance", figure, alt, caption),
        ]
    if len(metrics) == 2:
        result += _front(content, titles, prefix)
    return result


def _chosen(content: dict[str, Any]) -> Grid:
    keys = list(content["space"])
    rows = [
        [
            split,
            *(f"{value:.4f}" for value in one["best"]["values"]),
            *(f"{value:.4g}" if isinstance(value, float) else str(value)
              for value in (one["best"]["params"][key] for key in keys)),
        ]
        for split, one in content["splits"].items()
    ]  # fmt: skip
    return Grid(["head", *content["metrics"], *(key.rpartition(".")[2] for key in keys)], rows)


def _front(content: dict[str, Any], titles: dict[str, str], prefix: str) -> Part:
    points = {}
    for split, one in content["splits"].items():
        values = {
            trial["number"]: tuple(trial["values"])
            for trial in one["trials"]
            if trial["state"] == "complete"
        }
        rest = [number for number in one["front"] if number != one["best"]["number"]]
        front = [values[number] for number in (one["best"]["number"], *rest)]
        points[titles[split]] = (list(values.values()), front)
    first, second = content["metrics"]
    figure = figures.front_figure(
        points, title=f"{content['name']}: {first} against {second}", metrics=(first, second)
    )
    alt = ". ".join(
        f"{len(front)} of {len(trials)} trials are on the front; the chosen one has {first} "
        f"{front[0][0]:.4f} and {second} {front[0][1]:.4f}"
        for trials, front in points.values()
    )
    caption = "The chosen trial is nearest to the best of each metric, in units of the front."
    return [Heading(2, "Pareto front"), Drawing(f"{prefix}front", figure, alt, caption)]


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
