import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import special, stats
from sklearn import metrics as sklearn_metrics
from statsmodels.stats.multitest import multipletests
from synthetic import fit, make_table, normal

from scorecal.calibration.folds import Folds
from scorecal.calibration.methods import Answers, Method, methods
from scorecal.evaluation.compare import (
    Case,
    Comparison,
    Row,
    compare,
    differences,
    methods_record,
    row_of,
)
from scorecal.evaluation.diagnosis import (
    case_record,
    curves_record,
    excess_record,
    mass_record,
    shares_record,
)
from scorecal.evaluation.evidence import evaluate, fold_draws, numbered_groups
from scorecal.evaluation.intervals import difference_p, interval
from scorecal.functional.resampling import bootstrap_weights
from scorecal.judging.priors import Evidence

ITEMS, LEVELS, RESAMPLES = 96, 4, 60
VALUES = np.arange(LEVELS)


@pytest.fixture(scope="module")
def table():
    """48 groups of two items."""
    return make_table(ITEMS, LEVELS, groups=[f"g{item // 2}" for item in range(ITEMS)])


@pytest.fixture(scope="module")
def comparison(table):
    """Two folds, each dev once and test once."""
    case = Case.of("task", table, Folds(outer=2, inverted=True, inner=2), 0)
    return compare(case, seed=0, resamples=RESAMPLES)


def row_named(comparison, name, temperature):
    [row] = [
        row
        for row in comparison.rows
        if (row.method.name, row.method.temperature) == (name, temperature)
    ]
    return row


# How a table is divided


def test_the_data_s_own_split_is_one_dev_and_one_test_part():
    table = make_table(50, dev=20)
    case = Case.of("task", table, Folds(), 0)
    assert case.sets.train.tolist() == [[True] * 20 + [False] * 30]
    assert case.test.tolist() == [[False] * 20 + [True] * 30]
    assert case.groups == 30
    assert case.judge == "synthetic"


def test_folds_keep_groups_whole_and_test_every_item_once_or_all_but_once(table):
    for inverted, times in ((False, 1), (True, 3)):
        case = Case.of("task", table, Folds(outer=4, inverted=inverted, inner=2), 0)
        assert not (case.sets.train & case.test).any()
        assert (case.test.sum(0) == times).all()
        assert (case.sets.train == ~case.test).all()
        assert torch.equal(case.test[:, ::2], case.test[:, 1::2])
        assert case.groups == 48


def test_a_table_without_test_items_is_refused():
    table = make_table(40, dev=40)
    with pytest.raises(ValueError, match=r"'synthetic' has no test items.*`data\.folds\.outer: 5`"):
        Case.of("task", table, Folds(), 0)


def test_constant_dev_gold_is_refused():
    table = make_table(40, dev=20)
    table.gold[:20] = 2.0
    with pytest.raises(ValueError, match=r"all 20 dev gold scores are 2: there is nothing to fit"):
        Case.of("task", table, Folds(), 0)


def test_a_group_in_both_splits_is_refused_unless_rows_are_divided():
    table = make_table(40, dev=21, groups=[f"g{item // 2}" for item in range(40)])
    with pytest.raises(ValueError, match=r"1 groups have items in both dev and test, 'g10' first"):
        Case.of("task", table, Folds(), 0)
    assert Case.of("task", table, Folds(by="row"), 0).test.sum() == 19


def test_fewer_groups_than_outer_folds_are_refused():
    table = make_table(40, groups=[f"g{item // 10}" for item in range(40)])
    with pytest.raises(ValueError, match=r"4 groups can't make 5 folds.*`--data\.folds\.outer`"):
        Case.of("task", table, Folds(outer=5), 0)


def test_fewer_dev_rows_than_inner_folds_are_refused():
    with pytest.raises(ValueError, match=r"3 dev rows can't make 5 folds.*data\.folds\.inner"):
        Case.of("task", make_table(40, dev=3), Folds(), 0)


# Figures


