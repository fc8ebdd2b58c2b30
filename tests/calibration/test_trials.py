"""Trials of a study: scored on held-out dev rows, many at once as one by one."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import spearmanr
from synthetic import fit, make_table, normal

from scorecal.calibration.folds import Folds, Split, make_splits
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.trials import DevPart, Trial

TRIALS = [
    Trial(HeadSettings(learn=["bias"], strength=0.5, ridge_bias=0.1), "mse"),
    Trial(HeadSettings(learn=["bias"], strength=1.5, temperature=2.0, ridge_bias=3.0), "nll"),
    Trial(HeadSettings(learn=["bias"], strength=1.5, temperature=2.0, ridge_bias=3.0), "mse"),
    Trial(HeadSettings(learn=[], strength=0.3, temperature=0.2), "mse"),
    Trial(HeadSettings(learn=["bias", "mixing"], ridge_mixing=2.0), "rps"),
]


def part_of(table, folds=None, split=None, seed=0) -> DevPart:
    folds = folds or Folds()
    split = split or make_splits(table, folds, seed)[-1]
    return DevPart(table, torch.zeros_like(table.logprobs), split, folds, seed)


@pytest.mark.parametrize("trial", TRIALS[:3], ids=lambda trial: trial.loss)
def test_a_score_is_what_fit_logs_as_dev_metric(trial) -> None:
    table = make_table(120)
    module = fit(table, trial.head, loss=trial.loss, validate=True)
    scores = part_of(table).scores([trial], ["spearman", "mse", "nll"]).mean(-1)[0]
    for name, score in zip(("spearman", "mse", "nll"), scores.tolist(), strict=True):
        logged = module.trainer.callback_metrics[f"dev/{name}"].item()
        assert score == pytest.approx(logged, abs=1e-6), name


def test_many_trials_are_scored_as_each_alone() -> None:
    part = part_of(make_table(120))
    learning = [trial for trial in TRIALS if trial.head.learn]
    together = part.scores(learning, ["spearman", "mse"])
    alone = torch.cat([part.scores([trial], ["spearman", "mse"]) for trial in learning])
    torch.testing.assert_close(together, alone, atol=1e-9, rtol=0)
    one_fold = part.scores(learning, ["spearman", "mse"], 2)
    torch.testing.assert_close(one_fold, together[..., 2:3], atol=1e-9, rtol=0)


def test_a_head_that_learns_nothing_is_scored_on_all_of_dev() -> None:
    table = make_table(120)
    dev = torch.tensor([split == "dev" for split in table.splits])
    head = replace(TRIALS[3].head, prior="none", strength=0.0)
    [[[score]]] = part_of(table).scores([Trial(head, "mse")], ["spearman"]).tolist()
    expected = ((table.logprobs[dev] / 0.2).softmax(-1) @ table.values).round(decimals=10)
    assert score == pytest.approx(spearmanr(expected, table.gold[dev]).statistic)


def test_no_test_item_is_looked_at() -> None:
    table, poisoned = make_table(120), make_table(120)
    test = torch.tensor([split == "test" for split in table.splits])
    poisoned.gold[test] = normal(int(test.sum()), seed=9).abs().clamp(max=4)
    poisoned.logprobs[test] = normal(int(test.sum()), 5, seed=10).log_softmax(-1)
    learning = [trial for trial in TRIALS if trial.head.learn]
    clean, other = part_of(table), part_of(poisoned)
    assert torch.equal(clean.scores(learning, ["mse"]), other.scores(learning, ["mse"]))
    assert clean.digest() == other.digest()


def test_a_constant_score_is_the_worst_correlation() -> None:
    table = make_table(60)
    table.logprobs[:] = 0.0
    assert (part_of(table).scores(TRIALS[:1], ["spearman", "pearson"]) == -1).all()


def test_the_digest_tells_dev_rows_folds_and_seeds_apart() -> None:
    table = make_table(60)
    everything = torch.ones(60, dtype=torch.bool)
    digests = {
        part_of(table).digest(),
        part_of(table, Folds(inner=3)).digest(),
        part_of(table, seed=1).digest(),
        part_of(make_table(60, seed=7)).digest(),
        part_of(table, split=Split("deploy", everything, ~everything)).digest(),
    }
    assert len(digests) == 5
