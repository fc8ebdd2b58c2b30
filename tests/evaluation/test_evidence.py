from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import special, stats
from sklearn import metrics as sklearn_metrics
from synthetic import fit, make_assistant, make_table

from scorecal.calibration.folds import Folds
from scorecal.calibration.head import HeadSettings
from scorecal.evaluation import evidence
from scorecal.evaluation.evidence import (
    METRICS,
    Evaluation,
    evaluate,
    held_out_intervals,
    numbered_groups,
    score_shares,
    verdict,
)
from scorecal.evaluation.intervals import Interval, interval
from scorecal.functional.resampling import bootstrap_weights

RAW = HeadSettings(learn=[], prior="none", strength=0.0)
approx = partial(pytest.approx, abs=1e-10)


@pytest.fixture(scope="module")
def table():
    return make_table(70, dev=30)


def run(table, head=None, *, resamples=200, seed=0, **options):
    module = fit(table, head, **options)
    assistant = module.trainer.datamodule.assistant_logprobs
    return evaluate(module.fitted, table, assistant, seed=seed, resamples=resamples)


def references(score, logits, gold):
    """Every metric by somebody else's code or a plain formula."""
    found = {
        "spearman": stats.spearmanr(score, gold).statistic,
        "pearson": stats.pearsonr(score, gold).statistic,
        "kendall": stats.kendalltau(score, gold).statistic,
        "mse": sklearn_metrics.mean_squared_error(gold, score),
        "mae": sklearn_metrics.mean_absolute_error(gold, score),
        "bias": np.mean(score - gold),
        "qwk": sklearn_metrics.cohen_kappa_score(
            [min(range(5), key=lambda k: (abs(k - s), k)) for s in score],
            [min(range(5), key=lambda k: (abs(k - g), k)) for g in gold],
            labels=range(5),
            weights="quadratic",
        ),
    }
    if logits is not None:
        probs, target = special.softmax(logits, -1), np.zeros((len(gold), 5))
        for row, value in enumerate(gold):
            target[row] = np.clip(1 - np.abs(value - np.arange(5)), 0, None)
        found["sdd"] = np.mean(stats.entropy(target, probs, axis=-1))
        cumulated = (probs - target).cumsum(-1)[:, :-1]
        found["rps"] = np.mean(cumulated**2)
    return found


def ridge_scores(coefficients, logprobs):
    return coefficients[0] + special.log_softmax(logprobs, -1) @ coefficients[1:]


@pytest.mark.parametrize(
    "folds", [Folds(), Folds(outer=4), Folds(outer=4, inverted=True)],
    ids=["own split", "folds", "inverted"],
)  # fmt: skip
def test_estimates_are_means_over_folds_of_scipys_and_scikit_learns_on_held_out_rows(folds, table):
    assistant = make_assistant(table)
    module = fit(table, HeadSettings(contrast=0.2), folds=folds, assistant=assistant)
    fitted = module.fitted
    evaluation = evaluate(fitted, table, assistant, seed=0, resamples=20)
    held_out = fitted.held_out.numpy()
    expected = {name: [] for name in ("raw", "calibrated", "constant", "reference")}
    for index in fitted.evaluated:
        rows = held_out[index]
        gold, raw = table.gold.numpy()[rows], table.logprobs.numpy()[rows]
        logits = fitted.logits(table.logprobs, assistant)[index].numpy()[rows]
        expect = [special.softmax(z, -1) @ np.arange(5.0) for z in (raw, logits)]
        expected["raw"].append(references(expect[0], raw, gold))
        expected["calibrated"].append(references(expect[1], logits, gold))
        ridge = ridge_scores(fitted.reference[index].numpy(), raw)
        expected["reference"].append(references(ridge, None, gold))
        mean = table.gold.numpy()[fitted.train[index].numpy()].mean()
        expected["constant"].append({"mse": np.mean((gold - mean) ** 2),
                                     "mae": np.mean(np.abs(gold - mean)),
                                     "bias": np.mean(mean - gold)})  # fmt: skip
    for method, figures in expected.items():
        for metric in figures[0]:
            mean = np.mean([fold[metric] for fold in figures])
            assert evaluation.methods[method][metric][0] == approx(mean), (method, metric)
    for metric in METRICS:
        raw, calibrated, gain = (
            evaluation.methods[m][metric] for m in ("raw", "calibrated", "gain")
        )
        assert gain[0] == approx(calibrated[0] - raw[0])
    assert evaluation.items == (70 if folds.outer else 40)


