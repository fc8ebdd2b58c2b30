"""Figures of comparisons and reports: numbers in, a `matplotlib.figure.Figure` out.

`panels` maps each panel's title, such as the judge's name, to its data. NaN leaves a gap.
"""

import contextlib
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scorecal.judging.records import replacing

if TYPE_CHECKING:
    import matplotlib.figure

Series = Mapping[str, Sequence[float]]

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.08,
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markeredgecolor": "white",
    "lines.markeredgewidth": 0.6,
    "lines.markersize": 5.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "scorecal",
    "text.parse_math": False,  # a judge's name may hold a dollar sign
    "xtick.color": "#444444",
    "xtick.labelcolor": "black",
    "xtick.labelsize": 8,
    "ytick.color": "#444444",
    "ytick.labelcolor": "black",
    "ytick.labelsize": 8,
}
# Okabe and Ito's colours without their yellow, which is too light for a line on white.
_COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
_DASHES = ("-", "--", "-.", (0, (4, 1, 1, 1, 1, 1)))
_MARKERS = "osD^vPX<>"
# The same method looks the same in every figure.
_FIXED_LOOKS = {"raw": 0, "vanilla": 1, "Deb-R": 2, "Deb-T": 3, "calibrated": 4}
_GREY = "#888888"
_LIGHT = "#cfcfcf"
_PANELS_A_ROW = 3
_PANEL_WIDTHS = {1: 4.6, 2: 4.2, 3: 3.4}  # inches, by panels in a row
_CELLS = 25  # a side of a density
# Colours that follow the page in which an SVG stands.
_PAGE_COLOURS = {
    "#000000": "currentColor",
    "#444444": "currentColor",
    "#e6e6e6": "var(--grid)",
    _GREY: "var(--reference)",
    _LIGHT: "var(--bars)",
    "#ffffff": "var(--paper)",
}
_LINE = 0.18  # inches a line of text takes
_MOST_TICKS = 12
_MOST_MARKERS = 20


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


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """The library's own defaults and `_STYLE`, whatever the user's settings, then those again."""
    try:
        import matplotlib.style
    except ImportError:
        raise ValueError("figures need matplotlib. Run `pip install 'scorecal[report]'`.") from None
    with matplotlib.style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        # A judge's name may be in letters that the font lacks: boxes say so.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


@_style()
def latent_bias_figure(
    panels: Mapping[str, Series], labels: Sequence[str], *, title: str
) -> "matplotlib.figure.Figure":
    """Probability of each label as a random number (paper 1, figure 3).

    Keys such as `Deb-T, 10 prompts`: colours tell what precedes the comma, lines what follows it,
    the first solid, the second dotted.
    """
    names = _names(panels)
    sources = list(dict.fromkeys(name.partition(", ")[0] for name in names))
    selections = list(dict.fromkeys(name.partition(", ")[2] for name in names))
    looks = _looks(sources)
    dashes = ("-", ":", "--", "-.")
    figure, axes = _panels(panels, sharey=True)
    for axis, series in zip(axes, panels.values(), strict=True):
        for name, probs in series.items():
            source, _, selection = name.partition(", ")
            look = {**looks[source], "linestyle": dashes[selections.index(selection) % 4]}
            _label_line(axis, probs, label=name, **look)
        axis.axhline(1 / len(labels), label="uniform", color=_GREY, linestyle="--", linewidth=1)
        _label_axis(axis, labels)
    _from_zero(axes)
    _describe_axes(axes, "Score label", "Probability")
    return _finish(figure, axes, title)


