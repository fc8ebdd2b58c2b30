"""A judging task: where its items come from and how they are put to a judge."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scorecal import resources
from scorecal.judging.judge import Prompt
from scorecal.judging.records import Record, read_records
from scorecal.judging.rubric import Orders, Rubric, read_rubric, rubric_orders
from scorecal.scale import Scale

ROLES = ("dev", "test")
CONTENT_FREE = ("N/A", "[MASK]", "")  # paper 1, §2.3; Zhao et al. 2021


@dataclass
class Task:
    """What is judged.

    Attributes:
        name: names runs and stores.
        template: a shipped template's name or a Jinja file.
        fields: the template's variables and the columns that fill them.
        source: hub id, or a shipped or local file.
        config: configuration of a hub id.
        revision: revision of a hub id.
        splits: which of the source's splits serve as dev and test; one may be left out where
            outer folds pool them.
        gold: column of the human score; a template with several criteria reads it as `gold`.
        gold_factor: multiplies gold on reading.
        gold_range: gold's range after `gold_factor`, over which the labels are spread evenly
            in value; null: gold is on the scale itself.
        group: column of what must not be split (a document); null: every row for itself.
        explode: columns that hold lists of equal length, one entry an item.
        scale: `low-high` or `low-high:step`; a list puts every item on each of them.
        rubric: what each score means, by label, in the order in which it is shown; or the column
            that holds each item's own; null where the template shows none.
        orders: in which orders the rubric is shown: `none` (as it is written), `balanced` (every
            score once at every position), `both_directions` (and the same backwards),
            `{random: n}`, or a list of these.
        examples: scored dev items that are shown before every item, and left out of the items.
        reasoning: tokens, at most, that the judge writes before it scores; the template's block
            `reasoning` asks for them.
        mode: `generate` has the judge answer every item in its own words too, beside the labels'
            log-probabilities.
    """

    name: str
    template: str
    fields: dict[str, str]
    source: str = ""
    config: str | None = None
    revision: str | None = None
    splits: dict[str, str] = field(default_factory=lambda: {"dev": "dev", "test": "test"})
    gold: str = "score"
    gold_factor: float = 1.0
    gold_range: tuple[float, float] | None = None
    group: str | None = None
    explode: list[str] = field(default_factory=list)
    scale: list[str] | str = "0-5"
    rubric: dict[str | int | float, str] | str | None = None
    orders: list[Orders] | Orders = "none"
    examples: int = 0
    reasoning: int = 0
    mode: Literal["labels", "generate"] = "labels"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name) or self.name.startswith("."):
            raise ValueError(
                f"`data.task.name` names folders: letters, digits, - and _, got {self.name!r}."
            )
        if not self.splits or set(self.splits) - set(ROLES):
            raise ValueError(
                "`data.task.splits` says which split is dev and which is test, got the roles "
                f"{', '.join(map(repr, self.splits)) or 'none'}."
            )

        for name in ("examples", "reasoning"):
            if getattr(self, name) < 0:
                raise ValueError(f"`data.task.{name}` is 0 or more, got {getattr(self, name)}.")

        if len(set(self.scales)) < len(self.scales) or not self.scales:
            raise ValueError(f"`data.task.scale` must name scales, each once, got {self.scale!r}.")
        if len(self.scales) > 1 and self.gold_range is None:
            raise ValueError(
                "several scales need gold's own range, over which each is spread. Set "
                "`data.task.gold_range`."
            )
        if isinstance(self.rubric, dict):
            self.rubric = {str(label): text for label, text in self.rubric.items()}
        if self.rubric is None and self.orders != "none":
            raise ValueError(
                "`data.task.orders` orders a rubric, and there is none. Set `data.task.rubric`."
            )
        if self.orders == []:
            raise ValueError("`data.task.orders` names no order. `none` is the written one.")
        if self.rubric is not None and len(self.scales) > 1:
            raise ValueError("a rubric describes one scale, and `data.task.scale` has several.")

    @property
    def scales(self) -> list[str]:
        """The names of all scales."""
        return [self.scale] if isinstance(self.scale, str) else self.scale

    def one_scale(self) -> Scale:
        """The only scale.

        Raises:
            ValueError: there are several.
        """
        if len(self.scales) > 1:
            raise ValueError(
                f"one scale is needed here, the task has {', '.join(self.scales)}. Choose one: "
                f"`--data.task.scale {self.scales[0]}`."
            )
        return Scale.parse(self.scales[0])

    def on(self, scale: str) -> "Task":
        """The same task on one of its scales."""
        return replace(self, scale=scale)

    def values(self) -> tuple[float, ...]:
        """The labels' values in gold's units."""
        return self.in_gold_units(self.one_scale().values)

    def in_gold_units(self, scores: Sequence[float]) -> tuple[float, ...]:
        """Scores on the label scale, between two labels too, in gold's units."""
        if self.gold_range is None:
            return tuple(scores)
        low, high = self.gold_range
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"`data.task.gold_range` must rise, got [{low}, {high}].")
        values = self.one_scale().values
        share = (high - low) / (values[-1] - values[0])
        return tuple(low + share * (score - values[0]) for score in scores)


