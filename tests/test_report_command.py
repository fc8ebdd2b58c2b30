"""`report`: what it writes of runs and comparisons, and what it refuses."""

import json
import os
from pathlib import Path

import pytest
import yaml
from test_commands import BRING, logprob_rows
from test_compare_command import config

EVIL = "<script>alert(1)</script>"


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(command, tmp_path) -> Path:
    """A run on log-probabilities of one's own, fitted in `tmp_path`."""
    write(tmp_path / "mine.jsonl", logprob_rows())
    finished = command("fit", *BRING, "--data.table", "mine.jsonl")
    assert finished.status == 0, finished.err
    return Path(finished.out.splitlines()[-1])


def test_a_run_becomes_a_page_markdown_and_figures_in_its_own_folder(run, command, tmp_path):
    before = {path: path.read_bytes() for path in (tmp_path / run).iterdir()}
    finished = command("report", "--runs", run)
    assert finished.status == 0, finished.err
    paths = [Path(line) for line in finished.out.splitlines()]
    folder = tmp_path / run / "report"
    assert {path.name for path in folder.iterdir()} == {path.name for path in paths}
    assert {path.parent for path in paths} == {run / "report"}
    stems = {"score_shares", "density_raw", "density_calibrated", "reliability", "bias"}
    assert {path.stem for path in paths if path.suffix == ".svg"} == stems
    assert {path.stem for path in paths if path.suffix == ".png"} == stems
    assert before == {path: path.read_bytes() for path in (tmp_path / run).glob("*.*")}
    page = (folder / "report.html").read_text()
    results = json.loads((tmp_path / run / "results.json").read_text())
    gain = results["gain"]["spearman"]["estimate"]
    assert f"Spearman, {gain:+.3f} [" in page.replace("−", "-")
    assert f"python -m train fit --config {run}/config.yaml" in page
    assert f"python -m train report --runs {run}" in page
    assert "nan" not in page.lower().replace("finance", "")


def test_a_study_adds_its_trials_to_the_page_of_its_run(command, tmp_path):
    write(tmp_path / "mine.jsonl", logprob_rows())
    space = {
        "model.head.strength": {"low": 0.0, "high": 2.0},
        "model.head.ridge_bias": {"low": 0.01, "high": 100.0, "log": True},
    }
    searched = command(
        "study", *BRING, "--data.table", "mine.jsonl", "--model.head.learn", "[bias]",
        "--search.space", json.dumps(space), "--search.metrics", "[spearman,mse]",
        "--search.trials", 12,
    )  # fmt: skip
    assert searched.status == 0, searched.err
    [folder] = (tmp_path / "runs").glob("*/study-study")
    finished = command("report", "--runs", folder)
    assert finished.status == 0, finished.err
    names = {path.stem for path in (folder / "report").glob("*.svg")}
    assert {"history_spearman", "history_mse", "importance", "front", "reliability"} <= names
    page = (folder / "report/report.html").read_text()
    headings = ["The items that moved most", "The chosen trials", "Importance", "Pareto front"]
    places = [page.index(f">{heading}</h3>") for heading in headings]
    assert places == sorted(places)
    record = json.loads((folder / "study.json").read_text())
    best = record["splits"]["deploy"]["best"]
    assert f"{best['values'][0]:.4f}" in page
    # The run may be named too, before or behind its study: it is shown once.
    run = os.path.relpath(folder / record["run"], tmp_path)
    for named in ((folder, run), (run, folder)):
        assert command("report", "--runs", *named, "--output", "both").status == 0
        page = (tmp_path / "both/report.html").read_text()
        assert page.count('<section id="part-') == 2
        assert "The runs" not in page
    (tmp_path / folder / record["run"] / "config.yaml").rename(tmp_path / "kept.yaml")
    finished = command("report", "--runs", folder)
    assert finished.status == 2
    assert "is gone. Run `study` again" in finished.err
    for key, value in (("splits", {}), ("metrics", None)):
        (folder / "study.json").write_text(json.dumps({**record, key: value}))
        finished = command("report", "--runs", folder)
        assert finished.status == 2
        assert "study.json' is damaged" in finished.err
    del record["run"]
    (folder / "study.json").write_text(json.dumps(record))
    finished = command("report", "--runs", folder)
    assert finished.status == 2
    assert "ended before its best trial was fitted" in finished.err