def test_the_gain_is_paired_a_head_that_changes_nothing_has_none_and_no_doubt(table):
    methods = run(table, RAW).methods
    for metric in METRICS:
        assert methods["raw"][metric] == approx(methods["calibrated"][metric], nan_ok=True)
        if metric != "kendall":
            assert methods["gain"][metric] == approx((0, 0, 0))
            point, low, high = methods["raw"][metric]
            assert low < point < high


def test_kendall_is_a_point_estimate_in_json_too(table):
    figure = run(table).figures()["calibrated"]["kendall"]
    assert figure["estimate"] is not None
    assert figure["low"] is figure["high"] is None


def test_whole_groups_are_drawn_so_two_groups_have_three_outcomes(table):
    groups = [f"g{i}" for i in range(30)] + ["even" if i % 2 else "odd" for i in range(40)]
    methods = run(replace(table, groups=groups), RAW, resamples=400).methods
    score = table.logprobs.softmax(-1) @ table.values
    errors = (score - table.gold).square()[30:].numpy()
    # a quarter of the draws holds one group twice, a quarter the other, half hold both
    outcomes = errors[::2].mean(), errors[1::2].mean()
    assert methods["raw"]["mse"] == approx((errors.mean(), min(outcomes), max(outcomes)))


def test_folds_share_their_draws_so_equal_heads_gain_nothing_in_any_of_them(table):
    methods = run(table, RAW, folds=Folds(outer=4)).methods
    assert methods["gain"]["mse"] == approx((0, 0, 0))
    assert methods["gain"]["spearman"] == approx((0, 0, 0))


def test_intervals_come_from_the_seed_and_blocks_of_resamples_do_not_matter(table, monkeypatch):
    first, again, other = (run(table, seed=seed).figures() for seed in (0, 0, 1))
    assert first == again
    assert first != other
    monkeypatch.setattr(evidence, "_BLOCK", 1000)
    small = run(table).figures()["gain"]["mse"]
    assert small == approx(first["gain"]["mse"])


def test_an_interval_agrees_with_scipys_bootstrap(table):
    point, low, high = run(table, RAW, resamples=2000).methods["raw"]["mse"]
    errors = ((table.logprobs.softmax(-1) @ table.values) - table.gold).square()[30:].numpy()
    other = stats.bootstrap((errors,), np.mean, n_resamples=4000, method="percentile",
                            rng=np.random.default_rng(0)).confidence_interval  # fmt: skip
    assert (low, high) == pytest.approx(tuple(other), abs=0.1 * (other.high - other.low))


@pytest.mark.parametrize("folds", [Folds(), Folds(outer=4)], ids=["own split", "folds"])
def test_scores_are_kept_row_by_row_with_their_problem(folds, table):
    module = fit(table, folds=folds)
    assistant = torch.zeros_like(table.logprobs)
    evaluation = evaluate(module.fitted, table, assistant, seed=0, resamples=2)
    rows = evaluation.scores
    assert sorted(row["id"] for row in rows) == sorted(table.ids[0 if folds.outer else 30 :])
    logits = module.fitted.logits(table.logprobs, assistant)
    for row in rows:
        item, problem = table.ids.index(row["id"]), module.fitted.names.index(row["problem"])
        assert row["gold"] == table.gold[item]
        assert row["raw"] == approx((table.logprobs[item].softmax(-1) @ table.values).item())
        calibrated = (logits[problem, item].softmax(-1) @ table.values).item()
        assert row["calibrated"] == approx(calibrated)
        assert module.fitted.held_out[problem, item]