@_style()
def number_bias_figure(
    panels: Mapping[str, Series], labels: Sequence[str], *, title: str
) -> "matplotlib.figure.Figure":
    """Probability of each label as a random number: bars of each source beside each other."""
    looks = _looks(_names(panels))
    figure, axes = _panels(panels, sharey=True)
    for axis, series in zip(axes, panels.values(), strict=True):
        width = 0.8 / max(1, len(series))
        for number, (name, probs) in enumerate(series.items()):
            shift = (number - (len(series) - 1) / 2) * width
            places = [place + shift for place in range(len(probs))]
            axis.bar(places, _finite(probs), width=width, color=looks[name]["color"], label=name)
        axis.axhline(1 / len(labels), label="uniform", color=_GREY, linestyle="--", linewidth=1)
        _label_axis(axis, labels)
    _from_zero(axes)
    _describe_axes(axes, "Score label", "Probability")
    return _finish(figure, axes, title)


@_style()
def score_share_figure(
    panels: Mapping[str, Series], labels: Sequence[str], *, title: str
) -> "matplotlib.figure.Figure":
    """Share of gold scores (key `gold`, bars) beside methods' mean probabilities (figure 4)."""
    looks = _looks([name for name in _names(panels) if name != "gold"])
    figure, axes = _panels(panels, sharey=True)
    for axis, series in zip(axes, panels.values(), strict=True):
        for name, probs in series.items():
            if name == "gold":
                _bars(axis, probs, label=name)
            else:
                _label_line(axis, probs, label=name, **looks[name])
        _label_axis(axis, labels)
    _from_zero(axes)
    _describe_axes(axes, "Score label", "Share, mean probability")
    return _finish(figure, axes, title)


@_style()
def excess_figure(
    panels: Mapping[str, Excess], labels: Sequence[str], *, title: str
) -> "matplotlib.figure.Figure":
    """The debiasing term B of each label (bars) beside the judge's excess (line)."""
    figure, axes = _panels(panels)
    for axis, (term, excess, correlation) in zip(axes, panels.values(), strict=True):
        _bars(axis, term, label="debiasing term B")
        look = {"color": _COLOURS[3], "linestyle": "-", "marker": "o"}
        _label_line(axis, excess, label="excess log(mean p / gold share)", **look)
        axis.axhline(0, color="#444444", linewidth=0.7)
        _label_axis(axis, labels)
        low, high = axis.get_ylim()
        axis.set_ylim(low, high + 0.16 * (high - low))  # room for the correlation
        figures = "undefined" if math.isnan(correlation) else f"{correlation:+.2f}"
        axis.text(
            *(0.98, 0.97, f"correlation {figures.replace('-', '−')}"),
            transform=axis.transAxes, ha="right", va="top", fontsize=8.5,
        )  # fmt: skip
    _describe_axes(axes, "Score label", "Log ratio (nats)")
    return _finish(figure, axes, title)


@_style()
def strength_figure(
    panels: Mapping[str, Mapping[str, StrengthCurve]], *, title: str, metric: str = "Spearman"
) -> "matplotlib.figure.Figure":
    """A metric over the strength λ, on dev and on test, with the λ that dev chose."""
    from matplotlib.lines import Line2D

    looks = _looks(_names(panels))
    figure, axes = _panels(panels)
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
                    *(list(curve.strengths), _finite(values)),
                    color=color, linestyle=linestyle, marker=marker, markevery=chosen,
                    markersize=8, clip_on=False, zorder=3,
                )  # fmt: skip
    _describe_axes(axes, "Strength λ", metric)
    handles = {
        name: Line2D([], [], color=look["color"], marker=look["marker"], markersize=8)
        for name, look in looks.items()
    }
    handles["dev"] = Line2D([], [], color=_GREY, linestyle="--")
    handles["test"] = Line2D([], [], color=_GREY)
    handles["λ chosen on dev"] = Line2D([], [], color=_GREY, linestyle="", marker="o", markersize=8)
    return _finish(figure, axes, title, handles)


