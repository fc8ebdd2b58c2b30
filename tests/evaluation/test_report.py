import json
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image
from synthetic import fit, make_table

from scorecal.calibration.folds import Folds
from scorecal.calibration.head import HeadSettings
from scorecal.evaluation import sections
from scorecal.evaluation.blocks import Drawing, Grid, Heading, Verdict, markdown
from scorecal.evaluation.evidence import evaluate, verdict
from scorecal.evaluation.page import html, written
from scorecal.evaluation.report import comparison_part, run_part, runs_part
from scorecal.evaluation.runs import Run, read_results
from scorecal.evaluation.summary import results
from scorecal.judging.task import Task

EVIL = "<script>alert('x')</script>"
SECTIONS = [
    "Raw against calibrated", "The judge's number bias", "Score proportions",
    "Expected score against gold", "Reliability", "What was learned", "Spearman over λ",
    "Label mass", "The items that moved most", "What this is",
]  # fmt: skip


def make_run(table, folds=None, settings=None, texts=None, loss="mse"):
    settings = settings or HeadSettings()
    fitted = fit(table, settings, folds=folds, loss=loss).fitted
    nothing = torch.zeros_like(table.logprobs)
    evaluation = evaluate(fitted, table, nothing, seed=0, resamples=50)
    content = json.loads(json.dumps(results(evaluation, fitted, table, 0)))
    task = Task("synthetic", "sts.j2", {}, source="some/set", scale="0-4")
    return Run(
        "runs/one", "python -m train fit --config runs/one/config.yaml", content, fitted, task, "",
        table, nothing, folds or Folds(), settings, loss, texts or {},
    )  # fmt: skip


@pytest.fixture(scope="module")
def evil():
    """A run whose judge, ids and texts try to be markup."""
    table = make_table(60, dev=30)
    ids = [f"{EVIL}{key}" for key in table.ids]
    run = make_run(
        replace(table, ids=ids, identity={"judge": f"{EVIL} & co"}),
        texts=dict.fromkeys(ids, f"{EVIL} | ![x](//a.example/y.png)\n**bold** ```"),
    )
    return run, run_part(run)


@pytest.fixture(scope="module")
def folded():
    run = make_run(make_table(60), Folds(outer=3, inner=2, inverted=True))
    return run, run_part(run)


def of(part, kind):
    return [block for block in part if isinstance(block, kind)]


def grid_below(part, title):
    place = next(i for i, b in enumerate(part) if isinstance(b, Heading) and b.text == title)
    return next(block for block in part[place:] if isinstance(block, Grid))


