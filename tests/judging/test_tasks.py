"""The shipped tasks, on tiny data in the layout of each hub copy, and a task of the user's own."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from scorecal import resources
from scorecal.commands import read_data
from scorecal.judging.task import Item, Task, Template, load_items

CRITERIA = {
    "summ": ["coherence", "consistency", "fluency", "relevance"],
    "align": ["helpfulness", "correctness", "coherence", "complexity", "verbosity"],
    "story": ["relevance", "coherence", "empathy", "surprise", "engagement", "complexity"],
}

TEMPLATE = """{% block instruction %}Rate how cheerful a remark is, from {{ low }} to {{ high }}.

{% endblock %}{% block item %}Remark: {{ remark }}{% endblock %}{% block question %}
Cheer:{% endblock %}"""


def write(folder: Path, name: str, rows: list[dict]) -> None:
    """A split as the hub's loader gives it, in the format that its name says."""
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def pair(number: int, **gold: float) -> dict:
    return {"sentence1": f"One {number}.", "sentence2": f"Two {number}.", **gold}


def items_of(config: str, folder: Path) -> tuple[Task, list[Item]]:
    task = read_data(config).task
    return task, load_items(task, str(folder))


def test_sts_is_read_from_its_hub_layout(tmp_path):
    write(tmp_path, "validation.parquet", [pair(1, score=2.5)])
    write(tmp_path, "test.parquet", [pair(2, score=5.0)])
    _, items = items_of("sts.yaml", tmp_path)
    assert [(item.split, item.gold) for item in items] == [("dev", 2.5), ("test", 5.0)]


def test_str_is_read_from_its_hub_layout_and_gold_is_stretched_to_five(tmp_path):
    write(tmp_path, "dev.parquet", [pair(1, label=0.5)])
    write(tmp_path, "test.parquet", [pair(2, label=1.0)])
    _, items = items_of("str.yaml", tmp_path)
    assert [item.gold for item in items] == [2.5, 5.0]


def test_summ_is_an_item_a_summary_and_a_group_an_article(tmp_path):
    rows = [
        {
            "id": f"article-{number}",
            "text": f"Long ago, {number}.",
            "machine_summaries": ["Ago.", "Long."],
            **{name: [1.0 + number, 3.0] for name in CRITERIA["summ"]},
        }
        for number in range(2)
    ]
    write(tmp_path, "test.parquet", rows)
    task, items = items_of("summ.yaml", tmp_path)
    assert [(item.id, item.group, item.gold) for item in items] == [
        ("article-0-0", "article-0", 1.0), ("article-0-1", "article-0", 3.0),
        ("article-1-0", "article-1", 2.0), ("article-1-1", "article-1", 3.0),
    ]  # fmt: skip
    assert Template(task).prompt(items[1]).item == "Article: Long ago, 0.\n\nSummary: Long."


def test_align_pools_both_splits_and_groups_by_a_hash_of_the_prompt(tmp_path):
    scores = dict.fromkeys(CRITERIA["align"], 3)
    for split, text in (("train", "Why?"), ("validation", "How?")):
        rows = [{"prompt": text, "response": answer, **scores} for answer in ("So.", "Thus.")]
        write(tmp_path, f"{split}.parquet", rows)
    _, items = items_of("align.yaml", tmp_path)
    assert len({item.group for item in items}) == 2
    assert items[0].group == items[1].group
    assert "Why" not in items[0].group


def test_story_is_read_from_a_file_without_splits(tmp_path):
    row = {"prompt_id": 7, "prompt": "Write.", "story": "It was.", "engagement": 3 + 1 / 3}
    write(tmp_path, "hanna.jsonl", [{**row, "id": "h0"}, {**row, "id": "h1", "story": "It is."}])
    _, items = items_of("story.yaml", tmp_path / "hanna.jsonl")
    assert [(item.group, item.split) for item in items] == [("7", "test")] * 2


def test_each_response_has_its_own_rubric_and_an_instruction_is_a_group(tmp_path):
    levels = "\n".join(f"Score {score}: It is {score} good." for score in range(1, 6))
    row = {
        "instruction": "Say why.", "response": "So.", "reference_answer": "Thus.",
        "rubric": f"[Is it good?]\n{levels}", "gpt4_mean": 3 + 1 / 3,
    }  # fmt: skip
    write(tmp_path, "answers.jsonl", [{**row, "id": name} for name in "ab"])
    task, items = items_of("rubric.yaml", tmp_path / "answers.jsonl")
    assert len({item.group for item in items}) == 1
    assert "why" not in items[0].group  # a store holds no text
    assert items[0].gold == 3 + 1 / 3
    orders = ((0, 1, 2, 3, 4), (1, 2, 3, 4, 0))
    shown = [Template(task, order=order).prompt(items[0]) for order in orders]
    assert shown[0].item == shown[1].item
    assert "Reference answer: Thus." in shown[0].item
    assert "Is it good?\nScore 1: It is 1 good.\nScore 2" in shown[0].after
    assert "Is it good?\nScore 2: It is 2 good.\nScore 3" in shown[1].after


