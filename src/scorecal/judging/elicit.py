"""Run a judge over a task, once, into a store."""

import contextlib
import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scorecal.judging.answers import account
from scorecal.judging.contrast import Contrasted
from scorecal.judging.generation import Writing, answer_rows, with_texts
from scorecal.judging.judge import Chunk, Judge, Unsupported
from scorecal.judging.plan import Plan, Question, counts_of, make_plan, prompt_hash, scale_entries
from scorecal.judging.records import Record, replacing
from scorecal.judging.store import Store, file_checksum
from scorecal.judging.task import Item, Task, Template
from scorecal.judging.weights import cache_folder
from scorecal.progress import bar, notice

STORES = Path("stores")
_LOOK = 0.5  # seconds between two looks at what is done


class Interrupted(KeyboardInterrupt):
    """A command was stopped; its text says how to go on."""


def elicit(
    judge: Judge,
    task: Task,
    templates: Sequence[Template],
    items: Sequence[Item],
    questions: list[Question],
    folder: str = "",
    *,
    truncate: bool = False,
    samples: int = 0,
    contrasted: Contrasted | None = None,
    trainer: Any = None,
    before: Callable[[Plan], None] | None = None,
) -> Store:
    """Judge all questions into a store, or go on with an unfinished one.

    Args:
        judge: who answers.
        task: what is judged.
        templates: the task's template on each scale and in each order.
        items: the items, for the store's item table.
        questions: all prompts, in the store's order; before any reasoning.
        folder: where; by default `stores/<task>-<judge>-<hash of identity and prompts>`.
        truncate: cut items that are longer than the judge's context.
        samples: inputs that the judge invents and then judges too.
        contrasted: an assistant in contrast to which the judge answers every item too.
        trainer: a Lightning trainer whose processes share the chunks; by default this process
            judges them all.
        before: called with the plan where something is left to judge, before anything is written;
            what it raises stops the job.

    Raises:
        ValueError: the folder holds another judge's or another data set's judgements, or the judge
            can't write what is asked for.
        Interrupted: on Ctrl-C; finished chunks stay on disk.
    """
    plan, writing, store = _job(
        judge, task, templates, questions, folder, truncate, samples, contrasted
    )
    if before is not None and not store.is_complete:
        before(plan)
    first = trainer is None or trainer.global_rank == 0
    with _alone(store.folder) if first else contextlib.nullcontext():
        if store.is_complete:
            if first:
                store.tidy()
                _refresh(store, plan, items)
                _account(store, writing)
            return store
        expected: dict[str, float] = {}
        if first:  # an engine or a server that is missing shows here, before anything is written
            judge.engine()
            expected = expectation(judge, plan)
            _begin(store, plan._replace(chunks=[]) if writing else plan)
        more: dict[str, Any] = {}
        answers: list[Record] = []
        if writing:
            more = writing.entry()
            plan, answers = _written(
                judge, templates, plan, writing, store, first, truncate=truncate
            )
            expected = expectation(judge, plan) if first else {}
        _fill(judge, task, templates, plan, store, items, trainer, expected, more, answers)
        if first:
            _account(store, writing)
        return store


def check_judge(
    judge: Judge,
    task: Task,
    templates: Sequence[Template],
    questions: list[Question],
    folder: str = "",
    *,
    truncate: bool = False,
) -> None:
    """Find out what a judge lacks for a job that `elicit` has not finished; nothing is written.

    Raises:
        ValueError: it can't do the job.
    """
    _, _, store = _job(judge, task, templates, questions, folder, truncate)
    if not store.is_complete:
        judge.engine()


def _job(
    judge: Judge,
    task: Task,
    templates: Sequence[Template],
    questions: list[Question],
    folder: str,
    truncate: bool,
    samples: int = 0,
    contrasted: Contrasted | None = None,
) -> tuple[Plan, Writing, Store]:
    """What is asked, what is written beside it, and where it is kept."""
    if contrasted is not None:
        contrasted.pair_with(judge)
    plan = make_plan(judge, templates, questions, truncate=truncate)
    writing = Writing.of(task, samples, contrasted)
    if writing:
        plan = writing.named(plan)
    return plan, writing, Store(Path(folder) if folder else default_folder(task, plan))


