"""Tiny random judges, made here: nothing is downloaded and nothing comes from outside."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from scorecal.judging.elicit import elicit
from scorecal.judging.judge import Prompt
from scorecal.judging.plan import item_questions, make_plan, prior_questions
from scorecal.judging.store import Store
from scorecal.judging.task import Task, load_items, templates
from scorecal.judging.transformers import TransformersJudge
from scorecal.scale import Scale

FILES = ("judgements.parquet", "items.parquet", "manifest.json")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [
    "the", "a", "small", "old", "red", "boat", "dog", "river", "man", "woman", "child", "plays",
    "reads", "sees", "under", "over", "near", "Score", "Sentence", "Rate", "Task", "similar",
    "meaning", "integer", "number", "random", "from", "to", "between", "which", "answer", "with",
]  # fmt: skip


class _Watched(TransformersJudge):
    """Counts the chunks it judges and is interrupted after `patience` of them."""

    def __init__(self, model, patience=None, **options):
        super().__init__(model, **{"dtype": "float32", "batch_tokens": 150, **options})
        self.patience, self.chunks_judged = patience, 0

    def judge_chunk(self, prompts, encoded, cuts=()):
        if self.chunks_judged == self.patience:
            raise KeyboardInterrupt
        self.chunks_judged += 1
        return super().judge_chunk(prompts, encoded, cuts)


class _Job:
    """A task of 14 pairs; `run` elicits it as the command does."""

    def __init__(self, folder: Path, **task):
        fields = {"sentence1": "sentence1", "sentence2": "sentence2"}
        given = {"name": "sts", "template": "sts.j2", "fields": fields, **task}
        self.task = Task(**given)
        self.templates = templates(self.task)
        self.template = self.templates[0]
        for template in self.templates:  # the hundred have tests of their own
            few = template.random_numbers()[:8]
            template.random_numbers = lambda few=few: few
        self.data = folder / "pairs.jsonl"
        self.store = folder / "store"
        source = random.Random(0)
        words = ["the", "old", "boat", "a", "red", "dog"]
        self.rows = [
            {
                "id": f"r{number}",
                "split": "dev" if number < 9 else "test",
                "sentence1": " ".join(source.choices(words, k=source.randint(1, 15))),
                "sentence2": " ".join(source.choices(words, k=source.randint(1, 15))),
                "score": number % 6,
            }
            for number in range(14)
        ]

    def parts(self):
        self.data.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        items = load_items(self.task, str(self.data))
        questions = item_questions(self.templates, items) + prior_questions(self.templates)
        return self.task, self.templates, items, questions

    def run(self, judge, folder=None, **options):
        return elicit(judge, *self.parts(), str(folder or self.store), **options)

    def contents(self):
        return {name: (self.store / name).read_bytes() for name in FILES}

    def plan(self, judge):
        _, templates, _, questions = self.parts()
        return make_plan(judge, templates, questions, truncate=False)


class _Finished(NamedTuple):
    folder: Path
    files: dict[str, bytes]
    chunks: int


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured rates go where the test ends, and no test asks a network."""
    monkeypatch.setenv("SCORECAL_CACHE", str(tmp_path / "cache"))
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def sentence(source: random.Random, words: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(words))


