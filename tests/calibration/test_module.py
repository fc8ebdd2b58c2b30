import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import special, stats
from synthetic import fit, make_assistant, make_objective, make_table, normal

from scorecal.calibration.calibrators import ridge_fit
from scorecal.calibration.choice import choose
from scorecal.calibration.folds import Folds, Select, partition
from scorecal.calibration.head import RIDGE, HeadSettings
from scorecal.calibration.solvers import newton

close = partial(torch.testing.assert_close, rtol=0)
GRID = [round(0.1 * step, 1) for step in range(1, 11)]
PAPER = HeadSettings(learn=[], temperature=0.2)


# Fitting


@pytest.mark.parametrize("loss", ["nll", "mse", "rps"])
def test_a_run_ends_at_the_minimum_and_stops_there(loss):
    table = make_table()
    module = fit(table, loss=loss)
    convex, objective = (
        make_objective(table, module.settings, name, problems=module.problems)
        for name in ("nll", loss)
    )
    minimum = newton(objective, newton(convex, convex.head.start()))
    expected = objective.head.parameters(minimum)
    for actual, wanted in zip(module.parameters_by_problem(), expected, strict=True):
        close(actual, wanted, atol=1e-6)
    assert module.trainer.current_epoch < 30


@pytest.mark.parametrize("solver", ["newton", "adam", "lbfgs"])
def test_the_same_seed_gives_the_same_parameters_to_the_last_bit(solver):
    folds = Folds(outer=3, inner=2)
    runs = [fit(make_table(), folds=folds, solver=solver, epochs=3) for _ in range(2)]
    assert torch.equal(*(run.natural for run in runs))
    other = fit(make_table(), folds=folds, solver=solver, epochs=3, seed=1)
    assert not torch.equal(other.natural, runs[0].natural)


def test_deploy_is_fitted_on_everything_and_each_fold_as_a_run_of_its_own_would():
    table = make_table(60)
    fitted = fit(table, folds=Folds(outer=3)).fitted
    assert fitted.names == ["fold 1", "fold 2", "fold 3", "deploy"]
    assert fitted.train[3].all()
    assert not fitted.held_out[3].any()
    for problem in range(4):
        rows = fitted.train[problem].tolist()
        alone = replace(table, splits=["dev" if row else "test" for row in rows])
        [head] = fit(alone).fitted.heads.bias
        close(head, fitted.heads.bias[problem], atol=1e-6)


@pytest.mark.parametrize("solver", ["newton", "adam", "lbfgs"])
def test_an_inner_fold_of_constant_gold_leaves_a_pearson_fit_finite(solver):
    table = make_table()
    table.gold[:40] = 2.0
    table.gold[0] = 3.0  # of 40 dev rows one alone differs: its fold leaves nothing to correlate
    module = fit(table, loss="pearson", solver=solver, epochs=3)
    assert module.natural.isfinite().all()


def test_gold_that_is_all_the_same_is_refused():
    table = make_table()
    table.gold[:40] = 2.5
    with pytest.raises(ValueError, match=r"all 40 dev gold scores are 2\.5: there is nothing"):
        fit(table)


def test_mixing_refuses_censored_rows():
    table = make_table()
    table.censored[3, 1] = True
    with pytest.raises(ValueError, match="Take `mixing` out of `model.head.learn`"):
        fit(table, HeadSettings(learn=["mixing"]))
    assert fit(table).fitted is not None


@pytest.mark.parametrize("settings", [HeadSettings(), PAPER], ids=["learned", "fixed"])
def test_no_dev_rows_are_an_error_whatever_is_learned(settings):
    with pytest.raises(ValueError, match="0 dev rows"):
        fit(make_table(dev=0), settings, select=None)


# What dev chooses


def scores(table, prior, strength, temperature):
    z = (special.log_softmax(table.logprobs.numpy(), -1) + strength * prior) / temperature
    return special.softmax(z, -1) @ np.arange(5.0)


def criterion(by, table, prior, strength, rows):
    """Higher is better, by somebody else's code."""
    gold = table.gold.numpy()[rows]
    score = scores(table, prior, strength, 0.2)[rows]
    if by == "spearman":
        return stats.spearmanr(score, gold).statistic
    return (
        stats.pearsonr(score, gold).statistic if by == "pearson" else -np.mean((score - gold) ** 2)
    )


