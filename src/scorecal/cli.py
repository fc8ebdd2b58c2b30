"""The command line: fit, study, validate, test, predict and elicit over one YAML."""

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from scorecal import tracking
from scorecal.calibration.data import ScoreData, with_assistant
from scorecal.calibration.fitted import Fitted, score_interval
from scorecal.calibration.module import NO_ASSISTANT, Calibration
from scorecal.commands import NamedConfigFile, refuse_repeated_keys, run_compare, run_report
from scorecal.evaluation.evidence import (
    Evaluation,
    evaluate,
    held_out_intervals,
    score_shares,
)
from scorecal.evaluation.summary import text, write_run
from scorecal.functional.scaling import expected_score
from scorecal.functional.targets import interpolated_target
from scorecal.judging.dry_run import dry_run as run_dry
from scorecal.judging.dry_run import dry_run_text
from scorecal.judging.elicit import Interrupted, refuse_other_identity
from scorecal.judging.records import check_suffix, replacing, write_records
from scorecal.progress import bar, notice, set_quiet
from scorecal.study import Found, SearchSettings, run_study, study_text

_SEVERAL = {"compare": run_compare, "report": run_report}  # they take several configs or runs
_LARGEST_SEED = 2**32 - 1  # numpy takes no larger one
_SAVED = ("seed_everything", "evaluate_test", "model", "data", "trainer")


class ScoreTrainer(Trainer):
    """Lightning's Trainer with the commands that only score data have.

    The methods here give the command line its arguments; `ScoreCLI` does the work.
    """

    def test(self, model: Any, datamodule: Any, ckpt_path: str = "") -> None:  # type: ignore[override]
        """Evaluate a checkpoint's heads, each on its own held-out rows."""

    def predict(  # type: ignore[override]
        self, model: Any, datamodule: Any, ckpt_path: str = "", output: str = "predictions.jsonl"
    ) -> None:
        """Score new items, or new rows of log-probabilities, with a checkpoint's head.

        Args:
            model: unused.
            datamodule: unused.
            ckpt_path: the run's last.ckpt.
            output: JSONL, CSV or Parquet file, by suffix.
        """

    def elicit(
        self, model: Any, datamodule: Any, dry_run: Literal["text", "json"] | None = None
    ) -> None:
        """Run the judge over the task's items and prior prompts, into a store.

        Args:
            model: unused.
            datamodule: unused.
            dry_run: write nothing; show the prompts exactly as tokenised.
        """

    def study(self, model: Any, datamodule: Any, search: SearchSettings) -> None:
        """Search the head's options on inner folds of dev, then fit and test the best.

        Args:
            model: what isn't searched.
            datamodule: unused.
            search: what is tried, and how.
        """


