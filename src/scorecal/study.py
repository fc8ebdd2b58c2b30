"""Optuna over the head's options: every trial is scored on the inner folds of dev, never on test.

Trials are asked in batches, and those that differ in numbers alone are problems of one fit. With
outer folds each split has a study of its own, inside its dev part.
"""

import contextlib
import difflib
import functools
import itertools
import json
import math
import os
import random
import re
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from scorecal.calibration.data import ScoreData
from scorecal.calibration.folds import By, Split, make_splits
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.module import NO_ASSISTANT, PER_SPLIT, Calibration
from scorecal.calibration.trials import HIGHER, DevPart, Trial
from scorecal.judging.elicit import Interrupted
from scorecal.progress import bar

if TYPE_CHECKING:
    import optuna

Point = tuple[Any, ...]  # a value of each dimension, as Optuna keeps it
Sampler = Literal["grid", "random", "tpe", "gp", "cmaes"]
_HEAD = "model.head."
_SEARCHABLE = [*(_HEAD + one.name for one in fields(HeadSettings)), "model.loss"]
# Trials asked at once: those of one batch don't know of one another's values.
_BATCH = {"grid": 128, "random": 128, "tpe": 16, "gp": 8, "cmaes": 16}
_LARGEST_GRID = 10_000
_PATIENCE = 300.0  # seconds until a running trial of another machine is taken to be dead


@dataclass
class SearchSettings:
    """A search among the head's options.

    Attributes:
        space: option -> {low, high, step or log} or a list of choices.
        name: of the study in its storage, and of its folder.
        metrics: what is optimised; several make a Pareto front.
        sampler: how values are proposed.
        pruner: give up after some inner folds on trials that fall behind.
        trials: how many, over all workers; null: the whole grid, or 100.
        timeout: seconds after which this worker asks for no more trials.
        storage: null for memory, a .log or .journal file, a .db file, or a database's URL.
    """

    space: dict[str, Any] = field(default_factory=dict)
    name: str = "study"
    metrics: list[By] = field(default_factory=lambda: ["spearman"])
    sampler: Sampler = "tpe"
    pruner: Literal["none", "median", "wilcoxon"] = "none"
    trials: int | None = None
    timeout: float | None = None
    storage: str | None = None


class Dimension(NamedTuple):
    """What one option may be: some values, or a range."""

    key: str
    choices: list[Any] | None = None
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.key == f"{_HEAD}prior_prompts"

    def grid(self) -> list[Any]:
        """All values in order, where there are finitely many."""
        if self.choices is not None:
            return [str(choice) for choice in self.choices]
        assert self.step is not None
        values = [round(self.low + index * self.step, 12) for index in range(self.size)]
        return [int(value) for value in values] if self.whole else values

    @property
    def size(self) -> int:
        """How many values the grid has."""
        if self.choices is not None:
            return len(self.choices)
        return 0 if self.step is None else int((self.high - self.low) / self.step + 1e-9) + 1

    def suggest(self, trial: "optuna.Trial") -> Any:
        """A value of the option; Optuna knows a choice by its text, as it takes plain ones only."""
        if self.choices is not None:
            return self.value_of(trial.suggest_categorical(self.key, self.grid()))
        if self.whole:
            step = int(self.step or 1)
            return trial.suggest_int(self.key, int(self.low), int(self.high), step=step)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    def value_of(self, stored: Any) -> Any:
        """The option's value by what Optuna keeps of it."""
        if self.choices is None:
            return stored
        return self.choices[self.grid().index(stored)]