@pytest.mark.parametrize(
    ("name", "gold"), [(name, gold) for name, golds in CRITERIA.items() for gold in golds]
)
def test_each_criterion_is_an_option_of_its_task_and_another_store(name, gold):
    from dataclasses import replace

    task = read_data(f"{name}.yaml").task
    template = Template(replace(task, gold=gold))
    assert f"rate the {gold} of" in template.instruction
    prompt = template.content_free("N/A")
    assert prompt.after == f"\n\n{gold.capitalize()} score:"
    others = {Template(replace(task, gold=other)).hash for other in CRITERIA[name] if other != gold}
    assert template.hash not in others


def test_a_criterion_that_a_template_does_not_know_is_refused():
    from dataclasses import replace

    task = replace(read_data("summ.yaml").task, gold="charm")
    with pytest.raises(ValueError, match="block 'instruction' .* The criterion is 'charm'"):
        Template(task)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fluency": [1.0]}, "the lists to explode have the lengths"),
        ({"fluency": 2.0}, "has no list in column 'fluency'"),
    ],
)
def test_lists_that_do_not_match_are_refused_with_the_row(change, message, tmp_path):
    row = {"id": "a", "text": "T", "machine_summaries": ["x", "y"]}
    row |= {name: [1.0, 2.0] for name in CRITERIA["summ"]} | change
    write(tmp_path, "test.jsonl", [row])
    with pytest.raises(ValueError, match=f"test.jsonl row 1.*{message}"):
        items_of("summ.yaml", tmp_path)


def test_a_field_that_the_template_never_shows_is_refused(tmp_path):
    task = Task("own", "sts.j2", {"sentence1": "a", "sentence2": "b", "hint": "c"})
    with pytest.raises(ValueError, match="has the field 'hint', which template .* never shows"):
        Template(task)


@pytest.mark.parametrize("roles", [{}, {"train": "train"}])
def test_splits_that_are_neither_dev_nor_test_are_refused(roles):
    with pytest.raises(ValueError, match="which split is dev and which is test"):
        Task("own", "sts.j2", {"sentence1": "a", "sentence2": "b"}, splits=roles)


def test_labels_that_are_written_alike_are_refused():
    with pytest.raises(ValueError, match="writes several values as '1e\\+11'"):
        Task("own", "sts.j2", {}, scale="100000000000-100000000003").values()


@pytest.mark.parametrize("command_name", ["fit", "compare"])
def test_test_rows_without_gold_are_refused_before_they_are_judged(
    command_name, command, tiny, tmp_path
):
    write(tmp_path, "dev.jsonl", [pair(number, label=0.1 * number) for number in range(9)])
    write(tmp_path, "test.jsonl", [pair(number, label=None) for number in range(20, 24)])
    settings = yaml.safe_load(Path(resources.find("configs", "str.yaml")).read_text())
    settings["data"] |= {"path": str(tmp_path)}
    settings["data"]["judge"]["init_args"] = {"model": tiny("llama")}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(settings))
    finished = command(command_name, "--config", "own.yaml")
    assert finished.status == 2
    assert "none of the 4 test rows has a gold score" in finished.err
    assert not (tmp_path / "stores").exists()
    assert not (tmp_path / "runs").exists()


def test_a_sixth_task_is_a_yaml_and_a_template(command, tiny, tmp_path):
    (tmp_path / "cheer.j2").write_text(TEMPLATE)
    rows = [
        {"speaker": f"s{number % 4}", "remark": f"It is day {number}!", "cheer": number % 3 + 1}
        for number in range(12)
    ]
    (tmp_path / "cheer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "name": "cheer", "source": "cheer.jsonl", "splits": {"test": "all"},
        "fields": {"remark": "remark"}, "gold": "cheer", "group": "speaker",
        "scale": "1-3", "template": "cheer.j2",
    }  # fmt: skip
    judge = {
        "class_path": "scorecal.TransformersJudge",
        "init_args": {"model": tiny("llama"), "dtype": "float32", "device": "cpu"},
    }
    data = {"task": task, "judge": judge, "folds": {"outer": 2, "inner": 2}}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "r"}}
    settings = {"data": data, "trainer": {"max_epochs": 50, "accelerator": "cpu", "logger": logger}}
    (tmp_path / "cheer.yaml").write_text(yaml.safe_dump(settings))
    finished = command("fit", "--config", "cheer.yaml")
    assert finished.status == 0, finished.err
    assert "12 test items" in finished.out
    finished = command("compare", "--config", "cheer.yaml", "--resamples", 100, "--draws", 0)
    assert finished.status == 0, finished.err
    assert "## cheer" in (tmp_path / "compare/tables.md").read_text()