def references(score, logits, gold):
    """Every metric by somebody else's code or a plain formula."""

    def nearest(numbers):
        return [min(range(LEVELS), key=lambda k: (abs(k - number), k)) for number in numbers]

    found = {
        "mse": sklearn_metrics.mean_squared_error(gold, score),
        "mae": sklearn_metrics.mean_absolute_error(gold, score),
        "bias": np.mean(score - gold),
        "qwk": sklearn_metrics.cohen_kappa_score(
            nearest(score), nearest(gold), labels=range(LEVELS), weights="quadratic"
        ),
    }
    if np.ptp(score) > 0:
        found["spearman"] = stats.spearmanr(score, gold).statistic
        found["pearson"] = stats.pearsonr(score, gold).statistic
        found["kendall"] = stats.kendalltau(score, gold).statistic
    if logits is not None:
        probs = special.softmax(logits, -1)
        target = np.clip(1 - np.abs(gold[:, None] - VALUES), 0, None)
        found["sdd"] = np.mean(stats.entropy(target, probs, axis=-1))
        found["rps"] = np.mean((probs - target).cumsum(-1)[:, :-1] ** 2)
    return found


def test_every_figure_is_scipy_s_or_scikit_learn_s_mean_over_the_folds(comparison):
    case, gold = comparison.case, comparison.case.table.gold.numpy()
    assert len(comparison.rows) == len(methods(case.table))
    for row in comparison.rows:
        each = []
        for fold, test in enumerate(case.test.numpy()):
            logits = row.answers.logits
            logits = None if logits is None else logits[fold].numpy()[test]
            each.append(references(row.answers.score[fold].numpy()[test], logits, gold[test]))
        for metric, figure in row.figures.items():
            if math.isnan(figure.estimate):
                assert row.method.name == "constant"
                assert metric in ("spearman", "pearson", "kendall")
            else:
                expected = np.mean([found[metric] for found in each])
                assert figure.estimate == pytest.approx(expected, abs=1e-9), row.method.name
        assert each[0].keys() <= row.figures.keys()
        assert ("sdd" in row.figures) == (row.answers.logits is not None)


def drawn_of(comparison):
    """How often each resample draws each item, put together from the folds."""
    whole = torch.zeros(RESAMPLES, len(comparison.case.table.ids), dtype=torch.float64)
    for own, blocks in comparison.draws:
        whole[:, own] = torch.cat(blocks)
    return whole


def test_resamples_draw_groups_once_and_recompute_every_fold(comparison):
    case, gold = comparison.case, comparison.case.table.gold.numpy()
    row = row_named(comparison, "default head", "learned")
    drawn = drawn_of(comparison)
    assert torch.equal(drawn[:, ::2], drawn[:, 1::2])
    for number in range(0, RESAMPLES, 7):
        times, spearman, mse = drawn[number].long().numpy(), [], []
        for fold, test in enumerate(case.test.numpy()):
            items = np.repeat(np.flatnonzero(test), times[test])
            score = row.answers.score[fold].numpy()[items]
            spearman.append(stats.spearmanr(score, gold[items]).statistic)
            mse.append(np.square(score - gold[items]).mean())
        assert row.samples["spearman"][number].item() == pytest.approx(np.mean(spearman))
        assert row.samples["mse"][number].item() == pytest.approx(np.mean(mse))
    assert row.figures["mse"] == interval(row.figures["mse"].estimate, row.samples["mse"], 48)


