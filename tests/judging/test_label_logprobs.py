"""Label log-probabilities against a plain forward pass, one prompt at a time."""

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scorecal.judging import linear
from scorecal.judging.transformers import TransformersJudge

FAMILIES = ["llama", "qwen2", "gemma2", "gemma3", "phi"]


class _Plain:
    """The reference: the whole model, one sequence, every logit, log-softmax in float64."""

    def __init__(self, folder, dtype=torch.float32):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def prompt_ids(self, prompt):
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.before + prompt.item + prompt.after}],
            tokenize=False,
            add_generation_prompt=True,
        )
        return self.ids(text + prompt.cue)

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def logits(self, ids):
        return self.network(torch.tensor([ids])).logits[0].double()

    def next_logprobs(self, ids):
        return self.logits(ids)[-1].log_softmax(-1)

    def sequence_logprob(self, ids, continuation):
        steps = self.logits(ids + continuation).log_softmax(-1)
        return sum(
            steps[len(ids) - 1 + depth, token].item() for depth, token in enumerate(continuation)
        )


def judged(judge, prompts, **options):
    answers = sorted(judge.judge(prompts, **options), key=lambda answer: answer.index)
    assert [answer.index for answer in answers] == list(range(len(prompts)))
    return answers


def stacked(answers):
    return torch.stack([answer.logprobs for answer in answers])


