"""`study`: what it searches, and what it leaves behind."""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optuna
import pytest
import yaml

from scorecal.calibration.trials import DevPart

SWEEPS = sorted((Path(__file__).parents[1] / "sweeps").glob("optuna_*.yaml"))
# A table without random-number prompts has no B; `batch` comes from its own rows.
OWN = ("study", "--config", "sts.yaml", "--data.table", "own.jsonl", "--model.head.prior", "batch")
LEARN_BIAS = ("--model.head.learn", "[bias]")
RANGES = {"strength": {"low": 0.0, "high": 2.0}, "ridge_bias": {"low": 0.01, "high": 100.0}}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Log-probabilities that follow gold, with noise and a bias: 60 dev and 40 test rows."""
    generator = np.random.default_rng(0)
    lines = []
    for index in range(100):
        gold = int(generator.integers(0, 6))
        logits = -0.3 * (np.arange(6) - gold) ** 2 + generator.normal(size=6)
        logits[3] += 2.0
        logprobs = logits - np.log(np.exp(logits).sum())
        lines.append({
            "id": f"i{index}", "score": gold, "split": "dev" if index < 60 else "test",
            **{str(label): float(value) for label, value in enumerate(logprobs)},
        })  # fmt: skip
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def space(**options: object) -> tuple[str, str]:
    named = {"loss": "model.loss"}
    keys = {named.get(key, f"model.head.{key}"): value for key, value in options.items()}
    return "--search.space", json.dumps(keys)


def study_of(folder: Path, name: str = "study") -> dict:
    return json.loads((folder / "runs" / "sts" / f"study-{name}" / "study.json").read_text())


def run_of(folder: Path, record: dict) -> Path:
    return folder / "runs" / "sts" / f"study-{record['name']}" / record["run"]


def trials_of(record: dict, state: str = "complete") -> list[dict]:
    return [trial for trial in record["trials"] if trial["state"] == state]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_shipped_study_runs_and_its_best_is_fitted(path: Path, command, tmp_path) -> None:
    finished = command(
        "study", "--config", "sts.yaml", "--config", path.name, "--search.trials", 2,
        "--model.head.learn", "[]" if "lambda" in path.name else "[bias]",
        *(space(**RANGES) if path.stem == "optuna_head" else ()),
    )  # fmt: skip
    assert finished.status == 0, finished.err
    name = path.stem.removeprefix("optuna_")
    record = study_of(tmp_path, name)
    assert len(trials_of(record["splits"]["deploy"])) == 2
    assert (run_of(tmp_path, record) / "last.ckpt").is_file()
    assert all(len(line) <= 80 for line in finished.out.splitlines()[:4])


def test_the_shipped_head_study_is_understood_as_it_is(command) -> None:
    finished = command("study", "--config", "sts.yaml", "--config", "optuna_head", "--print_config")
    assert yaml.safe_load(finished.out)["model"]["head"]["learn"] == ["bias", "mixing"]


def test_a_grid_chooses_what_select_chooses(own, command, tmp_path) -> None:
    grid = {"low": 0.1, "high": 1.0, "step": 0.1}
    fixed = ("--model.head.learn", "[]", "--model.head.temperature", 0.2)
    finished = command(*OWN, *fixed, "--search.sampler", "grid", *space(strength=grid))
    assert finished.status == 0, finished.err
    record = study_of(tmp_path)["splits"]["deploy"]
    assert len(trials_of(record)) == 10
    tried = sorted(trial["params"]["model.head.strength"] for trial in record["trials"])
    assert tried == [round(0.1 * step, 1) for step in range(1, 11)]
    values = [round(0.1 * step, 1) for step in range(1, 11)]
    finished = command(
        "fit", *OWN[1:], *fixed, "--model.select.strength", json.dumps(values),
    )  # fmt: skip
    assert finished.status == 0, finished.err
    head = json.loads((tmp_path / "runs" / "sts" / "version_1" / "head.json").read_text())
    assert head["lambda"] == record["best"]["params"]["model.head.strength"]


def test_best_yaml_repeats_the_fit_to_the_last_bit(own, command, tmp_path) -> None:
    finished = command(
        *OWN, *LEARN_BIAS, "--search.trials", 12, *space(**RANGES, loss=["mse", "nll"])
    )
    assert finished.status == 0, finished.err
    again = command("fit", "--config", "runs/sts/study-study/best.yaml")
    assert again.status == 0, again.err
    first, second = (tmp_path / "runs" / "sts" / f"version_{number}" for number in (0, 1))
    for name in ("head.json", "results.json", "scores.parquet"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_seed_repeats_a_study_in_memory(own, command, tmp_path) -> None:
    records = []
    for _ in range(2):
        finished = command(*OWN, *LEARN_BIAS, "--search.trials", 20, *space(**RANGES))
        assert finished.status == 0, finished.err
        records.append(study_of(tmp_path)["splits"])
    assert records[0] == records[1]


@pytest.mark.parametrize("sampler", ["random", "tpe", "gp", "cmaes"])
def test_every_sampler_searches(sampler: str, own, command, tmp_path) -> None:
    finished = command(
        *OWN, *LEARN_BIAS, "--search.sampler", sampler, "--search.trials", 12, *space(**RANGES)
    )
    assert finished.status == 0, finished.err
    record = study_of(tmp_path)["splits"]["deploy"]
    assert len(trials_of(record)) == 12
    values = [trial["values"][0] for trial in record["trials"]]
    assert record["best"]["values"][0] == pytest.approx(max(values), abs=1e-12)
    assert set(record["importances"]) == {"model.head.strength", "model.head.ridge_bias"}


def test_a_front_holds_what_nothing_beats_and_the_chosen_is_on_it(own, command, tmp_path) -> None:
    finished = command(
        *OWN, *LEARN_BIAS, "--search.metrics", "[spearman,mse]", "--search.trials", 30,
        *space(**RANGES, temperature={"low": 0.1, "high": 5.0, "log": True}),
    )  # fmt: skip
    assert finished.status == 0, finished.err
    record = study_of(tmp_path)["splits"]["deploy"]
    values = {trial["number"]: trial["values"] for trial in trials_of(record)}
    beaten = {
        a
        for (a, (rank, error)), (b, (other_rank, other_error)) in itertools.permutations(
            values.items(), 2
        )
        if other_rank >= rank and other_error <= error and values[a] != values[b]
    }
    assert set(record["front"]) == set(values) - beaten
    assert record["best"]["number"] in record["front"]


@pytest.mark.parametrize("pruner", ["median", "wilcoxon"])
def test_a_pruned_trial_is_not_chosen(pruner: str, own, command, tmp_path) -> None:
    finished = command(
        *OWN, *LEARN_BIAS, "--search.pruner", pruner, "--search.sampler", "random",
        "--search.trials", 300, "--search.metrics", "[mse]",
        *space(temperature={"low": 0.05, "high": 50.0, "log": True}),
    )  # fmt: skip
    assert finished.status == 0, finished.err
    record = study_of(tmp_path)["splits"]["deploy"]
    complete, pruned = trials_of(record), trials_of(record, "pruned")
    assert len(complete) + len(pruned) == 300
    assert len(pruned) > 30
    best = min(complete, key=lambda trial: trial["values"][0])
    assert record["best"]["values"] == best["values"]


def test_with_inverted_folds_every_fold_chooses_on_its_own_dev_part(own, command, tmp_path) -> None:
    folds = ("--data.folds.outer", 3, "--data.folds.inverted", "true", "--data.folds.inner", 3)
    arguments = (
        *OWN, *LEARN_BIAS, *folds, "--search.trials", 8,
        *space(**RANGES, loss=["mse", "nll"]),
    )  # fmt: skip
    finished = command(*arguments)
    assert finished.status == 0, finished.err
    record = study_of(tmp_path)
    assert list(record["splits"]) == ["fold 1", "fold 2", "fold 3", "deploy"]
    best = yaml.safe_load((tmp_path / "runs/sts/study-study/best.yaml").read_text())
    heads = json.loads((run_of(tmp_path, record) / "results.json").read_text())["heads"]
    for head in heads:
        chosen = record["splits"][head["name"]]["best"]["params"]
        assert best["model"]["per_split"][head["name"]] == {
            key.rpartition(".")[2]: value for key, value in chosen.items()
        }
        assert head["lambda"] == chosen["model.head.strength"]
        assert head["ridge_bias"] == chosen["model.head.ridge_bias"]
    # Another gold outside of fold 1's dev part leaves what fold 1 found.
    import torch

    from scorecal.calibration.fitted import Fitted

    fitted = Fitted.from_checkpoint(str(run_of(tmp_path, record) / "last.ckpt"))
    own_dev = {key for key, used in zip(fitted.ids, fitted.train[0], strict=True) if used}
    rows = [json.loads(line) for line in own.read_text().splitlines()]
    for row in rows:
        row["score"] = row["score"] if row["id"] in own_dev else 5 - row["score"]
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = command(*arguments)
    assert finished.status == 0, finished.err
    other = study_of(tmp_path)
    assert other["splits"]["fold 1"] == record["splits"]["fold 1"]
    assert other["splits"]["fold 2"] != record["splits"]["fold 2"]
    torch.testing.assert_close(  # to rounding: folds are fitted together
        fitted.heads.bias[0],
        Fitted.from_checkpoint(str(run_of(tmp_path, other) / "last.ckpt")).heads.bias[0],
        atol=1e-9,
        rtol=0,
    )


# Storages


def worker(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    return subprocess.Popen(
        [sys.executable, "-m", "train", *map(str, arguments)],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def shared(storage: str, trials: int, *more: object) -> tuple[object, ...]:
    return (
        *OWN, *LEARN_BIAS, "--search.storage", storage, "--search.trials", trials,
        "--search.sampler", "tpe", *space(**RANGES), *more,
    )  # fmt: skip


def run_two_workers(folder: Path, storage: str) -> None:
    """Two workers share 200 trials, each is tried once, and one of the two fits the best."""
    arguments = shared(storage, 200)
    both = [worker(folder, *arguments) for _ in range(2)]
    ended = [(*one.communicate(timeout=300), one.returncode) for one in both]
    assert [status for _, _, status in ended] == [0, 0], ended
    fitted = ["finished last" not in out for out, _, _ in ended]
    assert sorted(fitted) == [False, True], ended
    record = study_of(folder)["splits"]["deploy"]
    assert len(trials_of(record)) == 200
    assert len(list((folder / "runs" / "sts").glob("version_*"))) == 1


def test_two_workers_share_a_journal_file(own, command, tmp_path) -> None:
    run_two_workers(tmp_path, "study.log")
    journal = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
    )
    trials = optuna.load_study(study_name="study", storage=journal).trials
    assert len({trial.user_attrs["worker"] for trial in trials}) == 2
    finished = command(*shared("study.log", 200))
    assert finished.status == 0, finished.err
    assert "finished before: runs/sts/version_0" in finished.out
    assert len(list((tmp_path / "runs" / "sts").glob("version_*"))) == 1


@pytest.mark.parametrize("storage", ["study.journal", "study.db"])
def test_a_killed_workers_trials_are_tried_again(storage: str, own, command, tmp_path) -> None:
    killed = worker(tmp_path, *shared(storage, 4000))
    path, deadline = tmp_path / storage, time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if path.is_file() and path.stat().st_size and len(known(path)) >= 40:
            break
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = known(path)
    stopped = [trial for trial in before if not trial.state.is_finished()]
    total = len(before) + 10
    finished = command(*shared(storage, total))
    assert finished.status == 0, finished.err
    trials = known(path)
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert len(complete) == total
    asked_again = [trial.params for trial in complete]
    for trial in stopped:
        assert trials[trial.number].state.name == "FAIL"
        if len(trial.params) == 2:
            assert trial.params in asked_again


def known(path: Path) -> list[optuna.trial.FrozenTrial]:
    if path.suffix == ".db":
        storage = optuna.storages.RDBStorage(  # its tables are the worker's to make
            f"sqlite:///{path}", skip_table_creation=True, skip_compatibility_check=True
        )
    else:
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        storage = optuna.storages.JournalStorage(backend)
    try:
        return optuna.load_study(study_name="study", storage=storage).trials
    except (KeyError, optuna.exceptions.StorageInternalError):
        return []


@pytest.fixture
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database of its own: Debian's package, started as a user that may run it."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    assert programs, "install Debian's package postgresql"
    folder = tmp_path_factory.mktemp("postgresql")
    shutil.chown(folder, "postgres")
    for parent in folder.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            ["runuser", "-u", "postgres", "--", str(programs[-1] / program), *arguments],
            cwd=folder, check=True, capture_output=True, timeout=120,
        )  # fmt: skip

    data = str(folder / "data")
    run("initdb", "-D", data, "--auth", "trust")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
    run("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        run("pg_ctl", "-D", data, "-m", "immediate", "stop")


def test_a_stopped_grid_is_gone_on_with_to_its_last_point(own, command, tmp_path) -> None:
    grid = {"low": 0.1, "high": 10.0, "step": 0.1}
    arguments = (
        *OWN, "--model.head.learn", "[]", "--search.sampler", "grid", "--search.storage", "g.log",
        *space(strength=grid),
    )  # fmt: skip
    assert command(*arguments, "--search.trials", 37).status == 0
    running = command(*arguments)
    assert running.status == 0, running.err
    record = study_of(tmp_path)["splits"]["deploy"]
    tried = sorted(trial["params"]["model.head.strength"] for trial in trials_of(record))
    assert tried == [round(0.1 * step, 1) for step in range(1, 101)]


def test_more_trials_fit_a_new_best_and_equal_ones_fit_nothing(own, command, tmp_path) -> None:
    arguments = shared("study.log", 1)
    assert command(*arguments).status == 0
    assert "finished before" in command(*arguments).out
    more = command(*shared("study.log", 40))
    assert more.status == 0, more.err
    record = study_of(tmp_path)
    assert record["run"] == "../version_1"
    best = record["splits"]["deploy"]["best"]
    head = json.loads((run_of(tmp_path, record) / "head.json").read_text())
    assert head["lambda"] == best["params"]["model.head.strength"]
    (tmp_path / "runs/sts/study-study/best.yaml").unlink()
    again = command(*shared("study.log", 40))
    assert "finished before: runs/sts/version_1" in again.out
    assert (tmp_path / "runs/sts/study-study/best.yaml").is_file()
    # Another run in its place is not the fit to the best.
    shutil.rmtree(tmp_path / "runs/sts/version_1")
    assert command("fit", *OWN[1:]).status == 0
    finished = command("report", "--runs", "runs/sts/study-study")
    assert finished.status == 2
    assert "is not the fit to the best trial" in finished.err
    assert "finished before" not in command(*shared("study.log", 40)).out


@pytest.mark.parametrize("kept", [slice(0, 0), slice(0, 30), slice(30, 60)])
def test_a_trial_that_was_taken_for_dead_is_no_end(kept, own, command, tmp_path, monkeypatch):
    """Its worker goes on, and what was asked again is told by whoever does it."""
    scores, told = DevPart.scores, []

    def slow(self, trials, metrics, fold=None):
        if not told:
            storage = known(tmp_path / "study.log")
            told.extend(trial.number for trial in storage[kept])
            backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
            study = optuna.load_study(
                study_name="study", storage=optuna.storages.JournalStorage(backend)
            )
            for number in told:
                study.tell(number, state=optuna.trial.TrialState.FAIL)
            told.append(-1)
        return scores(self, trials, metrics, fold)

    monkeypatch.setattr(DevPart, "scores", slow)
    finished = command(*shared("study.log", 20))
    assert finished.status == 0, finished.err
    assert len(trials_of(study_of(tmp_path)["splits"]["deploy"])) == 20


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        ("study.log", "the study was stopped. Run the same command to go on."),
        ("null", "its trials lay in memory and are lost. Set `--search.storage study.log` to"),
    ],
)
def test_ctrl_c_says_whether_the_study_can_be_gone_on_with(
    storage, says, own, command, tmp_path, monkeypatch
):
    scores = DevPart.scores

    def stopped(self, trials, metrics, fold=None):
        if len(trials) < 16:  # the second batch
            raise KeyboardInterrupt
        return scores(self, trials, metrics, fold)

    monkeypatch.setattr(DevPart, "scores", stopped)
    finished = command(*shared(storage, 20))
    assert finished.status == 2
    [line] = finished.err.splitlines()
    assert says in line
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(DevPart, "scores", scores)
    monkeypatch.setattr("scorecal.study._alive", lambda process: False)  # its process has ended
    again = command(*shared(storage, 20))
    assert again.status == 0, again.err
    numbers = {trial["number"] for trial in trials_of(study_of(tmp_path)["splits"]["deploy"])}
    kept, lost = set(range(16)), set(range(16, 20))  # of the stopped worker's
    assert len(numbers) == 20
    assert numbers >= kept
    assert numbers.isdisjoint(lost) == (storage != "null")


@pytest.mark.server
def test_two_workers_share_a_postgresql_database(own, tmp_path, postgresql) -> None:
    run_two_workers(tmp_path, postgresql)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (space(strenght={"low": 0.1, "high": 1}), "Nearest: 'model.head.strength'"),
        (("--search.space", '{"data.folds.inner": [2, 3]}'), "can't search"),
        (("--search.sampler", "grid", *space(strength={"low": 0.1, "high": 1})), "needs a step"),
        (space(bias={"low": 0.1, "high": 1}), "Nearest: 'model.head.ridge_bias'"),
        ((*space(strength={"low": 0, "high": 1}), "--model.head.learn", "[strength]"), "`learn`"),
        (space(strength={"low": 1, "high": 0}), "empty range"),
        (space(strength={"low": 0, "high": 1, "step": 2}), "empty range"),
        (space(strength={"low": 0, "high": float("inf")}), "needs a list of choices or a range"),
        (space(strength={"low": 0, "high": 1, "log": "no"}), "needs a list of choices or a range"),
        (space(prior_prompts={"low": 1, "high": 9, "step": 0.5}), "needs a list of choices"),
        (space(ridge_bias=["auto", 1.0]), "name the values to try"),
        (space(ridge_bias=[None, 1.0]), "name the values to try"),
        (space(learn=[["bias"], ["contrast"]]), "an assistant, and there is none"),
        (space(contrast={"low": 0.0, "high": 1.0}), "an assistant, and there is none"),
        (space(learn=[["bias"], ["mixing"]]), "is a search of its own"),
        (space(learn=[["bias"], ["strength"]], strength=[0.5, 1.0]), "a learned value"),
        (
            ("--search.sampler", "grid", *space(strength={"low": 0, "high": 1, "step": 1e-9})),
            "more than 10,000 points",
        ),
        ((*space(**RANGES), "--search.name", ".."), "a folder's name"),
        ((*space(**RANGES), "--search.storage", "own.jsonl/x.log"), "can't be opened"),
        (space(strength={"low": 0, "high": 1, "size": 3}), "needs a list of choices or a range"),
        (space(prior={"low": 0, "high": 1}), "needs a list of choices for"),
        (space(temperature={"low": 0, "high": 1, "log": True}), "lies above 0"),
        (space(temperature={"low": 0, "high": 1}), "above 0"),
        (space(prior=["batch", "none", "uniform"]), "can't be 'uniform'"),
        (space(loss=["mse", "mse"]), "no or equal choices"),
        (space(ridge_mixing={"low": 1, "high": 2}), "no effect"),
        (("--search.sampler", "cmaes", *space(loss=["mse", "nll"])), "CMA-ES searches numbers"),
        (("--search.space", "{}"), "names no option"),
        ((*space(**RANGES), "--search.trials", "0"), "1 at least"),
        ((*space(**RANGES), "--seed_everything", "-1"), "within 0 and 4,294,967,295, got -1."),
        ((*space(**RANGES), "--search.metrics", "[]"), "no or equal metrics"),
        (
            (*space(**RANGES), "--search.metrics", "[mse,spearman]", "--search.pruner", "median"),
            "one metric",
        ),
        ((*space(**RANGES), "--model.head.ridge_bias", "auto", *space(strength=[0, 1])), "auto"),
        ((*space(**RANGES), "--search.storage", "study.csv"), "no .log, .journal or .db file"),
        (
            (*space(**RANGES), "--search.storage", "postgresql://me:secret@127.0.0.1:1/none"),
            "can't be reached",
        ),
        ((*space(**RANGES), "--search.name", "a/b"), "a folder's name"),
        (
            (*space(loss=["mse"], temperature_on=["sum"]), "--data.folds.outer", "3"),
            "with outer folds",
        ),
    ],
)
def test_a_senseless_study_is_refused_in_a_line(arguments, says, own, command, tmp_path) -> None:
    finished = command(*OWN, *LEARN_BIAS, *arguments)
    assert finished.status == 2
    assert says in finished.err
    assert "secret" not in finished.err
    assert len(finished.err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", [b"\x00\xff\xfe", b"{}\n", b"[1, 2]\n", b"hello\nworld\n"])
def test_a_file_that_is_no_journal_is_named_and_left_alone(content, own, command, tmp_path):
    (tmp_path / "mine.log").write_bytes(content)
    finished = command(*shared("mine.log", 3))
    assert finished.status == 2
    assert "mine.log' is no whole journal: line 1" in finished.err
    assert (tmp_path / "mine.log").read_bytes() == content


def test_a_cut_journal_is_named_and_left_alone(own, command, tmp_path):
    assert command(*shared("study.log", 3)).status == 0
    whole = (tmp_path / "study.log").read_bytes()
    (tmp_path / "study.log").write_bytes(whole[:-20])
    finished = command(*shared("study.log", 6))
    assert finished.status == 2
    assert "take a cut last line out" in finished.err
    assert (tmp_path / "study.log").read_bytes() == whole[:-20]


def test_a_study_of_another_space_is_refused(own, command, tmp_path) -> None:
    assert command(*shared("study.log", 3)).status == 0
    finished = command(*shared("study.log", 3), *space(strength={"low": 0, "high": 9}))
    assert finished.status == 2
    assert "of another space" in finished.err
    rows = own.read_text().splitlines()
    own.write_text("\n".join(rows[1:]))
    finished = command(*shared("study.log", 3))
    assert finished.status == 2
    assert "of another dev" in finished.err


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('{"fold 9": {"strength": 1}}', "names 'fold 9'"),
        ('{"deploy": {"prior": "none"}}', "must hold numbers"),
        ('{"deploy": {"loss": "huber"}}', "must hold numbers"),
        ('{"deploy": {"temperature": 0.0}}', "above 0"),
    ],
)
def test_numbers_of_a_split_that_make_no_sense_are_refused(value, says, own, command) -> None:
    finished = command("fit", *OWN[1:], "--model.per_split", value)
    assert finished.status == 2
    assert says in finished.err
