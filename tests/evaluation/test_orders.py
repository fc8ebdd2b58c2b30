"""What a comparison says of the orders in which a judge was shown a rubric."""

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import special, stats
from synthetic import make_table, ordered_table

from scorecal.calibration.folds import Folds
from scorecal.evaluation.blocks import markdown
from scorecal.evaluation.compare import Case, Comparison, compare
from scorecal.evaluation.diagnosis import case_record
from scorecal.evaluation.evidence import fold_draws, numbered_groups
from scorecal.evaluation.orders import Rows, in_orders, orders_record, position_record
from scorecal.evaluation.presentation import drawn, tables
from scorecal.evaluation.report import comparison_part
from scorecal.functional.positions import cramers_v, shift_test
from scorecal.functional.resampling import bootstrap_weights
from scorecal.judging.positions import table_position_mass

LEVELS, RESAMPLES = 4, 60
BIAS = (1.2, 0.3, 0.0, 0.5)
ROTATIONS = ["0 1 2 3", "1 2 3 0", "2 3 0 1", "3 0 1 2"]


ABOUT = {"command": "compare", "version": "0", "seed": 0, "resamples": RESAMPLES, "draws": 0}


def compared(table, *, folds=None, resamples=RESAMPLES):
    """A comparison whose methods nobody asks for."""
    case = Case.of("task", table, folds or Folds(outer=2, inverted=True, inner=2), 0)
    drawn = case.resampled(resamples, torch.Generator().manual_seed(0))
    return Comparison(case, [], fold_draws(case.test.double(), drawn))


@pytest.fixture(scope="module")
def table():
    return ordered_table(
        96, LEVELS, position_bias=BIAS, orders=["both_directions", {"random": 4}], items_a_group=2
    )


@pytest.fixture(scope="module")
def comparison(table):
    return compared(table)


@pytest.fixture(scope="module")
def record(comparison):
    return orders_record(comparison)


@pytest.fixture(scope="module")
def whole(table):
    """Everything about a case, its orders included."""
    comparison = compare(Case.of("task", table, Folds(inner=2), 0), seed=0, resamples=20)
    return {"title": "a judge", "slug": "1-a-judge", **case_record(comparison)}


def reference(case, probs):
    """Means over the folds of scipy's figures of the raw judge; probs [items, levels]."""
    gold, score = case.table.gold.numpy(), probs @ np.arange(LEVELS)
    found = {"spearman": [], "pearson": [], "mse": []}
    for test in case.test.numpy():
        found["spearman"].append(stats.spearmanr(score[test], gold[test]).statistic)
        found["pearson"].append(stats.pearsonr(score[test], gold[test]).statistic)
        found["mse"].append(np.square(score[test] - gold[test]).mean())
    return {name: pytest.approx(np.mean(values)) for name, values in found.items()}


def points(figures):
    return {name: figure["estimate"] for name, figure in figures.items()}


def probs_of(table, order):
    return special.softmax(table.by_order[order].numpy(), -1)


# Positions


def test_position_and_score_prior_are_means_over_items_and_balanced_orders(table, record):
    positions, scores = np.zeros(LEVELS), np.zeros(LEVELS)
    for order in ROTATIONS:
        mean = probs_of(table, order).mean(0) / LEVELS
        scores += mean
        for position, label in enumerate(order.split()):
            positions[position] += mean[int(label)]
    assert record["position_prior"]["estimate"] == pytest.approx(positions.tolist())
    assert record["score_prior"] == pytest.approx(scores.tolist())
    assert record["cramers_v"] == pytest.approx(
        math.sqrt(LEVELS * np.square(positions - 1 / LEVELS).sum() / (LEVELS - 1))
    )
    assert (record["items"], record["groups"]) == (96, 48)
    assert record["p"] == pytest.approx(1 / 2001)  # a bias of over a nat
    assert positions.argmax() == 0


