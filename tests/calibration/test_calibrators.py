import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from statsmodels.miscmodels.ordinal_model import OrderedModel
from synthetic import make_table, normal

from scorecal.calibration.calibrators import (
    Ordinal,
    beta_label_prior,
    constant_fit,
    isotonic_fit,
    isotonic_predict,
    ordinal_fit,
    ordinal_predict,
    ridge_fit,
    ridge_predict,
)
from scorecal.calibration.folds import partition

PENALTIES = [10 ** (step / 2) for step in range(-6, 9)]


def test_the_constant_predictor_is_the_mean_gold_of_each_problems_train_rows():
    gold = torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    train = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [2, 0, 1, 0]], dtype=torch.float64)
    assert constant_fit(gold, train).tolist() == [1.5, 4.5, 2.0]


# Ridge regression


@pytest.mark.parametrize(("signal", "noise"), [(0.3, 0.2), (0.3, 2.0), (0.0, 3.0)])
def test_ridge_regression_agrees_with_scikit_learns_at_the_penalty_that_its_folds_choose(
    signal, noise
):
    table = make_table(60, signal=signal)
    gold = table.gold + noise * normal(60, seed=7)
    features = table.logprobs.log_softmax(-1)
    dev = torch.arange(60) < 45
    parts = partition(table, dev, 5, "group", seed=0)
    x, y, train = features.numpy(), gold.numpy(), dev.numpy()
    errors = []
    for penalty in PENALTIES:
        error = 0.0
        for part in parts:
            held_out = part.numpy()
            model = make_pipeline(StandardScaler(), Ridge(penalty, solver="cholesky"))
            model.fit(x[train & ~held_out], y[train & ~held_out])
            error += np.square(model.predict(x[held_out]) - y[held_out]).sum()
        errors.append(error)
    best = PENALTIES[int(np.argmin(errors))]
    model = make_pipeline(StandardScaler(), Ridge(best, solver="cholesky")).fit(x[train], y[train])

    fitted = ridge_fit(features, gold, dev.double(), [part.double() for part in parts])
    predicted = ridge_predict(fitted, features)
    torch.testing.assert_close(predicted, torch.from_numpy(model.predict(x)), rtol=0, atol=1e-8)


def test_ridge_regression_reads_no_row_outside_its_own():
    table = make_table(40)
    features, dev = table.logprobs.log_softmax(-1), torch.arange(40) < 30
    parts = [part.double() for part in partition(table, dev, 5, "group", seed=0)]
    poisoned = table.gold.where(dev, 99.0), features.where(dev.unsqueeze(-1), 99.0)
    honest = ridge_fit(features, table.gold, dev.double(), parts)
    assert torch.equal(ridge_fit(poisoned[1], poisoned[0], dev.double(), parts), honest)


def test_a_feature_that_never_varies_gets_no_weight_to_speak_of():
    features = torch.cat([normal(30, 1, seed=0), torch.full((30, 1), -3.0).double()], -1)
    gold = 2 * features[:, 0] + 1
    train = torch.ones(30, dtype=torch.float64)
    fitted = ridge_fit(features, gold, train, [(torch.arange(30) < 10).double()])
    torch.testing.assert_close(ridge_predict(fitted, features), gold, rtol=0, atol=1e-3)


# Isotonic regression


@pytest.mark.parametrize("decimals", [8, 1, 0])  # the fewer, the more scores are tied
@pytest.mark.parametrize("noise", [0.3, 3.0])
def test_isotonic_regression_agrees_with_scikit_learns(decimals, noise):
    score = normal(80, seed=1).round(decimals=decimals)
    gold = score + noise * normal(80, seed=2)
    asked = torch.linspace(-6, 6, 301, dtype=torch.float64)  # far beyond both ends as well
    reference = IsotonicRegression(out_of_bounds="clip").fit(score.numpy(), gold.numpy())
    predicted = isotonic_predict(isotonic_fit(score, gold), asked)
    expected = torch.from_numpy(reference.predict(asked.numpy()))
    torch.testing.assert_close(predicted, expected, rtol=0, atol=1e-12)


def test_isotonic_regression_averages_what_runs_against_the_order_and_is_flat_outside():
    # gold 1, 3, 2, 4: the middle two are averaged; x = 1 stands twice, with gold 0 and 2.
    score = torch.tensor([2.0, 1.0, 3.0, 4.0, 1.0], dtype=torch.float64)
    gold = torch.tensor([3.0, 0.0, 2.0, 4.0, 2.0], dtype=torch.float64)
    asked = torch.tensor([-9.0, 1.0, 1.5, 2.0, 3.0, 3.5, 9.0], dtype=torch.float64)
    predicted = isotonic_predict(isotonic_fit(score, gold), asked).tolist()
    assert predicted == pytest.approx([1, 1, 1.75, 2.5, 2.5, 3.25, 4])