@pytest.mark.parametrize("family", FAMILIES)
def test_label_logprobs_equal_a_full_log_softmax_of_each_prompt_alone(family, tiny, ask):
    plain, prompts = _Plain(tiny(family)), ask(35)
    judge = TransformersJudge(tiny(family), dtype="float32", batch_tokens=600)
    answers = judged(judge, prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = plain.prompt_ids(prompt)
        tokens = [plain.ids(label)[0] for (label,) in prompt.labels]
        expected = plain.next_logprobs(ids)[tokens]
        torch.testing.assert_close(answer.logprobs.double(), expected, rtol=0, atol=1e-5)
        assert answer.label_mass == pytest.approx(expected.exp().sum().item(), abs=1e-6)
        assert answer.logsumexp == pytest.approx(
            plain.logits(ids)[-1].logsumexp(-1).item(), abs=1e-4
        )
        assert not answer.censored.any()
    assert stacked(answers).std(0).min() > 0.1  # not all alike


@pytest.mark.parametrize("family", FAMILIES)
def test_no_composition_of_batches_moves_a_result(family, tiny, ask):
    prompts = ask(20, "1-10") + ask(2, "1-10")  # two of them twice
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    alone = stacked(
        judged(TransformersJudge(tiny(family), dtype="float32", batch_tokens=1), prompts)
    )
    for batch_tokens in (300, 100_000):
        judge = TransformersJudge(tiny(family), dtype="float32", batch_tokens=batch_tokens)
        shuffled = judged(judge, [prompts[index] for index in order])
        again = torch.empty_like(alone)
        again[order] = stacked(shuffled)
        torch.testing.assert_close(again, alone, rtol=0, atol=1e-5)
    assert judge.tokens_computed < 0.7 * sum(len(row.input_ids) for row in judge.encode(prompts))


def test_a_vocabulary_read_in_blocks_gives_the_same_numbers(tiny, ask, monkeypatch):
    def numbers():
        return stacked(judged(TransformersJudge(tiny("phi"), dtype="float32"), ask(8)))

    whole = numbers()
    monkeypatch.setattr(linear, "_VOCABULARY_BLOCK", 37)
    torch.testing.assert_close(numbers(), whole, rtol=0, atol=1e-5)


def enumerated(plain, ids, labels):
    """p(label) = P(label's tokens) - P(those tokens continued towards another label)."""
    tokens = [plain.ids(label) for label in labels]
    probability = {}

    def p(sequence):
        key = tuple(sequence)
        if key not in probability:
            probability[key] = math.exp(plain.sequence_logprob(ids, list(key)))
        return probability[key]

    result = []
    for own in tokens:
        longer = {
            tuple(other[: len(own) + 1])
            for other in tokens
            if len(other) > len(own) and other[: len(own)] == own
        }
        result.append(p(own) - sum(p(step) for step in longer))
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(("scale", "count"), [("1-10", 4), ("0-100", 1), ("0-1:0.25", 3)])
def test_labels_are_disjoint_events_as_counted_by_enumeration(family, scale, count, tiny, ask):
    plain, prompts = _Plain(tiny(family)), ask(count, scale)
    answers = judged(TransformersJudge(tiny(family), dtype="float32"), prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        labels = [label for (label,) in prompt.labels]
        expected = enumerated(plain, plain.prompt_ids(prompt), labels)
        torch.testing.assert_close(answer.logprobs.double(), expected.log(), rtol=0, atol=1e-4)
        assert answer.label_mass <= 1 + 1e-6
        assert answer.label_mass == pytest.approx(expected.sum().item(), abs=1e-5)


def test_a_label_that_begins_another_loses_the_mass_of_that_continuation(tiny, ask):
    plain, [prompt] = _Plain(tiny()), ask(1, "1-10")
    [answer] = judged(TransformersJudge(tiny(), dtype="float32"), [prompt])
    ids, one, zero = plain.prompt_ids(prompt), plain.ids("1"), plain.ids("0")
    p_one, p_ten = (math.exp(plain.sequence_logprob(ids, label)) for label in (one, one + zero))
    assert answer.logprobs[0].exp().item() == pytest.approx(p_one - p_ten, abs=1e-6)
    assert answer.logprobs[9].exp().item() == pytest.approx(p_ten, abs=1e-6)


def test_the_surface_forms_of_a_level_are_added(tiny, ask):
    plain, [prompt] = _Plain(tiny()), ask(1)
    forms = tuple((label, f" {label}", f" {label}.0") for (label,) in prompt.labels)
    [answer] = judged(TransformersJudge(tiny(), dtype="float32"), [prompt._replace(labels=forms)])
    # " 3.0" goes through " 3", whose mass it takes and gives back: " 3" alone already holds both.
    ids = plain.prompt_ids(prompt)
    expected = [
        sum(math.exp(plain.sequence_logprob(ids, plain.ids(form))) for form in level[:2])
        for level in forms
    ]
    assert answer.logprobs.exp().tolist() == pytest.approx(expected, abs=1e-6)


def test_bfloat16_label_logprobs_do_not_lie_on_the_grid_of_bfloat16_logits(tiny, ask):
    prompts, folder = ask(20), tiny("llama")
    plain = _Plain(folder, torch.bfloat16)
    tokens = [plain.ids(str(label))[0] for label in range(6)]
    raw = torch.stack([plain.logits(plain.prompt_ids(prompt))[-1][tokens] for prompt in prompts])
    answers = judged(TransformersJudge(folder, dtype="bfloat16"), prompts)
    ours = stacked(answers).double()
    logits = ours + torch.tensor([[answer.logsumexp] for answer in answers])

    def share_on_grid(values):
        return ((values.bfloat16().double() - values).abs() < 1e-6).double().mean().item()

    assert share_on_grid(raw) == 1
    assert share_on_grid(logits) < 0.05
    for step in (1 / 8, 1 / 16):
        steps = (ours[:, 1:] - ours[:, :1]) / step
        assert ((steps - steps.round()).abs() > 0.01).double().mean() > 0.9
    exact = stacked(judged(TransformersJudge(folder, dtype="float32"), prompts)).double()
    torch.testing.assert_close(ours.exp(), exact.exp(), rtol=0, atol=0.05)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    MemoryError(),
]


class Small(TransformersJudge):
    """Runs out of memory above `rows` rows."""

    rows, error = 2, OUT_OF_MEMORY[0]

    def _label_logprobs(self, work, cuts):
        if len(work) > self.rows:
            raise self.error
        return super()._label_logprobs(work, cuts)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_out_of_memory_halves_the_batch_says_so_and_goes_on(error, tiny, ask, monkeypatch):
    monkeypatch.setattr(Small, "error", error)
    prompts = ask(11)
    expected = stacked(judged(TransformersJudge(tiny(), dtype="float32"), prompts))
    judge = Small(tiny(), dtype="float32", batch_tokens=100_000)
    torch.testing.assert_close(stacked(judged(judge, prompts)), expected, rtol=0, atol=1e-5)
    assert judge.halved == [11, 5, 3, 6, 3, 3]  # 11 -> 5 (2, 3 -> 1 2) and 6 (3, 3)


def test_one_row_that_does_not_fit_and_other_faults_are_raised(tiny, ask, monkeypatch):
    monkeypatch.setattr(Small, "rows", 0)
    with pytest.raises(torch.OutOfMemoryError):
        judged(Small(tiny(), dtype="float32"), ask(4))
    monkeypatch.setattr(Small, "error", RuntimeError("another fault"))
    judge = Small(tiny(), dtype="float32")
    with pytest.raises(RuntimeError, match="another fault"):
        judged(judge, ask(4))
    assert judge.halved == []


class Noisy(TransformersJudge):
    """Rows of a batch leak into each other, as a wrong mask would let them."""

    def _hidden(self, sequences, places, cuts):
        hidden = super()._hidden(sequences, places, cuts)
        return hidden + 0.5 if len(sequences) > 1 else hidden


def test_the_run_stops_where_batching_changes_results(tiny, ask):
    with pytest.raises(RuntimeError, match=r"not safe to batch.*differs by .*tolerance 0\.0001"):
        judged(Noisy(tiny(), dtype="float32"), ask(12))


@pytest.mark.parametrize("words", [["a small boat", "the old river dog"], ["a boat", "a boat"]])
def test_the_check_needs_no_luck_with_lengths(words, tiny, ask):
    """Rows of equal length share a prefix all the same."""
    prompts = [ask(1)[0]._replace(item=item) for item in words]
    with pytest.raises(RuntimeError, match="not safe to batch"):
        judged(Noisy(tiny(), dtype="float32"), prompts)


@pytest.mark.parametrize("count", [1, 12])
def test_a_model_that_changes_its_logits_after_the_head_is_refused(count, tiny, ask):
    judge = TransformersJudge(tiny("granite"), dtype="float32")  # divides its logits by 8
    with pytest.raises(RuntimeError, match="changes its logits after the LM head"):
        judged(judge, ask(count))


@pytest.mark.parametrize(
    ("family", "mode"), [("llama", None), ("qwen2", None), ("llama", "plain"), ("qwen2", "plain")]
)
def test_perplexity_equals_a_plain_loop_over_the_tokens_of_the_users_words(family, mode, tiny):
    plain = _Plain(tiny(family))
    texts = ["Rate the boat.", "Which integer between 0 and 5?", "a dog", "the old man reads " * 9]
    judge = TransformersJudge(tiny(family), dtype="float32", chat_template=mode, batch_tokens=120)
    expected = []
    for text in texts:
        if mode == "plain":
            before = [0] if family == "llama" else []  # llama's beginning-of-text token
            head, own, foot = before, plain.ids(text), []
        else:
            bos = "<|endoftext|>" if family == "llama" else ""
            head = plain.ids(f"{bos}<|im_start|>user\n")
            own, foot = plain.ids(text), plain.ids("<|im_end|>\n<|im_start|>assistant\n")
        logprobs = plain.logits(head + own + foot).log_softmax(-1)
        losses = [
            -logprobs[at - 1, token].item()
            for at, token in enumerate(head + own)
            if at >= max(len(head), 1)
        ]
        expected.append(torch.tensor(losses).mean().exp().item())
    assert judge.perplexity(texts).tolist() == pytest.approx(expected, rel=1e-4)


def test_a_perplexity_that_does_not_fit_in_memory_is_taken_in_smaller_batches(tiny, monkeypatch):
    texts = ["Rate the boat.", "a dog", "Which integer?", "the old man", "to a river"]
    judge = TransformersJudge(tiny(), dtype="float32")
    expected = judge.perplexity(texts)
    hidden = TransformersJudge._hidden

    def small(self, sequences, places, cuts):
        if len(sequences) > 2:
            raise torch.OutOfMemoryError
        return hidden(self, sequences, places, cuts)

    monkeypatch.setattr(TransformersJudge, "_hidden", small)
    torch.testing.assert_close(judge.perplexity(texts), expected, rtol=1e-5, atol=0)
    assert judge.halved