def test_intervals_of_the_position_prior_are_from_resamples_of_groups(table):
    record = position_record(table, resamples=400, seed=1)
    mass, groups = table_position_mass(table), numbered_groups(table)
    generator = torch.Generator().manual_seed(1)
    weights = bootstrap_weights(groups, resamples=400, generator=generator)
    samples = torch.stack([(row[:, None] * mass).sum(0) / row.sum() for row in weights])
    for at in range(LEVELS):
        low, high = (record["position_prior"][name][at] for name in ("low", "high"))
        inside = ((samples[:, at] >= low) & (samples[:, at] <= high)).double().mean()
        assert inside == pytest.approx(0.955, abs=0.01)


def test_no_gold_is_read_for_the_priors(table):
    other = replace(table, gold=table.gold.flip(0))
    seen, unseen = (position_record(one, resamples=100, seed=0) for one in (table, other))
    assert seen == unseen


# Single orders


def test_every_single_order_has_the_figures_of_the_judge_under_it(table, comparison, record):
    kinds = {single["order"]: single["kind"] for single in record["single"]}
    assert list(kinds)[:LEVELS] == ROTATIONS
    assert set(kinds) == set(table.by_order)
    for order, kind in kinds.items():
        backwards = " ".join(order.split()[::-1])
        expected = (
            "balanced" if order in ROTATIONS else
            "reversed" if backwards in ROTATIONS else "random"
        )  # fmt: skip
        assert kind == expected
    for single in record["single"]:
        assert points(single["figures"]["raw"]) == reference(
            comparison.case, probs_of(table, single["order"])
        )


def test_single_orders_are_compared_with_the_written_one_on_the_same_resamples(comparison, record):
    rows = Rows(comparison)
    written = rows.of(["0 1 2 3"])
    assert record["single"][0]["against_written"] == {"raw": {}, "default head": {}}
    for single in record["single"][1:]:
        samples = rows.of([single["order"]]).samples["mse"] - written.samples["mse"]
        gap = single["against_written"]["raw"]["mse"]
        assert gap["estimate"] == pytest.approx(
            single["figures"]["raw"]["mse"]["estimate"] - written.figures["mse"].estimate
        )
        assert samples.min() <= gap["low"] <= gap["high"] <= samples.max()
        assert 0 <= gap["q"] <= 1


def test_single_orders_are_the_same_whatever_the_task_averages(table, record):
    other = ordered_table(
        96, LEVELS, position_bias=BIAS, orders=["both_directions", {"random": 4}], items_a_group=2,
        averaged="balanced",
    )  # fmt: skip
    assert not torch.equal(other.logprobs, table.logprobs)
    assert orders_record(compared(other)) == record


# Numbers of orders


def test_figures_by_number_are_means_over_subsets(table, comparison, record):
    assert [found["orders"] for found in record["by_number"]] == [1, 2, 3, 4]
    random = [single["order"] for single in record["single"] if single["kind"] == "random"]
    assert len(random) == 4
    for found in record["by_number"]:
        for kind, orders in (("balanced", ROTATIONS), ("random", random)):
            subsets = list(itertools.combinations(orders, found["orders"]))
            assert found[kind]["of"] == len(subsets)
            assert found[kind]["subsets"] == (len(subsets) if len(subsets) < 6 else 5)
            if len(subsets) > 5:
                continue
            each = [
                reference(comparison.case, np.mean([probs_of(table, order) for order in subset], 0))
                for subset in subsets
            ]
            for metric, point in points(found[kind]["figures"]).items():
                assert point == pytest.approx(np.mean([one[metric].expected for one in each]))


def test_balanced_orders_are_compared_with_as_many_random_ones(record):
    for found in record["by_number"]:
        for metric, gap in found["balanced_against_random"].items():
            balanced, random = (
                found[kind]["figures"][metric]["estimate"] for kind in ("balanced", "random")
            )
            assert gap["estimate"] == pytest.approx(balanced - random)
            assert gap["low"] <= gap["high"]


