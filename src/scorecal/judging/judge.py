"""What a judge is asked and what it answers."""

import math
from abc import ABC, abstractmethod
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
    """A prompt exactly as the model reads it, control tokens visible in `text`."""

    input_ids: list[int]
    text: str


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
        """Tokenise prompts as they will be judged.

        Raises:
            ValueError: a prompt is longer than the context and `truncate` is false.
        """

    @abstractmethod
    def label_ids(self, prompt: Prompt) -> list[list[list[int]]]:
        """Token ids of every surface form of every level, as they follow this prompt."""

    @abstractmethod
    def chunks(self, lengths: Sequence[int]) -> list[list[int]]:
        """Split prompts of these token lengths into the batches in which they are judged."""

    @abstractmethod
    def judge(self, prompts: Sequence[Prompt], *, truncate: bool = False) -> Iterator[Judgement]:
        """Judge all prompts, in any order."""

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
        """Continue each user turn by up to `max_tokens` sampled tokens."""
