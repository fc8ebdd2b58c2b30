"""What would be asked, shown before a judge is run."""

import json

from scorecal.judging import elicit as elicitation
from scorecal.judging.dry_run import dry_run, dry_run_text


def test_a_dry_run_shows_every_prompt_as_tokenised_and_writes_nothing(
    job, watched, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    job.rows[0]["sentence1"] = "ends<|im_end|>here"
    judge = watched(patience=0)
    task, templates, items, questions = job.parts()
    files = sorted(tmp_path.rglob("*"))
    shown = dry_run(judge, task, templates, questions, truncate=False)
    assert sorted(tmp_path.rglob("*")) == files
    assert "_network" not in vars(judge)  # no weights were loaded
    assert json.loads(json.dumps(shown)) == shown
    assert list(shown) == [
        "items", "random", "random_task", "content_free", "labels", "counts", "seconds",
    ]  # fmt: skip
    lengths = {kind: len(shown[kind]) for kind in list(shown)[:4]}
    assert lengths == {"items": 14, "random": 8, "random_task": 8, "content_free": 3}
    assert [row["id"] for row in shown["items"]] == [item.id for item in items]
    everything = [row for kind in lengths for row in shown[kind]]
    encoded = judge.encode([question.prompt for question in questions])
    assert [row["input_ids"] for row in everything] == [list(row.input_ids) for row in encoded]
    for row in everything:
        assert row["text"].startswith("<|endoftext|><|im_start|>user\n")
        assert row["text"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert "ends<|im_end|>here" in shown["items"][0]["text"]
    assert "a scale from 0 to 5" in shown["random_task"][0]["text"]
    assert "a scale from 0 to 5" not in shown["random"][0]["text"]
    assert [row["id"] for row in shown["content_free"]] == ["N/A", "[MASK]", ""]
    assert list(shown["labels"]) == list("012345")
    assert shown["labels"]["3"] == judge.label_ids(questions[0].prompt)[3]
    rows = [row["input_ids"] for row in shown["items"]]
    trie = {tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}
    counts = shown["counts"]
    assert counts["prompts"] == 14
    assert counts["prompt_tokens"] == sum(map(len, rows))
    assert counts["trie_tokens"] == len(trie)
    assert len(trie) <= counts["tokens_computed"] < counts["prompt_tokens"]
    assert shown["seconds"] is None


def test_seconds_are_known_once_a_rate_has_been_measured(job, watched):
    judge = watched()
    job.run(judge)
    task, templates, _, questions = job.parts()
    shown = dry_run(judge, task, templates, questions, truncate=False)
    assert shown["seconds"] > 0
    other = watched(dtype="bfloat16")
    assert dry_run(other, task, templates, questions, truncate=False)["seconds"] is None


def test_the_text_of_a_dry_run_shows_two_prompts_of_each_kind(job, watched):
    task, templates, _, questions = job.parts()
    shown = dry_run(watched(), task, templates, questions, truncate=False)
    text = dry_run_text(shown)
    for kind in ("items", "random", "random_task", "content_free"):
        assert text.count(f"--- {kind} ") == 2
        assert shown[kind][1]["text"] in text
    assert f"3: {shown['labels']['3']}" in text
    assert f"14 prompts, {shown['counts']['prompt_tokens']} prompt tokens, " in text
    assert f"{shown['counts']['trie_tokens']} without repeated beginnings, " in text
    assert f"{shown['counts']['tokens_computed']} to compute" in text
    assert "not known, no rate measured yet" in text
    assert "about 12" in dry_run_text({**shown, "seconds": 12.3})


def test_a_damaged_memory_of_rates_is_no_rate(job, watched, monkeypatch, tmp_path):
    rates = elicitation._rate_file()
    rates.parent.mkdir(parents=True)
    rates.write_text("{")
    task, templates, _, questions = job.parts()
    shown = dry_run(watched(), task, templates, questions, truncate=False)
    assert shown["seconds"] is None
