"""Masses by position, and the test that tells a preferred position from noise."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from scorecal.functional.positions import cramers_v, position_mass, shift_test

f64 = partial(torch.tensor, dtype=torch.float64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def rotations(levels):
    return (torch.arange(levels) + torch.arange(levels).unsqueeze(-1)) % levels


def judged(groups, levels, *, bias=0.0, a_group=1, noise=0.5, moved=0.0, width=0.5, seed=0):
    """Answers under the rotations of a rubric.

    What an item deserves, plus a bias of the position at which a label stands, plus noise of the
    label, plus a move of the deserved score; noise and move differ from order to order, and half of
    both is shared by the items of a group.
    """
    shown, items = rotations(levels), groups * a_group
    group = torch.arange(items) // a_group
    deserved = (levels - 1) * torch.rand(items, 1, dtype=torch.float64, generator=seeded(seed))
    generator = seeded(seed + 1)

    def varied(width):
        own = torch.randn(levels, items, width, dtype=torch.float64, generator=generator)
        shared = torch.randn(levels, groups, width, dtype=torch.float64, generator=generator)
        return (own + shared[:, group]) / math.sqrt(2)

    place = deserved + moved * varied(1)
    logits = -width * (place - torch.arange(levels)).square() + noise * varied(levels)
    logits = logits + torch.as_tensor(bias, dtype=torch.float64).expand(levels)[
        shown.argsort(-1)
    ].unsqueeze(1)
    return position_mass(logits, shown), group


# Mass by position


def test_the_mass_of_a_position_is_that_of_whatever_label_stands_there():
    logprobs = f64([[[0.6, 0.3, 0.1]], [[0.2, 0.7, 0.1]]]).log() - 0.4  # mass off the labels
    # Shown "2 0 1": position 0 has label 2's 0.1. Shown "1 2 0": it has label 1's 0.7.
    mass = position_mass(logprobs, torch.tensor([[2, 0, 1], [1, 2, 0]]))
    assert mass.tolist() == [pytest.approx([0.4, (0.6 + 0.1) / 2, (0.3 + 0.2) / 2])]


@pytest.mark.parametrize(("orders", "items", "levels"), [(1, 3, 2), (4, 5, 4), (6, 2, 3)])
def test_masses_are_those_of_a_plain_loop(orders, items, levels):
    logprobs = 2 * draw(orders, items, levels)
    shown = torch.stack([torch.randperm(levels, generator=seeded(n)) for n in range(orders)])
    expected = np.zeros((items, levels))
    for order in range(orders):
        for item in range(items):
            probs = special.softmax(logprobs[order, item].numpy())
            for position in range(levels):
                expected[item, position] += probs[shown[order, position]] / orders
    np.testing.assert_allclose(position_mass(logprobs, shown), expected, rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(levels=st.integers(2, 10), seed=st.integers(0, 1000))
def test_a_judge_that_answers_all_balanced_orders_alike_is_uniform(levels, seed):
    logprobs = 3 * draw(1, 4, levels, seed=seed).expand(levels, -1, -1)
    mass = position_mass(logprobs, rotations(levels))
    torch.testing.assert_close(mass, torch.full_like(mass, 1 / levels))


# Cramér's V


def test_v_is_0_where_all_positions_have_the_same_and_1_where_one_has_everything():
    assert cramers_v(f64([[0.25] * 4, [0, 1, 0, 0], [0.5, 0.5, 0, 0]])).tolist() == pytest.approx(
        [0, 1, 1 / math.sqrt(3)]  # Σ (p - 1/4)² = 1/4, times 4/3
    )


@pytest.mark.parametrize("counts", [[10, 20, 30], [5, 5, 5, 9, 1], [7, 93]])
def test_v_is_scipy_s_chi_square_by_answers_and_positions(counts):
    chi_square = stats.chisquare(counts).statistic
    expected = math.sqrt(chi_square / (sum(counts) * (len(counts) - 1)))
    assert cramers_v(f64(counts) / sum(counts)).item() == pytest.approx(expected)


# The test


def test_p_is_that_of_a_plain_loop_over_all_turns():
    mass, group = judged(5, 3, bias=[0.9, 0, 0], a_group=2, seed=4)
    sums = [(mass[group == number] - 1 / 3).sum(0).numpy() for number in range(5)]
    everything = []
    for code in range(3**5):
        turned = [np.roll(own, code // 3**at % 3) for at, own in enumerate(sums)]
        everything.append(np.square(sum(turned)).sum())
    exact = np.mean(np.array(everything) >= everything[0] - 1e-12)
    found = shift_test(mass, group, permutations=20_000, generator=seeded(0))
    assert 0.01 < exact < 0.3
    assert found == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 20_000))


def test_the_same_generator_gives_the_same_p_whatever_is_held_at_once(monkeypatch):
    mass, group = judged(30, 5, bias=[0.2, 0, 0, 0, 0])
    p_values = [shift_test(mass, group, generator=seeded(7)) for _ in range(2)]
    monkeypatch.setattr("scorecal.functional.positions._BLOCK", 100)
    p_values.append(shift_test(mass, group, generator=seeded(7)))
    assert len(set(p_values)) == 1


@pytest.mark.parametrize("levels", [2, 3, 5, 7])
def test_a_consistent_judge_is_no_finding(levels):
    logprobs = 3 * draw(1, 40, levels).expand(levels, -1, -1)
    mass = position_mass(logprobs, rotations(levels))
    assert shift_test(mass, torch.arange(40), permutations=200, generator=seeded(0)) == 1


def test_one_group_can_tell_nothing():
    mass, _ = judged(1, 4, bias=[3.0, 0, 0, 0], a_group=50)
    p = shift_test(mass, torch.zeros(50).long(), permutations=200, generator=seeded(0))
    assert p == 1


def test_items_of_a_group_are_one_piece_of_evidence():
    mass, group = judged(6, 5, bias=[0.3, 0, 0, 0, 0], noise=1.0, seed=3)
    alone = shift_test(mass, group, generator=seeded(0))
    copied = shift_test(mass.repeat(20, 1), group.repeat(20), generator=seeded(0))
    assert copied == alone
    apart = shift_test(mass.repeat(20, 1), torch.arange(120), generator=seeded(0))
    assert apart < 0.01 < alone  # what a χ² test over repeated items would believe


def rate(draws, *, permutations=199, **options):
    """How often p is at most 5 %."""
    found = 0
    for number in range(draws):
        mass, group = judged(seed=10 * number, **options)
        p = shift_test(mass, group, permutations=permutations, generator=seeded(number))
        found += p <= 0.05
    return found / draws


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 40, "levels": 5},
        {"groups": 12, "levels": 4, "a_group": 5, "noise": 1.5},
        # The judge's score moves from order to order: masses of neighbouring positions go together.
        {"groups": 40, "levels": 10, "noise": 0.0, "moved": 2.0, "width": 0.05},
    ],
    ids=["items", "groups", "moving scores"],
)
def test_a_judge_without_a_position_bias_is_found_biased_in_5_percent_of_draws(options):
    assert 0.03 <= rate(1500, **options) <= 0.07


def test_free_permutations_of_positions_would_find_a_bias_too_often():
    found = 0
    for number in range(300):
        mass, _ = judged(40, 10, noise=0.0, moved=2.0, width=0.05, seed=10 * number)
        scatter = torch.rand(199, *mass.shape, generator=seeded(number)).argsort(-1)
        permuted = (mass - 0.1).expand(199, -1, -1).gather(-1, scatter).sum(1).square().sum(-1)
        found += 1 + int((permuted >= (mass - 0.1).sum(0).square().sum()).sum()) <= 10
    assert found / 300 > 0.08


def test_a_planted_position_bias_is_found_in_at_least_80_percent_of_draws():
    # 0.15 nats for what stands first, where the order moves each label by half a nat.
    power = rate(200, groups=100, levels=5, bias=[0.15, 0, 0, 0, 0])
    assert power >= 0.8


# Recovery


def test_a_planted_position_bias_is_recovered_to_within_sampling_error():
    """Where the judge has no view of the items, the prior is softmax(bias) but for the noise."""
    bias = f64([0.8, 0.0, -0.4, 0.0, 0.3])
    mass, _ = judged(4000, 5, bias=bias, noise=0.05, width=0.0)
    error = mass.std(0) / math.sqrt(len(mass))
    assert ((mass.mean(0) - bias.softmax(-1)).abs() < 4 * error + 5e-4).all()


def test_the_prior_of_some_items_is_that_of_all_to_within_sampling_error():
    bias = [0.8, 0.0, -0.4, 0.0, 0.3]
    everything, _ = judged(40_000, 5, bias=bias, seed=1)
    some, _ = judged(200, 5, bias=bias, seed=2)
    error = some.std(0) / math.sqrt(len(some))
    assert ((some.mean(0) - everything.mean(0)).abs() < 4 * error).all()
    assert some.mean(0).argmax() == 0
    assert some.mean(0).argmin() == 2
