import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from synthetic import make_objective, make_table, normal, problems_of

from scorecal.calibration.head import (
    HeadParameters,
    HeadSettings,
    NaturalHead,
    Problems,
    head_logits,
)
from scorecal.calibration.solvers import newton

assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
TERMS = ("strength", "temperature", "bias", "mixing", "contrast")
SUBSETS = [list(c) for size in range(6) for c in itertools.combinations(TERMS, size)]
every_subset = pytest.mark.parametrize("learn", SUBSETS, ids=lambda learn: "+".join(learn) or "no")
both_placements = pytest.mark.parametrize("temperature_on", ["sum", "logits"])


def random_problems(count=3, items=6, levels=4, seed=0):
    """Problems that differ in everything."""
    positive = partial(normal, count, seed=seed)
    return Problems(
        train=(normal(count, items, seed=seed + 1) > -1).double(),
        held_out=torch.zeros(count, items, dtype=torch.float64),
        strength=normal(count, seed=seed + 2),
        temperature=positive().exp(),
        contrast=normal(count, seed=seed + 3),
        ridge_bias=positive().add(0.3).exp(),
        ridge_mixing=positive().sub(0.4).exp(),
        prior=normal(count, levels, seed=seed + 4),
        centre=normal(count, levels, seed=seed + 5),
    )


def random_parameters(count=3, levels=4, seed=0):
    return HeadParameters(
        strength=normal(count, seed=seed),
        temperature=normal(count, seed=seed + 1).exp(),
        bias=normal(count, levels, seed=seed + 2),
        mixing=normal(count, levels, levels, seed=seed + 3),
        contrast=normal(count, seed=seed + 4),
        prior=normal(count, levels, seed=seed + 5),
        centre=normal(count, levels, seed=seed + 6),
    )


def random_natural(head, seed=9):
    natural = normal(len(head.problems.prior), head.width, seed=seed)
    if (columns := head.columns.get("temperature")) is not None:
        natural[:, columns] = natural[:, columns].exp()
    return natural


LOGPROBS, ASSISTANT = normal(6, 4, seed=20) * 2 - 3, normal(6, 4, seed=21).log_softmax(-1)


@both_placements
def test_logits_agree_with_the_formula_item_by_item(temperature_on):
    head = random_parameters()
    actual = head_logits(head, LOGPROBS, ASSISTANT, temperature_on=temperature_on)
    for p, i in itertools.product(range(3), range(6)):
        lam, temp, delta, mixing, alpha, prior, centre = (np.asarray(v[p]) for v in head)
        normalised = special.log_softmax(LOGPROBS[i].numpy())
        moved = delta + lam * prior + mixing @ (normalised - centre) - alpha * ASSISTANT[i].numpy()
        if temperature_on == "sum":
            expected = (normalised + moved) / temp
        else:
            expected = normalised / temp + moved
        assert_close(actual[p, i], torch.from_numpy(expected))


@both_placements
@every_subset
def test_the_head_is_linear_in_natural_parameters_whatever_is_learned(learn, temperature_on):
    options = HeadSettings(learn=learn, temperature_on=temperature_on)
    head = NaturalHead(random_problems(), options)
    natural = random_natural(head)
    linear = head.design(LOGPROBS, ASSISTANT).logits(natural)
    parameters = head.parameters(natural)
    assert_close(
        linear, head_logits(parameters, LOGPROBS, ASSISTANT, temperature_on=temperature_on)
    )
    fixed = head.problems
    for name in {"strength", "temperature", "contrast"} - set(learn):
        assert torch.equal(getattr(parameters, name), getattr(fixed, name))
    for name in {"bias", "mixing"} - set(learn):
        assert not getattr(parameters, name).any()


@both_placements
@every_subset
def test_the_start_is_the_settings_and_costs_no_penalty(learn, temperature_on):
    options = HeadSettings(learn=learn, temperature_on=temperature_on)
    head = NaturalHead(random_problems(), options)
    start = head.parameters(head.start())
    for name in ("strength", "temperature", "contrast"):
        assert_close(getattr(start, name), getattr(head.problems, name))
    assert not start.bias.any()
    assert not start.mixing.any()
    assert_close(head.penalty(head.start()), torch.zeros(3, dtype=torch.float64))
    if learn:
        assert (head.penalty(random_natural(head)) > 0).all()


