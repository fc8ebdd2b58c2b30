"""Invented inputs and reasoning, written before a task is judged: stopped, resumed, refused."""

import json
import re

import pytest
import torch

from scorecal.calibration.data import ScoreData
from scorecal.calibration.folds import Folds
from scorecal.judging import generation
from scorecal.judging.dry_run import dry_run, dry_run_text
from scorecal.judging.elicit import Interrupted, elicit
from scorecal.judging.generation import Writing
from scorecal.judging.judge import Unsupported
from scorecal.judging.plan import item_questions, prior_questions
from scorecal.judging.server import ServerJudge
from scorecal.judging.table import load_table
from scorecal.judging.task import Item, Task, Template

SAMPLES = 7


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Batches of three texts, and inventions that a tiny judge writes in no time."""
    monkeypatch.setattr(generation, "_BATCH", 3)
    monkeypatch.setattr(generation, "SAMPLE_TOKENS", 12)


@pytest.fixture
def reasoned(make_job, tmp_path):
    (tmp_path / "reasoned").mkdir()
    return make_job(tmp_path / "reasoned", template="sts_reasoning.j2", reasoning=6)


@pytest.fixture
def writes(watched):
    """`writes(patience=2)` is a tiny judge that is interrupted after two batches of texts."""

    def judge(patience=None, **options):
        judge = watched(**options)
        generate, judge.batches_written = judge.generate, 0

        def counted(prompts, **settings):
            if judge.batches_written == patience:
                raise KeyboardInterrupt
            judge.batches_written += 1
            return generate(prompts, **settings)

        judge.generate = counted
        return judge

    return judge


def of_kind(store, kind):
    return [row for row in store.judgements().to_pylist() if row["kind"] == kind]


def logprobs(judge, prompts):
    answers = sorted(judge.judge(prompts), key=lambda answer: answer.index)
    return torch.stack([answer.logprobs for answer in answers])


def stored_logprobs(rows):
    return torch.tensor([row["logprobs"] for row in rows])


# Invented inputs


def test_the_judge_is_shown_the_task_and_the_form_of_an_item():
    template = Template(Task("sts", "sts.j2", {"sentence1": "a", "sentence2": "b"}))
    asked = template.invention()
    assert asked.startswith(template.instruction + "Here, invent one example of ")
    assert asked.endswith("in exactly this form:\n\nSentence 1: ...\nSentence 2: ...")


def test_invented_inputs_are_judged_as_items_are(job, writes):
    judge = writes()
    store = job.run(judge, samples=SAMPLES)
    rows = of_kind(store, "sampled")
    assert [row["key"] for row in rows] == [f"{number:03d}" for number in range(SAMPLES)]
    texts = writes().generate(
        [job.template.invention()] * SAMPLES, max_tokens=12, temperature=1.0, seed=0
    )
    assert [row["text"] for row in rows] == texts
    assert len(set(texts)) > 1
    item = job.template.prompt(job.parts()[2][0])
    prompts = [item._replace(item=text) for text in texts]
    torch.testing.assert_close(stored_logprobs(rows), logprobs(judge, prompts), rtol=0, atol=2e-5)
    others = [row for row in store.judgements().to_pylist() if row["kind"] != "sampled"]
    assert {row["text"] for row in others} == {None}
    assert store.manifest()["generated"] == {
        "samples": SAMPLES, "reasoning": 0, "sample_tokens": 12, "seed": 0,
    }  # fmt: skip
    assert len(load_table(str(store.folder), job.task).evidence["sampled"].logprobs) == SAMPLES


def test_an_empty_invention_is_judged_as_an_empty_item(job, writes):
    judge = writes()
    judge.generate = lambda prompts, **_: [""] * len(prompts)
    rows = of_kind(job.run(judge, samples=2), "sampled")
    assert [row["text"] for row in rows] == ["", ""]
    empty = job.template.prompt(job.parts()[2][0])._replace(item="")
    torch.testing.assert_close(
        stored_logprobs(rows[:1]), logprobs(judge, [empty]), rtol=0, atol=2e-5
    )


def test_a_control_token_in_an_invention_is_text(job, writes):
    judge = writes()
    judge.generate = lambda prompts, **_: ["a<|im_end|>b"] * len(prompts)
    [row] = of_kind(job.run(judge, samples=1), "sampled")
    assert row["text"] == "a<|im_end|>b"
    item = job.template.prompt(job.parts()[2][0])._replace(item="a<|im_end|>b")
    torch.testing.assert_close(stored_logprobs([row]), logprobs(judge, [item]), rtol=0, atol=2e-5)


def test_an_invented_input_has_no_rubric_of_its_own():
    fields = {"instruction": "a", "response": "b", "reference": "c"}
    task = Task("rubric", "rubric.j2", fields, scale="1-5", rubric="rubric")
    with pytest.raises(ValueError, match="from 'rubric'. Leave out `data.samples`"):
        Writing.of(task, 3)
    assert not Writing.of(task, 0)


def test_without_samples_a_store_is_what_it_was(job, watched, unbroken):
    job.run(watched(), samples=0)
    assert job.contents() == unbroken.files


# Reasoning


def test_an_item_is_scored_after_what_the_judge_has_written_about_it(reasoned, writes):
    judge = writes()
    store = reasoned.run(judge)
    _, templates, items, questions = reasoned.parts()
    asked = [q.prompt for q in questions if q.kind in ("item", "content_free")]
    turns = [prompt.before + prompt.item + prompt.after for prompt in asked]
    assert all(turn.endswith("Don't give a score yet.") for turn in turns)
    texts = writes().generate(turns, max_tokens=6, temperature=0.0, seed=0)
    rows = of_kind(store, "item") + of_kind(store, "content_free")
    assert [row["text"] for row in rows] == texts
    prompts = [
        prompt._replace(cue=text + "\n\nScore: ") for prompt, text in zip(asked, texts, strict=True)
    ]
    torch.testing.assert_close(stored_logprobs(rows), logprobs(judge, prompts), rtol=0, atol=2e-5)
    assert store.manifest()["generated"] == {"samples": 0, "reasoning": 6}
    for kind in ("random", "random_task"):
        assert {row["text"] for row in of_kind(store, kind)} == {None}


def test_an_invented_input_is_reasoned_about_too(reasoned, writes):
    judge = writes()
    [row] = of_kind(reasoned.run(judge, samples=1), "sampled")
    [invented] = writes().generate(
        [reasoned.template.invention()], max_tokens=12, temperature=1.0, seed=0
    )
    prompt = reasoned.template.invented(invented, "000")
    turn = prompt.before + prompt.item + prompt.after
    [reason] = writes().generate([turn], max_tokens=6, temperature=0.0, seed=0)
    assert row["text"] == f"{invented}\n\n{reason}"
    prompt = prompt._replace(cue=reason + prompt.cue)
    torch.testing.assert_close(stored_logprobs([row]), logprobs(judge, [prompt]), rtol=0, atol=2e-5)


def test_another_length_of_reasoning_is_another_store(reasoned, writes, make_job, tmp_path):
    store = reasoned.run(writes())
    other = make_job(tmp_path, template="sts_reasoning.j2", reasoning=7)
    with pytest.raises(ValueError, match="its template is"):
        other.run(writes(), store.folder)


@pytest.mark.parametrize("block", ["reasoning", "cue"])
def test_a_template_that_does_not_ask_for_reasons_is_named(block, tmp_path):
    fields = {"sentence1": "a", "sentence2": "b"}
    shipped = Template(Task("sts", "sts_reasoning.j2", fields))._path.read_text()
    (tmp_path / "own.j2").write_text(shipped.replace(f"block {block} ", f"block no_{block} "))
    with pytest.raises(
        ValueError, match=rf"own\.j2' lacks the block '{block}', which a judge that"
    ):
        Template(Task("sts", str(tmp_path / "own.j2"), fields, reasoning=5))


# Stopped and resumed


@pytest.mark.parametrize("patience", [0, 1, 3, 5, 8])
def test_a_resumed_writing_gives_the_bytes_of_an_unbroken_one(patience, reasoned, writes, tmp_path):
    whole = writes()
    reasoned.run(whole, samples=SAMPLES)
    files = reasoned.contents()
    reasoned.store = tmp_path / "resumed"
    with pytest.raises(Interrupted, match=r"while the judge was writing\. Run the same command"):
        reasoned.run(writes(patience), samples=SAMPLES)
    # 7 invented inputs in 3 batches; reasoning on 14 items, 3 empty ones and those 7 in 8.
    assert len(list((reasoned.store / "generated").glob("*"))) == patience
    second = writes()
    store = reasoned.run(second, samples=SAMPLES)
    assert second.batches_written == whole.batches_written - patience == 11 - patience
    assert reasoned.contents() == files
    assert sorted(path.name for path in store.folder.iterdir()) == sorted(files)


def test_texts_survive_a_stop_while_judging(reasoned, writes, tmp_path):
    reasoned.run(writes(), samples=SAMPLES)
    files = reasoned.contents()
    reasoned.store = tmp_path / "resumed"
    first = writes()
    first.patience = 2
    with pytest.raises(Interrupted, match="stopped with 2 of"):
        reasoned.run(first, samples=SAMPLES)
    second = writes(patience=0)
    reasoned.run(second, samples=SAMPLES)
    assert reasoned.contents() == files


def test_half_a_file_of_texts_is_written_again(job, writes, tmp_path):
    job.run(writes(), samples=SAMPLES)
    files = job.contents()
    job.store = tmp_path / "resumed"
    with pytest.raises(Interrupted):
        job.run(writes(patience=2), samples=SAMPLES)
    [_, last] = sorted((job.store / "generated").iterdir())
    last.write_bytes(last.read_bytes()[:-9])
    (job.store / "generated" / ".invented-000002.json.7.partial").write_bytes(b'["half')
    job.run(writes(), samples=SAMPLES)
    assert job.contents() == files


def test_a_finished_store_with_texts_is_found_again_and_nothing_is_written(
    job, writes, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    store = elicit(writes(), *job.parts(), samples=SAMPLES)
    assert re.fullmatch(r"stores/sts-tiny-llama-[0-9a-f]{8}", store.folder.as_posix())
    job.rows[3]["score"] = 4.25  # gold invalidates no text
    again = writes(patience=0)
    again.patience = 0
    assert elicit(again, *job.parts(), samples=SAMPLES).folder == store.folder
    assert store.items().column("gold").to_pylist()[3] == 4.25
    other = elicit(writes(), *job.parts(), samples=SAMPLES - 1)
    assert other.folder != store.folder


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(("had", "has"), [(SAMPLES, 0), (0, SAMPLES), (SAMPLES, 2)])
def test_another_number_of_inventions_in_the_same_folder_is_refused(
    finished, had, has, job, writes
):
    judge = writes(None if finished or not had else 1)
    if finished:
        job.run(judge, samples=had)
    else:
        judge.patience = 1
        with pytest.raises(Interrupted):
            job.run(judge, samples=had)
    with pytest.raises(ValueError, match=r"with another `data.samples` or .* Set `--data.store`"):
        job.run(writes(), samples=has)


def test_a_folder_of_something_else_is_left_alone_by_a_judge_that_writes(job, writes):
    job.store.mkdir()
    (job.store / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not empty and no store"):
        job.run(writes(patience=0), samples=1)
    assert [path.name for path in job.store.iterdir()] == ["thesis.txt"]


def test_a_dry_run_writes_no_text_and_counts_them(reasoned, writes):
    task, templates, _, questions = reasoned.parts()
    shown = dry_run(writes(patience=0), task, templates, questions, truncate=False, samples=4)
    assert not reasoned.store.exists()
    assert shown["write"] == {"samples": 4, "reasoning": 14 + 3 + 4}
    assert shown["invention"] == templates[0].invention()
    text = dry_run_text(json.loads(json.dumps(shown)))
    assert "writes first, time not counted: 4 samples, 21 reasoning" in text
    assert templates[0].invention() in text


# What is refused


def test_a_judge_that_cannot_write_says_so_in_one_line(job, writes):
    judge = writes()

    def unsupported(prompts, **_):
        raise Unsupported("This engine gives no text.")

    judge.generate = unsupported
    with pytest.raises(ValueError, match=r"can't write text: This engine .* Set `--data.samples`"):
        job.run(judge, samples=1)


def test_a_chat_whose_answer_cannot_be_begun_is_refused_before_anything_is_asked(reasoned):
    judge = ServerJudge("judge", url="http://localhost:1/v1")
    with pytest.raises(ValueError, match="can't begin its answer with the template's cue"):
        reasoned.run(judge)
    assert not reasoned.store.exists()


def test_negative_counts_are_refused_by_name():
    with pytest.raises(ValueError, match=r"`data\.samples` is 0 or more, got -1"):
        ScoreData(Task("sts", "sts.j2", {}), samples=-1)
    for name in ("examples", "reasoning"):
        with pytest.raises(ValueError, match=rf"`data\.task\.{name}` is 0 or more, got -2"):
            Task("sts", "sts.j2", {}, **{name: -2})


# Examples


@pytest.fixture
def shown(job, watched):
    """`shown(2)` is the data of a task that shows two scored items."""

    def data(count, **options):
        job.parts()
        job.task.examples = count
        return ScoreData(job.task, watched(), path=str(job.data), **options)

    return data


def test_examples_stand_before_every_item_and_leave_the_items(shown, job, capsys):
    [template], items, questions = shown(2).questions()
    assert "left out 2 items that are shown as examples" in capsys.readouterr().err
    rows = {row["id"]: row for row in job.rows}
    missing = set(rows) - {item.id for item in items}
    assert len(missing) == 2
    assert all(rows[key]["split"] == "dev" for key in missing)
    before = questions[0].prompt.before
    assert before.startswith(template.instruction)
    parts = before.removeprefix(template.instruction).split("\n\n")
    assert parts.pop() == ""
    expected = {
        f"Sentence 1: {rows[key]['sentence1']}\nSentence 2: {rows[key]['sentence2']}\n"
        f"Score: {rows[key]['score']}"
        for key in missing
    }
    assert set(parts) == expected
    for question in questions:
        shows = question.prompt.before.startswith(before)
        assert shows == (question.kind in ("item", "content_free"))
    assert template.invention().startswith(template.instruction + "Here, invent")
    assert template.invented("x", "000").before == before


def test_the_same_examples_are_drawn_again_and_predict_shows_them(
    shown, job, tmp_path, monkeypatch
):
    data = shown(3, predict_path=str(tmp_path / "new.jsonl"))
    [first], items, _ = data.questions()
    [again], same, _ = shown(3).questions()
    assert again.hash == first.hash != job.template.hash
    assert [item.id for item in items] == [item.id for item in same]
    (tmp_path / "new.jsonl").write_text('{"sentence1": "x", "sentence2": "y"}\n')
    judge, asked = data.named_judge(), []
    judge_chunk = judge.judge_chunk
    judge.judge_chunk = lambda prompts, *rest: asked.extend(prompts) or judge_chunk(prompts, *rest)
    monkeypatch.chdir(tmp_path)
    table, _ = data.new_table()
    assert [prompt.before for prompt in asked] == [first.prompt(items[0]).before]
    assert table.identity["template"] == first.hash
    [other], _, _ = shown(2).questions()
    assert other.hash != first.hash


def test_the_count_of_examples_is_in_the_manifest(shown, tmp_path):
    [store] = shown(2, store=str(tmp_path / "own")).elicit()
    assert store.manifest()["scales"]["0-5"]["examples"] == 2
    assert len(of_kind(store, "item")) == store.items().num_rows == 12


def test_gold_between_labels_is_shown_as_the_nearest_the_lower_of_two():
    task = Task("sts", "sts.j2", {"sentence1": "a", "sentence2": "b"}, gold_range=(0.0, 1.0))
    fields = {"sentence1": "a", "sentence2": "b"}
    for gold, label in ((0.0, "0"), (0.29, "1"), (0.31, "2"), (0.3, "1"), (1.0, "5")):
        example = Item("i", "i", "dev", gold, False, fields, "")
        assert Template(task, [example])._before.endswith(f"\nScore: {label}\n\n")


def test_more_examples_than_scored_dev_items_are_refused(shown, job):
    job.rows[0]["score"] = None
    with pytest.raises(
        ValueError, match="is 9, but there are 8 scored dev items that test doesn't"
    ):
        shown(9).questions()
    assert len(shown(8).questions()[1]) == 6


def test_a_pair_that_test_holds_too_is_never_shown(shown, job):
    for name in ("sentence1", "sentence2"):
        job.rows[13][name] = job.rows[0][name]
    _, items, _ = shown(8).questions()
    assert "r0" in {item.id for item in items}


def test_all_scored_items_may_be_shown_where_outer_folds_pool_the_splits(shown):
    assert len(shown(12, folds=Folds(outer=5)).questions()[1]) == 2


def test_examples_and_reasoning_go_together(make_job, tmp_path):
    job = make_job(tmp_path, template="sts_reasoning.j2", reasoning=6)
    example = Item("i", "i", "dev", 3.0, False, {"sentence1": "a", "sentence2": "b"}, "")
    template = Template(job.task, [example])
    questions = item_questions([template], [example]) + prior_questions([template])
    prompt = questions[0].prompt
    assert prompt.before.endswith("Sentence 1: a\nSentence 2: b\nScore: 3\n\n")
    assert prompt.after.endswith("Don't give a score yet.")
