import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from synthetic import make_table, normal, problems_of

from scorecal.calibration.calibrators import beta_label_prior
from scorecal.calibration.choice import choose, fit_problems, held_out_losses
from scorecal.calibration.folds import (
    RIDGES,
    Folds,
    Search,
    Select,
    Split,
    make_problems,
    partition,
)
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.heads import AUTO
from scorecal.calibration.methods import (
    LONG,
    SHORT,
    TEMPERATURE_ONLY,
    DevSets,
    best_strengths,
    debiased,
    distribution_terms,
    head,
    methods,
    shrinkage_arms,
    strength_scores,
)
from scorecal.calibration.solvers import Rows
from scorecal.judging.priors import Evidence

ITEMS, LEVELS = 40, 4
SHORT_GRID = np.arange(1, 11) / 10
MIXED = HeadSettings(learn=["strength", "temperature", "bias", "mixing"], ridge_mixing=3.0)


def with_evidence(table):
    """A table whose judge also rated inputs that it made up, and 100 random-number prompts."""
    levels = len(table.values)
    evidence = dict(table.evidence)
    evidence["sampled"] = Evidence((2 * normal(25, levels, seed=70)).log_softmax(-1), None)
    for kind, seed in (("random", 71), ("random_task", 72)):
        made = (normal(levels, seed=seed) + normal(100, levels, seed=seed + 2)).log_softmax(-1)
        evidence[kind] = Evidence(made, normal(100, seed=seed + 4).exp())
    return replace(table, evidence=evidence)


@pytest.fixture(scope="module")
def table():
    return with_evidence(make_table(ITEMS, LEVELS))


@pytest.fixture(scope="module")
def sets(table):
    """Two dev sets, one of them so small that dev Spearman has ties."""
    rows = torch.arange(ITEMS)
    return DevSets(table, torch.stack([rows % 2 == 0, (rows > 5) & (rows <= 11)]), Folds(inner=2))


@pytest.fixture(scope="module")
def answers(table, sets):
    return {
        (method.name, method.temperature): method.answer(sets)
        for method in methods(table)
        if method.temperature != "learned" and method.name != "ordinal"
    }


def softmax_scores(logits, values):
    """Expected value of softmax(logits), rounded as scores that may tie are."""
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    return np.round(probs / probs.sum(-1, keepdims=True) @ values, 10)


def debiasing(logprobs, keep=None):
    """B = log(1/K) - log of the mean label-renormalised distribution, values under 1e-12 raised."""
    probs = np.exp(logprobs) / np.exp(logprobs).sum(-1, keepdims=True)
    mean = np.maximum((probs if keep is None else probs[keep]).mean(0), 1e-12)
    return np.log(1 / len(mean)) - np.log(mean)


def random_number_bias(evidence, prompts):
    keep = np.argsort(evidence.perplexity.numpy(), kind="stable")[:prompts]
    return debiasing(evidence.logprobs.numpy(), keep)


def formula(table, train, name, temperature):
    """What DESIGN's table says a method without λ answers after one dev set."""
    logprobs = table.logprobs.numpy()
    l_hat = logprobs - special.logsumexp(logprobs, axis=-1, keepdims=True)
    if name.startswith("DC"):
        q, _ = beta_label_prior(table.gold[train], 0.0, float(table.values[-1]), len(table.values))
        sampled = table.evidence["sampled"].logprobs.numpy()
        marginal = sampled if name == "DC, sampled" else logprobs[train]
        shift = np.log(q.numpy()) - np.log(special.softmax(marginal, -1).mean(0))
    else:
        shift = {
            "raw": lambda: 0.0,
            "vanilla": lambda: 0.0,
            "CC": lambda: debiasing(table.evidence["content_free"].logprobs.numpy()),
            "batch": lambda: debiasing(logprobs, train.numpy()),
            "batch of test inputs": lambda: debiasing(logprobs, ~train.numpy()),
        }[name]()
    return (l_hat + shift) / float(temperature)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("raw", "1"), ("vanilla", "0.2")]
    + [
        (name, temperature)
        for name in ("CC", "DC, sampled", "DC, dev mean", "batch", "batch of test inputs")
        for temperature in ("1", "0.2")
    ],
)
def test_a_method_without_a_strength_is_its_formula(table, sets, answers, name, temperature):
    made = answers[name, temperature]
    for problem, train in enumerate(sets.train):
        logits = formula(table, train, name, temperature)
        expected = softmax_scores(logits, table.values.numpy())
        np.testing.assert_allclose(made.score[problem], expected, atol=2e-10)
        np.testing.assert_allclose(
            made.logits[problem].softmax(-1), special.softmax(logits, -1), atol=1e-12
        )