def test_there_must_be_rows_to_test_on(table):
    alone = replace(table, splits=["dev"] * 70)
    with pytest.raises(ValueError, match=r"no held-out rows.*--evaluate_test false"):
        run(alone)


# Undefined figures


def test_correlations_of_a_constant_are_null_never_zero(table):
    flat = replace(table, logprobs=table.logprobs[:1].expand(70, -1).clone())
    evaluation = run(flat, HeadSettings(ridge_bias=0.3), resamples=50)
    figures = evaluation.figures()
    nothing = {"estimate": None, "low": None, "high": None}
    for method in ("raw", "calibrated", "gain", "constant"):
        for metric in ("spearman", "pearson", "kendall"):
            assert figures[method][metric] == nothing
        assert figures[method]["mse"]["estimate"] is not None
    assert not {"sdd", "rps"} & set(figures["constant"])
    assert verdict(evaluation)[0] == "Ranking: undefined, a prediction or gold is constant."


# What the intervals say


def told(**figures):
    """A verdict from (estimate, low, high) of `method__metric`."""
    default = Interval(0.0, -1.0, 1.0)
    names = ("raw", "calibrated", "gain", "constant", "gain_over_constant")
    methods = {name: {"spearman": default, "mse": default} for name in names}
    for name, triple in figures.items():
        method, metric = name.split("__")
        methods[method][metric] = Interval(*triple)
    return verdict(Evaluation(10, methods, []))


@pytest.mark.parametrize(
    ("triple", "says"),
    [
        ((0.1, 0.01, 0.2), "a reliable gain in Spearman, +0.100 [+0.010, +0.200]."),
        ((0.1, -0.01, 0.2), "no reliable gain in Spearman, +0.100 [-0.010, +0.200]."),
        ((-0.1, -0.2, -0.01), "a reliable loss in Spearman, -0.100 [-0.200, -0.010]."),
        ((0.0, 0.0, 0.0), "no reliable gain in Spearman, +0.000 [+0.000, +0.000]."),
    ],
)
def test_a_gain_in_ranking_is_reliable_when_its_interval_excludes_zero(triple, says):
    assert told(gain__spearman=triple)[0] == f"Ranking: {says}"


@pytest.mark.parametrize(
    ("triple", "says"),
    [
        ((-0.5, -0.9, -0.1), "a reliable gain"),
        ((-0.5, -0.9, 0.1), "no reliable gain"),
        ((0.5, 0.1, 0.9), "a reliable loss"),
    ],
)
@pytest.mark.parametrize("worse", [False, True])
def test_a_gain_in_error_is_over_the_better_of_raw_and_constant(triple, says, worse):
    other = (3.0, 2.0, 4.0)  # a reliable loss against the rival that doesn't count
    lines = told(
        raw__mse=(2.5, 2.0, 3.0) if worse else (1.0, 0.5, 1.5),
        constant__mse=(2.0, 1.5, 2.5),
        gain__mse=other if worse else triple,
        gain_over_constant__mse=triple if worse else other,
    )
    rival = "the constant predictor" if worse else "the raw judge"
    figures = "[{1:+.3f}, {2:+.3f}]".format(*triple)
    assert lines[1] == f"Error: {says} in MSE over {rival}, {triple[0]:+.3f} {figures}."
    told_so = (
        "The raw judge's MSE 2.500 is worse than that of always predicting the dev mean, 2.000."
    )
    assert (told_so in lines) == worse
    assert "fitted head held fixed" in lines[-1]


def test_a_judge_that_runs_against_gold_is_told_that_a_constant_does_better(table):
    flipped = replace(table, logprobs=table.logprobs.flip(-1))
    lines = verdict(run(flipped, RAW))
    assert any("worse than that of always predicting the dev mean" in line for line in lines)


