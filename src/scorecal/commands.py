"""Commands that take several configs or runs, so that LightningCLI would be in the way."""

import contextlib
import json
import math
import os
import re
import shlex
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace

from scorecal import resources
from scorecal.calibration.data import Assistant, ScoreData, as_assistant
from scorecal.calibration.fitted import Fitted
from scorecal.calibration.module import Calibration
from scorecal.evaluation.blocks import Part, markdown
from scorecal.evaluation.compare import Case, compare
from scorecal.evaluation.diagnosis import case_record
from scorecal.evaluation.drawing import NoFigures
from scorecal.evaluation.evidence import RESAMPLES
from scorecal.evaluation.learning import learning_record
from scorecal.evaluation.page import written
from scorecal.evaluation.presentation import draw, tables
from scorecal.evaluation.ranges import ranges_record
from scorecal.evaluation.report import (
    comparison_part,
    read_study,
    run_part,
    runs_part,
)
from scorecal.evaluation.runs import Run, read_results
from scorecal.judging.elicit import STORES, refuse_other_identity
from scorecal.judging.records import read_records, replacing
from scorecal.judging.store import Store
from scorecal.judging.table import Table, load_assistant, table_from_store
from scorecal.judging.task import load_items
from scorecal.progress import notice, set_quiet

_SECTIONS = {
    "model", "model.head", "data", "data.task", "data.folds", "data.assistant", "trainer",
    *(f"data.task.{name}" for name in ("name", "template", "fields", "splits", "scale")),
}  # fmt: skip
_KINDS = ("configs", "sweeps")
_BOUNDS = {"resamples": (100, 100_000), "draws": (0, 1000), "seed": (0, 2**62)}


