"""Several scales in one store, each as if alone; labels of two tokenizers joined."""

import json

import pytest
import torch

from scorecal.judging.table import table_from_store
from scorecal.judging.transformers import TransformersJudge

SCALES = ["0-5", "2-7"]
ON_TWO = {"template": "sts_ranges.j2", "gold_range": (0.0, 5.0), "scale": SCALES}


@pytest.fixture
def two(make_job, tmp_path):
    return make_job(tmp_path, **ON_TWO)


def test_each_scale_is_judged_as_if_alone(two, make_job, watched, tmp_path):
    store = two.run(watched())
    assert list(store.manifest()["scales"]) == SCALES
    for scale in SCALES:
        job = make_job(tmp_path, **{**ON_TWO, "scale": scale})
        one = job.run(watched(), tmp_path / scale)
        mine, alone = (table_from_store(of, job.task) for of in (store, one))
        assert mine.ids == alone.ids
        assert mine.labels == alone.labels
        assert mine.identity == alone.identity
        torch.testing.assert_close(mine.logprobs, alone.logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(mine.logsumexp, alone.logsumexp, atol=1e-4, rtol=0)
        assert set(mine.evidence) == {"random", "random_task", "content_free"}
        for kind, answers in alone.evidence.items():
            torch.testing.assert_close(
                mine.evidence[kind].logprobs, answers.logprobs, atol=1e-5, rtol=0
            )
            if answers.perplexity is not None:
                torch.testing.assert_close(
                    mine.evidence[kind].perplexity, answers.perplexity, rtol=1e-5, atol=0
                )


def test_the_ranges_share_what_stands_before_them(two, watched):
    plan = two.plan(watched())
    items = [question for question in plan.questions if question.kind == "item"]
    assert len(items) == 2 * 14
    first, second = (q.prompt for q in items if q.key == items[0].key)
    assert (first.before, first.item) == (second.before, second.item)
    assert first.after == "\nScore from 0 to 5:"
    assert second.after == "\nScore from 2 to 7:"
    tokens = sum(len(row.input_ids) for row in plan.encoded)
    assert sum(chunk.tokens for chunk in plan.chunks) < 0.6 * tokens


def test_an_interrupted_store_of_two_scales_goes_on(two, watched, make_job, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        two.run(watched(patience=2))
    two.run(watched())
    resumed = two.contents()
    other = make_job(tmp_path / "other", **ON_TWO)
    other.data.parent.mkdir()
    other.run(watched())
    assert other.contents() == resumed


def test_a_store_lacks_a_scale_and_a_fit_needs_one(two, watched):
    store = two.run(watched())
    with pytest.raises(ValueError, match="one scale is needed here, the task has 0-5, 2-7"):
        table_from_store(store, two.task)
    with pytest.raises(ValueError, match="has the scales 0-5, 2-7, not '1-6'"):
        table_from_store(store, two.task.on("1-6"))


def test_a_label_of_two_tokens_for_one_model_only(tiny, make_job, tmp_path):
    """10 is one token for the assistant and two for the main judge: both sum to at most 1."""
    job = make_job(tmp_path, template="sts_ranges.j2", gold_range=(0.0, 9.0), scale="1-10")
    tables = []
    for name, family, options in (
        ("main", "qwen2", {}),
        ("assistant", "gpt2", {"digits": False, "tens": True}),
    ):
        judge = TransformersJudge(tiny(family, **options), dtype="float32")
        store = job.run(judge, tmp_path / name)
        ids = json.loads(store.manifest()["identity"]["labels"])
        assert len(ids["10"][0]) == (1 if options else 2)
        table = table_from_store(store, job.task)
        assert table.label_mass.max() <= 1 + 1e-6
        tables.append(table)
    main, assistant = tables
    joined = main.add_assistant(assistant)
    assert list(main.assistants.values())[0] is joined
    torch.testing.assert_close(joined, assistant.logprobs.log_softmax(-1))
