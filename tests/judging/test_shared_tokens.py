"""Shared beginnings change what is computed, never what comes out."""

import random

import pytest
import torch
import transformers

from scorecal.judging.judge import Prompt
from scorecal.judging.transformers import TransformersJudge
from scorecal.scale import Scale

FAMILIES = ["llama", "qwen2", "gemma2", "gemma3"]  # the last two have sliding windows of 8 tokens
OTHERS = ["mistral", "gpt2", "gpt_oss", "phi"]  # windows only, learned positions, sinks, a bias


def mixed(ask, count=200):
    """Score ranges that differ in the last line only, after articles that several items share."""
    articles = [" ".join(prompt.item for prompt in ask(9, seed=seed)) for seed in range(3)]
    prompts = []
    for index, prompt in enumerate(ask(count // 4)):
        for scale in ("0-4", "1-5", "2-6", "1-10"):
            before = prompt.before + (articles[index % 3] if index % 2 else "")
            labels = tuple((label,) for label in Scale.parse(scale).labels)
            prompts.append(Prompt(before, prompt.item, f"\nScore {scale}:", "", labels))
    return random.Random(0).sample(prompts, len(prompts))


def judged(folder, prompts, **options):
    judge = TransformersJudge(folder, **options)
    answers = sorted(judge.judge(prompts), key=lambda answer: answer.index)
    return judge, [answer.logprobs.exp() for answer in answers]


def plain_bfloat16(folder, prompts):
    """Each prompt by itself through the model's own attention; the LM head in float32."""
    judge = TransformersJudge(folder, dtype="bfloat16")
    judge._packs = False
    work = [(row.input_ids, judge._files.tokens.label_tree(prompt))
            for row, prompt in zip(judge.encode(prompts), prompts, strict=True)]  # fmt: skip
    return [judge._label_logprobs([one], ())[0][0].exp() for one in work]


def alone(folder, prompts):
    """Full softmax of each prompt by itself, through the model's own attention."""
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    judge = TransformersJudge(folder, dtype="float32")
    rows = []
    for prompt, encoded in zip(prompts, judge.encode(prompts), strict=True):
        ids = list(encoded.input_ids)
        levels = [forms[0] for forms in judge.label_ids(prompt)]
        with torch.no_grad():
            step = network(torch.tensor([ids])).logits[0, -1].softmax(-1)
            chances = [step[level[0]] for level in levels]
            if len(levels[-1]) == 2:  # "10" begins with "1" and takes its mass from it
                after = network(torch.tensor([ids + levels[-1][:1]])).logits[0, -1].softmax(-1)
                chances[-1] = chances[0] * after[levels[-1][1]]
                chances[0] = chances[0] - chances[-1]
        rows.append(torch.stack(chances))
    return rows


def largest_difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_200_mixed_prompts_equal_each_alone_in_any_batch_composition(family, tiny, ask):
    prompts = mixed(ask)
    expected = alone(tiny(family), prompts)
    for batch_tokens in (1, 200, 2048):
        judge, ours = judged(tiny(family), prompts, dtype="float32", batch_tokens=batch_tokens)
        assert largest_difference(ours, expected) < 1e-4
        assert judge._packs
    _, half = judged(tiny(family), prompts, dtype="bfloat16", batch_tokens=200)
    assert largest_difference(half, plain_bfloat16(tiny(family), prompts)) < 0.02
    assert largest_difference(half, expected) < 0.03  # what bfloat16 itself does to gemma3: 0.022
    values = torch.cat(half).log()
    assert (values.bfloat16().float() == values).float().mean() < 0.05  # no coarse grid


@pytest.mark.parametrize("family", OTHERS)
def test_other_kinds_of_attention_are_shared_too(family, tiny, ask):
    prompts = mixed(ask, 60)
    judge, ours = judged(tiny(family), prompts, dtype="float32", batch_tokens=300)
    assert largest_difference(ours, alone(tiny(family), prompts)) < 1e-4
    assert judge._packs


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_a_model_that_can_not_be_packed_is_run_in_plain_batches(family, tiny, ask, capsys):
    prompts = mixed(ask, 60)
    judge, ours = judged(tiny(family), prompts, dtype="float32", batch_tokens=300)
    assert largest_difference(ours, alone(tiny(family), prompts)) < 1e-4
    assert not judge._packs
    assert "its rows are run in plain batches" in capsys.readouterr().err


@pytest.mark.parametrize("scale", ["0-5", "0-100"])
@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
def test_the_plan_counts_the_tokens_that_are_computed(scale, batch_tokens, tiny, ask):
    judge = TransformersJudge(tiny(), dtype="float32", batch_tokens=batch_tokens)
    prompts = ask(40, scale)
    plan = judge.plan(prompts, judge.encode(prompts))
    list(judge.judge(prompts))
    assert judge.tokens_computed == sum(chunk.tokens for chunk in plan)


def test_little_memory_makes_small_chunks(tiny, ask):
    prompts = ask(40)
    largest = []
    for megabytes in (1, 512):
        judge = TransformersJudge(tiny(), dtype="float32", batch_mb=megabytes, batch_tokens=10**6)
        largest.append(max(chunk.tokens for chunk in judge.plan(prompts, judge.encode(prompts))))
    # 3 x 48 + 8 x 32 + 2 layers x 2 x 32 numbers of 4 bytes a token
    assert largest[0] <= (1 << 20) // (528 * 4) + 40
    assert largest[1] > largest[0]


def test_a_beginning_is_kept_for_the_chunks_below_it_only(tiny, ask):
    judge = TransformersJudge(tiny(), dtype="float32", batch_tokens=100)
    prompts = mixed(ask, 60)
    encoded = judge.encode(prompts)
    for chunk in judge.plan(prompts, encoded):
        judge.judge_chunk([prompts[at] for at in chunk.prompts],
                          [encoded[at] for at in chunk.prompts], chunk.cuts)  # fmt: skip
        row = encoded[chunk.prompts[0]].input_ids
        assert [kept for kept, _ in judge._kept] == [row[:cut] for cut in chunk.cuts]