class NamedConfigFile(ActionConfigFile):
    """`--config sts.yaml` finds the shipped file of that name."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: Any = None) -> None:
        """Resolve the name, then read the file."""
        if isinstance(values, str):
            names = [(kind, name) for kind in _KINDS for name in (values, f"{values}.yaml")]
            found = next((path for pair in names if (path := resources.find(*pair))), None)
            if found is None:
                shipped = ", ".join(resources.names("configs", "*.yaml"))
                raise ValueError(f"no config {values!r}. Name a YAML file or one of: {shipped}.")
            try:
                text = found.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                raise ValueError(f"config {values!r} is not UTF-8.") from None
            refuse_repeated_keys(f"config {values!r}", text)
            content = _loaded(text)
            _refuse_empty_sections(values, content)
            if isinstance(content, dict) and "search" in content and "search" not in parser.groups:
                raise ValueError(
                    f"config {values!r} has `search`, which only `study` reads. Name a task's "
                    "config, e.g. sts.yaml, or run `study`."
                )
            values = str(found)
        super().__call__(parser, cfg, values, option_string)


def refuse_repeated_keys(where: str, text: str) -> None:
    """Raise ValueError where a key stands twice: YAML would take the last without a word."""
    import yaml

    with contextlib.suppress(yaml.YAMLError):  # which the parser tells better
        nodes = [yaml.compose(text)]
        while nodes:
            node = nodes.pop()
            if isinstance(node, yaml.SequenceNode):
                nodes += node.value
            elif isinstance(node, yaml.MappingNode):
                seen = set()
                for key, value in node.value:
                    if str(key.value) in seen:
                        raise ValueError(
                            f"{where} line {key.start_mark.line + 1}: the key {key.value!r} stands "
                            "twice. Take one out."
                        )
                    seen.add(str(key.value))
                    nodes.append(value)


def _loaded(text: str) -> Any:
    """What a YAML text holds; None where it is broken, which the parser tells better."""
    import yaml

    with contextlib.suppress(yaml.YAMLError):
        return yaml.safe_load(text)
    return None


def _refuse_empty_sections(name: str, content: Any) -> None:
    """Raise ValueError where a section that has no null is null."""
    stack = [("", content)]
    while stack:
        above, section = stack.pop()
        for key, value in section.items() if isinstance(section, dict) else ():
            if value is None and f"{above}{key}" in _SECTIONS:
                raise ValueError(
                    f"`{above}{key}` is empty in config {name!r}. Fill it, or take it out."
                )
            stack.append((f"{above}{key}.", value))


def compare_parser() -> ArgumentParser:
    """Arguments of `compare`."""
    parser = ArgumentParser(
        prog="compare",
        exit_on_error=False,
        description="Every method on every judge and task: tables, figures, learning curves. "
        "`--data.…`, as of `fit`, holds for all configs: `--data.task.gold fluency`.",
    )
    parser.add_argument(
        "-c", "--config", nargs="+", action="extend", required=True, type=str,
        help="One YAML a task.",
    )  # fmt: skip
    parser.add_argument(
        "--table",
        nargs="+",
        action="extend",
        type=str,
        default=[],
        help="More stores or shipped tables, of other judges on these tasks.",
    )
    parser.add_argument(
        "--assistant",
        nargs="+",
        action="extend",
        type=str,
        default=[],
        help="Stores or shipped tables of judges that are subtracted from the others (paper 2).",
    )
    parser.add_argument("--output", type=str, default="compare", help="Folder of what is written.")
    parser.add_argument("--seed", type=int, default=0, help="Of folds, draws and resamples.")
    parser.add_argument("--resamples", type=int, default=RESAMPLES, help="Of the bootstrap.")
    parser.add_argument(
        "--draws", type=int, default=50, help="Dev sets a learning curve averages over; 0: none."
    )
    _add_quiet(parser)
    return parser


def _add_quiet(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--quiet", type=bool, default=False, help="No progress bars and notices on stderr."
    )


def _output_folder(named: str, *files: str) -> Path:
    """The folder of what is written, which need not be there yet.

    Raises:
        ValueError: a file stands in its way, or a folder in that of one of the files.
    """
    folder = Path(named)
    for path in (folder, *folder.parents):
        if not named or (path.exists() and not path.is_dir()):
            below = "" if path == folder else f": {str(path)!r} is a file"
            raise ValueError(f"`--output` {named!r} is no folder{below}. Name one.")
    for path in (folder / name for name in files):
        if path.is_dir():
            raise ValueError(
                f"{str(path)!r} is a folder, but a file is to be written there. Move it away, or "
                "name another `--output`."
            )
    return folder


def read_comparison(arguments: list[str]) -> tuple[Namespace, list[ScoreData]]:
    """What `compare` was given, and the data of its configs with the changes that were typed."""
    own: list[str] = []
    changes: list[str] = []
    words = own
    for word in arguments:
        if word.startswith("--") or word == "-c":  # its values follow
            words = changes if word.startswith("--data.") else own
        words.append(word)
    given = compare_parser().parse_args(own)
    return given, [read_data(name, changes) for name in given.config]


def run_compare(arguments: list[str]) -> None:
    """Write `tables.md`, `tables.json` and the figures of a comparison."""
    given, sources = read_comparison(arguments)
    set_quiet(given.quiet)
    for name, (low, high) in _BOUNDS.items():
        if not low <= getattr(given, name) <= high:
            raise ValueError(
                f"`--{name}` must lie within {low:,} and {high:,}, got {getattr(given, name)}."
            )
    folder = _output_folder(given.output, "tables.md", "tables.json")
    cases = _cases(sources, given.table, given.assistant, given.seed)
    folder.mkdir(parents=True, exist_ok=True)  # a place that can't be written shows here
    for partial in folder.glob(".*.partial"):  # of a run that was killed
        partial.unlink()
    tasks: dict[str, list[dict[str, Any]]] = {}
    for number, on_scales in enumerate(cases, 1):
        started, case = time.monotonic(), on_scales[0]
        notice(f"{case.task}: {case.judge}")
        if len(on_scales) > 1:
            found = ranges_record(on_scales, seed=given.seed, resamples=given.resamples)
        else:
            found = case_record(compare(case, seed=given.seed, resamples=given.resamples))
        record = {
            "title": case.judge,
            "slug": f"{number}-{re.sub(r'[^a-z0-9.]+', '-', case.judge.lower())}".strip("-"),
            **found,
        }
        notice(f"  tables: {time.monotonic() - started:.0f} s")
        if given.draws and len(on_scales) == 1:
            started = time.monotonic()
            record["learning"] = learning_record(
                case, draws=given.draws, resamples=given.resamples, seed=given.seed
            )
            notice(f"  learning curve: {time.monotonic() - started:.0f} s")
        tasks.setdefault(case.task, []).append(record)
    about = {
        "command": "python -m train compare " + shlex.join(arguments),
        "version": version("scorecal"),
        "seed": given.seed,
        "resamples": given.resamples,
        "draws": given.draws,
    }
    written = _write(folder, tasks, about)
    print("\n".join(map(str, written)))


def _write(
    folder: Path, tasks: dict[str, list[dict[str, Any]]], about: dict[str, Any]
) -> list[Path]:
    texts = {
        "tables.md": markdown(tables(tasks, about)),
        "tables.json": json.dumps(_without_nan({**about, "tasks": tasks}), indent=1) + "\n",
    }
    for name, text in texts.items():
        with replacing(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    written = [folder / name for name in texts]
    try:
        written += draw(tasks, folder)
    except NoFigures as error:  # the tables are worth having without the figures
        notice(f"no figures: {error}")
    return written


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return value


def _cases(
    sources: list[ScoreData], tables: list[str], assistants: list[str], seed: int
) -> list[list[Case]]:
    """Every config's own table, and the further ones of its task; each on all scales of the task.

    Raises:
        ValueError: two configs name one task, a table belongs to none of them, or can't be divided.
    """
    names = [data.task.name for data in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two configs have the task {name!r}. Name other judges' stores with `--table`."
            )
    own = {
        folder.resolve()
        for data in sources
        if data.table_name and (folder := resources.find("tables", data.table_name, Path.is_dir))
    }
    further = _of_tasks("--table", tables, names)
    for table in (name for found in further.values() for name in found):
        folder = resources.find("tables", table, Path.is_dir)
        if folder is not None and folder.resolve() in own:
            raise ValueError(f"table {table!r} is named twice. Take one out of `--table`.")
    subtracted = _of_tasks("--assistant", assistants, names)
    cases: list[list[Case]] = []
    for data in sources:
        scales, task = data.task.scales, data.task
        of_task: list[list[Case]] = []
        data.needs_test = True
        data.prepare_data()
        others = {
            scale: [load_assistant(name, task.on(scale)) for name in subtracted[task.name]]
            for scale in scales
        }
        for name in ["", *further[task.name]]:
            if name:
                data.use_table(name)
            on_scales = []
            for scale in scales:
                data.task = task
                data.use_scale(scale)
                data.setup("fit")
                _assist(data.read(), others[scale])
                on_scales.append(Case.of(task.name, data.read(), data.folds, seed, scale))
            title = on_scales[0].judge
            if (names_known := [other[0].judge for other in of_task]).count(title):
                title = f"{title} ({on_scales[0].table.name})"
            if names_known.count(title):
                title = f"{title} {len(of_task) + 1}"
            for case in on_scales:
                case.judge = title
            of_task.append(on_scales)
        cases += of_task
    return cases


def _of_tasks(option: str, tables: list[str], names: list[str]) -> dict[str, list[str]]:
    """Stores and shipped tables by their tasks.

    Raises:
        ValueError: one is named twice, isn't there, or is of none of the tasks.
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    for table in tables:
        folder = resources.find("tables", table, Path.is_dir)
        if folder is None:
            raise ValueError(f"no store or shipped table {table!r}. Check `{option}`.")
        task = Store(folder).manifest()["task"]
        if table in found.get(task, []):
            raise ValueError(f"table {table!r} is named twice. Take one out of `{option}`.")
        if task not in found:
            raise ValueError(
                f"table {table!r} is of the task {task!r}, the configs are of "
                f"{', '.join(names)}. Add its config."
            )
        found[task].append(table)
    return found


