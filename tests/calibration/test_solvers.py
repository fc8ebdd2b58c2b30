import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import optimize, special
from synthetic import fit, make_assistant, make_objective, make_table, normal, problems_of

from scorecal.calibration import solvers
from scorecal.calibration.folds import Folds
from scorecal.calibration.head import HeadSettings, head_logits
from scorecal.calibration.solvers import newton

close = partial(torch.testing.assert_close, rtol=0)
EVERYTHING = ["strength", "temperature", "bias", "mixing", "contrast"]
DEFAULT = HeadSettings()
MIXING = HeadSettings(learn=[*DEFAULT.learn, "mixing"], ridge_mixing=1.0)
ALL = HeadSettings(learn=list(EVERYTHING), ridge_mixing=1.0, temperature=0.7, contrast=0.2)
TABLE = make_table()
every_head = pytest.mark.parametrize(
    "head", [DEFAULT, MIXING, ALL], ids=["default", "mixing", "all"]
)
every_loss = pytest.mark.parametrize("loss", ["nll", "mse", "rps", "pearson"])


def objective_of(head, loss="nll", table=TABLE):
    """Two inner folds and all of dev."""
    problems, _ = problems_of(table, head, Folds(inner=2))
    return make_objective(table, head, loss, problems=problems, assistant=make_assistant(table))


def random_point(objective, seed, scale=1.0):
    """Natural parameters around the start, u above 0."""
    start = objective.head.start()
    noise = scale * normal(*start.shape, seed=seed)
    at = objective.head.columns["temperature"]
    point = start + noise
    point[:, at] = start[:, at] * noise[:, at].exp()
    return point


def autograd_hessian(objective, natural):
    """[problems, columns, columns], by an autograd that knows nothing of the head."""
    blocks = []
    for p in range(len(natural)):

        def one(x, p=p):
            return objective.value(torch.cat([natural[:p], x[None], natural[p + 1 :]]))[p]

        blocks.append(torch.autograd.functional.hessian(one, natural[p]))
    return torch.stack(blocks)


# Convexity and derivatives


@every_head
def test_cross_entropy_has_one_minimum_which_ten_random_starts_find(head):
    objective = objective_of(head)
    found = [newton(objective, random_point(objective, seed, scale=2.0)) for seed in range(10)]
    for natural in found[1:]:
        close(natural, found[0], atol=1e-4)
    smallest = torch.linalg.eigvalsh(autograd_hessian(objective, found[0]))[:, 0]
    assert (smallest > 0).all()


@every_head
def test_cross_entropy_curves_upwards_everywhere(head):
    objective = objective_of(head)
    for seed in range(2):
        hessian = autograd_hessian(objective, random_point(objective, seed))
        assert (torch.linalg.eigvalsh(hessian)[:, 0] > 0).all()


@every_head
@every_loss
def test_the_gradient_is_autograds_and_the_curvature_positive_definite(head, loss):
    objective = objective_of(head, loss)
    for seed in range(3):
        natural = random_point(objective, seed, scale=0.3)
        value, gradient, curvature = objective.derivatives(natural)
        close(value, objective.value(natural), atol=1e-14)
        total = lambda x: objective.value(x).sum()  # noqa: E731
        close(gradient, torch.autograd.functional.jacobian(total, natural), atol=1e-12)
        assert (torch.linalg.eigvalsh(curvature)[:, 0] > 0).all()


@every_head
@every_loss
def test_the_curvature_is_the_hessian_where_that_is_positive_definite(head, loss):
    objective = objective_of(head, loss)
    solution = newton(objective, newton(objective_of(head), objective.head.start()), steps=50)
    checked = 0
    for seed, scale in enumerate([0.0, 0.01, 0.1, 0.3]):
        natural = solution + scale * normal(*solution.shape, seed=seed)
        natural[:, 0] = solution[:, 0]
        hessian = autograd_hessian(objective, natural)
        good = torch.linalg.eigvalsh(hessian)[:, 0] > 1e-8
        checked += int(good.sum())
        close(objective.derivatives(natural)[2][good], hessian[good], atol=1e-8)
    assert checked > 0


# Hard data


@every_loss
@every_head
def test_ten_perfectly_separable_rows_give_finite_parameters(head, loss):
    table = make_table(10, dev=10)
    gold = torch.arange(10, dtype=torch.float64) % 5
    table.gold, table.logprobs = gold, -8 * (gold.unsqueeze(-1) - table.values).square()
    objective = objective_of(head, loss, table)
    natural = newton(objective, objective.head.start())
    assert natural.isfinite().all()
    assert natural.abs().max() < 1e3
    assert (natural[:, 0] > 0).all()
    _, gradient, _ = objective.derivatives(natural)
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("solver", "loss"),
    [
        ("newton", "nll"),
        ("newton", "mse"),
        ("newton", "pearson"),
        ("lbfgs", "nll"),
        ("adam", "nll"),
    ],
)
def test_no_ridge_at_all_gives_scores_and_no_crash(solver, loss):
    learn = EVERYTHING if loss == "nll" else [name for name in EVERYTHING if name != "mixing"]
    head = HeadSettings(learn=list(learn), ridge_bias=0.0, ridge_mixing=0.0)
    folds = Folds(inner=2)
    fitted = fit(make_table(30), head, folds=folds, loss=loss, solver=solver, epochs=2).fitted
    logits = fitted.logits(TABLE.logprobs, make_assistant(TABLE))
    assert logits.softmax(-1).isfinite().all()


