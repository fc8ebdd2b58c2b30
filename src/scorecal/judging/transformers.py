"""A judge run by Hugging Face transformers: a safetensors folder, a hub id, or a GGUF file.

Exactness, in the order in which it is easiest to lose:

* A label is tokenised together with the prompt that it follows, and a label that changes the
  prompt's own tokens is refused.
* A chunk is one row of packed tokens, a trie without padding: our own attention (`attention.py`)
  lets each token see its own beginning only. Rows are compared with the same rows run alone by the
  model's own attention, on every run; a model that computes otherwise gets plain padded batches.
* bf16 logits lie on a coarse grid, so only the last hidden state is taken from the model and the
  LM head is applied in float32.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.judging.attention import Cascade, Kept
from scorecal.judging.checkpoint import Checkpoint
from scorecal.judging.judge import Chunk, Encoded, Judge, Judgement, Prompt
from scorecal.judging.labels import LabelTree
from scorecal.judging.linear import can_pack, float32_head, log_softmax_at, pack_linears
from scorecal.judging.sampling import Beside, Draws, Scores, continuations
from scorecal.judging.trie import Packed, Tokens, continued, share
from scorecal.judging.weights import fast_dtype
from scorecal.progress import notice

# Fixed, so that an elicitation resumed with other batches gives the same bytes.
_PERPLEXITY_TOKENS = 1024
# What batching alone may move in a label's probability before a run is stopped.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.01}
# transformers calls attention functions by name, without a place for our own arguments.
_running: ContextVar[Cascade] = ContextVar("running")


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
        batch_tokens: tokens a chunk, at most.
        batch_mb: megabytes that a chunk's activations and the keys and values it shares may take.
    """

    def __init__(
        self,
        model: str | None = None,
        revision: str | None = None,
        dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto",
        device: str = "auto",
        chat_template: str | None = None,
        batch_tokens: int = 2048,
        batch_mb: int = 512,
    ) -> None:
        self.model = model
        self.revision = revision
        self.dtype = fast_dtype() if dtype == "auto" else dtype
        self.device = device
        self.chat_template = chat_template
        self.batch_tokens = batch_tokens
        self.batch_mb = batch_mb
        self.halved: list[int] = []
        self.tokens_computed = 0
        """Tokens that the network has run for `judge_chunk`, padding included."""
        self._files = Checkpoint(model, revision, self.dtype, chat_template)
        self._kept: list[tuple[Tokens, Kept]] = []
        self._packs = True
        self._checked = 0

    # Loading

    @functools.cached_property
    def _network(self) -> Any:
        from transformers import AttentionInterface, AutoModelForCausalLM, GenerationConfig

        network = self._files.from_pretrained(
            AutoModelForCausalLM, "weights", dtype=getattr(torch, self.dtype)
        )
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device. Set `data.judge.init_args.device: auto`.")
        AttentionInterface.register("scorecal", _attend)
        self._own_attention = network.config._attn_implementation
        self._ends = self._files.ends(network.generation_config.eos_token_id)
        # A checkpoint's own top_p or repetition penalty would write other texts than it is asked.
        network.generation_config = GenerationConfig()
        network = network.eval().requires_grad_(False).to(device)
        if "position_ids" not in inspect.signature(network.base_model.forward).parameters:
            self._run_plain("takes no positions of tokens")
        elif network.device.type == "cpu" and can_pack(network.dtype):
            # Networks of other kinds read their layers' weights themselves.
            pack_linears(network.base_model, self.batch_tokens)
        return network

    def _run_plain(self, reason: str) -> None:
        notice(f"judge {self.model!r} {reason}: its rows are run in plain batches")
        self._packs = False

    def identity(self) -> dict[str, str]:
        """Judge id and revision, dtype, tokenizer and chat template; see `Judge.identity`."""
        return self._files.identity()

    def engine(self) -> dict[str, str]:
        """Library versions and device; see `Judge.engine`."""
        import transformers

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": device if self.device == "auto" else self.device,
        }

    def encode(self, prompts: Sequence[Prompt], *, truncate: bool = False) -> list[Encoded]:
        """Tokenise prompts as they will be judged; see `Judge.encode`."""
        return self._files.encode(prompts, truncate=truncate)

    def decode(self, encoded: Encoded) -> str:
        """The text that the model reads; see `Judge.decode`."""
        return self._files.decode(encoded)

    def label_ids(self, prompt: Prompt) -> list[list[list[int]]]:
        """Token ids of every surface form of every level; see `Judge.label_ids`."""
        return self._files.tokens.label_ids(prompt)

    # The forward pass

    def plan(self, prompts: Sequence[Prompt], encoded: Sequence[Encoded]) -> list[Chunk]:
        """Subtrees of the trie of all prompts, within the budgets; see `Judge.plan`."""
        tails = [self._files.tokens.label_tree(prompt).paths for prompt in prompts]
        return share([row.input_ids for row in encoded], tails, self._budget)

    @property
    def _budget(self) -> int:
        """Tokens a chunk: three copies of the MLP's width and eight of the model's are alive."""
        config = self._files.config
        width = config.hidden_size
        inner = getattr(config, "intermediate_size", None) or 4 * width
        # Keys and values of a shared beginning are kept in all layers.
        numbers = 3 * inner + 8 * width + 2 * config.num_hidden_layers * width
        size = getattr(torch, self.dtype).itemsize
        return max(1, min(self.batch_tokens, (self.batch_mb << 20) // (numbers * size)))

    def judge_chunk(
        self, prompts: Sequence[Prompt], encoded: Sequence[Encoded], cuts: Sequence[int] = ()
    ) -> list[Judgement]:
        """Judge the prompts of one chunk; see `Judge.judge_chunk`."""
        work = [
            (row.input_ids, self._files.tokens.label_tree(prompt))
            for row, prompt in zip(encoded, prompts, strict=True)
        ]
        rows = self._judge_rows(work, cuts)
        if max(len(row) for row, _ in work) >= 2 * self._checked:
            rows = self._checked_rows(work, cuts, rows)
        return [
            Judgement(
                index,
                logprobs,
                torch.zeros_like(logprobs, dtype=torch.bool),
                logprobs.exp().sum().item(),
                normaliser,
            )
            for index, (logprobs, normaliser) in enumerate(rows)
        ]

    def _judge_rows(self, work: list["_Work"], cuts: Sequence[int]) -> list["_Row"]:
        return self._halving(lambda part: self._label_logprobs(part, cuts), work)

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

    def _label_logprobs(self, work: list["_Work"], cuts: Sequence[int]) -> list["_Row"]:
        # A sequence for each maximal label prefix: it passes through all the shorter ones.
        sequences = continued([row for row, _ in work], [tree.paths for _, tree in work])
        places, steps, sequence = [], [], 0
        for row, tree in work:
            for prefix, tokens in tree.children.items():
                at = next(at for at, path in enumerate(tree.paths)
                          if path[: len(prefix)] == prefix)  # fmt: skip
                places.append((sequence + at, len(row) - 1 + len(prefix)))
                steps.append(tokens)
            sequence += len(tree.paths)
        hidden = self._hidden(sequences, places, cuts)
        answers = zip(*self._log_softmax_at(hidden, steps), strict=True)
        results = []
        for _, tree in work:
            step: dict[tuple[int, ...], float] = {}
            normalisers = []
            for prefix, tokens in tree.children.items():
                values, normaliser = next(answers)
                step |= {(*prefix, token): at for token, at in zip(tokens, values, strict=True)}
                normalisers.append(normaliser)
            results.append((tree.level_logprobs(step), normalisers[0]))
        return results

    @torch.inference_mode()
    def _hidden(
        self, sequences: Sequence[Tokens], places: Sequence[tuple[int, int]], cuts: Sequence[int]
    ) -> Float[Tensor, "places width"]:
        """Last hidden states at (sequence, token) places."""
        _ = self._network  # which knows whether its rows can be packed
        if not self._packs:
            lines, columns = torch.tensor(places).T
            return self._padded(sequences)[lines, columns]
        above = self._beginning(sequences[0], cuts)
        packed = Packed(sequences, cuts[-1] if cuts else 0)
        return self._packed(Cascade(packed, above, self._network.device, keep=False))[
            [packed.place(sequence, token) for sequence, token in places]
        ]

    def _beginning(self, row: Tokens, cuts: Sequence[int]) -> Kept:
        """Keys and values of the pieces that a chunk begins with, run by themselves.

        Always by themselves: a resumed run then computes the same bytes as an unbroken one.
        """
        for depth, cut in enumerate(cuts):
            if depth < len(self._kept) and self._kept[depth][0] == row[:cut]:
                continue
            del self._kept[depth:]
            base, above = (cuts[depth - 1], self._kept[-1][1]) if depth else (0, {})
            cascade = Cascade(Packed([row[:cut]], base), above, self._network.device, keep=True)
            self._packed(cascade)
            assert cascade.kept is not None
            self._kept.append((row[:cut], cascade.kept))
        del self._kept[len(cuts) :]
        return self._kept[-1][1] if cuts else {}

    def _packed(self, cascade: Cascade) -> Float[Tensor, "tokens width"]:
        ids = torch.tensor([cascade.packed.ids], device=self._network.device)
        self.tokens_computed += ids.numel()
        token = _running.set(cascade)
        try:
            with self._attention("scorecal"):
                return self._network.base_model(
                    ids, position_ids=cascade.positions[None], use_cache=False
                ).last_hidden_state[0]
        finally:
            _running.reset(token)

    def _padded(self, sequences: Sequence[Tokens]) -> Float[Tensor, "rows tokens width"]:
        """Rows padded on the right: under a causal mask padding can't reach a real token."""
        width = max(map(len, sequences))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in sequences])
        self.tokens_computed += ids.numel()
        return self._network.base_model(
            ids.to(self._network.device), use_cache=False
        ).last_hidden_state

    @contextlib.contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        self._network.set_attn_implementation(name)
        try:
            yield
        finally:
            self._network.set_attn_implementation(self._own_attention)

    def _log_softmax_at(
        self, hidden: Float[Tensor, "places width"], tokens: list[list[int]]
    ) -> tuple[list[list[float]], list[float]]:
        cap = getattr(self._files.config, "final_logit_softcapping", None)
        return log_softmax_at(hidden, self._network.get_output_embeddings(), tokens, softcap=cap)

    def _checked_rows(
        self, work: list["_Work"], cuts: Sequence[int], rows: list["_Row"]
    ) -> list["_Row"]:
        """Compare a chunk's longest row, and one half as long, with the same rows alone.

        The first chunk is checked, and any with a row twice as long as those checked: windows and
        scaled positions show in long rows only.
        """
        counted, packs, self._packs = self.tokens_computed, self._packs, False
        if not self._checked:
            self._check_head(work[0])
        lengths = [len(row) for row, _ in work]
        ends = {lengths.index(max(lengths))}
        if 2 * min(lengths) <= max(lengths):
            ends.add(lengths.index(min(lengths)))
        alone = {at: self._label_logprobs([work[at]], ())[0][0].exp() for at in ends}
        self.tokens_computed, self._packs = counted, packs
        self._checked = max(lengths)
        tolerance = _TOLERANCE[self.dtype]
        while True:
            difference = max(
                (rows[at][0].exp() - row).abs().max().item() for at, row in alone.items()
            )
            if difference <= tolerance:
                return rows
            if not self._packs:
                break
            self._run_plain(
                "computes in a way that sharing tokens would change "
                f"(a label's probability by {difference:.2g})"
            )
            rows = self._judge_rows(work, cuts)
        raise RuntimeError(
            f"judge {self.model!r} is not safe to batch: a row's label probability differs by "
            f"{difference:.2g} from the same row alone (tolerance {tolerance}). "
            "Try `data.judge.init_args.dtype: float32`."
        )

    @torch.inference_mode()
    def _check_head(self, work: "_Work") -> None:
        """Stop where our own LM head gives other probabilities than the model's."""
        row, tree = work
        row = row[:8]  # what comes after the head is the same for any length
        ids = torch.tensor([list(row)], device=self._network.device)
        own = self._network(ids, use_cache=False).logits[0, -1].float().log_softmax(-1)
        tokens = tree.children[()]
        [ours], _ = self._log_softmax_at(self._padded([row])[:, -1], [tokens])
        difference = (torch.tensor(ours).exp() - own[tokens].cpu().exp()).abs().max().item()
        if not difference <= _TOLERANCE[self.dtype]:
            raise RuntimeError(
                f"judge {self.model!r} changes its logits after the LM head in a way that "
                f"scorecal doesn't know: probabilities differ by {difference:.2g}."
            )

    @torch.inference_mode()
    def perplexity(self, prompts: Sequence[str]) -> Float[Tensor, " prompts"]:
        """Perplexity of each text inside its user turn; see `Judge.perplexity`."""
        turns = [self._files.tokens.turn(text) for text in prompts]

        def mean_losses(part: list[tuple[Tokens, range]]) -> list[float]:
            places = [(at, token - 1) for at, (_, span) in enumerate(part) for token in span]
            targets = [[row[token]] for row, span in part for token in span]
            hidden = self._hidden([row for row, _ in part], places, ())
            flat = iter(self._log_softmax_at(hidden, targets)[0])
            return [-sum(next(flat)[0] for _ in span) / len(span) for _, span in part]

        counted = self.tokens_computed
        losses = torch.empty(len(prompts), dtype=torch.float64)
        for chunk in share([row for row, _ in turns], [[()]] * len(turns), _PERPLEXITY_TOKENS):
            part = [turns[index] for index in chunk.prompts]
            losses[chunk.prompts] = torch.tensor(
                self._halving(mean_losses, part), dtype=torch.float64
            )
        self.tokens_computed = counted
        return losses.exp()

    def generate(
        self, prompts: Sequence[str], *, max_tokens: int, temperature: float, seed: int
    ) -> list[str]:
        """Continue each user turn; see `Judge.generate`.

        A text depends on its prompt, its seed and the rounding of its batch, nothing else.
        """
        rows = self._files.tokens.rows_to_continue(prompts, max_tokens)

        def draws(part: list[int]) -> Scores | None:
            return Draws(temperature, [seed + at for at in part]) if temperature else None

        return self._continued(rows, [max_tokens] * len(rows), draws)

    def answer(
        self,
        encoded: Sequence[Encoded],
        *,
        max_tokens: int,
        scores: Callable[[list[Tokens]], Scores] | None = None,
    ) -> list[str]:
        """The likeliest text after each prompt; see `Judge.answer`.

        Args:
            encoded: the prompts.
            max_tokens: that an answer has, at most.
            scores: makes, for rows that are continued together, the scores of which the largest
                is taken instead of the likeliest token.
        """
        rows = [row.input_ids for row in encoded]
        rooms = [self._files.tokens.room(row, max_tokens) for row in rows]
        with float32_head(self._network):
            return self._continued(
                rows, rooms, lambda part: scores([rows[at] for at in part]) if scores else None
            )

    def beside(self, rows: Sequence[Tokens]) -> Beside:
        """This judge's next-token logits while another one continues the rows."""
        return Beside(self._network, [len(row) for row in rows])

    def vocabulary(self) -> dict[str, int]:
        """The id of every token; loads no weights."""
        return self._files.tokenizer.get_vocab()

    def _continued(
        self,
        rows: Sequence[Tokens],
        rooms: Sequence[int],
        scores: Callable[[list[int]], Scores | None],
    ) -> list[str]:
        """Texts that continue rows, which are batched by room and length for little padding."""
        network = self._network
        texts = [""] * len(rows)

        def run(part: list[int]) -> list[list[int]]:
            return continuations(
                network,
                [rows[index] for index in part],
                ends=self._ends,
                max_tokens=rooms[part[0]],
                scores=scores(part),
            )

        def write(part: list[int]) -> None:
            for index, ids in zip(part, self._halving(run, part), strict=True):
                texts[index] = self._files.tokens.answer(ids)

        part: list[int] = []
        for index in sorted(range(len(rows)), key=lambda at: (-rooms[at], len(rows[at]))):
            full = len(rows[index]) * (len(part) + 1) > self._budget
            if part and (full or rooms[index] != rooms[part[0]]):
                write(part)
                part = []
            part.append(index)
        if part:
            write(part)
        return texts


_Work = tuple[Tokens, LabelTree]  # a prompt's tokens, and its labels
_Row = tuple[Tensor, float]  # label log-probabilities and the log-normaliser


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers' models call for attention while a packed chunk is running."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _running.get().attend(
        module, query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux
    ), None


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        "can't allocate memory" in str(error)  # the CPU allocator raises a plain RuntimeError
    )