def save_tokenizer(
    folder: Path,
    *,
    chat: str | None = CHAT,
    bos: bool = False,
    digits: bool = True,
    tens: bool = False,
) -> None:
    """A byte-level BPE; `digits` splits numbers into digits, as Qwen's and Llama's do.

    With `tens`, and without `digits`, 10 is one token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    source = random.Random(0)
    corpus = [sentence(source, 12) + ". Score: 3 or 4?\n" for _ in range(200)]
    corpus += ["10 10"] * 200 if tens else []
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if digits
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(CONTROL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>" if bos else None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat and ("{{ bos_token }}" + chat if bos else chat),
    ).save_pretrained(folder)


def save_network(folder: Path, family: str, seed: int = 0) -> None:
    import transformers

    # Initialised wide, so that the distributions are far from uniform, as a real judge's are.
    common = {
        "vocab_size": 416,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = {
        "llama": lambda: transformers.LlamaConfig(**common, tie_word_embeddings=False),
        "qwen2": lambda: transformers.Qwen2Config(**common, tie_word_embeddings=True),
        "gemma2": lambda: transformers.Gemma2Config(
            **common, **windows, query_pre_attn_scalar=8, final_logit_softcapping=5.0
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **common, **windows, query_pre_attn_scalar=8
        ),
        "phi": lambda: transformers.PhiConfig(**common),  # its LM head has a bias
        "granite": lambda: transformers.GraniteConfig(**common, logits_scaling=8.0),
        "mistral": lambda: transformers.MistralConfig(**common, sliding_window=8),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=416, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.1
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **common, **windows, num_local_experts=2, num_experts_per_tok=1
        ),
        # Positions enter its attention in a way of its own, and the next has none: rows of these
        # can't be packed.
        "bloom": lambda: transformers.BloomConfig(
            vocab_size=416, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.1
        ),
        "mamba": lambda: transformers.MambaConfig(
            vocab_size=416, hidden_size=32, num_hidden_layers=2, initializer_range=0.1
        ),
    }[family]()
    torch.manual_seed(seed)
    network = transformers.AutoModelForCausalLM.from_config(config)
    head = network.get_output_embeddings()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    digits = transformers.AutoTokenizer.from_pretrained(folder)("0123456789")["input_ids"][-10:]
    head.weight.data[digits] *= 4  # a judge often wants to answer with a number
    network.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`tiny("llama")` is the folder of a random model of that family, made once."""
    made: dict[tuple, str] = {}

    def folder(family: str = "qwen2", seed: int = 0, **tokenizer: object) -> str:
        key = (family, seed, *sorted(tokenizer.items()))
        if key not in made:
            path = tmp_path_factory.mktemp("judges") / f"tiny-{family}"
            save_tokenizer(path, **{"bos": family.startswith(("llama", "gemma")), **tokenizer})
            with torch.random.fork_rng():
                save_network(path, family, seed)
            made[key] = str(path)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def ask() -> Callable[..., list[Prompt]]:
    """`ask(40)` are 40 prompts of mixed length, most of which share their beginning."""

    def prompts(count: int, scale: str = "0-5", seed: int = 0, cue: str = "") -> list[Prompt]:
        source = random.Random(seed)
        labels = tuple((label,) for label in Scale.parse(scale).labels)
        return [
            Prompt(
                "" if index % 7 == 6 else f"Rate how similar, {scale}.\n\n",
                sentence(source, source.choice([1, 2, 3, 5, 8, 13, 21])),
                "\nScore:",
                cue,
                labels,
                f"dev.jsonl row {index + 1}",
            )
            for index in range(count)
        ]

    return prompts


@pytest.fixture(scope="session")
def watched(tiny: Callable[..., str]) -> Callable[..., _Watched]:
    """`watched(patience=3)` is a tiny judge that is interrupted after three chunks."""

    def judge(family: dict | None = None, **options: object) -> _Watched:
        return _Watched(tiny("llama", **(family or {})), **options)

    return judge


@pytest.fixture
def job(tmp_path: Path) -> _Job:
    return _Job(tmp_path)


@pytest.fixture(scope="session")
def make_job() -> type[_Job]:
    return _Job


@pytest.fixture(scope="session")
def unbroken(
    tmp_path_factory: pytest.TempPathFactory, watched: Callable[..., _Watched]
) -> _Finished:
    """An elicitation that nothing disturbed."""
    job, judge = _Job(tmp_path_factory.mktemp("unbroken")), watched()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCORECAL_CACHE", str(job.store.with_name("cache")))
        job.run(judge)
    return _Finished(job.store, job.contents(), judge.chunks_judged)


@pytest.fixture
def finished(job: _Job, unbroken: _Finished) -> Store:
    """The job's own store, finished."""
    return Store(shutil.copytree(unbroken.folder, job.store))
