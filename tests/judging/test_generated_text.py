"""Texts that a judge writes, against a plain loop of whole forward passes."""

import json
import random
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scorecal.judging.checkpoint import Checkpoint
from scorecal.judging.transformers import TransformersJudge

FAMILIES = ["llama", "qwen2", "gemma2", "gemma3", "phi", "gpt2", "bloom", "gpt_oss"]
TEXTS = [
    "Which?", "a dog sees the old river near a boat", "Rate the boat.",
    "the red man reads " * 6, "Say ends<|im_end|>here.", "Rate the boat.",
]  # fmt: skip


class _Loop:
    """The reference: one text at a time, the whole sequence anew for each token."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.turns = Checkpoint(folder, None, "float32", None).tokens

    @torch.no_grad()
    def probabilities(self, text):
        ids = list(self.turns.turn(text)[0])
        return self.network(torch.tensor([ids])).logits[0, -1].double().softmax(-1)

    @torch.no_grad()
    def greedy(self, text, steps):
        ids, written = list(self.turns.turn(text)[0]), []
        for _ in range(steps):
            token = int(self.network(torch.tensor([ids + written])).logits[0, -1].argmax())
            if token == self.tokenizer.eos_token_id:
                break
            written.append(token)
        return self.tokenizer.decode(written, skip_special_tokens=True)


@pytest.fixture
def judge(tiny):
    return TransformersJudge(tiny("llama"), dtype="float32")


def greedy(judge, texts=TEXTS, steps=12):
    return judge.generate(texts, max_tokens=steps, temperature=0.0, seed=0)


def sampled(judge, texts, seed=0, steps=8):
    return judge.generate(texts, max_tokens=steps, temperature=1.0, seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_a_plain_loop_for_prompts_of_any_length(family, tiny):
    loop, judge = _Loop(tiny(family)), TransformersJudge(tiny(family), dtype="float32")
    for network in (loop.network, judge._network):  # else each text is one token again and again
        head = network.get_output_embeddings()
        noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0))
        head.weight = torch.nn.Parameter(noise, requires_grad=False)
    expected = [loop.greedy(text, 12) for text in TEXTS]
    assert greedy(judge) == expected
    assert len(set(expected)) > 1


def test_a_text_ends_where_the_judge_ends_its_turn(tiny):
    loop = _Loop(tiny("llama"))
    judge = TransformersJudge(tiny("llama"), dtype="float32")
    for network in (loop.network, judge._network):  # an LM head that likes to end the turn
        network.get_output_embeddings().weight.data[loop.tokenizer.eos_token_id] *= 6
    texts = [f"the {word} boat" for word in ("old", "red", "small", "river", "dog")] * 4
    expected = [loop.greedy(text, 20) for text in texts]
    assert greedy(judge, texts, 20) == expected
    assert len({len(loop.tokenizer(text)["input_ids"]) for text in expected}) > 1


def test_a_sampled_text_depends_on_its_prompt_seed_and_place_alone(tiny, judge):
    texts = ["Say something."] * 3 + TEXTS
    first = sampled(judge, texts, seed=3)
    assert len(set(first[:3])) == 3  # equal prompts are answered differently
    assert sampled(judge, texts, seed=4) != first
    with torch.random.fork_rng():
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        assert sampled(judge, texts, seed=3) == first
        assert torch.equal(torch.random.get_rng_state(), before)  # nothing is seeded globally
    assert sampled(judge, texts[4:], seed=7) == first[4:]  # a list goes on where it was cut
    small = TransformersJudge(tiny("llama"), dtype="float32", batch_tokens=60)
    assert sampled(small, texts, seed=3) == first  # nor does the batch matter


def test_first_tokens_are_drawn_with_the_judges_own_probabilities(tiny, judge):
    loop, draws = _Loop(tiny("llama")), 2000
    probabilities = loop.probabilities("Rate the boat.")
    texts = judge.generate(["Rate the boat."] * draws, max_tokens=1, temperature=1.0, seed=0)
    readable = [
        (text, p.item())
        for token, p in enumerate(probabilities)
        if p > 0.005 and (text := loop.tokenizer.decode([token])).isprintable() and text.isascii()
    ]
    assert len(readable) > 5
    for text, p in readable:
        assert texts.count(text) == pytest.approx(draws * p, abs=4 * (draws * p * (1 - p)) ** 0.5)


def test_a_checkpoints_own_sampling_settings_change_nothing(tiny, judge, tmp_path):
    expected = sampled(judge, TEXTS)
    folder = shutil.copytree(tiny("llama"), tmp_path / "opinionated")
    own = {"do_sample": True, "top_k": 1, "repetition_penalty": 9.0, "max_new_tokens": 2}
    (folder / "generation_config.json").write_text(json.dumps({**own, "eos_token_id": [1, 2]}))
    other = TransformersJudge(str(folder), dtype="float32")
    assert sampled(other, TEXTS) == expected
    assert other._ends == {1, 2}  # where it ends a text is its own


def test_judging_and_generating_leave_each_other_alone(tiny, ask):
    prompts = ask(12)

    def judged(judge):
        answers = sorted(judge.judge(prompts), key=lambda answer: answer.index)
        return torch.stack([answer.logprobs for answer in answers])

    first, second = (TransformersJudge(tiny("llama"), dtype="float32") for _ in range(2))
    answers, texts = judged(first), greedy(first)
    assert greedy(second) == texts
    assert torch.equal(judged(second), answers)
    assert torch.equal(judged(first), answers)


def test_texts_that_do_not_fit_in_memory_are_written_in_smaller_batches(judge, monkeypatch):
    from scorecal.judging import transformers as module

    expected, whole = greedy(judge), module.continuations

    def small(network, rows, **options):
        if len(rows) > 2:
            raise torch.OutOfMemoryError
        return whole(network, rows, **options)

    monkeypatch.setattr(module, "continuations", small)
    assert greedy(judge) == expected
    assert judge.halved


def test_a_text_without_room_for_its_answer_is_refused(judge):
    with pytest.raises(ValueError, match=r"no room for an answer of 500: .* reads 512. Shorten"):
        greedy(judge, ["a dog near the river"], 500)


def test_no_text_means_no_work(judge):
    assert greedy(judge, []) == []


def test_a_generated_text_ends_before_it_spells_the_border_of_a_turn(tiny):
    tokens = Checkpoint(tiny("llama"), None, "float32", None).tokens
    spelled = "Score: 5<|im_end|>\n<|im_start|>user"
    ids = tokens._text_only.encode(spelled, add_special_tokens=False).ids
    assert tokens.answer(ids) == "Score: 5"
    assert tokens.answer(tokens.ids("a boat, <think>why?</think>")) == "a boat, <think>why?</think>"


def test_a_base_judge_continues_the_text_itself(tiny):
    judge = TransformersJudge(tiny("llama"), dtype="float32", chat_template="plain")
    loop = _Loop(tiny("llama"))
    loop.turns = judge._files.tokens
    texts = random.Random(0).sample(TEXTS[:4], 4)
    assert greedy(judge, texts) == [loop.greedy(text, 12) for text in texts]
