"""Runs and comparisons as parts of a page.

A further kind of folder is a further function beside `run_part` and `comparison_part`.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.calibration.dev_sets import DevSets, Method, scored
from scorecal.calibration.fitted import Fitted
from scorecal.calibration.folds import Folds
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.solvers import Loss
from scorecal.evaluation import figures
from scorecal.evaluation.blocks import Block, Drawing, Grid, Heading, Part, Verdict
from scorecal.evaluation.compare import Case, Comparison, row_of
from scorecal.evaluation.diagnosis import (
    RANDOM,
    curves_record,
    mass_record,
    reliability_record,
    shares_record,
)
from scorecal.evaluation.evidence import Evaluation, verdict
from scorecal.evaluation.intervals import Interval
from scorecal.evaluation.presentation import drawn, estimate, number, strength_curves, tables
from scorecal.evaluation.refits import REFITS, Learned, learned
from scorecal.evaluation.summary import LOW_MASS, table_rows
from scorecal.judging.priors import latent_bias
from scorecal.judging.table import Table
from scorecal.judging.task import Task

_MOVED = 10


@dataclass
class Run:
    """What `fit` wrote, with the data that it was fitted on read again."""

    folder: str
    command: str
    results: dict[str, Any]
    fitted: Fitted
    task: Task
    table: Table
    assistant: Float[Tensor, "items levels"]
    folds: Folds
    settings: HeadSettings
    loss: Loss
    texts: dict[str, str]
    """Of the items, by id; empty unless they are to be shown."""

    @property
    def title(self) -> str:
        """Its task and judge."""
        return f"{self.task.name}: {self.judge}"

    @property
    def judge(self) -> str:
        """Who gave the log-probabilities."""
        return self.results["judge"].get("judge", f"log-probabilities of {self.table.name}")

    @property
    def evaluation(self) -> Evaluation:
        """The figures of results.json."""
        return Evaluation.from_results(self.results)

    def comparison(self) -> Comparison:
        """The raw judge and the calibrated scores, for the records that comparisons have."""
        fitted, table, seed = self.fitted, self.table, self.results["seed"]
        evaluated = torch.tensor(fitted.evaluated)
        logits = fitted.logits(table.logprobs, self.assistant)[evaluated]
        raw = table.logprobs.log_softmax(-1).expand_as(logits)
        sets = DevSets(table, fitted.train[evaluated], self.folds, seed)
        case = Case(self.task.name, self.judge, table, sets, fitted.held_out[evaluated])
        methods = [
            Method("raw", "1", lambda sets: scored(raw, sets.table, {})),
            Method("calibrated", "learned", lambda sets: scored(logits, sets.table, {})),
        ]
        drawn = table.gold.new_zeros(0, len(table.ids))
        return Comparison(case, [row_of(case, method, drawn, ()) for method in methods], drawn)


def run_part(run: Run, prefix: str = "") -> Part:
    """A run's sections; the names of its figures begin with `prefix`."""
    comparison = run.comparison()
    return [
        Heading(1, run.title),
        *_verdict(run),
        *_figures_table(run),
        *_number_bias(run, prefix),
        *_scores(run, comparison, prefix),
        *_learned(run, prefix),
        *_strength(run, comparison, prefix),
        *_mass(run, comparison),
        *_moved(run, comparison),
        *_identity(run),
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
                result.append(Drawing(prefix + name, figure, figures.described(figure), ""))
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
            _estimate(methods[method][metric], "+" if method == "gain" else "")
            for metric in ("spearman", "mse")
            for method in ("raw", "calibrated", "gain")
        ]
        numbers = [f"{head[name]:.3g}" for name in ("lambda", "temperature")]
        rows.append([run.folder, run.title, f"{run.results['items']:,}", *numbers, *cells])
    header = ["run", "task and judge", "test items", "λ", "T"]
    for metric in ("Spearman", "MSE"):
        header += [f"{metric}, raw", f"{metric}, calibrated", f"{metric}, difference"]
    return [Heading(1, "The runs"), Grid(header, rows)]


# A run's sections


def _estimate(figure: Interval, sign: str = "") -> str:
    return estimate(figure._asdict(), sign=sign)


def _verdict(run: Run) -> list[Block]:
    ranking, *others = verdict(run.evaluation)
    items, data = f"{run.results['items']:,} test items", run.results["data"]
    folds = len(run.fitted.evaluated)
    source = f"{folds} folds of " if folds > 1 else ""
    return [
        f"What calibration changed on {items} of {source}{data['table']}, fitted on "
        f"{_dev_items(run)} scored dev items:",
        Verdict([ranking, *others[:1]]),
        " ".join(others[1:]),
    ]


