"""Weights & Biases without a server: what an offline run holds, and that sweeps run our command."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from PIL import Image
from test_commands import logprob_rows

from scorecal.calibration.fitted import Fitted

ROOT = Path(__file__).parents[1]
SWEEPS = sorted((ROOT / "sweeps").glob("wandb_*.yaml"))
TRACKED = ["fit", "--config", "sts.yaml", "--config", "wandb.yaml"]
OFFLINE = ["--trainer.logger.init_args.offline", "true"]
each_sweep = pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
# What `sweeps` and `wandb_workspaces` say when they are imported.
old_pydantic = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Neither a key nor a mode, and nothing of W&B's left in this process."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield
    wandb.finish()
    wandb.teardown()


def own_rows(folder: Path) -> list[object]:
    """Arguments that fit log-probabilities of one's own, which take no time."""
    rows = "".join(json.dumps(row) + "\n" for row in logprob_rows())
    (folder / "mine.jsonl").write_text(rows)
    return ["--data.table", "mine.jsonl", "--model.head.prior", "batch"]


def records(path: Path) -> Iterator[Any]:
    """Records of a `.wandb` file: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block is padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


class Run(NamedTuple):
    """An offline run as its files tell it."""

    folder: Path
    files: Path
    history: dict[str, Any]
    config: dict[str, Any]
    artifacts: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`fit --config sts.yaml --config wandb.yaml`, offline."""
    folder = tmp_path_factory.mktemp("offline")
    environment = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    environment |= {"HOME": str(folder), "WANDB_SILENT": "true"}
    environment.pop("PYTHONWARNINGS", None)
    finished = subprocess.run(
        [sys.executable, "-m", "train", *TRACKED, *OFFLINE],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    [path] = (folder / "runs" / "wandb").glob("offline-run-*/run-*.wandb")
    history: dict[str, Any] = {}
    config: dict[str, Any] = {}
    artifacts: dict[str, Any] = {}
    for record in records(path):
        for item in record.history.item:
            key, *inner = item.nested_key
            value = json.loads(item.value_json)
            if inner:
                history.setdefault(key, {})[inner[0]] = value
            else:
                history[key] = value
        config |= {item.key: json.loads(item.value_json) for item in record.config.update}
        if record.HasField("artifact"):
            artifacts[record.artifact.type] = record.artifact
    return Run(
        folder / finished.stdout.splitlines()[-1], path.parent / "files", history, config, artifacts
    )


def test_metrics_of_dev_and_test_are_those_of_the_run(run: Run) -> None:
    results = json.loads((run.folder / "results.json").read_text())
    for metric, figure in results["calibrated"].items():
        assert run.history[f"test/{metric}"] == figure["estimate"]
        assert run.history[f"test/{metric}_raw"] == results["raw"][metric]["estimate"]
    for metric in ("spearman", "mse"):
        low, high = (run.history[f"dev/{metric}_{end}"] for end in ("low", "high"))
        assert low < run.history[f"dev/{metric}"] < high


def test_the_whole_config_and_the_store_are_kept(run: Run) -> None:
    saved = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert {name: run.config[name] for name in saved} == saved
    table = ROOT / "src/scorecal/tables/stsb-qwen2.5-coder-1.5b-gguf"
    identity = json.loads((table / "manifest.json").read_text())["identity"]
    assert run.config["store"] == {"table": table.name, **identity}


def test_the_comparison_is_a_table(run: Run) -> None:
    logged = json.loads((run.files / run.history["comparison"]["path"]).read_text())
    assert logged["columns"] == [
        "metric", "raw", "calibrated", "difference", "constant", "ridge reference",
    ]  # fmt: skip
    results = json.loads((run.folder / "results.json").read_text())
    rows = {row[0]: row[1:] for row in logged["data"]}
    for column, method in enumerate(("raw", "calibrated", "gain", "constant", "reference")):
        cell = rows["MSE ↓"][column]
        assert cell.startswith(f"{results[method]['mse']['estimate']:{'+' * (column == 2)}.3f} [")


def test_the_figures_are_pictures(run: Run) -> None:
    for name in ("latent_bias", "score_shares"):
        logged = run.history[f"figures/{name}"]
        with Image.open(run.files / logged["path"]) as picture:
            assert picture.size == (logged["width"], logged["height"])
            assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 8


def test_the_checkpoint_is_an_artifact_that_predicts(run: Run, tmp_path: Path) -> None:
    [content] = run.artifacts["model"].manifest.contents
    assert content.path == "last.ckpt"
    kept = Path(content.local_path).read_bytes()
    assert kept == (run.folder / "last.ckpt").read_bytes()
    (tmp_path / "kept.ckpt").write_bytes(kept)
    assert Fitted.from_checkpoint(str(tmp_path / "kept.ckpt")).names == ["deploy"]


@pytest.mark.parametrize("quiet", ["false", "true"])
@pytest.mark.usefixtures("no_key")
def test_without_a_key_nothing_is_fitted_or_written(
    quiet: str, command: Any, tmp_path: Path
) -> None:
    finished = command(*TRACKED, "--quiet", quiet)
    assert finished.status == 2
    [line] = finished.err.splitlines()
    assert line.startswith("scorecal: W&B has no API key. Run `wandb login`, or set `--trainer.")
    assert finished.out == ""
    assert list(tmp_path.iterdir()) == []


def test_quiet_silences_wandb_too(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    environment |= {"HOME": str(tmp_path)}
    environment.pop("PYTHONWARNINGS", None)
    finished = subprocess.run(
        [sys.executable, "-m", "train", *TRACKED, *OFFLINE, *own_rows(tmp_path), "--quiet", "true"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "wandb" not in finished.stdout
    assert len(list((tmp_path / "runs/wandb").glob("offline-run-*"))) == 1


@pytest.mark.usefixtures("no_key")
def test_disabled_and_without_matplotlib_a_run_lacks_nothing_but_figures(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    finished = command(*TRACKED, *own_rows(tmp_path))
    assert finished.status == 0, finished.err
    assert "no figures logged: figures need matplotlib" in finished.err
    assert (tmp_path / "runs/sts/version_0/last.ckpt").is_file()
    assert not (tmp_path / "runs/wandb").exists()


# wandb leaves the sweep's file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("no_key")
def test_a_value_that_a_sweep_searches_can_not_be_learned_too(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "searched.yaml").write_text("wandb_version: 1\nmodel.head.strength: {value: 0.7}\n")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", "searched.yaml")
    finished = command(*TRACKED, *own_rows(tmp_path), "--model.head.strength=0.7")
    assert finished.status == 2
    assert "Take 'strength' out of `learn`" in finished.err
    assert not (tmp_path / "runs/sts").exists()


def test_two_processes_do_not_share_a_folder(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "runs/sts/version_0").mkdir(parents=True)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # as if it had come a moment later
    more = ["--trainer.logger", "false"]
    finished = command("fit", "--config", "sts.yaml", *own_rows(tmp_path), *more)
    assert finished.status == 0, finished.err
    assert finished.out.splitlines()[-1] == "runs/sts/version_1"


def test_a_fit_without_wandb_does_not_import_it(tmp_path: Path) -> None:
    code = "import sys; from scorecal.cli import main; main(); print('wandb' in sys.modules)"
    arguments = ["fit", "--config", "sts.yaml", *own_rows(tmp_path)]
    finished = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert finished.stdout.splitlines()[-1] == "False"


# Sweeps


@old_pydantic
@each_sweep
def test_a_sweep_keeps_to_wandbs_schema(path: Path) -> None:
    from sweeps.config import schema_violations_from_proposed_config

    assert schema_violations_from_proposed_config(yaml.safe_load(path.read_text())) == []


def proposed(sweep: dict[str, Any], most: int) -> list[dict[str, Any]]:
    """Parameters of the runs that W&B would start, one after the other, until it has no more."""
    from sweeps import RunState, next_runs

    runs: list[Any] = []
    while len(runs) < most:
        [found] = next_runs(sweep, runs, n=1)
        if found is None:
            break
        found.state = RunState.finished
        found.summary_metrics = {sweep["metric"]["name"]: 0.5 + 0.01 * (len(runs) % 3)}
        runs.append(found)
    return [found.config for found in runs]


@old_pydantic
def test_the_grid_of_strengths_is_drained() -> None:
    sweep = yaml.safe_load((ROOT / "sweeps/wandb_lambda.yaml").read_text())
    tried = [run["model.head.strength"]["value"] for run in proposed(sweep, 20)]
    assert tried == [round(0.1 * step, 1) for step in range(1, 11)]


@old_pydantic
@each_sweep
def test_what_an_agent_runs_is_understood_and_learns_nothing_that_is_searched(
    path: Path, command: Any
) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = yaml.safe_load(path.read_text())
    for parameters in proposed(sweep, 3):
        macros = create_sweep_command_args({"args": parameters})
        macros |= {"env": ["/usr/bin/env"], "interpreter": ["python"]}
        words: list[str] = []
        for part in create_sweep_command(list(sweep["command"])):
            words += macros[part[2:-1]] if part.startswith("${") else [part]
        assert words[:4] == ["/usr/bin/env", "python", "-m", "train"]
        finished = command(*words[4:], "--print_config")
        assert finished.status == 0, finished.err
        config = yaml.safe_load(finished.out)
        assert config["evaluate_test"] is False
        assert config["trainer"]["logger"]["class_path"].endswith("WandbLogger")
        head = config["model"]["head"]
        for name, parameter in parameters.items():
            section = head if name.startswith("model.head.") else config["model"]
            assert section[name.rpartition(".")[-1]] == parameter["value"]
            assert name.rpartition(".")[-1] not in head["learn"]


@old_pydantic
def test_the_report_shows_every_searched_value_and_the_best_run_first() -> None:
    spec = importlib.util.spec_from_file_location("report", ROOT / "sweeps/wandb_report.py")
    assert spec is not None
    assert spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    sweep = yaml.safe_load((ROOT / "sweeps/wandb_head.yaml").read_text())
    parallel, importance, bars, media = [
        panel._to_model().model_dump()["config"]
        for panel in report.panels("dev/spearman", list(sweep["parameters"]))
    ]
    assert [column["accessor"] for column in parallel["columns"]] == [
        "config:model.value.head.strength",
        "config:model.value.head.temperature",
        "config:model.value.head.ridge_bias",
        "config:model.value.loss",
        "summary:dev/spearman",
    ]
    assert importance["target_key"] == "dev/spearman"
    assert bars["metrics"] == ["dev/spearman"]
    assert media["media_keys"] == ["figures/latent_bias"]
    for goal, ascending in (("maximize", False), ("minimize", True)):
        runs = report.best_runs("me", "scorecal", "abc", "dev/mse", goal)
        assert runs.filters == "Sweep = 'abc'"
        assert runs.order[0].ascending is ascending
