"""What each score means, and the orders in which a judge is shown it (paper 3)."""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

_SEED = 0  # of random orders: they are part of the task, not of a run
_LEVEL = re.compile(r"^[ \t]*Score[ \t]+([^\s:]+)[ \t]*:[ \t]*", re.MULTILINE)

Orders = Literal["none", "balanced", "both_directions"] | dict[Literal["random"], int]


class Rubric(NamedTuple):
    """One description a score, in the order in which it is written."""

    levels: dict[str, str]
    criterion: str = ""
    """What stands above the list of an item's own rubric."""


def read_rubric(cell: Any, labels: Sequence[str], where: str) -> Rubric:
    """A rubric of a mapping from labels to texts, or of text with lines `Score 3: ...`.

    Raises:
        ValueError: it is neither, or a score is missing or repeated.
    """
    criterion = ""
    if isinstance(cell, str):
        start, *parts = _LEVEL.split(cell)
        criterion = start.strip().removeprefix("[").removesuffix("]").strip()
        pairs = list(zip(parts[::2], (text.strip() for text in parts[1::2]), strict=True))
    elif isinstance(cell, dict):
        # A column of a table fills up what a row lacks with nulls.
        given = [(str(label), text) for label, text in cell.items() if text is not None]
        for label, text in given:
            if not isinstance(text, str):
                raise ValueError(f"{where}: the rubric's text for the score {label} is {text!r}.")
        pairs = [(label, text.strip()) for label, text in given]
    else:
        raise ValueError(f"{where}: a rubric is a text for each score, got {cell!r}.")
    count = Counter(label for label, _ in pairs)
    for label in labels:
        if count[label] != 1:
            what = "has no text" if not count[label] else f"has {count[label]} texts"
            raise ValueError(
                f"{where}: the rubric {what} for the score {label}; the scale is "
                f"{labels[0]} to {labels[-1]}. Give each score one."
            )
    for label, text in pairs:
        if label not in labels:
            raise ValueError(
                f"{where}: the rubric describes the score {label!r}, which the scale "
                f"{labels[0]} to {labels[-1]} lacks. Take it out, or set `data.task.scale`."
            )
        if not text:
            raise ValueError(f"{where}: the rubric's text for the score {label} is empty.")
    return Rubric(dict(pairs), criterion)


def rubric_orders(levels: int, orders: "list[Orders] | Orders") -> list[tuple[int, ...]]:
    """The orders asked for, as places in the written order; each once, as they first appear.

    `balanced` are the rotations, which put every score once at every position; `both_directions`
    adds the rotations of the reverse. Both start with the written order.

    Raises:
        ValueError: more random orders are asked for than there are.
    """
    written = tuple(range(levels))
    rotations = [written[at:] + written[:at] for at in written]
    found: list[tuple[int, ...]] = []
    for wanted in orders if isinstance(orders, list) else [orders]:
        if isinstance(wanted, dict):
            found += _random_orders(levels, wanted.get("random", 0))
        elif wanted == "none":
            found.append(written)
        else:
            found += rotations
            if wanted == "both_directions":
                found += [order[::-1] for order in rotations]
    return list(dict.fromkeys(found))


def rotations(order: str) -> list[str]:
    """The balanced orders that begin with an order, by name, itself first.

    >>> rotations("1 2 3")
    ['1 2 3', '2 3 1', '3 1 2']
    """
    shown = order.split(" ")
    return [" ".join(shown[at:] + shown[:at]) for at in range(len(shown))]


def shown_levels(order: str, labels: Sequence[str]) -> list[int]:
    """The level at each position of an order, by its name.

    >>> shown_levels("3 1 2", ["1", "2", "3"])
    [2, 0, 1]
    """
    return [labels.index(label) for label in order.split(" ")]


def _random_orders(levels: int, count: int) -> list[tuple[int, ...]]:
    if not 1 <= count <= min(math.factorial(levels), 1000):
        raise ValueError(
            f"`data.task.orders` asks for {count} random orders of {levels} scores; between 1 and "
            f"{min(math.factorial(levels), 1000)} exist."
        )
    generator = random.Random(_SEED)
    if levels <= 6:
        return generator.sample(list(itertools.permutations(range(levels))), count)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < count:
        drawn[tuple(generator.sample(range(levels), levels))] = None
    return list(drawn)