def test_the_same_seed_gives_the_same_figures(table, comparison):
    again = row_of(comparison.case, methods(table)[0], comparison.draws)
    assert again.figures == comparison.rows[0].figures
    drawn = bootstrap_weights(
        numbered_groups(table), resamples=RESAMPLES, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(drawn, drawn_of(comparison))


# Differences, and what is bold


@pytest.mark.parametrize("metric", ["spearman", "mse", "sdd"])
def test_a_difference_is_that_of_the_figures_and_its_q_is_over_all_methods(comparison, metric):
    vanilla = row_named(comparison, "vanilla", "0.2")
    found = differences(comparison.rows, metric, vanilla, 48)
    known, p_values = [], []
    for row, difference in zip(comparison.rows, found, strict=True):
        if row is vanilla or metric not in row.samples:
            assert math.isnan(difference.q)
            assert math.isnan(difference.interval.estimate)
            continue
        gain = row.figures[metric].estimate - vanilla.figures[metric].estimate
        samples = row.samples[metric] - vanilla.samples[metric]
        assert difference.interval.estimate == pytest.approx(gain)
        assert difference.interval == interval(difference.interval.estimate, samples, 48)
        known.append(difference)
        p_values.append(difference_p(samples, 48))
    expected = multipletests(p_values, method="fdr_bh")[1]
    assert [difference.q for difference in known] == pytest.approx(expected.tolist())


def test_methods_that_never_differ_are_no_discovery(comparison):
    raw = row_named(comparison, "raw", "1")
    twin = raw._replace(method=raw.method._replace(name="twin"))
    [_, difference] = differences([raw, twin], "mse", raw, 48)
    assert difference.q == 1
    assert not difference.better("mse")
    assert not difference.worse("mse")


@pytest.mark.parametrize("metric", ["spearman", "pearson", "mse", "mae", "sdd", "rps", "qwk"])
def test_bold_is_better_than_vanilla_and_not_worse_than_the_best(comparison, metric):
    records = methods_record(comparison)
    sign = 1 if metric in ("spearman", "pearson", "qwk") else -1
    honest = [
        sign * record["figures"][metric]["estimate"]
        for record in records
        if metric in record["figures"] and not record["transductive"]
    ]
    best = np.nanmax(honest)
    for record in records:
        gain, gap = (record[key].get(metric) for key in ("against_vanilla", "against_best"))
        wanted = gain is not None and gain["q"] < 0.05 and sign * gain["estimate"] > 0
        if gap is not None and sign * record["figures"][metric]["estimate"] < best:
            wanted = wanted and not (gap["q"] < 0.05 and sign * gap["estimate"] < 0)
        assert (metric in record["bold"]) == wanted


def made_up(comparison, figures, metric):
    """Rows with these figures and a common noise of resamples beside a small one of their own."""
    common, rows = 0.1 * normal(500, seed=1), []
    for number, (name, (temperature, estimate, transductive)) in enumerate(figures.items()):
        samples = estimate + common + 0.01 * normal(500, seed=2 + number)
        figure = interval(estimate, samples, 48)
        answers = Answers(torch.zeros(1, 1).double(), None, {})
        method = Method(name, temperature, lambda sets: None, transductive)
        rows.append(Row(method, answers, {metric: figure}, {metric: samples}))
    return {record["name"]: record for record in methods_record(comparison._replace(rows=rows))}


@pytest.mark.parametrize(("metric", "sign"), [("spearman", 1), ("mse", -1)])
def test_bold_in_a_made_up_table(comparison, metric, sign):
    figures = {
        "raw": ("1", 0.295, False),  # between it and vanilla lies nothing but noise
        "vanilla": ("0.2", 0.30, False),
        "best": ("–", 0.60, False),
        "as good": ("–", 0.595, False),
        "behind": ("–", 0.50, False),  # better than vanilla, reliably worse than the best
        "worse": ("–", 0.10, False),
        "sees test": ("–", 0.70, True),  # takes no bold from others
    }
    figures = {
        name: (temperature, 2 + sign * estimate, seen)
        for name, (temperature, estimate, seen) in figures.items()
    }
    found = made_up(comparison, figures, metric)
    bold = [name for name, record in found.items() if metric in record["bold"]]
    assert bold == ["best", "as good", "sees test"]
    assert found["best"]["against_best"] == {}
    assert found["as good"]["against_best"][metric]["estimate"] == pytest.approx(-0.005 * sign)
    assert found["best"]["against_vanilla"][metric]["estimate"] == pytest.approx(0.3 * sign)
    assert found["vanilla"]["against_raw"][metric]["estimate"] == pytest.approx(0.005 * sign)


def test_nothing_is_bold_where_vanilla_is_the_best(comparison):
    figures = {
        "raw": ("1", 0.3, False),
        "vanilla": ("0.2", 0.6, False),
        "other": ("–", 0.6, False),
    }
    found = made_up(comparison, figures, "spearman")
    assert all(record["bold"] == [] for record in found.values())


# Records


def test_a_case_s_record_is_json_that_counts_what_it_is_about(comparison):
    record = case_record(comparison)
    assert json.loads(json.dumps(record)).keys() == record.keys()
    assert record["splits"] == 2
    assert record["dev_items"] == record["test_items"] == [48, 48]
    assert record["groups"] == 48
    assert record["label_mass"] == pytest.approx(comparison.case.table.label_mass.mean().item())
    for bias in record["latent_bias"].values():
        assert sum(bias) == pytest.approx(1)
    settings = {
        (row["name"], row["prompts"], row["largest"], row["temperature"])
        for row in record["strength"]
    }
    assert settings == {
        (name, prompts, largest, temperature)
        for name in ("Deb-R", "Deb-T")
        for prompts in (10, 100)
        for largest in (1.0, 10.0)
        for temperature in ("0.2", "1")
    }
    for row in record["strength"]:
        assert max(row["lambda"]) <= row["largest"]
    for scores, gold in record["reliability"].values():
        assert len(scores) == len(gold) == 10
        assert scores == sorted(scores)
        tested = comparison.case.table.gold.expand(2, -1)[comparison.case.test]
        counts = [len(part) for part in np.array_split(np.arange(len(tested)), 10)]
        assert np.average(gold, weights=counts) == pytest.approx(tested.mean().item())


def test_the_short_grid_of_10_prompts_is_the_methods_own_row(comparison):
    for row in case_record(comparison)["strength"]:
        if (row["prompts"], row["largest"]) == (10, 1.0):
            method = row_named(comparison, row["name"], row["temperature"])
            assert row["figures"]["spearman"] == method.figures["spearman"]._asdict()
            assert row["lambda"] == method.answers.settings["lambda"]


def test_curves_are_scipy_s_correlations_and_dev_s_best_strength_is_marked(comparison):
    case, record = comparison.case, curves_record(comparison.case)
    table, gold = case.table, case.table.gold.numpy()
    assert set(record) == {f"{name}, T = {t}" for name in ("Deb-R", "Deb-T") for t in ("1", "0.2")}
    keep = table.evidence["random"].perplexity.argsort()[:10]
    mean = table.evidence["random"].logprobs[keep].exp().mean(0).numpy()
    term = math.log(1 / LEVELS) - np.log(mean)
    assert record["Deb-R, T = 1"]["strengths"] == [round(step / 10, 1) for step in range(101)]
    for temperature, number in (("1", 0), ("1", 3), ("1", 100), ("0.2", 0), ("0.2", 10)):
        logits = (table.logprobs.numpy() + number / 10 * term) / float(temperature)
        score = np.round(special.softmax(logits, -1) @ VALUES, 10)
        for name, parts in (("dev", case.sets.train), ("test", case.test)):
            expected = np.mean(
                [stats.spearmanr(score[own], gold[own]).statistic for own in parts.numpy()]
            )
            assert record[f"Deb-R, T = {temperature}"][name][number] == pytest.approx(expected)
    for name in ("Deb-R", "Deb-T"):
        for temperature in ("1", "0.2"):
            row = row_named(comparison, name, temperature)
            assert record[f"{name}, T = {temperature}"]["chosen"] == row.answers.settings["lambda"]
    raw = row_named(comparison, "raw", "1").figures["spearman"].estimate
    assert record["Deb-T, T = 1"]["test"][0] == pytest.approx(raw)


def test_shares_are_mean_distributions_over_each_fold_s_test_items(comparison):
    found, case = shares_record(comparison), comparison.case
    assert list(found) == ["gold", "raw", "vanilla", "Deb-R", "Deb-T", "default head"]
    for share in found.values():
        assert sum(share) == pytest.approx(1)
    target = np.clip(1 - np.abs(case.table.gold.numpy()[:, None] - VALUES), 0, None)
    probs = special.softmax(case.table.logprobs.numpy() / 0.2, -1)
    for name, values in (("gold", target), ("vanilla", probs)):
        expected = np.mean([values[test].mean(0) for test in case.test.numpy()], 0)
        assert found[name] == pytest.approx(expected.tolist())


@pytest.mark.parametrize("folds", [Folds(inner=2), Folds(outer=2, inverted=True, inner=2)])
def test_thirds_by_label_mass_divide_the_test_items(folds):
    table = make_table(50, LEVELS, dev=21)
    table = replace(table, label_mass=table.label_mass[normal(50, seed=3).argsort()])
    case = Case.of("task", table, folds, 0)
    draws = fold_draws(case.test.double(), torch.ones(2, 50).double())
    made = Comparison(case, [row_of(case, methods(table)[0], draws)], draws)
    records = mass_record(made)
    assert [record["third"] for record in records] == ["low", "middle", "high"]
    tested = np.flatnonzero(case.test.any(0).numpy())
    mass, gold = table.label_mass.numpy(), table.gold.numpy()
    score = made.rows[0].answers.score.numpy()
    parts = np.array_split(tested[mass[tested].argsort()], 3)
    assert sorted(np.concatenate(parts).tolist()) == tested.tolist()
    for record, part in zip(records, parts, strict=True):
        assert (record["from"], record["to"]) == (mass[part].min(), mass[part].max())
        own = [np.intersect1d(part, np.flatnonzero(test)) for test in case.test.numpy()]
        spearman = [
            stats.spearmanr(score[fold, rows], gold[rows]).statistic
            for fold, rows in enumerate(own)
        ]
        mse = [np.square(score[fold, rows] - gold[rows]).mean() for fold, rows in enumerate(own)]
        assert record["methods"]["raw"]["spearman"] == pytest.approx(np.mean(spearman))
        assert record["methods"]["raw"]["mse"] == pytest.approx(np.mean(mse))


def test_items_of_unknown_label_mass_make_no_thirds(comparison):
    unknown = torch.full((ITEMS,), math.nan).double()
    case = replace(comparison.case, table=replace(comparison.case.table, label_mass=unknown))
    assert mass_record(comparison._replace(case=case)) == []


# What the random-number bias promises


def biased_table(items, dev, *, planted, shown, seed):
    """A judge of varying sharpness that would be right but for a bias, and its random numbers.

    Where an item leaves it unsure the bias decides, so that scores depend on sharpness.
    """
    values = torch.arange(5).double()
    table = make_table(items, 5, dev=dev, seed=seed)
    gold = 4 * torch.rand(items, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    seen = gold + 0.4 * normal(items, seed=seed + 1)
    sharp = (1.2 * normal(items, seed=seed + 2)).exp()
    logits = -0.5 * sharp[:, None] * (seen[:, None] - values).square() + planted
    answers = (shown + 0.1 * normal(12, 5, seed=seed + 3)).log_softmax(-1)
    evidence = {kind: Evidence(answers, None) for kind in ("random", "random_task")}
    return replace(table, gold=gold, logprobs=logits.log_softmax(-1), evidence=evidence)


BIAS = torch.tensor([2.5, 0.5, 0.0, 1.0, -1.0]).double()
LOW = torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0]).double()


