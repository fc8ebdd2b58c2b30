"""Figures of comparisons and reports: numbers in, a `matplotlib.figure.Figure` out.

`panels` maps each panel's title, such as the judge's name, to its data. NaN leaves a gap.
"""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from scorecal.evaluation.drawing import (
    COLOURS,
    GREY,
    bars,
    describe_axes,
    figure_style,
    finish,
    finite,
    from_zero,
    interval_text,
    label_axis,
    label_line,
    method_looks,
    panel_axes,
    series_names,
)

if TYPE_CHECKING:
    import matplotlib.figure

Series = Mapping[str, Sequence[float]]
_CELLS = 25  # a side of a density


class Excess(NamedTuple):
    """A judge's debiasing term beside its excess log(mean p / gold share), one value a label."""

    term: Sequence[float]
    excess: Sequence[float]
    correlation: float


class StrengthCurve(NamedTuple):
    """A metric over strengths λ on dev and on test, and the λ that dev chose (NaN: none)."""

    strengths: Sequence[float]
    dev: Sequence[float]
    test: Sequence[float]
    chosen: float


class LearningCurve(NamedTuple):
    """A metric with its interval over numbers of dev labels."""

    labels: Sequence[int]
    estimate: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


class PositionShares(NamedTuple):
    """Mean probability at each position of a rubric with its interval, Cramér's V and its p."""

    estimate: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    association: float
    p: float


@figure_style()
def latent_bias_figure(
    panels: Mapping[str, Series], labels: Sequence[str], *, title: str
) -> "matplotlib.figure.Figure":
    """Probability of each label as a random number (paper 1, figure 3).

    Keys such as `Deb-T, 10 prompts`: colours tell what precedes the comma, lines what follows it,
    the first solid, the second dotted.
    """
    names = series_names(panels)
    sources = list(dict.fromkeys(name.partition(", ")[0] for name in names))
    selections = list(dict.fromkeys(name.partition(", ")[2] for name in names))
    looks = method_looks(sources)
    dashes = ("-", ":", "--", "-.")
    figure, axes = panel_axes(panels, sharey=True)
    for axis, series in zip(axes, panels.values(), strict=True):
        for name, probs in series.items():
            source, _, selection = name.partition(", ")
            look = {**looks[source], "linestyle": dashes[selections.index(selection) % 4]}
            label_line(axis, probs, label=name, **look)
    return _finish_beside_uniform(figure, axes, labels, title)


@figure_style()
def number_bias_figure(
    panels: Mapping[str, Series], labels: Sequence[str], *, title: str
) -> "matplotlib.figure.Figure":
    """Probability of each label as a random number: bars of each source beside each other."""
    looks = method_looks(series_names(panels))
    figure, axes = panel_axes(panels, sharey=True)
    for axis, series in zip(axes, panels.values(), strict=True):
        width = 0.8 / max(1, len(series))
        for number, (name, probs) in enumerate(series.items()):
            shift = (number - (len(series) - 1) / 2) * width
            places = [place + shift for place in range(len(probs))]
            axis.bar(places, finite(probs), width=width, color=looks[name]["color"], label=name)
    return _finish_beside_uniform(figure, axes, labels, title)


def _finish_beside_uniform(
    figure: "matplotlib.figure.Figure", axes: Sequence[Any], labels: Sequence[str], title: str
) -> "matplotlib.figure.Figure":
    for axis in axes:
        axis.axhline(1 / len(labels), label="uniform", color=GREY, linestyle="--", linewidth=1)
        label_axis(axis, labels)
    from_zero(axes)
    describe_axes(axes, "Score label", "Probability")
    return finish(figure, axes, title)


@figure_style()
def position_figure(
    panels: Mapping[str, PositionShares], *, title: str
) -> "matplotlib.figure.Figure":
    """Mean probability at each position of the rubric as bars (paper 3, figure 5)."""
    figure, axes = panel_axes(panels, sharey=True)
    for axis, shares in zip(axes, panels.values(), strict=True):
        bars(axis, shares.estimate, label="mean probability")
        for place, ends in enumerate(zip(shares.low, shares.high, strict=True)):
            axis.plot([place, place], finite(ends), color=COLOURS[2], label="95 % interval")
        count = len(shares.estimate)
        axis.axhline(1 / count, label="uniform", color=GREY, linestyle="--", linewidth=1)
        label_axis(axis, [str(place) for place in range(1, count + 1)])
    from_zero(axes)
    for axis, shares in zip(axes, panels.values(), strict=True):
        if axis is axes[0]:  # all share its y
            axis.set_ylim(0, 1.16 * axis.get_ylim()[1])  # room for V
        known = not math.isnan(shares.association + shares.p)
        p = f"p = {shares.p:.3f}" if shares.p >= 0.001 else "p < 0.001"
        figures = f"V = {shares.association:.3f}, {p}" if known else "undefined"
        axis.text(
            *(0.98, 0.97, figures), transform=axis.transAxes, ha="right", va="top", fontsize=8.5,
        )  # fmt: skip
    describe_axes(axes, "Position in the rubric", "Mean probability")
    return finish(figure, axes, title)