def test_isotonic_regression_of_one_score_is_its_mean_gold():
    score, gold = torch.full((3,), 2.0).double(), torch.tensor([0.0, 1.0, 5.0]).double()
    asked = torch.tensor([-1.0, 2.0, 7.0]).double()
    assert isotonic_predict(isotonic_fit(score, gold), asked).tolist() == [2, 2, 2]


# Ordinal regression


def ordinal_data(items=300, levels=4, features=2, seed=0):
    """Hard labels of a proportional-odds model with known parameters."""
    x = normal(items, features, seed=seed) * torch.tensor([1.0, 5.0])[:features] + 2
    slopes = torch.tensor([0.8, -0.3], dtype=torch.float64)[:features]
    noise = torch.rand(items, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    position = x @ slopes + noise.logit()
    edges = position.quantile(torch.linspace(0, 1, levels + 1, dtype=torch.float64)[1:-1])
    label = (position.unsqueeze(-1) > edges).sum(-1)
    return x, torch.nn.functional.one_hot(label, levels).double()


def soft_targets(items=60, levels=4, seed=3):
    return (2 * normal(items, levels, seed=seed)).softmax(-1)


def ordinal_probs(slopes, thresholds, x):
    """Differences of sigmoid(threshold - slopes·x), the plain way."""
    below = special.expit(thresholds[None, :] - (x @ slopes)[:, None])
    ends = np.zeros((len(x), 1)), np.ones((len(x), 1))
    return np.diff(np.hstack([ends[0], below, ends[1]]), axis=1)


def ordinal_objective(parameters, x, target, ridge):
    """Mean cross-entropy, and ρ/n of the squared slopes and of a row of all levels at the mean."""
    x = (x - x.mean(0)) / x.std(0)
    slopes, thresholds = parameters[: x.shape[1]], parameters[x.shape[1] :]
    if (np.diff(thresholds) <= 0).any():
        return np.inf
    fit = -(target * np.log(ordinal_probs(slopes, thresholds, x))).sum(1).mean()
    pseudo = -np.log(ordinal_probs(slopes, thresholds, np.zeros((1, x.shape[1])))).mean()
    return fit + ridge / len(x) * (np.square(slopes).sum() + pseudo)


def standardised(model, x):
    """A fit's parameters for standardised features."""
    slopes, thresholds = model.slopes[0].numpy(), model.thresholds[0].numpy()
    return np.concatenate([slopes * x.std(0), thresholds - slopes @ x.mean(0)])


@pytest.mark.parametrize("levels", [3, 5])
def test_ordinal_regression_without_a_ridge_agrees_with_statsmodels(levels):
    x, target = ordinal_data(levels=levels)
    model = OrderedModel(target.argmax(-1).numpy(), x.numpy(), distr="logit")
    reference = model.fit(method="bfgs", disp=False, maxiter=500, gtol=1e-9)
    fitted = ordinal_fit(x, target, torch.ones(1, len(x)).double(), ridge=1e-10)
    thresholds = model.transform_threshold_params(reference.params)[1:-1]
    np.testing.assert_allclose(fitted.slopes[0], reference.params[:2], atol=1e-5)
    np.testing.assert_allclose(fitted.thresholds[0], thresholds, atol=1e-5)
    probs = ordinal_predict(fitted, x)[0].exp()
    np.testing.assert_allclose(probs, reference.predict(x.numpy()), atol=1e-5)


def test_ordinal_probabilities_are_differences_of_the_cumulative_link():
    slopes, thresholds = np.array([0.5, -2.0]), np.array([-1.0, 0.3, 2.0])
    model = Ordinal(torch.from_numpy(slopes)[None], torch.from_numpy(thresholds)[None])
    x = normal(20, 2, seed=4)
    expected = ordinal_probs(slopes, thresholds, x.numpy())
    np.testing.assert_allclose(ordinal_predict(model, x)[0].exp(), expected, atol=1e-12)


def test_ordinal_log_probabilities_stay_finite_far_from_every_threshold():
    model = Ordinal(torch.ones(1, 1).double(), torch.tensor([[-1.0, 0.0, 1.0]]).double())
    logprobs = ordinal_predict(model, torch.tensor([[-700.0], [700.0]]).double())[0]
    # sigmoid(700) - sigmoid(699) = e^-699 - e^-700 = e^-699 · (1 - 1/e), and so on.
    gap = np.log(1 - np.exp(-1))
    assert logprobs[0].tolist() == pytest.approx([0, -699 + gap, -700 + gap, -701], abs=1e-9)
    assert logprobs[1].tolist() == pytest.approx([-701, -700 + gap, -699 + gap, 0], abs=1e-9)


@pytest.mark.parametrize("ridge", [0.01, 0.3, 10.0])
def test_ordinal_regression_of_soft_targets_ends_where_the_gradient_is_zero(ridge):
    x, _ = ordinal_data(60)
    target = soft_targets()
    fitted = ordinal_fit(x, target, torch.ones(1, 60).double(), ridge=ridge)
    found = standardised(fitted, x.numpy())
    for column in range(len(found)):
        step = np.eye(len(found))[column] * 1e-5
        above, below = (
            ordinal_objective(found + sign * step, x.numpy(), target.numpy(), ridge)
            for sign in (1, -1)
        )
        assert abs(above - below) / 2e-5 < 1e-7


def test_ordinal_regression_finds_the_minimum_that_scipy_finds_from_elsewhere():
    x, _ = ordinal_data(60)
    target = soft_targets()
    start = np.array([0.0, 0.0, -1.0, 0.0, 1.0])
    reference = optimize.minimize(
        ordinal_objective,
        start,
        (x.numpy(), target.numpy(), 0.3),
        method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-14, "maxiter": 10_000, "maxfev": 10_000},
    )
    fitted = ordinal_fit(x, target, torch.ones(1, 60).double(), ridge=0.3)
    np.testing.assert_allclose(standardised(fitted, x.numpy()), reference.x, atol=1e-5)