def _account(store: Store, writing: Writing) -> None:
    """Say how many of the judge's own answers are scores, and which are not."""
    if writing.answers or writing.contrasted is not None:
        columns = ["kind", "key", "scale", "order", "text"]
        for line in account(store.judgements().select(columns).to_pylist()):
            notice(line)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuse a second process on the same store; a killed one leaves no claim."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"another process is filling {str(folder)!r}. Wait for it, or set `--data.store`."
        ) from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _begin(store: Store, plan: Plan) -> None:
    """Claim the folder for a plan, or find that it is this plan's."""
    if (started := store.plan()) is not None:
        _compare(store, plan, started["identity"], started["digest"])
    elif store.is_foreign:
        raise ValueError(
            f"{str(store.folder)!r} is not empty and no store. Set `--data.store` to a new folder."
        )
    else:
        store.begin(plan.summary())


def _written(
    judge: Judge,
    templates: Sequence[Template],
    plan: Plan,
    writing: Writing,
    store: Store,
    first: bool,
    *,
    truncate: bool,
) -> tuple[Plan, list[Record]]:
    """The plan of what is judged, once the first process has had all texts written; and answers.

    It keeps the name of the plan from before, by which a second run finds the folder.
    """

    def has_chunks() -> bool:
        return bool((store.plan() or {}).get("chunks"))

    while not (first or has_chunks()):
        time.sleep(_LOOK)
    notice(writing.announcement(plan.questions))
    final = plan
    try:
        if writing.precedes:
            questions = with_texts(judge, templates, plan.questions, writing, store)
            final = make_plan(judge, templates, questions, truncate=truncate)
            final = final._replace(identity=plan.identity, digest=plan.digest)
        answers = answer_rows(judge, final, writing, store)
    except (KeyboardInterrupt, SystemExit):
        raise Interrupted(
            "stopped while the judge was writing. Run the same command to go on."
        ) from None
    if first and not has_chunks():
        store.begin(final.summary())
    return final, answers


def _fill(
    judge: Judge,
    task: Task,
    templates: Sequence[Template],
    plan: Plan,
    store: Store,
    items: Sequence[Item],
    trainer: Any,
    expected: dict[str, float],
    more: dict[str, Any],
    answers: list[Record],
) -> None:
    first = trainer is None or trainer.global_rank == 0
    if (started := store.plan()) is not None:
        _compare(store, plan, started["identity"], started["digest"])
        # What was begun in other batches goes on in them: parts are numbered by chunk.
        plan = plan._replace(chunks=[Chunk(**chunk) for chunk in started["chunks"]])
    job = _Job(judge, plan, store)
    if first:
        notice(announcement(counts_of(plan.encoded, plan.chunks), expected))
    try:
        if trainer is None:
            job.run()
        else:
            from scorecal.judging.ranks import run

            run(trainer, job)
    except (KeyboardInterrupt, SystemExit):  # Lightning turns Ctrl-C into an exit
        raise Interrupted(
            f"stopped with {len(store.parts())} of {len(plan.chunks)} chunks judged. "
            "Run the same command to go on."
        ) from None
    if first:
        order = [index for chunk in plan.chunks for index in chunk.prompts]
        manifest = {
            "task": task.name,
            "identity": plan.identity,
            "digest": plan.digest,
            "engine": judge.engine(),
            "scales": scale_entries(task, templates),
            **more,
        }
        store.finish(len(plan.chunks), order, answers, items, manifest)


def announcement(counts: dict[str, int], expected: dict[str, float]) -> str:
    """One line on a job: how much it is and what it will take."""
    words = {
        "prompts": "prompts",
        "prompt_tokens": "prompt tokens",
        "trie_tokens": "without repeated beginnings",
        "tokens_computed": "to compute",
    }
    parts = [f"{counts[name]} {word}" for name, word in words.items() if name in counts]
    if "seconds" in expected:
        parts.append(f"about {expected['seconds']:.0f} s")
    if "cost" in expected:
        parts.append(f"about ${expected['cost']:.2f}")
    return ", ".join(parts)


def expectation(judge: Judge, plan: Plan) -> dict[str, float]:
    """What the engine says a job will take, else what this judge took here before."""
    prompts = [question.prompt for question in plan.questions]
    expected = judge.expected(prompts, plan.encoded)
    rate = _rates().get(_rate_key(plan.identity))
    if "seconds" not in expected and rate:
        expected["seconds"] = sum(map(plan.weight, range(len(plan.chunks)))) / rate
    return expected


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
            f"store {str(store.folder)!r} was made from other texts or ids, or with another "
            "`data.samples` or `data.task.mode`. Set `--data.store` to a new folder."
        )


def refuse_other_identity(owner: str, has: dict[str, str], needed: dict[str, str]) -> None:
    """Raise ValueError naming the first field in which two identities differ."""
    for name in sorted({*has, *needed}):
        if has.get(name) != needed.get(name):
            raise ValueError(
                f"{owner} belongs to another judge or task: its {name} is {has.get(name)!r}, "
                f"here it is {needed.get(name)!r}. Use what belongs together."
            )


