"""An assistant that is a judge of its own: two stores, answers in contrast, one head."""

import json
import shutil

import pytest
import torch

from scorecal.calibration.data import Assistant, ScoreData
from scorecal.calibration.dev_sets import DevSets
from scorecal.calibration.folds import Folds
from scorecal.calibration.methods import methods
from scorecal.judging.dry_run import dry_run
from scorecal.judging.store import Store
from scorecal.judging.table import table_from_store
from scorecal.judging.transformers import TransformersJudge


@pytest.fixture
def assisted(make_job, tiny, tmp_path, monkeypatch):
    """`assisted(mode="generate")` is the data of a main judge with a smaller one to subtract."""
    monkeypatch.chdir(tmp_path)

    def data(*, seed=1, assistant=None, **task):
        job = make_job(tmp_path, **task)
        job.parts()
        main = TransformersJudge(tiny("llama"), dtype="float32")
        other = TransformersJudge(tiny("llama", seed), dtype="float32")
        return ScoreData(
            job.task, judge=main, path=str(job.data), folds=Folds(inner=2),
            assistant=Assistant(judge=other, **(assistant or {})),
        )  # fmt: skip

    return data


def test_both_judge_the_same_items_into_stores_of_their_own(assisted):
    data = assisted()
    data.prepare_data()
    data.setup("fit")
    assert data.prepared is not None
    assert data.prepared_assistant is not None
    assert data.prepared.folder != data.prepared_assistant.folder
    table, other = data.read(), table_from_store(data.prepared_assistant, data.task)
    place = [other.ids.index(key) for key in table.ids]
    assert torch.equal(data.assistant_logprobs, other.logprobs[place].log_softmax(-1))
    assert not torch.allclose(data.assistant_logprobs, table.logprobs.log_softmax(-1))
    assert json.loads(table.identity["assistant"])["revision"] == other.identity["revision"]
    folder = data.prepared.folder
    again = assisted()
    again.prepare_data()  # finds both
    assert again.prepared.folder == folder


def test_what_an_assistant_lacks_shows_before_the_judge_has_judged(assisted, tmp_path):
    data = assisted()
    data.assistant.judge = TransformersJudge(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="nothing"):
        data.prepare_data()
    assert not list(tmp_path.glob("stores/*"))


def test_an_assistant_that_has_judged_everything_is_not_asked_whether_it_can(assisted, monkeypatch):
    first = assisted()
    first.prepare_data()
    shutil.rmtree(first.prepared.folder)

    def down():
        raise ValueError("the server is down")

    again = assisted()
    monkeypatch.setattr(again.assistant.judge, "engine", down)
    again.prepare_data()  # the main judge has everything to do
    assert again.prepared_assistant.folder == first.prepared_assistant.folder


def test_a_dry_run_counts_the_answers_in_contrast_too(assisted):
    data = assisted(mode="generate")
    asked, items, questions = data.questions()
    shown = dry_run(
        data.named_judge(), data.task, asked, questions, truncate=False,
        contrasted=data.assistant.contrasted(data.task),
    )  # fmt: skip
    assert shown["write"]["answers"] == 2 * len(items)


def test_answers_in_contrast_are_methods_beside_the_rest(assisted):
    data = assisted(mode="generate", assistant={"strength": 0.5, "temperature": 2.0})
    [store, _] = data.elicit()
    entry = Store(store.folder).manifest()["contrasted"]
    assert (entry["strength"], entry["temperature"], entry["plausibility"]) == (0.5, 2.0, 0.1)
    data.prepare_data()
    data.setup("fit")
    table = data.read()
    assert set(table.generated) == {"generated", "contrasted"}
    dev = torch.tensor([split == "dev" for split in table.splits])
    sets = DevSets(table, dev.unsqueeze(0), Folds(inner=2))
    named = {method.name: method for method in methods(table)}
    for name, kind in (("generated", "generated"), ("generated in contrast", "contrasted")):
        answers = named[name].answer(sets)
        assert answers.logits is None
        assert torch.equal(answers.score[0], table.generated[kind].scores)


def test_an_assistant_of_other_tokens_cannot_write_but_be_subtracted(assisted, tiny):
    data = assisted(mode="generate")
    data.assistant.judge = TransformersJudge(tiny("gpt2", digits=False, tens=True), dtype="float32")
    with pytest.raises(ValueError, match="have different tokens"):
        data.elicit()
    data.task.mode = "labels"
    data.prepare_data()
    data.setup("fit")
    assert data.assistant_logprobs is not None
    assert data.assistant_logprobs.exp().sum(-1).allclose(torch.ones(1, dtype=torch.float64))