def test_a_mean_over_subsets_has_the_interval_of_its_mean_not_of_one(record):
    """One order of several, drawn at random, is as good as their mean figure."""
    one = record["by_number"][0]["balanced"]["figures"]["mse"]
    each = [single["figures"]["raw"]["mse"] for single in record["single"][:LEVELS]]
    assert one["estimate"] == pytest.approx(np.mean([figure["estimate"] for figure in each]))
    assert one["high"] - one["low"] <= max(figure["high"] - figure["low"] for figure in each)


def test_a_store_with_balanced_orders_alone_has_no_random_ones():
    record = orders_record(compared(ordered_table(60, 3, position_bias=BIAS[:3])))
    assert [found["orders"] for found in record["by_number"]] == [1, 2, 3]
    for found in record["by_number"]:
        assert set(found) == {"orders", "balanced"}


def test_two_scores_have_two_balanced_orders_and_no_reversed_ones():
    table = ordered_table(60, 2, position_bias=(1.0, 0.0), orders=["balanced"])
    record = orders_record(compared(table))
    assert [(row["order"], row["kind"]) for row in record["single"]] == [
        ("0 1", "balanced"), ("1 0", "balanced"),
    ]  # fmt: skip
    assert [row["balanced"]["of"] for row in record["by_number"]] == [2, 1]


def test_the_mean_of_orders_is_that_of_renormalised_probabilities(table):
    made = in_orders(table, ROTATIONS[:3])
    expected = np.mean([probs_of(table, order) for order in ROTATIONS[:3]], 0)
    np.testing.assert_allclose(made.logprobs.exp(), expected)
    assert made.orders == tuple(ROTATIONS[:3])
    assert torch.equal(in_orders(table, ["1 2 3 0"]).logprobs, table.by_order["1 2 3 0"])


# One order in place of all


def test_the_position_prior_is_divided_out_of_the_written_order(table, comparison, record):
    case, names = comparison.case, [row["name"] for row in record["one_order"]]
    assert names[:3] == ["one order", "one order, position prior", "balanced orders"]
    assert [row["orders"] for row in record["one_order"]] == [1, 1, 4, 1, 1, 4]
    probs = probs_of(table, "0 1 2 3")
    gold, mass, expected = table.gold.numpy(), table_position_mass(table).numpy(), []
    for test, train in zip(case.test.numpy(), case.sets.train.numpy(), strict=True):
        corrected = probs / mass[train].mean(0)
        score = corrected / corrected.sum(-1, keepdims=True) @ np.arange(LEVELS)
        expected.append(np.square(score[test] - gold[test]).mean())
    found = {row["name"]: points(row["figures"]) for row in record["one_order"]}
    assert found["one order, position prior"]["mse"] == pytest.approx(np.mean(expected))
    assert found["one order"] == reference(case, probs)
    balanced = np.mean([probs_of(table, order) for order in ROTATIONS], 0)
    assert found["balanced orders"] == reference(case, balanced)
    assert record["one_order"][0]["against_one"] == {}


def biased(seed, *, bias=(1.5, 0.0, 0.0, 0.0)):
    return ordered_table(
        400, LEVELS, position_bias=bias, order_noise=0.2, seed=seed, signal=1.0, dev=100
    )


def test_what_the_position_prior_recovers_is_its_share_of_the_gain():
    record = orders_record(compared(biased(3), folds=Folds(inner=2), resamples=200))
    found = {row["name"]: points(row["figures"]) for row in record["one_order"]}
    gain = found["balanced orders"]["mse"] - found["one order"]["mse"]
    mine = found["one order, position prior"]["mse"] - found["one order"]["mse"]
    assert gain < 0
    assert record["recovered"]["mse"]["estimate"] == pytest.approx(mine / gain)
    assert record["recovered"]["mse"]["low"] < mine / gain < record["recovered"]["mse"]["high"]


def test_nothing_is_recovered_where_nothing_is_gained(whole):
    """Without a bias and without noise all orders are one."""
    table = ordered_table(60, LEVELS, order_noise=0.0)
    record = orders_record(compared(table))
    assert record["recovered"] == {}
    assert record["p"] == 1
    assert record["cramers_v"] == pytest.approx(0, abs=1e-12)
    text = markdown(tables({"task": [{**whole, "orders": record}]}, ABOUT))
    assert "gains nothing reliable that could be recovered" in text


