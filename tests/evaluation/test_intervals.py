import math

import numpy as np
import pytest
import scipy.stats
import torch
from scipy import stats
from statsmodels.stats.multitest import multipletests
from synthetic import normal

from scorecal.evaluation.intervals import Interval, adjusted, difference_p, interval
from scorecal.functional.correlation import spearman
from scorecal.functional.metrics import mean_squared_error
from scorecal.functional.resampling import bootstrap_weights, percentile_interval

# One interval


@pytest.mark.parametrize("groups", [5, 25, 200, 5000])
def test_the_interval_of_normal_samples_is_as_wide_as_student_s(groups):
    # Of normal samples with deviation s·√((G-1)/G), as the bootstrap of a mean has: ±t·s.
    quantiles = torch.linspace(0, 1, 2_000_003, dtype=torch.float64)[1:-1]
    samples = 3 + torch.special.ndtri(quantiles) * math.sqrt((groups - 1) / groups)
    found = interval(3.0, samples[::2], groups)  # nanquantile takes no more
    reach = stats.t.ppf(0.975, groups - 1)
    assert found.estimate == 3
    assert found.low == pytest.approx(3 - reach, rel=2e-2)
    assert found.high == pytest.approx(3 + reach, rel=2e-2)


def test_with_many_groups_the_interval_is_the_plain_percentile_interval():
    samples = normal(2000, seed=1)
    low, high = np.quantile(samples.numpy(), [0.025, 0.975])
    assert interval(0.0, samples, 10**6)[1:] == pytest.approx((low, high), abs=1e-4)


def test_fewer_groups_never_make_a_narrower_interval():
    samples = normal(2000, seed=2)
    widths = [
        found.high - found.low
        for found in (interval(0.0, samples, groups) for groups in (2, 3, 5, 10, 30, 100, 1000))
    ]
    assert widths == sorted(widths, reverse=True)


def test_undefined_resamples_are_left_out_of_an_interval():
    samples = normal(500, seed=3)
    holes = torch.cat([samples, torch.full((100,), math.nan).double()])
    assert interval(0.1, holes, 40) == interval(0.1, samples, 40)


@pytest.mark.parametrize(
    ("estimate", "samples", "groups"),
    [(math.nan, 100, 20), (0.5, 100, 1), (0.5, 1, 20), (0.5, 0, 20)],
)
def test_what_is_undefined_or_not_resampled_has_no_interval(estimate, samples, groups):
    found = interval(estimate, normal(samples, seed=4), groups)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert found.estimate == estimate or math.isnan(estimate)


# p of a difference


def excludes_0(found):
    return found.low > 0 or found.high < 0


def with_two_moved(samples):
    """The same resamples with two of the few on one side of 0 moved to the many on the other."""
    sign = samples.median().sign()
    ordered = (sign * samples).sort().values
    few = int((ordered <= 0).sum())
    ordered[few - 2 : few] = 1e-9
    return sign * ordered


@pytest.mark.parametrize("groups", [8, 25, 100, 1000])
def test_p_is_below_5_percent_where_the_interval_excludes_0(groups):
    decisions = {True: 0, False: 0}
    for seed in range(10):
        samples = normal(1000, seed=seed)
        for shift in np.linspace(1.5, 3.5, 21):
            for sign in (1, -1):
                moved = sign * (samples + shift)
                reliable = difference_p(moved, groups) < 0.05
                found = excludes_0(interval(1.0, moved, groups))
                decisions[found] += 1
                assert found or not reliable
                if found and not reliable:  # p counts one resample more, percentiles interpolate
                    assert difference_p(with_two_moved(moved), groups) < 0.05
    assert min(decisions.values()) > 50


def test_p_of_normal_samples_is_student_s():
    # A mean 2.1 standard errors from 0, of 30 groups: the bootstrap's deviation is √(29/30) of it.
    quantiles = torch.linspace(0, 1, 1_000_003, dtype=torch.float64)[1:-1]
    samples = 2.1 + torch.special.ndtri(quantiles) * math.sqrt(29 / 30)
    expected = 2 * stats.t.sf(2.1, 29)
    assert difference_p(samples, 30) == pytest.approx(expected, rel=1e-3)
    assert difference_p(-samples, 30) == pytest.approx(expected, rel=1e-3)


def test_p_goes_below_its_resolution_along_a_normal_tail_and_never_above_1():
    far = normal(999, seed=1)
    for shift in (4.0, 5.0, 6.0):  # beyond all 999 resamples
        mean, deviation = (far + shift).mean(), far.std()
        tail = 2 * scipy.stats.norm.sf(float(mean / deviation))
        assert difference_p(far + shift, 10**9) == pytest.approx(tail, rel=1e-3)
    assert difference_p(torch.ones(999).double(), 20) == 0
    assert difference_p(torch.zeros(999).double(), 20) == 1
    assert 0.9 < difference_p(normal(999, seed=0), 20) <= 1