def test_only_the_method_that_reads_test_inputs_is_flagged_as_transductive(table):
    flagged = {method.name for method in methods(table) if method.transductive}
    assert flagged == {"batch of test inputs"}


def chosen_strength(table, train, term, temperature, grid, placement):
    """λ of the best dev Spearman, the smaller of equals, and the logits it gives."""
    logprobs, values = table.logprobs.numpy(), table.values.numpy()
    l_hat = logprobs - special.logsumexp(logprobs, axis=-1, keepdims=True)
    own, gold, found, logits = train.numpy(), table.gold.numpy(), [], []
    for strength in grid:
        if placement == "sum":
            logits.append((l_hat + strength * term) / temperature)
        else:
            logits.append(l_hat / temperature + strength * term)
        score = softmax_scores(logits[-1], values)[own]
        found.append(stats.spearmanr(score, gold[own]).statistic)
    best = next(i for i, value in enumerate(found) if value >= max(found) - 1e-12)
    ties = sum(value >= max(found) - 1e-12 for value in found)
    return grid[best], logits[best], ties


@pytest.mark.parametrize("kind", ["random", "random_task"])
@pytest.mark.parametrize("prompts", [10, 100])
@pytest.mark.parametrize(
    ("temperature", "placement"), [(1.0, "sum"), (0.2, "sum"), (0.2, "logits")]
)
def test_a_debiased_judge_is_its_formula_at_the_strength_that_dev_chooses(
    table, sets, kind, prompts, temperature, placement
):
    answer = debiased(kind, prompts=prompts, temperature=temperature, temperature_on=placement)
    made = answer(sets)
    term = random_number_bias(table.evidence[kind], prompts)
    for problem, train in enumerate(sets.train):
        strength, logits, _ = chosen_strength(
            table, train, term, temperature, SHORT_GRID, placement
        )
        assert made.settings["lambda"][problem] == strength
        expected = softmax_scores(logits, table.values.numpy())
        np.testing.assert_allclose(made.score[problem], expected, atol=2e-10)
        np.testing.assert_allclose(
            made.logits[problem].softmax(-1), special.softmax(logits, -1), atol=1e-12
        )


def test_the_debiased_rows_are_the_paper_s_10_prompts_and_short_grid(sets, answers):
    for name, kind in (("Deb-R", "random"), ("Deb-T", "random_task")):
        for row, options in (
            ((name, "1"), {"temperature": 1.0}),
            ((name, "0.2"), {}),
            ((f"{name}, T on l alone", "0.2"), {"temperature_on": "logits"}),
        ):
            expected = debiased(kind, prompts=10, strengths=SHORT, **options)(sets)
            assert torch.equal(answers[row].score, expected.score)


def test_equal_dev_correlations_leave_the_smaller_strength(table, sets):
    term = random_number_bias(table.evidence["random"], 10)
    strength, _, ties = chosen_strength(table, sets.train[1], term, 0.2, SHORT_GRID, "sum")
    assert ties > 1  # the example is one
    made = debiased("random")(sets)
    assert made.settings["lambda"][1] == strength


def test_a_bias_that_changes_nothing_leaves_the_smallest_strength(table, sets):
    flat = Evidence(torch.zeros(5, LEVELS).double(), None)
    sets = replace(sets, table=replace(table, evidence={"random": flat}))
    assert debiased("random")(sets).settings["lambda"] == [0.1, 0.1]


def test_dev_gold_that_is_constant_leaves_the_smallest_strength(table, sets):
    constant = replace(sets, table=replace(table, gold=torch.full((ITEMS,), 2.0).double()))
    scores = strength_scores(table, normal(LEVELS, seed=1), SHORT, 1.0)
    assert best_strengths(scores, constant) == [0, 0]


def test_the_long_grid_of_strengths_reaches_10(table, sets):
    assert list(LONG) == [round(step / 10, 1) for step in range(1, 101)]
    made = debiased("random_task", strengths=LONG, temperature=1.0)(sets)
    term = random_number_bias(table.evidence["random_task"], 10)
    for problem, train in enumerate(sets.train):
        grid = np.array(LONG)
        strength, _, _ = chosen_strength(table, train, term, 1.0, grid, "sum")
        assert made.settings["lambda"][problem] == strength