@_style()
def reliability_figure(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    *,
    title: str,
    low: float,
    high: float,
) -> "matplotlib.figure.Figure":
    """Mean gold score over mean predicted score, one point a bin: (predicted, gold) a method."""
    looks = _looks(_names(panels))
    figure, axes = _panels(panels, height=3.3, sharex=True, sharey=True)
    ends = [low, high]
    for axis, methods in zip(axes, panels.values(), strict=True):
        axis.plot([low, high], [low, high], color=_GREY, linestyle="--", linewidth=1,
                  label="predicted = gold")  # fmt: skip
        for name, (predicted, gold) in methods.items():
            line = axis.plot(_finite(predicted), _finite(gold), label=name, zorder=3, **looks[name])
            ends += [value for data in line[0].get_data() for value in data if value == value]
    margin = 0.04 * (max(ends) - min(ends))
    for axis in axes:
        axis.set_aspect("equal")
        axis.set(xlim=(min(ends) - margin, max(ends) + margin))
        axis.set(ylim=(min(ends) - margin, max(ends) + margin))
        axis.tick_params(labelbottom=True, labelleft=True)
    _describe_axes(axes, "Mean predicted score", "Mean gold score")
    return _finish(figure, axes, title)


@_style()
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
    shades = ListedColormap([to_rgba(_COLOURS[2], step / 255) for step in range(256)])
    figure, axes = _panels(panels, height=3.3)
    most = 0
    for axis, (gold, predicted) in zip(axes, panels.values(), strict=True):
        counts, *_ = axis.hist2d(
            *(list(gold), list(predicted)),
            bins=_CELLS, range=[[low, high], [low, high]], cmin=1, cmap=shades,
            norm=PowerNorm(0.5, vmin=0), antialiased=False, linewidth=0,
        )  # fmt: skip
        most = max([most, *(int(count) for count in counts.flat if count == count)])
        axis.plot([low, high], [low, high], color=_GREY, linestyle="--", linewidth=1)
        axis.set_aspect("equal")
    for axis in axes:
        axis.collections[0].set_clim(0, most)
    _describe_axes(axes, "Gold score", "Expected score")
    handles = {
        "predicted = gold": Line2D([], [], color=_GREY, linestyle="--", linewidth=1),
        f"{most} items in a cell": Patch(color=_COLOURS[2]),
    }
    return _finish(figure, axes, title, handles)


@_style()
def bias_figure(
    panels: Mapping[str, Sequence[tuple[float, float, float]]], labels: Sequence[str], *, title: str
) -> "matplotlib.figure.Figure":
    """The bias b of each label (estimate, low, high) as a dot with its 95 % interval."""
    figure, axes = _panels(panels, sharey=True)
    for axis, intervals in zip(axes, panels.values(), strict=True):
        axis.axhline(0, color="#444444", linewidth=0.7)
        for place, triple in enumerate(intervals):
            estimate, *ends = _finite(triple)
            axis.plot([place, place], ends, color=_COLOURS[2], label="95 % interval")
            axis.plot([place], [estimate], color=_COLOURS[2], linestyle="", marker="o",
                      zorder=3, label="bias b")  # fmt: skip
        _label_axis(axis, labels)
    _describe_axes(axes, "Score label", "Bias b (nats)")
    return _finish(figure, axes, title)


@_style()
def learning_curve_figure(
    panels: Mapping[str, Mapping[str, LearningCurve]], *, title: str, metric: str
) -> "matplotlib.figure.Figure":
    """A metric over the number of dev labels, which are evenly spaced, with interval bands."""
    looks = _looks(_names(panels))
    counts = sorted(
        {n for curves in panels.values() for curve in curves.values() for n in curve.labels}
    )
    figure, axes = _panels(panels)
    for axis, curves in zip(axes, panels.values(), strict=True):
        for name, curve in curves.items():
            places = [counts.index(count) for count in curve.labels]
            look = looks[name]
            axis.fill_between(places, _finite(curve.low), _finite(curve.high),
                              color=look["color"], alpha=0.1, linewidth=0)  # fmt: skip
            axis.plot(places, _finite(curve.estimate), label=name, zorder=3, **look)
        _label_axis(axis, [str(count) for count in counts])
    _describe_axes(axes, "Dev labels", metric)
    return _finish(figure, axes, title)