# A judge of known bias


def without_bias(seed):
    """The same judge, its noise included, without a view on positions."""
    return biased(seed, bias=(0.0, 0.0, 0.0, 0.0))


def test_balanced_orders_correct_a_planted_bias_to_within_sampling_error():
    """One order's mean score is off by its bias; that of all orders is the unbiased judge's."""
    values = torch.arange(LEVELS).double()
    gaps = {"one": [], "all": []}
    for seed in range(0, 400, 10):
        with_it, without = biased(seed, bias=(0.4, 0.0, 0.0, 0.0)), without_bias(seed)
        for name, orders in (("one", ROTATIONS[:1]), ("all", ROTATIONS)):
            scores = [
                in_orders(one, orders).logprobs.softmax(-1) @ values for one in (with_it, without)
            ]
            gaps[name].append((scores[0] - scores[1]).mean().item())
    noise = np.std(
        [in_orders(without_bias(seed), ROTATIONS).logprobs.softmax(-1).mv(values).mean().item()
         for seed in range(0, 400, 10)]
    )  # fmt: skip
    assert abs(np.mean(gaps["all"])) < noise
    assert abs(np.mean(gaps["all"])) < 0.2 * abs(np.mean(gaps["one"]))


def rejected(tables_):
    found = [
        shift_test(
            table_position_mass(table), numbered_groups(table), permutations=199,
            generator=torch.Generator().manual_seed(number),
        )
        <= 0.05
        for number, table in enumerate(tables_)
    ]  # fmt: skip
    return np.mean(found)


def test_a_planted_bias_is_found_and_none_is_not_found_where_there_is_none():
    def drawn_tables(bias, draws):
        for seed in range(draws):
            yield ordered_table(
                120, LEVELS, position_bias=bias, items_a_group=3, seed=1000 + 1000 * seed
            )

    assert rejected(drawn_tables((0.2, 0.0, 0.0, 0.0), 60)) >= 0.8
    assert 0.03 <= rejected(drawn_tables((), 600)) <= 0.07


def test_v_is_recovered_from_some_items():
    """The V of 200 items is that of 20,000, but for the noise that any V has."""
    everything, some = (
        ordered_table(items, LEVELS, position_bias=BIAS, seed=items) for items in (20_000, 200)
    )
    expected, found = (
        cramers_v(table_position_mass(one).mean(0)).item() for one in (everything, some)
    )
    mass = table_position_mass(some)
    error = (mass.var(0).sum() / 200 * LEVELS / (LEVELS - 1)).sqrt().item()
    assert abs(found - expected) < 4 * error


# What is written


def test_a_table_that_lacks_a_balanced_order_has_no_such_record(table):
    kept = {name: logprobs for name, logprobs in table.by_order.items() if name != "2 3 0 1"}
    assert orders_record(compared(replace(table, by_order=kept))) is None
    assert orders_record(compared(make_table(40))) is None  # or has no rubric


def test_tables_and_figures_show_the_record(whole, tmp_path):
    records = [whole]
    text = markdown(tables({"task": records}, ABOUT))
    for heading in (
        "task: which position of the rubric the judge prefers",
        "task: single orders of the rubric, a judge",
        "task: number of orders, a judge",
        "task: one order in place of all, a judge",
    ):
        assert f"### {heading}" in text
    assert "≤ 0.0005" in text
    assert re.search(r"\| 0 1 2 3 \| written \|", text)
    assert re.search(r"\| 3 2 1 0 \| reversed \|", text)
    assert re.search(r"\| 2 \| 5 of 6 \|", text)
    assert "nan" not in text
    names = [name for name, _ in drawn("task", records)]
    assert "task_positions" in names
    # As `report` reads it again.
    (tmp_path / "tables.json").write_text(json.dumps({**ABOUT, "tasks": {"task": records}}))
    again = comparison_part(tmp_path)
    assert [part for part in again if getattr(part, "name", "") == "task_positions"]