class _Job:
    """The chunks of one plan, each judged into its part of the store."""

    def __init__(self, judge: Judge, plan: Plan, store: Store) -> None:
        self.judge, self.plan, self.store = judge, plan, store
        self.tokens = self.prompts = 0
        """Judged by this process."""

    def run(self) -> None:
        """Judge what is not on disk yet, with a progress bar."""
        chunks = range(len(self.plan.chunks))
        with self.progress() as advance:
            for number in chunks:
                if not self.store.has_part(number):
                    self.write(number, *self.rows(number))
                advance()

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[], None]]:
        """A progress bar; call what it gives after each chunk."""
        started = looked = time.monotonic()
        numbers = range(len(self.plan.chunks))
        with bar() as progress:
            shown = progress.add_task(
                "judging", total=sum(map(self.plan.weight, numbers)), done="", rate="starting"
            )

            def show() -> None:
                done, seconds = self.store.parts(), time.monotonic() - started
                progress.update(
                    shown,
                    completed=sum(map(self.plan.weight, done)),
                    done=f"{len(done)}/{len(numbers)} chunks",
                    rate=f"{self.prompts / seconds:.1f} prompts/s, "
                    f"{self.tokens / seconds:.0f} tokens/s",
                )

            def advance() -> None:
                nonlocal looked
                # A large job has thousands of chunks: listing them after each would be slow.
                if time.monotonic() - looked >= _LOOK:
                    looked = time.monotonic()
                    show()

            yield advance
            show()
        if self.prompts:
            seconds = time.monotonic() - started
            remember_rate(self.plan.identity, self.tokens / seconds)
            notice(
                f"judged {self.prompts} prompts, computed {self.tokens} tokens in {seconds:.0f} s "
                f"({self.prompts / seconds:.1f} prompts/s)"
            )

    def rows(self, number: int) -> tuple[list[dict[str, Any]], list[int]]:
        """Judge a chunk: its rows, and the sizes of batches that ran out of memory."""
        indices, cuts, _ = self.plan.chunks[number]
        questions = [self.plan.questions[index] for index in indices]
        encoded = [self.plan.encoded[index] for index in indices]
        before = len(self.judge.halved)
        answers = self.judge.judge_chunk([question.prompt for question in questions], encoded, cuts)
        rows: list[dict[str, Any]] = [{} for _ in answers]
        for answer in answers:
            question, row = questions[answer.index], encoded[answer.index]
            rows[answer.index] = {
                "kind": question.kind,
                "key": question.key,
                "scale": question.scale,
                "order": question.order,
                "logprobs": answer.logprobs.tolist(),
                "censored": answer.censored.tolist(),
                "label_mass": answer.label_mass,
                "logsumexp": answer.logsumexp,
                "perplexity": self._perplexity.get((question.scale, question.key))
                if question.kind.startswith("random")
                else None,
                "tokens": len(row.input_ids),
                "prompt": prompt_hash(row),
                "text": question.text,
            }
        return rows, self.judge.halved[before:]

    def write(self, number: int, rows: list[dict[str, Any]], halved: list[int]) -> None:
        """Put a judged chunk on disk."""
        self.store.write_part(number, rows, halved)
        self.prompts += len(rows)
        self.tokens += self.plan.weight(number)

    @functools.cached_property
    def _perplexity(self) -> dict[tuple[str, str], float]:
        """Perplexity of each random-number prompt alone, by scale and key."""
        alone = [question for question in self.plan.questions if question.kind == "random"]
        try:
            values = self.judge.perplexity([question.prompt.before for question in alone])
        except Unsupported as reason:
            notice(f"{reason} All random-number prompts count, none is selected.")
            return {}
        keys = [(question.scale, question.key) for question in alone]
        return dict(zip(keys, values.tolist(), strict=True))


# Rates measured earlier: a store must not hold them, since a resumed one equals an unbroken one.


def _rate_file() -> Path:
    return cache_folder() / "rates.json"


def _rates() -> dict[str, float]:
    try:
        return json.loads(_rate_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _rate_key(identity: dict[str, str]) -> str:
    return f"{identity['revision']} {identity['dtype']}"


def remember_rate(identity: dict[str, str], tokens_per_second: float) -> None:
    """Keep this judge's speed on this machine for later estimates."""
    # An estimate is not worth an error after hours of judging.
    with contextlib.suppress(OSError), replacing(_rate_file()) as partial:
        rates = {**_rates(), _rate_key(identity): round(tokens_per_second, 1)}
        partial.write_text(json.dumps(rates), encoding="utf-8")