def parse_space(
    settings: SearchSettings, model: Calibration, *, outer: bool, assisted: bool = False
) -> list[Dimension]:
    """The dimensions that a study searches.

    Raises:
        ValueError: an option is unknown, can't be searched with this model, or its values make no
            sense.
    """
    if not settings.space:
        raise ValueError("`search.space` names no option. Add one, e.g. `model.head.strength`.")
    dimensions = [_dimension(key, given) for key, given in settings.space.items()]
    learns = next(
        (one.choices for one in dimensions if one.key == f"{_HEAD}learn" and one.choices),
        [model.settings.learn],
    )
    learned = {name for learn in learns for name in learn}
    alpha = "contrast" in learned or any(one.key == f"{_HEAD}contrast" for one in dimensions)
    if alpha and not assisted:
        raise ValueError(NO_ASSISTANT)
    for dimension in dimensions:
        key, name = dimension.key, dimension.key.rpartition(".")[2]
        if name in learned:
            raise ValueError(
                f"`search.space` and `model.head.learn` both name {name!r}: a learned value is "
                f"only a starting point. Take {name!r} out of `learn`."
            )
        if name == "ridge_mixing" and "mixing" not in learned:
            raise ValueError("`model.head.ridge_mixing` has no effect: add `mixing` to `learn`.")
        if outer and name not in (*PER_SPLIT, "loss"):
            raise ValueError(
                f"`{key}` can't be searched with outer folds, as a run has one for all of them. "
                "Take it out of `search.space`, or set `--data.folds.outer 0`."
            )
        if settings.sampler == "grid" and dimension.choices is None and dimension.step is None:
            raise ValueError(
                f"a grid needs a step for `{key}`. Add `step` to it in `search.space`, or set "
                "`--search.sampler tpe`."
            )
        if settings.sampler == "cmaes" and dimension.choices is not None:
            raise ValueError(
                f"CMA-ES searches numbers, `{key}` lists choices. Set `--search.sampler tpe`."
            )
    if settings.sampler == "grid" and math.prod(one.size for one in dimensions) > _LARGEST_GRID:
        raise ValueError(
            f"the grid has more than {_LARGEST_GRID:,} points. Make the steps of `search.space` "
            "larger, or set `--search.sampler random`."
        )
    searched = {dimension.key.rpartition(".")[2] for dimension in dimensions}
    for name, used in (("ridge_bias", bool(learned)), ("ridge_mixing", "mixing" in learned)):
        if used and name not in searched and getattr(model.settings, name) == "auto":
            raise ValueError(
                f"`model.head.{name}: auto` is a search of its own. Give it a number, or search it."
            )
    return dimensions


def _dimension(key: str, given: Any) -> Dimension:
    if key not in _SEARCHABLE:
        near = difflib.get_close_matches(str(key), _SEARCHABLE, n=1, cutoff=0.0)
        raise ValueError(
            f"`search.space` names {key!r}, which a study can't search. Nearest: {near[0]!r}."
        )
    if isinstance(given, list):
        names = [str(choice) for choice in given]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"`search.space` lists no or equal choices for `{key}`: {given}.")
        return Dimension(key, [_parsed(key, choice) for choice in given])
    ends: list[Any] = [given.get("low"), given.get("high")] if isinstance(given, dict) else []
    step = given.get("step") if isinstance(given, dict) else None
    numbers = [*ends, *([] if step is None else [step])]
    known = isinstance(given, dict) and not set(given) - {"low", "high", "step", "log"}
    plain = all(
        isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n)
        for n in numbers
    )
    if key == f"{_HEAD}prior_prompts":
        plain = plain and all(isinstance(n, int) for n in numbers)
    log = given.get("log", False) if isinstance(given, dict) else False
    ranged = key.rpartition(".")[2] in PER_SPLIT
    if not (known and plain and ranged and isinstance(log, bool)):
        choices = "a list of choices"
        choices += " or a range {low, high, step or log: true}" if ranged else ""
        raise ValueError(f"`search.space` needs {choices} for `{key}`, got {given!r}.")
    if not ends[0] < ends[1] or (step is not None and not 0 < step <= ends[1] - ends[0]):
        raise ValueError(f"`search.space` has an empty range for `{key}`: {given}.")
    if log and (ends[0] <= 0 or step is not None):
        raise ValueError(f"a log range lies above 0 and has no step, `{key}` is {given}.")
    low, high = (_parsed(key, end) for end in ends)
    found = Dimension(key, None, low, high, step, log)
    # A range ends where its last step does; Optuna would say so each time.
    return found if step is None else found._replace(high=low + (found.size - 1) * step)


