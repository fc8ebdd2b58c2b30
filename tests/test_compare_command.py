"""`compare`: what it writes, what it refuses; and a task that is nothing but two files."""

import json
import shutil
from pathlib import Path

import pytest
import yaml


def config(store: Path | str, folder: Path, **data: object) -> Path:
    """The demo's config, reading a store, with changes to its data."""
    from scorecal import resources

    found = resources.find("configs", "demo.yaml")
    assert found is not None
    settings = yaml.safe_load(found.read_text())
    settings["data"]["judge"]["init_args"]["model"] = None
    settings["data"] |= {"table": str(store), **data}
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_compare_writes_tables_figures_and_a_learning_curve(store, command, tmp_path):
    finished = command(
        "compare", "--config", config(store, tmp_path), "--resamples", 100, "--draws", 4
    )
    assert finished.status == 0, finished.err
    written = [Path(line) for line in finished.out.splitlines()]
    assert {path.name for path in (tmp_path / "compare").iterdir()} == {
        path.name for path in written
    }
    assert len([path for path in written if path.suffix == ".svg"]) == 8
    record = json.loads((tmp_path / "compare/tables.json").read_text())
    [case] = record["tasks"]["demo"]
    named = {(row["name"], row["temperature"]) for row in case["methods"]}
    assert {("raw", "1"), ("vanilla", "0.2"), ("Deb-T", "0.2"), ("auto", "learned")} <= named
    assert case["learning"]["sizes"] == [0, 10, 25]
    text = (tmp_path / "compare/tables.md").read_text()
    for heading in (
        "Spearman (higher is better)", "number of random-number prompts", "range of λ",
        "can debiasing help?", "by label mass", "learning curve",
    ):  # fmt: skip
        assert heading in text
    assert "nan" not in text.lower().replace("finance", "")


def test_the_same_comparison_gives_the_same_bytes(store, command, tmp_path):
    arguments = ("--config", config(store, tmp_path), "--resamples", 100, "--draws", 0)
    for _ in range(2):
        assert command("compare", *arguments, "--output", "one").status == 0
        files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert command("compare", *arguments, "--output", "one").status == 0
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}


def test_data_that_is_typed_holds_for_all_configs(store, command, tmp_path):
    given = ("--config", config(store, tmp_path), "--resamples", 100, "--draws", 0)
    finished = command("compare", *given, "--data.folds.outer=4", "--data.task.name", "own")
    assert finished.status == 0, finished.err
    tasks = json.loads((tmp_path / "compare/tables.json").read_text())["tasks"]
    assert [case["splits"] for case in tasks["own"]] == [4]
    finished = command("compare", "--data.task.scale", "1-9", *given)
    assert finished.status == 2
    assert "not '1-9'" in finished.err
    finished = command("compare", *given, "--data.task.scales", "1-9")
    assert finished.status == 2
    assert "data.task.scales" in finished.err


def test_further_judges_are_further_tables(store, command, tmp_path):
    twins = [shutil.copytree(store, tmp_path / name / "twin") for name in ("one", "two")]
    finished = command(
        "compare", "--config", config(store, tmp_path), "--table", *twins,
        "--resamples", 100, "--draws", 0,
    )  # fmt: skip
    assert finished.status == 0, finished.err
    tasks = json.loads((tmp_path / "compare/tables.json").read_text())["tasks"]
    titles = [case["title"] for case in tasks["demo"]]
    assert len(set(titles)) == 3
    assert "(twin)" in titles[1]
    assert len(list((tmp_path / "compare").glob("demo_spearman_*.svg"))) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "config"),
        (["--config", "nothing.yaml"], "no config 'nothing.yaml'"),
        (["--config", "optuna_lambda"], "'optuna_lambda' has `search`, which only `study` reads"),
        (["--config", "OWN", "OWN"], "two configs have the task 'demo'"),
        (["--config", "OWN", "--config", "OWN"], "two configs have the task 'demo'"),
        (["--config", "OWN", "--table", "STORE"], "is named twice"),
        (["--config", "OWN", "--seed", "-1"], "`--seed` must lie within 0 and"),
        (["--config", "OWN", "--output", "/proc/none"], "/proc/none"),
        (["--config", "OWN", "--output", ""], "'' is no folder"),
        (["--config", "OWN", "--table", "nothing"], "no store or shipped table 'nothing'"),
        (
            ["--config", "OWN", "--table", "stsb-qwen2.5-coder-0.5b-gguf"],
            "is of the task 'sts', the configs are of demo",
        ),
        (["--config", "OWN", "--resamples", "3"], "`--resamples` must lie within 100 and"),
        (["--config", "OWN", "--output", "OWN"], "is no folder. Name one"),
        (["--config", "OWN", "--output", "OWN/a"], "own.yaml' is a file. Name one"),
        (["--config", "OWN", "--colour", "red"], "colour"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_one_line_and_writes_nothing(
    arguments, message, store, command, tmp_path
):
    own = config(store, tmp_path)
    named = {"OWN": own, "STORE": store, "OWN/a": own / "a"}
    finished = command("compare", *[named.get(a, a) for a in arguments])
    assert finished.status == 2
    assert message in finished.err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [own]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folds": {"outer": 100}}, "64 groups can't make 100 folds"),
        ({"table": ""}, "neither a table nor a judge is named"),
        ({"assistant": {"table": "other"}}, "no table 'other'"),
    ],
)
def test_a_table_that_cannot_be_divided_is_one_line(change, message, store, command, tmp_path):
    finished = command("compare", "--config", config(store, tmp_path, **change), "--draws", 0)
    assert finished.status == 2
    assert message in finished.err


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"gold_range": [0, 10]}, "are worth 0 to 5, this task's 0 to 10"),
        ({"template": "str.j2"}, "was judged with another template or criterion"),
    ],
)
def test_a_store_that_was_asked_something_else_is_refused(task, message, store, command, tmp_path):
    own = config(store, tmp_path)
    settings = yaml.safe_load(own.read_text())
    settings["data"]["task"] |= task
    own.write_text(yaml.safe_dump(settings))
    for name in ("compare", "fit"):
        finished = command(name, "--config", own)
        assert finished.status == 2
        assert message in finished.err


def test_figures_that_are_undefined_leave_gaps(command, tmp_path):
    rows = [
        {"id": f"i{n}", "split": "dev" if n < 12 else "test", "score": n % 3, "0": -1.0, "1": -1.2,
         "2": -1.5}
        for n in range(16)
    ]  # fmt: skip
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = config("same.jsonl", tmp_path, folds={"inner": 11})
    settings = yaml.safe_load(own.read_text())
    settings["data"]["task"] |= {"scale": "0-2", "gold_range": None}
    own.write_text(yaml.safe_dump(settings))
    finished = command("compare", "--config", own, "--resamples", 100, "--draws", 2)
    assert finished.status == 0, finished.err
    assert "–" in (tmp_path / "compare/tables.md").read_text()


@pytest.mark.parametrize(
    "key", ["data.folds", "data.assistant", "data.task.splits", "data.task.scale", "trainer"]
)
def test_a_section_left_empty_is_named(key, store, command, tmp_path):
    own = config(store, tmp_path)
    settings = yaml.safe_load(own.read_text())
    *above, last = key.split(".")
    section = settings
    for name in above:
        section = section[name]
    section[last] = None
    own.write_text(yaml.safe_dump(settings))
    for name in ("compare", "fit"):
        finished = command(name, "--config", own)
        assert finished.status == 2
        assert f"`{key}` is empty in config" in finished.err