@every_loss
def test_an_infinite_ridge_on_mixing_is_a_head_without_mixing(loss):
    head = HeadSettings(learn=MIXING.learn, ridge_mixing=math.inf)
    mixed, plain = objective_of(head, loss), objective_of(DEFAULT, loss)
    natural = newton(mixed, mixed.head.start(), steps=50)
    columns = mixed.head.columns["mixing"]
    assert natural[:, columns].abs().max() < 1e-9
    expected = newton(plain, plain.head.start(), steps=50)
    close(natural[:, : columns.start], expected, atol=1e-5)


@every_loss
def test_an_infinite_ridge_on_the_rest_keeps_the_start(loss):
    objective = objective_of(HeadSettings(ridge_bias=math.inf), loss)
    start = objective.head.start()
    close(newton(objective, start), start, atol=1e-9)


# Recovery


@pytest.mark.parametrize("temperature_on", ["sum", "logits"])
def test_a_known_head_is_recovered_exactly_from_its_own_expectations(temperature_on):
    # each item stands once a label, with that label's probability as its weight
    table = make_table(300, dev=300)
    head = HeadSettings(temperature_on=temperature_on, ridge_bias=1e-9)
    problems = problems_of(table, head)[0].take(torch.tensor([0]))
    truth = _known_head(problems)
    probs = head_logits(
        truth, table.logprobs, torch.zeros_like(table.logprobs), temperature_on=temperature_on
    )[0].softmax(-1)
    table.logprobs = table.logprobs.repeat_interleave(5, 0)
    table.gold = table.values.repeat(300)
    problems = problems._replace(train=probs.reshape(1, -1), held_out=probs.reshape(1, -1))
    objective = make_objective(table, head, problems=problems)
    found = objective.head.parameters(newton(objective, objective.head.start()))
    close(found.temperature, truth.temperature, atol=1e-5)
    bias = found.total_bias() - found.total_bias().mean(-1, keepdim=True)
    close(bias, truth.total_bias() - truth.total_bias().mean(-1, keepdim=True), atol=1e-5)


def test_a_known_head_is_recovered_from_twenty_thousand_drawn_scores():
    table = make_table(20_000, dev=20_000)
    head = HeadSettings(ridge_bias=1e-3)
    problems = problems_of(table, head)[0]
    problems = problems.take(torch.tensor([len(problems.train) - 1]))  # all of dev
    truth = _known_head(problems)
    logits = head_logits(truth, table.logprobs, torch.zeros_like(table.logprobs))[0]
    drawn = logits.softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(0))
    table.gold = table.values[drawn.squeeze(-1)]
    objective = make_objective(table, head, problems=problems)
    found = objective.head.parameters(newton(objective, objective.head.start()))
    # standard errors are near 0.01 for 1/T and 0.04 for a bias
    close(1 / found.temperature, 1 / truth.temperature, atol=0.05)
    natural, expected = (h.total_bias() / h.temperature for h in (found, truth))
    close(natural - natural.mean(), expected - expected.mean(), atol=0.15)


def _known_head(problems):
    objective_head = make_objective(TABLE, DEFAULT).head
    start = objective_head.parameters(objective_head.start()).take(torch.tensor([0]))
    return start._replace(
        prior=problems.prior,
        centre=problems.centre,
        strength=torch.tensor([0.4], dtype=torch.float64),
        temperature=torch.tensor([1.6], dtype=torch.float64),
        bias=torch.tensor([[0.8, -0.5, 0.0, 1.1, -1.4]], dtype=torch.float64),
    )


# References


@pytest.mark.parametrize(
    ("solver", "head", "epochs"),
    [("lbfgs", DEFAULT, 20), ("lbfgs", ALL, 20), ("adam", DEFAULT, 300)],
    ids=["lbfgs", "lbfgs all", "adam"],
)
def test_every_solver_finds_newtons_solution(solver, head, epochs):
    table = make_table(60)
    assistant = make_assistant(table)
    options = {"assistant": assistant, "loss": "nll", "folds": Folds(inner=2)}
    other = fit(
        table, head, solver=solver, epochs=epochs, lr=0.1, **options
    ).parameters_by_problem()
    exact = fit(table, head, **options).parameters_by_problem()
    for name in ("strength", "temperature", "bias", "mixing", "contrast"):
        close(getattr(other, name), getattr(exact, name), atol=1e-3)


