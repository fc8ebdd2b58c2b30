"""What a judge writes before it judges: inputs of its own invention, and reasoning."""

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from scorecal.judging.judge import Judge, Unsupported
from scorecal.judging.plan import Plan, Question
from scorecal.judging.store import Store
from scorecal.judging.task import Template
from scorecal.progress import bar, notice

SEED = 0
# Enough for a pair of sentences or a paragraph. Longer inventions, which end here, would cost more
# than they tell: the marginal of hundreds of them is wanted, no single one.
SAMPLE_TOKENS = 256
_BATCH = 64  # texts; what an interruption loses at most


class Writing(NamedTuple):
    """How much is written before a task is judged; false where nothing is."""

    samples: int
    """Inputs that the judge invents."""
    reasoning: int
    """Most tokens of reasoning on each item; 0 for none."""

    def __bool__(self) -> bool:
        return bool(self.samples or self.reasoning)

    def entry(self) -> dict[str, int]:
        """How the manifest describes it."""
        sampling = {"sample_tokens": SAMPLE_TOKENS, "seed": SEED} if self.samples else {}
        return {**self._asdict(), **sampling}

    def named(self, plan: Plan) -> Plan:
        """The plan of the questions known before anything is written, which names the store."""
        content = json.dumps([plan.digest, self.entry()])
        return plan._replace(digest=hashlib.sha256(content.encode()).hexdigest())

    def counts(self, questions: Sequence[Question]) -> dict[str, int]:
        """How many texts are written: inputs, and reasoning on these and on all items."""
        ways = len({(asked.scale, asked.order) for asked in questions if _reasons(asked)})
        reasoned = sum(map(_reasons, questions)) + self.samples * ways if self.reasoning else 0
        return {"samples": self.samples, "reasoning": reasoned}

    def announcement(self, questions: Sequence[Question]) -> str:
        """One line on what will be written."""
        counts = self.counts(questions)
        parts = [
            f"{counts[name]} {what} of up to {tokens} tokens"
            for name, what, tokens in (
                ("samples", "invented inputs", SAMPLE_TOKENS),
                ("reasoning", "texts of reasoning", self.reasoning),
            )
            if counts[name]
        ]
        return f"{' and '.join(parts)} to write first"


def _reasons(question: Question) -> bool:
    return not question.kind.startswith("random")  # a random number has no reasons


def with_texts(
    judge: Judge,
    templates: Sequence[Template],
    questions: Sequence[Question],
    writing: Writing,
    store: Store,
) -> list[Question]:
    """All questions as they are judged, after the judge has written what they need.

    Texts that are in the store already are taken from there.

    Raises:
        ValueError: the judge doesn't generate text.
    """
    notice(writing.announcement(questions))
    asked = list(questions)
    sampled = _write(
        judge,
        store,
        "invented",
        [templates[0].invention()] * writing.samples,
        max_tokens=SAMPLE_TOKENS,
        temperature=1.0,
    )
    for number, text in enumerate(sampled):
        key = f"{number:03d}"
        asked += [
            Question(
                "sampled",
                key,
                template.invented(text, key),
                template.scale,
                template.order,
                text,
            )
            for template in templates
        ]
    if not writing.reasoning:
        return asked
    places = [at for at, question in enumerate(asked) if _reasons(question)]
    prompts = [asked[at].prompt for at in places]
    reasons = _write(
        judge,
        store,
        "reasoning",
        [prompt.before + prompt.item + prompt.after for prompt in prompts],
        max_tokens=writing.reasoning,
        temperature=0.0,
    )
    for at, prompt, reason in zip(places, prompts, reasons, strict=True):
        text = "\n\n".join(filter(None, (asked[at].text, reason)))
        prompt = prompt._replace(cue=reason + prompt.cue)
        asked[at] = asked[at]._replace(prompt=prompt, text=text)
    return asked


def _write(judge: Judge, store: Store, stage: str, prompts: list[str], **options: Any) -> list[str]:
    """An answer to each prompt, batch by batch, each on disk before the next is begun."""
    texts: list[str] = []
    if not prompts:
        return texts
    started, written = time.monotonic(), 0
    with bar() as progress:
        shown = progress.add_task("writing", total=len(prompts), done="", rate="")
        for number, start in enumerate(range(0, len(prompts), _BATCH)):
            batch = prompts[start : start + _BATCH]
            answers = store.texts(stage, number)
            if answers is None:
                try:
                    answers = judge.generate(batch, seed=SEED + start, **options)
                except Unsupported as reason:
                    raise ValueError(
                        f"judge {judge.model!r} can't write text: {reason} Set `--data.samples` "
                        "and `--data.task.reasoning` to 0, or name another judge."
                    ) from None
                store.write_texts(stage, number, answers)
                written += len(batch)
            texts += answers
            progress.update(
                shown,
                completed=len(texts),
                done=f"{len(texts)}/{len(prompts)} {stage}",
                rate=f"{written / (time.monotonic() - started):.1f} texts/s",
            )
    if written:
        seconds = time.monotonic() - started
        notice(f"wrote {written} {stage} texts in {seconds:.0f} s")
    return texts
