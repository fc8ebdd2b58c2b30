"""A judge behind an OpenAI-compatible endpoint: vLLM, SGLang, llama.cpp, hosted APIs."""

import functools
import math
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.judging.checkpoint import Checkpoint
from scorecal.judging.endpoint import Endpoint, Malformed, Refused, choices
from scorecal.judging.judge import Chunk, Encoded, Judge, Judgement, Prompt, Unsupported
from scorecal.judging.labels import LabelTree
from scorecal.judging.next_tokens import Line, NextTokens, Steps, chat
from scorecal.judging.trie import in_order
from scorecal.progress import notice

_CHUNK = 256  # prompts; what an interruption loses at most
# Digits, accents, scripts and white space, in which tokenizers differ.
_SPECIMEN = "Rate 0 to 100: na\u00efve caf\u00e9, x = 3.14159; \u6f22\u5b57.\n\n\tIt's  the END"


class ServerJudge(Judge):
    """A model behind an OpenAI-compatible endpoint; the key comes from OPENAI_API_KEY.

    Args:
        model: the model's name at the server.
        url: base URL, as http://localhost:8000/v1; empty takes OPENAI_BASE_URL.
        tokenizer: folder or hub id of the judge's tokenizer. With it prompts are rendered and
            tokenised here; without it they are sent as text to the chat endpoint.
        chat_template: a Jinja file used instead of the tokenizer's template; `plain` continues
            the text without any template (base models).
        revision: what tells this state of the model from others of that name.
        concurrency: requests under way at once.
        prompts_per_request: prompts sent in one request, where a tokenizer is given.
        retries: how often a failed request is repeated.
        timeout: seconds to wait for an answer.
        price: of a million prompt tokens, for the estimate.
    """

    def __init__(
        self,
        model: str | None = None,
        url: str = "",
        tokenizer: str | None = None,
        chat_template: str | None = None,
        revision: str = "served",
        concurrency: int = 8,
        prompts_per_request: int = 16,
        retries: int = 5,
        timeout: float = 120.0,
        price: float | None = None,
    ) -> None:
        self.model = model
        self.url = url
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.revision = revision
        self.concurrency = concurrency
        self.prompts_per_request = prompts_per_request
        self.retries = retries
        self.timeout = timeout
        self.price = price
        self.halved: list[int] = []

    # What is known without a request

    @functools.cached_property
    def _endpoint(self) -> Endpoint:
        for name in ("concurrency", "prompts_per_request"):
            if getattr(self, name) < 1:
                raise ValueError(f"`data.judge.init_args.{name}` is at least 1.")
        return Endpoint(self.url, self._name, self.retries, self.timeout)

    @functools.cached_property
    def _next(self) -> NextTokens:
        return NextTokens(self._endpoint, self._files and self._files.tokenizer)

    @property
    def _name(self) -> str:
        if not self.model:
            raise ValueError(
                "no judge is named. Set `--data.judge.model` to the model's name at the server."
            )
        return self.model

    @functools.cached_property
    def _files(self) -> Checkpoint | None:
        if self.tokenizer:
            # The data type of weights, of which none are loaded.
            return Checkpoint(self.tokenizer, None, "bfloat16", self.chat_template)
        if self.chat_template:
            raise ValueError(
                "without the judge's tokenizer the server applies its own chat template, got "
                f"{self.chat_template!r}. Set `data.judge.init_args.tokenizer` too."
            )
        return None

    def identity(self) -> dict[str, str]:
        """The server's word for the judge; see `Judge.identity`. Needs no request.

        How log-probabilities were read is not part of it: they are on one scale whichever way.
        """
        own = {"judge": self._name, "revision": self.revision, "dtype": "served"}
        if self._files is None:
            return {**own, "tokenizer": "server", "chat_template": "server"}
        return {**self._files.identity(), **own}

    def engine(self) -> dict[str, str]:
        """The server and how it gives log-probabilities; see `Judge.engine`."""
        from importlib.metadata import version

        way = {"logprobs": str(self._next.way)} if self._next.way else {}
        return {"server": self._endpoint.url, "openai": version("openai"), **way}

    def encode(self, prompts: Sequence[Prompt], *, truncate: bool = False) -> list[Encoded]:
        """Token ids, or text where only the server has the tokenizer; see `Judge.encode`."""
        if self._files is not None:
            return self._files.encode(prompts, truncate=truncate)
        for prompt in prompts:
            _check_text_labels(prompt)
        return [
            Encoded(array("i"), prompt.before + prompt.item + prompt.after) for prompt in prompts
        ]

    def decode(self, encoded: Encoded) -> str:
        """The text that the model, or without a tokenizer its template, reads."""
        return encoded.text if self._files is None else self._files.decode(encoded)

    def label_ids(self, prompt: Prompt) -> list[list[list[int]]]:
        """See `Judge.label_ids`; empty lists where only the server has the tokenizer."""
        if self._files is None:
            return [[[] for _ in level] for level in prompt.labels]
        return self._files.tokens.label_ids(prompt)

    def plan(self, prompts: Sequence[Prompt], encoded: Sequence[Encoded]) -> list[Chunk]:
        """Prompts that begin alike stand together: a server's prefix cache holds a while."""
        return in_order(encoded, _CHUNK)

    def _labels(self, prompt: Prompt) -> tuple[LabelTree, dict[int, str]]:
        """The labels' tree, and the text of its tokens where ids may not be what is listed."""
        if self._files is not None:
            return self._files.tokens.label_tree(prompt), {}
        # Each form is one token, and its number here stands for its unknown id.
        forms = [form for level in prompt.labels for form in level]
        numbers = iter(range(len(forms)))
        return LabelTree([[[next(numbers)] for _ in level] for level in prompt.labels]), dict(
            enumerate(forms)
        )

    # Judging

    def judge_chunk(
        self, prompts: Sequence[Prompt], encoded: Sequence[Encoded], cuts: Sequence[int] = ()
    ) -> list[Judgement]:
        """Judge prompts in concurrent requests; see `Judge.judge_chunk`."""
        trees = []
        lines: list[Line] = []
        steps_of: list[tuple[int, tuple[int, ...]]] = []
        for index, (prompt, row) in enumerate(zip(prompts, encoded, strict=True)):
            tree, spelled = self._labels(prompt)
            trees.append(tree)
            for prefix, tokens in tree.children.items():
                text = row.text if self._files is None else [*row.input_ids, *prefix]
                lines.append(Line(text, tokens, spelled, len(tree.children) == 1, prompt.where))
                steps_of.append((index, prefix))
        if lines and self._next.way is None:
            self._connect(lines[0])
        answers: list[dict[tuple[int, ...], Steps]] = [{} for _ in prompts]
        found = self._in_parallel(self._next.after, lines)
        for (index, prefix), steps in zip(steps_of, found, strict=True):
            answers[index][prefix] = steps
        return [
            _judgement(index, tree, steps)
            for index, (tree, steps) in enumerate(zip(trees, answers, strict=True))
        ]

    def _in_parallel(
        self, answer: Callable[[list[Any]], list[Any]], work: Sequence[Any]
    ) -> list[Any]:
        """One result for each piece of work, several to a request."""
        _ = self._names  # connects, or fails at once, before the threads do
        size = 1 if self._files is None else self.prompts_per_request
        batches = [list(work[at : at + size]) for at in range(0, len(work), size)]
        with ThreadPoolExecutor(self.concurrency) as pool:
            return [result for results in pool.map(answer, batches) for result in results]

    # The first request

    def _connect(self, line: Line) -> None:
        """Find out what the endpoint can do, and whether it is the judge that is meant."""
        names = self._names
        way = self._next.connect(line)
        # A hosted API answers with the dated name of what was asked for.
        served = self._endpoint.served
        if names and served and self._name not in names and self._name not in served:
            raise ValueError(
                f"{self._endpoint.url} has no model {self.model!r}, it serves "
                f"{', '.join(sorted(names))}. Set `--data.judge.model`."
            )
        if self._files is not None:
            self._check_tokenizer(self._files)
        notice(f"{self._endpoint.url} {way}")

    @functools.cached_property
    def _names(self) -> set[str]:
        return self._endpoint.names()

    def _check_tokenizer(self, files: Checkpoint) -> None:
        """Stop where the server reads a text as other tokens than we do."""
        head, foot = files.tokens.frame
        text = head + _SPECIMEN + foot
        ours = files.tokenizer(text, add_special_tokens=False)["input_ids"]
        theirs = self._endpoint.tokens(text)
        if theirs is not None:
            same, count = theirs == ours, len(theirs)
        else:
            # Then only the number of tokens is seen, with or without one at the beginning.
            count = self._endpoint.count("/completions", {"prompt": text})
            same = count - len(ours) in (0, 1)
        if not same:
            raise ValueError(
                f"the tokenizer {self.tokenizer!r} is not that of {self.model!r} at "
                f"{self._endpoint.url}: a text has {len(ours)} tokens here and {count} there, or "
                "others. Set `data.judge.init_args.tokenizer` to the judge's own."
            )

    # Beside judging

    def perplexity(self, prompts: Sequence[str]) -> Float[Tensor, " prompts"]:
        """Perplexity of each text inside its user turn; see `Judge.perplexity`."""
        reason = f"The server of {self.model!r} gives no prompt log-probabilities."
        if self._files is None:
            raise Unsupported(reason)
        turns = [self._files.tokens.turn(text) for text in prompts]

        def mean_losses(batch: list[tuple[Sequence[int], range]]) -> list[float]:
            def read(answer: dict[str, Any]) -> list[float]:
                losses = []
                for (row, span), choice in zip(batch, choices(answer, len(batch)), strict=True):
                    values = (choice.get("logprobs") or {}).get("token_logprobs") or []
                    own = values[span.start : span.stop]
                    if len(values) < len(row) or None in own:
                        raise Unsupported(reason)
                    losses.append(-math.fsum(own) / len(own))
                    if not losses[-1] >= 0:  # NaN too
                        raise Malformed(f"{losses[-1]} is no mean log-likelihood.")
                return losses

            rows = [list(row) for row, _ in batch]
            body = {"prompt": rows, "echo": True, "logprobs": 1, "max_tokens": 0}
            return self._endpoint.ask("/completions", body, read)

        try:
            losses = self._in_parallel(mean_losses, turns)
        except Refused:
            raise Unsupported(reason) from None
        return torch.tensor(losses, dtype=torch.float64).exp()

    def generate(
        self, prompts: Sequence[str], *, max_tokens: int, temperature: float, seed: int
    ) -> list[str]:
        """Sample continuations; each prompt has a seed of its own."""
        sampling = {"max_tokens": max_tokens, "temperature": temperature}

        def row(text: str) -> Encoded:
            if self._files is None:
                return Encoded(array("i"), text)
            return Encoded(self._files.tokens.rows_to_continue([text], max_tokens)[0])

        def sample(batch: list[tuple[int, str]]) -> list[str]:
            return [self._write(row(text), {**sampling, "seed": seed + at}) for at, text in batch]

        return self._in_parallel(sample, list(enumerate(prompts)))

    def answer(self, encoded: Sequence[Encoded], *, max_tokens: int) -> list[str]:
        """The likeliest text after each prompt; see `Judge.answer`."""

        def room(row: Encoded) -> int:
            if self._files is None:
                return max_tokens
            return self._files.tokens.room(row.input_ids, max_tokens)

        def write(batch: list[Encoded]) -> list[str]:
            return [
                self._write(row, {"max_tokens": room(row), "temperature": 0.0}) for row in batch
            ]

        return self._in_parallel(write, encoded)

    def _write(self, row: Encoded, sampling: dict[str, Any]) -> str:
        body = chat(row.text) if self._files is None else {"prompt": list(row.input_ids)}

        def read(answer: Any) -> str:
            [choice] = choices(answer, 1)
            if self._files is None:
                return choice["message"]["content"] or ""
            return self._files.tokens.within_turn(choice["text"])

        return self._endpoint.ask(self._next.path, {**body, **sampling}, read)

    def expected(self, prompts: Sequence[Prompt], encoded: Sequence[Encoded]) -> dict[str, float]:
        """Seconds and cost, by timing one wave of requests; see `Judge.expected`."""
        if not encoded:
            return {"seconds": 0.0, "cost": 0.0}
        wave = encoded[:: max(1, len(encoded) // self.concurrency)][: self.concurrency]
        lines = sum(len(self._labels(prompt)[0].children) for prompt in prompts)

        def send(row: Encoded) -> int:
            body = chat(row.text) if self._files is None else {"prompt": list(row.input_ids)}
            return self._endpoint.count(self._next.path, body)

        _ = self._names
        started = time.monotonic()
        with ThreadPoolExecutor(self.concurrency) as pool:
            tokens = sum(pool.map(send, wave))
        waves = lines / len(wave)
        seconds = waves * (time.monotonic() - started)
        if self.price is None:
            return {"seconds": seconds}
        return {"seconds": seconds, "cost": waves * tokens * self.price / 1e6}


def _judgement(index: int, tree: LabelTree, answers: dict[tuple[int, ...], Steps]) -> Judgement:
    step = {
        (*prefix, token): value
        for prefix, steps in answers.items()
        for token, value in steps.logprobs.items()
    }
    bounded = {(*prefix, token) for prefix, steps in answers.items() for token in steps.bounded}
    logprobs, censored = tree.level_logprobs(step, bounded), tree.censored(bounded)
    on_scale = all(steps.on_scale for steps in answers.values())
    mass = logprobs[~censored].exp().sum().item() if on_scale else math.nan
    return Judgement(index, logprobs, censored, mass)


def _check_text_labels(prompt: Prompt) -> None:
    """Refuse what can't be judged exactly without the judge's tokenizer."""
    if prompt.cue:
        raise ValueError(
            f"a chat endpoint can't begin its answer with the template's cue {prompt.cue!r}. Move "
            "it to the template's block `question`, or set `data.judge.init_args.tokenizer`."
        )
    forms = [form for level in prompt.labels for form in level]
    for form in forms:
        if any(other != form and other.startswith(form) for other in forms):
            raise ValueError(
                f"without the judge's tokenizer the label {form!r} can't be told from one that "
                "begins with it. Set `data.judge.init_args.tokenizer`, or change "
                "`data.task.scale`."
            )