def _assist(table: Table, assistants: list[Table]) -> None:
    """Let a judge be contrasted with all assistants, each once, but not with itself."""
    itself, has = as_assistant(table.identity), table.identity.get("assistant")
    if has == itself:  # the one assistant of a config is for every judge of its task
        table.assistants.clear()
    for other in assistants:
        if as_assistant(other.identity) not in (itself, has):
            table.add_assistant(other)


def _config_parser() -> ArgumentParser:
    """Arguments of a config, without its model."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action=NamedConfigFile)
    parser.add_argument("--seed_everything", type=Any)
    parser.add_argument("--evaluate_test", type=Any)
    parser.add_argument("--quiet", type=Any)
    parser.add_argument("--trainer", type=Any)
    parser.add_class_arguments(ScoreData, "data")
    return parser


def read_data(config: str, changes: Sequence[str] = ()) -> ScoreData:
    """The data that a config describes; its model and trainer are not looked at.

    Args:
        config: a file, or the name of a shipped one.
        changes: arguments of `--data`, as they are typed.
    """
    parser = _config_parser()
    parser.add_argument("--model", type=Any)
    return parser.instantiate_classes(parser.parse_args(["--config", config, *changes])).data


def _read_run_config(config: str) -> tuple[ScoreData, Calibration]:
    """The data and the model that a run's config describes.

    Raises:
        ValueError: it is damaged.
    """
    parser = _config_parser()
    parser.add_class_arguments(Calibration, "model")
    try:
        made = parser.instantiate_classes(parser.parse_args(["--config", config]))
    except (ArgumentError, ValueError) as error:
        reason = str(error).rstrip(".: \n")
        raise ValueError(f"a run's {config!r} is damaged: {reason}. Fit again.") from None
    return made.data, made.model


# report


def report_parser() -> ArgumentParser:
    """Arguments of `report`."""
    parser = ArgumentParser(
        prog="report", exit_on_error=False, description="Runs, studies and comparisons as one page."
    )
    parser.add_argument(
        "--runs", nargs="+", action="extend", required=True, type=str,
        help="Folders that `fit`, `study` or `compare` wrote.",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=str, default="", help="Folder of the page; default: report/ in the first."
    )
    parser.add_argument(
        "--show_text", type=bool, default=False,
        help="Show the text of the items that moved most, from the local data file.",
    )  # fmt: skip
    _add_quiet(parser)
    return parser


def run_report(arguments: list[str]) -> None:
    """Write `report.html`, `report.md` and the figures of runs and comparisons."""
    given = report_parser().parse_args(arguments)
    set_quiet(given.quiet)
    folders = [Path(name) for name in given.runs]
    for folder in folders:
        if [other.resolve() for other in folders].count(folder.resolve()) > 1:
            raise ValueError(f"folder {str(folder)!r} is named twice. Take one out of `--runs`.")
    runs: list[Run] = []
    parts: list[Part] = []
    shown: set[Path] = set()
    for number, folder in enumerate(folders, 1):
        prefix = f"{number}_" if len(folders) > 1 else ""
        notice(f"{folder}")
        run: Path | None = None
        more: list[Part] = []
        if (folder / "tables.json").is_file():
            more.append(comparison_part(folder, prefix))
        elif (folder / "results.json").is_file():
            run = folder
        elif (folder / "study.json").is_file():
            study, part = read_study(folder, prefix)
            run = _run_of(study, folder)
            more.append(part)
        else:
            raise ValueError(
                f"{str(folder)!r} holds no results.json of `fit`, study.json of `study` or "
                "tables.json of `compare`. Name a folder that one of them wrote."
            )
        if run and run.resolve() not in shown:  # a run may be named beside its study
            shown.add(run.resolve())
            runs.append(_read_run(run, show_text=given.show_text))
            parts.append(run_part(runs[-1], prefix))
        parts += more
    if len(runs) > 1:
        parts.insert(0, runs_part(runs))
    named = given.output or str(folders[0] / "report")
    output = _output_folder(named, "report.md", "report.html")
    typed = "python -m train report " + shlex.join(arguments)
    about = f"Written by scorecal {version('scorecal')}: `{typed}`"
    print("\n".join(map(str, written(output, "Calibration report", parts, about))))


def _run_of(study: dict[str, Any], folder: Path) -> Path:
    """The run directory of a study's best trial.

    Raises:
        ValueError: it isn't there, or is another run by now.
    """
    run = Path(os.path.relpath(folder / study["run"]))
    if not (run / "config.yaml").is_file():
        raise ValueError(
            f"the run {str(run)!r} of study {str(folder)!r} is gone. Run `study` again."
        )
    _, model = _read_run_config(str(run / "config.yaml"))
    splits = study["splits"]
    for split, (settings, loss) in model.settings_per_split(list(splits)).items():
        made = {f"model.head.{key}": value for key, value in vars(settings).items()}
        made["model.loss"] = loss
        for key, value in splits[split]["best"]["params"].items():
            if str(made[key]) != str(value):
                raise ValueError(
                    f"the run {str(run)!r} is not the fit to the best trial of study "
                    f"{str(folder)!r}: its `{key}` is {made[key]}, not {value}. Run `study` again."
                )
    return run


def _read_run(folder: Path, *, show_text: bool) -> Run:
    """A run with its data read again, its judge not asked again.

    Raises:
        ValueError: a file of the run is missing, or its data can't be found or has changed.
    """
    results = read_results(folder)
    config = folder / "config.yaml"
    for path in (config, folder / "last.ckpt"):
        if not path.is_file():
            raise ValueError(f"run {str(folder)!r} has no {path.name}. Name a folder of `fit`.")
    fitted = Fitted.from_checkpoint(str(folder / "last.ckpt"))
    data, model = _read_run_config(str(config))
    texts = _texts(data, folder) if show_text else {}
    wanted = dict(fitted.identity)
    its = wanted.pop("assistant", None)
    if data.named_judge() is not None:
        data.use_table(_store_of(data, data.store, fitted.ids, wanted, folder))
    if data.assistant.named_judge() is not None and its:
        wanted |= json.loads(its)
        store = _store_of(data, data.assistant.store, fitted.ids, wanted, folder)
        data.assistant = Assistant(store)
    data.setup("fit")
    table = data.read()
    refuse_other_identity(f"run {str(folder)!r}", fitted.identity, table.identity)
    if table.ids != fitted.ids:
        raise ValueError(
            f"the items of {table.name!r} are not those that run {str(folder)!r} was fitted on. "
            "Fit again."
        )
    gold = dict(zip(table.ids, table.gold.tolist(), strict=True))
    for row in read_records(folder / "scores.parquet"):
        if gold[row["id"]] != row["gold"]:
            raise ValueError(
                f"item {row['id']!r} of {table.name!r} has the gold score {gold[row['id']]:g}, but "
                f"run {str(folder)!r} was evaluated on {row['gold']:g}. Fit again."
            )
    assert data.assistant_logprobs is not None
    settings, loss = model.settings_per_split(fitted.names)["deploy"]
    command = config.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return Run(
        str(folder), command, results, fitted, data.task, data.path, table,
        data.assistant_logprobs, data.folds, settings, loss, texts,
    )  # fmt: skip


def _store_of(
    data: ScoreData, named: str, ids: list[str], identity: dict[str, str], run: Path
) -> str:
    """The store that a run's judge or its assistant filled."""
    folders = [Path(named)] if named else sorted(STORES.glob(f"{data.task.name}-*"))
    for folder in folders:
        store = Store(folder)
        if store.is_complete and set(ids) <= set(store.items()["id"].to_pylist()):
            with contextlib.suppress(ValueError):  # of another scale, or asked in other words
                if table_from_store(store, data.task).identity == identity:
                    return str(folder)
    raise ValueError(
        f"the store of run {str(run)!r} is not in {str(folders[0] if named else STORES)!r}. "
        "Run `report` in the folder in which `fit` ran, or fit again."
    )


def _texts(data: ScoreData, run: Path) -> dict[str, str]:
    """Each item's text by its id, from a local file only."""
    task = data.task
    if not data.path and resources.find("configs", task.source, Path.exists) is None:
        raise ValueError(
            f"run {str(run)!r} names no local data file whose text could be shown. "
            "Leave `--show_text` out, or fit with `--data.path`."
        )
    return {item.id: " · ".join(item.fields.values()) for item in load_items(task, data.path)}