@_style()
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
        estimate, *interval = _finite(row[1:])
        axis.plot(interval, [place, place], color=_COLOURS[2])
        axis.plot([estimate], [place], color=_COLOURS[2], marker="o", markersize=6.5, zorder=3)
        axis.text(1.02, place, _interval_text(estimate, *interval), va="center", fontsize=8,
                  transform=axis.get_yaxis_transform())  # fmt: skip
    if reference is not None:
        axis.axvline(reference, color=_GREY, linestyle="--", linewidth=1)
    axis.set_yticks(places, names)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.spines["left"].set_visible(False)
    axis.set(xlabel=f"{xlabel}, with 95 % interval", ylabel="")
    return _finish(figure, [axis], title, {})


def save_figure(figure: "matplotlib.figure.Figure", path: Path) -> list[Path]:
    """Write `<path>.png` and `<path>.svg`, the same bytes each time; each appears whole or not."""
    title, description = " ".join(figure.get_suptitle().split()), described(figure)
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Title": title, "Description": description},
        "svg": {"Title": title, "Description": description, "Date": None},
    }
    written = []
    with _style():
        for suffix, entries in metadata.items():
            target = path.with_name(f"{path.name}.{suffix}")
            with replacing(target) as partial:
                figure.savefig(partial, format=suffix, dpi=150, metadata=entries)
            written.append(target)
    return written


def described(figure: "matplotlib.figure.Figure") -> str:
    """A figure's title and those of its panels, on one line."""
    title = " ".join(figure.get_suptitle().split())
    parts = [" ".join(axis.get_title("left").split()) for axis in figure.axes]
    return f"{title}. {', '.join(filter(None, parts))}".removesuffix(". ")


def inline_svg(figure: "matplotlib.figure.Figure", name: str) -> str:
    """A figure to stand in a page: in its colours and font, its ids beginning with `name`.

    The page defines `--paper`, `--grid`, `--bars`, `--reference` and `--sans`.
    """
    drawn = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with _style():
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, of_page in _PAGE_COLOURS.items():
        svg = svg.replace(colour, of_page)
    svg = re.sub(r' (xmlns(:\w+)?|width|height)="[^"]*"', "", svg, count=4)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    width = 0.95 * 72 * figure.get_figwidth()  # CSS pixels: small text stays readable
    svg = svg.replace("<svg", f'<svg style="min-width: {width:.0f}px"', 1)
    return re.sub(r"'DejaVu Sans'[^;\"]*", "var(--sans)", svg)


