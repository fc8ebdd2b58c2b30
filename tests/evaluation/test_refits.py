import math
from dataclasses import replace

import pytest
import torch
from synthetic import fit, make_assistant, make_table

from scorecal.calibration.choice import fit_problems
from scorecal.calibration.folds import Folds, with_own_terms
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.solvers import Rows
from scorecal.evaluation.intervals import interval
from scorecal.evaluation.refits import learned

TABLE = make_table(80, dev=40)
NOTHING = torch.zeros_like(TABLE.logprobs)


def refitted(settings, *, table=TABLE, assistant=NOTHING, loss="nll", folds=None, refits=12):
    fitted = fit(table, settings, assistant=assistant, loss=loss, folds=folds).fitted
    return fitted, learned(fitted, table, assistant, settings, loss, seed=1, refits=refits)


@pytest.mark.parametrize("loss", ["nll", "mse"])
@pytest.mark.parametrize("prior", ["random_task", "batch"])
def test_one_batched_fit_equals_a_fit_of_each_resample(prior, loss):
    settings = HeadSettings(prior=prior)
    fitted, found = refitted(settings, loss=loss)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(40, (12, 40), generator=generator)
    strengths, biases = [], []
    for row in drawn:
        train = torch.zeros(1, 80, dtype=torch.float64)
        train[0, :40] = torch.bincount(row, minlength=40).double()
        one = torch.ones(1, dtype=torch.float64)
        settled = {"strength": one, "temperature": one, "contrast": 0 * one,
                   "ridge_bias": 0.3 * one, "ridge_mixing": 0.3 * one}  # fmt: skip
        problems = with_own_terms(TABLE, settings, 0, train, 0 * train, settled)
        heads = fit_problems(
            problems, settings, Rows(TABLE.logprobs, NOTHING, TABLE.gold, TABLE.values), loss
        )
        strengths.append(heads.strength)
        biases.append(heads.total_bias()[0, 2])
    estimate = fitted.heads.strength.item()
    wanted = interval(estimate, torch.cat(strengths), 40)
    assert found.strength == pytest.approx(wanted, abs=1e-6)
    assert found.bias[2][1:] == pytest.approx(interval(0.0, torch.stack(biases), 40)[1:], abs=1e-6)


def test_estimates_are_those_of_the_head_for_new_items_and_lie_within():
    fitted, found = refitted(HeadSettings(), folds=Folds(outer=3, inner=2), refits=50)
    head = fitted.describe(fitted.deploy)
    assert found.strength.estimate == head["lambda"]
    assert found.temperature.estimate == head["temperature"]
    assert [figure.estimate for figure in found.bias] == head["bias"]
    for figure in (found.strength, found.temperature, *found.bias):
        assert figure.low < figure.estimate < figure.high


def test_what_is_not_learned_has_no_interval():
    _, found = refitted(HeadSettings(learn=["temperature"], strength=0.5))
    assert found.strength.estimate == 0.5
    assert math.isnan(found.strength.low)
    assert all(math.isnan(figure.low) for figure in found.bias)
    assert found.temperature.low < found.temperature.high
    _, found = refitted(HeadSettings(learn=[]))
    assert math.isnan(found.temperature.low)


def test_without_refits_there_are_estimates_alone():
    fitted, found = refitted(HeadSettings(), refits=0)
    assert found.strength.estimate == fitted.heads.strength.item()
    assert all(math.isnan(figure.low) for figure in (found.strength, *found.bias))


def test_an_assistant_and_m_are_refitted_too():
    settings = HeadSettings(learn=["strength", "bias", "mixing", "contrast"], ridge_mixing=10.0)
    _, found = refitted(settings, assistant=make_assistant(TABLE))
    assert found.contrast.low < found.contrast.estimate < found.contrast.high


def test_whole_groups_are_drawn():
    one = replace(TABLE, groups=["same"] * 40 + [f"g{index}" for index in range(40)])
    fitted = fit(one, HeadSettings(), loss="nll", folds=Folds(by="row")).fitted
    found = learned(fitted, one, NOTHING, HeadSettings(), "nll", seed=1, refits=5)
    assert math.isnan(found.temperature.low)