def test_the_same_report_gives_the_same_bytes(run, command, tmp_path):
    for name in ("a", "b"):
        assert command("report", "--runs", run, "--output", "out").status == 0
        (tmp_path / "out").rename(tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_two_runs_and_a_comparison_share_a_page(run, command, tmp_path):
    other = command("fit", *BRING, "--data.table", "mine.jsonl", "--data.folds.outer", 3)
    second = Path(other.out.splitlines()[-1])
    own = config("mine.jsonl", tmp_path)
    compared = command("compare", "--config", own, "--resamples", 100, "--draws", 2)
    assert compared.status == 0, compared.err
    finished = command("report", "--runs", run, second, "compare", "--output", "all")
    assert finished.status == 0, finished.err
    page = (tmp_path / "all/report.html").read_text()
    assert page.count('<section id="part-') == 4
    places = [page.index(f">{text}</h2>") for text in ("The runs", "Comparison: demo")]
    assert places == sorted(places)
    assert page.index(str(run)) < page.index(str(second))
    assert "learning curve" in page
    drawn = {path.name for path in (tmp_path / "compare").glob("*.svg")}
    assert {f"3_{name}" for name in drawn} <= {path.name for path in (tmp_path / "all").iterdir()}
    # The page shows the figures of tables.md, each as it stands there.
    tables = (tmp_path / "compare/tables.md").read_text()
    text = (tmp_path / "all/report.md").read_text()
    assert tables.partition("## demo")[2].replace("\n### ", "\n#### ").strip() in text


@pytest.fixture
def demo_run(demo, tmp_path) -> Path:
    """The judge's own run, with its store where `fit` left it."""
    (tmp_path / "stores").symlink_to(demo / "stores")
    return demo / "runs" / "demo" / "version_0"


def test_a_judges_run_finds_its_store_and_shows_text_only_where_it_may(demo_run, command, tmp_path):
    finished = command("report", "--runs", demo_run, "--output", "quiet")
    assert finished.status == 0, finished.err
    page = (tmp_path / "quiet/report.html").read_text()
    for heading in ("The judge's number bias", "Spearman over λ", "Label mass"):
        assert heading.replace("'", "&#39;") in page
    from scorecal import resources

    file = resources.find("configs", "demo.jsonl")
    assert file is not None
    sentences = [json.loads(line)["sentence1"] for line in file.read_text().splitlines()]
    assert not any(sentence in page for sentence in sentences)
    finished = command("report", "--runs", demo_run, "--output", "open", "--show_text", "true")
    assert finished.status == 0, finished.err
    page = (tmp_path / "open/report.html").read_text().replace("&#39;", "'")
    assert sum(sentence in page for sentence in sentences) >= 10


def test_a_store_that_is_gone_is_one_line(demo, command):
    finished = command("report", "--runs", demo / "runs" / "demo" / "version_0", "--output", "x")
    assert finished.status == 2
    assert "is not in 'stores'. Run `report` in the folder in which `fit` ran" in finished.err


def test_ids_of_a_users_file_are_escaped(command, tmp_path):
    rows = [{**row, "id": f"{EVIL}{row['id']}"} for row in logprob_rows()]
    write(tmp_path / "mine.jsonl", rows)
    finished = command("fit", *BRING, "--data.table", "mine.jsonl")
    run = Path(finished.out.splitlines()[-1])
    assert command("report", "--runs", run, "--output", "out").status == 0
    page = (tmp_path / "out/report.html").read_text()
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def _no_table(run: Path) -> None:
    Path("mine.jsonl").unlink()


def _other_items(run: Path) -> None:
    write(Path("mine.jsonl"), logprob_rows()[1:])


def _other_gold(run: Path) -> None:
    *rows, last = logprob_rows()
    write(Path("mine.jsonl"), [*rows, {**last, "score": 0.0}])


def _no_checkpoint(run: Path) -> None:
    (run / "last.ckpt").unlink()


def _no_results(run: Path) -> None:
    (run / "results.json").unlink()


def _damaged(run: Path) -> None:
    (run / "results.json").write_text('{"items": 30}')


def _nothing_but_nulls(run: Path) -> None:
    content = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(dict.fromkeys(content)))


def _empty_config(run: Path) -> None:
    (run / "config.yaml").write_text("")


def _cut_config(run: Path) -> None:
    whole = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(whole[: whole.index("template:")])


def _other_option(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("lr: 0.05", "lr: -1"))


def _folder_for_the_page(run: Path) -> None:
    Path("out/report.html").mkdir(parents=True)


def _no_task(run: Path) -> None:
    Path("compared").mkdir()
    Path("compared/tables.json").write_text('{"tasks": {}}')


def _broken_config(run: Path) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["data"]["folds"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        (_no_table, [], "no file 'mine.jsonl'"),
        (_other_items, [], "are not those that run"),
        (_other_gold, [], "has the gold score 0, but run"),
        (_no_checkpoint, [], "has no last.ckpt. Name a folder of `fit`"),
        (_no_results, [], "holds no results.json of `fit`, study.json"),
        (_damaged, [], "is damaged. Fit again"),
        (_nothing_but_nulls, [], "results.json' is damaged. Fit again"),
        (_broken_config, [], "`data.folds` is empty in config"),
        (_empty_config, [], "config.yaml' is damaged: Unexpected config. Fit again"),
        (_cut_config, [], "config.yaml' is damaged: the following arguments are required"),
        (_other_option, [], "config.yaml' is damaged: `model.lr` must be above 0, got -1.0. Fit"),
        (_no_task, ["compared"], "tables.json' holds no task. Run `compare` again"),
        (None, ["RUN"], "is named twice"),
        (None, ["nowhere"], "'nowhere' holds no results.json"),
        (None, ["--output", "mine.jsonl"], "`--output` 'mine.jsonl' is no folder"),
        (None, ["--output", "mine.jsonl/a/b"], "is no folder: 'mine.jsonl' is a file. Name one"),
        (_folder_for_the_page, ["--output", "out"], "'out/report.html' is a folder"),
        (None, ["--output", "/proc/none"], "/proc/none"),
        (None, ["--show_text", "true"], "names no local data file"),
        (None, ["--colour", "red"], "colour"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_report_that_cannot_be_made_is_one_line_and_writes_nothing(
    change, more, message, run, command, tmp_path
):
    if change is not None:
        change(run)
    before = sorted(tmp_path.rglob("*"))
    finished = command("report", "--runs", run, *[run if word == "RUN" else word for word in more])
    assert finished.status == 2, finished.err
    assert message in finished.err.splitlines()[-1]
    assert len([line for line in finished.err.splitlines() if line.startswith("scorecal: ")]) == 1
    assert finished.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_without_test_figures_is_named(command, tmp_path):
    write(tmp_path / "mine.jsonl", logprob_rows())
    finished = command("fit", *BRING, "--data.table", "mine.jsonl", "--evaluate_test", "false")
    finished = command("report", "--runs", finished.out.splitlines()[-1])
    assert finished.status == 2
    assert "has no results on test items. Fit with `--evaluate_test true`" in finished.err