@figure_style()
def score_share_figure(
    panels: Mapping[str, Series],
    labels: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    title: str,
    columns: int = 3,
) -> "matplotlib.figure.Figure":
    """Share of gold scores (key `gold`, bars) beside methods' mean probabilities (figure 4).

    Labels are those of all panels, or each panel's own (paper 2, figure 2).
    """
    looks = method_looks([name for name in series_names(panels) if name != "gold"])
    figure, axes = panel_axes(panels, columns=columns, sharey=True)
    for axis, (panel, series) in zip(axes, panels.items(), strict=True):
        for name, probs in series.items():
            if name == "gold":
                bars(axis, probs, label=name)
            else:
                label_line(axis, probs, label=name, **looks[name])
        label_axis(axis, labels[panel] if isinstance(labels, Mapping) else labels)
    from_zero(axes)
    describe_axes(axes, "Score label", "Share, mean probability")
    return finish(figure, axes, title)


@figure_style()
def label_logit_figure(
    panels: Mapping[str, Sequence[tuple[float, float, float]]],
    labels: Mapping[str, Sequence[str]],
    *,
    title: str,
    columns: int = 3,
) -> "matplotlib.figure.Figure":
    """Next-token logit of each label (mean, quartiles) over the items (paper 2, figure 3)."""
    figure, axes = panel_axes(panels, columns=columns)
    for axis, (panel, triples) in zip(axes, panels.items(), strict=True):
        mean, low, high = (finite(values) for values in zip(*triples, strict=True))
        axis.fill_between(range(len(mean)), low, high, color=COLOURS[2], alpha=0.2, linewidth=0,
                          label="middle half of the items")  # fmt: skip
        label_line(axis, mean, label="mean", marker="o", color=COLOURS[2])
        label_axis(axis, labels[panel])
    describe_axes(axes, "Score label", "Logit")
    return finish(figure, axes, title)


@figure_style()
def excess_figure(
    panels: Mapping[str, Excess], labels: Sequence[str], *, title: str
) -> "matplotlib.figure.Figure":
    """The debiasing term B of each label (bars) beside the judge's excess (line)."""
    figure, axes = panel_axes(panels)
    for axis, (term, excess, correlation) in zip(axes, panels.values(), strict=True):
        bars(axis, term, label="debiasing term B")
        look = {"color": COLOURS[3], "linestyle": "-", "marker": "o"}
        label_line(axis, excess, label="excess log(mean p / gold share)", **look)
        axis.axhline(0, color="#444444", linewidth=0.7)
        label_axis(axis, labels)
        low, high = axis.get_ylim()
        axis.set_ylim(low, high + 0.16 * (high - low))  # room for the correlation
        figures = "undefined" if math.isnan(correlation) else f"{correlation:+.2f}"
        axis.text(
            *(0.98, 0.97, f"correlation {figures.replace('-', '−')}"),
            transform=axis.transAxes, ha="right", va="top", fontsize=8.5,
        )  # fmt: skip
    describe_axes(axes, "Score label", "Log ratio (nats)")
    return finish(figure, axes, title)


@figure_style()
def strength_figure(
    panels: Mapping[str, Mapping[str, StrengthCurve]], *, title: str, metric: str = "Spearman"
) -> "matplotlib.figure.Figure":
    """A metric over the strength λ, on dev and on test, with the λ that dev chose."""
    from matplotlib.lines import Line2D

    looks = method_looks(series_names(panels))
    figure, axes = panel_axes(panels)
    for axis, curves in zip(axes, panels.values(), strict=True):
        for name, curve in curves.items():
            color, marker = looks[name]["color"], looks[name]["marker"]
            chosen = [
                index
                for index, strength in enumerate(curve.strengths)
                if math.isclose(strength, curve.chosen, rel_tol=1e-6, abs_tol=1e-9)
            ]
            for values, linestyle in ((curve.dev, "--"), (curve.test, "-")):
                axis.plot(
                    *(list(curve.strengths), finite(values)),
                    color=color, linestyle=linestyle, marker=marker, markevery=chosen,
                    markersize=8, clip_on=False, zorder=3,
                )  # fmt: skip
    describe_axes(axes, "Strength λ", metric)
    handles = {
        name: Line2D([], [], color=look["color"], marker=look["marker"], markersize=8)
        for name, look in looks.items()
    }
    handles["dev"] = Line2D([], [], color=GREY, linestyle="--")
    handles["test"] = Line2D([], [], color=GREY)
    handles["λ chosen on dev"] = Line2D([], [], color=GREY, linestyle="", marker="o", markersize=8)
    return finish(figure, axes, title, handles)