def _parsed(key: str, value: Any) -> Any:
    """A value as the command line would read it.

    Raises:
        ValueError: the option doesn't take it.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Calibration, "model")
    if value is None or value == "auto":
        raise ValueError(f"`search.space`: `{key}` can't be {value!r}: name the values to try.")
    content: Any = value
    for name in reversed(key.split(".")):
        content = {name: content}
    try:
        parsed = parser.parse_object(content)[key]
    except ArgumentError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"`search.space`: `{key}` can't be {value!r}: {reason}") from None
    if key.startswith(_HEAD):
        HeadSettings(**{key.removeprefix(_HEAD): parsed}).check()
    return parsed


class Found(NamedTuple):
    """What the study of one split came to."""

    split: str
    values: dict[str, Any]
    record: dict[str, Any]


class Outcome(NamedTuple):
    """What the studies of all splits came to."""

    found: list[Found]
    studies: "list[optuna.Study]"
    run: str | None
    """The run directory of the fit to the best, where one has been made."""

    def keep_run(self, folder: Path) -> None:
        """Remember the fit: a finished study doesn't repeat it."""
        for study in self.studies:
            study.set_user_attr("run", str(folder))


def run_study(settings: SearchSettings, model: Calibration, data: ScoreData) -> Outcome | None:
    """Search, split by split; None where another worker ended last and so does the rest.

    Raises:
        ValueError: the study makes no sense, its storage can't be reached, or holds another study.
        Interrupted: on Ctrl-C; finished trials stay in the storage.
    """
    import optuna

    _check(settings, model)
    dimensions = parse_space(
        settings, model, outer=data.folds.outer > 0, assisted=data.assistant.is_named
    )
    table, assistant = data.read(), data.assistant_logprobs
    assert assistant is not None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    storage = _storage(settings.storage)
    deadline = time.monotonic() + (settings.timeout or float("inf"))
    searches = []
    try:
        for split in make_splits(table, data.folds, model.seed):
            part = DevPart(table, assistant, split, data.folds, model.seed)
            search = _Search(settings, dimensions, model, part, split, storage)
            search.run(deadline)
            searches.append(search)
    except KeyboardInterrupt:
        raise Interrupted(
            "the study was stopped; its trials lay in memory and are lost. Set `--search.storage "
            "study.log` to be able to go on."
            if storage is None
            else "the study was stopped. Run the same command to go on."
        ) from None
    if not _mine_to_end(searches):
        return None
    return Outcome(
        [search.found() for search in searches],
        [search.study for search in searches],
        searches[0].study.user_attrs.get("run"),
    )


def _mine_to_end(searches: "list[_Search]") -> bool:
    """Whether this worker finished last, or found everything finished."""
    finished = [trial for search in searches for trial in search.finished()]
    last = max(finished, key=lambda one: (one.datetime_complete, one.number))
    workers = {trial.user_attrs.get("worker") for trial in finished}
    me = searches[0].worker
    return me not in workers or last.user_attrs.get("worker") == me


def _check(settings: SearchSettings, model: Calibration) -> None:
    if model.select is not None or model.per_split:
        raise ValueError(
            "a study chooses by itself. Set `--model.select null` and `--model.per_split null`."
        )
    if not settings.metrics or len(set(settings.metrics)) < len(settings.metrics):
        raise ValueError(f"`search.metrics` lists no or equal metrics: {settings.metrics}.")
    if settings.pruner != "none" and len(settings.metrics) > 1:
        raise ValueError("pruning compares trials by one metric. Set `--search.pruner none`.")
    searched_learn = f"{_HEAD}learn" in settings.space
    if settings.pruner != "none" and (searched_learn or not model.settings.learn):
        raise ValueError(
            "pruning looks at inner folds, and a head that learns nothing is scored on all of dev "
            "at once. Set `--search.pruner none`."
        )
    if settings.trials is not None and settings.trials < 1:
        raise ValueError(f"`search.trials` must be 1 at least, got {settings.trials}.")
    if settings.timeout is not None and not settings.timeout > 0:
        raise ValueError(f"`search.timeout` must be above 0, got {settings.timeout}.")
    if not re.fullmatch(r"\w[\w.-]{0,99}", settings.name):
        raise ValueError(
            "`search.name` is a folder's name (up to 100 letters, digits, . _ -), got "
            f"{settings.name[:120]!r}."
        )


