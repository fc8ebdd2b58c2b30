"""An elicitation from items to a finished store, stopped and resumed."""

import json
import re

import pytest

from scorecal.judging.elicit import Interrupted, elicit
from scorecal.judging.store import Store
from scorecal.judging.transformers import TransformersJudge

FILES = ["items.parquet", "judgements.parquet", "manifest.json"]


@pytest.fixture(params=["finished", "unfinished"])
def any_store(request, job, watched):
    """The job's own store, finished or stopped after one chunk."""
    if request.param == "finished":
        return request.getfixturevalue("finished")
    with pytest.raises(Interrupted):
        job.run(watched(patience=1))
    return Store(job.store)


def test_a_finished_store_holds_the_three_files_and_nothing_else(job, watched, unbroken):
    store = job.run(watched())
    assert sorted(path.name for path in store.folder.iterdir()) == FILES
    assert job.contents() == unbroken.files  # same plan, same bytes
    assert unbroken.chunks >= 6


@pytest.mark.parametrize("patience", [0, 1, 3, -1])
def test_a_resumed_elicitation_gives_the_bytes_of_an_unbroken_one(patience, job, watched, unbroken):
    _, files, chunks = unbroken
    done = patience % chunks
    with pytest.raises(Interrupted) as stopped:
        job.run(watched(patience=done))
    assert str(stopped.value) == (
        f"stopped with {done} of {chunks} chunks judged. Run the same command to go on."
    )
    assert not (job.store / "manifest.json").exists()
    second = watched()
    store = job.run(second)
    assert second.chunks_judged == chunks - done  # nothing is judged twice
    assert job.contents() == files
    assert sorted(path.name for path in store.folder.iterdir()) == FILES


def test_an_elicitation_may_be_stopped_again_and_again(job, watched, unbroken):
    for done in range(3, unbroken.chunks, 3):
        with pytest.raises(Interrupted, match=f"stopped with {done} of"):
            job.run(watched(patience=3))
    job.run(watched())
    assert job.contents() == unbroken.files


def test_ctrl_c_before_the_first_chunk_says_how_to_go_on_too(job, watched, unbroken, monkeypatch):
    def interrupted(self, prompts):
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformersJudge, "perplexity", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        job.run(watched())
    assert re.match("stopped with 0 of .* Run the same command to go on", str(stopped.value))


def leave_half_a_part(store):
    (store / "parts" / ".000001.parquet.7.partial").write_bytes(b"PAR1")


def leave_half_a_table(store):
    (store / "judgements.parquet").write_bytes(b"PAR1")


@pytest.mark.parametrize("trace", [leave_half_a_part, leave_half_a_table])
def test_what_a_killed_process_left_does_not_matter(trace, job, watched, unbroken):
    with pytest.raises(Interrupted):
        job.run(watched(patience=2))
    trace(job.store)
    job.run(watched())
    assert job.contents() == unbroken.files


@pytest.mark.parametrize("trace", ["parts", ".plan.json.7.partial"])
def test_a_process_killed_before_its_plan_was_written_does_not_block_the_folder(
    trace, job, watched, unbroken
):
    job.store.mkdir()
    (job.store / trace).mkdir() if trace == "parts" else (job.store / trace).touch()
    job.run(watched())
    assert job.contents() == unbroken.files


@pytest.mark.parametrize("step", ["_write_json", "shutil.rmtree"])
def test_a_process_killed_while_finishing_loses_nothing(step, job, watched, unbroken, monkeypatch):
    from scorecal.judging import store as module

    class Killed(BaseException):
        pass

    def killed(path, *rest, **_):
        if path.name != "plan.json":
            raise Killed
        return write(path, *rest)

    write = module._write_json
    with monkeypatch.context() as patch:
        owner, _, name = step.rpartition(".")
        patch.setattr(getattr(module, owner) if owner else module, name, killed)
        with pytest.raises(Killed):
            job.run(watched())
    again = watched()
    job.run(again)
    assert job.contents() == unbroken.files
    assert again.chunks_judged == 0


def test_an_unwritable_memory_of_rates_costs_no_judgement(job, watched, unbroken, monkeypatch):
    job.data.touch()
    monkeypatch.setenv("SCORECAL_CACHE", str(job.data))  # a file, where a folder is needed
    job.run(watched())
    assert job.contents() == unbroken.files


# A finished store


