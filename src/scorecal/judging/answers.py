"""Answers that a judge gave in its own words, read as scores (paper 2, §4.1)."""

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.judging.records import Record
from scorecal.judging.task import Task
from scorecal.scale import Scale

How = Literal["read", "unparsable", "below", "above"]
KINDS = ("generated", "contrasted")
_SHOWN = 10  # answers that are not scores, of each kind
# The digits of any script, none of them within a word (`T5`, `v1.5`) or a count of points. A minus
# is a sign where no word or number ends before it.
_NUMBER = re.compile(
    r"(?:(?<![\w)-])[-\u2212])?"
    r"(?:(?<![A-Za-z\d])(?<!\d\.)\d++(?:\.\d++)?+|(?<![\w.])\.\d++)(?!-point)"
)


class Parsed(NamedTuple):
    """A score on the label scale, and how it came about."""

    value: float
    how: How


def parse_score(text: str, scale: Scale) -> Parsed:
    """The first number of an answer that doesn't restate the range.

    Decimals are kept. Beyond the scale the nearest end counts, and without a number the lowest
    score. Digits alone are read: `four` is no number. A comma ends one.

    >>> parse_score("On a scale from 1 to 5: 4.5/5", Scale.parse("1-5"))
    Parsed(value=4.5, how='read')
    >>> parse_score("10", Scale.parse("1-5"))
    Parsed(value=5.0, how='above')
    >>> parse_score("I can't say.", Scale.parse("1-5"))
    Parsed(value=1.0, how='unparsable')
    """
    low, high = scale.values[0], scale.values[-1]
    number = _NUMBER.search(_restated(scale).sub(" ", text))
    if number is None:
        return Parsed(low, "unparsable")
    value = float(number[0].replace("\u2212", "-"))
    if value < low:
        return Parsed(low, "below")
    if value > high:
        return Parsed(high, "above")
    return Parsed(value + 0.0, "read")  # -0 is 0


@functools.cache
def _restated(scale: Scale) -> re.Pattern[str]:
    """`from 1 to 5`, `1 (worst) to 5`, `1-5`, `out of 5`, `/5`, and all labels in a row."""
    low, high = re.escape(scale.low), re.escape(scale.high)
    comma = r"\s*(?:[,/|]|,?\s*\b(?:or|and)\b)\s*"
    row = comma.join(map(re.escape, scale.labels))
    meaning = r"(?:\([^()\d]*\)\s*)?"
    forms = [
        rf"(?<![\d.]){row}",
        rf"(?<![\d.]){low}\s*{meaning}(?:[-\u2010-\u2015~]|\.\.+|to|and|through)\s*{high}",
        rf"(?<![\d.]){high}\s*{meaning}(?:to|through)\s*{low}",
        rf"(?:\bout\s+of|/)\s*{high}",
    ]
    if len(scale.labels) == 2:  # a row of two is a score and the highest: 0/1
        del forms[0]
    return re.compile(rf"(?:{'|'.join(forms)})(?!\.?\d)", re.IGNORECASE)


class Generated(NamedTuple):
    """A judge's own answers to a table's items."""

    scores: Float[Tensor, " items"]
    """In gold's units; the mean over the rubric's orders."""
    how: list[tuple[How, ...]]
    """How each item's answers were read, one in each order."""
    texts: list[tuple[str, ...]]

    def rows(self, keep: Sequence[int]) -> "Generated":
        """The answers to some of the items."""
        return Generated(
            self.scores[list(keep)], [self.how[i] for i in keep], [self.texts[i] for i in keep]
        )

    def counts(self) -> dict[How, int]:
        """How many answers were read in each way."""
        return _counts(how for item in self.how for how in item)


def _counts(hows: Iterable[How]) -> dict[How, int]:
    found = Counter(hows)
    return {how: found[how] for how in get_args(How)}


def read_answers(answers: Sequence[Sequence[Record]], task: Task) -> Generated:
    """A store's rows of one kind, a list for each order of the rubric, as scores."""
    scale = task.one_scale()
    parsed = [[parse_score(row["text"], scale) for row in of_order] for of_order in answers]
    scores = torch.tensor(
        [task.in_gold_units([one.value for one in of_order]) for of_order in parsed],
        dtype=torch.float64,
    )
    return Generated(
        scores.mean(0),
        [tuple(one.how for one in of_item) for of_item in zip(*parsed, strict=True)],
        [tuple(row["text"] for row in of_item) for of_item in zip(*answers, strict=True)],
    )


def account(rows: Iterable[Record]) -> list[str]:
    """Lines on a store's answers: how many of each kind are scores, and the first that are not."""
    lines = []
    rows = [row for row in rows if row["kind"] in KINDS]
    several = len({(row["scale"], row["order"]) for row in rows}) > 1
    for kind in KINDS:
        parsed = [
            (row, parse_score(row["text"], Scale.parse(row["scale"])).how)
            for row in rows
            if row["kind"] == kind
        ]
        if not parsed:
            continue
        counts = _counts(how for _, how in parsed)
        lines.append(
            f"{kind} answers: {counts['read']} read, {counts['unparsable']} unparsable (lowest "
            f"score), {counts['below']} below (lowest score), {counts['above']} above (highest "
            "score)"
        )
        others = [(row, how) for row, how in parsed if how != "read"]
        for row, how in others[:_SHOWN]:
            asked = f" on {row['scale']}, order {row['order']}" if several else ""
            text = json.dumps(row["text"], ensure_ascii=False)
            lines.append(f"  {row['key']}{asked}, {how}: {text}")
        if len(others) > _SHOWN:
            lines.append(f"  and {len(others) - _SHOWN} more in judgements.parquet, column `text`")
        if 2 * counts["unparsable"] > len(parsed):
            lines.append(
                "  most hold no score: begin the answer in the template's block `cue`, or set "
                "`--data.task.reasoning`"
            )
    return lines
