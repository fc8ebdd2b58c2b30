"""What a judge would be asked, before it is run."""

import json
from collections.abc import Sequence
from typing import Any

from scorecal.judging.contrast import Contrasted
from scorecal.judging.elicit import announcement, expectation
from scorecal.judging.generation import Writing
from scorecal.judging.judge import Judge
from scorecal.judging.plan import Question, counts_of, make_plan
from scorecal.judging.task import Task, Template


def dry_run(judge: Judge, task: Task, templates: Sequence[Template], questions: list[Question],
            *, truncate: bool, samples: int = 0,
            contrasted: Contrasted | None = None) -> dict[str, Any]:  # fmt: skip
    """Every prompt exactly as tokenised, label tokens, counts, and the seconds it would take."""
    if contrasted is not None:
        contrasted.pair_with(judge)
    plan = make_plan(judge, templates, questions, truncate=truncate)
    shown: dict[str, Any] = {
        name: [] for name in ("items", "random", "random_task", "content_free")
    }
    for question, row in zip(plan.questions, plan.encoded, strict=True):
        name = "items" if question.kind == "item" else question.kind
        text = judge.decode(row)
        shown[name].append({"id": question.key, "input_ids": list(row.input_ids), "text": text})
    # Counts are of the items; seconds and cost of the whole job.
    items = [at for at, question in enumerate(questions) if question.kind == "item"]
    encoded = [plan.encoded[at] for at in items]
    chunks = judge.plan([questions[at].prompt for at in items], encoded)
    expected = expectation(judge, plan)
    writing = Writing.of(task, samples, contrasted)
    return {
        **shown,
        "labels": json.loads(plan.identity["labels"]),
        "counts": counts_of(encoded, chunks),
        "seconds": None if "seconds" not in expected else round(expected["seconds"], 1),
        **({"cost": round(expected["cost"], 4)} if "cost" in expected else {}),
        **({"write": writing.counts(questions)} if writing else {}),
        **({"invention": templates[0].invention()} if samples else {}),
    }


def dry_run_text(shown: dict[str, Any]) -> str:
    """Two prompts of each kind, label tokens, counts and seconds, to read."""
    lines = []
    for kind in ("items", "random", "random_task", "content_free"):
        for row in shown[kind][:2]:
            lines += [f"--- {kind} {row['id']} ({len(row['input_ids'])} tokens)", row["text"]]
    lines.append("--- label tokens")
    lines += [f"{label}: {ids}" for label, ids in shown["labels"].items()]
    lines.append(f"--- the items: {announcement(shown['counts'], {})}")
    seconds, cost = shown["seconds"], shown.get("cost")
    estimate = "not known, no rate measured yet" if seconds is None else f"about {seconds:.0f}"
    lines.append(f"--- seconds for the whole job: {estimate}")
    if "invention" in shown:
        lines += ["--- asked for an invented input", shown["invention"]]
    if "write" in shown:
        written = ", ".join(f"{count} {name}" for name, count in shown["write"].items())
        lines.append(f"--- texts that the judge writes first, time not counted: {written}")
    if cost is not None:
        lines.append(f"--- dollars for the whole job: about {cost:.2f}")
    return "\n".join(lines)