def _storage(named: str | None) -> Any:
    """Optuna's storage of a file by its suffix, or of a URL.

    Raises:
        ValueError: it can't be opened.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if named is None:
        return None
    suffix = Path(named).suffix
    if "://" not in named and suffix not in (".log", ".journal", ".db"):
        raise ValueError(
            f"`search.storage` {named!r} is no .log, .journal or .db file and no URL. Name one."
        )
    if "://" in named:  # SQLAlchemy's own default is the driver's older release
        return _database(re.sub("^postgres(ql)?://", "postgresql+psycopg://", named), named)
    # Optuna's lock of a relative path in another folder would wait for ever.
    path = Path(named).resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".db":
            return _database(f"sqlite:///{path}", named)
        _refuse_no_journal(path)
        return JournalStorage(JournalFileBackend(str(path)))
    except OSError as error:
        raise ValueError(f"`search.storage` {named!r} can't be opened: {error}.") from error


def _refuse_no_journal(path: Path) -> None:
    """Raise ValueError where a file holds what Optuna did not write."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        time.sleep(1)  # perhaps another worker is writing
        content = path.read_bytes()
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            whole = line.endswith(b"\n") and "worker_id" in json.loads(line)
        except (ValueError, TypeError):
            whole = False
        if not whole:
            raise ValueError(
                f"`search.storage` {str(path)!r} is no whole journal: line {number} can't be read. "
                "Name another file, or take a cut last line out."
            )


def _database(url: str, named: str, *, tries: int = 3) -> Any:
    from optuna.storages import RDBStorage

    try:
        return RDBStorage(url)
    except Exception as error:  # every database has errors of its own
        text = str(error).strip()
        twice = ("already exists", "UniqueViolation", "UNIQUE constraint failed")
        if tries > 1 and any(words in text for words in twice):
            time.sleep(1)  # another worker has just made the same tables
            return _database(url, named, tries=tries - 1)
        shown = re.sub("//.*@", "//…@", named)
        first = re.sub("//.*@", "//…@", next(iter(text.splitlines()), type(error).__name__))
        raise ValueError(f"`search.storage` {shown!r} can't be reached: {first}") from error


