"""The LightningDataModule: from a store, a table or a judge to one batch."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from scorecal.calibration.folds import Folds, refuse_constant
from scorecal.calibration.head import Problems
from scorecal.judging.contrast import Contrasted
from scorecal.judging.elicit import check_judge, elicit
from scorecal.judging.examples import draw_examples
from scorecal.judging.judge import Judge
from scorecal.judging.plan import Plan, Question, item_questions, prior_questions
from scorecal.judging.store import Store
from scorecal.judging.table import (
    Table,
    load_assistant,
    load_table,
    table_from_file,
    table_from_store,
    with_orders,
)
from scorecal.judging.task import (
    Item,
    Task,
    Template,
    load_items,
    load_new_items,
    templates,
)
from scorecal.progress import notice


class Batch(NamedTuple):
    """All rows of one scale, float64, and the problems fitted to them."""

    logprobs: Float[Tensor, "items levels"]
    assistant: Float[Tensor, "items levels"]
    censored: Bool[Tensor, "items levels"]
    gold: Float[Tensor, " items"]
    problems: Problems


def _named(judge: Judge | None) -> Judge | None:
    """A judge, if it names a model."""
    return judge if judge is not None and judge.model else None


@dataclass
class Assistant:
    """A second judge whose log-probabilities are subtracted (paper 2).

    Tokenizers may differ: only distributions over the labels meet.

    Attributes:
        table: its store, shipped table or file of log-probabilities of the same items.
        judge: or the judge itself, which then judges them.
        store: where its store is; default `stores/<task>-<judge>-<hash>`.
        strength: λ of answers in contrast to it, where the task's mode is `generate`.
        temperature: t of these.
        plausibility: of these, the least share of the likeliest token's probability that counts.
    """

    table: str | None = None
    judge: Judge | None = None
    store: str = ""
    strength: float = 0.1
    temperature: float = 1.0
    plausibility: float = 0.1

    def named_judge(self) -> Judge | None:
        """The judge, if the configuration names one."""
        return _named(self.judge)

    def contrasted(self, task: Task) -> Contrasted | None:
        """How answers are written in contrast to it, if they are."""
        judge = self.named_judge()
        if judge is None or task.mode != "generate":
            return None
        return Contrasted(judge, self.strength, self.temperature, self.plausibility)

    @property
    def is_named(self) -> bool:
        """Whether the configuration names an assistant."""
        return bool(self.table) or self.named_judge() is not None


class ScoreData(LightningDataModule):
    """Judgements of one task, from wherever they come.

    Args:
        task: what is judged.
        judge: who judges; while its model is null, `table` is read.
        table: a shipped table, a store folder or a file of log-probabilities.
        path: local file, or folder with one file a split, instead of the task's source.
        store: where a judge's store is; default `stores/<task>-<judge>-<hash>`.
        predict_path: new items, or new rows of log-probabilities, for `predict`.
        assistant: a second judge to subtract.
        folds: how items are divided.
        drop_leaks: leave out dev items that stand in test too.
        missing_gold: leave out items without a gold score, or refuse them.
        censored: use the bound of a label absent from a top-k list, or refuse such rows.
        truncate: cut the end of items that are longer than the judge's context.
        samples: inputs that the judge invents and judges, for what it says on average.
    """

    def __init__(
        self,
        task: Task,
        judge: Judge | None = None,
        table: str = "",
        path: str = "",
        store: str = "",
        predict_path: str = "",
        assistant: Assistant = Assistant(),  # noqa: B008  (never mutated)
        folds: Folds = Folds(),  # noqa: B008
        drop_leaks: bool = True,
        missing_gold: Literal["drop", "error"] = "drop",
        censored: Literal["bound", "refuse"] = "bound",
        truncate: bool = False,
        samples: int = 0,
    ) -> None:
        super().__init__()
        if samples < 0:
            raise ValueError(f"`data.samples` is 0 or more, got {samples}.")
        self.task = task
        self.judge = judge
        self.table_name = table
        self.path = path
        self.store = store
        self.predict_path = predict_path
        self.assistant = assistant
        self.folds = folds
        self.drop_leaks = drop_leaks
        self.missing_gold = missing_gold
        self.censored = censored
        self.truncate = truncate
        self.samples = samples
        self.needs_test = False
        """Refuse items that leave nothing to test on before they are judged."""
        self.prepared: Store | None = None
        self.prepared_assistant: Store | None = None
        self.table: Table | None = None
        self.assistant_logprobs: Tensor | None = None

    # Judging

    def named_judge(self) -> Judge | None:
        """The judge, if the configuration names one."""
        return _named(self.judge)

    def questions(self) -> tuple[list[Template], list[Item], list[Question]]:
        """The task's templates, its items, and everything its judge is asked."""
        asked, items = self._shown()
        if self.task.examples:
            notice(f"left out {self.task.examples} items that are shown as examples")
        return asked, items, item_questions(asked, items) + prior_questions(asked)

    def _shown(self) -> tuple[list[Template], list[Item]]:
        """The templates, with the scored items that they show, and all other items."""
        asked = templates(self.task)
        items = load_items(self.task, self.path, missing_gold=self.missing_gold)
        if self.task.examples:
            pooled = self.folds.outer > 0
            examples, items = draw_examples(items, self.task.examples, pooled=pooled)
            asked = templates(self.task, examples)
        return asked, items

    def _check_before_judging(self, items: list[Item]) -> None:
        """Refuse what could not be fitted before hours of judging."""
        pooled = self.folds.outer > 0
        gold = [
            item.gold for item in items if item.gold is not None and (pooled or item.split == "dev")
        ]
        if len(gold) < self.folds.inner:
            raise ValueError(
                f"{len(gold)} scored dev rows can't make {self.folds.inner} folds. Lower "
                "`--data.folds.inner`, or add scored items."
            )
        refuse_constant(gold)
        tested = [item for item in items if item.split == "test"]
        if self.needs_test and not pooled and all(item.gold is None for item in tested):
            raise ValueError(
                f"none of the {len(tested)} test rows has a gold score. Use scored rows, or set "
                "`--evaluate_test false`."
            )

    def elicit(self, *, to_fit: bool = False, ranks: Trainer | None = None) -> list[Store]:
        """Judge the task into a store, or find that it is there.

        Args:
            to_fit: refuse what could not be fitted before judging it.
            ranks: a trainer whose processes share the work.

        Returns:
            The judge's store, and its assistant's if that is a judge too.
        """
        judge = self.named_judge()
        if judge is None:
            raise ValueError("no judge is named. Set `--data.judge.model` to a folder or a hub id.")
        asked, items, questions = self.questions()
        if to_fit:
            self._check_before_judging(items)
        other = self.assistant.named_judge()

        def check_assistant(_: Plan) -> None:  # before the judge's hours, not after them
            if other is not None:
                check_judge(
                    other, self._assistant_task, asked, questions, self.assistant.store,
                    truncate=self.truncate,
                )  # fmt: skip

        stores = [
            elicit(
                judge, self.task, asked, items, questions, self.store,
                truncate=self.truncate, samples=self.samples,
                contrasted=self.assistant.contrasted(self.task), trainer=ranks,
                before=check_assistant,
            )
        ]  # fmt: skip
        return stores + self._elicit_assistant(asked, items, questions, ranks)

    @property
    def _assistant_task(self) -> Task:
        return replace(self.task, mode="labels")  # only its label distributions are read

    def _elicit_assistant(
        self,
        asked: list[Template],
        items: list[Item],
        questions: list[Question],
        ranks: Trainer | None = None,
    ) -> list[Store]:
        judge = self.assistant.named_judge()
        if judge is None:
            return []
        store = self.assistant.store
        return [
            elicit(
                judge, self._assistant_task, asked, items, questions, store,
                truncate=self.truncate, trainer=ranks, before=lambda _: notice("the assistant:"),
            )
        ]  # fmt: skip

    def prepare_data(self) -> None:
        """Fill the stores where judges are named: one command from text to scores."""
        if self.named_judge() is not None and self.prepared is None:
            self.prepared, *others = self.elicit(to_fit=True)
        elif self.assistant.named_judge() is not None and self.prepared_assistant is None:
            others = self._elicit_assistant(*self.questions())
        else:
            return
        self.prepared_assistant = others[0] if others else None

    # Reading

    def use_table(self, name: str) -> None:
        """Read another table instead, of the same task and divided in the same way."""
        self.judge, self.prepared, self.table, self.table_name = None, None, None, name

    def use_scale(self, scale: str) -> None:
        """Read the same judgements on one of the task's scales."""
        self.task, self.table = self.task.on(scale), None

    def setup(self, stage: str) -> None:
        """Read the judgements and leave out what can't be used, with a count."""
        if self.table is not None:
            return
        if self.prepared is not None:
            table = table_from_store(self.prepared, self.task)
        elif self.table_name:
            table = load_table(self.table_name, self.task)
        else:
            raise ValueError("neither a table nor a judge is named. Set `--data.table`.")
        table = self._usable(table)
        other = None
        if self.prepared_assistant is not None:
            other = table_from_store(self.prepared_assistant, self.task)
        elif self.assistant.table:
            other = load_assistant(self.assistant.table, self.task)
        self.assistant_logprobs = torch.zeros_like(table.logprobs)
        if other is not None:
            if self.censored == "refuse":
                used = set(table.ids)
                _refuse_censored(other.rows(torch.tensor([key in used for key in other.ids])))
            self.assistant_logprobs = table.add_assistant(other)
            table.identity = with_assistant(table.identity, other)
        self.table = table

    def _usable(self, table: Table) -> Table:
        if set(table.splits) - {"dev", "test"}:
            ours = torch.tensor([split in ("dev", "test") for split in table.splits])
            notice(f"left out {int((~ours).sum())} items of other splits")
            table = table.rows(ours)
        keep = ~table.gold.isnan()
        if not keep.all():
            missing = int((~keep).sum())
            first = table.ids[int((~keep).nonzero()[0])]
            if self.missing_gold == "error":
                raise ValueError(
                    f"{missing} items of {table.name!r} have no gold score, {first!r} first. "
                    "Add them, or set `--data.missing_gold drop`."
                )
            notice(f"left out {missing} items without a gold score")
        if self.drop_leaks:
            dev = torch.tensor([split == "dev" for split in table.splits])
            leaking = keep & table.leak & dev
            if leaking.any():
                notice(f"left out {int(leaking.sum())} dev items that test holds too")
            keep = keep & ~leaking
        if self.censored == "refuse":
            _refuse_censored(table)
        if not keep.any():
            raise ValueError(f"no item of {table.name!r} has a gold score.")
        return table.rows(keep)

    def read(self) -> Table:
        """The usable table, after `setup`."""
        assert self.table is not None
        return self.table

    def batch(self, problems: Problems) -> Batch:
        """Everything a step needs."""
        table = self.read()
        assert self.assistant_logprobs is not None
        return Batch(table.logprobs, self.assistant_logprobs, table.censored, table.gold, problems)

    def _loader(self) -> DataLoader[Batch]:
        assert self.trainer is not None
        batch = self.batch(self.trainer.lightning_module.problems)  # type: ignore[arg-type]
        return DataLoader([batch], batch_size=None)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = _loader

    # Predicting

    def require_assistant_of_new_items(self) -> None:
        """Refuse new items whose assistant's answers aren't there and can't be had."""
        if self.named_judge() is None and not self.assistant.table:
            raise ValueError(
                "this head subtracts an assistant. Set `--data.assistant.table` to its "
                "log-probabilities of the new items."
            )
        if self.named_judge() is not None and self.assistant.named_judge() is None:
            raise ValueError(
                "this head subtracts an assistant, which has to judge the new items too. Set "
                "`--data.assistant.judge`."
            )

    def new_table(
        self, check: Callable[[dict[str, str]], None] = lambda identity: None
    ) -> tuple[Table, Table | None]:
        """The rows of `predict_path`, judged if a judge is named, and the assistant's.

        Args:
            check: raises on a judge's identity that can't be used, before it judges anything.
        """
        if not self.predict_path:
            raise ValueError("nothing to predict. Set `--data.predict_path` to a file of items.")
        judge, assistant = self.named_judge(), self.assistant.named_judge()
        other = None
        if judge is None:
            table = table_from_file(Path(self.predict_path), self.task, new=True)
            if self.assistant.table:
                other = load_assistant(self.assistant.table, self.task)
            return table, other
        asked = self._shown()[0] if self.task.examples else templates(self.task)
        items = load_new_items(self.task, self.predict_path)
        questions = item_questions(asked, items)
        task = replace(self.task, mode="labels")  # a head reads no answers in words
        # Never `self.store`: that is the fitted items'.
        store = elicit(
            judge, task, asked, items, questions, truncate=self.truncate,
            before=lambda plan: check(with_orders(plan.identity, self.task)),
        )  # fmt: skip
        if assistant is not None:
            its = elicit(assistant, task, asked, items, questions, truncate=self.truncate)
            other = table_from_store(its, self.task)
        return table_from_store(store, self.task), other


def _refuse_censored(table: Table) -> None:
    if table.censored.any():
        first = table.ids[int(table.censored.any(-1).nonzero()[0])]
        raise ValueError(
            f"item {first!r} of {table.name!r} lacks a label's log-probability. "
            "Ask for more top_logprobs, or set `--data.censored bound`."
        )


def as_assistant(identity: dict[str, str]) -> str:
    """What of a judge's identity is an assistant's: all but what it shares with the main judge."""
    shared = ("template", "scale", "orders", "assistant")
    own = {name: value for name, value in identity.items() if name not in shared}
    return json.dumps(own, sort_keys=True)


def with_assistant(identity: dict[str, str], other: Table) -> dict[str, str]:
    """A judge's identity with its assistant's, who is subtracted from it."""
    return {**identity, "assistant": as_assistant(other.identity)} if identity else identity
