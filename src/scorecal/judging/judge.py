"""What a judge is asked and what it answers."""

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor


class Unsupported(RuntimeError):
    """The judge's engine can't give what was asked for."""


class Prompt(NamedTuple):
    """A question whose answer is one of the labels.

    `before + item + after` is the user turn, in which control tokens are plain text; `cue` begins
    the assistant turn, and a label's surface forms follow it directly.
    """

    before: str
    item: str
    after: str
    cue: str
    labels: tuple[tuple[str, ...], ...]
    where: str = ""
    """Where the prompt comes from, for messages: `dev.jsonl row 12`."""


class Judgement(NamedTuple):
    """One prompt's label log-probabilities under the full vocabulary (natural logarithm)."""

    # NamedTuple has a method `index`; a field of that name hides it, harmlessly.
    index: int  # type: ignore[assignment]
    logprobs: Float[Tensor, " levels"]
    censored: Bool[Tensor, " levels"]
    label_mass: float
    logsumexp: float = math.nan
    """Log-normaliser of the next-token logits: logit = log-probability + logsumexp."""


class Encoded(NamedTuple):
    """A prompt exactly as the model reads it."""

    input_ids: "array[int]"
    """Token ids, control tokens included; empty where a server applies its own template."""
    text: str = ""
    """What is sent where there are no token ids."""


class Chunk(NamedTuple):
    """Prompts that are judged together."""

    prompts: list[int]
    cuts: list[int] = []
    """Ends of the pieces, in tokens, of what all these prompts begin with. Each piece is run by
    itself and its keys and values serve every chunk below it."""
    tokens: int = 0
    """Tokens that the judge computes for this chunk, pieces that it is the first to use included;
    0 where the engine decides."""


class Judge(ABC):
    """A frozen language model. Constructing one loads nothing."""

    model: str | None
    """Who judges; None in a configuration that names nobody."""
    halved: list[int]
    """Sizes of the batches that ran out of memory and were halved."""

    @abstractmethod
    def identity(self) -> dict[str, str]:
        """What must be equal for two judgements to be comparable; loads no weights."""

    @abstractmethod
    def engine(self) -> dict[str, str]:
        """Library versions and hardware: recorded, never compared."""

    @abstractmethod
    def encode(self, prompts: Sequence[Prompt], *, truncate: bool = False) -> list[Encoded]:
        """Prompts as they will be judged.

        Raises:
            ValueError: a prompt is longer than the context and `truncate` is false.
        """

    @abstractmethod
    def decode(self, encoded: Encoded) -> str:
        """The text that the model reads, control tokens visible."""

    @abstractmethod
    def label_ids(self, prompt: Prompt) -> list[list[list[int]]]:
        """Token ids of every surface form of every level, as they follow this prompt."""

    @abstractmethod
    def plan(self, prompts: Sequence[Prompt], encoded: Sequence[Encoded]) -> list[Chunk]:
        """Split a job into chunks, in the order in which they are best judged."""

    @abstractmethod
    def judge_chunk(
        self, prompts: Sequence[Prompt], encoded: Sequence[Encoded], cuts: Sequence[int] = ()
    ) -> list[Judgement]:
        """Judge the prompts of one chunk; the answers' indices count within it."""

    @abstractmethod
    def perplexity(self, prompts: Sequence[str]) -> Float[Tensor, " prompts"]:
        """exp(mean negative log-likelihood) of each text's tokens as a user turn.

        Raises:
            Unsupported: the engine gives no prompt log-probabilities.
        """

    @abstractmethod
    def generate(
        self, prompts: Sequence[str], *, max_tokens: int, temperature: float, seed: int
    ) -> list[str]:
        """Continue each user turn by up to `max_tokens` tokens; text up to the end of the turn.

        Temperature 0 takes the likeliest token. A prompt's own seed is `seed` plus its place in
        the list: equal prompts are answered differently, and the tail of a list with `seed` moved
        on is answered as in the whole list.

        Raises:
            Unsupported: the engine doesn't generate text.
        """

    @abstractmethod
    def answer(self, encoded: Sequence[Encoded], *, max_tokens: int) -> list[str]:
        """The likeliest text after each prompt, cue included, up to the end of the turn.

        It has up to `max_tokens` tokens, fewer where the context ends.

        Raises:
            Unsupported: the engine doesn't generate text.
        """

    def expected(self, prompts: Sequence[Prompt], encoded: Sequence[Encoded]) -> dict[str, float]:
        """What a job will take, as far as the engine can tell: `seconds`, `cost`."""
        return {}

    def judge(self, prompts: Sequence[Prompt], *, truncate: bool = False) -> Iterator[Judgement]:
        """Judge all prompts, chunk by chunk, in any order."""
        encoded = self.encode(prompts, truncate=truncate)
        for chunk in self.plan(prompts, encoded):
            answers = self.judge_chunk(
                [prompts[index] for index in chunk.prompts],
                [encoded[index] for index in chunk.prompts],
                chunk.cuts,
            )
            for answer in answers:
                yield answer._replace(index=chunk.prompts[answer.index])
