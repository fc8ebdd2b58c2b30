"""What a finished store holds, and how damage to it is noticed."""

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from scorecal.judging.elicit import Interrupted
from scorecal.judging.judge import Unsupported
from scorecal.judging.store import Store
from scorecal.judging.table import load_table
from scorecal.judging.transformers import TransformersJudge


def test_a_store_holds_every_prompt_with_its_answer(job, tiny, watched, finished):
    judge, store = watched(), finished
    _, _, items, questions = job.parts()
    rows = store.judgements().to_pylist()
    assert [(row["kind"], row["key"]) for row in rows] == [(q.kind, q.key) for q in questions]
    kinds = [row["kind"] for row in rows]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "item": 14, "random": 8, "random_task": 8, "content_free": 3,
    }  # fmt: skip
    prompts = [question.prompt for question in questions]
    lengths = [len(row.input_ids) for row in judge.encode(prompts)]
    assert [row["tokens"] for row in rows] == lengths
    for answer in TransformersJudge(tiny("llama"), dtype="float32").judge(prompts):
        row = rows[answer.index]
        assert row["logprobs"] == pytest.approx(answer.logprobs.tolist(), abs=2e-5)
        assert row["label_mass"] == pytest.approx(answer.label_mass, abs=1e-5)
        assert row["logsumexp"] == pytest.approx(answer.logsumexp, abs=1e-4)
        assert row["censored"] == [False] * 6
    alone = [q.prompt.before for q in questions if q.kind == "random"]
    expected = judge.perplexity(alone).tolist()
    for kind in ("random", "random_task"):  # both keep the same prompts
        values = [row["perplexity"] for row in rows if row["kind"] == kind]
        assert values == pytest.approx(expected, rel=1e-4)
    assert {row["perplexity"] for row in rows if row["kind"] in ("item", "content_free")} == {None}
    assert store.items().to_pylist() == [
        {name: getattr(item, name) for name in ("id", "group", "split", "gold", "leak")}
        for item in items
    ]
    manifest = store.manifest()
    assert manifest["identity"].items() >= judge.identity().items()
    assert manifest["scales"]["0-5"]["labels"] == list("012345")
    assert manifest["scales"]["0-5"]["values"] == [0, 1, 2, 3, 4, 5]
    assert manifest["engine"] == judge.engine()
    assert manifest["out_of_memory"] == {}


def test_a_store_holds_no_text(job, finished):
    assert not any(b"old boat" in content for content in job.contents().values())
    for name in ("items.parquet", "judgements.parquet"):
        assert "old boat" not in json.dumps(pq.read_table(finished.folder / name).to_pylist())


def test_a_store_is_read_back_as_a_table(job, watched, make_job, finished):
    job.rows[0]["score"] = None
    store = job.run(watched(patience=0))
    table = load_table(str(store.folder), job.task)
    assert table.ids == [row["id"] for row in job.rows]
    assert table.splits == ["dev"] * 9 + ["test"] * 5
    assert table.gold.isnan().tolist() == [True] + [False] * 13
    rows = [row for row in store.judgements().to_pylist() if row["kind"] == "item"]
    torch.testing.assert_close(
        table.logprobs, torch.tensor([row["logprobs"] for row in rows], dtype=torch.float64)
    )
    assert table.identity == store.manifest()["identity"]
    assert {kind: len(answers.logprobs) for kind, answers in table.evidence.items()} == {
        "random": 8, "random_task": 8, "content_free": 3,
    }  # fmt: skip
    assert table.evidence["random_task"].perplexity is not None
    assert table.evidence["content_free"].perplexity is None
    with pytest.raises(ValueError, match="has the scales 0-5, not '1-5'"):
        load_table(str(store.folder), make_job(store.folder.parent, scale="1-5").task)


def test_out_of_memory_is_recorded_in_the_manifest(job, watched, unbroken, monkeypatch):
    whole = TransformersJudge._label_logprobs

    def small(self, work, cuts):
        if len(work) > 4:
            raise torch.OutOfMemoryError
        return whole(self, work, cuts)

    monkeypatch.setattr(TransformersJudge, "_label_logprobs", small)
    judge = watched()
    store = job.run(judge)
    recorded = store.manifest()["out_of_memory"]
    assert recorded
    assert [size for sizes in recorded.values() for size in sizes] == judge.halved
    assert min(judge.halved) > 4
    expected = json.loads(unbroken.files["manifest.json"])
    assert store.manifest()["digest"] == expected["digest"]