def _names(panels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Keys of all panels in the order of their first appearance."""
    return list(dict.fromkeys(name for series in panels.values() for name in series))


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour, a line and a marker for each name: no two names have the same three."""
    absent = [index for name, index in _FIXED_LOOKS.items() if name not in names]
    colours = len(_COLOURS)
    free = itertools.chain(range(len(_FIXED_LOOKS), colours), absent, itertools.count(colours))
    looks = {}
    for name in names:
        index = _FIXED_LOOKS[name] if name in _FIXED_LOOKS else next(free)
        looks[name] = {
            "color": _COLOURS[index % len(_COLOURS)],
            "linestyle": _DASHES[index % len(_DASHES)],
            "marker": _MARKERS[index % len(_MARKERS)],
        }
    return looks


def _panels(
    titles: Mapping[str, Any], *, height: float = 2.7, **shared: Any
) -> tuple["matplotlib.figure.Figure", list[Any]]:
    """One titled axes a panel, three in a row."""
    from matplotlib.figure import Figure

    if not titles:
        raise ValueError("a figure needs at least one panel, got none.")
    columns = min(len(titles), _PANELS_A_ROW)
    rows = math.ceil(len(titles) / columns)
    width = _PANEL_WIDTHS[columns]
    names = [textwrap.fill(title, round(11 * (width - 0.5))) for title in titles]
    height += _LINE * max(name.count("\n") for name in names)
    figure = Figure(figsize=(columns * width, rows * height + 0.8), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in grid[len(titles) :]:
        axis.remove()
    axes = grid[: len(titles)]
    for axis, name in zip(axes, names, strict=True):
        axis.set_title(name)
    return figure, axes


def _finite(values: Sequence[float]) -> list[float]:
    """The values, with NaN for what can't be drawn."""
    return [value if math.isfinite(value) else math.nan for value in values]


def _label_line(axis: Any, values: Sequence[float], *, marker: str, **look: Any) -> None:
    """A line over label positions, with markers where they don't run together."""
    few = len(values) <= _MOST_MARKERS
    axis.plot(range(len(values)), _finite(values), marker=marker if few else "",
              linewidth=1.5 if few else 1, clip_on=False, zorder=3, **look)  # fmt: skip


def _interval_text(estimate: float, low: float, high: float) -> str:
    if math.isnan(estimate):
        return "–"
    bounds = "" if math.isnan(low + high) else f" [{low:.3f}, {high:.3f}]"
    return f"{estimate:.3f}{bounds}".replace("-", "−")


def _bars(axis: Any, values: Sequence[float], *, label: str) -> None:
    width = 0.75 if len(values) <= _MOST_MARKERS else 1
    axis.bar(range(len(values)), _finite(values), width=width, color=_LIGHT, label=label)


def _label_axis(axis: Any, labels: Sequence[str]) -> None:
    """Ticks at all labels, or at those a round number of steps from zero."""
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, len(labels))
                if len(labels) <= s * _MOST_TICKS)  # fmt: skip
    first = 0
    with contextlib.suppress(
        ValueError, ArithmeticError
    ):  # labels that aren't numbers are counted from the first
        if step > 1:
            start, following = float(labels[0]), float(labels[1])
            first = round(-start / (following - start)) % step
    places = range(first, len(labels), step)
    shown = [labels[place] for place in places]
    axis.set_xticks(places, shown)
    if sum(map(len, shown)) > 40:
        axis.tick_params(axis="x", rotation=30)
    axis.set_xlim(-0.6, len(labels) - 0.4)
    axis.grid(visible=False, axis="x")


def _from_zero(axes: Sequence[Any]) -> None:
    for axis in axes:
        axis.set_ylim(bottom=0)


def _describe_axes(axes: Sequence[Any], xlabel: str, ylabel: str) -> None:
    """Name x under the lowest panels and y beside the first of each row."""
    for index, axis in enumerate(axes):
        if index % _PANELS_A_ROW == 0:
            axis.set_ylabel(textwrap.fill(ylabel, 28))
        if index + _PANELS_A_ROW >= len(axes):
            axis.set_xlabel(xlabel)


def _finish(
    figure: Any, axes: Sequence[Any], title: str, handles: Mapping[str, Any] | None = None
) -> "matplotlib.figure.Figure":
    """Title and one legend for all panels, then a layout that stays as it is."""
    width = figure.get_figwidth()
    heading = textwrap.fill(title, round(11 * width))
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11, fontweight="bold")
    lines = heading.count("\n")
    if handles is None:
        found = [axis.get_legend_handles_labels() for axis in axes]
        handles = {name: handle for pair in found for handle, name in zip(*pair, strict=True)}
        # Bars, which matplotlib holds as tuples, before lines.
        handles = dict(sorted(handles.items(), key=lambda item: not isinstance(item[1], tuple)))
    if handles:
        widths = [0.7 + 0.065 * len(name) for name in handles]  # inches
        columns = len(widths) if sum(widths) < width else max(1, int(width / max(widths)))
        rows = math.ceil(len(widths) / columns)
        lines += rows - 1
        figure.legend(list(handles.values()), list(handles), loc="outside lower center",
                      ncols=math.ceil(len(widths) / rows), handlelength=2.8)  # fmt: skip
    figure.set_figheight(figure.get_figheight() + _LINE * lines)
    # Left on, the layout engine would move everything a little at each drawing.
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")
    return figure
