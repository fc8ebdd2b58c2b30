"""Learning curves: nested draws shared by all methods, and what their intervals hold."""

import math

import pytest
import torch
from synthetic import make_table, normal

from scorecal.calibration.dev_sets import DevSets
from scorecal.calibration.folds import Folds
from scorecal.calibration.methods import shrinkage_arms
from scorecal.evaluation import learning
from scorecal.evaluation.compare import Case
from scorecal.evaluation.learning import learning_methods, learning_record, nested_draws
from scorecal.functional.scaling import expected_score

GROUPS = [f"g{index // 4}" for index in range(160)]


def case_of(*, outer: int = 0, groups: list[str] | None = None, items: int = 160) -> Case:
    folds = Folds(outer=outer, inverted=outer > 0, inner=2)
    return Case.of("synthetic", make_table(items, groups=groups), folds, 0)


@pytest.mark.parametrize("outer", [0, 2])
def test_draws_are_nested_whole_groups_of_dev_rounded_up(outer):
    case = case_of(outer=outer, groups=GROUPS)
    drawn = nested_draws(case, 6, seed=0)
    assert drawn.sizes == [0, 10, 25, 50]
    for size, larger in zip(drawn.train, drawn.train[1:], strict=False):
        assert (size <= larger).all()
    for size, train in zip(drawn.sizes, drawn.train, strict=True):
        for draw, row in enumerate(train):
            assert not (row & ~case.sets.train[drawn.split[draw]]).any()
            assert int(row.sum()) == 4 * math.ceil(size / 4)
            of = {GROUPS[item] for item in row.nonzero().flatten().tolist()}
            assert int(row.sum()) == 4 * len(of)
    assert drawn.split.tolist() == ([0, 1] * 3 if outer else [0] * 6)


def test_draws_differ_and_are_the_same_again_from_the_same_seed():
    case = case_of()
    first, again, other = (nested_draws(case, 4, seed).train for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(row.tolist()) for row in first[1]}) == 4


def test_without_labels_every_arm_is_its_start():
    case = case_of()
    table = case.table
    nothing = torch.zeros(2, len(table.ids), dtype=torch.bool)
    sets = DevSets(table, nothing, case.sets.folds)
    arms = {arm.name: arm.answer(sets).score for arm in shrinkage_arms(table)}
    raw = expected_score(table.logprobs, table.values)
    assert torch.allclose(arms["shrink to 0"], raw.expand(2, -1), atol=1e-9)
    assert torch.allclose(arms["shrink to batch"], raw.expand(2, -1), atol=1e-9)
    assert not torch.allclose(arms["shrink to B"], arms["shrink to B, labels permuted"])


def test_every_arm_and_method_has_a_figure_of_each_size_and_auto_is_held_against_the_best():
    case = case_of()
    record = learning_record(case, draws=3, resamples=120, seed=0)
    assert record["sizes"] == [0, 10, 25, 50]
    assert set(record["methods"]) == {method.name for method in learning_methods(case)}
    curve = record["methods"]["shrink to B"]["mse"]
    for low, point, high in zip(curve["low"], curve["estimate"], curve["high"], strict=True):
        assert low < point < high
    assert math.isnan(record["methods"]["ridge regression"]["mse"]["estimate"][0])
    against = record["auto_against_best"]["mse"]
    for index, name in enumerate(against["best"]):
        figures = {
            other: found["mse"]["estimate"][index]
            for other, found in record["methods"].items()
            if other != "auto" and not math.isnan(found["mse"]["estimate"][index])
        }
        assert figures[name] == min(figures.values())
        gap = record["methods"]["auto"]["mse"]["estimate"][index] - figures[name]
        assert against["estimate"][index] == pytest.approx(gap)


@pytest.fixture
def few_methods(monkeypatch):
    """The methods that need no fit of a head."""
    quick = ("raw", "ridge regression")

    def named(case: Case):
        return [method for method in learning_methods(case) if method.name in quick]

    monkeypatch.setattr(learning, "learning_methods", named)


@pytest.mark.usefixtures("few_methods")
def test_figures_are_means_over_draws_of_each_draws_own_test_items():
    case = case_of(outer=2)
    record = learning_record(case, draws=2, resamples=100, seed=3)
    raw = expected_score(case.table.logprobs, case.table.values)
    gold = case.table.gold
    errors = [(raw[own] - gold[own]).square().mean().item() for own in case.test]
    found = record["methods"]["raw"]["mse"]["estimate"]
    assert found == pytest.approx([sum(errors) / 2] * len(found))


@pytest.mark.usefixtures("few_methods")
def test_an_interval_holds_both_the_draw_and_the_test_items():
    case = case_of()
    few = learning_record(case, draws=1, resamples=400, seed=0)["methods"]["ridge regression"]
    many = learning_record(case, draws=12, resamples=400, seed=0)["methods"]["ridge regression"]
    spread = [curve["mse"]["high"][1] - curve["mse"]["low"][1] for curve in (few, many)]
    assert spread[1] > spread[0]  # with one draw only the test items vary


def test_gold_of_test_items_changes_no_fit():
    case = case_of()
    poisoned = make_table(160)
    drawn = nested_draws(case, 2, seed=0)
    train = drawn.train[2]
    outside = ~train.any(0)
    poisoned.gold[outside] = normal(160, seed=9)[outside].clamp(-2, 2) + 2
    for method in learning_methods(case):
        clean = method.answer(DevSets(case.table, train, case.sets.folds))
        dirty = method.answer(DevSets(poisoned, train, case.sets.folds))
        assert torch.equal(clean.score, dirty.score), method.name
