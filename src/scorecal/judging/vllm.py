"""A judge run by vLLM's offline engine: large judges, on many GPUs or nodes.

* Prompts go in as token ids, in sorted order, so that the engine's prefix cache finds what
  neighbours share. Labels of several tokens are asked for step by step behind the same prefix.
* The engine is asked for the very tokens of the labels (`logprob_token_ids`): the values are those
  of the full-vocabulary log-softmax, before any temperature.
* The LM head runs in float32 here too: bf16 logits lie on a coarse grid.
* The engine runs in processes of its own, as vLLM has it: it binds threads, seeds and opens process
  groups, which belong to Lightning in this one.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.judging.checkpoint import Checkpoint
from scorecal.judging.judge import Chunk, Encoded, Judge, Judgement, Prompt
from scorecal.judging.trie import in_order
from scorecal.judging.weights import fast_dtype

_CHUNK = 1024
_MOST_TOKENS = 128  # token ids that vLLM takes in one question
# Options that change what the judge answers: part of who it is.
_CHANGING = ("hf_overrides", "kv_cache_dtype", "load_format", "quantization", "quantization_config")
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings, a screenful, are about its own build
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is the command's answer
    "VLLM_NO_USAGE_STATS": "1",
    # A fork would inherit this process's threads and, where a GPU was looked for, a dead CUDA.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class VllmJudge(Judge):
    """A causal language model in vLLM's engine.

    Args:
        model: as `TransformersJudge` takes it.
        revision: revision of a hub id.
        dtype: of the weights; the LM head always runs in float32. `auto` as in
            `TransformersJudge`.
        chat_template: a Jinja file used instead of the tokenizer's template; `plain` continues
            the text without any template (base models).
        options: options of `vllm.LLM`, passed on as they are: `tensor_parallel_size`,
            `pipeline_parallel_size`, `distributed_executor_backend`, `gpu_memory_utilization`,
            `max_model_len`, ...
    """

    def __init__(
        self,
        model: str | None = None,
        revision: str | None = None,
        dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto",
        chat_template: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.revision = revision
        self.dtype = fast_dtype() if dtype == "auto" else dtype
        self.chat_template = chat_template
        self.options = options or {}
        self.halved: list[int] = []  # the engine plans its own memory

    # What is known without the engine

    @functools.cached_property
    def _files(self) -> Checkpoint:
        limit = self.options.get("max_model_len")
        return Checkpoint(self.model, self.revision, self.dtype, self.chat_template, limit)

    def identity(self) -> dict[str, str]:
        """The same as any engine's for these files; see `Judge.identity`."""
        changing = {name: self.options[name] for name in _CHANGING if name in self.options}
        options = {"options": json.dumps(changing, sort_keys=True)} if changing else {}
        return {**self._files.identity(), **options}

    def engine(self) -> dict[str, str]:
        """Library versions and hardware; see `Judge.engine`."""
        vllm = _vllm()
        from vllm.platforms import current_platform

        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": current_platform.get_device_name(),
            "options": json.dumps(self.options, sort_keys=True, default=str),
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

    def plan(self, prompts: Sequence[Prompt], encoded: Sequence[Encoded]) -> list[Chunk]:
        """Sorted prompts, so that the engine's prefix cache hits; see `Judge.plan`."""
        return in_order(encoded, _CHUNK)

    # The engine

    @functools.cached_property
    def _engine(self) -> Any:
        vllm = _vllm()
        from vllm.platforms import current_platform

        names = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
        ours = {
            "model": self._files.folder,
            "revision": self.revision,
            "dtype": self.dtype,
            "enable_prefix_caching": True,
            "logprobs_mode": "raw_logprobs",
            "trust_remote_code": False,
        }
        for name in self.options:
            if name not in names or name in ours:
                raise ValueError(
                    f"`data.judge.init_args.options` are options of vllm.LLM, got {name!r}, which "
                    + ("scorecal sets itself." if name in ours else "vLLM doesn't know.")
                    + " Remove it."
                )
        defaults: dict[str, Any] = {"use_tqdm_on_load": False}
        if current_platform.is_cpu():
            defaults |= _cpu_defaults(self.options)
        given = {**defaults, **self.options}
        given["hf_overrides"] = {"head_dtype": "float32", **(given.get("hf_overrides") or {})}
        try:
            with _own_terminal():
                return vllm.LLM(**ours, **given)
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise ValueError(
                f"vLLM can't start judge {self.model!r}: {' '.join(lines[:3])} "
                "Check `--data.judge.model` and `data.judge.init_args.options`."
            ) from error

    def _run(self, rows: Sequence[Sequence[int]], params: Any) -> list[Any]:
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        return self._engine.generate(prompts, params, use_tqdm=False)

    def _step_logprobs(
        self, rows: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> list[dict[int, float]]:
        """Log-probability after each row of each of its own tokens."""
        vllm = _vllm()
        params = {
            wanted: vllm.SamplingParams(
                max_tokens=1, temperature=0, logprob_token_ids=list(wanted), detokenize=False
            )
            for wanted in set(map(tuple, tokens))
        }
        outputs = self._run(rows, [params[tuple(wanted)] for wanted in tokens])
        steps = []
        for wanted, output in zip(tokens, outputs, strict=True):
            [found] = output.outputs[0].logprobs or [{}]
            values = {token: found[token].logprob for token in wanted if token in found}
            if len(values) < len(wanted) or any(map(math.isnan, values.values())):
                raise RuntimeError(
                    f"vLLM must give the log-probabilities of tokens {list(wanted)}, it gave "
                    f"{values} for judge {self.model!r}. Try another version of vLLM."
                )
            steps.append(values)
        return steps

    def judge_chunk(
        self, prompts: Sequence[Prompt], encoded: Sequence[Encoded], cuts: Sequence[int] = ()
    ) -> list[Judgement]:
        """Judge the prompts of one chunk; see `Judge.judge_chunk`."""
        trees = [self._files.tokens.label_tree(prompt) for prompt in prompts]
        asked = [
            (index, prefix, children[at : at + _MOST_TOKENS])
            for index, tree in enumerate(trees)
            for prefix, children in tree.children.items()
            for at in range(0, len(children), _MOST_TOKENS)
        ]
        values = self._step_logprobs(
            [[*encoded[index].input_ids, *prefix] for index, prefix, _ in asked],
            [tokens for _, _, tokens in asked],
        )
        steps: list[dict[tuple[int, ...], float]] = [{} for _ in trees]
        for (index, prefix, _), found in zip(asked, values, strict=True):
            steps[index] |= {(*prefix, token): value for token, value in found.items()}
        answers = []
        for index, (tree, step) in enumerate(zip(trees, steps, strict=True)):
            logprobs = tree.level_logprobs(step)
            censored = torch.zeros_like(logprobs, dtype=torch.bool)
            answers.append(Judgement(index, logprobs, censored, logprobs.exp().sum().item()))
        return answers

    def perplexity(self, prompts: Sequence[str]) -> Float[Tensor, " prompts"]:
        """Perplexity of each text inside its user turn; see `Judge.perplexity`."""
        turns = [self._files.tokens.turn(text) for text in prompts]
        # No alternatives, only the prompt's own tokens; such requests read no prefix cache.
        params = _vllm().SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False
        )
        losses = []
        outputs = self._run([row for row, _ in turns], params)
        for (row, span), output in zip(turns, outputs, strict=True):
            own = [output.prompt_logprobs[at][row[at]].logprob for at in span]
            losses.append(-torch.tensor(own, dtype=torch.float64).mean())
        return torch.stack(losses).exp()

    def generate(
        self, prompts: Sequence[str], *, max_tokens: int, temperature: float, seed: int
    ) -> list[str]:
        """Continue each user turn; equal prompts get different texts. See `Judge.generate`."""
        tokens = self._files.tokens
        params = [
            self._writing(max_tokens, temperature=temperature, seed=seed + index)
            for index in range(len(prompts))
        ]
        rows = tokens.rows_to_continue(prompts, max_tokens)
        return [tokens.answer(output.outputs[0].token_ids) for output in self._run(rows, params)]

    def answer(self, encoded: Sequence[Encoded], *, max_tokens: int) -> list[str]:
        """The likeliest text after each prompt; see `Judge.answer`."""
        tokens, rows = self._files.tokens, [row.input_ids for row in encoded]
        params = [self._writing(tokens.room(row, max_tokens), temperature=0) for row in rows]
        return [tokens.answer(output.outputs[0].token_ids) for output in self._run(rows, params)]

    def _writing(self, max_tokens: int, **sampling: Any) -> Any:
        end = self._files.tokenizer.eos_token_id
        return _vllm().SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=[] if end is None else [end],
            detokenize=False,
            **sampling,
        )


def _vllm() -> Any:
    """The package, with settings that the user hasn't made himself."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise ValueError(
            f"VllmJudge needs the package vllm, which can't be imported: {error}. "
            "Run `pip install vllm` and then install scorecal, in an environment of their own."
        ) from error
    return vllm


def _cpu_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """What a CPU build needs to use its cores and to cache short prompts."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    if all(options.get(name, 1) == 1 for name in sizes):
        # vLLM's own choice keeps one core idle: of two cores it uses one.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return {
        "block_size": 32,  # by default 128: shorter prefixes are never cached
        "enforce_eager": True,  # compiling takes longer than most jobs
        "kv_cache_memory_bytes": 1 << 30,  # by default 92 % of the machine's memory
        "max_model_len": -1,  # what fits in that
    }


@contextlib.contextmanager
def _own_terminal() -> Iterator[None]:
    """Processes that start in here write to stderr and leave Ctrl-C to this one.

    Stdout is the command's answer. While the engine starts, vLLM loses a Ctrl-C or waits for a
    worker that it has ended: it takes effect at the end of the block.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    resource_tracker.ensure_running()  # started later, it would undo the mask
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # new processes inherit it
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if interrupts and callable(handler):
        handler(signal.SIGINT, None)