class _Search:
    """One split's study."""

    def __init__(
        self,
        settings: SearchSettings,
        dimensions: list[Dimension],
        model: Calibration,
        part: DevPart,
        split: Split,
        storage: Any,
    ) -> None:
        import optuna

        self.settings, self.dimensions, self.model = settings, dimensions, model
        self.part, self.split = part, split
        self.shared = storage is not None
        self.worker = f"{socket.gethostname()} {os.getpid()}"
        directions: list[Literal["maximize", "minimize"]] = [
            "maximize" if metric in HIGHER else "minimize" for metric in settings.metrics
        ]
        name = settings.name if split.name == "deploy" else f"{settings.name}: {split.name}"
        self.study = optuna.create_study(
            study_name=name,
            storage=storage,
            sampler=self._sampler(),
            pruner=_pruner(settings.pruner),
            directions=directions,
            load_if_exists=True,
        )
        self._refuse_other(name)
        self.total = settings.trials or 100
        self.grid: list[Point] = []
        if settings.sampler == "grid":
            self.grid = list(itertools.product(*(one.grid() for one in dimensions)))
            random.Random(model.seed).shuffle(self.grid)  # so that a part of it is spread
            self.total = min(settings.trials or len(self.grid), len(self.grid))

    def _sampler(self) -> Any:
        from optuna import samplers

        # Workers on one storage must not propose the same; alone, a seed repeats its trials.
        seed = self.model.seed + (os.getpid() if self.shared else 0)
        seed %= 2**32
        kind = self.settings.sampler
        if kind in ("random", "grid"):  # points of a grid are enqueued
            return samplers.RandomSampler(seed=seed)
        if kind == "tpe":
            return samplers.TPESampler(seed=seed)
        package = "cmaes" if kind == "cmaes" else "greenlet"
        try:
            __import__(package)
        except ImportError:
            raise ValueError(
                f"the sampler {kind} needs the package {package}: pip install 'scorecal[study]'."
            ) from None
        if kind == "gp":
            return samplers.GPSampler(seed=seed)
        return samplers.CmaEsSampler(seed=seed)

    def _refuse_other(self, name: str) -> None:
        """Raise ValueError where the storage's study of this name searched something else."""
        about = {
            "space": self.settings.space,
            "metrics": self.settings.metrics,
            "head": vars(self.model.settings),
            "loss": self.model.loss,
            "dev": self.part.digest(),
        }
        about = json.loads(json.dumps(about))
        known = self.study.user_attrs.get("about")
        if known is None:
            self.study.set_user_attr("about", about)
            return
        for key, value in about.items():
            if known[key] != value:
                raise ValueError(
                    f"the storage has a study {name!r} of another {key}: {known[key]}, not "
                    f"{value}. Set another `--search.name`."
                )

    # Trials

    def run(self, deadline: float) -> None:
        """Ask and tell until all trials are finished, those of other workers included."""
        with bar() as progress:
            task = progress.add_task(self.study.study_name, total=self.total, done="", rate="")
            while True:
                self._retry_dead()
                batch = self._ask(deadline)
                if batch:
                    self._evaluate(batch)
                    finished = len(self.finished())
                    progress.update(
                        task, completed=finished, done=f"{finished}/{self.total} trials"
                    )
                elif self._count("RUNNING"):
                    time.sleep(0.2)
                else:
                    break
        if not self._count("COMPLETE"):
            raise ValueError(
                f"study {self.study.study_name!r} has no finished trial. Raise `--search.timeout`."
            )

    def _trials(self, *states: str) -> "list[optuna.trial.FrozenTrial]":
        from optuna.trial import TrialState

        wanted = tuple(TrialState[state] for state in states)
        return self.study.get_trials(deepcopy=False, states=wanted)

    def _count(self, *states: str) -> int:
        return len(self._trials(*states))

    def finished(self) -> "list[optuna.trial.FrozenTrial]":
        """Trials that need no more work."""
        return self._trials("COMPLETE", "PRUNED")

    def _retry_dead(self) -> None:
        """Ask again for what a killed worker was asked."""
        from optuna.trial import TrialState

        for trial in self._trials("RUNNING") if self.shared else []:
            host, _, process = trial.user_attrs.get("worker", "").partition(" ")
            here = host == socket.gethostname()
            if not _alive(int(process)) if here else _age(trial) > _PATIENCE:
                try:
                    self.study.tell(trial.number, state=TrialState.FAIL)
                except ValueError:  # another worker has seen it too
                    continue
                if None not in self._point(trial) and not self.grid:
                    self._enqueue(self._point(trial))

    def _point(self, trial: "optuna.trial.FrozenTrial") -> Point:
        """What a trial was asked, option by option; None where that isn't known yet."""
        asked = trial.params or trial.system_attrs.get("fixed_params", {})
        return tuple(asked.get(one.key) for one in self.dimensions)

    def _enqueue(self, point: Point) -> None:
        keys = (one.key for one in self.dimensions)
        self.study.enqueue_trial(dict(zip(keys, point, strict=True)))

    def _enqueue_missing(self, count: int) -> None:
        """Enqueue points of the grid that no trial has."""
        trials = self._trials("COMPLETE", "PRUNED", "RUNNING", "WAITING")
        known = {self._point(trial) for trial in trials}
        missing = [point for point in self.grid if point not in known]
        for point in missing[: max(0, count - self._count("WAITING"))]:
            self._enqueue(point)

    def _ask(self, deadline: float) -> "list[tuple[optuna.Trial, Trial]]":
        """A batch of trials and what they are; none where enough are finished or under way."""
        from optuna.trial import TrialState

        wanted = self.total - self._count("COMPLETE", "PRUNED", "RUNNING")
        if time.monotonic() > deadline:
            wanted = 0
        wanted = min(wanted, _BATCH[self.settings.sampler])
        if self.grid:
            self._enqueue_missing(wanted)
        batch = []
        for _ in range(wanted):
            trial = self.study.ask()
            trial.set_user_attr("worker", self.worker)
            batch.append((trial, {one.key: one.suggest(trial) for one in self.dimensions}))
        if self.shared and batch:  # two workers may have asked for the same or the last at once
            surplus = self._surplus()
            for trial, _values in batch:
                if trial.number in surplus:
                    self.study.tell(trial, state=TrialState.FAIL)
            batch = [pair for pair in batch if pair[0].number not in surplus]
        return [(trial, self._trial(values)) for trial, values in batch]

    def _surplus(self) -> set[int]:
        """Numbers of the trials beyond the total, and of those that repeat a point of the grid."""
        trials = self._trials("COMPLETE", "PRUNED", "RUNNING")
        trials.sort(key=lambda trial: trial.number)
        points: set[Point] = set()
        kept, surplus = 0, set()
        for trial in trials:
            point = self._point(trial)
            if kept >= self.total or (self.grid and point in points):
                surplus.add(trial.number)
            else:
                kept += 1
                points.add(point)
        return surplus

    def _tell(self, trial: "optuna.Trial", *values: Any, **state: Any) -> None:
        """Tell, unless another worker has taken this one for dead meanwhile."""
        with contextlib.suppress(ValueError):
            self.study.tell(trial, *values, **state)

    def _trial(self, values: dict[str, Any]) -> Trial:
        head = {key.removeprefix(_HEAD): value for key, value in values.items()}
        loss = head.pop("model.loss", self.model.loss)
        return Trial(replace(self.model.settings, **head), loss)

    def _evaluate(self, batch: "list[tuple[optuna.Trial, Trial]]") -> None:
        metrics = self.settings.metrics
        if self.settings.pruner == "none":
            scores = self.part.scores([one for _, one in batch], metrics).mean(-1)
            for (trial, _), values in zip(batch, scores.tolist(), strict=True):
                self._tell(trial, values)
            return
        self._race(batch)

    def _race(self, batch: "list[tuple[optuna.Trial, Trial]]") -> None:
        """Fold by fold; those that fall behind are fitted to no further one."""
        from optuna.trial import TrialState

        sums = [0.0] * len(batch)
        alive = list(range(len(batch)))
        for fold in range(self.part.count):
            scores = self.part.scores([batch[i][1] for i in alive], self.settings.metrics, fold)
            for index, score in zip(alive, scores.flatten().tolist(), strict=True):
                sums[index] += score
                # Wilcoxon's test pairs the folds of two trials; a median compares running means.
                paired = self.settings.pruner == "wilcoxon"
                batch[index][0].report(score if paired else sums[index] / (fold + 1), fold)
            if fold + 1 == self.part.count:
                break
            for index in list(alive):
                if batch[index][0].should_prune():
                    self._tell(batch[index][0], state=TrialState.PRUNED)
                    alive.remove(index)
            if not alive:
                return
        for index in alive:
            self._tell(batch[index][0], sums[index] / self.part.count)

    # What came out

    def found(self) -> Found:
        """The best values, and all trials as plain numbers."""
        complete = self._trials("COMPLETE")
        best, front = self._best(complete)
        values = {one.key: one.value_of(best.params[one.key]) for one in self.dimensions}
        record = {
            "best": {"number": best.number, "params": values, "values": best.values},
            "front": front,
            "importances": self._importances(complete),
            "trials": [
                {
                    "number": trial.number,
                    "state": trial.state.name.lower(),
                    "params": trial.params,
                    "values": trial.values,
                }
                for trial in self.study.get_trials(deepcopy=False)
            ],
        }
        return Found(self.split.name, values, record)

    def _best(
        self, complete: "list[optuna.trial.FrozenTrial]"
    ) -> "tuple[optuna.trial.FrozenTrial, list[int]]":
        """The best trial, and the numbers of those that none beats in every metric.

        Of a front the best is nearest to the point where each metric is at its best there, in units
        of the front's extent. Ties go to the smaller values, as paper 1's λ does.
        """
        signs = [-1.0 if metric in HIGHER else 1.0 for metric in self.settings.metrics]
        costs = {
            one.number: [sign * value for sign, value in zip(signs, one.values, strict=True)]
            for one in complete
        }
        front = [
            number
            for number, own in costs.items()
            if not any(
                other != own and all(a <= b for a, b in zip(other, own, strict=True))
                for other in costs.values()
            )
        ]
        columns = list(zip(*(costs[number] for number in front), strict=True))
        extents = [(min(column), (max(column) - min(column)) or 1.0) for column in columns]

        def rank(trial: "optuna.trial.FrozenTrial") -> tuple[float, list[Any]]:
            distance = sum(
                ((cost - low) / extent) ** 2
                for cost, (low, extent) in zip(costs[trial.number], extents, strict=True)
            )
            order = [
                one.grid().index(value) if one.choices else value
                for one in self.dimensions
                for value in [trial.params[one.key]]
            ]
            return round(distance, 12), order

        return min((one for one in complete if one.number in front), key=rank), front

    def _importances(self, complete: "list[optuna.trial.FrozenTrial]") -> dict[str, list[float]]:
        """Each option's share in what separates good trials from the rest (PED-ANOVA)."""
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        shares: dict[str, list[float]] = {}
        if len(self.dimensions) < 2 or len(complete) < 10:
            return shares
        for at, metric in enumerate(self.settings.metrics):
            with warnings.catch_warnings():  # that it looks at low values, that trials are equal
                warnings.simplefilter("ignore")
                found = get_param_importances(
                    self.study,
                    evaluator=PedAnovaImportanceEvaluator(),
                    target=functools.partial(_cost, -1.0 if metric in HIGHER else 1.0, at),
                )
            for key, share in found.items():
                shares.setdefault(key, []).append(float(share))
        return shares


