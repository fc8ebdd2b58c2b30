"""One judge on several ranges: means, gains, spreads and documents against plain loops."""

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import kendalltau, pearsonr, spearmanr
from stores import make_items, make_store, ranges_task

from scorecal.calibration.folds import Folds
from scorecal.evaluation.compare import Case
from scorecal.evaluation.ranges import ranges_record
from scorecal.judging.store import Store
from scorecal.judging.table import table_from_store

SCALES = ("0-5", "2-7")
RESAMPLES = 200


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    task, items = ranges_task(), make_items(48, a_group=4, dev=24)
    main = make_store(folder / "main", task, items, "Main", seed=1, shift=1.5)
    small = make_store(folder / "small", task, items, "Small", seed=2, shift=2.0)
    found = []
    for scale in SCALES:
        table = table_from_store(Store(main), task.on(scale))
        table.add_assistant(table_from_store(Store(small), task.on(scale)))
        folds = Folds(outer=2, inverted=True, inner=2)
        found.append(Case.of(task.name, table, folds, 0, scale))
    return found


@pytest.fixture(scope="module")
def record(cases):
    return ranges_record(cases, seed=0, resamples=RESAMPLES)


def of(record, name, temperature):
    [found] = [
        method for method in record["methods"]
        if (method["name"], method["temperature"]) == (name, temperature)
    ]  # fmt: skip
    return found


def test_each_scale_has_its_own_labels_and_gold_its_own_units(cases, record):
    assert record["scales"] == list(SCALES)
    assert record["labels"] == [list("012345"), list("234567")]
    for case in cases:
        assert case.table.values.tolist() == [0, 1, 2, 3, 4, 5]
        assert 0 <= case.table.gold.min() <= case.table.gold.max() <= 5


def test_mean_gain_and_spread_over_the_scales(cases, record):
    for name, temperature, score_of in (
        ("raw", "1", lambda table: table.logprobs.softmax(-1) @ table.values),
        ("greedy", "–", lambda table: table.values[table.logprobs.argmax(-1)]),
    ):
        figures = []
        for case in cases:
            score = score_of(case.table)
            folds = [spearmanr(score[row], case.table.gold[row])[0] for row in case.test]
            figures.append(sum(folds) / len(folds))
        found = of(record, name, temperature)["figures"]["spearman"]
        assert [one["estimate"] for one in found["scales"]] == pytest.approx(figures)
        assert found["mean"]["estimate"] == pytest.approx(sum(figures) / 2)
        assert found["spread"]["estimate"] == pytest.approx(max(figures) - min(figures))
        assert found["relative_gain"]["estimate"] == pytest.approx(0)
        assert 0 <= found["spread"]["low"] <= found["spread"]["high"]
    raw = of(record, "raw", "1")["figures"]["spearman"]["mean"]["estimate"]
    vanilla = of(record, "vanilla", "0.2")["figures"]["spearman"]
    assert vanilla["relative_gain"]["estimate"] == pytest.approx(
        vanilla["mean"]["estimate"] / raw - 1
    )
    # A contrast is held against the same way of answering without it.
    (name,) = (
        row["name"]
        for row in record["methods"]
        if row["name"].startswith("contrast")
        and row["temperature"] == "0.2"
        and "shared" not in row["name"]
    )
    contrast = of(record, name, "0.2")["figures"]["spearman"]
    assert contrast["relative_gain"]["estimate"] == pytest.approx(
        contrast["mean"]["estimate"] / vanilla["mean"]["estimate"] - 1
    )


@pytest.mark.parametrize(
    ("metric", "function"),
    [("spearman", spearmanr), ("pearson", pearsonr), ("kendall", kendalltau)],
)
def test_figures_within_documents_are_means_of_a_loop(cases, record, metric, function):
    for case, found in zip(
        cases, of(record, "raw", "1")["figures"][f"{metric}_per_document"]["scales"], strict=True
    ):
        score = case.table.logprobs.softmax(-1) @ case.table.values
        folds = []
        for row in case.test:
            each = []
            for group in dict.fromkeys(case.table.groups):
                own = torch.tensor([name == group for name in case.table.groups]) & row
                gold = case.table.gold[own]
                if own.any() and gold.min() < gold.max():
                    each.append(function(score[own], gold)[0])
            folds.append(sum(each) / len(each))
        assert found["estimate"] == pytest.approx(sum(folds) / len(folds))
        assert found["low"] < found["estimate"] < found["high"]


def test_a_constant_prediction_counts_as_0_within_documents(record):
    found = of(record, "constant", "–")["figures"]
    assert found["spearman_per_document"]["mean"]["estimate"] == 0
    assert math.isnan(found["spearman"]["mean"]["estimate"])


def test_a_point_shared_across_ranges_is_one_point(record):
    own = of(record, "contrast, Small", "1")["settings"]
    shared = of(record, "contrast, Small, shared across ranges", "1")["settings"]
    assert shared[0]["alpha"] == shared[1]["alpha"]
    assert own[0]["alpha"] != own[1]["alpha"] or own[0]["alpha"] == shared[0]["alpha"]


def test_answers_and_logits_over_the_ranges(cases, record):
    for case, shares, logits in zip(cases, record["shares"], record["logits"], strict=True):
        for share in shares.values():
            assert sum(share) == pytest.approx(1)
        tested = case.test.any(0)
        likeliest = case.table.logprobs[tested].argmax(-1).bincount(minlength=6)
        assert shares["greedy"] == pytest.approx((likeliest / tested.sum()).tolist())
        expected = (case.table.logprobs[tested] + 20.0).mean(0)
        assert logits["mean"] == pytest.approx(expected.tolist())
        assert all(low <= high for low, high in zip(logits["low"], logits["high"], strict=True))


def test_scales_of_other_lengths_are_compared_by_what_all_of_them_allow(tmp_path):
    task = ranges_task(scale=["1-5", "0-100", "1-10"])
    store = make_store(tmp_path / "main", task, make_items(40, dev=20), "Main", seed=1)
    cases = [
        Case.of(task.name, table_from_store(Store(store), task.on(scale)), Folds(), 0, scale)
        for scale in task.scales
    ]
    record = ranges_record(cases, seed=0, resamples=20)
    names = {method["name"] for method in record["methods"]}
    assert {"raw", "default head", "ordinal"} <= names
    assert len(record["labels"][1]) == 101
    for method in record["methods"]:
        assert len(method["figures"]["mse"]["scales"]) == 3


def test_a_judges_name_does_not_say_what_a_gain_is_against(cases):
    named = []
    for case in cases:
        table = replace(
            case.table, assistants={"a-greedy-generated-7b": case.table.assistants["Small"]}
        )
        named.append(replace(case, table=table, sets=replace(case.sets, table=table)))
    gains = {
        name: of(ranges_record(given, seed=0, resamples=20), f"contrast, {name}", "1")["figures"]
        for name, given in (("Small", cases), ("a-greedy-generated-7b", named))
    }
    first, second = gains.values()
    assert first["mse"]["relative_gain"] == second["mse"]["relative_gain"]


def test_logits_that_are_unknown_are_not_drawn(cases):
    for unknown in (None, torch.full_like(cases[0].table.gold, math.nan)):
        table = replace(cases[0].table, logsumexp=unknown, assistants={})
        case = Case.of("pairs", table, Folds(outer=2, inner=2), 0, "0-5")
        record = ranges_record([case, case], seed=0, resamples=100)
        assert record["logits"] == [{}, {}]
        assert record["methods"][0]["figures"]["spearman"]["spread"]["estimate"] == 0