def test_distribution_calibration_flags_dev_gold_in_one_cell(table):
    gold = table.gold.clone()
    gold[:10] = 2.0
    rows = torch.arange(ITEMS)
    sets = DevSets(replace(table, gold=gold), torch.stack([rows < 10, rows < 30]), Folds())
    terms, alone = distribution_terms(sets, sampled=False)
    assert alone == [True, False]
    assert terms.isfinite().all()
    assert terms[0].argmax() == 2


# Learned methods


def test_the_constant_method_is_mean_dev_gold(table, sets, answers):
    made = answers["constant", "–"]
    for problem, train in enumerate(sets.train):
        expected = np.full(ITEMS, table.gold.numpy()[train.numpy()].mean())
        np.testing.assert_allclose(made.score[problem], expected, atol=1e-12)
    assert made.logits is None


def test_the_isotonic_method_is_scikit_learn_s_on_the_raw_score(table, sets, answers):
    made = answers["isotonic", "–"]
    raw = answers["raw", "1"].score[0].numpy()
    for problem, train in enumerate(sets.train):
        own = train.numpy()
        model = IsotonicRegression(out_of_bounds="clip").fit(raw[own], table.gold.numpy()[own])
        expected = model.predict(raw)
        np.testing.assert_allclose(made.score[problem], expected, atol=1e-9)
        rest = np.round(expected[~own], 9)
        tied = np.mean([(rest == value).sum() > 1 for value in rest])
        assert made.settings["tied"][problem] == pytest.approx(tied)


def test_the_ridge_method_is_scikit_learn_s_at_the_penalty_of_its_inner_folds(table, sets, answers):
    made = answers["ridge regression", "–"]
    x, y = table.logprobs.log_softmax(-1).numpy(), table.gold.numpy()

    def model(penalty, rows):
        found = make_pipeline(StandardScaler(), Ridge(penalty, solver="cholesky"))
        return found.fit(x[rows], y[rows])

    for problem, train in enumerate(sets.train):
        own = train.numpy()
        parts = [part.numpy() > 0 for part in sets.parts(problem)]
        assert (sum(part.astype(int) for part in parts) == own).all()
        errors = {
            penalty: sum(
                np.square(model(penalty, own & ~part).predict(x[part]) - y[part]).sum()
                for part in parts
            )
            for penalty in 10 ** (np.arange(-6, 9) / 2)
        }
        best = min(errors, key=errors.get)
        np.testing.assert_allclose(made.score[problem], model(best, own).predict(x), atol=1e-7)


def test_temperature_alone_minimises_the_squared_error_and_its_penalty(table, sets):
    made = head(TEMPERATURE_ONLY)(sets)
    logprobs, values = table.logprobs.numpy(), table.values.numpy()
    for problem, train in enumerate(sets.train):
        own = train.numpy()

        def cost(log_u, own=own):
            u = np.exp(log_u)
            score = special.softmax(u * logprobs[own], -1) @ values
            penalty = 0.3 / own.sum() * (u - 1 - np.log(u))
            return np.square(score - table.gold.numpy()[own]).mean() + penalty

        grid = np.linspace(-4, 4, 401)
        start = grid[np.argmin([cost(point) for point in grid])]
        found = optimize.minimize_scalar(
            cost, bounds=(start - 0.05, start + 0.05), method="bounded", options={"xatol": 1e-10}
        )
        assert made.settings["temperature"][problem] == pytest.approx(np.exp(-found.x), rel=1e-5)
        logits = logprobs * np.exp(found.x)
        np.testing.assert_allclose(made.score[problem], softmax_scores(logits, values), atol=1e-5)


def dev_sets(table):
    rows = torch.arange(ITEMS)
    return torch.stack([rows % 2 == 0, rows < 9, (rows % 3 == 1) & (rows > 20)])


@pytest.mark.parametrize(
    "settings",
    [
        HeadSettings(),
        TEMPERATURE_ONLY,
        HeadSettings(prior="batch"),
        HeadSettings(prior="permuted"),
        MIXED,
    ],
)
def test_heads_of_several_dev_sets_equal_each_alone(table, settings):
    together = head(settings)(DevSets(table, dev_sets(table), Folds(inner=2)))
    for problem, train in enumerate(dev_sets(table)):
        alone = head(settings)(DevSets(table, train.unsqueeze(0), Folds(inner=2)))
        torch.testing.assert_close(together.score[problem], alone.score[0], rtol=0, atol=1e-6)
        for name, numbers in together.settings.items():
            assert numbers[problem] == pytest.approx(alone.settings[name][0], abs=1e-6)


