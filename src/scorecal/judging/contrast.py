"""A judge's answers in contrast to an assistant's, over the full vocabulary (paper 2, eq. 1)."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, inf

from scorecal.judging.judge import Encoded, Judge
from scorecal.judging.sampling import Beside
from scorecal.judging.transformers import TransformersJudge
from scorecal.judging.trie import Tokens


@dataclass(frozen=True)
class Contrasted:
    """An assistant, and how much of it is subtracted from each token.

    Attributes:
        judge: the assistant, which has the main judge's tokenizer.
        strength: λ, its weight.
        temperature: t, which tempers the assistant.
        plausibility: tokens count that the main judge finds at least this share as likely as its
            likeliest (Li et al. 2023); 0 counts all.
    """

    judge: Judge
    strength: float
    temperature: float = 1.0
    plausibility: float = 0.1

    def __post_init__(self) -> None:
        if not math.isfinite(self.strength):
            raise ValueError(f"the contrast's strength must be a number, got {self.strength}.")
        if not 0 < self.temperature < inf:
            raise ValueError(f"the contrast's temperature is above 0, got {self.temperature}.")
        if not 0 <= self.plausibility <= 1:
            raise ValueError(
                f"the contrast's plausibility is a share from 0 to 1, got {self.plausibility}."
            )

    def entry(self) -> dict[str, Any]:
        """How the manifest describes it."""
        return {
            "judge": self.judge.identity(),
            "strength": self.strength,
            "temperature": self.temperature,
            "plausibility": self.plausibility,
        }

    def pair_with(self, main: Judge) -> tuple[TransformersJudge, TransformersJudge]:
        """The main judge and the assistant, which can write together; loads no weights.

        Raises:
            ValueError: they can't.
        """
        for judge in (main, self.judge):
            if not isinstance(judge, TransformersJudge):
                raise ValueError(
                    "the contrast over the full vocabulary runs two judges side by side in this "
                    f"process, got a {type(judge).__name__}. Use `scorecal.TransformersJudge` for "
                    "the judge and its assistant, or set `--data.task.mode labels`."
                )
        assert isinstance(main, TransformersJudge)
        assert isinstance(self.judge, TransformersJudge)
        ours, theirs = main.vocabulary(), self.judge.vocabulary()
        if ours != theirs:
            token = min(
                (token for token, _ in ours.items() ^ theirs.items()),
                key=lambda token: (ours.get(token, inf), theirs.get(token, inf)),
            )
            raise ValueError(
                f"judge {main.model!r} and its assistant {self.judge.model!r} have different "
                f"tokens: {token!r} is {ours.get(token, 'none')} in one and "
                f"{theirs.get(token, 'none')} in the other. Name an assistant of the same family, "
                "or set `--data.task.mode labels`."
            )
        return main, self.judge

    def answer(self, main: Judge, encoded: Sequence[Encoded], *, max_tokens: int) -> list[str]:
        """The main judge's answers, each token the best of the contrast; see `Judge.answer`."""
        judge, assistant = self.pair_with(main)

        def scores(rows: list[Tokens]) -> functools.partial[Tensor]:
            return functools.partial(self._scores, assistant.beside(rows))

        return judge.answer(encoded, max_tokens=max_tokens, scores=scores)

    def _scores(
        self,
        beside: Beside,
        input_ids: Int[Tensor, "rows tokens"],
        logits: Float[Tensor, "rows vocabulary"],
    ) -> Float[Tensor, "rows vocabulary"]:
        others = beside(input_ids).to(logits.device)
        # Models of one family fill up their heads to different widths, past all tokens.
        width = min(logits.shape[-1], others.shape[-1])
        scores = logits.new_full(logits.shape, -inf)
        scores[:, :width] = contrast(
            logits[:, :width],
            others[:, :width],
            strength=self.strength,
            temperature=self.temperature,
            plausibility=self.plausibility,
        )
        return scores


def contrast(
    logits: Float[Tensor, "*rows vocabulary"],
    assistant: Float[Tensor, "*rows vocabulary"],
    *,
    strength: float,
    temperature: float = 1.0,
    plausibility: float = 0.1,
) -> Float[Tensor, "*rows vocabulary"]:
    """Scores of the plausible tokens: log p_main − λ·log softmax(e_asst/t), up to a constant a row.

    The cut-off is p_main(token) ≥ plausibility · max p_main, applied last (Li et al. 2023, eq. 2);
    what it leaves out is −inf.
    """
    scores = logits - strength * (assistant / temperature).log_softmax(-1)
    cutoff = math.log(plausibility) if plausibility else -inf
    return scores.masked_fill(logits < logits.amax(-1, keepdim=True) + cutoff, -inf)
