import json

import pytest
import torch
from synthetic import make_table, score_data, train

from scorecal.calibration.data import Assistant, ScoreData
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.module import Calibration
from scorecal.judging.task import Task

TASK = Task("own", "sts.j2", {}, scale="0-4")


def write_rows(path, table, *, gold=True):
    """A user's own JSONL: one column a label."""
    lines = []
    for index, key in enumerate(table.ids):
        row = {"id": key, "split": table.splits[index], "group": table.groups[index]}
        row |= dict(zip(table.labels, table.logprobs[index].tolist(), strict=True))
        lines.append(json.dumps(row | ({"score": table.gold[index].item()} if gold else {})))
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def table():
    return make_table(20)


@pytest.fixture
def data(table, tmp_path):
    def build(**options):
        data = ScoreData(TASK, table=write_rows(tmp_path / "own.jsonl", table), **options)
        data.setup("fit")
        return data

    return build


def usable(table, **options):
    """What `setup` makes of a table that has been read."""
    data = score_data(table)
    for name, value in options.items():
        setattr(data, name, value)
    return data._usable(table)


def test_a_file_of_logprobs_is_fitted_without_any_judge(data, table):
    read = data()
    torch.testing.assert_close(read.read().logprobs, table.logprobs)
    assert torch.equal(read.read().gold, table.gold)
    assert not read.assistant_logprobs.any()
    module = train(Calibration(HeadSettings(prior="batch")), read)
    assert module.fitted.names == ["deploy"]
    assert module.fitted.train[0].tolist() == [True] * 10 + [False] * 10


def test_a_file_of_logprobs_has_no_number_bias_and_the_error_names_what_works(data):
    read = data()
    with pytest.raises(ValueError, match=r"no judgements of the kind 'random_task'.*prior batch"):
        train(Calibration(), read)


def test_neither_table_nor_judge_is_an_error():
    with pytest.raises(ValueError, match=r"neither a table nor a judge.*--data\.table"):
        ScoreData(TASK).setup("fit")


def test_items_without_gold_are_left_out_with_a_count_or_refused(table, capsys):
    table.gold[3] = table.gold[12] = torch.nan
    kept = usable(table)
    assert len(kept.ids) == 18
    assert not {"i3", "i12"} & set(kept.ids)
    assert "left out 2 items without a gold score" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"2 items of 'synthetic' have no gold score, 'i3' first"):
        usable(table, missing_gold="error")
    table.gold[:] = torch.nan
    with pytest.raises(ValueError, match="no item of 'synthetic' has a gold score"):
        usable(table)


def test_leaking_items_leave_dev_but_never_test(table, capsys):
    table.leak[[1, 2, 15]] = True
    kept = usable(table)
    assert set(table.ids) - set(kept.ids) == {"i1", "i2"}
    assert "left out 2 dev items that test holds too" in capsys.readouterr().err
    assert usable(table, drop_leaks=False).ids == table.ids


def test_censored_rows_are_kept_with_their_bound_or_refused(table):
    table.censored[4, 2] = True
    assert usable(table).ids == table.ids
    with pytest.raises(ValueError, match="item 'i4' of 'synthetic' lacks a label's"):
        usable(table, censored="refuse")


def test_an_assistants_rows_are_joined_by_id_and_normalised(data, tmp_path):
    other = make_table(30, seed=9)
    order = list(reversed(range(30)))
    shuffled = other.rows(torch.ones(30, dtype=torch.bool))
    shuffled.ids = [other.ids[i] for i in order]
    shuffled.logprobs = other.logprobs[order]
    path = write_rows(tmp_path / "assistant.jsonl", shuffled)
    joined = data(assistant=Assistant(path)).assistant_logprobs
    torch.testing.assert_close(joined, other.logprobs[:20].log_softmax(-1))


def test_an_assistant_that_lacks_items_is_named(data, tmp_path):
    path = write_rows(tmp_path / "assistant.jsonl", make_table(8, seed=9))
    with pytest.raises(ValueError, match=r"table 'assistant\.jsonl' lacks 12 of 20 items of "):
        data(assistant=Assistant(path))