@figure_style()
def reliability_figure(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    *,
    title: str,
    low: float,
    high: float,
) -> "matplotlib.figure.Figure":
    """Mean gold score over mean predicted score, one point a bin: (predicted, gold) a method."""
    looks = method_looks(series_names(panels))
    figure, axes = panel_axes(panels, height=3.3, sharex=True, sharey=True)
    ends = [low, high]
    for axis, methods in zip(axes, panels.values(), strict=True):
        axis.plot([low, high], [low, high], color=GREY, linestyle="--", linewidth=1,
                  label="predicted = gold")  # fmt: skip
        for name, (predicted, gold) in methods.items():
            line = axis.plot(finite(predicted), finite(gold), label=name, zorder=3, **looks[name])
            ends += [value for data in line[0].get_data() for value in data if value == value]
    margin = 0.04 * (max(ends) - min(ends))
    for axis in axes:
        axis.set_aspect("equal")
        axis.set(xlim=(min(ends) - margin, max(ends) + margin))
        axis.set(ylim=(min(ends) - margin, max(ends) + margin))
        axis.tick_params(labelbottom=True, labelleft=True)
    describe_axes(axes, "Mean predicted score", "Mean gold score")
    return finish(figure, axes, title)


@figure_style()
def density_figure(
    panels: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    low: float,
    high: float,
) -> "matplotlib.figure.Figure":
    """How many items have which gold (x) and predicted score (y): (gold, predicted) a panel."""
    from matplotlib.colors import ListedColormap, PowerNorm, to_rgba
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    # Opacity counts, so that an empty cell is whatever the page is.
    shades = ListedColormap([to_rgba(COLOURS[2], step / 255) for step in range(256)])
    figure, axes = panel_axes(panels, height=3.3)
    most = 0
    for axis, (gold, predicted) in zip(axes, panels.values(), strict=True):
        counts, *_ = axis.hist2d(
            *(list(gold), list(predicted)),
            bins=_CELLS, range=[[low, high], [low, high]], cmin=1, cmap=shades,
            norm=PowerNorm(0.5, vmin=0), antialiased=False, linewidth=0,
        )  # fmt: skip
        most = max([most, *(int(count) for count in counts.flat if count == count)])
        axis.plot([low, high], [low, high], color=GREY, linestyle="--", linewidth=1)
        axis.set_aspect("equal")
    for axis in axes:
        axis.collections[0].set_clim(0, most)
    describe_axes(axes, "Gold score", "Expected score")
    handles = {
        "predicted = gold": Line2D([], [], color=GREY, linestyle="--", linewidth=1),
        f"{most} items in a cell": Patch(color=COLOURS[2]),
    }
    return finish(figure, axes, title, handles)


@figure_style()
def bias_figure(
    panels: Mapping[str, Sequence[tuple[float, float, float]]], labels: Sequence[str], *, title: str
) -> "matplotlib.figure.Figure":
    """The bias b of each label (estimate, low, high) as a dot with its 95 % interval."""
    figure, axes = panel_axes(panels, sharey=True)
    for axis, intervals in zip(axes, panels.values(), strict=True):
        axis.axhline(0, color="#444444", linewidth=0.7)
        for place, triple in enumerate(intervals):
            estimate, *ends = finite(triple)
            axis.plot([place, place], ends, color=COLOURS[2], label="95 % interval")
            axis.plot([place], [estimate], color=COLOURS[2], linestyle="", marker="o",
                      zorder=3, label="bias b")  # fmt: skip
        label_axis(axis, labels)
    describe_axes(axes, "Score label", "Bias b (nats)")
    return finish(figure, axes, title)


