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


def item_questions(template: Template, items: Sequence[Item]) -> list[Question]:
    """One question an item."""
    return [Question("item", item.id, template.prompt(item)) for item in items]


def prior_questions(template: Template) -> list[Question]:
    """Random-number prompts alone and under the instruction, and content-free inputs."""
    texts = template.random_numbers()
    questions = [
        Question(
            "random_task" if with_task else "random",
            f"{number:03d}",
            template.random_number(text, with_task=with_task),
        )
        for with_task in (False, True)
        for number, text in enumerate(texts)
    ]
    content_free = [
        Question("content_free", text, template.content_free(text)) for text in CONTENT_FREE
    ]
    return questions + content_free


def make_plan(
    judge: Judge, task: Task, template: Template, questions: list[Question], *, truncate: bool
) -> Plan:
    """Tokenise every question and split the job into chunks."""
    prompts = [question.prompt for question in questions]
    encoded = judge.encode(prompts, truncate=truncate)
    identity = {
        **judge.identity(),
        "template": template.hash,
        "scale": task.scale,
        "labels": json.dumps(label_ids(judge, template, questions)),
    }
    # The bytes of json.dumps([identity, lines]), which would be a copy of the whole job.
    digest = hashlib.sha256(f"[{json.dumps(identity)}, [".encode())
    for at, (question, row) in enumerate(zip(questions, encoded, strict=True)):
        line = [question.kind, question.key, row.text or list(row.input_ids)]
        digest.update(f"{', ' if at else ''}{json.dumps(line)}".encode())
    digest.update(b"]]")
    return Plan(questions, encoded, judge.plan(prompts, encoded), identity, digest.hexdigest())


def label_ids(
    judge: Judge, template: Template, questions: list[Question]
) -> dict[str, list[list[int]]]:
    """Token ids of each label after the first question."""
    levels = judge.label_ids(questions[0].prompt)
    labels = [forms[0] for forms in questions[0].prompt.labels]
    return dict(zip(labels, levels, strict=True))


def scale_entry(task: Task, template: Template) -> dict[str, Any]:
    """How the manifest describes a scale."""
    scale = Scale.parse(task.scale)
    return {
        **({"examples": task.examples} if task.examples else {}),
        "labels": list(scale.labels),
        "values": list(task.values()),
        "template": template.hash,
        "orders": [task.orders],
    }
