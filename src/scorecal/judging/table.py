"""Label log-probabilities in memory, whether a judge or the user's own file gave them."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scorecal import resources
from scorecal.functional.scaling import mean_logprobs
from scorecal.judging.answers import KINDS, Generated, read_answers
from scorecal.judging.labels import unlisted_bound
from scorecal.judging.priors import Evidence
from scorecal.judging.records import SUFFIXES, Record, read_records
from scorecal.judging.store import Store
from scorecal.judging.task import Task, cell_or, read_gold, templates


@dataclass
class Table:
    """One judge's label log-probabilities of many items, with what is known about both.

    `gold` is NaN where nobody scored an item, `label_mass` where it is unknown; `identity` is empty
    for log-probabilities that came without a judge.
    """

    name: str
    ids: list[str]
    groups: list[str]
    splits: list[str]
    gold: Float[Tensor, " items"]
    leak: Bool[Tensor, " items"]
    logprobs: Float[Tensor, "items levels"]
    censored: Bool[Tensor, "items levels"]
    label_mass: Float[Tensor, " items"]
    values: Float[Tensor, " levels"]
    labels: tuple[str, ...]
    identity: dict[str, str] = field(default_factory=dict)
    engine: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    logsumexp: Float[Tensor, " items"] | None = None
    """Log-normaliser of the next-token logits; None where it is unknown."""
    by_order: dict[str, Float[Tensor, "items levels"]] = field(default_factory=dict)
    """Log-probabilities with the rubric in each order that the judge was shown, of which
    `logprobs` averages those that the task names; empty without a rubric. An order's name is its
    labels as they are shown."""
    orders: tuple[str, ...] = ()
    """The orders that `logprobs` averages."""
    written_order: str = ""
    """The order in which the rubric is written."""
    assistants: dict[str, Float[Tensor, "items levels"]] = field(default_factory=dict)
    """Other judges' log-probabilities of the labels alone, for the same items, to subtract."""
    generated: dict[str, Generated] = field(default_factory=dict)
    """What the judge answered in its own words, by kind: `generated` as it is, `contrasted` in
    contrast to an assistant. Empty where it was not asked to."""

    def rows(self, keep: Bool[Tensor, " items"]) -> "Table":
        """The same table with the kept rows only."""
        index = keep.nonzero().flatten()
        chosen = index.tolist()
        return Table(
            self.name,
            [self.ids[i] for i in chosen],
            [self.groups[i] for i in chosen],
            [self.splits[i] for i in chosen],
            self.gold[index],
            self.leak[index],
            self.logprobs[index],
            self.censored[index],
            self.label_mass[index],
            self.values,
            self.labels,
            self.identity,
            self.engine,
            self.evidence,
            None if self.logsumexp is None else self.logsumexp[index],
            {order: logprobs[index] for order, logprobs in self.by_order.items()},
            self.orders,
            self.written_order,
            {name: logprobs[index] for name, logprobs in self.assistants.items()},
            {kind: answers.rows(chosen) for kind, answers in self.generated.items()},
        )

    def add_assistant(self, other: "Table") -> Float[Tensor, "items levels"]:
        """Keep another judge's log-probabilities of the same items, renormalised over the labels.

        Raises:
            ValueError: it has not judged all of them.
        """
        position = {key: index for index, key in enumerate(other.ids)}
        missing = [key for key in self.ids if key not in position]
        if missing:
            raise ValueError(
                f"the assistant's table {other.name!r} lacks {len(missing)} of {len(self.ids)} "
                f"items of {self.name!r}, {missing[0]!r} first. Name one of the same items."
            )
        order = torch.tensor([position[key] for key in self.ids])
        # Part of methods' names, so without what a judge's name says in brackets.
        name = other.identity.get("judge", other.name).partition(" (")[0]
        if name in self.assistants:
            name = f"{name} ({other.name})"
        if name in self.assistants:
            name = f"{name} {len(self.assistants) + 1}"
        self.assistants[name] = other.logprobs[order].log_softmax(-1)
        return self.assistants[name]


