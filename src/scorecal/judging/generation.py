"""What a judge writes: inputs of its own invention, reasoning, and answers of its own."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from scorecal.judging.contrast import Contrasted
from scorecal.judging.judge import Encoded, Judge, Unsupported
from scorecal.judging.plan import Plan, Question, prompt_hash
from scorecal.judging.records import Record
from scorecal.judging.store import Store
from scorecal.judging.task import Task, Template
from scorecal.progress import bar, notice

SEED = 0
# Enough for a pair of sentences or a paragraph. Longer inventions, which end here, would cost more
# than they tell: the marginal of hundreds of them is wanted, no single one.
SAMPLE_TOKENS = 256
# An answer is a score and a few words: "I'd give it a 3 out of 5".
ANSWER_TOKENS = 16
_BATCH = 64  # texts; what an interruption loses at most
Asked = TypeVar("Asked")


class Writing(NamedTuple):
    """What is written beside the judgements of a task; false where nothing is."""

    samples: int
    """Inputs that the judge invents."""
    reasoning: int
    """Most tokens of reasoning on each item; 0 for none."""
    answers: bool = False
    """Whether the judge answers every item in its own words."""
    contrasted: Contrasted | None = None
    """What its answers are contrasted with, once more."""

    @classmethod
    def of(cls, task: Task, samples: int, contrasted: Contrasted | None = None) -> "Writing":
        """What a task asks for.

        Raises:
            ValueError: inputs are to be invented, and the rubric of one is in a column.
        """
        if samples and isinstance(task.rubric, str):
            raise ValueError(
                f"inputs that a judge invents have no rubric, and this task reads each item's own "
                f"from {task.rubric!r}. Leave out `data.samples`."
            )
        return cls(samples, task.reasoning, task.mode == "generate", contrasted)

    @property
    def precedes(self) -> bool:
        """Whether what is judged depends on it."""
        return bool(self.samples or self.reasoning)

    def __bool__(self) -> bool:
        return self.precedes or self.answers or self.contrasted is not None

    def entry(self) -> dict[str, Any]:
        """What the manifest says of it."""
        own: dict[str, int] = {"samples": self.samples, "reasoning": self.reasoning}
        if self.samples:
            own |= {"sample_tokens": SAMPLE_TOKENS, "seed": SEED}
        if self.answers:
            own["answer_tokens"] = ANSWER_TOKENS
        if self.contrasted is None:
            return {"generated": own}
        contrasted = {**self.contrasted.entry(), "answer_tokens": ANSWER_TOKENS}
        return {"generated": own, "contrasted": contrasted}

    def named(self, plan: Plan) -> Plan:
        """The plan of the questions known before anything is written, which names the store."""
        content = json.dumps([plan.digest, *self.entry().values()])
        return plan._replace(digest=hashlib.sha256(content.encode()).hexdigest())

    def counts(self, questions: Sequence[Question]) -> dict[str, int]:
        """How many texts are written: inputs, reasoning on these and on all items, answers."""
        ways = len({(asked.scale, asked.order) for asked in questions if _reasons(asked)})
        reasoned = sum(map(_reasons, questions)) + self.samples * ways if self.reasoning else 0
        counts = {"samples": self.samples, "reasoning": reasoned}
        if kinds := self.answers + (self.contrasted is not None):
            counts["answers"] = kinds * sum(map(_is_answered, questions))
        return counts

    def announcement(self, questions: Sequence[Question]) -> str:
        """One line on what will be written."""
        counts = self.counts(questions)
        parts = [
            f"{counts[name]} {what} of up to {tokens} tokens"
            for name, what, tokens in (
                ("samples", "invented inputs", SAMPLE_TOKENS),
                ("reasoning", "texts of reasoning", self.reasoning),
                ("answers", "answers", ANSWER_TOKENS),
            )
            if counts.get(name)
        ]
        return f"{' and '.join(parts)} to write first"


def _is_answered(question: Question) -> bool:
    return question.kind == "item"


def _reasons(question: Question) -> bool:
    return not question.kind.startswith("random")  # a random number has no reasons


def with_texts(
    judge: Judge,
    templates: Sequence[Template],
    questions: Sequence[Question],
    writing: Writing,
    store: Store,
) -> list[Question]:
    """All questions as they are judged, after the judge has written what these need.

    Texts that are in the store already are taken from there.

    Raises:
        ValueError: the judge doesn't generate text.
    """
    asked = list(questions)
    sampled = _write(
        judge,
        store,
        "invented",
        [templates[0].invention()] * writing.samples,
        lambda batch, start: judge.generate(
            batch, max_tokens=SAMPLE_TOKENS, temperature=1.0, seed=SEED + start
        ),
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
        lambda batch, start: judge.generate(
            batch, max_tokens=writing.reasoning, temperature=0.0, seed=SEED + start
        ),
    )
    for at, prompt, reason in zip(places, prompts, reasons, strict=True):
        text = "\n\n".join(filter(None, (asked[at].text, reason)))
        prompt = prompt._replace(cue=reason + prompt.cue)
        asked[at] = asked[at]._replace(prompt=prompt, text=text)
    return asked


def answer_rows(judge: Judge, plan: Plan, writing: Writing, store: Store) -> list[Record]:
    """A store's rows of the answers that a judge gives to each item in its own words.

    Raises:
        ValueError: the judge doesn't generate text.
    """
    asked = [
        (question, row)
        for question, row in zip(plan.questions, plan.encoded, strict=True)
        if _is_answered(question)
    ]
    ways: dict[str, Callable[[list[Encoded], int], list[str]]] = {}
    if writing.answers:
        ways["generated"] = lambda batch, _: judge.answer(batch, max_tokens=ANSWER_TOKENS)
    if (contrasted := writing.contrasted) is not None:
        ways["contrasted"] = lambda batch, _: contrasted.answer(
            judge, batch, max_tokens=ANSWER_TOKENS
        )
    rows: list[Record] = []
    for kind, write in ways.items():
        texts = _write(judge, store, kind, [row for _, row in asked], write)
        rows += [
            {
                "kind": kind,
                "key": question.key,
                "scale": question.scale,
                "order": question.order,
                "logprobs": [],
                "censored": [],
                "label_mass": math.nan,
                "logsumexp": math.nan,
                "perplexity": None,
                "tokens": len(row.input_ids),
                "prompt": prompt_hash(row),
                "text": text,
            }
            for (question, row), text in zip(asked, texts, strict=True)
        ]
    return rows


def _write(
    judge: Judge,
    store: Store,
    stage: str,
    prompts: list[Asked],
    write: Callable[[list[Asked], int], list[str]],
) -> list[str]:
    """A text for each prompt, batch by batch, each on disk before the next is begun."""
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
                    answers = write(batch, start)
                except Unsupported as reason:
                    raise ValueError(
                        f"judge {judge.model!r} can't write text: {reason} Set `--data.samples` "
                        "and `--data.task.reasoning` to 0 and `--data.task.mode` to labels, or "
                        "name another judge."
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