def test_a_copy_of_dev_sets_with_another_table_is_fitted_anew(table, sets):
    mixing = [method for method in methods(table) if method.name in ("head with M", "auto")]
    other = replace(table, gold=table.values[-1] - table.gold)
    first = fresh(sets, table)
    for method in mixing:
        method.answer(first)
        copied = method.answer(replace(first, table=other))
        assert torch.equal(copied.score, method.answer(fresh(sets, other)).score)


def test_the_head_with_a_matrix_is_the_same_before_and_after_auto(table, sets):
    mixing, auto = (method for method in methods(table) if method.name in ("head with M", "auto"))
    together = fresh(sets, table)
    expected = auto.answer(fresh(sets, table)), mixing.answer(fresh(sets, table))
    found = auto.answer(together), mixing.answer(together)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left.score, right.score)
        assert left.settings == right.settings
    assert found[1].settings["ridge_bias"] == [0.3, 0.3]
    direct = head(AUTO)(fresh(sets, table))
    torch.testing.assert_close(found[0].score, direct.score, rtol=0, atol=1e-9)


def test_a_dev_set_s_chosen_ridge_does_not_depend_on_its_place_among_others():
    table = make_table(60, LEVELS)
    same = (torch.arange(60) < 20).expand(8, -1).clone()
    made = head(HeadSettings(ridge_bias="auto"))(DevSets(table, same, Folds(inner=3)))
    assert len(set(made.settings["ridge_bias"])) == 1


# What the head chooses on inner folds


def test_a_ridge_is_chosen_by_held_out_likelihood_and_a_prior_around_its_default():
    # n/2 · log(mean held-out squared error) + (decades from 0.3)²/2, and no repeats from n = 200.
    table = make_table(260, LEVELS, dev=200)
    dev = torch.arange(260) < 200
    gold, costs = table.gold.numpy(), []
    parts = partition(table, dev, 3, "group", seed=0)
    for ridge in RIDGES:
        rests = DevSets(table, torch.stack([dev & ~part for part in parts]), Folds(inner=3))
        made = head(HeadSettings(ridge_bias=ridge))(rests).score.numpy()
        errors = [
            np.square(made[fold] - gold)[part.numpy()].mean() for fold, part in enumerate(parts)
        ]
        costs.append(100 * np.log(np.mean(errors)) + np.log10(ridge / 0.3) ** 2 / 2)
    best = RIDGES[int(np.argmin(costs))]
    sets = DevSets(table, dev.unsqueeze(0), Folds(inner=3))
    made = head(HeadSettings(ridge_bias="auto"))(sets)
    assert made.settings["ridge_bias"] == [pytest.approx(best)]
    expected = head(HeadSettings(ridge_bias=best))(sets)
    torch.testing.assert_close(made.score, expected.score, rtol=0, atol=1e-6)


def test_six_items_leave_the_ridge_near_its_default(table):
    made = head(HeadSettings(ridge_bias="auto"))(
        DevSets(table, (torch.arange(ITEMS) < 6).unsqueeze(0), Folds(inner=2))
    )
    assert 0.03 < made.settings["ridge_bias"][0] < 3


SPLIT = Split("one", torch.arange(ITEMS) < 25, torch.arange(ITEMS) >= 25)


def any_problems():
    """What a choice by losses alone does not look at."""
    return problems_of(make_table(ITEMS, LEVELS), HeadSettings(learn=[]))[0]


def test_the_candidate_of_least_mean_loss_is_chosen_and_the_earlier_of_equals():
    losses = torch.tensor([3.0, 1.0, 2.0, 2.0, 1.5, 2.5, 5.0, 0.0]).double()
    search = Search(SPLIT, torch.tensor([[0, 6], [1, 2], [7, 0], [4, 4]]), torch.arange(4))
    # means 4, 1.5, 1.5, 1.5
    assert choose([search], any_problems(), losses, "mse", favour_default=False) == [1]


def test_an_undefined_correlation_counts_as_the_worst():
    losses = torch.tensor([math.nan, -0.9, -0.1, 0.2], dtype=torch.float64)
    search = Search(SPLIT, torch.tensor([[0, 1], [2, 3], [1, 1]]), torch.arange(3))
    # (1 - 0.9)/2 = 0.05, (-0.1 + 0.2)/2 = 0.05, -0.9
    assert choose([search], any_problems(), losses, "spearman", favour_default=False) == [2]
    assert choose([search._replace(inner=search.inner[:2])], any_problems(), losses, "spearman",
                  favour_default=False) == [0]  # fmt: skip