def test_a_cured_preference_for_one_label_is_a_reliable_gain_in_ranking_and_error(table):
    # it drags the items that the judge is unsure of further down than the others
    sureness = (torch.arange(70) % 3).add(0.3).unsqueeze(-1)
    logprobs = -sureness * (table.gold.unsqueeze(-1) - table.values).square()
    logprobs[:, 0] += 3.0
    ranked, erred = verdict(run(replace(table, logprobs=logprobs.log_softmax(-1))))[:2]
    assert erred.startswith("Error: a reliable gain in MSE over")
    assert ranked.startswith("Ranking: a reliable gain in Spearman")


def test_one_test_group_gives_figures_but_no_interval():
    table = make_table(60, seed=7)
    table.groups = ["only" if split == "test" else key for split, key in zip(
        table.splits, table.ids, strict=True)]  # fmt: skip
    evaluation = run(table)
    point, low, high = evaluation.methods["gain"]["mse"]
    assert point == point
    assert low != low
    assert high != high
    assert verdict(evaluation) == [
        "One test group gives no interval: nothing can be said reliably."
    ]


@pytest.mark.parametrize("folds", [Folds(), Folds(outer=3)], ids=["own split", "folds"])
def test_held_out_intervals_surround_the_dev_metrics(folds, table):
    module = fit(table, folds=folds)
    batch = module.trainer.datamodule.batch(module.problems)
    found = held_out_intervals(*module.held_out_logits(batch), table, seed=0, resamples=200)
    logged = module.dev_metrics(batch)
    assert set(found) == {"spearman", "mse"}
    for metric, figure in found.items():
        assert figure.estimate == approx(logged[f"dev/{metric}"], abs=1e-6)
        assert figure.low < figure.estimate < figure.high


def test_held_out_intervals_are_those_of_drawn_groups_weighted_by_hand(table):
    table = replace(table, groups=[f"g{index // 2}" for index in range(70)])
    module = fit(table, folds=Folds(inner=3))
    logits, rows = module.held_out_logits(module.trainer.datamodule.batch(module.problems))
    found = held_out_intervals(logits, rows, table, seed=4, resamples=60)
    dev = rows.any(0)
    assert dev.tolist() == [split == "dev" for split in table.splits]
    groups, generator = numbered_groups(table.rows(dev)), torch.Generator().manual_seed(4)
    drawn = bootstrap_weights(groups, resamples=60, generator=generator)
    errors = (logits.softmax(-1) @ table.values - table.gold).square()[:, dev]
    weights = drawn[:, None] * rows[:, dev]
    samples = ((weights * errors).sum(-1) / weights.sum(-1)).mean(-1)
    point = (errors * rows[:, dev]).sum().item() / 30
    assert found["mse"] == approx(interval(point, samples, 15))


def test_folds_of_one_group_have_no_interval_rather_than_one_of_no_width(table):
    table = replace(table, groups=[f"g{index % 4 + 9 * (index > 29)}" for index in range(70)])
    module = fit(table)
    logits, rows = module.held_out_logits(module.trainer.datamodule.batch(module.problems))
    assert len(rows) == 4
    figure = held_out_intervals(logits, rows, table, seed=0, resamples=200)["mse"]
    assert figure.estimate > 0
    assert np.isnan([figure.low, figure.high]).all()


def test_shares_are_means_over_the_rows_of_each_problem_and_then_over_the_problems():
    target = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    probs = torch.tensor([[0.8, 0.2], [0.4, 0.6]], dtype=torch.float64)
    rows = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    shares = score_shares({"raw": probs.log().expand(2, 2, 2)}, target, rows)
    # gold: the mean of (0.75, 0.25) and (0.5, 0.5); raw: that of (0.6, 0.4) and (0.4, 0.6)
    assert shares["gold"] == approx([0.625, 0.375])
    assert shares["raw"] == approx([0.5, 0.5])