@pytest.mark.parametrize(("shown", "low", "high"), [(BIAS, -1, -0.9), (-BIAS, 0.9, 1)])
def test_a_bias_that_random_numbers_show_runs_against_the_judge_s_excess(shown, low, high):
    table = biased_table(2000, 1000, planted=BIAS, shown=shown, seed=0)
    record = excess_record(Case.of("task", table, Folds(), 0))
    assert low <= record["Deb-R"]["correlation"] <= high
    assert low <= record["Deb-T"]["correlation"] <= high


def test_the_excess_is_of_dev_items_and_of_labels_that_gold_takes(table):
    case = Case.of("task", table, Folds(inner=2), 0)
    record, own = excess_record(case), case.sets.train[0].numpy()
    probs = special.softmax(table.logprobs.numpy()[own], -1).mean(0)
    share = np.clip(1 - np.abs(table.gold.numpy()[own, None] - VALUES), 0, None).mean(0)
    excess = np.log(probs) - np.log(share)
    assert record["excess"] == pytest.approx(excess.tolist())
    for name in ("Deb-R", "Deb-T"):
        expected = np.corrcoef(record[name]["term"], excess)[0, 1]
        assert record[name]["correlation"] == pytest.approx(expected)
    # A label that gold never takes is left out of the correlation.
    never = replace(table, gold=table.gold.clamp(max=LEVELS - 2))
    found = excess_record(Case.of("task", never, Folds(inner=2), 0))
    expected = np.corrcoef(found["Deb-T"]["term"][:-1], found["excess"][:-1])[0, 1]
    assert found["Deb-T"]["correlation"] == pytest.approx(expected)