@pytest.mark.parametrize("by", ["spearman", "pearson", "mse"])
@pytest.mark.parametrize(
    "folds", [Folds(), Folds(outer=5), Folds(outer=5, inverted=True)],
    ids=["own split", "folds", "inverted"],
)  # fmt: skip
def test_a_fixed_strength_is_the_best_of_its_grid_on_dev_as_a_plain_loop_finds_it(folds, by):
    table = make_table(60, seed=4)
    fitted = fit(table, PAPER, select=Select(strength=GRID, by=by), folds=folds).fitted
    evidence = table.evidence["random_task"]
    kept = np.argsort(evidence.perplexity.numpy())[:10]
    prior = np.log(1 / 5) - np.log(special.softmax(evidence.logprobs.numpy()[kept], -1).mean(0))
    for problem, name in enumerate(fitted.names):
        rows = fitted.train[problem].numpy()
        values = [criterion(by, table, prior, strength, rows) for strength in GRID]
        assert fitted.heads.strength[problem] == GRID[int(np.argmax(values))], name
    assert not fitted.heads.bias.any()
    assert (fitted.heads.temperature == 0.2).all()


@pytest.mark.parametrize("by", ["spearman", "pearson", "mse", "nll", "rps"])
def test_ties_go_to_the_smaller_strength(by):
    settings = HeadSettings(learn=[], prior="none")  # λ times zero
    select = Select(strength=GRID, by=by)
    assert fit(make_table(), settings, select=select).fitted.heads.strength.tolist() == [0.1]


def test_strengths_that_rank_alike_tie_even_though_their_scores_differ():
    table = make_table()
    table.logprobs = (-6 * (table.gold.unsqueeze(-1) - table.values).square()).log_softmax(-1)
    fitted = fit(table, HeadSettings(learn=[]), select=Select(strength=[0.1, 0.2, 0.3])).fitted
    assert fitted.heads.strength.tolist() == [0.1]


def test_a_selected_name_must_not_be_learned():
    with pytest.raises(ValueError, match="Take 'strength' out of `learn`"):
        fit(make_table(), select=Select(strength=GRID))


@pytest.mark.parametrize("loss", ["nll", "mse"])
def test_an_automatic_ridge_weighs_held_out_loss_against_its_distance_from_the_default(loss):
    table = make_table(60, seed=2)
    module = fit(table, HeadSettings(ridge_bias="auto"), loss=loss)
    [search] = module.searches
    heads, problems = module.parameters_by_problem(), module.problems
    costs = []
    for inner, full in zip(search.inner, search.full, strict=True):
        losses = []
        for p in inner.tolist():
            bias = heads.total_bias()[p] / heads.temperature[p]
            z = table.logprobs.log_softmax(-1) / heads.temperature[p] + bias
            rows = problems.held_out[p].bool()
            if loss == "mse":
                errors = (z.softmax(-1) @ table.values - table.gold).square()
            else:
                near = (1 - (table.gold.unsqueeze(-1) - table.values).abs()).clamp(min=0)
                errors = -(near * z.log_softmax(-1)).sum(-1)
            losses.append(errors[rows].mean().item())
        mean, ridge = np.mean(losses), problems.ridge_bias[full].item()
        likelihood = 30 * mean if loss == "nll" else 15 * math.log(mean)
        costs.append(likelihood + math.log10(ridge / RIDGE) ** 2 / 2)
    best = int(np.argmin(costs))
    assert module.fitted.ridges[0, 0] == module.problems.ridge_bias[search.full[best]]
    close(module.fitted.heads.bias[0], heads.bias[search.full[best]], atol=0)


def test_an_automatic_ridge_on_mixing_is_chosen_from_the_grid_or_switches_mixing_off():
    settings = HeadSettings(learn=["strength", "temperature", "bias", "mixing"])
    module = fit(make_table(30), settings, folds=Folds(inner=2), loss="nll")
    [search] = module.searches
    without = fit(make_table(30), folds=Folds(inner=2), loss="nll").fitted.heads.bias[0]
    heads = module.parameters_by_problem()
    infinite = search.full[-1]
    assert module.problems.ridge_mixing[infinite] == math.inf
    close(heads.bias[infinite], without, atol=1e-6)
    assert heads.mixing[infinite].abs().max() < 1e-9
    sizes = heads.mixing[search.full].abs().amax((-1, -2))
    assert (sizes.diff() < 0).all()  # the larger the ridge, the smaller M