def load_table(name: str, task: Task, *, new: bool = False) -> Table:
    """Read a shipped table, a store folder or a file of log-probabilities.

    `new` rows of a file need no gold.

    Raises:
        ValueError: there is no such table, or it is damaged.
    """
    folder = resources.find("tables", name, Path.is_dir)
    if folder is not None:
        return table_from_store(Store(folder), task)
    if Path(name).suffix in SUFFIXES:
        return table_from_file(Path(name), task, new=new)
    of_task = [
        shipped
        for shipped in resources.names("tables", "*-*")
        if (folder := resources.find("tables", shipped, Path.is_dir)) is not None
        and Store(folder).manifest()["task"] == task.name
    ]
    raise ValueError(
        f"no table {name!r}. Set `--data.table` to a store folder, a file of log-probabilities or "
        f"a shipped table (of {task.name!r}: {', '.join(of_task) or 'none'}), or name a judge with "
        "`--data.judge.model`."
    )


def load_assistant(name: str, task: Task) -> Table:
    """`load_table`, with errors that say whose table it is; a file needs no gold."""
    try:
        return load_table(name, task, new=True)
    except ValueError as error:
        raise ValueError(f"the assistant: {error}") from None


def table_from_store(store: Store, task: Task) -> Table:
    """A finished store's judgements on the task's scale."""
    manifest = store.manifest()
    scale = task.one_scale()
    if scale.name not in manifest["scales"]:
        raise ValueError(
            f"store {str(store.folder)!r} has the scales {', '.join(manifest['scales'])}, not "
            f"{scale.name!r}. Set `--data.task.scale`, or elicit another store."
        )
    orders = _refuse_other_questions(store, manifest, task)
    items = store.items().to_pydict()
    judged: dict[str, dict[str, list[Record]]] = {}
    for row in store.judgements().to_pylist():
        if row["scale"] == scale.name:
            judged.setdefault(row["kind"], {}).setdefault(row["order"], []).append(row)

    def of_items(rows: list[Record]) -> list[Record]:
        place = {row["key"]: row for row in rows}
        return [place[key] for key in items["id"]]

    by_order = {order: _Answers.of(of_items(rows)) for order, rows in judged.pop("item").items()}
    generated = {
        kind: read_answers([of_items(of_kind[order]) for order in orders], task)
        for kind in KINDS
        if (of_kind := judged.pop(kind, None)) is not None
    }
    item = _Answers.mean([by_order[order] for order in orders])
    evidence = {}
    for kind, of_kind in judged.items():
        of_orders = [_Answers.of(of_kind[name]) for name in ("none", *orders) if name in of_kind]
        evidence[kind] = Evidence(_Answers.mean(of_orders).logprobs, of_orders[0].perplexity)
    return Table(
        store.folder.name,
        items["id"],
        items["group"],
        items["split"],
        torch.tensor(
            [math.nan if gold is None else gold for gold in items["gold"]], dtype=torch.float64
        ),
        torch.tensor(items["leak"]),
        item.logprobs,
        item.censored,
        item.label_mass,
        torch.tensor(task.values(), dtype=torch.float64),
        scale.labels,
        _identity_on(scale.name, manifest, task),
        manifest["engine"],
        evidence,
        item.logsumexp,
        generated=generated,
        **_rubric_of(task, orders, by_order),
    )


def _rubric_of(task: Task, orders: list[str], by_order: dict[str, "_Answers"]) -> dict[str, Any]:
    """What a table holds of the rubric's orders."""
    if task.rubric is None:
        return {}
    return {
        "by_order": {name: of.logprobs for name, of in by_order.items()},
        "orders": tuple(orders),
        "written_order": templates(replace(task, orders="none"))[0].order,
    }