class Item(NamedTuple):
    """One thing to judge; `gold` is None where nobody scored it."""

    id: str
    group: str
    split: str
    gold: float | None
    leak: bool
    fields: dict[str, str]
    where: str
    rubric: Rubric | None = None
    """Its own, where the task's rubric is a column."""


class Template:
    """A task's Jinja template: blocks `instruction`, `item`, and optionally `question`, `cue`.

    The user turn is instruction + examples + item + question; `cue` begins the judge's answer.
    Where the task has the judge reason, `reasoning` stands in place of `question`, and `cue` after
    what the judge then writes.

    Args:
        task: whose template it is.
        examples: scored items, shown before every other item.
        scale: the one of the task's scales that it states; by default the first.
        order: places in the rubric's written order; by default that order itself.
    """

    def __init__(
        self,
        task: Task,
        examples: Sequence[Item] = (),
        *,
        scale: str = "",
        order: Sequence[int] = (),
    ) -> None:
        import jinja2
        from jinja2 import meta
        from jinja2.sandbox import SandboxedEnvironment

        self.scale = scale or task.scales[0]
        task = task.on(self.scale)
        self._scale = Scale.parse(self.scale)
        self._rubric: Rubric | None = None
        self._own_rubrics = isinstance(task.rubric, str)
        if isinstance(task.rubric, dict):
            self._rubric = read_rubric(task.rubric, self._scale.labels, "`data.task.rubric`")
        self._order = tuple(order) or tuple(range(len(self._scale.labels)))
        self.order = "none"
        if task.rubric is not None:
            written = list(self._rubric.levels) if self._rubric else self._scale.labels
            self._shown_labels = [written[place] for place in self._order]
            self.order = " ".join(self._shown_labels)
        shipped = Path(__file__).parent / "prompts" / task.template
        path = Path(task.template).expanduser()
        path = path if path.is_file() else shipped
        if not path.is_file():
            names = ", ".join(sorted(file.name for file in shipped.parent.glob("*.j2")))
            raise ValueError(
                f"no template {task.template!r}. Set `data.task.template` to a Jinja file "
                f"or to one of {names}."
            )
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"template {str(path)!r} is not UTF-8. Convert it.") from None
        environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"template {str(path)!r} line {error.lineno}: {error.message}."
            ) from None
        missing = {"instruction", "item"} - set(self._template.blocks)
        if missing:
            raise ValueError(f"template {str(path)!r} lacks the block {sorted(missing)[0]!r}.")
        known = set(task.fields) | {"low", "high", "labels", "gold", "rubric", "criterion"}
        named = meta.find_undeclared_variables(environment.parse(text))
        criterion = f"\0{task.gold}" if "gold" in named else ""
        if isinstance(task.rubric, dict):
            criterion += f"\0{json.dumps(task.rubric)}"
        self.hash = hashlib.sha256((text + criterion).encode()).hexdigest()[:16]
        unknown = named - known
        if unknown:
            raise ValueError(
                f"template {str(path)!r} names the field {sorted(unknown)[0]!r}, which "
                f"`data.task.fields` lacks. It has {', '.join(task.fields)}."
            )
        unused = [name for name in task.fields if name not in named]
        if unused:
            raise ValueError(
                f"`data.task.fields` has the field {unused[0]!r}, which template {str(path)!r} "
                "never shows. Take it out, or name it in the block `item`."
            )
        shows = "rubric" in named - set(task.fields)
        if shows != (task.rubric is not None):
            raise ValueError(
                f"template {str(path)!r} shows {'a' if shows else 'no'} `rubric`, and "
                f"`data.task.rubric` {'is not set' if task.rubric is None else 'is'}. Let both "
                "have one, or neither."
            )
        self._path, self._gold = path, task.gold
        self._labels = tuple((label,) for label in self._scale.labels)
        self._empty = dict.fromkeys(task.fields, "")
        self._question = "question"
        self.instruction = self._render("instruction", {})
        self._before = self.instruction + "".join(self._example(item, task) for item in examples)
        if task.reasoning:
            self._question = "reasoning"
            lacking = [name for name in ("reasoning", "cue") if name not in self._template.blocks]
            if lacking:
                raise ValueError(
                    f"template {str(path)!r} lacks the block {lacking[0]!r}, which a judge that "
                    "reasons needs. Add it as in `sts_reasoning.j2`, or set `data.task.reasoning` "
                    "to 0."
                )
        shown = self._before[len(self.instruction) :]
        if shown or task.reasoning:  # as text alone, templates keep the hash of earlier versions
            asked = f"{self.hash}\0{shown}\0{task.reasoning}"
            self.hash = hashlib.sha256(asked.encode()).hexdigest()[:16]

    def _render(self, block: str, fields: dict[str, str], rubric: Rubric | None = None) -> str:
        import jinja2

        if block not in self._template.blocks:
            return ""
        scale = self._scale
        context = self._template.new_context(
            {
                **fields,
                "low": scale.low,
                "high": scale.high,
                "labels": scale.labels,
                "gold": self._gold,
                **self._in_order(rubric or self._rubric),
            }
        )
        try:
            return "".join(self._template.blocks[block](context))
        except jinja2.UndefinedError as error:
            if any(f"'{name}' is undefined" == error.message for name in self._empty):
                advice = "Use the data's fields in the block `item` only."
            else:
                advice = f"The criterion is {self._gold!r} (`data.task.gold`)."
            raise ValueError(
                f"block {block!r} of template {str(self._path)!r} can't be written: "
                f"{error.message}. {advice}"
            ) from None
        except jinja2.exceptions.SecurityError as error:
            raise ValueError(f"template {str(self._path)!r} is not allowed: {error}.") from None
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"block {block!r} of template {str(self._path)!r}: {error}.") from None

    def _in_order(self, rubric: Rubric | None) -> dict[str, Any]:
        """What a template sees of a rubric."""
        if rubric is None:
            return {}
        texts = [{"label": label, "text": rubric.levels[label]} for label in self._shown_labels]
        return {"rubric": texts, "criterion": rubric.criterion}

    def prompt(self, item: Item) -> Prompt:
        """The question about one item."""
        shown = self._render("item", item.fields, item.rubric)
        return self._prompt(shown, item.where, item.rubric)

    def _prompt(self, item: str, where: str, rubric: Rubric | None = None) -> Prompt:
        after, cue = self._render(self._question, {}, rubric), self._render("cue", {}, rubric)
        return Prompt(self._before, item, after, cue, self._labels, where)

    def _example(self, item: Item, task: Task) -> str:
        """An item with its question and the label nearest to gold, the lower of two."""
        assert item.gold is not None
        away = [abs(value - item.gold) for value in task.values()]
        label = self._scale.labels[away.index(min(away))]
        shown = self._render("item", item.fields, item.rubric)
        return f"{shown}{self._render('question', {}, item.rubric)} {label}\n\n"

    def invention(self) -> str:
        """The user turn that asks the judge to invent an item."""
        form = self._render("item", dict.fromkeys(self._empty, "..."))
        return (
            f"{self.instruction}Here, invent one example of what is to be rated, with words of "
            "your own in place of each '...'. Write only the example, in exactly this form:"
            f"\n\n{form}"
        )

    def invented(self, text: str, key: str) -> Prompt:
        """The question about an item that the judge has invented."""
        return self._prompt(text, f"invented input {key}")

    def content_free(self, text: str) -> Prompt:
        """The question about an item whose fields all hold the same empty words."""
        fields = dict.fromkeys(self._empty, text)
        where = f"content-free input {text!r}"
        own = Rubric(dict.fromkeys(self._scale.labels, text), text) if self._own_rubrics else None
        return self.prompt(Item("", "", "", None, False, fields, where, own))

    def random_numbers(self) -> list[str]:
        """100 ways to ask for a random number on this scale (paper 1, fig. 2)."""
        lines = (Path(__file__).parent / "prompts" / "random_number.txt").read_text("utf-8")
        low, high = self._scale.low, self._scale.high
        return [
            line.replace("{{ low }}", low).replace("{{ high }}", high)
            for line in lines.splitlines()
        ]

    def random_number(self, text: str, *, with_task: bool) -> Prompt:
        """A random-number prompt alone (Deb-R) or under the task's instruction (Deb-T)."""
        before = self.instruction if with_task else ""
        return Prompt(before + text, "", "", "", self._labels, "a random-number prompt")