def test_a_judge_without_prompt_logprobs_says_that_all_prompts_count(
    job, watched, capsys, monkeypatch
):
    def unsupported(self, prompts):
        raise Unsupported("This server gives no prompt log-probabilities.")

    monkeypatch.setattr(TransformersJudge, "perplexity", unsupported)
    store = job.run(watched())
    assert "no prompt log-probabilities. All random-number prompts count" in capsys.readouterr().err
    assert set(store.judgements().column("perplexity").to_pylist()) == {None}
    assert load_table(str(store.folder), job.task).evidence["random"].perplexity is None


def test_a_plan_knows_the_same_job_again(job, watched):
    first, again = (job.plan(watched()) for _ in range(2))
    assert first.summary() == again.summary()
    order = [index for chunk in first.chunks for index in chunk.prompts]
    assert sorted(order) == list(range(33))
    rows = [first.encoded[index].input_ids for index in order]
    assert rows == sorted(rows)  # neighbours have long beginnings in common
    other = job.plan(watched(batch_tokens=900))
    assert other.digest == first.digest
    assert other.chunks != first.chunks


def test_a_plans_digest_is_that_of_stores_made_before(job, watched):
    plan = job.plan(watched())
    lines = [[question.kind, question.key, list(row.input_ids)]
             for question, row in zip(plan.questions, plan.encoded, strict=True)]  # fmt: skip
    content = json.dumps([plan.identity, lines]).encode()
    assert plan.digest == hashlib.sha256(content).hexdigest()


def test_an_unfinished_store_goes_on_in_the_batches_it_was_begun_in(job, watched, unbroken):
    with pytest.raises(Interrupted):
        job.run(watched(patience=2))
    job.run(watched(batch_tokens=900))
    for name, content in unbroken.files.items():
        assert (job.store / name).read_bytes() == content


def test_an_unfinished_store_says_so_when_it_is_read(job, watched):
    with pytest.raises(Interrupted):
        job.run(watched(patience=1))
    with pytest.raises(ValueError, match="is unfinished; run `elicit` again to go on"):
        Store(job.store).manifest()


# Damage


def truncate(file):
    file.write_bytes(file.read_bytes()[:-20])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def edit_a_row(file):
    table = pq.read_table(file)
    rows = table.to_pylist()
    rows[0]["gold" if "gold" in rows[0] else "label_mass"] = 0.125
    pq.write_table(pa.Table.from_pylist(rows, table.schema), file)


@pytest.mark.parametrize("name", ["items.parquet", "judgements.parquet"])
@pytest.mark.parametrize(
    "damage", [truncate, flip_a_bit, edit_a_row, lambda file: file.unlink()],
    ids=["truncated", "flipped bit", "edited", "gone"],
)  # fmt: skip
def test_a_damaged_file_of_a_store_is_named(damage, name, job, finished):
    damage(finished.folder / name)
    with pytest.raises(ValueError, match=rf"{name}' was truncated or edited.*elicit it again"):
        load_table(str(finished.folder), job.task)


def test_a_store_with_damaged_judgements_is_not_silently_taken_or_judged_again(
    job, watched, finished
):
    truncate(finished.folder / "judgements.parquet")
    with pytest.raises(ValueError, match="judgements.parquet' was truncated or edited"):
        job.run(watched(patience=0))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "manifest.json' is damaged"),
        ("[]", "manifest.json' is damaged"),
        ("{}", "manifest.json' is damaged"),
        ('{"format": 99, "files": {}}', "has format 99, this version reads 1"),
    ],
)
def test_a_damaged_manifest_is_refused(content, message, job, finished):
    (finished.folder / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_table(str(finished.folder), job.task)


def test_a_folder_that_is_no_store_says_so(tmp_path):
    with pytest.raises(ValueError, match="is no store"):
        Store(tmp_path).manifest()
