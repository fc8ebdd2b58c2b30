"""What tables and reports are made of, and how it reads as Markdown."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import matplotlib.figure


class Heading(NamedTuple):
    """A title; level 1 is that of the whole text."""

    level: int
    text: str


class Verdict(NamedTuple):
    """Sentences that stand out: what a reader in a hurry takes away."""

    sentences: Sequence[str]


class Grid(NamedTuple):
    """A table's cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Drawing(NamedTuple):
    """A figure, the name of its files, what it shows in words, and how to read it."""

    name: str
    figure: "matplotlib.figure.Figure"
    alt: str
    caption: str
    half: bool = False
    """Where there is room, another stands beside it."""


Block = Heading | Verdict | Grid | Drawing | str
Part = list[Block]
"""What a page says of one folder; its first block is a heading of level 1."""


def markdown(blocks: Iterable[Block]) -> str:
    """Blocks as Markdown; a drawing is a link to its SVG."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Verdict):
        return "\n\n".join(f"**{sentence}**" for sentence in block.sentences)
    if isinstance(block, Drawing):
        alt = block.alt.replace("[", "(").replace("]", ")")
        return f"![{alt}]({block.name}.svg)\n\n{block.caption}".rstrip()
    if isinstance(block, str):
        return block
    lines = [block.header, ["---"] * len(block.header), *block.rows]

    def safe(cell: str) -> str:
        # "](" would make a link or a picture of what an item says.
        return " ".join(cell.split()).replace("|", "/").replace("<", "&lt;").replace("](", "]\\(")

    return "\n".join(f"| {' | '.join(map(safe, line))} |" for line in lines)


def number(value: float, sign: str = "") -> str:
    """Three decimals, a dash for what is undefined."""
    return "–" if math.isnan(value) else f"{value:{sign}.3f}"


def estimate(figure: Mapping[str, float] | None, *, bold: bool = False, sign: str = "") -> str:
    """An estimate with its interval."""
    if figure is None or math.isnan(figure["estimate"]):
        return "–"
    point = number(figure["estimate"], sign)
    point = f"**{point}**" if bold else point
    if math.isnan(figure["low"]):
        return point
    return f"{point} [{number(figure['low'], sign)}, {number(figure['high'], sign)}]"


def along(lists: Mapping[str, Any], sign: str = "") -> list[str]:
    """Several estimates with their intervals, kept as one list each of estimates, low and high."""
    return [
        estimate({"estimate": point, "low": low, "high": high}, sign=sign)
        for point, low, high in zip(lists["estimate"], lists["low"], lists["high"], strict=True)
    ]


def span(counts: list[int]) -> str:
    """The smallest and the largest count."""
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