@figure_style()
def learning_curve_figure(
    panels: Mapping[str, Mapping[str, LearningCurve]], *, title: str, metric: str
) -> "matplotlib.figure.Figure":
    """A metric over the number of dev labels, which are evenly spaced, with interval bands."""
    looks = method_looks(series_names(panels))
    counts = sorted(
        {n for curves in panels.values() for curve in curves.values() for n in curve.labels}
    )
    figure, axes = panel_axes(panels)
    for axis, curves in zip(axes, panels.values(), strict=True):
        for name, curve in curves.items():
            places = [counts.index(count) for count in curve.labels]
            look = looks[name]
            axis.fill_between(places, finite(curve.low), finite(curve.high),
                              color=look["color"], alpha=0.1, linewidth=0)  # fmt: skip
            axis.plot(places, finite(curve.estimate), label=name, zorder=3, **look)
        label_axis(axis, [str(count) for count in counts])
    describe_axes(axes, "Dev labels", metric)
    return finish(figure, axes, title)


@figure_style()
def interval_figure(
    rows: Sequence[tuple[str, float, float, float]],
    *,
    title: str,
    xlabel: str,
    reference: float | None,
) -> "matplotlib.figure.Figure":
    """Each row's (name, estimate, low, high) as a dot with its 95 % interval, the first on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 1.3 + 0.27 * len(rows)), layout="constrained")
    axis = figure.subplots()
    names = [textwrap.fill(name, 44) for name, *_ in rows]
    places = range(len(rows))
    for place, row in enumerate(rows):
        estimate, *interval = finite(row[1:])
        axis.plot(interval, [place, place], color=COLOURS[2])
        axis.plot([estimate], [place], color=COLOURS[2], marker="o", markersize=6.5, zorder=3)
        axis.text(1.02, place, interval_text(estimate, *interval), va="center", fontsize=8,
                  transform=axis.get_yaxis_transform())  # fmt: skip
    if reference is not None:
        axis.axvline(reference, color=GREY, linestyle="--", linewidth=1)
    axis.set_yticks(places, names)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.spines["left"].set_visible(False)
    axis.set(xlabel=f"{xlabel}, with 95 % interval", ylabel="")
    return finish(figure, [axis], title, {})


@figure_style()
def history_figure(
    panels: Mapping[str, Sequence[tuple[int, float]]],
    *,
    title: str,
    metric: str,
    higher_is_better: bool,
) -> "matplotlib.figure.Figure":
    """A study's trials (number, value) as points, and the best value so far as a line."""
    figure, axes = panel_axes(panels, sharey=True)
    best_of = max if higher_is_better else min
    for axis, trials in zip(axes, panels.values(), strict=True):
        ordered = sorted(trials)
        numbers = [number for number, _ in ordered]
        values = finite([value for _, value in ordered])
        best = list(itertools.accumulate(values, best_of))
        axis.plot(numbers, values, color=GREY, linestyle="", marker="o", markersize=3.5,
                  markeredgewidth=0, label="trial")  # fmt: skip
        axis.plot(numbers, best, color=COLOURS[2], drawstyle="steps-post", label="best so far")
    describe_axes(axes, "Trial", f"{metric}, held out")
    return finish(figure, axes, title)


@figure_style()
def importance_figure(
    panels: Mapping[str, Mapping[str, float]], *, title: str
) -> "matplotlib.figure.Figure":
    """Each option's share in what separates good trials from the rest, as bars."""
    options = series_names(panels)
    figure, axes = panel_axes(panels, height=0.9 + 0.3 * len(options), sharex=True, sharey=True)
    for axis, shares in zip(axes, panels.values(), strict=True):
        lengths = [shares.get(option, 0.0) for option in options]
        axis.barh(range(len(options)), lengths, height=0.6, color=COLOURS[2])
        axis.set_yticks(range(len(options)), options)
        axis.set_ylim(len(options) - 0.4, -0.6)
        axis.grid(visible=False, axis="y")
    describe_axes(axes, "Share of importance", "")
    return finish(figure, axes, title, {})


@figure_style()
def front_figure(
    panels: Mapping[str, tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]]],
    *,
    title: str,
    metrics: tuple[str, str],
) -> "matplotlib.figure.Figure":
    """Two metrics of all trials, and those that none beats in both; the first is the chosen one."""
    figure, axes = panel_axes(panels, height=3.0)
    for axis, (trials, front) in zip(axes, panels.values(), strict=True):
        axis.plot(*zip(*trials, strict=True), color=GREY, linestyle="", marker="o", markersize=3.5,
                  markeredgewidth=0, label="trial")  # fmt: skip
        axis.plot(*zip(*sorted(front), strict=True), color=COLOURS[2], marker="o", zorder=3,
                  label="Pareto front")  # fmt: skip
        axis.plot(*([value] for value in front[0]), color=COLOURS[3], linestyle="", marker="D",
                  markersize=8, zorder=4, label="chosen")  # fmt: skip
    describe_axes(axes, f"{metrics[0]}, held out", f"{metrics[1]}, held out")
    return finish(figure, axes, title)