def test_a_finished_store_is_not_judged_again(job, watched, unbroken, finished):
    job.run(watched(patience=0))
    assert job.contents() == unbroken.files


def test_new_gold_refreshes_the_items_and_no_judgement(job, watched, unbroken, finished):
    job.rows[3]["score"], job.rows[4]["score"] = 4.25, None
    store = job.run(watched(patience=0))
    after = job.contents()
    assert after["judgements.parquet"] == unbroken.files["judgements.parquet"]
    assert store.items().column("gold").to_pylist()[2:6] == [2, 4.25, None, 5]
    before, now = (json.loads(files["manifest.json"]) for files in (unbroken.files, after))
    assert store.manifest() == now  # checksums fit
    assert {key for key in now if now[key] != before[key]} == {"files"}


def test_a_process_killed_while_refreshing_items_costs_no_judgement(
    job, watched, finished, monkeypatch
):
    from scorecal.judging import store as module

    job.rows[3]["score"] = 4.25
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            job.run(watched(patience=0))
    store = job.run(watched(patience=0))
    assert store.manifest()
    assert store.items().column("gold").to_pylist()[3] == 4.25


def other_text(job):
    job.rows[0]["sentence1"] = "another sentence"


def other_id(job):
    job.rows[0]["id"] = "another"


def fewer_rows(job):
    del job.rows[2]


@pytest.mark.parametrize("change", [other_text, other_id, fewer_rows])
def test_other_data_in_the_same_folder_are_refused(change, any_store, job, watched):
    change(job)
    with pytest.raises(ValueError, match=r"made from other texts or ids.*Set `--data.store`"):
        job.run(watched())


@pytest.mark.parametrize(
    ("field", "family", "options"),
    [
        ("dtype", {}, {"dtype": "bfloat16"}),
        ("revision", {"seed": 1}, {}),
        ("chat_template", {}, {"chat_template": "plain"}),
        ("tokenizer", {"digits": False}, {}),
    ],
)
def test_another_judge_in_the_same_folder_is_refused_by_field_and_both_values(
    field, family, options, any_store, job, watched
):
    had, has = watched(), watched(family, **options)
    values = [re.escape(repr(judge.identity()[field])) for judge in (had, has)]
    with pytest.raises(ValueError, match=f"its {field} is {values[0]}, here it is {values[1]}"):
        job.run(has)


def test_another_scale_or_template_in_the_same_folder_is_refused(
    finished, watched, make_job, tmp_path
):
    with pytest.raises(ValueError, match="its (labels|scale) is"):
        make_job(tmp_path, scale="0-10:2").run(watched(), finished.folder)
    text = make_job(tmp_path).template._path.read_text().replace("Score:", "Rating:")
    (tmp_path / "own.j2").write_text(text)
    with pytest.raises(ValueError, match="its template is"):
        make_job(tmp_path, template=str(tmp_path / "own.j2")).run(watched(), finished.folder)


def test_a_folder_of_something_else_is_left_alone(job, watched):
    job.store.mkdir()
    (job.store / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not empty and no store. Set `--data.store`"):
        job.run(watched())
    assert [path.name for path in job.store.iterdir()] == ["thesis.txt"]


def test_bad_prompts_leave_no_folder_behind(job, watched):
    job.rows[1]["sentence1"] = "boat " * 900
    with pytest.raises(ValueError, match=r"pairs.jsonl row 2 has \d+ tokens"):
        job.run(watched())
    assert not job.store.exists()
    assert job.run(watched(), truncate=True).is_complete


def test_the_default_folder_names_task_judge_and_plan(job, watched, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    store = elicit(watched(), *job.parts())
    assert re.fullmatch(r"stores/sts-tiny-llama-[0-9a-f]{8}", store.folder.as_posix())


def test_what_a_kill_at_the_very_end_left_is_cleared_away(job, watched, unbroken):
    """Found by killing: the last file half written, or all written and the plan still there."""
    with pytest.raises(Interrupted):
        job.run(watched(patience=3))
    (job.store / ".judgements.parquet.7.partial").write_bytes(b"half")
    job.run(watched())
    assert sorted(path.name for path in job.store.iterdir()) == sorted(unbroken.files)
    (job.store / "plan.json").write_text("{}")
    (job.store / "parts").mkdir()
    (job.store / "parts" / "000000.parquet").write_bytes(b"")
    job.run(watched(patience=0))
    assert sorted(path.name for path in job.store.iterdir()) == sorted(unbroken.files)