# Reliable gains, where there is none and where there is one

SOME = ("raw", "vanilla", "batch", "Deb-R", "Deb-T", "default head", "isotonic")


def gain_rates(tables, *, resamples):
    """How often a method's Spearman gain over raw and over vanilla is called reliable.

    And how often its p alone is below 5 % with the gain above 0. With few resamples p can't fall
    so low that q would be below 5 % for one method alone.
    """
    reliable, nominal, draws = Counter(), Counter(), 0
    for draws, table in enumerate(tables, 1):
        case = Case.of("task", table, Folds(inner=3), draws)
        drawn = bootstrap_weights(
            numbered_groups(table),
            resamples=resamples,
            generator=torch.Generator().manual_seed(draws),
        )
        draws_here = fold_draws(case.test.double(), drawn)
        chosen = [method for method in methods(table) if method.name in SOME]
        rows = [row_of(case, method, draws_here, ("spearman",)) for method in chosen]
        for reference in rows:
            if reference.method.name not in ("raw", "vanilla"):
                continue
            found = differences(rows, "spearman", reference, case.groups)
            for row, difference in zip(rows, found, strict=True):
                name = (row.method.name, row.method.temperature, reference.method.name)
                reliable[name] += difference.better("spearman")
                if difference.interval.estimate > 0:
                    samples = row.samples["spearman"] - reference.samples["spearman"]
                    nominal[name] += difference_p(samples, case.groups) < 0.05
    return [{name: rate[name] / draws for name in reliable} for rate in (reliable, nominal)]


