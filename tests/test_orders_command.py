"""A rubric in several orders, from the command line."""

import json

import pytest
import torch
from stores import FIELDS, make_items, make_store, write_config

from scorecal.calibration.fitted import Fitted
from scorecal.judging.task import Task

TEMPLATE = """{% block instruction %}Rate.
{% endblock %}{% block item %}{{ sentence1 }} {{ sentence2 }}{% endblock %}{% block question %}
{% for level in rubric %}Score {{ level.label }}: {{ level.text }}
{% endfor %}Score:{% endblock %}"""
RUBRIC = {str(label): f"as good as {label}" for label in range(6)}


@pytest.fixture
def rubric_task(tmp_path):
    (tmp_path / "rubric.j2").write_text(TEMPLATE)

    def task(orders, rubric=RUBRIC):
        return Task("pairs", str(tmp_path / "rubric.j2"), FIELDS, rubric=rubric, orders=orders)

    return task


@pytest.fixture
def config(rubric_task, tmp_path):
    """A store of the balanced orders, and the config of a task that names one of its choice."""
    items = make_items(60, a_group=2, dev=30)
    made = {}

    def write(named, judged=("balanced", {"random": 6})):
        if str(judged) not in made:
            folder = tmp_path / f"store{len(made)}"
            task = rubric_task(list(judged))
            made[str(judged)] = make_store(folder, task, items, "Judge", seed=1, first=1.5)
        return write_config(tmp_path / "pairs.yaml", rubric_task(named), made[str(judged)])

    return write


def test_compare_says_what_the_orders_do(config, command, tmp_path):
    own = config("balanced")
    finished = command("compare", "--config", own, "--resamples", 100, "--draws", 0)
    assert finished.status == 0, finished.err
    assert (tmp_path / "compare/pairs_positions.svg").is_file()
    [[record]] = json.loads((tmp_path / "compare/tables.json").read_text())["tasks"].values()
    orders = record["orders"]
    assert orders["position_prior"]["estimate"][0] > 0.25
    assert orders["p"] < 0.01
    assert len(orders["single"]) == 12
    assert orders["by_number"][-1]["random"]["subsets"] == 1
    text = (tmp_path / "compare/tables.md").read_text()
    assert "which position of the rubric the judge prefers" in text
    assert "nan" not in text
    page = command("report", "--runs", "compare")
    assert page.status == 0, page.err
    assert "probability by position" in (tmp_path / "compare/report/report.html").read_text()


def test_fit_corrects_one_order_by_its_position_prior(config, command, tmp_path):
    finished = command(
        "fit", "--config", config("none"), "--model.head.prior", "position",
        "--model.head.learn=[]",
    )  # fmt: skip
    assert finished.status == 0, finished.err
    assert "head (position)" in finished.out
    run = tmp_path / finished.out.splitlines()[-1]
    fitted = Fitted.from_checkpoint(str(run / "last.ckpt"))
    [term] = fitted.heads.prior
    assert term.argmin() == 0  # what stands first is taken down
    assert term[1:].min() > 0
    assert torch.isfinite(term).all()
    page = command("report", "--runs", run)
    assert page.status == 0, page.err


@pytest.mark.parametrize(
    ("named", "judged", "message"),
    [
        ("balanced", ["balanced"], "the mean over 6 orders is calibrated here"),
        ("none", ["none"], "lacks 5 of them, '1 2 3 4 5 0' first"),
    ],
)
def test_a_position_prior_that_cannot_be_measured_is_one_line(
    named, judged, message, config, command
):
    finished = command("fit", "--config", config(named, judged), "--model.head.prior", "position")
    assert finished.status == 2
    assert message in finished.err.splitlines()[-1]


def test_a_position_prior_without_a_rubric_is_one_line(command):
    finished = command("fit", "--config", "sts.yaml", "--model.head.prior", "position")
    assert finished.status == 2
    assert "needs a judge that was shown a rubric" in finished.err.splitlines()[-1]