@pytest.mark.parametrize(
    ("loss", "head"),
    [("mse", DEFAULT), ("mse", MIXING), ("mse", ALL), ("rps", DEFAULT), ("rps", ALL),
     ("pearson", DEFAULT)],
    ids=["mse", "mse mixing", "mse all", "rps", "rps all", "pearson"],
)  # fmt: skip
def test_fifty_steps_from_the_nll_solution_end_at_a_stationary_point_no_worse_than_it(loss, head):
    objective, convex = objective_of(head, loss), objective_of(head)
    start = newton(convex, convex.head.start())
    natural = newton(objective, start, steps=50)  # the shipped configs' `max_epochs`
    assert objective.derivatives(natural)[1].abs().max() < 1e-6
    assert (objective.value(natural) <= objective.value(start)).all()


def numpy_objective(loss, table, prior, rows, rho=0.3):
    """Value and gradient by (log u, s, d) of the default head on some rows, in plain numpy."""
    values = np.arange(5.0)
    normalised = special.log_softmax(table.logprobs.numpy()[rows], -1)
    gold = table.gold.numpy()[rows]
    target = np.clip(1 - np.abs(gold[:, None] - values), 0, None)  # the labels are one apart
    n = len(gold)

    def function(x):
        u, s, d = np.exp(x[0]), x[1], x[2:]
        z = u * normalised + s * prior + d
        p = special.softmax(z, -1)
        if loss == "nll":
            value = -(target * special.log_softmax(z, -1)).sum() / n
            slope = (p - target) / n
        else:
            score = p @ values
            value = np.mean((score - gold) ** 2)
            slope = 2 / n * (score - gold)[:, None] * p * (values - score[:, None])
        value += rho / n * (d @ d + (s - 1) ** 2 + u - 1 - np.log(u))
        by_u = (slope * normalised).sum() + rho / n * (1 - 1 / u)
        by_s = (slope @ prior).sum() + 2 * rho / n * (s - 1)
        by_d = slope.sum(0) + 2 * rho / n * d
        return value, np.concatenate([[u * by_u, by_s], by_d])

    return function


@pytest.mark.parametrize("loss", ["nll", "mse"])
def test_newton_agrees_with_scipy_on_an_objective_written_by_hand(loss):
    objective, convex = objective_of(DEFAULT, loss), objective_of(DEFAULT)
    natural = newton(objective, newton(convex, convex.head.start()))
    problems, _ = problems_of(TABLE, DEFAULT, Folds(inner=2))
    for p in range(len(natural)):
        rows = problems.train[p].bool().numpy()
        minimum = np.array([0.0, 1, 0, 0, 0, 0, 0])
        for name in ["nll"] if loss == "nll" else ["nll", "mse"]:
            function = numpy_objective(name, TABLE, problems.prior[p].numpy(), rows)
            options = {"gtol": 1e-11, "maxiter": 5000}
            minimum = optimize.minimize(
                function, minimum, jac=True, method="BFGS", options=options
            ).x
        minimum[0] = np.exp(minimum[0])
        close(natural[p], torch.from_numpy(minimum), atol=1e-5)


# Problems don't influence one another


@pytest.mark.parametrize(
    ("head", "loss", "inverted"),
    [(DEFAULT, "mse", True), (ALL, "nll", False), (DEFAULT, "rps", False)],
    ids=["mse inverted", "nll all", "rps"],
)
def test_a_batched_fit_equals_every_separate_one(head, loss, inverted):
    assistant = make_assistant(TABLE)
    problems, _ = problems_of(TABLE, head, Folds(outer=5, inverted=inverted, inner=2))
    build = partial(make_objective, TABLE, head, assistant=assistant)

    def solve(chosen):
        convex, objective = (build(name, problems=chosen) for name in ("nll", loss))
        return newton(objective, newton(convex, convex.head.start()))

    together = solve(problems)
    assert len(together) == 18  # (5 folds + deploy) x (2 inner + 1)
    for p in range(18):
        close(solve(problems.take(torch.tensor([p])))[0], together[p], atol=1e-6)


@every_loss
def test_problems_in_small_blocks_step_as_one_batch_does(loss, monkeypatch):
    whole = objective_of(ALL, loss)
    natural = random_point(whole, 0, scale=0.3)
    expected = newton(whole, natural, steps=2)
    monkeypatch.setattr(solvers, "_BLOCK", 1)
    close(newton(objective_of(ALL, loss), natural, steps=2), expected, atol=1e-9)


@every_loss
def test_reversing_the_scale_reverses_the_fitted_bias(loss):
    mirrored = make_table()
    mirrored.gold, mirrored.logprobs = 4 - mirrored.gold, mirrored.logprobs.flip(-1)
    mirrored.evidence = {
        kind: answers._replace(logprobs=answers.logprobs.flip(-1))
        for kind, answers in mirrored.evidence.items()
    }
    here, there = (fit(t, loss=loss).parameters_by_problem() for t in (TABLE, mirrored))
    close(there.total_bias().flip(-1), here.total_bias(), atol=1e-6)
    close(there.temperature, here.temperature, atol=1e-6)