def test_undefined_resamples_are_left_out_of_p():
    samples = normal(500, seed=5) + 2
    holes = torch.cat([samples, torch.full((100,), math.nan).double()])
    assert difference_p(holes, 40) == difference_p(samples, 40)
    nothing = torch.full((100,), math.nan).double()
    assert math.isnan(difference_p(nothing, 40))
    assert math.isnan(difference_p(samples, 1))


def test_p_is_uniform_where_there_is_no_difference():
    # Means of 40 paired differences around 0, 400 of them: Kolmogorov-Smirnov at 1 in 1000.
    differences = normal(400, 40, seed=6)
    drawn = bootstrap_weights(
        torch.arange(40), resamples=500, generator=torch.Generator().manual_seed(0)
    )
    means = differences @ drawn.T / 40
    found = [difference_p(row, 40) for row in means]
    assert stats.kstest(found, "uniform").pvalue > 1e-3


# Which of many are reliable


def test_q_values_are_benjamini_and_hochberg_s():
    # p·m/rank = .005·4/1, .03·4/3, .02·4/2, .9·4/4, each no more than those after it.
    assert adjusted([0.005, 0.03, 0.02, 0.9]) == pytest.approx([0.02, 0.04, 0.04, 0.9])


@pytest.mark.parametrize("seed", range(5))
def test_q_values_agree_with_statsmodels(seed):
    p_values = (np.random.default_rng(seed).random(17) ** 3).tolist()
    expected = multipletests(p_values, method="fdr_bh")[1]
    assert adjusted(p_values) == pytest.approx(expected.tolist(), abs=1e-12)


def test_an_undefined_p_stays_undefined_and_counts_for_nothing():
    found = adjusted([math.nan, 0.01, math.nan, 0.04])
    assert [math.isnan(q) for q in found] == [True, False, True, False]
    assert [found[1], found[3]] == pytest.approx([0.02, 0.04])
    assert all(math.isnan(q) for q in adjusted([math.nan, math.nan]))
    assert adjusted([]) == []


# Coverage

ICC = 0.3  # of gold and of the judge's error, where items come in groups
TRUTH = {"mse": 0.8, "spearman": 6 / math.pi * math.asin(0.6 / 2)}  # of a normal pair, ρ = 0.6


def normal_pair(groups, size, generator):
    """Gold and score, correlated 0.6; both share something within a group."""

    def noise():
        own = torch.randn(groups, size, dtype=torch.float64, generator=generator)
        shared = torch.randn(groups, 1, dtype=torch.float64, generator=generator)
        share = ICC if size > 1 else 0.0
        return (math.sqrt(1 - share) * own + math.sqrt(share) * shared).flatten()

    gold = noise()
    return gold, 0.6 * gold + 0.8 * noise()


def coverages(groups, size, *, replications, resamples):
    """How often the expanded and the plain percentile interval hold the truth."""
    generator = torch.Generator().manual_seed(0)
    number = torch.arange(groups).repeat_interleave(size)
    held = {(metric, kind): 0 for metric in TRUTH for kind in ("expanded", "plain")}
    everyone = torch.ones(groups * size, dtype=torch.float64)
    for _ in range(replications):
        gold, score = normal_pair(groups, size, generator)
        drawn = bootstrap_weights(number, resamples=resamples, generator=generator)
        for metric, function in (("mse", mean_squared_error), ("spearman", spearman)):
            samples = function(score, gold, drawn)
            estimate = function(score, gold, everyone).item()
            low, high = percentile_interval(samples)
            plain = Interval(estimate, low.item(), high.item())
            for kind, found in (
                ("expanded", interval(estimate, samples, groups)),
                ("plain", plain),
            ):
                held[metric, kind] += found.low <= TRUTH[metric] <= found.high
    return {name: count / replications for name, count in held.items()}


def test_the_truth_of_the_coverage_tests_is_that_of_a_huge_sample():
    gold, score = normal_pair(20_000, 16, torch.Generator().manual_seed(1))
    assert stats.spearmanr(gold, score).statistic == pytest.approx(TRUTH["spearman"], abs=4e-3)
    assert (gold - score).square().mean().item() == pytest.approx(TRUTH["mse"], abs=8e-3)


@pytest.mark.parametrize(("groups", "size"), [(200, 1), (25, 16)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(groups, size):
    found = coverages(groups, size, replications=100, resamples=200)
    for metric in TRUTH:  # 0.95 less three standard errors of 100 draws
        assert found[metric, "expanded"] >= 0.88
        assert found[metric, "expanded"] >= found[metric, "plain"]


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "size"), [(200, 1), (25, 16)])
def test_95_percent_intervals_hold_the_truth_in_92_to_97_percent_of_draws(groups, size):
    found = coverages(groups, size, replications=1000, resamples=1000)
    for (metric, kind), share in found.items():
        error = math.sqrt(share * (1 - share) / 1000)
        print(f"{groups} x {size}, {metric}, {kind}: {share:.3f} ± {error:.3f}")
    for metric in TRUTH:
        assert 0.92 <= found[metric, "expanded"] <= 0.97
