"""Tables, heads and fits made up for the tests of calibration and evaluation."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from scorecal.calibration.data import ScoreData
from scorecal.calibration.folds import Folds, Search, make_problems, make_splits
from scorecal.calibration.head import HeadSettings, NaturalHead, Problems
from scorecal.calibration.module import Calibration
from scorecal.calibration.solvers import Loss, Objective, Rows
from scorecal.judging.priors import Evidence
from scorecal.judging.rubric import Orders, rubric_orders
from scorecal.judging.table import Table
from scorecal.judging.task import Task


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_table(
    items: int = 80,
    levels: int = 5,
    *,
    dev: int | None = None,
    groups: list[str] | None = None,
    seed: int = 0,
    signal: float = 0.3,
) -> Table:
    """Gold with ties, a judge that prefers some labels, and its answers to empty prompts."""
    values = torch.arange(levels, dtype=torch.float64)
    top = levels - 1
    gold = (normal(items, seed=seed).mul(top / 3).add(top / 2).clamp(0, top) * 5).round() / 5
    seen = gold + normal(items, seed=seed + 1)
    favour = 1.5 * normal(levels, seed=seed + 2)
    logits = favour - signal * (seen[:, None] - values).square()
    logits = logits + 0.5 * normal(items, levels, seed=seed + 3)
    mass = torch.linspace(0.4, 0.9, items, dtype=torch.float64)
    dev = items // 2 if dev is None else dev
    perplexity = normal(12, seed=seed + 5).exp()
    return Table(
        name="synthetic",
        ids=[f"i{index}" for index in range(items)],
        groups=groups or [f"g{index}" for index in range(items)],
        splits=["dev"] * dev + ["test"] * (items - dev),
        gold=gold,
        leak=torch.zeros(items, dtype=torch.bool),
        logprobs=logits.log_softmax(-1) + mass.log().unsqueeze(-1),
        censored=torch.zeros(items, levels, dtype=torch.bool),
        label_mass=mass,
        values=values,
        labels=tuple(f"{value:g}" for value in values.tolist()),
        identity={"judge": "synthetic"},
        engine={"torch": "0"},
        evidence={
            kind: Evidence(
                (favour + 0.5 * normal(count, levels, seed=seed + count)).log_softmax(-1),
                perplexity[:count] if kind != "content_free" else None,
            )
            for kind, count in (("random", 11), ("random_task", 12), ("content_free", 3))
        },
    )


def ordered_table(
    items: int = 80,
    levels: int = 5,
    *,
    position_bias: Sequence[float] = (),
    orders: Orders | list[Orders] = "balanced",
    averaged: Orders | list[Orders] = "none",
    items_a_group: int = 1,
    order_noise: float = 0.5,
    seed: int = 0,
    **options: Any,
) -> Table:
    """A judge that is shown a rubric in several orders and likes some of its positions.

    Under each order the judge's logits are those of `make_table`, plus the bias of the position at
    which a label stands, plus noise of the order, half of it shared by the items of a group.
    """
    groups = [f"g{item // items_a_group}" for item in range(items)]
    table = make_table(items, levels, groups=groups, seed=seed, **options)
    bias = torch.tensor(position_bias or [0.0] * levels, dtype=torch.float64)
    by_order = {}
    for number, order in enumerate(rubric_orders(levels, orders)):
        noise = normal(items, levels, seed=seed + 100 + number)
        shared = normal(items, levels, seed=seed + 200 + number)
        noise = (noise + shared[torch.arange(items) // items_a_group]) / 2**0.5
        logits = table.logprobs + bias[torch.tensor(order).argsort()] + order_noise * noise
        name = " ".join(table.labels[level] for level in order)
        by_order[name] = logits.log_softmax(-1) + table.label_mass.log().unsqueeze(-1)
    kept = tuple(
        " ".join(table.labels[level] for level in order)
        for order in rubric_orders(levels, averaged)
    )
    probs = torch.stack([by_order[name].softmax(-1) for name in kept])
    return replace(
        table,
        logprobs=probs.mean(0).log() if len(kept) > 1 else by_order[kept[0]],
        by_order=by_order,
        orders=kept,
        written_order=" ".join(table.labels),
    )


def make_assistant(table: Table, seed: int = 50) -> Tensor:
    return normal(*table.logprobs.shape, seed=seed).log_softmax(-1)


def problems_of(
    table: Table, settings: HeadSettings, folds: Folds | None = None
) -> tuple[Problems, list[Search]]:
    folds = folds or Folds()
    return make_problems(table, make_splits(table, folds, 0), folds, settings, None, 0)


def make_objective(
    table: Table,
    settings: HeadSettings,
    loss: Loss = "nll",
    *,
    problems: Problems | None = None,
    assistant: Tensor | None = None,
) -> Objective:
    if problems is None:
        problems = problems_of(table, settings)[0]
    if assistant is None:
        assistant = torch.zeros_like(table.logprobs)
    rows = Rows(table.logprobs, assistant, table.gold, table.values)
    return Objective(NaturalHead(problems, settings), rows, loss)


def score_data(
    table: Table, folds: Folds | None = None, assistant: Tensor | None = None
) -> ScoreData:
    """A data module that has already read its table."""
    task = Task("synthetic", "sts.j2", {}, scale=f"{table.labels[0]}-{table.labels[-1]}")
    data = ScoreData(task, folds=folds or Folds())
    data.table = table
    data.assistant_logprobs = torch.zeros_like(table.logprobs) if assistant is None else assistant
    return data


def fit(
    table: Table,
    head: HeadSettings | None = None,
    *,
    folds: Folds | None = None,
    assistant: Tensor | None = None,
    epochs: int = 50,
    validate: bool = False,
    seed: int = 0,
    **options,
) -> Calibration:
    """A run of Lightning's Trainer, as the command line makes it."""
    module = Calibration(head or HeadSettings(), **options)
    module.seed = seed
    return train(module, score_data(table, folds, assistant), epochs=epochs, validate=validate)


def train(
    module: Calibration, data: ScoreData, *, epochs: int = 50, validate: bool = False
) -> Calibration:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        limit_val_batches=1 if validate else 0,
    )
    trainer.fit(module, datamodule=data)
    return module
