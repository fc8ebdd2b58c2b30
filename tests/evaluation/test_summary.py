import json
from dataclasses import replace

import pyarrow.parquet
import pytest
import torch
from synthetic import fit, make_table

from scorecal.calibration.folds import Folds
from scorecal.evaluation.evidence import METRICS, evaluate
from scorecal.evaluation.summary import results, table_rows, text, write_run

KEYS = {"items", "raw", "calibrated", "gain", "constant", "reference", "head", "heads", "judge",
        "data", "seed", "versions"}  # fmt: skip
FIGURES = ("raw", "calibrated", "gain", "constant", "reference")


def made(table, folds=None):
    fitted = fit(table, folds=folds).fitted
    assistant = torch.zeros_like(table.logprobs)
    return evaluate(fitted, table, assistant, seed=3, resamples=50), fitted, table, 3


@pytest.fixture(scope="module")
def split():
    return made(make_table(50, dev=20))


@pytest.fixture(scope="module")
def folded():
    return made(make_table(50), Folds(outer=3, inner=2))


@pytest.fixture(params=["split", "folded"])
def run(request):
    return request.getfixturevalue(request.param)


def test_results_hold_everything_and_are_valid_json(run):
    content = json.loads(json.dumps(results(*run), allow_nan=False))
    assert set(content) >= KEYS
    for method in FIGURES:
        for metric, figure in content[method].items():
            assert metric in METRICS
            assert set(figure) == {"estimate", "low", "high"}
    for head in [content["head"], *content["heads"]]:
        assert {"lambda", "temperature", "bias"} <= set(head)
        assert len(head["bias"]) == 5
    assert content["head"]["name"] == "deploy"
    assert content["seed"] == 3
    assert content["judge"]["judge"] == "synthetic"
    assert {"python", "scorecal", "torch", "lightning"} <= set(content["versions"])
    assert content["data"]["censored_rows"] == 0
    assert 0.4 < content["data"]["label_mass"] < 0.9


def test_results_count_the_items_and_list_one_head_a_fold(split, folded):
    own, pooled = results(*split), results(*folded)
    assert (own["items"], own["data"]["dev"], len(own["heads"])) == (30, 20, 1)
    assert (pooled["items"], pooled["data"]["dev"], len(pooled["heads"])) == (50, 50, 3)
    assert [head["name"] for head in pooled["heads"]] == ["fold 1", "fold 2", "fold 3"]


def test_undefined_figures_and_unknown_mass_are_null(split):
    table = split[2]
    flat = replace(
        table,
        logprobs=table.logprobs[:1].expand(50, -1).clone(),
        label_mass=torch.full((50,), torch.nan, dtype=torch.float64),
    )
    content = json.loads(json.dumps(results(*made(flat)), allow_nan=False))
    assert content["raw"]["spearman"] == {"estimate": None, "low": None, "high": None}
    assert content["data"]["label_mass"] is None


def test_without_an_evaluation_the_head_is_still_described(split):
    content = results(None, *split[1:])
    assert content["items"] == 0
    assert not set(FIGURES) & set(content)
    assert content["head"] == split[1].describe(0)


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_run_is_written_as_files_that_agree_with_each_other(run, evaluated, tmp_path):
    evaluation, fitted, table, seed = run
    write_run(tmp_path, evaluation if evaluated else None, fitted, table, seed)
    content = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert json.loads((tmp_path / "head.json").read_text("utf-8")) == content["head"]
    names = {"results.json", "head.json"} | ({"scores.parquet"} if evaluated else set())
    assert {path.name for path in tmp_path.iterdir()} == names
    if evaluated:
        rows = pyarrow.parquet.read_table(tmp_path / "scores.parquet").to_pylist()
        assert rows == evaluation.scores
        assert set(rows[0]) == {"id", "problem", "gold", "raw", "calibrated"}


def test_the_printed_table_has_a_row_a_metric_and_dashes_where_nothing_is_defined(run):
    header, *rows = table_rows(run[0])
    assert header == ["", "raw", "calibrated", "difference", "constant", "ridge reference"]
    assert len(rows) == len(METRICS)
    cells = {row[0].split()[0]: row[1:] for row in rows}
    assert cells["Spearman"][3] == "–"
    assert cells["SDD"][3:] == ["–", "–"]
    assert "[" not in cells["Kendall"][0]
    point, low, high = run[0].methods["gain"]["mse"]
    assert cells["MSE"][2] == f"{point:+.3f} [{low:+.3f}, {high:+.3f}]"


def test_the_printed_text_names_judge_head_items_and_verdict(split):
    evaluation, fitted, table, _ = split
    shown = text(evaluation, fitted, table)
    head = fitted.describe(0)
    assert "judge: synthetic\n" in shown
    assert f"λ = {head['lambda']:.3g}, T = {head['temperature']:.3g}" in shown
    assert "30 test items" in shown
    assert "paired bootstrap over groups" in shown
    assert "30 test items" not in text(None, fitted, table)


@pytest.mark.parametrize(("mass", "low"), [(0.49, True), (0.51, False)])
def test_a_label_mass_below_a_half_is_warned_of(split, mass, low):
    evaluation, fitted, table, _ = split
    weak = replace(table, label_mass=torch.full((50,), mass, dtype=torch.float64))
    assert (f"label mass: mean {mass:.2f} (low" in text(evaluation, fitted, weak)) == low


def test_logprobs_without_a_judge_say_so(split):
    evaluation, fitted, table, _ = split
    shown = text(evaluation, fitted, replace(table, identity={}))
    assert "judge: unknown (log-probabilities from a file)" in shown
