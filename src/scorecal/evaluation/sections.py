"""The sections of a run's report."""

import math
from typing import Any

from scorecal.calibration.methods import MOST_MIXED
from scorecal.evaluation import figures
from scorecal.evaluation.blocks import (
    Block,
    Drawing,
    Grid,
    Heading,
    Verdict,
    estimate,
    number,
)
from scorecal.evaluation.compare import Comparison
from scorecal.evaluation.diagnosis import (
    RANDOM,
    curves_record,
    mass_record,
    reliability_record,
    shares_record,
)
from scorecal.evaluation.evidence import verdict
from scorecal.evaluation.intervals import Interval
from scorecal.evaluation.presentation import strength_curves
from scorecal.evaluation.refits import REFITS, learned
from scorecal.evaluation.runs import Run
from scorecal.evaluation.summary import LOW_MASS, table_rows
from scorecal.judging.priors import latent_bias

_MOVED = 10


def shown_interval(figure: Interval, sign: str = "") -> str:
    """An estimate with its interval."""
    return estimate(figure._asdict(), sign=sign)


def verdict_section(run: Run) -> list[Block]:
    """The verdict in two sentences, and the data that it is about."""
    said = verdict(run.evaluation)
    items, data = f"{run.results['items']:,} test items", run.results["data"]
    folds = len(run.fitted.evaluated)
    source = f"{folds} folds of " if folds > 1 else ""
    return [
        f"What calibration changed on {items} of {source}{data['table']}, fitted on "
        f"{_dev_items(run)} scored dev items:",
        Verdict(said[:2]),
        *([" ".join(said[2:])] if said[2:] else []),
    ]


def _dev_items(run: Run) -> str:
    counts = [int(run.fitted.train[index].sum()) for index in run.fitted.evaluated]
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def figures_section(run: Run) -> list[Block]:
    """Every metric of the raw judge, the calibrated scores and what they must beat."""
    header, *rows = table_rows(run.evaluation)
    return [
        Heading(2, "Raw against calibrated"),
        Grid(["metric", *header[1:]], rows),
        "MSE is in squared points of gold, MAE and bias in points, SDD in nats. “constant” always "
        "predicts the mean of dev; the ridge reference is a regression of gold on the "
        "log-probabilities.",
    ]


def number_bias_section(run: Run, prefix: str) -> list[Block]:
    """What the judge answers when asked for a random number."""
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
        {"": found}, labels, title=f"{run.task.name}: answers to random-number prompts"
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


def scores_section(run: Run, comparison: Comparison, prefix: str) -> list[Block]:
    """Proportions, density and reliability of the scores on test."""
    labels, task = run.table.labels, run.task.name
    low, high = run.table.values[0].item(), run.table.values[-1].item()
    shares = shares_record(comparison)
    figure = figures.score_share_figure({"": shares}, labels, title=f"{task}: scores on test")
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
            {"": (gold.tolist(), score.tolist())},
            title=f"{task}: {name} score", low=low, high=high,
        )  # fmt: skip
        alt = (
            f"Expected score, {name}, from {score.min():.2f} to {score.max():.2f} with mean "
            f"{score.mean():.2f}; gold has mean {gold.mean():.2f}"
        )
        caption = f"The {name} score of the test items: the stronger the colour, the more of them."
        blocks.append(Drawing(f"{prefix}density_{name}", figure, alt, caption, half=True))
    reliability = reliability_record(comparison)
    figure = figures.reliability_figure(
        {"": {name: (bins[0], bins[1]) for name, bins in reliability.items()}},
        title=f"{task}: reliability of the expected score", low=low, high=high,
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


def learned_section(run: Run, prefix: str) -> list[Block]:
    """λ, T, α and b of the head for new items, with the intervals of `refits`."""
    blocks: list[Block] = [Heading(2, "What was learned")]
    few = len(run.table.labels) <= MOST_MIXED
    found = learned(
        run.fitted, run.table, run.assistant, run.settings, run.loss,
        seed=run.results["seed"], refits=REFITS if few else 0,
    )  # fmt: skip
    names = {"strength": "strength λ", "temperature": "temperature T", "contrast": "contrast α"}
    rows = []
    for name, shown in names.items():
        figure = getattr(found, name)
        how = "learned" if name in run.settings.learn else "given, or chosen on dev"
        if name != "contrast" or figure.estimate:
            rows.append([shown, shown_interval(figure), how])
    head = run.results["head"]
    labels = run.table.labels
    cells = [shown_interval(figure, "+") for figure in found.bias]
    figure = figures.bias_figure(
        {"": found.bias}, labels, title=f"{run.task.name}: bias b = λB + δ"
    )
    caption = (
        f"z = (l̂ + b) / T, with the prior `{head['prior']}` as B: a label with b above 0 is "
        "raised. The head is the one for new items. "
    )
    if few:
        caption += (
            f"Intervals are 95 %, from {REFITS} resamples of dev by group, each refitted with the "
            "ridges held."
        )
    else:
        caption += f"No intervals: with more than {MOST_MIXED} labels the refits take too long."
    if "mixing" in head:
        caption += " M, which mixes the labels, is in head.json."
    alt = f"Bias of each label: {_listed(labels, cells)}"
    return [
        *blocks,
        Grid(["number", "estimate", "how"], rows),
        Drawing(f"{prefix}bias", figure, alt, caption),
    ]


def strength_section(run: Run, comparison: Comparison, prefix: str) -> list[Block]:
    """What debiasing alone does on dev and on test."""
    curves = curves_record(comparison.case)
    if not curves:
        return []
    figure = figures.strength_figure(
        {"": strength_curves(curves)}, title=f"{run.task.name}: Spearman over the strength λ"
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


def mass_section(run: Run, comparison: Comparison) -> list[Block]:
    """How much of the next-token probability lies on the labels, and what comes of it."""
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


def moved_section(run: Run, comparison: Comparison) -> list[Block]:
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
    header = ["item", "gold", "raw", "calibrated", "change"]
    blocks: list[Block] = [Heading(2, "The items that moved most"), Grid(header, rows)]
    if run.texts:
        blocks.append(
            Grid(["item", "text"], [[row[0], run.texts.get(row[0], "–")] for row in rows])
        )
    return blocks


def identity_section(run: Run) -> list[Block]:
    """Judge, data, prompts, versions and command."""
    task, data = run.task, run.results["data"]
    splits = ", ".join(f"{role}: {name}" for role, name in task.splits.items())
    source = run.path or task.source
    if not run.path and task.revision:
        source += f" at revision {task.revision}"
    rows = [
        ["run", run.folder],
        ["command", f"`{run.command}`"],
        ["table", data["table"]],
        ["data", f"{source} ({splits})" if source else splits],
        ["gold", task.gold],
        ["labels are worth", f"{run.table.values[0]:g} to {run.table.values[-1]:g}"],
        ["groups in all", f"{len(set(run.table.groups)):,}"],
        ["rows with censored labels", f"{data['censored_rows']:,}"],
        ["template file", task.template],
        *([name, str(value)] for name, value in run.results["judge"].items()),
        *([name, str(value)] for name, value in run.results["versions"].items()),
        ["seed", str(run.results["seed"])],
    ]
    return [Heading(2, "What this is"), Grid(["", ""], rows)]