def templates(task: Task, examples: Sequence[Item] = ()) -> list[Template]:
    """The task's template on each of its scales, its rubric in each of its orders."""
    found = []
    for scale in task.scales:
        levels = len(Scale.parse(scale).labels)
        orders = rubric_orders(levels, task.orders) if task.rubric is not None else [()]
        found += [Template(task, examples, scale=scale, order=order) for order in orders]
    return found


def load_items(
    task: Task, path: str = "", *, missing_gold: str = "drop", roles: Iterable[str] = ROLES
) -> list[Item]:
    """All dev and test items, from a file or folder or, without one, from the task's source.

    Raises:
        ValueError: the data can't be read, or a row breaks one of the task's rules.
    """
    items: list[Item] = []
    roles = [role for role in roles if role in task.splits]
    for role, file, records in _split_records(task, path, roles):
        items += _items(task, role, file, records, missing_gold)
    _refuse_duplicates(items)
    for role in roles:
        if not any(item.split == role for item in items):
            raise ValueError(
                f"no row of {path or task.source!r} belongs to the split {role!r}. "
                "Set `data.task.splits`."
            )
    return _with_leaks(items)


def load_new_items(task: Task, path: str) -> list[Item]:
    """Items to predict: no gold score, no split."""
    items = _items(task, "new", path, list(enumerate(read_records(Path(path)), 1)), "drop")
    _refuse_duplicates(items)
    return items