def random_gold(draws):
    """Gold that has nothing to do with the judge's answers."""
    for seed in range(draws):
        table = make_table(140, 5, dev=60, seed=1000 + 10 * seed)
        gold = torch.randint(5, (140,), generator=torch.Generator().manual_seed(seed)).double()
        yield replace(table, gold=gold)


def planted_gain(draws):
    for seed in range(draws):
        yield biased_table(210, 60, planted=LOW, shown=LOW, seed=1000 + 10 * seed)


def test_random_gold_seldom_shows_a_gain():
    reliable, nominal = gain_rates(random_gold(20), resamples=200)
    # 0.05 and 0.025, each with three standard errors of 20 draws
    assert max(reliable.values()) <= 0.2
    assert max(nominal.values()) <= 0.15


def test_a_planted_gain_is_mostly_found():
    reliable, _ = gain_rates(planted_gain(10), resamples=200)
    assert reliable["Deb-T", "0.2", "raw"] >= 0.8
    assert reliable["Deb-T", "0.2", "vanilla"] >= 0.8


def printed(reliable, nominal, draws):
    for name, rate in reliable.items():
        shown = [f"{r:.4f} ± {math.sqrt(r * (1 - r) / draws):.4f}" for r in (rate, nominal[name])]
        print(*name, "reliable", shown[0], "p < 5 %", shown[1], sep=" | ")


@pytest.mark.slow
def test_random_gold_shows_a_reliable_gain_in_at_most_5_percent_of_draws():
    reliable, nominal = gain_rates(random_gold(300), resamples=1000)
    printed(reliable, nominal, 300)
    assert max(reliable.values()) <= 0.05
    assert max(nominal.values()) <= 0.05  # 0.025 nominally, and two standard errors


@pytest.mark.slow
def test_a_planted_gain_is_found_in_at_least_80_percent_of_draws():
    reliable, nominal = gain_rates(planted_gain(60), resamples=1000)
    printed(reliable, nominal, 60)
    assert reliable["Deb-T", "0.2", "raw"] >= 0.8
    assert reliable["Deb-T", "0.2", "vanilla"] >= 0.8


def test_raw_has_the_same_interval_in_a_comparison_as_in_a_fit():
    table = make_table(80, groups=[f"g{item // 2}" for item in range(80)])
    fitted = fit(table, folds=Folds(inner=2)).fitted
    of_fit = evaluate(fitted, table, torch.zeros_like(table.logprobs), seed=3, resamples=200)
    case = Case.of("task", table, Folds(inner=2), 0)
    rows = compare(case, seed=3, resamples=200).rows
    [raw] = [row for row in rows if row.method.name == "raw"]
    for metric in ("spearman", "mse", "sdd"):
        assert raw.figures[metric] == pytest.approx(of_fit.methods["raw"][metric])
