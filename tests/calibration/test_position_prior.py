"""The position prior of a table: one fixed order corrected by what all balanced ones show."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import special
from synthetic import fit, ordered_table

from scorecal.calibration.folds import Folds
from scorecal.calibration.head import HeadSettings
from scorecal.judging.positions import balanced_orders, fixed_order_mass, table_position_mass
from scorecal.judging.priors import prior_term

BIAS = (0.9, 0.2, 0.0, 0.4)


@pytest.fixture
def table():
    return ordered_table(30, 4, position_bias=BIAS)


def mass_by_loop(table):
    """[items, positions], over the rotations of the written order."""
    labels, written = list(table.labels), table.written_order.split()
    mass = np.zeros(table.logprobs.shape)
    for start in range(4):
        order = written[start:] + written[:start]
        probs = special.softmax(table.by_order[" ".join(order)].numpy(), -1)
        for position, label in enumerate(order):
            mass[:, position] += probs[:, labels.index(label)] / 4
    return mass


def test_masses_by_position_are_those_of_a_plain_loop(table):
    np.testing.assert_allclose(table_position_mass(table), mass_by_loop(table))


def test_other_orders_than_the_balanced_ones_do_not_count(table):
    more = ordered_table(30, 4, position_bias=BIAS, orders=["both_directions", {"random": 4}])
    assert len(more.by_order) > 4
    assert torch.equal(table_position_mass(more), table_position_mass(table))


def test_a_written_order_need_not_rise(table):
    """Written from the best down, the first position is the best label's."""
    falling = ordered_table(30, 4, position_bias=BIAS, orders=["both_directions"])
    falling = replace(falling, written_order="3 2 1 0", orders=("3 2 1 0",))
    assert balanced_orders(falling) == ["3 2 1 0", "2 1 0 3", "1 0 3 2", "0 3 2 1"]
    mass = table_position_mass(falling)
    np.testing.assert_allclose(mass, mass_by_loop(falling))
    assert torch.equal(fixed_order_mass(falling), mass.flip(-1))


@pytest.mark.parametrize("order", ["0 1 2 3", "2 3 0 1"])
def test_a_label_s_mass_is_that_of_its_position_in_the_fixed_order(order, table):
    fixed = replace(table, orders=(order,))
    mass, found = mass_by_loop(table), fixed_order_mass(fixed)
    for level, label in enumerate(table.labels):
        np.testing.assert_allclose(found[:, level], mass[:, order.split().index(label)])


def test_the_prior_is_measured_on_each_problem_s_own_train_rows(table):
    train = torch.zeros(3, 30, dtype=torch.float64)
    train[0, :10], train[1, 5:] = 1, 2
    term = prior_term("position", {}, table.logprobs, train, mass=fixed_order_mass(table))
    mass = mass_by_loop(table)
    for found, own in zip(term[:2], (slice(10), slice(5, None)), strict=True):
        np.testing.assert_allclose(found, np.log(1 / 4) - np.log(mass[own].mean(0)))
    assert term[2].tolist() == [0] * 4  # nothing to measure


def test_a_judge_without_a_view_is_corrected_to_within_sampling_error():
    """Every score is then as probable as any other, but for the noise of the orders."""
    table = ordered_table(3000, 4, position_bias=BIAS, order_noise=0.1)
    flat = {  # the bias and the noise alone
        name: logprobs - table.logprobs + torch.tensor(BIAS).double()
        for name, logprobs in table.by_order.items()
    }
    table = replace(table, by_order=flat, logprobs=flat[table.written_order])
    train = torch.ones(1, 3000, dtype=torch.float64)
    term = prior_term("position", {}, table.logprobs, train, mass=fixed_order_mass(table))
    raw, corrected = (logits.softmax(-1) for logits in (table.logprobs, table.logprobs + term))
    error = corrected.std(0) / 3000**0.5
    assert ((corrected.mean(0) - 0.25).abs() < 4 * error + 1e-3).all()
    assert raw.mean(0)[0] > 0.35


def test_rows_keep_what_the_prior_needs(table):
    kept = table.rows(torch.arange(30) % 3 == 0)
    torch.testing.assert_close(fixed_order_mass(kept), fixed_order_mass(table)[::3])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            {"orders": (), "by_order": {}, "written_order": ""},
            "needs a judge that was shown a rubric in several orders, and table 'synthetic' is of "
            "one without. Set `--model.head.prior`",
        ),
        (
            {"orders": ("0 1 2 3", "1 2 3 0", "2 3 0 1", "3 0 1 2")},
            "corrects one fixed order of the rubric, and the mean over 4 orders is calibrated "
            "here. Set `--data.task.orders none`",
        ),
        (
            {"written_order": "3 2 1 0"},
            "measured on the 4 balanced orders of the rubric, and table 'synthetic' lacks 4 of "
            "them, '3 2 1 0' first. Elicit a store with `--data.task.orders balanced`",
        ),
    ],
    ids=["no rubric", "several orders", "no balanced orders"],
)
def test_where_the_prior_cannot_be_measured_an_error_says_what_to_do(made, message, table):
    with pytest.raises(ValueError, match="^the prior `position` ") as error:
        fixed_order_mass(replace(table, **made))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_head_is_fitted_with_each_split_s_own_position_prior(table):
    folds = Folds(outer=3, inner=2)
    fitted = fit(table, HeadSettings(prior="position"), folds=folds).fitted
    mass = mass_by_loop(table)
    for problem, train in enumerate(fitted.train):
        share = mass[train.numpy() > 0].mean(0)
        found = fitted.heads.prior[problem].numpy()
        np.testing.assert_allclose(found, np.log(1 / 4) - np.log(share))


def test_at_its_start_the_head_takes_the_prior_away(table):
    settings = HeadSettings(prior="position", learn=[])
    fitted = fit(table, settings, folds=Folds(inner=2)).fitted
    logits = fitted.logits(table.logprobs, torch.zeros_like(table.logprobs))[0]
    share = mass_by_loop(table)[:15].mean(0)
    expected = special.softmax(table.logprobs.numpy() - np.log(share), -1)
    np.testing.assert_allclose(logits.softmax(-1), expected)


def test_a_head_on_the_mean_of_orders_has_no_position_prior(table):
    averaged = ordered_table(30, 4, averaged="balanced")
    with pytest.raises(ValueError, match=r"the mean over 4 orders.*--data\.task\.orders none"):
        fit(averaged, HeadSettings(prior="position"), folds=Folds(inner=2))