class _Answers(NamedTuple):
    """Judgements of the same prompts, in one order of the rubric or averaged over several."""

    logprobs: Float[Tensor, "prompts levels"]
    censored: Bool[Tensor, "prompts levels"]
    label_mass: Float[Tensor, " prompts"]
    logsumexp: Float[Tensor, " prompts"]
    perplexity: Float[Tensor, " prompts"] | None

    @classmethod
    def of(cls, rows: list[Record]) -> "_Answers":
        """Rows of a store."""

        def column(name: str) -> Tensor:
            return torch.tensor([row[name] for row in rows], dtype=torch.float64)

        unknown = any(row["perplexity"] is None for row in rows)
        return cls(
            column("logprobs"), column("censored").bool(), column("label_mass"),
            column("logsumexp"), None if unknown else column("perplexity"),
        )  # fmt: skip

    @classmethod
    def mean(cls, answers: list["_Answers"]) -> "_Answers":
        """The arithmetic mean of label-renormalised probabilities (paper 3); one stays as it is."""
        if len(answers) == 1:
            return answers[0]
        logprobs, censored, mass, logsumexp = (
            torch.stack(values) for values in list(zip(*answers, strict=True))[:4]
        )
        return cls(
            mean_logprobs(logprobs), censored.any(0), mass.mean(0),
            torch.full_like(logsumexp[0], math.nan), None,
        )  # fmt: skip


def _identity_on(scale: str, manifest: dict[str, Any], task: Task) -> dict[str, str]:
    """The identity of a store's judgements on one of its scales, in the task's orders."""
    identity, entry = dict(manifest["identity"]), manifest["scales"][scale]
    if len(manifest["scales"]) > 1:
        labels = json.loads(identity["labels"])[scale]
        identity |= {"template": entry["template"], "scale": scale, "labels": json.dumps(labels)}
    return with_orders(identity, task)


def with_orders(identity: dict[str, str], task: Task) -> dict[str, str]:
    """A judge's identity and, of a rubric, in which orders it is shown and averaged."""
    return identity if task.rubric is None else {**identity, "orders": json.dumps(task.orders)}


def _refuse_other_questions(store: Store, manifest: dict[str, Any], task: Task) -> list[str]:
    """Refuse a store whose labels mean other scores, or that was asked in other words.

    Returns:
        The orders of the rubric that the task averages over; `none` without a rubric.
    """
    (scale,) = task.scales
    entry, wanted = manifest["scales"][scale], list(task.values())
    values = entry["values"]
    if values != wanted:
        raise ValueError(
            f"the labels of store {str(store.folder)!r} are worth {values[0]:g} to {values[-1]:g}, "
            f"this task's {wanted[0]:g} to {wanted[-1]:g}. Set `data.task.gold_range`."
        )
    asked = templates(task)
    # Examples are drawn from the items, which may not be at hand.
    if not task.examples and entry["template"] != asked[0].hash:
        raise ValueError(
            f"store {str(store.folder)!r} was judged with another template or criterion than "
            f"{task.template!r} with `gold: {task.gold}`. Set `data.task`, or elicit another store."
        )
    orders = [template.order for template in asked]
    if missing := [order for order in orders if order not in entry["orders"]]:
        raise ValueError(
            f"store {str(store.folder)!r} lacks {len(missing)} of the {len(orders)} orders of the "
            f"rubric, {missing[0]!r} first. Set `--data.task.orders`, or elicit another store."
        )
    return orders


