"""How all figures look: style, panels, axes and legends, and how a figure is kept.

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
from typing import TYPE_CHECKING, Any

from scorecal.judging.records import replacing

if TYPE_CHECKING:
    import matplotlib.figure

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
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
_DASHES = ("-", "--", "-.", (0, (4, 1, 1, 1, 1, 1)))
_MARKERS = "osD^vPX<>"
# The same method looks the same in every figure.
_FIXED_LOOKS = {"raw": 0, "vanilla": 1, "Deb-R": 2, "Deb-T": 3, "calibrated": 4}
GREY = "#888888"
LIGHT = "#cfcfcf"
_PANEL_WIDTHS = {1: 4.6, 2: 4.2, 3: 3.4, 4: 2.6}  # inches, by panels in a row
# Colours that follow the page in which an SVG stands.
_PAGE_COLOURS = {
    "#000000": "currentColor",
    "#444444": "currentColor",
    "#e6e6e6": "var(--grid)",
    GREY: "var(--reference)",
    LIGHT: "var(--bars)",
    "#ffffff": "var(--paper)",
}
_LINE = 0.18  # inches a line of text takes
_MOST_TICKS = 12
_MOST_MARKERS = 20


class NoFigures(ValueError):
    """The library that draws is missing."""


@contextlib.contextmanager
def figure_style() -> Iterator[None]:
    """The library's own defaults and `_STYLE`, whatever the user's settings, then those again."""
    try:
        import matplotlib.style
    except ImportError:
        raise NoFigures("figures need matplotlib. Run `pip install 'scorecal[report]'`.") from None
    with matplotlib.style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        # A judge's name may be in letters that the font lacks: boxes say so.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def save_figure(figure: "matplotlib.figure.Figure", path: Path) -> list[Path]:
    """Write `<path>.png` and `<path>.svg`, the same bytes each time; each appears whole or not."""
    title, description = " ".join(figure.get_suptitle().split()), described(figure)
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Title": title, "Description": description},
        "svg": {"Title": title, "Description": description, "Date": None},
    }
    written = []
    with figure_style():
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
    with figure_style():
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


def series_names(panels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Keys of all panels in the order of their first appearance."""
    return list(dict.fromkeys(name for series in panels.values() for name in series))


def method_looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour, a line and a marker for each name: no two names have the same three."""
    absent = [index for name, index in _FIXED_LOOKS.items() if name not in names]
    colours = len(COLOURS)
    free = itertools.chain(range(len(_FIXED_LOOKS), colours), absent, itertools.count(colours))
    looks = {}
    for name in names:
        index = _FIXED_LOOKS[name] if name in _FIXED_LOOKS else next(free)
        looks[name] = {
            "color": COLOURS[index % len(COLOURS)],
            "linestyle": _DASHES[index % len(_DASHES)],
            "marker": _MARKERS[index % len(_MARKERS)],
        }
    return looks


def panel_axes(
    titles: Mapping[str, Any], *, height: float = 2.7, columns: int = 3, **shared: Any
) -> tuple["matplotlib.figure.Figure", list[Any]]:
    """One titled axes a panel, so many in a row; three, if they are too many for a row."""
    from matplotlib.figure import Figure

    if not titles:
        raise ValueError("a figure needs at least one panel, got none.")
    columns = min(len(titles), columns if columns in _PANEL_WIDTHS else 3)
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


def finite(values: Sequence[float]) -> list[float]:
    """The values, with NaN for what can't be drawn."""
    return [value if math.isfinite(value) else math.nan for value in values]


def label_line(axis: Any, values: Sequence[float], *, marker: str, **look: Any) -> None:
    """A line over label positions, with markers where they don't run together."""
    few = len(values) <= _MOST_MARKERS
    axis.plot(range(len(values)), finite(values), marker=marker if few else "",
              linewidth=1.5 if few else 1, clip_on=False, zorder=3, **look)  # fmt: skip


def interval_text(estimate: float, low: float, high: float) -> str:
    """An estimate and its interval, with minus signs."""
    if math.isnan(estimate):
        return "–"
    bounds = "" if math.isnan(low + high) else f" [{low:.3f}, {high:.3f}]"
    return f"{estimate:.3f}{bounds}".replace("-", "−")


def bars(axis: Any, values: Sequence[float], *, label: str) -> None:
    """Pale bars over label positions."""
    width = 0.75 if len(values) <= _MOST_MARKERS else 1
    axis.bar(range(len(values)), finite(values), width=width, color=LIGHT, label=label)


def label_axis(axis: Any, labels: Sequence[str]) -> None:
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


def from_zero(axes: Sequence[Any]) -> None:
    """Let y begin at zero."""
    for axis in axes:
        axis.set_ylim(bottom=0)


def describe_axes(axes: Sequence[Any], xlabel: str, ylabel: str) -> None:
    """Name x under the lowest panels and y beside the first of each row."""
    columns = axes[0].get_gridspec().ncols
    for index, axis in enumerate(axes):
        if index % columns == 0:
            axis.set_ylabel(textwrap.fill(ylabel, 28))
        if index + columns >= len(axes):
            axis.set_xlabel(xlabel)


def finish(
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
