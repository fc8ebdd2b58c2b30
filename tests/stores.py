"""Stores made up for tests of commands: a judge's numbers without a judge."""

import json
from pathlib import Path

import torch
import yaml
from torch import Tensor

from scorecal.judging.plan import Question, item_questions, prior_questions, scale_entries
from scorecal.judging.store import Store
from scorecal.judging.task import Item, Task, templates
from scorecal.scale import Scale

FIELDS = {"sentence1": "sentence1", "sentence2": "sentence2"}


def ranges_task(**changes: object) -> Task:
    """Pairs of sentences on two scales."""
    settings = {"scale": ["0-5", "2-7"], "gold_range": (0.0, 5.0), **changes}
    return Task("pairs", "sts_ranges.j2", FIELDS, **settings)  # type: ignore[arg-type]


def make_items(count: int = 60, *, a_group: int = 1, dev: int = 25) -> list[Item]:
    """Items with gold scores; `a_group` of them are one document."""
    generator = torch.Generator().manual_seed(5)
    gold = (torch.rand(count, generator=generator) * 20).round() / 4
    return [
        Item(
            f"i{at}", f"g{at // a_group}", "dev" if at < dev else "test", gold[at].item(), False,
            dict.fromkeys(FIELDS, f"text {at}"), "",
        )
        for at in range(count)
    ]  # fmt: skip


def make_store(
    folder: Path,
    task: Task,
    items: list[Item],
    judge: str,
    *,
    seed: int,
    shift: float = 0.0,
    first: float = 0.0,
) -> Path:
    """A finished store of a judge that follows gold, with noise and a taste for some label.

    Args:
        folder: of the store.
        task: on all of whose scales it is.
        items: what is judged.
        judge: its name.
        seed: of its noise.
        shift: how much its taste counts.
        first: how much it likes what stands first in a rubric.
    """
    asked = templates(task)
    questions = item_questions(asked, items) + prior_questions(asked)
    gold = {item.id: item.gold for item in items}
    generator = torch.Generator().manual_seed(seed)

    def row(question: Question) -> dict[str, object]:
        levels = len(Scale.parse(question.scale).labels)
        values = torch.tensor(task.on(question.scale).values())
        logits = 0.5 * torch.randn(levels, generator=generator)
        logits[2] += shift
        if question.order != "none":
            shown = Scale.parse(question.scale).labels
            logits[shown.index(question.order.split()[0])] += first
        if question.kind == "item":
            seen = gold[question.key] + torch.randn(1, generator=generator)
            logits = logits - 0.4 * (values - seen) ** 2
        logprobs: Tensor = logits.log_softmax(-1) - 0.1
        return {
            "kind": question.kind, "key": question.key, "scale": question.scale,
            "order": question.order, "logprobs": logprobs.tolist(), "censored": [False] * levels,
            "label_mass": 0.9, "logsumexp": 20.0, "perplexity": 3.0 + len(question.key),
            "tokens": 9, "prompt": "0", "text": None,
        }  # fmt: skip

    store = Store(folder)
    store.begin({"identity": {}, "digest": "", "chunks": []})
    store.write_part(0, [row(question) for question in questions], [])
    entries = scale_entries(task, asked)
    labels = {scale: {label: [[at]] for at, label in enumerate(entry["labels"])}
              for scale, entry in entries.items()}  # fmt: skip
    identity = {
        "judge": judge, "revision": str(seed), "template": asked[0].hash,
        "scale": ", ".join(entries),
        "labels": json.dumps(labels if len(labels) > 1 else next(iter(labels.values()))),
    }  # fmt: skip
    manifest = {
        "task": task.name, "identity": identity, "digest": judge, "engine": {}, "scales": entries,
    }  # fmt: skip
    store.finish(1, range(len(questions)), [], items, manifest)
    return folder


def write_config(path: Path, task: Task, table: Path, **data: object) -> Path:
    """A config of a task that reads a store."""
    described = {
        "name": task.name, "source": "none.jsonl", "template": task.template,
        "fields": task.fields, "scale": task.scale, "gold_range": list(task.gold_range or ()),
        "splits": task.splits, "rubric": task.rubric, "orders": task.orders,
    }  # fmt: skip
    if task.gold_range is None:
        described.pop("gold_range")
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "runs", "name": task.name},
    }
    content = {
        "data": {"table": str(table), "task": described, **data},
        "trainer": {"max_epochs": 50, "accelerator": "cpu", "devices": 1, "logger": logger},
    }
    path.write_text(yaml.safe_dump(content))
    return path