def _dev_items(run: Run) -> str:
    counts = [int(run.fitted.train[index].sum()) for index in run.fitted.evaluated]
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _figures_table(run: Run) -> list[Block]:
    header, *rows = table_rows(run.evaluation)
    return [
        Heading(2, "Raw against calibrated"),
        Grid(["metric", *header[1:]], rows),
        "MSE is in squared points of gold, MAE and bias in points, SDD in nats. “constant” always "
        "predicts the mean of dev; the ridge reference is a regression of gold on the "
        "log-probabilities.",
    ]


def _number_bias(run: Run, prefix: str) -> list[Block]:
    found = {
        name: latent_bias(run.table.evidence[kind], prompts=run.settings.prior_prompts).tolist()
        for kind, name in RANDOM.items()
        if kind in run.table.evidence
    }
    blocks: list[Block] = [Heading(2, "The judge's number bias")]
    if not found:
        return [*blocks, "The table has no answers to random-number prompts."]
    labels = run.table.labels
    figure = figures.number_bias_figure(
        {run.judge: found}, labels, title="Answers to random-number prompts"
    )
    alt = ". ".join(
        f"{name}: {_listed(labels, [f'{share:.2f}' for share in probs])}"
        for name, probs in found.items()
    )
    caption = (
        "How probable each label is when the judge is asked for a random number: alone (Deb-R) "
        "and under the task's instruction (Deb-T). A judge without a bias would follow the dashed "
        "line."
    )
    return [*blocks, Drawing(f"{prefix}number_bias", figure, alt, caption)]


def _listed(labels: tuple[str, ...], values: list[str]) -> str:
    return ", ".join(f"{label} {value}" for label, value in zip(labels, values, strict=True))


def _scores(run: Run, comparison: Comparison, prefix: str) -> list[Block]:
    """Proportions, density and reliability of the scores on test."""
    labels, judge = run.table.labels, run.judge
    low, high = run.table.values[0].item(), run.table.values[-1].item()
    shares = shares_record(comparison)
    figure = figures.score_share_figure({judge: shares}, labels, title="Scores on test")
    alt = ". ".join(
        f"{name}: {_listed(labels, [f'{share:.2f}' for share in row])}"
        for name, row in shares.items()
    )
    blocks: list[Block] = [
        Heading(2, "Score proportions"),
        Drawing(
            f"{prefix}score_shares", figure, alt,
            "The share of each label in the gold scores, and its mean probability before and "
            "after calibration. Gold between two labels counts for both by proximity.",
        ),
        Heading(2, "Expected score against gold"),
    ]  # fmt: skip
    test = comparison.case.test
    gold = run.table.gold.expand(test.shape)[test]
    for row in comparison.rows:
        name, score = row.method.name, row.answers.score[test]
        figure = figures.density_figure(
            {judge: (gold.tolist(), score.tolist())},
            title=f"Expected score, {name}", low=low, high=high,
        )  # fmt: skip
        alt = (
            f"Expected score, {name}, from {score.min():.2f} to {score.max():.2f} with mean "
            f"{score.mean():.2f}; gold has mean {gold.mean():.2f}"
        )
        caption = f"{name.capitalize()}: the darker, the more items."
        blocks.append(Drawing(f"{prefix}density_{name}", figure, alt, caption, half=True))
    reliability = reliability_record(comparison)
    figure = figures.reliability_figure(
        {judge: {name: (bins[0], bins[1]) for name, bins in reliability.items()}},
        title="Reliability of the expected score", low=low, high=high,
    )  # fmt: skip
    alt = ". ".join(
        f"{name}, predicted and gold: "
        + ", ".join(f"{x:.2f} and {y:.2f}" for x, y in zip(*bins, strict=True))
        for name, bins in reliability.items()
    )
    caption = (
        "Each point is a tenth of the test items, by expected score. On the dashed line scores "
        "mean what they say."
    )
    return [
        *blocks,
        Heading(2, "Reliability"),
        Drawing(f"{prefix}reliability", figure, alt, caption),
    ]


def _learned(run: Run, prefix: str) -> list[Block]:
    blocks: list[Block] = [Heading(2, "What was learned")]
    found: Learned = learned(
        run.fitted, run.table, run.assistant, run.settings, run.loss, seed=run.results["seed"]
    )
    names = {"strength": "strength λ", "temperature": "temperature T", "contrast": "contrast α"}
    rows = []
    for name, shown in names.items():
        figure = getattr(found, name)
        how = "learned" if name in run.settings.learn else "given, or chosen on dev"
        if name != "contrast" or figure.estimate:
            rows.append([shown, _estimate(figure), how])
    head = run.results["head"]
    labels = run.table.labels
    cells = [_estimate(figure, "+") for figure in found.bias]
    figure = figures.bias_figure({run.judge: found.bias}, labels, title="Bias b = λB + δ")
    caption = (
        f"z = (l̂ + b) / T, with the prior `{head['prior']}` as B: a label with b above 0 is "
        f"raised. Intervals are 95 %, from {REFITS} resamples of dev by group, each refitted with "
        "the ridges held; the head is the one for new items."
    )
    if "mixing" in head:
        caption += " M, which mixes the labels, is in head.json."
    alt = f"Bias of each label: {_listed(labels, cells)}"
    return [
        *blocks,
        Grid(["number", "estimate", "how"], rows),
        Drawing(f"{prefix}bias", figure, alt, caption),
    ]


