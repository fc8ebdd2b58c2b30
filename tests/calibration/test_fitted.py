import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from synthetic import fit, make_assistant, make_table, normal

from scorecal.calibration.fitted import Fitted, score_interval
from scorecal.calibration.folds import Folds
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.module import Calibration

close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
TABLE = make_table(40)
ALL = HeadSettings(
    learn=["strength", "temperature", "bias", "mixing", "contrast"],
    ridge_mixing=1.0,
    temperature_on="logits",
)


@pytest.fixture(scope="module")
def split() -> Calibration:
    return fit(TABLE, loss="nll")


@pytest.fixture(scope="module")
def folded() -> Calibration:
    folds = Folds(outer=4, inner=2)
    return fit(TABLE, ALL, folds=folds, loss="nll", assistant=make_assistant(TABLE))


@pytest.fixture(params=["split", "folded"])
def module(request) -> Calibration:
    return request.getfixturevalue(request.param)


# Checkpoints


def test_a_checkpoint_holds_all_heads_and_reads_back_as_written(module, tmp_path):
    path = tmp_path / "last.ckpt"
    module.trainer.save_checkpoint(path)
    kept = torch.load(path, weights_only=True)["scorecal"]
    assert {"format", "identity", "scale", "problems", "deploy"} <= set(kept)
    fitted, read = module.fitted, Fitted.from_checkpoint(str(path))
    for before, after in zip(fitted.heads, read.heads, strict=True):
        assert torch.equal(before, after)
    for name in ("names", "ids", "labels", "identity", "prior", "temperature_on", "deploy"):
        assert getattr(read, name) == getattr(fitted, name)
    for name in ("train", "held_out", "values", "constant", "reference"):
        assert torch.equal(getattr(read, name), getattr(fitted, name))
    assistant = make_assistant(TABLE)
    assert torch.equal(
        read.logits(TABLE.logprobs, assistant), fitted.logits(TABLE.logprobs, assistant)
    )


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint .*last\.ckpt.*--ckpt_path"):
        Fitted.from_checkpoint(str(tmp_path / "last.ckpt"))


@pytest.mark.parametrize("content", ["text", "foreign"])
def test_a_file_that_fit_did_not_write_is_no_checkpoint(content, tmp_path):
    path = tmp_path / "last.ckpt"
    if content == "text":
        path.write_text("hello", encoding="utf-8")
    else:
        torch.save({"state_dict": {}}, path)
    with pytest.raises(ValueError, match="is no checkpoint that `fit` wrote"):
        Fitted.from_checkpoint(str(path))


def test_a_checkpoint_of_another_format_asks_for_a_new_fit(split):
    with pytest.raises(ValueError, match=r"format 99, this version reads \d+\. Fit again"):
        Fitted.from_state({**split.fitted.state(), "format": 99})


def test_without_a_fit_there_is_no_head():
    with pytest.raises(ValueError, match="no head has been fitted"):
        Calibration().require_fitted()


# Rows to test on


def test_with_the_datas_own_split_the_test_rows_are_testing_rows(split):
    rows = split.fitted.test_rows(TABLE)
    assert rows.tolist() == [[0.0] * 20 + [1.0] * 20]
    new = make_table(6, dev=2)
    new.ids = [f"new {index}" for index in range(6)]
    assert split.fitted.test_rows(new).tolist() == [[0, 0, 1, 1, 1, 1]]


def test_a_test_row_that_the_head_was_fitted_on_is_refused(split):
    leaking = make_table(40, dev=19)
    with pytest.raises(ValueError, match=r"item 'i19' is a test item here, but .* was fitted on"):
        split.fitted.test_rows(leaking)


def test_each_fold_is_tested_on_its_own_held_out_rows_in_whatever_order_they_come(folded):
    fitted = folded.fitted
    assert fitted.evaluated == [0, 1, 2, 3]
    rows = fitted.test_rows(TABLE)
    assert rows.sum(0).tolist() == [1.0] * 40
    assert not (rows.bool() & fitted.train[:4]).any()
    turned = make_table(40)
    turned.ids = turned.ids[::-1]
    assert torch.equal(fitted.test_rows(turned), rows.flip(-1))
    keep = torch.arange(40) % 3 == 0
    assert torch.equal(fitted.test_rows(TABLE.rows(keep)), rows[:, keep])


def test_a_row_that_belongs_to_no_fold_is_refused(folded):
    strange = make_table(40)
    strange.ids[7] = "new"
    with pytest.raises(ValueError, match="item 'new' belongs to no fold of this checkpoint"):
        folded.fitted.test_rows(strange)


# A head on a page


def test_a_described_head_is_json_from_which_its_scores_can_be_worked_out(module):
    fitted, assistant = module.fitted, make_assistant(TABLE)
    for index in range(len(fitted.names)):
        page = json.loads(json.dumps(fitted.describe(index), allow_nan=False))
        assert page["name"] == fitted.names[index]
        assert page["labels"] == ["0", "1", "2", "3", "4"]
        assert page["values"] == [0, 1, 2, 3, 4]
        assert page["prior"] == "random_task"
        bias = np.array(page["bias"])
        assert bias == pytest.approx(page["lambda"] * np.array(page["prior_term"]) + page["delta"])
        normalised = TABLE.logprobs.log_softmax(-1).numpy()
        moved = bias
        if "mixing" in page:
            moved = moved + (normalised - page["centre"]) @ np.array(page["mixing"]).T
        if "contrast" in page:
            moved = moved - page["contrast"] * assistant.numpy()
        on_logits = page["temperature_on"] == "logits"
        divisor = page["temperature"]
        z = normalised / divisor + moved if on_logits else (normalised + moved) / divisor
        close(fitted.logits(TABLE.logprobs, assistant)[index], torch.from_numpy(z), atol=1e-9)


def test_terms_that_are_zero_are_left_out_of_the_page(split, folded):
    zero = {"mixing", "centre", "contrast"}
    assert not zero & set(split.fitted.describe(0))
    assert zero <= set(folded.fitted.describe(0))


# Censored labels


def brute_force(logits, censored, values):
    """Every censored label at its bound or at zero, but never all labels at zero."""
    gone = censored.nonzero().flatten().tolist()
    found = []
    for size in range(len(gone) + 1):
        for chosen in itertools.combinations(gone, size):
            weights = logits.exp()
            weights[list(chosen)] = 0
            if weights.sum() > 0:
                found.append((weights @ values / weights.sum()).item())
    return min(found), max(found)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("spacing", ["even", "uneven"])
def test_score_intervals_agree_with_every_subset_of_the_censored_labels(share, spacing):
    values = torch.arange(6.0).double()
    if spacing == "uneven":
        values = values.square() - 3
    logits = 2 * normal(20, 6, seed=0)
    generator = torch.Generator().manual_seed(1)
    censored = torch.rand(20, 6, generator=generator) < share
    low, high = score_interval(logits, censored, values)
    for item in range(20):
        expected = brute_force(logits[item], censored[item], values)
        assert (low[item].item(), high[item].item()) == pytest.approx(expected, abs=1e-12)
    if share == 0.0:
        close(low, high)
    assert all(map(math.isfinite, [*low.tolist(), *high.tolist()]))
