"""Run a judge over a task, once, into a store."""

import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scorecal.judging.judge import Judge, Unsupported
from scorecal.judging.plan import Plan, Question, make_plan, scale_entry
from scorecal.judging.records import replacing
from scorecal.judging.store import Store, file_checksum
from scorecal.judging.task import Item, Task, Template
from scorecal.judging.weights import cache_folder

STORES = Path("stores")


class Interrupted(KeyboardInterrupt):
    """An elicitation was stopped; its text says how to go on."""


def elicit(
    judge: Judge,
    task: Task,
    template: Template,
    items: Sequence[Item],
    questions: list[Question],
    folder: str = "",
    *,
    truncate: bool = False,
) -> Store:
    """Judge all questions into a store, or go on with an unfinished one.

    Args:
        judge: who answers.
        task: what is judged.
        template: the task's template.
        items: the items, for the store's item table.
        questions: all prompts, in the store's order.
        folder: where; by default `stores/<task>-<judge>-<hash of identity and prompts>`.
        truncate: cut items that are longer than the judge's context.

    Raises:
        ValueError: the folder holds another judge's or another data set's judgements.
        Interrupted: on Ctrl-C; finished chunks stay on disk.
    """
    plan = make_plan(judge, task, template, questions, truncate=truncate)
    store = Store(Path(folder) if folder else default_folder(task, plan))
    if store.is_complete:
        _refresh(store, plan, items)
        return store
    with _alone(store.folder):
        return _fill(judge, task, template, plan, store, items, truncate)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuse a second process on the same store; a killed one leaves no claim."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock", timeout=0)
    try:
        with lock:
            yield
    except Timeout:
        raise ValueError(
            f"another process is filling {str(folder)!r}. Wait for it, or set `--data.store`."
        ) from None
    Path(lock.lock_file).unlink(missing_ok=True)


def _fill(
    judge: Judge,
    task: Task,
    template: Template,
    plan: Plan,
    store: Store,
    items: Sequence[Item],
    truncate: bool,
) -> Store:
    if (started := store.plan()) is not None:
        _compare(store, plan, started["identity"], started["digest"])
        # What was begun in other batches goes on in them: parts are numbered by chunk.
        plan = plan._replace(chunks=started["chunks"])
    elif store.is_foreign:
        raise ValueError(
            f"{str(store.folder)!r} is not empty and no store. Set `--data.store` to a new folder."
        )
    else:
        store.begin(plan.summary())
    try:
        _judge_chunks(judge, task, plan, store, truncate)
    except KeyboardInterrupt:
        done = sum(map(store.has_part, range(len(plan.chunks))))
        raise Interrupted(
            f"stopped with {done} of {len(plan.chunks)} chunks judged. "
            "Run the same command to go on."
        ) from None
    order = [index for chunk in plan.chunks for index in chunk]
    manifest = {
        "task": task.name,
        "identity": plan.identity,
        "digest": plan.digest,
        "engine": judge.engine(),
        "scales": {task.scale: scale_entry(task, template)},
    }
    store.finish(len(plan.chunks), order, items, manifest)
    return store


def default_folder(task: Task, plan: Plan) -> Path:
    """`stores/<task>-<judge>-<8 hex of identity and data>`."""
    judge = re.sub(r"[^a-z0-9.]+", "-", plan.identity["judge"].lower()).strip("-")
    return STORES / f"{task.name}-{judge}-{plan.digest[:8]}"


def _refresh(store: Store, plan: Plan, items: Sequence[Item]) -> None:
    # Items that a kill left half refreshed are written again below.
    manifest = store.manifest(unchecked="items.parquet")
    _compare(store, plan, manifest["identity"], manifest["digest"])
    names = ("id", "group", "split", "gold", "leak")
    now = [{name: getattr(item, name) for name in names} for item in items]
    file = store.folder / "items.parquet"
    intact = file.is_file() and file_checksum(file) == manifest["files"]["items.parquet"]
    if not intact or store.items().to_pylist() != now:
        store.refresh_items(items, manifest)


def _compare(store: Store, plan: Plan, identity: dict[str, str], digest: str) -> None:
    refuse_other_identity(f"store {str(store.folder)!r}", identity, plan.identity)
    if digest != plan.digest:
        raise ValueError(
            f"store {str(store.folder)!r} was made from other texts or ids. "
            "Set `--data.store` to a new folder."
        )


def refuse_other_identity(owner: str, has: dict[str, str], needed: dict[str, str]) -> None:
    """Raise ValueError naming the first field in which two identities differ."""
    for name in sorted({*has, *needed}):
        if has.get(name) != needed.get(name):
            raise ValueError(
                f"{owner} belongs to another judge or task: its {name} is {has.get(name)!r}, "
                f"here it is {needed.get(name)!r}. Use what belongs together."
            )


