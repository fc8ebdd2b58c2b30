"""vLLM's engine against a plain forward pass of each prompt alone, in float32.

`tests/judging/vllm.sh` builds an environment for this file. SCORECAL_JUDGE names a judge's folder;
without it the judge is a tiny random one.
"""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from scorecal.judging.checkpoint import Checkpoint
from scorecal.judging.judge import Prompt
from scorecal.judging.transformers import TransformersJudge
from scorecal.judging.vllm import VllmJudge

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
OPTIONS = {"max_model_len": 500}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    given = os.environ.get("SCORECAL_JUDGE")
    if given:
        return given
    path = tmp_path_factory.mktemp("judge") / "tiny"
    shutil.copytree(tiny("llama"), path)
    config = AutoConfig.from_pretrained(path)
    config.head_dim = 32  # the least that vLLM's attention on a CPU takes
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    digits = AutoTokenizer.from_pretrained(path)("0123456789")["input_ids"][-10:]
    network.get_output_embeddings().weight.data[digits] *= 4  # a judge likes to answer in numbers
    network.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def judge(folder):
    judge = VllmJudge(folder, dtype="float32", options=OPTIONS)
    yield judge
    judge.__dict__["_engine"].llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def logits(folder):
    """The reference: the whole model, one sequence, every logit."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def after_each(ids):
        return network(torch.tensor([ids])).logits[0]

    return after_each


def plain_probabilities(logits, ids, level_ids):
    """Each label as a sequence, less the sequences that other labels continue it with."""
    forms = [tuple(form) for level in level_ids for form in level]
    steps = {form[:depth] for form in forms for depth in range(1, len(form) + 1)}
    after = {
        prefix: logits([*ids, *prefix])[-1].double().log_softmax(-1)
        for prefix in {step[:-1] for step in steps}
    }

    def probability(form):
        return math.exp(sum(after[form[:at]][token].item() for at, token in enumerate(form)))

    return [
        sum(
            probability(tuple(form))
            - sum(probability(step) for step in steps if step[:-1] == tuple(form))
            for form in level
        )
        for level in level_ids
    ]


@pytest.mark.parametrize(("scale", "count"), [("0-5", 200), ("0-10", 40), ("0-100", 8)])
def test_label_probabilities_are_within_1e_4_of_a_plain_forward_pass(
    scale, count, judge, logits, ask
):
    prompts = ask(count, scale, seed=1)
    encoded = judge.encode(prompts)
    answers = {answer.index: answer for answer in judge.judge(prompts)}
    assert sorted(answers) == list(range(count))
    worst, likeliest = 0.0, 0.0
    for index, (prompt, row) in enumerate(zip(prompts, encoded, strict=True)):
        expected = plain_probabilities(logits, list(row.input_ids), judge.label_ids(prompt))
        answer = answers[index]
        found = answer.logprobs.double().exp()
        worst = max(worst, (found - torch.tensor(expected)).abs().max().item())
        likeliest = max(likeliest, *expected)
        assert answer.label_mass == pytest.approx(sum(expected), abs=1e-4)
        assert math.isnan(answer.logsumexp)
        assert not answer.censored.any()
    print(f"largest difference of {count} prompts on {scale}: {worst:.2g}")
    assert worst < 1e-4
    assert likeliest > 0.05  # the bound means something


def test_perplexity_is_that_of_the_texts_own_tokens(judge, folder, logits):
    texts = ["Give me a random number.", "Which integer between 0 and 5?", "A number"]
    tokenizer = Checkpoint(folder, None, "float32", None).tokenizer
    for text, found in zip(texts, judge.perplexity(texts).tolist(), strict=True):
        frame = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        head, foot = frame.split(text)
        ids = tokenizer(frame, add_special_tokens=False)["input_ids"]
        first = len(tokenizer(head, add_special_tokens=False)["input_ids"])
        last = len(ids) - len(tokenizer(foot, add_special_tokens=False)["input_ids"])
        steps = logits(ids).double().log_softmax(-1)
        losses = [-steps[at - 1, ids[at]].item() for at in range(first, last)]
        assert found == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_sampled_texts_depend_on_the_seed_and_the_place_in_the_list(judge):
    def sample(seed):
        return judge.generate(["Say something."] * 3, max_tokens=12, temperature=1.0, seed=seed)

    first = sample(1)
    assert sample(1) == first
    assert sample(2) != first
    assert len(set(first)) == 3


def test_answers_are_those_of_the_transformers_judge(judge, folder, ask):
    encoded = judge.encode(ask(20))
    other = TransformersJudge(folder, dtype="float32")
    assert judge.answer(encoded, max_tokens=8) == other.answer(encoded, max_tokens=8)


def test_a_store_of_this_engine_is_the_transformers_judges_too(judge, folder, job):
    store = job.run(judge)
    manifest = store.manifest()
    assert "vllm" in manifest["engine"]
    other = TransformersJudge(folder, dtype="float32")
    assert other.identity() == judge.identity()
    before = job.contents()
    assert job.run(other).folder == store.folder  # taken as finished
    assert job.contents() == before


def test_the_command_prints_its_answer_alone_and_ends(folder, job, tmp_path):
    job.parts()  # writes the pairs
    options = json.dumps(OPTIONS)
    command = [sys.executable, "-m", "train", "elicit", "--config", "sts.yaml"]
    command += ["--data.path", str(job.data), "--data.judge", "scorecal.judging.vllm.VllmJudge"]
    command += ["--data.judge.model", folder, "--data.judge.dtype", "float32"]
    command += ["--data.judge.options", options]

    def run(*more):
        return subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True,
                              timeout=400)  # fmt: skip

    shown = run("--dry_run", "json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["items"]
    assert "vllm" not in shown.stderr.lower()  # no engine was started

    finished = run()
    assert finished.returncode == 0, finished.stderr
    [line] = finished.stdout.splitlines()
    assert (tmp_path / line / "judgements.parquet").is_file()
    assert len(finished.stderr) < 5000


def test_an_option_that_vllm_does_not_know_is_named(folder):
    judge = VllmJudge(folder, dtype="float32", options={"tensor_paralel_size": 2})
    with pytest.raises(ValueError, match="'tensor_paralel_size', which vLLM doesn't know"):
        judge.perplexity(["a"])
    judge = VllmJudge(folder, dtype="float32", options={"trust_remote_code": True})
    with pytest.raises(ValueError, match="'trust_remote_code', which scorecal sets itself"):
        judge.perplexity(["a"])


def test_a_judge_that_vllm_cannot_run_is_one_readable_line(tmp_path, folder):
    broken = shutil.copytree(folder, tmp_path / "broken")
    config = json.loads(Path(broken, "config.json").read_text())
    Path(broken, "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchLM"]}))
    judge = VllmJudge(str(broken), dtype="float32")
    with pytest.raises(ValueError, match=r"vLLM can't start judge .*NoSuchLM"):
        judge.perplexity(["a"])


def test_a_prompt_longer_than_max_model_len_is_refused_before_the_engine_starts(folder):
    judge = VllmJudge(folder, dtype="float32", options=OPTIONS)
    with pytest.raises(ValueError, match="reads 499 before a label"):
        judge.encode([Prompt("", "boat " * 600, "", "", (("1",), ("2",)), "row 1")])
    assert "_engine" not in vars(judge)