class Page(HTMLParser):
    """Tags, their attributes and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words = Counter(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):  # noqa: D102
        self.tags[tag] += 1
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_data(self, data):  # noqa: D102
        self.words.append(data)


def test_a_run_has_its_sections_in_order(evil, folded):
    for _, part in (evil, folded):
        assert [block.text for block in of(part, Heading)][1:] == SECTIONS
        assert len(of(part, Drawing)) == 7


def test_the_verdict_is_two_sentences_on_named_data(folded):
    run, part = folded
    intro, said = part[1], part[2]
    assert said == Verdict(verdict(run.evaluation)[:2])
    assert len(said.sentences) == 2
    assert intro == (
        "What calibration changed on 60 test items of 3 folds of synthetic, fitted on 20 scored "
        "dev items:"
    )


def test_figures_come_back_from_json_as_they_were():
    table = make_table(40, dev=20)
    fitted = fit(table).fitted
    before = evaluate(fitted, table, torch.zeros_like(table.logprobs), seed=0, resamples=50)
    content = json.loads(json.dumps(results(before, fitted, table, 0)))
    after = type(before).from_results(content)
    assert repr(after.methods) == repr(before.methods)
    assert verdict(after) == verdict(before)


def test_the_items_that_moved_most_are_those_of_a_plain_loop(folded):
    run, part = folded
    fitted, table = run.fitted, run.table
    logits = fitted.logits(table.logprobs, run.assistant)
    raw = table.logprobs.softmax(-1) @ table.values
    found = []
    for item, key in enumerate(table.ids):
        scores = [
            (logits[fold, item].softmax(-1) @ table.values).item()
            for fold in fitted.evaluated
            if fitted.held_out[fold, item]
        ]
        assert len(scores) == 2  # one fold of three fits, the others test
        change = sum(scores) / len(scores) - raw[item].item()
        found.append((abs(change), key, f"{table.gold[item]:.2f}", f"{change:+.2f}"))
    rows = grid_below(part, "The items that moved most").rows
    assert len(rows) == 10
    assert [(row[0], row[1], row[4]) for row in rows] == [
        row[1:] for row in sorted(found, reverse=True)[:10]
    ]


def test_what_was_learned_is_the_head_for_new_items(folded):
    run, part = folded
    rows = {row[0]: row[1:] for row in grid_below(part, "What was learned").rows}
    head = run.results["head"]
    assert rows["strength λ"][0].startswith(f"{head['lambda']:.3f} [")
    assert rows["temperature T"][0].startswith(f"{head['temperature']:.3f} [")
    assert "contrast α" not in rows
    [drawing] = [block for block in of(part, Drawing) if block.name == "bias"]
    for label, value in zip(head["labels"], head["bias"], strict=True):
        assert f"{label} {value:+.3f} [" in drawing.alt


def test_a_paper_head_says_that_nothing_was_learned():
    run = make_run(make_table(40, dev=20), settings=HeadSettings(learn=[], temperature=0.2))
    rows = grid_below(sections.learned_section(run, ""), "What was learned").rows
    assert rows == [
        ["strength λ", "1.000", "given, or chosen on dev"],
        ["temperature T", "0.200", "given, or chosen on dev"],
    ]


def test_log_probabilities_without_a_judge_leave_out_what_only_a_judge_tells():
    table = make_table(40, dev=20)
    unknown = torch.full_like(table.label_mass, torch.nan)
    table = replace(table, evidence={}, identity={}, label_mass=unknown)
    run = make_run(table, settings=HeadSettings(prior="batch"))
    part = run_part(run)
    shown = [block.text for block in of(part, Heading)]
    assert shown[0] == "synthetic: log-probabilities of synthetic"
    assert "Spearman over λ" not in shown
    assert "The table has no answers to random-number prompts." in part
    assert "Unknown: the log-probabilities don't show all labels." in part


def test_all_that_a_file_says_is_escaped(evil):
    run, part = evil
    page = html("Report", [part], "about")
    assert "<script" not in page.lower()
    found = Page(page)
    assert not {"script", "img", "image", "iframe", "link", "object"} & set(found.tags)
    assert sum(EVIL in words for words in found.words) > 10
    alt = [value for _, name, value in found.attributes if name == "aria-label"]
    assert len(alt) == 7
    assert all(alt)


def test_a_page_asks_for_nothing_and_has_no_id_twice(evil, folded):
    parts = [runs_part([evil[0], folded[0]]), run_part(evil[0], "1_"), run_part(folded[0], "2_")]
    page = html("Report", parts, "about")
    found = Page(page)
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import", page.replace("//a.example", ""))
    for _, name, value in found.attributes:
        assert name not in ("src", "srcset", "action", "onclick", "onload")
        if name == "href":
            assert value.startswith("#")
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for _, name, value in found.attributes if name == "href"} <= set(ids)
    assert found.tags["svg"] == 14


def test_one_row_a_run_comes_before_several_runs(evil, folded):
    title, grid = runs_part([evil[0], folded[0]])
    assert title == Heading(1, "The runs")
    for row, run in zip(grid.rows, (evil[0], folded[0]), strict=True):
        cells = dict(zip(grid.header, row, strict=True))
        assert cells["λ"] == f"{run.results['head']['lambda']:.3g}"
        gain = run.evaluation.methods["gain"]["mse"]
        shown = f"{gain.estimate:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
        assert cells["MSE, difference"] == shown


def test_a_cell_of_markdown_stays_a_cell():
    text = markdown([Grid(["a", "b"], [["x | y\nz", "![i](//a.example/p.png)"], ["<b>", "0.1"]])])
    assert text.splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| x / y z | ![i]\\(//a.example/p.png) |",
        "| &lt;b> | 0.1 |",
    ]


def test_figures_markdown_and_page_are_written_and_repeat_to_the_byte(folded, tmp_path):
    for name in ("one", "two"):
        paths = written(tmp_path / name, "Report", [folded[1]], "about")
        assert paths[-2:] == [tmp_path / name / "report.md", tmp_path / name / "report.html"]
        assert {path.name for path in (tmp_path / name).iterdir()} == {p.name for p in paths}
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    text = (tmp_path / "one/report.md").read_text()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(pictures) == 7
    assert all((tmp_path / "one" / name).is_file() for name in pictures)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tasks": {"sts": [{}]}}'])
def test_tables_that_compare_did_not_write_are_named(content, tmp_path):
    (tmp_path / "tables.json").write_text(content)
    with pytest.raises(ValueError, match=r"tables.json' is damaged or of another version"):
        comparison_part(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"items": 3}', '{"items": 3, "raw": 1}'])
def test_results_that_fit_did_not_write_are_named(content, tmp_path):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=r"results.json' is damaged. Fit again"):
        read_results(tmp_path)


CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="the program `chromium` is not on the path")
@pytest.mark.parametrize(("width", "scheme"), [(390, 1), (1100, 0)], ids=["phone", "dark desktop"])
def test_a_browser_shows_the_page_without_a_complaint(evil, width, scheme, tmp_path):
    written(tmp_path, "Report", [evil[1]], "about")
    shot = tmp_path / "shot.png"
    assert CHROMIUM is not None
    finished = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0",
            f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},2000",
            f"--screenshot={shot}", (tmp_path / "report.html").as_uri(),
        ],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "TZ": "UTC"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    for word in ("CONSOLE", "ERR_", "Refused", "ssl_client", "net_error"):
        assert word not in finished.stderr
    with Image.open(shot) as image:
        colours = image.convert("RGB").getcolors(1 << 24)
    assert len(colours) > 50
    count, (red, green, blue) = max(colours)
    assert count > width * 500  # the paper, in the scheme's own shade
    assert (red + green + blue < 150) == (scheme == 0)


def test_the_page_lies_beside_its_code() -> None:
    """The wheel holds the package's folder whole."""
    from scorecal.evaluation import page

    assert (Path(page.__file__).parent / "page.html.j2").is_file()