@both_placements
def test_the_penalty_agrees_with_hand_work_and_its_second_derivative_with_autograd(temperature_on):
    options = HeadSettings(learn=list(TERMS), temperature_on=temperature_on)
    problems = random_problems()
    head = NaturalHead(problems, options)
    natural = random_natural(head)
    for p in range(3):
        rho, rho_mixing = problems.ridge_bias[p], problems.ridge_mixing[p]
        divisor = problems.temperature[p] if temperature_on == "sum" else 1.0
        u, s, w, d, n = natural[p].split([1, 1, 1, 4, 16])
        ratio = u * problems.temperature[p]
        distance = (
            (d**2).sum()
            + (s - problems.strength[p] / divisor) ** 2
            + (w - problems.contrast[p] / divisor) ** 2
            + ratio - 1 - ratio.log()
        )  # fmt: skip
        expected = (rho * distance + rho_mixing * (n**2).sum()) / problems.train[p].sum()
        assert_close(head.penalty(natural)[p : p + 1], expected)
        one = NaturalHead(problems.take(torch.tensor([p])), options)
        hessian = torch.autograd.functional.hessian(
            lambda x, one=one: one.penalty(x.unsqueeze(0))[0], natural[p]
        )
        assert_close(head.penalty_hessian(natural)[p], hessian)


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside a problem with rows"])
@pytest.mark.parametrize("loss", ["nll", "mse", "rps", "pearson"])
def test_without_rows_the_head_stays_deb_t_with_lambda_one(loss, company):
    table, options = make_table(), HeadSettings()
    problems = problems_of(table, options)[0].take(torch.arange(2 if company else 1))
    train = problems.train.clone()
    train[0] = 0
    objective = make_objective(table, options, loss, problems=problems._replace(train=train))
    start = objective.head.start()
    natural = newton(objective, start, steps=20)
    assert torch.equal(natural[0], start[0])
    head = objective.head.parameters(natural)
    actual = head_logits(head, table.logprobs, torch.zeros_like(table.logprobs)).softmax(-1)
    # Deb-T (paper 1, eq. 1 to 3), from the ten prompts of lowest perplexity
    evidence = table.evidence["random_task"]
    kept = np.argsort(evidence.perplexity.numpy())[:10]
    bias = special.softmax(evidence.logprobs.numpy()[kept], -1).mean(0)
    term = np.log(1 / 5) - np.log(bias)
    assert_close(actual[0], torch.from_numpy(special.softmax(table.logprobs.numpy() + term, -1)))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), shift=st.floats(-200, 200))
def test_a_constant_added_to_an_items_logprobs_changes_nothing(seed, shift):
    head, logprobs = random_parameters(seed=seed), normal(6, 4, seed=seed + 30)
    moved = logprobs + shift * normal(6, 1, seed=seed + 31)
    assert_close(head_logits(head, moved, ASSISTANT), head_logits(head, logprobs, ASSISTANT))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(4)), on=st.booleans())
def test_permuting_the_labels_permutes_the_logits(seed, order, on):
    head = random_parameters(seed=seed)
    permuted = head._replace(
        bias=head.bias[:, order],
        prior=head.prior[:, order],
        centre=head.centre[:, order],
        mixing=head.mixing[:, order][:, :, order],
    )
    placed = "sum" if on else "logits"
    expected = head_logits(head, LOGPROBS, ASSISTANT, temperature_on=placed)[..., order]
    actual = head_logits(permuted, LOGPROBS[:, order], ASSISTANT[:, order], temperature_on=placed)
    assert_close(actual, expected)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), factor=st.floats(1.01, 10))
def test_a_higher_temperature_makes_no_label_likelier_that_was_the_likeliest(seed, factor):
    head = random_parameters(seed=seed)
    hotter = head._replace(temperature=head.temperature * factor)
    sharp = head_logits(head, LOGPROBS, ASSISTANT).softmax(-1).amax(-1)
    flat = head_logits(hotter, LOGPROBS, ASSISTANT).softmax(-1).amax(-1)
    assert (flat <= sharp + 1e-12).all()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", 0.0),
        ("prior_temperature", -1.0),
        ("prior_prompts", 0),
        ("ridge_bias", -0.1),
        ("ridge_mixing", float("nan")),
    ],
)
def test_a_setting_outside_its_domain_is_named(option, value):
    with pytest.raises(ValueError, match=rf"`model.head.{option}` must be .*, got {value}"):
        HeadSettings(**{option: value}).check()