class _FitBar(Callback):
    """How many of the fits have converged, or how many epochs have passed."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Calibration)
        self._open = contextlib.ExitStack()
        self._progress = self._open.enter_context(bar())
        self._newton = pl_module.solver == "newton"
        total = len(pl_module.waiting) if self._newton else trainer.max_epochs
        self._task = self._progress.add_task("fitting", total=total, done="", rate="")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Calibration)
        done = int((~pl_module.waiting).sum()) if self._newton else trainer.current_epoch + 1
        shown = f"{done} fits" if self._newton else ""
        self._progress.update(self._task, completed=done, done=shown)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if hasattr(self, "_open"):
            self._open.close()


class ScoreCLI(LightningCLI):
    """LightningCLI over `Calibration` and `ScoreData`."""

    trainer: ScoreTrainer
    model: Calibration
    datamodule: ScoreData

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Commands and the arguments that are not the user's to give."""
        loaders = {"train_dataloaders", "val_dataloaders", "dataloaders"}
        common = {"model", "datamodule", *loaders}
        unused = {"weights_only", "verbose"}
        return {
            "fit": common | unused,
            "validate": common | unused,
            "test": common,
            "predict": common,
            "elicit": common,
            "study": common,
        }

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser that raises instead of exiting, and knows shipped configs by name."""
        parser = LightningArgumentParser(exit_on_error=False, **kwargs)
        parser.add_argument(
            "-c",
            "--config",
            action=NamedConfigFile,
            help="A YAML file, or the name of a shipped one. May be given several times.",
        )
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Options that belong to no class."""
        parser.add_argument(
            "--evaluate_test", type=bool, default=True, help="Open the test split after `fit`."
        )
        parser.add_argument(
            "--quiet", type=bool, default=False, help="No progress bars and notices on stderr."
        )

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as given: Lightning lets a checkpoint's values beat it."""

    def _set_seed(self) -> None:
        """Refuse a seed that Lightning would refuse in numpy's words."""
        seed = self._settings()["seed_everything"]
        if not 0 <= seed <= _LARGEST_SEED:
            raise ValueError(
                f"`--seed_everything` must lie within 0 and {_LARGEST_SEED:,}, got {seed}."
            )
        super()._set_seed()

    def _settings(self) -> Namespace:
        return self.config[self.config["subcommand"]]

    # Run directories

    def _run_folder(self) -> Path:
        """The CSV logger's folder, or the next `runs/<task>/version_<n>`."""
        if not hasattr(self, "_folder"):
            if isinstance(self.trainer.logger, CSVLogger):
                _ = self.trainer.logger.experiment  # it empties the folder when it is made
                self._folder = Path(self.trainer.logger.log_dir)
            else:
                parent = Path("runs") / self.datamodule.task.name
                taken = [int(m[1]) for path in parent.glob("version_*")
                         if (m := re.fullmatch(r"version_(\d+)", path.name))]  # fmt: skip
                for number in itertools.count(max(taken, default=-1) + 1):
                    self._folder = parent / f"version_{number}"
                    with contextlib.suppress(FileExistsError):  # another process has just made it
                        self._folder.mkdir(parents=True)
                        break
            self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def _saved_settings(self) -> dict[str, Any]:
        """The configuration that repeats the run."""
        import yaml

        parser = self._parser(self.config["subcommand"])
        dumped = yaml.safe_load(parser.dump(self._settings(), skip_none=False))
        return {name: dumped[name] for name in _SAVED if name in dumped}

    def _save_config(self, folder: Path) -> None:
        subcommand = self.config["subcommand"]
        self._write_config(folder / "config.yaml", subcommand, self._saved_settings())

    def _write_config(self, path: Path, subcommand: str, content: dict[str, Any]) -> None:
        import yaml

        head = f"# python -m train {subcommand} --config {path}\n"
        with replacing(path) as partial:
            partial.write_text(head + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    # fit

    def before_fit(self) -> None:
        """Judge and read the data before a run directory exists: bad input leaves nothing."""
        self._prepare_fit()
        self.trainer.callbacks.append(_FitBar())  # type: ignore[attr-defined]
        tracking.start(self.trainer.loggers, self._saved_settings(), self.datamodule.read())

    def _prepare_fit(self) -> None:
        data, trainer = self.datamodule, self.trainer
        tracking.require_login(trainer.loggers)
        if trainer.world_size != 1 or trainer.max_epochs == 0 or trainer.limit_train_batches == 0:
            raise ValueError(
                "the head is fitted by one process, on all its data, in at least one epoch. Set "
                "`trainer.devices: 1`, and neither `max_epochs` nor `limit_train_batches` to 0."
            )
        if self.model.subtracts and not data.assistant.is_named:
            raise ValueError(NO_ASSISTANT)
        checkpoint = self._settings().get("ckpt_path")
        if checkpoint:
            Fitted.from_checkpoint(str(checkpoint))
        data.prepare_data()
        data.setup("fit")
        tested = data.folds.outer != 0 or "test" in data.read().splits
        if self._settings()["evaluate_test"] and not tested:
            raise ValueError(
                "no test items to evaluate. Add a test split, or set `--data.folds.outer 5`, "
                "or `--evaluate_test false`."
            )
        self.model.build(data)
        if checkpoint:
            saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
            self.model.on_load_checkpoint(saved)

    def fit(self, **arguments: Any) -> None:
        """Train; Lightning exits by itself on Ctrl-C."""
        try:
            self.trainer.fit(**arguments)
        except SystemExit:
            raise Interrupted("stopped while fitting. Run the same command again.") from None

    def before_instantiate_classes(self) -> None:
        """What is built may have something to say already."""
        set_quiet(self._settings()["quiet"])

    def after_instantiate_classes(self) -> None:
        """One seed for all."""
        seed = self._settings()["seed_everything"]
        self.model.seed = 0 if isinstance(seed, bool) else seed
        self.datamodule.needs_test = self._settings()["evaluate_test"]

    def after_fit(self) -> None:
        """Keep the fitted heads, evaluate them, and say what came out."""
        folder = self._run_folder()
        self._save_config(folder)
        with replacing(folder / "last.ckpt") as partial:
            self.trainer.save_checkpoint(partial)
        if self.trainer.loggers:
            self._log_intervals()
        self._report(self.model.require_fitted(), folder, self._settings()["evaluate_test"])
        tracking.log_checkpoint(self.trainer.loggers, folder / "last.ckpt")
        tracking.finish(self.trainer.loggers)

    def _held_out(self) -> tuple[Tensor, Tensor]:
        return self.model.held_out_logits(self.datamodule.batch(self.model.problems))

    def _log_intervals(self) -> None:
        """Log the ends of the intervals of `dev/…`: an optimiser sees how much is noise."""
        found = held_out_intervals(*self._held_out(), self.datamodule.read(), seed=self.model.seed)
        ends = {f"dev/{metric}_low": figure.low for metric, figure in found.items()}
        self._log(ends | {f"dev/{metric}_high": figure.high for metric, figure in found.items()})

    def _log(self, figures: dict[str, float]) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics(figures, step=self.trainer.global_step)
            logger.save()

    def _report(self, fitted: Fitted, folder: Path, evaluate_test: bool) -> None:
        data, table = self.datamodule, self.datamodule.read()
        seed = self.model.seed
        evaluation: Evaluation | None = None
        if evaluate_test:
            assistant = data.assistant_logprobs
            assert assistant is not None
            evaluation = evaluate(fitted, table, assistant, seed=seed)
            logged = {}
            for suffix, method in (("", "calibrated"), ("_raw", "raw")):
                for metric, (point, _, _) in evaluation.methods[method].items():
                    logged[f"test/{metric}{suffix}"] = point
            self._log(logged)
        write_run(folder, evaluation, fitted, table, seed)
        dev = self.trainer.callback_metrics
        names = [name for name in ("dev/spearman", "dev/mse") if name in dev]
        if names:
            shown = (f"{name} {dev[name]:.3f} (raw {dev[f'{name}_raw']:.3f})" for name in names)
            print(f"inner held-out means: {', '.join(shown)}")
        print(text(evaluation, fitted, table))
        print(folder)
        if tracking.wandb_loggers(self.trainer.loggers):
            self._track(fitted, evaluation)

    def _track(self, fitted: Fitted, evaluation: Evaluation | None) -> None:
        table, assistant = self.datamodule.read(), self.datamodule.assistant_logprobs
        assert assistant is not None
        if evaluation is None:
            items, (logits, rows) = "dev, held out", self._held_out()
        else:
            items, rows = "test", fitted.test_rows(table)
            logits = fitted.logits(table.logprobs, assistant)[fitted.evaluated]
        both = {"raw": table.logprobs.expand_as(logits), "calibrated": logits}
        shares = score_shares(both, interpolated_target(table.gold, table.values), rows)
        tracking.log_results(self.trainer.loggers, table, evaluation, shares, shares_of=items)

    # test, validate, predict, elicit

    def test(self, ckpt_path: str, **_: Any) -> None:
        """Evaluate a checkpoint."""
        tracking.require_login(self.trainer.loggers)
        fitted = Fitted.from_checkpoint(ckpt_path)
        self.datamodule.prepare_data()
        self.datamodule.setup("test")
        self._same_scale(fitted)
        table = self.datamodule.read()
        refuse_other_identity(f"checkpoint {ckpt_path!r}", fitted.identity, table.identity)
        fitted.test_rows(table)
        tracking.start(self.trainer.loggers, self._saved_settings(), table)
        folder = self._run_folder()
        self._save_config(folder)
        self._report(fitted, folder, True)
        tracking.finish(self.trainer.loggers)

    def before_validate(self) -> None:
        """Read the data first, as in `before_fit`."""
        if not self._settings().get("ckpt_path"):
            raise ValueError("no checkpoint is named. Set `--ckpt_path` to a run's last.ckpt.")
        self.before_fit()

    def _same_scale(self, fitted: Fitted) -> None:
        labels = list(self.datamodule.task.one_scale().labels)
        if labels != fitted.labels or list(self.datamodule.task.values()) != fitted.values.tolist():
            raise ValueError(
                f"the checkpoint was fitted on the labels {', '.join(fitted.labels)}, the task's "
                f"are {', '.join(labels)}. Set `--data.task.scale` and `gold_range`."
            )

    def predict(self, ckpt_path: str, output: str, **_: Any) -> None:
        """Score new items."""
        target = Path(output)
        check_suffix(target)
        fitted = Fitted.from_checkpoint(ckpt_path)
        self._same_scale(fitted)
        data, subtracts = self.datamodule, fitted.heads.contrast[fitted.deploy] != 0
        if subtracts:  # before anything is judged
            data.require_assistant_of_new_items()
        owner = f"checkpoint {ckpt_path!r}"
        alone = {name: has for name, has in fitted.identity.items() if name != "assistant"}
        table, other = data.new_table(lambda named: refuse_other_identity(owner, alone, named))
        assistant = torch.zeros_like(table.logprobs)
        if other is not None:
            assistant = table.add_assistant(other)
            table.identity = with_assistant(table.identity, other)
        if table.identity or not fitted.identity:
            refuse_other_identity(owner, fitted.identity, table.identity)
        else:
            notice("these log-probabilities don't say which judge gave them")
        logits = fitted.logits(table.logprobs, assistant)[fitted.deploy]
        probabilities = logits.softmax(-1)
        score = expected_score(logits, fitted.values)
        low, high = score_interval(logits, table.censored, fitted.values)
        rows = []
        for index, key in enumerate(table.ids):
            mass = table.label_mass[index].item()
            row: dict[str, Any] = {"id": key, "score": score[index].item()}
            if table.censored.any():
                row |= {"score_low": low[index].item(), "score_high": high[index].item()}
            row |= {
                f"p_{label}": probabilities[index, level].item()
                for level, label in enumerate(fitted.labels)
            }
            row["label_mass"] = None if mass != mass else mass
            row["most_likely"] = fitted.labels[int(logits[index].argmax())]
            rows.append(row)
        write_records(target, rows)
        print(target)

    def elicit(self, dry_run: str | None, **_: Any) -> None:
        """Fill a store, or show what would be asked."""
        data = self.datamodule
        if dry_run is None:
            ranks = self.trainer if self.trainer.world_size > 1 else None
            stores = data.elicit(ranks=ranks)
            if self.trainer.is_global_zero:
                print("\n".join(str(store.folder) for store in stores))
            return
        judge = data.named_judge()
        if judge is None:
            raise ValueError("no judge is named. Set `--data.judge.model` to a folder or a hub id.")
        asked, _items, questions = data.questions()
        shown = run_dry(
            judge, data.task, asked, questions, truncate=data.truncate, samples=data.samples,
            contrasted=data.assistant.contrasted(data.task),
        )  # fmt: skip
        print(json.dumps(shown) if dry_run == "json" else dry_run_text(shown))

    # study

    def before_study(self) -> None:
        """Check what the best trial's `fit` needs, before the search."""
        self._prepare_fit()

    def study(self, search: SearchSettings, **_: Any) -> None:
        """Search, then let `fit` do the rest."""
        outcome = run_study(search, self.model, self.datamodule)
        if outcome is None:
            print("all trials are finished; the worker that finished last fits the best")
            return
        folder = Path("runs") / self.datamodule.task.name / f"study-{search.name}"
        folder.mkdir(parents=True, exist_ok=True)
        best, content = folder / "best.yaml", _with_found(self._saved_settings(), outcome.found)
        splits = {one.split: one.record for one in outcome.found}
        run = Path(outcome.run) if outcome.run else None
        if run is not None and not _is_fit_of(run, content):
            run = None
        self._write_config(best, "fit", content)
        record = {**asdict(search), "run": run and _from(folder, run), "splits": splits}
        _write_study(folder, record)
        print(study_text(search, outcome.found))
        if run is not None:
            print(f"finished before: {os.path.relpath(run)}")
            return
        quiet = str(self._settings()["quiet"]).lower()
        run = run_cli(["fit", "--config", str(best), "--quiet", quiet])._run_folder().resolve()
        outcome.keep_run(run)
        _write_study(folder, {**record, "run": _from(folder, run)})
        print(best)


def _from(folder: Path, run: Path) -> str:
    """A run as seen from a study's folder, so that both can be moved together."""
    return os.path.relpath(run, folder.resolve())


def _is_fit_of(run: Path, content: dict[str, Any]) -> bool:
    """Whether a folder holds the fit of a configuration."""
    import yaml

    try:
        return bool(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) == content)
    except (OSError, ValueError, yaml.YAMLError):
        return False


