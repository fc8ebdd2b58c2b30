"""Several score ranges and an assistant, from the command line."""

import json

import pytest
import torch
import yaml
from stores import make_items, make_store, ranges_task, write_config

from scorecal.calibration.fitted import Fitted
from scorecal.judging.store import Store
from scorecal.judging.table import table_from_store

ITEMS = make_items(60, dev=30)


@pytest.fixture
def pair(tmp_path):
    """Stores of a main judge and an assistant, and the config that reads the main one."""
    task = ranges_task()
    main = make_store(tmp_path / "main", task, ITEMS, "Main", seed=1, shift=1.5)
    small = make_store(tmp_path / "small", task, ITEMS, "Small", seed=2, shift=2.0)
    return main, small, write_config(tmp_path / "pairs.yaml", task, main)


def test_compare_reads_all_ranges_and_contrasts_each_judge_with_the_other(pair, command, tmp_path):
    _, small, config = pair
    finished = command(
        "compare", "--config", config, "--table", small, "--assistant", small, pair[0],
        "--resamples", 100, "--draws", 0,
    )  # fmt: skip
    assert finished.status == 0, finished.err
    [records] = json.loads((tmp_path / "compare/tables.json").read_text())["tasks"].values()
    assert [(one["judge"], one["assistants"]) for one in records] == [
        ("Main", ["Small"]), ("Small", ["Main"]),
    ]  # fmt: skip
    text = (tmp_path / "compare/tables.md").read_text()
    for heading in (
        "pairs: score ranges", "Spearman, Main", "Kendall's τ-b, Small", "chosen λ and t, Main",
        "| method | 0-5 | 2-7 | mean | relative gain | spread |",
        "contrast, Small, shared across ranges, T = 1", "default head with α, Main",
    ):  # fmt: skip
        assert heading in text
    assert "within documents" not in text  # every item is its own
    assert "nan" not in text
    figures = {path.name for path in (tmp_path / "compare").glob("*.svg")}
    assert figures == {
        "pairs_range_shares.svg", "pairs_range_logits.svg",
        "pairs_range_sensitivity_1-main.svg", "pairs_range_sensitivity_2-small.svg",
    }  # fmt: skip
    page = command("report", "--runs", "compare")
    assert page.status == 0, page.err
    assert "score ranges" in (tmp_path / "compare/report/report.md").read_text()


def test_the_assistant_of_a_config_is_not_contrasted_twice(pair, command, tmp_path):
    main, small, _ = pair
    config = write_config(
        tmp_path / "with.yaml", ranges_task(), main, assistant={"table": str(small)}
    )
    finished = command(
        "compare", "--config", config, "--assistant", small, "--resamples", 100, "--draws", 0,
        "--data.task.scale", "2-7",
    )  # fmt: skip
    assert finished.status == 0, finished.err
    [[record]] = json.loads((tmp_path / "compare/tables.json").read_text())["tasks"].values()
    contrasts = [one["name"] for one in record["methods"] if one["name"].startswith("contrast")]
    assert set(contrasts) == {
        "contrast, Small", "contrast, Small, main tempered", "contrast, Small, greedy",
    }  # fmt: skip
    finished = command(
        "compare", "--config", config, "--table", small, "--resamples", 100, "--draws", 0,
        "--data.task.scale", "2-7", "--output", "both",
    )  # fmt: skip
    assert finished.status == 0, finished.err
    [records] = json.loads((tmp_path / "both/tables.json").read_text())["tasks"].values()
    assert [any(one["name"].startswith("contrast") for one in record["methods"])
            for record in records] == [True, False]  # fmt: skip