def _judge_chunks(judge: Judge, task: Task, plan: Plan, store: Store, truncate: bool) -> None:
    todo = [number for number in range(len(plan.chunks)) if not store.has_part(number)]
    lengths = [len(row.input_ids) for row in plan.encoded]
    perplexity = _perplexity(judge, plan.questions) if todo else {}
    started, tokens, prompts = time.monotonic(), 0, 0
    with _progress() as progress:
        bar = progress.add_task(
            "judging", total=sum(lengths), completed=0, prompts="", rate="starting"
        )
        for number, chunk in enumerate(plan.chunks):
            if number not in todo:
                progress.advance(bar, sum(lengths[index] for index in chunk))
        progress.update(bar, prompts=f"{len(plan.chunks) - len(todo)}/{len(plan.chunks)} chunks")
        for done, number in enumerate(todo, 1):
            chunk = plan.chunks[number]
            _judge_chunk(judge, task, plan, store, number, perplexity, truncate)
            tokens += sum(lengths[index] for index in chunk)
            prompts += len(chunk)
            seconds = time.monotonic() - started
            progress.update(
                bar,
                advance=sum(lengths[index] for index in chunk),
                prompts=f"{len(plan.chunks) - len(todo) + done}/{len(plan.chunks)} chunks",
                rate=f"{prompts / seconds:.1f} prompts/s, {tokens / seconds:.0f} tokens/s",
            )
    if todo:
        seconds = time.monotonic() - started
        remember_rate(plan.identity, tokens / seconds)
        sys.stderr.write(
            f"judged {prompts} prompts, {tokens} tokens in {seconds:.0f} s "
            f"({prompts / seconds:.1f} prompts/s)\n"
        )


def _judge_chunk(
    judge: Judge,
    task: Task,
    plan: Plan,
    store: Store,
    number: int,
    perplexity: dict[str, float],
    truncate: bool,
) -> None:
    chunk = plan.chunks[number]
    before = len(judge.halved)
    prompts = [plan.questions[index].prompt for index in chunk]
    answers = {answer.index: answer for answer in judge.judge(prompts, truncate=truncate)}
    rows = []
    for position, index in enumerate(chunk):
        question, answer = plan.questions[index], answers[position]
        text = json.dumps(plan.encoded[index].input_ids)
        rows.append(
            {
                "kind": question.kind,
                "key": question.key,
                "scale": task.scale,
                "order": task.orders,
                "logprobs": answer.logprobs.tolist(),
                "censored": answer.censored.tolist(),
                "label_mass": answer.label_mass,
                "logsumexp": answer.logsumexp,
                "perplexity": perplexity.get(question.key)
                if question.kind.startswith("random")
                else None,
                "tokens": len(plan.encoded[index].input_ids),
                "prompt": hashlib.sha256(text.encode()).hexdigest()[:16],
                "text": None,
            }
        )
    store.write_part(number, rows, judge.halved[before:])


def _perplexity(judge: Judge, questions: list[Question]) -> dict[str, float]:
    """Perplexity of each random-number prompt alone, by key."""
    alone = [question for question in questions if question.kind == "random"]
    try:
        values = judge.perplexity([question.prompt.before for question in alone])
    except Unsupported as reason:
        sys.stderr.write(f"{reason} All random-number prompts count, none is selected.\n")
        return {}
    return dict(zip([question.key for question in alone], values.tolist(), strict=True))


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description} {task.fields[prompts]}"),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


# Rates measured earlier: a store must not hold them, since a resumed one equals an unbroken one.


def _rate_file() -> Path:
    return cache_folder() / "rates.json"


def _rates() -> dict[str, float]:
    try:
        return json.loads(_rate_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def remember_rate(identity: dict[str, str], tokens_per_second: float) -> None:
    """Keep this judge's speed on this machine for later estimates."""
    key = f"{identity['revision']} {identity['dtype']}"
    # An estimate is not worth an error after hours of judging.
    with contextlib.suppress(OSError), replacing(_rate_file()) as partial:
        rates = {**_rates(), key: round(tokens_per_second, 1)}
        partial.write_text(json.dumps(rates), encoding="utf-8")


def dry_run(judge: Judge, task: Task, template: Template, questions: list[Question],
            *, truncate: bool) -> dict[str, Any]:  # fmt: skip
    """Every prompt exactly as tokenised, label tokens, counts, and the seconds it would take."""
    plan = make_plan(judge, task, template, questions, truncate=truncate)
    shown: dict[str, Any] = {
        name: [] for name in ("items", "random", "random_task", "content_free")
    }
    for question, row in zip(plan.questions, plan.encoded, strict=True):
        name = "items" if question.kind == "item" else question.kind
        shown[name].append({"id": question.key, "input_ids": row.input_ids, "text": row.text})
    item_tokens = sum(len(row["input_ids"]) for row in shown["items"])
    rate = _rates().get(f"{plan.identity['revision']} {plan.identity['dtype']}")
    tokens = sum(len(row.input_ids) for row in plan.encoded)
    return {
        **shown,
        "labels": json.loads(plan.identity["labels"]),
        "counts": {"prompts": len(shown["items"]), "prompt_tokens": item_tokens},
        "seconds": None if rate is None else round(tokens / rate, 1),
    }


def dry_run_text(shown: dict[str, Any]) -> str:
    """Two prompts of each kind, label tokens, counts and seconds, to read."""
    lines = []
    for kind in ("items", "random", "random_task", "content_free"):
        for row in shown[kind][:2]:
            lines += [f"--- {kind} {row['id']} ({len(row['input_ids'])} tokens)", row["text"]]
    lines.append("--- label tokens")
    lines += [f"{label}: {ids}" for label, ids in shown["labels"].items()]
    counts, seconds = shown["counts"], shown["seconds"]
    estimate = "not known, no rate measured yet" if seconds is None else f"about {seconds:.0f}"
    lines.append(
        f"--- {counts['prompts']} items, {counts['prompt_tokens']} prompt tokens; "
        f"seconds for the whole job: {estimate}"
    )
    return "\n".join(lines)