def _strength(run: Run, comparison: Comparison, prefix: str) -> list[Block]:
    curves = curves_record(comparison.case)
    if not curves:
        return []
    figure = figures.strength_figure(
        {run.judge: strength_curves(curves)}, title="Spearman over the strength λ"
    )
    alt = ". ".join(
        f"{name}: at λ 0 {number(curve['test'][0])} on test, at the λ chosen on dev, "
        f"{', '.join(f'{value:g}' for value in sorted(set(curve['chosen'])))}, "
        f"{number(_at_chosen(curve))}"
        for name, curve in curves.items()
    )
    caption = (
        "What λ·B alone does, with nothing else learned: dashed on dev, solid on test. A point "
        "marks the λ of 0.1 to 1 that dev chooses."
    )
    drawing = Drawing(f"{prefix}strength", figure, alt, caption)
    return [Heading(2, "Spearman over λ"), drawing]


def _at_chosen(curve: dict[str, Any]) -> float:
    """Test Spearman at the λ that all splits chose."""
    first, *others = set(curve["chosen"])
    return math.nan if others else curve["test"][curve["strengths"].index(first)]


def _mass(run: Run, comparison: Comparison) -> list[Block]:
    mass = run.results["data"]["label_mass"]
    blocks: list[Block] = [Heading(2, "Label mass")]
    if mass is None:
        return [*blocks, "Unknown: the log-probabilities don't show all labels."]
    low = " Low: the judge mostly wants to say something else." if mass < LOW_MASS else ""
    blocks.append(
        f"On average {mass:.2f} of the judge's next-token probability lies on the labels.{low}"
    )
    rows = [
        [f"{third['third']} ({third['from']:.2f} to {third['to']:.2f})", name,
         number(figure["spearman"]), number(figure["mse"])]
        for third in mass_record(comparison)
        for name, figure in third["methods"].items()
    ]  # fmt: skip
    header = ["third of test by label mass", "method", "Spearman", "MSE"]
    return [*blocks, Grid(header, rows)] if rows else blocks


def _moved(run: Run, comparison: Comparison) -> list[Block]:
    """The items that calibration moved most, over the folds that tested them."""
    test = comparison.case.test.double()
    times = test.sum(0)
    raw, calibrated = ((test * row.answers.score).sum(0) / times for row in comparison.rows)
    moved = (calibrated - raw).abs().nan_to_num(nan=-1)
    rows = []
    for item in moved.argsort(descending=True, stable=True)[:_MOVED].tolist():
        if times[item] == 0:
            continue
        key = run.table.ids[item]
        cells = [run.table.gold[item], raw[item], calibrated[item]]
        change = calibrated[item] - raw[item]
        rows.append([key, *(f"{cell:.2f}" for cell in cells), f"{change:+.2f}"])
        if run.texts:
            rows[-1].append(run.texts.get(key, "–"))
    header = ["item", "gold", "raw", "calibrated", "change", *(["text"] if run.texts else [])]
    return [Heading(2, "The items that moved most"), Grid(header, rows)]


def _identity(run: Run) -> list[Block]:
    task, data = run.task, run.results["data"]
    splits = ", ".join(f"{role}: {name}" for role, name in task.splits.items())
    revision = f" at revision {task.revision}" if task.revision else ""
    rows = [
        ["run", run.folder],
        ["command", f"`{run.command}`"],
        ["table", data["table"]],
        ["data", f"{task.source}{revision} ({splits})" if task.source else splits],
        ["gold", task.gold],
        ["scale", f"{task.scale}, worth {run.table.values[0]:g} to {run.table.values[-1]:g}"],
        ["groups in all", f"{len(set(run.table.groups)):,}"],
        ["rows with censored labels", f"{data['censored_rows']:,}"],
        ["prompt template", task.template],
        *([name, str(value)] for name, value in run.results["judge"].items()),
        *([name, str(value)] for name, value in run.results["versions"].items()),
        ["seed", str(run.results["seed"])],
    ]
    return [Heading(2, "What this is"), Grid(["", ""], rows)]


def read_results(folder: Path) -> dict[str, Any]:
    """A run's results.json.

    Raises:
        ValueError: it is damaged, or its test split was not opened.
    """
    path = folder / "results.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        items = content["items"]
        if items:
            Evaluation.from_results(content)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{str(path)!r} is damaged. Fit again.") from None
    if not items:
        raise ValueError(
            f"run {str(folder)!r} has no results on test items. Fit with `--evaluate_test true`."
        )
    return content
