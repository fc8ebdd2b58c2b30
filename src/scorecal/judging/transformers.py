"""A judge run by Hugging Face transformers: a safetensors folder, a hub id, or a GGUF file.

Exactness, in the order in which it is easiest to lose:

* A label is tokenised together with the prompt that it follows, and a label that changes the
  prompt's own tokens is refused.
* Rows are padded on the right and read at their last real token: under a causal mask padding can't
  reach it, so no attention mask is needed. Each run compares one padded row with the row alone.
* Rows of a batch share the prefix that they have in common: it is run once, and its key-value
  cache serves them all. The same comparison covers it, since the row alone shares nothing.
* bf16 logits lie on a coarse grid, so only the last hidden state is taken from the model and the
  LM head is applied in float32.
"""

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.judging.judge import Encoded, Judge, Judgement, Prompt, Unsupported
from scorecal.judging.labels import LabelTree
from scorecal.judging.tokens import PromptTokenizer
from scorecal.judging.weights import folder_names, quiet, weights_folder

_VOCABULARY_BLOCK = 16384
# What batching alone may move in a label's probability before a run is stopped.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.01}


class TransformersJudge(Judge):
    """A causal language model in this process.

    Args:
        model: folder with safetensors, hub id, GGUF file (or a folder that holds one), or
            `package:NAME`, a GGUF inside an installed Python package.
        revision: revision of a hub id.
        dtype: of the weights; the LM head always runs in float32. `auto` is bfloat16 on a GPU
            or a CPU with instructions for it, else float32.
        device: `auto` takes a GPU where there is one.
        chat_template: a Jinja file used instead of the tokenizer's template; `plain` continues
            the text without any template (base models).
        batch_tokens: padded tokens a batch.
    """

    def __init__(
        self,
        model: str | None = None,
        revision: str | None = None,
        dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto",
        device: str = "auto",
        chat_template: str | None = None,
        batch_tokens: int = 2048,
    ) -> None:
        self.model = model
        self.revision = revision
        self.dtype = _fast_dtype() if dtype == "auto" else dtype
        self.device = device
        self.chat_template = chat_template
        self.batch_tokens = batch_tokens
        self.halved: list[int] = []
        self._checked: set[str] = set()
        self._prefix: tuple[list[int], Any] = ([], None)

    # Loading

    @functools.cached_property
    def _folder(self) -> str:
        return weights_folder(self.model, self.dtype)

    def _from_pretrained(self, auto: Any, what: str, **options: Any) -> Any:
        from safetensors import SafetensorError

        quiet()
        try:
            return auto.from_pretrained(self._folder, revision=self.revision or "main", **options)
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"can't load the {what} of judge {self.model!r}: {reason} "
                "Check `--data.judge.model`."
            ) from error

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = self._from_pretrained(AutoTokenizer, "tokenizer")
        if not tokenizer.is_fast:
            raise ValueError(f"judge {self.model!r} has no fast tokenizer, which scorecal needs.")
        if self.chat_template and self.chat_template != "plain":
            try:
                tokenizer.chat_template = Path(self.chat_template).read_text(encoding="utf-8")
            except OSError as error:
                raise ValueError(
                    f"can't read the chat template {self.chat_template!r}: {error.strerror}. "
                    "Set `data.judge.init_args.chat_template` to a Jinja file or to `plain`."
                ) from error
        if tokenizer.chat_template is None and self.chat_template is None:
            raise ValueError(
                f"judge {self.model!r} has no chat template (a base model?). Set "
                "`data.judge.init_args.chat_template` to `plain` or to a Jinja file."
            )
        return tokenizer

    @functools.cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        return self._from_pretrained(AutoConfig, "configuration").get_text_config()

    @functools.cached_property
    def _network(self) -> Any:
        from transformers import AutoModelForCausalLM

        network = self._from_pretrained(
            AutoModelForCausalLM, "weights", dtype=getattr(torch, self.dtype)
        )
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device. Set `data.judge.init_args.device: auto`.")
        return network.eval().requires_grad_(False).to(device)

    def identity(self) -> dict[str, str]:
        """Judge id and revision, dtype, tokenizer and chat template; see `Judge.identity`."""
        folder = Path(self._folder)
        if folder.is_dir():
            names = folder_names(folder)
        else:
            names = {"judge": self._folder, "revision": str(self._config._commit_hash)}
        template = self._tokenizer.chat_template if self.chat_template != "plain" else "plain"
        return {
            **names,
            "dtype": self.dtype,
            "tokenizer": _sha256(self._tokenizer.backend_tokenizer.to_str()),
            "chat_template": _sha256(str(template)),
        }

    def engine(self) -> dict[str, str]:
        """Library versions and device; see `Judge.engine`."""
        import transformers

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": device if self.device == "auto" else self.device,
        }

    @functools.cached_property
    def _tokens(self) -> PromptTokenizer:
        limit = getattr(self._config, "max_position_embeddings", None)
        return PromptTokenizer(
            self._tokenizer, str(self.model), limit, plain=self.chat_template == "plain"
        )

    def encode(self, prompts: Sequence[Prompt], *, truncate: bool = False) -> list[Encoded]:
        """Tokenise prompts as they will be judged; see `Judge.encode`."""
        return [
            Encoded(ids, self._tokenizer.decode(ids, skip_special_tokens=False))
            for ids in self._tokens.rows(prompts, truncate=truncate)
        ]

    def label_ids(self, prompt: Prompt) -> list[list[list[int]]]:
        """Token ids of every surface form of every level; see `Judge.label_ids`."""
        return self._tokens.label_ids(prompt)

    # The forward pass

    def chunks(self, lengths: Sequence[int]) -> list[list[int]]:
        """Batches of similar length, longest first, within the token budget."""
        chunks: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            # Longest first: a chunk's first row sets its padded width.
            if chunks and (len(chunks[-1]) + 1) * lengths[chunks[-1][0]] <= self.batch_tokens:
                chunks[-1].append(index)
            else:
                chunks.append([index])
        return chunks

    def judge(self, prompts: Sequence[Prompt], *, truncate: bool = False) -> Iterator[Judgement]:
        """Judge all prompts, batch by batch; see `Judge.judge`."""
        rows = self._tokens.rows(prompts, truncate=truncate)
        for chunk in self.chunks([len(row) for row in rows]):
            trees = [LabelTree(self.label_ids(prompts[index])) for index in chunk]
            results = self._judge_rows([rows[index] for index in chunk], trees)
            self._check_head(rows[chunk[-1]], trees[-1])
            if len(chunk) > 1:
                padded = len({len(rows[index]) for index in chunk}) > 1
                self._check_batch(rows[chunk[-1]], trees[-1], results[-1][0], padded)
            for index, (logprobs, normaliser) in zip(chunk, results, strict=True):
                yield Judgement(
                    index,
                    logprobs,
                    torch.zeros_like(logprobs, dtype=torch.bool),
                    logprobs.exp().sum().item(),
                    normaliser,
                )

    def _judge_rows(self, rows: list[list[int]], trees: list[LabelTree]) -> list["_Row"]:
        def run(part: list[Any]) -> list["_Row"]:
            return self._label_logprobs([row for row, _ in part], [tree for _, tree in part])

        return self._halving(run, list(zip(rows, trees, strict=True)))

    def _halving(self, run: Callable[[list[Any]], list[Any]], work: list[Any]) -> list[Any]:
        """One result for each piece of work, in halves where a batch doesn't fit in memory."""
        try:
            return run(work)
        except (RuntimeError, MemoryError) as error:
            if len(work) == 1 or not _is_out_of_memory(error):
                raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.halved.append(len(work))
        half = len(work) // 2
        return self._halving(run, work[:half]) + self._halving(run, work[half:])

    @torch.inference_mode()
    def _label_logprobs(self, rows: list[list[int]], trees: list[LabelTree]) -> list["_Row"]:
        # A row for each maximal label prefix: it passes through all the shorter ones.
        sequences = [
            row + list(path) for row, tree in zip(rows, trees, strict=True) for path in tree.paths
        ]
        shared = _common_prefix(sequences, min(map(len, rows)) - 1)
        hidden = self._hidden([line[shared:] for line in sequences], sequences[0][:shared])
        places, steps = [], []
        sequence = 0
        for row, tree in zip(rows, trees, strict=True):
            for path in tree.paths:
                for depth in range(len(path) + 1):
                    places.append((sequence, len(row) - 1 + depth - shared))
                    steps.append(tree.children.get(path[:depth], []))
                sequence += 1
        lines, columns = torch.tensor(places).T
        logprobs, normaliser = self._log_softmax_at(hidden[lines, columns], steps)
        results, start = [], 0
        for tree in trees:
            first = start
            step: dict[tuple[int, ...], float] = {}
            for path in tree.paths:
                for depth in range(len(path) + 1):
                    prefix = path[:depth]
                    for token, value in zip(
                        tree.children.get(prefix, []), logprobs[start], strict=True
                    ):
                        step[(*prefix, token)] = value
                    start += 1
            results.append((tree.level_logprobs(step), normaliser[first]))
        return results

    def _hidden(
        self, sequences: list[list[int]], prefix: Sequence[int] = ()
    ) -> Float[Tensor, "rows tokens width"]:
        """Last hidden states of rows padded on the right, each continuing the same prefix."""
        width = max(map(len, sequences))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in sequences])
        cache = None
        if prefix:
            if self._prefix[0] != list(prefix):
                self._prefix = (list(prefix), self._prefix_cache(list(prefix)))
            cache = copy.deepcopy(self._prefix[1])  # a forward pass grows it in place
            cache.batch_repeat_interleave(len(sequences))
        return self._network.base_model(
            ids.to(self._network.device), cache=cache, use_cache=cache is not None
        ).last_hidden_state

    def _prefix_cache(self, prefix: list[int]) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        ids = torch.tensor([prefix], device=self._network.device)
        self._network.base_model(ids, cache=cache, use_cache=True)
        return cache

    def _log_softmax_at(
        self, hidden: Float[Tensor, "places width"], tokens: list[list[int]]
    ) -> tuple[list[list[float]], list[float]]:
        """Full-vocabulary log-softmax in float32 of each place at its own tokens.

        Also the log-normaliser of each place.
        """
        hidden = hidden.float()
        normaliser = hidden.new_full((len(hidden),), -torch.inf)
        head = self._network.get_output_embeddings()
        size = head.weight.shape[0]
        picked = [(place, token) for place, row in enumerate(tokens) for token in row]
        lines = torch.tensor([place for place, _ in picked], device=hidden.device)
        columns = torch.tensor([token for _, token in picked], device=hidden.device)
        values = hidden.new_empty(len(picked))
        # In blocks: a float32 copy of a large vocabulary's head would be the peak of memory.
        for start in range(0, size, _VOCABULARY_BLOCK):
            block = slice(start, start + _VOCABULARY_BLOCK)
            bias = None if head.bias is None else head.bias[block].float()
            scores = torch.nn.functional.linear(hidden, head.weight[block].float(), bias)
            cap = getattr(self._config, "final_logit_softcapping", None)
            if cap:
                scores = (scores / cap).tanh() * cap
            normaliser = torch.logaddexp(normaliser, scores.logsumexp(-1))
            here = (columns >= start) & (columns < start + _VOCABULARY_BLOCK)
            values[here] = scores[lines[here], columns[here] - start]
        logits = (values - normaliser[lines]).tolist()
        result, at = [], 0
        for row in tokens:
            result.append(logits[at : at + len(row)])
            at += len(row)
        return result, normaliser.tolist()

    @torch.inference_mode()
    def _check_batch(self, row: list[int], tree: LabelTree, batched: Tensor, padded: bool) -> None:
        """Stop where batching moves a label's probability: once with padding, once without."""
        kind = "padded" if padded else "even"
        if kind in self._checked:
            return
        [(alone, _)] = self._label_logprobs([row], [tree])
        tolerance = _TOLERANCE[self.dtype]
        difference = (alone.exp() - batched.exp()).abs().max().item()
        if not difference <= tolerance:
            raise RuntimeError(
                f"judge {self.model!r} is not safe to batch: a {kind} row's label probability "
                f"differs by {difference:.2g} from the same row alone (tolerance {tolerance}). "
                "Try `data.judge.init_args.dtype: float32`."
            )
        self._checked.add(kind)

    @torch.inference_mode()
    def _check_head(self, row: list[int], tree: LabelTree) -> None:
        """Stop where our own LM head gives other probabilities than the model's."""
        if "head" in self._checked:
            return
        ids = torch.tensor([row], device=self._network.device)
        own = self._network(ids, use_cache=False).logits[0, -1].float().log_softmax(-1)
        tokens = tree.children[()]
        [ours], _ = self._log_softmax_at(self._hidden([row])[:, -1], [tokens])
        difference = (torch.tensor(ours).exp() - own[tokens].cpu().exp()).abs().max().item()
        if not difference <= _TOLERANCE[self.dtype]:
            raise RuntimeError(
                f"judge {self.model!r} changes its logits after the LM head in a way that "
                f"scorecal doesn't know: probabilities differ by {difference:.2g}."
            )
        self._checked.add("head")

    @torch.inference_mode()
    def perplexity(self, prompts: Sequence[str]) -> Float[Tensor, " prompts"]:
        """Perplexity of each text inside its user turn; see `Judge.perplexity`."""
        head, foot = self._tokens.frame
        result = torch.empty(len(prompts), dtype=torch.float64)
        bare = len(self._tokens.ids(head))
        rows = [self._tokens.prompt_ids(Prompt(text, "", "", "", ())) for text in prompts]
        tail = len(self._tokens.ids(foot)) if foot else 0

        def mean_losses(part: list[list[int]]) -> list[Tensor]:
            losses = []
            for row, hidden in zip(part, self._hidden(part), strict=True):
                # The first token has no prediction where nothing stands before it.
                start, stop = max(bare, 1), len(row) - tail
                targets = [[token] for token in row[start:stop]]
                values, _ = self._log_softmax_at(hidden[start - 1 : stop - 1], targets)
                losses.append(-torch.tensor(values, dtype=torch.float64).mean())
            return losses

        for chunk in self.chunks([len(row) for row in rows]):
            result[chunk] = torch.stack(self._halving(mean_losses, [rows[i] for i in chunk]))
        return result.exp()

    def generate(
        self, prompts: Sequence[str], *, max_tokens: int, temperature: float, seed: int
    ) -> list[str]:
        """Sampling is not built yet."""
        raise Unsupported("TransformersJudge doesn't generate text yet.")


_Row = tuple[Tensor, float]  # label log-probabilities and the log-normaliser


def _common_prefix(sequences: list[list[int]], limit: int) -> int:
    """Length of the common prefix worth sharing: none for a single row."""
    if len(sequences) == 1:
        return 0
    first, last = min(sequences)[:limit], max(sequences)[:limit]
    return next(
        (at for at, pair in enumerate(zip(first, last, strict=True)) if len(set(pair)) > 1), limit
    )


def _fast_dtype() -> str:
    cpu = torch.cpu.get_capabilities()
    fast = torch.cuda.is_available() or cpu.get("avx512_bf16") or cpu.get("amx_bf16")
    return "bfloat16" if fast else "float32"


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        "can't allocate memory" in str(error)  # the CPU allocator raises a plain RuntimeError
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