def _split_records(
    task: Task, path: str, roles: list[str]
) -> Iterable[tuple[str, str, list[tuple[int, Record]]]]:
    place = Path(path).expanduser() if path else resources.find("configs", task.source)
    if place is None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", task.source):
            raise ValueError(
                f"no file {task.source!r}, and it is no hub id. Set `data.task.source`, "
                "or name a file or folder with `--data.path`."
            )
        for role in roles:
            yield role, task.source, list(enumerate(_hub_records(task, task.splits[role]), 1))
    elif place.is_dir():
        for role in roles:
            names = {task.splits.get(role, role), role}
            files = sorted(f for f in place.iterdir() if f.stem in names and f.is_file())
            if len(files) != 1:
                raise ValueError(
                    f"{str(place)!r} holds {len(files)} files for the split {role!r}; one of "
                    f"{' or '.join(sorted(names))}.jsonl, .csv or .parquet is needed."
                )
            yield role, str(files[0]), list(enumerate(read_records(files[0]), 1))
    else:
        rows = list(enumerate(read_records(place), 1))
        if "split" not in rows[0][1] and len(task.splits) == 1:  # one split: everything
            yield from ((role, str(place), rows) for role in roles)
            return
        if "split" not in rows[0][1]:
            raise ValueError(
                f"{str(place)!r} has no column 'split' that says dev or test. Add it, or name a "
                "folder with one file a split."
            )
        for role in roles:
            split_names = {task.splits.get(role, role), role}
            yield role, str(place), [row for row in rows if str(row[1].get("split")) in split_names]


def _hub_records(task: Task, split: str) -> Sequence[Record]:
    import datasets

    try:
        return datasets.load_dataset(
            task.source, task.config, split=split, revision=task.revision
        ).to_list()
    except Exception as error:  # the hub client raises many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(
            f"can't load split {split!r} of {task.source!r} from the hub: {reason} "
            "Name a local copy with `--data.path`."
        ) from error


