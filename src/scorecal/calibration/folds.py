"""Folds, grids and draws as one axis: a problem is one fit, and all are fitted at once."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scorecal.calibration.head import RIDGE, HeadSettings, Problems
from scorecal.judging.positions import fixed_order_mass
from scorecal.judging.priors import prior_term
from scorecal.judging.table import Table

RIDGES = tuple(10 ** (step / 2) for step in range(-6, 7))  # 1e-3 … 1e3 by half-decades
MIXING_RIDGES = (*RIDGES[::2], math.inf)
By = Literal["spearman", "pearson", "mse", "nll", "rps"]


@dataclass
class Folds:
    """How items are divided.

    Attributes:
        outer: 0 keeps the data's own dev and test; else so many folds over both.
        inverted: a fold is dev and the rest is test, as in paper 1 (1 dev : 4 test at 5 folds).
        inner: folds of dev, for `dev/…` metrics and for what is chosen.
        by: keep groups together, or divide rows.
    """

    outer: int = 0
    inverted: bool = False
    inner: int = 5
    by: Literal["group", "row"] = "group"


@dataclass
class Select:
    """Fixed values tried on dev.

    Attributes:
        strength: values of λ.
        temperature: values of T.
        contrast: values of α.
        by: the criterion; ties go to the earlier value.
    """

    strength: list[float] | None = None
    temperature: list[float] | None = None
    contrast: list[float] | None = None
    by: By = "spearman"


class Split(NamedTuple):
    """Where one head is fitted and where it is judged; `deploy` has no test rows."""

    name: str
    dev: Bool[Tensor, " items"]
    test: Bool[Tensor, " items"]


class Search(NamedTuple):
    """Which problems belong to a split: each candidate on inner folds and on all of dev."""

    split: Split
    inner: Int[Tensor, "candidates folds"]
    full: Int[Tensor, " candidates"]


def make_splits(table: Table, folds: Folds, seed: int) -> list[Split]:
    """The splits to evaluate, and `deploy` last; with the data's own split they are one.

    Raises:
        ValueError: there are too few rows for the folds.
    """
    everything = torch.ones(len(table.ids), dtype=torch.bool)
    if folds.outer == 0:
        dev = torch.tensor([split == "dev" for split in table.splits])
        test = torch.tensor([split == "test" for split in table.splits])
        if folds.by == "group":
            _refuse_shared_groups(table)
        return [Split("deploy", dev, test)]
    units = len(set(table.groups if folds.by == "group" else table.ids))
    if units < folds.outer:
        raise ValueError(
            f"{units} groups can't make {folds.outer} folds. Lower `--data.folds.outer`, or set "
            "`--data.folds.by row` if rows are independent."
        )
    parts = partition(table, everything, folds.outer, folds.by, seed)
    splits = []
    for number, part in enumerate(parts, 1):
        dev, test = (part, ~part) if folds.inverted else (~part, part)
        splits.append(Split(f"fold {number}", dev, test))
    return [*splits, Split("deploy", everything, ~everything)]


def _refuse_shared_groups(table: Table) -> None:
    """Raise ValueError where items of one group are both dev and test."""
    splits: dict[str, set[str]] = {}
    for group, split in zip(table.groups, table.splits, strict=True):
        splits.setdefault(group, set()).add(split)
    shared = sorted(group for group, names in splits.items() if len(names) > 1)
    if shared:
        raise ValueError(
            f"{len(shared)} groups have items in both dev and test, {shared[0]!r} first. Pool the "
            "splits with `--data.folds.outer 5`, or set `--data.folds.by row` if rows are "
            "independent."
        )


def refuse_constant(gold: Sequence[float]) -> None:
    """Raise ValueError where all gold scores of a dev part are the same."""
    if len(set(gold)) == 1:
        raise ValueError(
            f"all {len(gold)} dev gold scores are {gold[0]:g}: there is nothing to fit. "
            "Add items with other scores."
        )


def partition(
    table: Table, rows: Bool[Tensor, " items"], count: int, by: str, seed: int
) -> list[Bool[Tensor, " items"]]:
    """Divide rows into `count` parts of about equal numbers of groups, in random order.

    Raises:
        ValueError: there are fewer rows than parts.
    """
    if count < 2:
        raise ValueError(
            f"`data.folds.inner` and `outer` must be 2 at least (`outer` 0: none), got {count}."
        )
    index = rows.nonzero().flatten().tolist()
    if len(index) < count:
        raise ValueError(
            f"{len(index)} dev rows can't make {count} folds. Lower `--data.folds.inner` or "
            "`outer`, or add scored items."
        )
    units = [table.groups[i] if by == "group" else table.ids[i] for i in index]
    names = sorted(set(units))
    if len(names) < 2:
        raise ValueError(
            f"all {len(index)} dev rows belong to the group {names[0]!r}: folds need two groups "
            "at least. Set `--data.folds.by row` if rows are independent."
        )
    count = min(count, len(names))  # below that many groups, leave one out at a time
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(names), generator=generator).tolist()
    part_of = {names[position]: rank % count for rank, position in enumerate(order)}
    parts = torch.zeros(count, len(table.ids), dtype=torch.bool)
    for i, unit in zip(index, units, strict=True):
        parts[part_of[unit], i] = True
    return list(parts)


class _Candidate(NamedTuple):
    strength: float
    temperature: float
    contrast: float
    ridge_bias: float
    ridge_mixing: float


NUMERIC = _Candidate._fields  # settings in which problems of one fit may differ


def candidates(settings: HeadSettings, select: Select | None) -> list[_Candidate]:
    """Every combination of the values to choose from, the default ones where nothing varies."""
    select = select or Select()
    grids: list[Sequence[float]] = []
    for name in ("strength", "temperature", "contrast"):
        values = getattr(select, name)
        if values is not None and name in settings.learn:
            raise ValueError(
                f"`model.select.{name}` and `model.head.learn` both name {name!r}: a learned value "
                f"is only a starting point. Take {name!r} out of `learn`."
            )
        if values is not None and not values:
            raise ValueError(f"`model.select.{name}` lists no values.")
        if name == "temperature" and values is not None and not min(values) > 0:
            raise ValueError(f"`model.select.temperature` must be above 0, got {min(values)}.")
        grids.append(values if values is not None else [getattr(settings, name)])
    given: dict[str, Any] = {}
    for name in ("ridge_bias", "ridge_mixing"):
        value = getattr(settings, name)
        learned = "mixing" in settings.learn if name == "ridge_mixing" else bool(settings.learn)
        given[name] = RIDGE if value == "auto" and not learned else value
    ridges: list[tuple[float, float]]
    bias, mixing = given["ridge_bias"], given["ridge_mixing"]
    if bias == "auto" and mixing == "auto":
        # A cross, not a product: each ridge at the other's default.
        ridges = [(rho, math.inf) for rho in RIDGES] + [(RIDGE, rho) for rho in MIXING_RIDGES]
    else:
        ridges = list(
            itertools.product(
                RIDGES if bias == "auto" else [bias],
                MIXING_RIDGES if mixing == "auto" else [mixing],
            )
        )
    return [
        _Candidate(strength, temperature, contrast, *pair)
        for (strength, temperature, contrast), pair in itertools.product(
            itertools.product(*grids), ridges
        )
    ]


def make_problems(
    table: Table,
    splits: Sequence[Split],
    folds: Folds,
    settings: HeadSettings,
    select: Select | None,
    seed: int,
    *,
    per_split: Mapping[str, HeadSettings] | None = None,
    choices_only: bool = False,
) -> tuple[Problems, list[Search]]:
    """All fits of all splits: every candidate on each inner fold and on all of dev.

    With `choices_only` there are no inner folds where there is nothing to choose. Settings of
    single splits may differ in numbers from the others'.
    """
    parts: list[Problems] = []
    searches = []
    at = 0
    for split in splits:
        own = (per_split or {}).get(split.name, settings)
        grid = candidates(own, select)
        if choices_only and len(grid) == 1:
            held_out, inner_trains = [], []
        elif settings.learn:
            held_out = _inner_parts(table, split.dev, folds, len(grid), seed)
            inner_trains = [split.dev & ~part for part in held_out]
        else:  # nothing is fitted, so all of dev may judge a fixed value
            held_out, inner_trains = [split.dev], [split.dev]
        inner, full, fits = [], [], []
        for candidate in grid:
            inner.append(list(range(at, at + len(held_out))))
            full.append(at + len(held_out))
            at += len(held_out) + 1
            fits += [candidate] * (len(held_out) + 1)
        searches.append(Search(split, torch.tensor(inner, dtype=torch.long), torch.tensor(full)))
        settled = {
            name: torch.tensor([getattr(fit, name) for fit in fits], dtype=torch.float64)
            for name in NUMERIC
        }
        parts.append(
            with_own_terms(
                table, own, seed,
                torch.stack([*inner_trains, split.dev] * len(grid)).double(),
                torch.stack([*held_out, split.test] * len(grid)).double(),
                settled,
            )
        )  # fmt: skip
    return Problems(*(torch.cat(values) for values in zip(*parts, strict=True))), searches


def with_own_terms(
    table: Table,
    settings: HeadSettings,
    seed: int,
    train: Float[Tensor, "problems items"],
    held_out: Float[Tensor, "problems items"],
    settled: dict[str, Float[Tensor, " problems"]],
) -> Problems:
    """Problems whose prior B and centre come from their own train rows."""
    share = train / train.sum(-1, keepdim=True).clamp(min=1)
    return Problems(
        train=train,
        held_out=held_out,
        prior=prior_term(
            settings.prior,
            table.evidence,
            table.logprobs,
            train,
            mass=fixed_order_mass(table) if settings.prior == "position" else None,
            prompts=settings.prior_prompts,
            temperature=settings.prior_temperature,
            seed=seed,
        ),
        centre=share @ table.logprobs.log_softmax(-1),
        **settled,
    )


def _inner_parts(
    table: Table, dev: Bool[Tensor, " items"], folds: Folds, grid: int, seed: int
) -> list[Bool[Tensor, " items"]]:
    parts = partition(table, dev, folds.inner, folds.by, seed)
    # One division of few items chooses badly: average over several.
    repeats = min(3, math.ceil(200 / int(dev.sum()))) if grid > 1 else 1
    for repeat in range(1, repeats):
        parts += partition(table, dev, folds.inner, folds.by, seed + 1000 * repeat)
    return parts