@pytest.mark.parametrize("missing", [0, 2, 3])
def test_a_level_without_gold_keeps_a_probability_above_0(missing):
    x, target = ordinal_data(80)
    keep = target.argmax(-1) != missing
    fitted = ordinal_fit(x, target, keep.double().unsqueeze(0), ridge=0.3)
    logprobs = ordinal_predict(fitted, x)
    assert logprobs.isfinite().all()
    assert (logprobs[0, :, missing].exp() > 1e-6).all()
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(1, 80).double())


def test_ordinal_regressions_at_once_equal_each_alone():
    x, target = ordinal_data(100)
    target[50:] = soft_targets(50)
    train = torch.stack([torch.arange(100) < cut for cut in (7, 30, 100)]).double()
    train = torch.cat([train, (torch.arange(100) % 2 == 1).double().unsqueeze(0)])
    together = ordinal_predict(ordinal_fit(x, target, train, ridge=0.3), x)
    for problem, row in enumerate(train):
        own = row > 0  # nor does it read the rows of others
        alone = ordinal_fit(x[own], target[own], torch.ones(1, int(own.sum())).double(), ridge=0.3)
        torch.testing.assert_close(
            together[problem], ordinal_predict(alone, x)[0], rtol=0, atol=1e-6
        )


def test_weights_of_an_ordinal_regression_act_like_repeated_rows():
    x, target = ordinal_data(40)
    times = torch.arange(40) % 3
    weighted = ordinal_fit(x, target, times.double().unsqueeze(0), ridge=0.3)
    x, target = x.repeat_interleave(times, 0), target.repeat_interleave(times, 0)
    repeated = ordinal_fit(x, target, torch.ones(1, len(x)).double(), ridge=0.3)
    for left, right in zip(weighted, repeated, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


def test_ten_separable_items_leave_an_ordinal_regression_finite():
    x = torch.arange(10, dtype=torch.float64).unsqueeze(-1) * torch.tensor([1.0, -1.0]).double()
    target = torch.nn.functional.one_hot(torch.arange(10) // 2, 5).double()
    fitted = ordinal_fit(x, target, torch.ones(1, 10).double(), ridge=0.3)
    assert fitted.slopes.isfinite().all()
    assert (fitted.thresholds.diff(dim=-1) > 0).all()
    logprobs = ordinal_predict(fitted, x)[0]
    assert logprobs.isfinite().all()
    assert logprobs.argmax(-1).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_feature_that_never_varies_does_not_move_an_ordinal_regression():
    x, target = ordinal_data(60)
    constant = torch.full((60, 1), -3.3).double()
    train = torch.ones(1, 60).double()
    without = ordinal_fit(x, target, train, ridge=0.3)
    fitted = ordinal_fit(torch.cat([x, constant], -1), target, train, ridge=0.3)
    asked = torch.cat([x, constant + 1], -1)  # on other rows it may well differ
    torch.testing.assert_close(
        ordinal_predict(fitted, asked), ordinal_predict(without, x), rtol=0, atol=1e-3
    )


# The label prior of Distribution Calibration


def cell_masses(a, b, levels):
    return np.diff(stats.beta.cdf(np.linspace(0, 1, levels + 1), a, b))


def cell_counts(gold, low, high, levels):
    """How often gold lies in each of K equal cells; the upper end belongs to the last."""
    return np.histogram((gold - low) / (high - low), np.linspace(0, 1, levels + 1))[0]


def drawn_gold(a, b, low, high, count, seed=0):
    drawn = stats.beta.rvs(a, b, size=count, random_state=np.random.default_rng(seed))
    return torch.from_numpy(low + (high - low) * drawn)


@pytest.mark.parametrize(("a", "b"), [(2.0, 5.0), (0.5, 0.5), (1.0, 1.0), (8.0, 3.0)])
def test_the_label_prior_recovers_a_planted_beta(a, b):
    masses, alone = beta_label_prior(drawn_gold(a, b, 1, 10, 40_000), 1.0, 10.0, 10)
    assert not alone
    assert masses.sum().item() == pytest.approx(1, abs=1e-9)
    np.testing.assert_allclose(masses, cell_masses(a, b, 10), atol=0.006)  # 3 standard errors


@pytest.mark.parametrize(("low", "high", "levels"), [(0, 5, 6), (2, 6, 5), (0, 100, 101)])
@pytest.mark.parametrize(("a", "b", "count"), [(2.0, 5.0, 30), (0.3, 0.8, 12), (6.0, 1.0, 200)])
def test_no_beta_on_a_grid_has_a_higher_likelihood(low, high, levels, a, b, count):
    gold = drawn_gold(a, b, low, high, count, seed=3)
    cells = cell_counts(gold.numpy(), low, high, levels)
    masses, _ = beta_label_prior(gold, float(low), float(high), levels)
    found = (cells * masses.log().numpy()).sum()
    grid = np.geomspace(1e-2, 1e3, 60)
    edges = np.linspace(0, 1, levels + 1)
    below = special.betainc(grid[:, None, None], grid[:, None], edges)
    best = special.xlogy(cells, np.diff(below)).sum(-1).max()
    assert best - 1e-9 <= found <= best + 0.05 * count  # and the grid comes near it


@pytest.mark.parametrize("inside", [[], [2.5, 1.0, 4.0]])
def test_gold_at_both_ends_leaves_the_label_prior_finite(inside):
    gold = torch.tensor([0.0, 0.0, 5.0, 5.0, *inside], dtype=torch.float64)
    masses, alone = beta_label_prior(gold, 0.0, 5.0, 6)
    assert not alone
    assert masses.log().isfinite().all()
    assert (masses >= 1e-12).all()
    assert masses.sum().item() == pytest.approx(1, abs=1e-9)
    assert masses[0].item() > masses[2].item() < masses[5].item()


@pytest.mark.parametrize(("low", "high"), [(3, 1), (27, 23), (50, 250)])
def test_gold_that_is_all_at_the_ends_fills_the_end_cells_by_its_counts(low, high):
    gold = torch.tensor([0.0] * low + [5.0] * high, dtype=torch.float64)
    masses, _ = beta_label_prior(gold, 0.0, 5.0, 6)
    share = low / (low + high)
    assert masses[[0, 5]].tolist() == pytest.approx([share, 1 - share], abs=0.01)


@pytest.mark.parametrize(("gold", "cell"), [(0.0, 0), (2.4, 2), (5.0, 5)])
def test_gold_in_one_cell_is_flagged_and_stays_in_it(gold, cell):
    values = torch.tensor([gold, gold, gold], dtype=torch.float64)
    masses, alone = beta_label_prior(values, 0.0, 5.0, 6)
    assert alone
    assert masses[cell].item() > 0.99
    assert (masses >= 1e-12).all()
    # concentration 1e3 about the middle of the cell
    centre = (cell + 0.5) / 6
    expected = cell_masses(1e3 * centre, 1e3 * (1 - centre), 6).clip(1e-12)
    np.testing.assert_allclose(masses, expected, rtol=1e-6)


def test_a_label_that_the_beta_all_but_excludes_keeps_the_floor():
    gold = torch.tensor([0.9] * 500 + [1.1] * 500, dtype=torch.float64)
    masses, alone = beta_label_prior(gold, 0.0, 20.0, 20)  # two neighbouring cells of twenty
    assert not alone
    assert masses[-1].item() == 1e-12
    assert masses[:2].sum().item() == pytest.approx(1, abs=0.01)


def test_the_label_prior_mirrors_with_the_gold():
    gold = drawn_gold(1.5, 4.0, 0, 5, 50)
    masses, _ = beta_label_prior(gold, 0.0, 5.0, 6)
    mirrored, _ = beta_label_prior(5 - gold, 0.0, 5.0, 6)
    torch.testing.assert_close(masses, mirrored.flip(0), rtol=0, atol=1e-5)