def _items(
    task: Task, role: str, file: str, records: list[tuple[int, Record]], missing_gold: str
) -> list[Item]:
    values = task.on(task.scales[0]).values()  # of all scales, ends are those of gold
    labels = Scale.parse(task.scales[0]).labels
    items = []
    hashed = task.group in task.fields.values()  # a store holds no text
    own_rubric = task.rubric if isinstance(task.rubric, str) else None
    for where, key, unit, record in _units(task, role, file, records):
        columns = {*task.fields.values(), *filter(None, (own_rubric,))}
        if role != "new":  # new items are not divided
            columns |= {task.gold, *filter(None, (task.group,))}
        for column in sorted(columns - set(record)):
            raise ValueError(
                f"{where} has no column {column!r}; it has {', '.join(map(str, record))}. "
                "Set `data.task.fields`, `gold`, `group` or `rubric`."
            )
        fields = {}
        for name, column in task.fields.items():
            if record[column] is None:
                raise ValueError(f"{where} has no text in column {column!r}.")
            fields[name] = str(record[column])
        gold = None
        if role != "new":
            gold = read_gold(record[task.gold], task, values, where, missing_gold)
        group = cell_or(record.get(task.group), unit) if task.group else unit
        if hashed:
            group = hashlib.sha256(group.encode()).hexdigest()[:16]
        for text in (key, group, *fields.values()):
            if not text.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in text):
                raise ValueError(f"{where} holds half of a surrogate pair, which is no text.")
        rubric = read_rubric(record[own_rubric], labels, where) if own_rubric else None
        items.append(Item(key, group, role, gold, False, fields, where, rubric))
    return items


def _units(
    task: Task, role: str, file: str, records: list[tuple[int, Record]]
) -> Iterable[tuple[str, str, str, Record]]:
    """Place, id, row's id and cells of each item; a row with lists is several items."""
    for number, record in records:
        where = f"{file} row {number}"
        unit = cell_or(record.get("id"), f"{role}-{number - 1}")
        if not task.explode:
            yield where, unit, unit, record
            continue
        lists: dict[str, Any] = {column: record.get(column) for column in task.explode}
        for column, cell in lists.items():
            if not isinstance(cell, list):
                raise ValueError(
                    f"{where} has no list in column {column!r}. Set `data.task.explode` to the "
                    "columns that hold one entry an item, or to []."
                )
        lengths = {column: len(cell) for column, cell in lists.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{where}: the lists to explode have the lengths {lengths}.")
        for index in range(min(lengths.values())):
            entry = {column: cell[index] for column, cell in lists.items()}
            yield f"{where} entry {index + 1}", f"{unit}-{index}", unit, {**record, **entry}


def cell_or(cell: Any, default: str) -> str:
    """A cell as text, or the default where it is absent."""
    return default if cell is None or cell == "" else str(cell)


def read_gold(
    cell: Any, task: Task, values: tuple[float, ...], where: str, missing_gold: str
) -> float | None:
    """A gold score in the task's units; None where there is none and that is allowed.

    Raises:
        ValueError: it is no number, outside the range, or missing though it must not be.
    """
    try:
        gold = math.nan if cell is None or cell == "" else float(cell) * task.gold_factor
        if isinstance(cell, bool):
            raise TypeError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where}: the gold score {cell!r} is not a number.") from None
    if math.isnan(gold):
        if missing_gold == "error":
            raise ValueError(
                f"{where} has no gold score in column {task.gold!r}. "
                "Add it, or set `--data.missing_gold drop`."
            )
        return None
    low, high = values[0], values[-1]
    if not low - 1e-9 <= gold <= high + 1e-9:
        raise ValueError(
            f"gold scores must lie on the scale {low:g}..{high:g}, got {cell!r} in {where}. "
            "Set `data.task.gold_range` or `gold_factor` if the file uses another range."
        )
    return min(max(gold, low), high)


def _refuse_duplicates(items: list[Item]) -> None:
    seen: dict[str, str] = {}
    for item in items:
        if item.id in seen:
            raise ValueError(
                f"the id {item.id!r} stands twice: {seen[item.id]} and {item.where}. "
                "Make ids unique."
            )
        seen[item.id] = item.where


def _with_leaks(items: list[Item]) -> list[Item]:
    """Flag items whose texts, in any order, stand in more than one split."""

    def key(item: Item) -> tuple[str, ...]:
        return tuple(sorted(" ".join(text.split()).casefold() for text in item.fields.values()))

    splits: dict[tuple[str, ...], set[str]] = {}
    for item in items:
        splits.setdefault(key(item), set()).add(item.split)
    return [item._replace(leak=len(splits[key(item)]) > 1) for item in items]