def test_a_file_of_an_assistants_log_probabilities_needs_no_gold(pair, command, tmp_path):
    main, small, config = pair
    table = table_from_store(Store(small), ranges_task().on("2-7"))
    rows = [
        {"id": key, **dict(zip(table.labels, row, strict=True))}
        for key, row in zip(table.ids, table.logprobs.tolist(), strict=True)
    ]
    (tmp_path / "its.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fit = ("fit", "--config", config, "--data.task.scale", "2-7", "--model.head.learn",
           "[temperature, contrast]", "--data.assistant.table", "its.jsonl")  # fmt: skip
    finished = command(*fit)
    assert finished.status == 0, finished.err
    listed = [{"id": row["id"], "top_logprobs": [{"token": "2", "logprob": -0.1}]} for row in rows]
    (tmp_path / "its.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    finished = command(*fit, "--data.censored", "refuse")
    assert finished.status == 2
    assert "of 'its.jsonl' lacks a label's log-probability" in finished.err


def test_fit_takes_one_range_and_an_assistant(pair, command, tmp_path):
    main, small, config = pair
    finished = command("fit", "--config", config)
    assert finished.status == 2
    assert "the task has 0-5, 2-7" in finished.err
    assert "--data.task.scale 0-5" in finished.err
    contrast = ("--data.assistant.table", small, "--model.head.learn", "[temperature, contrast]")
    finished = command("fit", "--config", config, "--data.task.scale", "2-7", *contrast)
    assert finished.status == 0, finished.err
    run = tmp_path / finished.out.splitlines()[-1]
    fitted = Fitted.from_checkpoint(str(run / "last.ckpt"))
    assert "Small" in fitted.identity["assistant"]
    assert f"α = {fitted.heads.contrast[fitted.deploy].item():.3g}, " in finished.out
    page = command("report", "--runs", run)
    assert page.status == 0, page.err
    assert "contrast α" in (run / "report/report.md").read_text()
    plain = command("test", "--config", config, "--data.task.scale", "2-7",
                    "--ckpt_path", run / "last.ckpt")  # fmt: skip
    assert plain.status == 2
    assert "assistant" in plain.err
    rows = {}
    for name, store in (("new", main), ("its", small)):
        table = table_from_store(Store(store), ranges_task().on("2-7"))
        rows[name] = table.logprobs
        records = [
            {"id": key, **dict(zip(table.labels, logprobs, strict=True))}
            for key, logprobs in zip(table.ids, table.logprobs.tolist(), strict=True)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for alpha in ("--model.head.contrast=0.5", "--model.select={contrast: [0.1, 0.5]}"):
        alone = command("fit", "--config", config, "--data.task.scale", "2-7", alpha)
        assert alone.status == 2
        assert "α is the weight of an assistant, and there is none" in alone.err
    new = ("predict", "--config", config, "--data.task.scale", "2-7", "--data.predict_path",
           "new.jsonl", "--ckpt_path", run / "last.ckpt", "--output", "scores.jsonl")  # fmt: skip
    finished = command(*new)
    assert finished.status == 2
    assert "this head subtracts an assistant" in finished.err
    finished = command(
        *new, "--data.judge", "scorecal.TransformersJudge", "--data.judge.model", "no/judge",
        "--data.assistant.table", small,
    )  # fmt: skip
    assert finished.status == 2
    assert "has to judge the new items too. Set `--data.assistant.judge`" in finished.err
    finished = command(*new, "--data.assistant.table", "its.jsonl")
    assert finished.status == 0, finished.err
    written = (tmp_path / "scores.jsonl").read_text().splitlines()
    scores = [json.loads(line)["score"] for line in written]
    alpha, temperature = fitted.heads.contrast, fitted.heads.temperature
    assert abs(alpha) > 0.05
    term = fitted.heads.strength * fitted.heads.prior[0]
    expected = rows["new"].log_softmax(-1) + term - alpha * rows["its"].log_softmax(-1)
    expected = expected / temperature
    expected = expected.softmax(-1) @ torch.arange(6, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(scores, dtype=torch.float64), expected)


def test_other_items_and_other_scales_of_an_assistant_are_refused(pair, command, tmp_path):
    _, small, config = pair
    one = make_store(tmp_path / "one", ranges_task(scale="0-5"), ITEMS, "One", seed=3)
    few = make_store(tmp_path / "few", ranges_task(), ITEMS[:40], "Few", seed=3)
    on_scale = ("fit", "--config", config, "--data.task.scale", "2-7", "--data.assistant.table")
    for table, message in (
        (one, "the assistant: store "),
        (few, "lacks 20 of 60 items of 'main', 'i40' first"),
        ("nothing", "no table 'nothing'"),
    ):
        finished = command(*on_scale, table)
        assert finished.status == 2
        assert message in finished.err
        assert finished.err.count("\n") == 1
    finished = command("compare", "--config", config, "--assistant", few, "--draws", 0)
    assert finished.status == 2
    assert "lacks 20 of 60 items" in finished.err
    assert not (tmp_path / "compare").exists()
    finished = command("compare", "--config", config, "--assistant", small, small)
    assert finished.status == 2
    assert "named twice. Take one out of `--assistant`" in finished.err
    finished = command("compare", "--config", config, "--assistant", "stsb-qwen2.5-coder-0.5b-gguf")
    assert finished.status == 2
    assert "is of the task 'sts'" in finished.err


@pytest.mark.parametrize(
    ("scale", "gold_range", "message"),
    [
        (["0-5", "2-7"], None, "several scales need gold's own range"),
        (["0-5", "0-5"], [0, 5], "must name scales, each once"),
        ([], [0, 5], "must name scales, each once"),
        (["0-5", "x"], [0, 5], "a scale is `low-high`"),
    ],
)
def test_ranges_that_cannot_be_read(pair, command, tmp_path, scale, gold_range, message):
    settings = yaml.safe_load(pair[2].read_text())
    settings["data"]["task"] |= {"scale": scale, "gold_range": gold_range}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(settings))
    finished = command("compare", "--config", "bad.yaml", "--draws", 0)
    assert finished.status == 2
    assert message in finished.err


def test_an_option_of_no_known_form_says_what_it_takes(pair, command):
    finished = command("fit", "--config", pair[2], "--data.task.orders", "foo")
    assert finished.status == 2
    assert finished.err.startswith("scorecal: `data.task.orders` can't be foo. It takes list[")
    assert finished.err.count("\n") == 1
    assert "Errors" not in finished.err
    finished = command("fit", "--config", pair[2], "--data.judge.model", "x")
    assert finished.status == 2
    assert "`data.judge.model` is set, but `data.judge` names no class." in finished.err
    finished = command("fit", "--config", "demo.yaml", "--data.judge.dtype", "x")
    assert finished.status == 2
    assert "`data.judge`, of scorecal.TransformersJudge: Parser key" in finished.err
    assert "Got value: x" in finished.err


def test_a_rubric_with_a_repeated_score_is_named(command, tmp_path):
    (tmp_path / "twice.yaml").write_text("data:\n  task:\n    rubric:\n      1: a\n      1: b\n")
    finished = command("fit", "--config", "twice.yaml")
    assert finished.status == 2
    assert "'twice.yaml' line 5: the key '1' stands twice" in finished.err
    finished = command("fit", "--config", "demo.yaml", "--data.task.rubric", "{1: a, 1: b}")
    assert finished.status == 2
    assert "argument '{1: a, 1: b}' line 1: the key '1' stands twice" in finished.err