def _cost(sign: float, at: int, trial: "optuna.trial.FrozenTrial") -> float:
    return sign * float(trial.values[at])


def _pruner(kind: str) -> Any:
    from optuna import pruners

    if kind == "median":
        return pruners.MedianPruner()
    return pruners.WilcoxonPruner() if kind == "wilcoxon" else pruners.NopPruner()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _age(trial: "optuna.trial.FrozenTrial") -> float:
    from datetime import datetime

    started = trial.datetime_start or datetime.now()
    return (datetime.now() - started).total_seconds()


def study_text(settings: SearchSettings, found: Sequence[Found]) -> str:
    """The best trials of each split, within 80 columns."""
    return "\n".join(line for one in found for line in _lines(settings, one))


def _lines(settings: SearchSettings, found: Found) -> Iterator[str]:
    trials = [trial for trial in found.record["trials"] if trial["state"] == "complete"]
    sign = -1 if settings.metrics[0] in HIGHER else 1
    best = found.record["best"]["number"]
    trials.sort(key=lambda trial: (trial["number"] != best, sign * trial["values"][0]))
    title = "" if found.split == "deploy" else f"{found.split}: "
    yield f"{title}{len(trials)} trials by {', '.join(settings.metrics)}, the chosen one first"
    keys = [key.rpartition(".")[2] for key in settings.space]
    rows = [["trial", *settings.metrics, *keys]]
    rows += [
        [
            str(trial["number"]),
            *(f"{value:.4f}" for value in trial["values"]),
            *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in trial["params"].values()),
        ]
        for trial in trials[:5]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()[:80]