def table_from_file(path: Path, task: Task, *, new: bool = False) -> Table:
    """Log-probabilities of the user's own: a column a label, or `top_logprobs` lists.

    Columns: `id`, `split` and `group` if there are any, the task's gold column, and either one
    column named like each label or `top_logprobs` as OpenAI-compatible APIs return it. Without a
    `split` column every row is dev. `new` rows need no gold.

    Raises:
        ValueError: a row lacks a column, or holds what is no log-probability.
    """
    records = read_records(path)
    labels = task.one_scale().labels
    values = task.values()
    listed = "top_logprobs" in records[0]
    logprobs, censored, mass, gold = [], [], [], []
    for number, record in enumerate(records, 1):
        where = f"{str(path)!r} row {number}"
        if listed:
            row, absent = _from_top_logprobs(record.get("top_logprobs"), labels, where)
        else:
            row, absent = _from_columns(record, labels, where)
        logprobs.append(row)
        censored.append(absent)
        known = sum(math.exp(x) for x, gone in zip(row, absent, strict=True) if not gone)
        if known > 1 + 1e-3:
            raise ValueError(
                f"{where}: the labels' probabilities sum to {known:.3g}, more than 1. "
                "Log-probabilities (natural logarithm) are needed, not logits or percentages."
            )
        mass.append(math.nan if any(absent) else known)
        gold.append(_file_gold(record, task, values, where, new))
    ids = [cell_or(record.get("id"), str(number)) for number, record in enumerate(records, 1)]
    key, count = Counter(ids).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{str(path)!r}: the id {key!r} stands twice. Make ids unique.")
    splits = [_role(str(record.get("split", "dev")), task) for record in records]
    column = task.group or "group"
    if task.group and task.group not in records[0] and not new:
        raise ValueError(
            f"{str(path)!r} has no column {task.group!r}, which `data.task.group` names; it has "
            f"{', '.join(map(str, records[0]))}."
        )
    groups = [cell_or(record.get(column), key) for record, key in zip(records, ids, strict=True)]
    return Table(
        path.name,
        ids,
        groups,
        splits,
        torch.tensor(gold, dtype=torch.float64),
        torch.zeros(len(ids), dtype=torch.bool),
        torch.tensor(logprobs, dtype=torch.float64),
        torch.tensor(censored),
        torch.tensor(mass, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        labels,
    )


def _role(split: str, task: Task) -> str:
    return next((role for role, name in task.splits.items() if name == split), split)


def _file_gold(
    record: Record, task: Task, values: tuple[float, ...], where: str, new: bool
) -> float:
    if new:
        return math.nan
    if task.gold not in record:
        raise ValueError(
            f"{where} has no column {task.gold!r}; it has {', '.join(map(str, record))}. "
            "Set `--data.task.gold`."
        )
    gold = read_gold(record[task.gold], task, values, where, "drop")
    return math.nan if gold is None else gold


def _number(cell: Any, where: str, label: str) -> float:
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if math.isnan(value) or value > 1e-6:
        raise ValueError(
            f"{where}: {cell!r} for label {label!r} is no log-probability (a number up to 0)."
        )
    return max(value, math.log(torch.finfo(torch.float32).tiny))


def _from_columns(
    record: Record, labels: tuple[str, ...], where: str
) -> tuple[list[float], list[bool]]:
    missing = [label for label in labels if label not in record]
    if missing:
        raise ValueError(
            f"{where} has neither `top_logprobs` nor a column for the label {missing[0]!r}; it "
            f"has {', '.join(map(str, record))}. Name the columns like the labels "
            f"{', '.join(labels)}, or set `--data.task.scale`."
        )
    return [_number(record[label], where, label) for label in labels], [False] * len(labels)


def _from_top_logprobs(
    cell: Any, labels: tuple[str, ...], where: str
) -> tuple[list[float], list[bool]]:
    """Labels absent from the list are bounded by what the list leaves for them."""
    for label in labels:
        if any(other != label and other.startswith(label) for other in labels):
            raise ValueError(
                f"{where}: `top_logprobs` can't tell the label {label!r} from one that begins "
                "with it. Give one column a label."
            )
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except json.JSONDecodeError:
            cell = None
    if isinstance(cell, dict):
        # Parquet gives every row the keys of all rows, null where a token was not listed.
        cell = [
            {"token": token, "logprob": value} for token, value in cell.items() if value is not None
        ]
    if not isinstance(cell, list) or not cell:
        raise ValueError(f"{where}: `top_logprobs` is no list of {{token, logprob}}.")
    mass: dict[str, float] = {}
    listed_values = []
    for entry in cell:
        if not isinstance(entry, dict) or not {"token", "logprob"} <= set(entry):
            raise ValueError(f"{where}: `top_logprobs` holds {entry!r}, not {{token, logprob}}.")
        token = str(entry["token"])
        value = _number(entry["logprob"], where, token)
        listed_values.append(value)
        mass[token.strip()] = mass.get(token.strip(), 0.0) + math.exp(value)
    bound = unlisted_bound(listed_values)
    row = [math.log(mass[label]) if label in mass else bound for label in labels]
    return row, [label not in mass for label in labels]