def test_a_ridge_whose_scores_run_against_gold_is_never_chosen():
    module = fit(make_table(), HeadSettings(ridge_bias="auto"), loss="pearson", epochs=1)
    [search] = module.searches
    losses = torch.full((len(module.problems.train),), -0.5, dtype=torch.float64)
    losses[search.inner[6]] = 0.9  # minus the correlation
    chosen = choose(module.searches, module.problems, losses, "pearson", favour_default=True)
    assert chosen != [6]


@pytest.mark.parametrize(
    ("settings", "select", "folds"),
    [
        (HeadSettings(ridge_bias="auto", prior="batch"), None, Folds(inner=2)),
        (HeadSettings(learn=["bias", "mixing"], ridge_mixing=1.0), None, Folds(outer=3, inner=2)),
        (PAPER, Select(strength=GRID), Folds(outer=3)),
        (PAPER, Select(strength=GRID), Folds()),
    ],
    ids=["auto", "mixing in folds", "grid in folds", "grid"],
)
def test_nothing_that_is_fitted_or_chosen_reads_what_it_is_tested_on(settings, select, folds):
    table = make_table(45)
    run = partial(fit, head=settings, select=select, folds=folds)
    honest = run(table).fitted
    test = honest.held_out[0]
    assert test.any()
    poisoned = replace(
        table,
        gold=table.gold.where(~test, 4 - table.gold),
        logprobs=table.logprobs.where(~test.unsqueeze(-1), normal(45, 5, seed=9) - 3),
    )
    fitted = run(poisoned).fitted
    for clean, other in zip(honest.heads, fitted.heads, strict=True):
        assert torch.equal(clean[0], other[0])
    assert torch.equal(honest.constant[0], fitted.constant[0])
    assert torch.equal(honest.reference[0], fitted.reference[0])


# References and the metrics of dev


@pytest.mark.parametrize("settings", [HeadSettings(), PAPER], ids=["learned", "fixed"])
def test_constant_and_ridge_reference_are_fitted_to_dev_whatever_the_head_learns(settings):
    table = make_table(60)
    fitted = fit(table, settings).fitted
    close(fitted.constant, table.gold[:30].mean().unsqueeze(0), atol=1e-12)
    dev = torch.arange(60) < 30
    parts = [part.double() for part in partition(table, dev, 5, "group", 0)]
    expected = ridge_fit(table.logprobs.log_softmax(-1), table.gold, dev.double(), parts)
    close(fitted.reference[0], expected, atol=1e-10)


@pytest.mark.parametrize("assisted", [False, True])
def test_dev_metrics_are_means_over_the_inner_held_out_parts_beside_the_raw_judges(assisted):
    table = make_table()
    assistant = make_assistant(table) if assisted else None
    settings = HeadSettings(contrast=0.3) if assisted else HeadSettings()
    module = fit(table, settings, assistant=assistant, validate=True)
    logged, heads = module.trainer.callback_metrics, module.parameters_by_problem()
    expected = {name: [] for name in ("spearman", "mse", "spearman_raw", "mse_raw")}
    for p in range(5):
        rows = module.problems.held_out[p].bool().numpy()
        z = table.logprobs.log_softmax(-1) + heads.total_bias()[p]
        if assisted:
            z = z - heads.contrast[p] * assistant
        for suffix, logits in (("", z / heads.temperature[p]), ("_raw", table.logprobs)):
            score = (logits.softmax(-1) @ table.values).numpy()[rows]
            gold = table.gold.numpy()[rows]
            expected[f"spearman{suffix}"].append(stats.spearmanr(score, gold).statistic)
            expected[f"mse{suffix}"].append(np.mean((score - gold) ** 2))
    for name, parts in expected.items():
        assert logged[f"dev/{name}"].item() == pytest.approx(np.mean(parts), abs=1e-6)
    assert {"train/mse", "dev/nll", "dev/rps", "dev/mae", "dev/pearson"} <= set(logged)