def test_held_out_losses_are_scipy_s_on_each_problem_s_held_out_rows(table):
    settings = HeadSettings(learn=[], prior="random")
    problems, searches = make_problems(
        table, [SPLIT], Folds(), settings, Select(strength=[0.0, 0.5, 2.0]), 0
    )
    rows = Rows(table.logprobs, torch.zeros_like(table.logprobs), table.gold, table.values)
    heads = fit_problems(problems, settings, rows, "mse")
    found = {
        by: held_out_losses(heads, problems, searches, rows, by, temperature_on="sum")
        for by in ("spearman", "pearson", "mse", "nll")
    }
    term, gold = random_number_bias(table.evidence["random"], 10), table.gold.numpy()
    inner = searches[0].inner.flatten().tolist()
    for number in inner:
        held_out = problems.held_out[number].numpy() > 0
        logits = table.logprobs.numpy() + problems.strength[number].item() * term
        score = special.softmax(logits, -1)[held_out] @ table.values.numpy()
        target = np.clip(1 - np.abs(gold[held_out, None] - np.arange(LEVELS)), 0, None)
        expected = {
            "spearman": -stats.spearmanr(score, gold[held_out]).statistic,
            "pearson": -stats.pearsonr(score, gold[held_out]).statistic,
            "mse": np.square(score - gold[held_out]).mean(),
            "nll": -(target * special.log_softmax(logits, -1)[held_out]).sum(-1).mean(),
        }
        for by, value in expected.items():
            assert found[by][number].item() == pytest.approx(value)
    assert all(found["mse"][number].isnan() for number in searches[0].full.tolist())


def test_the_arms_shrink_to_the_prior_that_they_name(table, sets):
    made = {arm.name: arm.answer(sets) for arm in shrinkage_arms(table)}
    targets = {
        "shrink to B": "random_task",
        "shrink to 0": "none",
        "shrink to CC": "content_free",
        "shrink to batch": "batch",
        "shrink to B, labels permuted": "permuted",
    }
    assert list(made) == list(targets)
    for name, prior in targets.items():
        expected = head(HeadSettings(prior=prior))(sets)
        assert torch.equal(made[name].score, expected.score)


def test_arms_without_evidence_are_left_out(table):
    bare = replace(table, evidence={})
    assert [arm.name for arm in shrinkage_arms(bare)] == ["shrink to 0", "shrink to batch"]
    names = {method.name for method in methods(bare)}
    assert not names & {"CC", "DC, sampled", "Deb-R", "Deb-T"}


# Nothing outside its dev set reaches a method


def every_method(table):
    return [*methods(table), *shrinkage_arms(table)]


def fresh(sets, table, train=None):
    """Dev sets that remember no other method's answers."""
    train = sets.train if train is None else train.unsqueeze(0)
    return DevSets(table, train, sets.folds, sets.seed)


NAMES = [
    f"{method.name}, T {method.temperature}"
    for method in every_method(with_evidence(make_table(ITEMS, LEVELS)))
]


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_gold_outside_dev_reaches_no_method(table, sets, number):
    hidden = ~sets.train.any(0)
    noise = torch.rand(ITEMS, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    poisoned = replace(table, gold=(noise * table.values[-1]).where(hidden, table.gold))
    honest = every_method(table)[number].answer(fresh(sets, table))
    made = every_method(poisoned)[number].answer(fresh(sets, poisoned))
    assert torch.equal(made.score, honest.score)
    assert made.settings == honest.settings
    assert honest.logits is None or torch.equal(made.logits, honest.logits)


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_a_dev_set_s_scores_don_t_depend_on_items_outside_it(table, sets, number):
    method = every_method(table)[number]
    # Each dev set alone: what another one holds is outside it too.
    for train in sets.train:
        noise = normal(*table.logprobs.shape, seed=10).log_softmax(-1)
        gold = table.values[-1] - table.gold
        poisoned = replace(
            table,
            gold=table.gold.where(train, gold),
            logprobs=table.logprobs.where(train.unsqueeze(-1), noise),
        )
        honest = method.answer(fresh(sets, table, train))
        made = every_method(poisoned)[number].answer(fresh(sets, poisoned, train))
        same = torch.equal(made.score[:, train], honest.score[:, train])
        assert same != method.transductive
        if not method.transductive and method.name != "isotonic":  # which counts ties of the rest
            assert made.settings == honest.settings