def _write_study(folder: Path, content: dict[str, Any]) -> None:
    with replacing(folder / "study.json") as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _with_found(config: dict[str, Any], found: list[Found]) -> dict[str, Any]:
    """A configuration with the chosen values, in `per_split` where splits chose their own."""
    if len(found) > 1:
        config["model"]["per_split"] = {
            one.split: {key.rpartition(".")[2]: value for key, value in one.values.items()}
            for one in found
        }
        return config
    for key, value in found[0].values.items():
        *path, name = key.split(".")
        section = config
        for part in path:
            section = section[part]
        section[name] = value
    return config


def _quiet() -> None:
    """Drop what Lightning says about hardware and loaders; a fit takes a second."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in (
        r".*does not have many workers.*",
        r".*configure_optimizers` returned `None`.*",
        r".*number of training batches.*",
        r".*lr_scheduler.*",
        r".*isinstance.treespec.*",
        r".*LightningCLI's args parameter.*",
    ):
        warnings.filterwarnings("ignore", message=message)


# jsonargparse lists every type that a value has failed to be, and every reason.
_NO_SUCH_FORM = re.compile(
    r'Parser key "(?P<key>[^"]+)": Does not validate against any of the Union subtypes '
    r"Subtypes: \[(?P<types>.*?)\] Errors: (?P<errors>.*) Given value type: .*"
    r"Given value: (?P<given>.*)"
)
_OF_CLASS = re.compile(r"- Problem with given class_path '([^']*)': (.*?)(?: - Expected a .*)?")
_NESTED = re.compile(r"NestedArg\(key='(.*?)', val=.*\)")


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) or repr(error)
    if (form := _NO_SUCH_FORM.fullmatch(text)) is None:
        return text
    key, given = form["key"], form["given"]
    if problem := _OF_CLASS.fullmatch(form["errors"]):
        return f"`{key}`, of {problem[1]}: {_plain_types(problem[2])}"
    if nested := _NESTED.fullmatch(given):
        return (
            f"`{key}.{nested[1]}` is set, but `{key}` names no class. Name one before it, e.g. "
            f"`--{key} scorecal.TransformersJudge`."
        )
    return f"`{key}` can't be {given}. It takes {_plain_types(form['types'])}."


def _plain_types(text: str) -> str:
    return re.sub(r"<class '([^']*)'>", r"\1", text).replace("typing.", "")


def run_cli(arguments: list[str] | None) -> ScoreCLI:
    """One command of `ScoreCLI`; None: those that were typed."""
    return ScoreCLI(
        Calibration,
        ScoreData,
        trainer_class=ScoreTrainer,
        save_config_callback=None,
        seed_everything_default=0,
        trainer_defaults={
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
        },
        load_from_checkpoint_support=False,
        args=arguments,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run a command: exit status 0, 2 for bad input, 1 for a fault of ours."""
    given = sys.argv if arguments is None else arguments
    if debug := "--debug" in given:
        given.remove("--debug")
    _quiet()
    set_quiet(False)
    try:
        typed = given[1:] if arguments is None else given
        for word in typed:
            if (value := word.partition("=")[2] if word.startswith("--") else word)[:1] == "{":
                refuse_repeated_keys(f"argument {value!r}", value)
        if typed and typed[0] in _SEVERAL:
            _SEVERAL[typed[0]](typed[1:])
            return
        run_cli(arguments)
        return
    except (ValueError, ArgumentError, MisconfigurationException) as error:
        status, message = 2, _one_line(error)
        cause: BaseException = error
    except KeyboardInterrupt as error:
        status, message, cause = 2, _one_line(error) if str(error) else "stopped.", error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        status, cause = 2, error
        message = f"{_one_line(error)}." + (" Free some space, then run it again." if full else "")
    except Exception as error:  # a fault of ours: one line too, unless asked for more
        status, cause = 1, error
        message = f"fault: {type(error).__name__}: {_one_line(error)} (`--debug` shows where)"
    if debug:
        import traceback

        traceback.print_exception(cause)
    sys.stderr.write(f"scorecal: {message}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    sys.exit(status)
