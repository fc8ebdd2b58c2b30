"""The whole job of an elicitation, fixed before its first forward pass."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from scorecal.judging.judge import Chunk, Encoded, Judge, Prompt
from scorecal.judging.task import CONTENT_FREE, Item, Task, Template
from scorecal.judging.trie import trie_tokens
from scorecal.scale import Scale


class Question(NamedTuple):
    """A prompt and what it is asked for."""

    kind: str
    key: str
    prompt: Prompt
    scale: str
    order: str = "none"
    """The rubric's labels as they are shown; `none` without a rubric."""
    text: str | None = None
    """What the judge has written for it."""


class Plan(NamedTuple):
    """Questions in the store's order, their tokens, and the chunks they are judged in."""

    questions: list[Question]
    encoded: list[Encoded]
    chunks: list[Chunk]
    identity: dict[str, str]
    digest: str
    """Hash of who is asked what: another order or batch size is the same plan."""

    def summary(self) -> dict[str, Any]:
        """What `plan.json` holds: enough to know the same plan again."""
        chunks = [chunk._asdict() for chunk in self.chunks]
        return {"digest": self.digest, "identity": self.identity, "chunks": chunks}

    def weight(self, number: int) -> int:
        """Tokens of a chunk: what the judge computes, or all where the engine doesn't say."""
        chunk = self.chunks[number]
        return chunk.tokens or sum(
            len(self.encoded[index].input_ids) or 1 for index in chunk.prompts
        )


def prompt_hash(encoded: Encoded) -> str:
    """What a store keeps of a prompt, instead of its text."""
    text = json.dumps(encoded.text or list(encoded.input_ids))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def counts_of(encoded: Sequence[Encoded], chunks: Sequence[Chunk]) -> dict[str, int]:
    """Prompts and their tokens: all, those of their trie, and those that the judge will compute.

    The last is known of an engine of ours; others share on their own and don't say in advance.
    """
    rows = [row.input_ids for row in encoded]
    counts = {"prompts": len(rows), "prompt_tokens": sum(map(len, rows))}
    if counts["prompt_tokens"]:
        counts["trie_tokens"] = trie_tokens(rows)
    if computed := sum(chunk.tokens for chunk in chunks):
        counts["tokens_computed"] = computed
    return counts


def item_questions(templates: Sequence[Template], items: Sequence[Item]) -> list[Question]:
    """One question an item on each scale and in each order."""
    return [
        Question("item", item.id, template.prompt(item), template.scale, template.order)
        for template in templates
        for item in items
    ]


def prior_questions(templates: Sequence[Template]) -> list[Question]:
    """Random-number prompts alone and under the instruction, and content-free inputs.

    Nothing but content-free inputs comes with a rubric: all else is asked once a scale.
    """
    of_scale = {template.scale: template for template in reversed(templates)}
    questions = [
        Question(
            "random_task" if with_task else "random",
            f"{number:03d}",
            template.random_number(text, with_task=with_task),
            template.scale,
        )
        for template in reversed(of_scale.values())
        for with_task in (False, True)
        for number, text in enumerate(template.random_numbers())
    ]
    content_free = [
        Question("content_free", text, template.content_free(text), template.scale, template.order)
        for template in templates
        for text in CONTENT_FREE
    ]
    return questions + content_free


def make_plan(
    judge: Judge, templates: Sequence[Template], questions: list[Question], *, truncate: bool
) -> Plan:
    """Tokenise every question and split the job into chunks."""
    prompts = [question.prompt for question in questions]
    encoded = judge.encode(prompts, truncate=truncate)
    ids = label_ids(judge, questions)
    identity = {
        **judge.identity(),
        "template": ", ".join(dict.fromkeys(template.hash for template in templates)),
        "scale": ", ".join(dict.fromkeys(template.scale for template in templates)),
        "labels": json.dumps(next(iter(ids.values())) if len(ids) == 1 else ids),
    }
    # The bytes of json.dumps([identity, lines]), which would be a copy of the whole job.
    digest = hashlib.sha256(f"[{json.dumps(identity)}, [".encode())
    for at, (question, row) in enumerate(zip(questions, encoded, strict=True)):
        line = [question.kind, question.key, row.text or list(row.input_ids)]
        digest.update(f"{', ' if at else ''}{json.dumps(line)}".encode())
    digest.update(b"]]")
    return Plan(questions, encoded, judge.plan(prompts, encoded), identity, digest.hexdigest())


def label_ids(judge: Judge, questions: Sequence[Question]) -> dict[str, dict[str, list[list[int]]]]:
    """Token ids of each scale's labels, after the first question on it."""
    first = {question.scale: question.prompt for question in reversed(questions)}
    return {
        scale: dict(
            zip([forms[0] for forms in prompt.labels], judge.label_ids(prompt), strict=True)
        )
        for scale, prompt in reversed(first.items())
    }


def scale_entries(task: Task, templates: Sequence[Template]) -> dict[str, dict[str, Any]]:
    """How the manifest describes each scale."""
    entries: dict[str, dict[str, Any]] = {}
    for template in templates:
        entry = {
            **({"examples": task.examples} if task.examples else {}),
            "labels": list(Scale.parse(template.scale).labels),
            "values": list(task.on(template.scale).values()),
            "template": template.hash,
            "orders": [],
        }
        entries.setdefault(template.scale, entry)["orders"].append(template.order)
    return entries
