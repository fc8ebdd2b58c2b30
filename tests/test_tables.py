"""The frozen tables that ship: whole, small, without text, and what the judge says again."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import scorecal
from scorecal.commands import read_data
from scorecal.judging.elicit import refuse_other_identity
from scorecal.judging.plan import item_questions, make_plan, prior_questions
from scorecal.judging.store import Store
from scorecal.judging.table import load_table
from scorecal.judging.task import Task, Template, load_items, templates
from scorecal.judging.transformers import TransformersJudge

FOLDER = Path(scorecal.__file__).parent / "tables"
TABLES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
CONFIGS = {
    "stsb": ["sts"],
    "semrel": ["str"],
    "summeval": ["summ"],
    "helpsteer2": ["align"],
    "hanna": ["story"],
    "stsb-ranges": ["sts_ranges"],
    "semrel-ranges": ["str_ranges"],
    "summeval-coherence-ranges": ["summ_ranges"],
    "summeval-relevance-ranges": ["summ_ranges", "--data.task.gold=relevance"],
    "summeval-consistency-ranges": ["summ_ranges", "--data.task.gold=consistency"],
    "summeval-coherence-rubric": ["summ_rubric"],
    "hanna-engagement-rubric": ["story_rubric"],
    "vicuna-rubric": ["rubric"],
}
ITEMS = {
    "stsb": (1500, 1379),
    "semrel": (250, 2600),
    "stsb-ranges": (200, 600),
    "semrel-ranges": (150, 450),
}
STS = read_data("sts.yaml").task


def kind_of(name: str) -> str:
    """What a table's name begins with."""
    return max((kind for kind in CONFIGS if name.startswith(f"{kind}-")), key=len)


def task_of(name: str) -> Task:
    """The task of a table, on all its scales."""
    config, *changes = CONFIGS[kind_of(name)]
    return read_data(f"{config}.yaml", changes).task


def test_the_default_table_ships() -> None:
    assert "stsb-qwen2.5-coder-1.5b-gguf" in TABLES


@pytest.mark.parametrize("name", TABLES)
def test_a_frozen_table_is_whole_small_and_holds_figures_only(name: str) -> None:
    store = Store(FOLDER / name)
    manifest = store.manifest()
    assert sum(path.stat().st_size for path in store.folder.iterdir()) < 500_000
    assert pq.read_schema(store.folder / "items.parquet").names == [
        "id", "group", "split", "gold", "leak",
    ]  # fmt: skip
    judgements = store.judgements()
    assert judgements["text"].null_count == len(judgements)
    assert "dequantised GGUF" in manifest["identity"]["judge"]
    task = task_of(name)
    assert manifest["task"] == task.name
    assert manifest["identity"]["template"] == Template(task).hash
    assert list(manifest["scales"]) == task.scales
    for scale in task.scales:
        check_on_a_scale(name, task.on(scale))


def check_on_a_scale(name: str, task: Task) -> None:
    # A mean over orders is of probabilities renormalised over the labels.
    table = load_table(name, replace(task, orders="none"))
    if (expected := ITEMS.get(kind_of(name))) is not None:
        assert (table.splits.count("dev"), table.splits.count("test")) == expected
    kinds = {kind: len(answers.logprobs) for kind, answers in table.evidence.items()}
    kinds.pop("sampled", None)
    assert kinds == {"random": 100, "random_task": 100, "content_free": 3}
    if task.name == "sts":
        dev = torch.tensor([split == "dev" for split in table.splits])
        # Three pairs stand in both splits (and one of them twice in dev, or not, as published).
        assert 3 <= int((table.leak & dev).sum()) <= 4
    assert (table.label_mass <= 1 + 1e-6).all()
    assert torch.allclose(table.logprobs.exp().sum(-1), table.label_mass, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TABLES if kind_of(name) == "stsb"])
def test_the_judge_says_the_same_again_about_50_random_rows(name: str) -> None:
    model, data = os.environ.get("SCORECAL_JUDGE"), os.environ.get("SCORECAL_STSB")
    if not model or not data:
        pytest.skip("set SCORECAL_JUDGE and SCORECAL_STSB to a judge and the data")
    manifest = Store(FOLDER / name).manifest()
    judge = TransformersJudge(model, dtype=manifest["identity"]["dtype"])
    if judge.identity()["revision"] != manifest["identity"]["revision"]:
        pytest.skip(f"SCORECAL_JUDGE is not the judge of {name}")
    asked = templates(STS)
    questions = item_questions(asked, load_items(STS, data)) + prior_questions(asked)
    plan = make_plan(judge, asked, questions, truncate=False)
    refuse_other_identity(name, manifest["identity"], plan.identity)
    assert plan.digest == manifest["digest"]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(2879, generator=generator)[:50].tolist()
    table = load_table(name, STS)
    for answer in judge.judge([questions[row].prompt for row in rows]):
        stored = table.logprobs[rows[answer.index]]
        assert (stored.exp() - answer.logprobs.double().exp()).abs().max() < 1e-4


def test_the_tables_say_where_their_gold_scores_come_from() -> None:
    text = (FOLDER / "README.md").read_text()
    assert "CC BY-SA 4.0" in text
    assert "STS Benchmark" in text


@pytest.mark.parametrize("name", TABLES)
def test_a_manifest_names_no_path(name: str) -> None:
    text = json.dumps(Store(FOLDER / name).manifest())
    assert "/root" not in text
    assert "/home" not in text
