import math
from collections import Counter
from itertools import product

import pytest
import torch
from synthetic import make_table, problems_of

from scorecal.calibration.folds import (
    MIXING_RIDGES,
    RIDGES,
    Folds,
    Select,
    candidates,
    make_problems,
    make_splits,
    partition,
)
from scorecal.calibration.head import RIDGE, HeadSettings

GROUPED = make_table(60, groups=[f"document {index % 12}" for index in range(60)])
EVERY_ROW = torch.ones(60, dtype=torch.bool)
MIXING = ["strength", "temperature", "bias", "mixing"]


@pytest.mark.parametrize("count", [2, 5, 12])
def test_parts_cover_every_row_once_and_keep_groups_together(count):
    parts = partition(GROUPED, EVERY_ROW, count, "group", seed=0)
    assert len(parts) == count
    assert torch.stack(parts).sum(0).tolist() == [1] * 60
    for part in parts:
        inside = {group for group, here in zip(GROUPED.groups, part, strict=True) if here}
        assert part.sum() == 5 * len(inside)
    sizes = [int(part.sum()) // 5 for part in parts]  # in groups
    assert max(sizes) - min(sizes) <= 1


def test_rows_are_divided_one_by_one_on_demand():
    parts = partition(GROUPED, EVERY_ROW, 5, "row", seed=0)
    assert [int(part.sum()) for part in parts] == [12] * 5


def test_fewer_groups_than_parts_are_left_out_one_at_a_time():
    parts = partition(GROUPED, EVERY_ROW, 20, "group", seed=0)
    assert [int(part.sum()) for part in parts] == [5] * 12


def test_only_the_given_rows_are_divided():
    rows = torch.arange(60) < 24
    parts = partition(GROUPED, rows, 4, "group", seed=0)
    assert torch.equal(torch.stack(parts).any(0), rows)


def test_a_seed_gives_the_same_parts_and_another_seed_others():
    first, again, other = (
        torch.stack(partition(GROUPED, EVERY_ROW, 4, "group", seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_too_few_rows_for_the_folds_are_counted():
    with pytest.raises(ValueError, match=r"3 dev rows can't make 5 folds\. Lower"):
        partition(GROUPED, torch.arange(60) < 3, 5, "group", seed=0)


def test_one_group_alone_makes_no_folds():
    table = make_table(10, groups=["essay"] * 10)
    with pytest.raises(ValueError, match=r"all 10 dev rows belong to the group 'essay'.*by row"):
        partition(table, torch.ones(10, dtype=torch.bool), 5, "group", seed=0)


@pytest.mark.parametrize("folds", [Folds(inner=0), Folds(inner=1), Folds(inner=-1),
                                   Folds(outer=1), Folds(outer=-2)], ids=str)  # fmt: skip
def test_fewer_than_two_folds_are_refused_by_name(folds):
    with pytest.raises(ValueError, match=r"(?i)(inner|outer|folds).*(2|two)"):
        problems_of(make_table(), HeadSettings(), folds)


# Splits


def test_the_datas_own_split_is_one_head_to_deploy():
    [split] = make_splits(make_table(50, dev=20), Folds(), 0)
    assert split.name == "deploy"
    assert torch.equal(split.dev, torch.arange(50) < 20)
    assert torch.equal(split.test, ~split.dev)


@pytest.mark.parametrize("inverted", [False, True])
def test_outer_folds_pool_the_splits_and_inverted_ones_fit_on_a_fifth(inverted):
    *splits, deploy = make_splits(make_table(50), Folds(outer=5, inverted=inverted), 0)
    assert [split.name for split in splits] == [f"fold {number}" for number in range(1, 6)]
    for split in splits:
        assert torch.equal(split.dev, ~split.test)
        assert int(split.dev.sum()) == (10 if inverted else 40)
    tested = torch.stack([split.test for split in splits]).sum(0)
    assert tested.tolist() == [4 if inverted else 1] * 50
    assert deploy.name == "deploy"
    assert deploy.dev.all()
    assert not deploy.test.any()


# Candidates and problems


def test_without_a_choice_there_is_one_candidate_with_the_settings():
    settings = HeadSettings(strength=0.5, temperature=0.2, contrast=0.1, ridge_bias=2.0)
    [only] = candidates(settings, None)
    assert only[:4] == (0.5, 0.2, 0.1, 2.0)


def test_every_combination_of_selected_values_is_a_candidate_in_order():
    settings = HeadSettings(learn=[])
    select = Select(strength=[0.1, 0.2], temperature=[1.0, 0.2], contrast=[0.0, 0.5])
    found = [tuple(candidate[:3]) for candidate in candidates(settings, select)]
    assert found == list(product([0.1, 0.2], [1.0, 0.2], [0.0, 0.5]))


@pytest.mark.parametrize(
    ("options", "biases", "mixings"),
    [
        ({"ridge_bias": "auto"}, RIDGES, (RIDGE,)),
        ({"ridge_bias": "auto", "learn": []}, (RIDGE,), (RIDGE,)),
        ({"ridge_mixing": "auto", "learn": MIXING}, (RIDGE,), MIXING_RIDGES),
        ({"ridge_mixing": 3.0, "learn": MIXING}, (RIDGE,), (3.0,)),
    ],
)
def test_an_automatic_ridge_is_a_grid_where_it_is_used(options, biases, mixings):
    found = candidates(HeadSettings(**options), None)
    assert [candidate[3:] for candidate in found] == list(product(biases, mixings))


def test_two_automatic_ridges_are_a_cross_each_at_the_others_default():
    found = [candidate[3:] for candidate in
             candidates(HeadSettings(ridge_bias="auto", learn=MIXING), None)]  # fmt: skip
    assert sorted(found) == sorted(
        [(rho, math.inf) for rho in RIDGES] + [(RIDGE, rho) for rho in MIXING_RIDGES]
    )


def test_the_ridge_grid_runs_over_six_decades_by_halves():
    assert len(RIDGES) == 13
    assert RIDGES[::2] == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10, 100, 1000])


@pytest.mark.parametrize("name", ["strength", "temperature", "contrast"])
def test_a_learned_name_can_not_be_selected_too(name):
    settings = HeadSettings(learn=[name, "bias"])
    with pytest.raises(ValueError, match=rf"both name '{name}'.*Take '{name}' out of `learn`"):
        candidates(settings, Select(**{name: [0.5]}))


def test_an_empty_grid_is_named():
    with pytest.raises(ValueError, match=r"`model\.select\.strength` lists no values"):
        candidates(HeadSettings(learn=[]), Select(strength=[]))


@pytest.mark.parametrize("values", [[0.0], [1.0, -0.2]])
def test_a_selected_temperature_must_be_above_zero(values):
    with pytest.raises(ValueError, match=r"temperature.*above 0"):
        candidates(HeadSettings(learn=[]), Select(temperature=values))


@pytest.mark.parametrize("folds", [Folds(), Folds(outer=5), Folds(outer=5, inverted=True)], ids=str)
@pytest.mark.parametrize("ridge", [0.3, "auto"])
def test_inner_folds_lie_in_dev_and_every_candidate_is_fitted_on_all_of_it(folds, ridge):
    table = make_table(60, groups=[f"g{index // 2}" for index in range(60)])
    settings = HeadSettings(ridge_bias=ridge)
    problems, searches = problems_of(table, settings, folds)
    seen = []
    for search in searches:
        dev = search.split.dev
        for candidate, full in enumerate(search.full.tolist()):
            assert torch.equal(problems.train[full].bool(), dev)
            assert torch.equal(problems.held_out[full].bool(), search.split.test)
            inner = search.inner[candidate]
            train, held_out = problems.train[inner].bool(), problems.held_out[inner].bool()
            assert torch.equal(train ^ held_out, dev.expand(len(inner), -1))
            assert not (train & held_out).any()
            for here, there in zip(train, held_out, strict=True):
                groups = [{table.groups[i] for i in rows.nonzero()} for rows in (here, there)]
                assert not groups[0] & groups[1]
            # one or several divisions of dev, each of them complete
            repeats = math.ceil(200 / int(dev.sum())) if ridge == "auto" else 1
            assert held_out.sum(0)[dev].tolist() == [min(3, repeats)] * int(dev.sum())
            seen += [*inner.tolist(), full]
    assert sorted(seen) == list(range(len(problems.train)))
    ridges = Counter(problems.ridge_bias.tolist())
    assert len(ridges) == (13 if ridge == "auto" else 1)
    assert len(set(ridges.values())) == 1


def test_prior_and_centre_come_from_a_problems_own_rows():
    table = make_table(40)
    problems, _ = problems_of(table, HeadSettings(prior="batch"), Folds(outer=4))
    normalised = table.logprobs.log_softmax(-1)
    for train, prior, centre in zip(problems.train, problems.prior, problems.centre, strict=True):
        rows = normalised[train.bool()]
        torch.testing.assert_close(centre, rows.mean(0))
        torch.testing.assert_close(prior, math.log(1 / 5) - rows.exp().mean(0).log())


def test_with_nothing_to_fit_all_of_dev_judges_the_fixed_values():
    table, settings = make_table(), HeadSettings(learn=[])
    select, folds = Select(strength=[0.5, 1.0]), Folds()
    problems, [search] = make_problems(
        table, make_splits(table, folds, 0), folds, settings, select, 0
    )
    assert search.inner.shape == (2, 1)
    assert torch.equal(problems.held_out[search.inner[0, 0]].bool(), search.split.dev)
    assert problems.strength[search.full].tolist() == [0.5, 1.0]
