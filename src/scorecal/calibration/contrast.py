"""Contrastive decoding between two judges, over the score labels (paper 2).

Over labels only α = λ/t counts: log p_main - λ·log softmax(e_asst / t) differs from l - α·a by a
constant of each item. The published code (github.com/akkikiki/contrastive_decoding_llm_judge)
tempers the main judge instead, l/t - λ·a: α = λ·t at the temperature T·t.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.calibration.dev_sets import (
    Answers,
    DevSets,
    Method,
    best_points,
    dev_spearman,
    scored,
)
from scorecal.calibration.head import HeadSettings
from scorecal.calibration.heads import head, with_known_prior
from scorecal.functional.scaling import rankable_score
from scorecal.judging.table import Table

STRENGTHS = (0.01, 0.1, 0.5, 1.0)  # λ (paper 2, appendix B)
TEMPERATURES = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0)  # t (paper 2, appendix B)


class Point(NamedTuple):
    """A point of the head, in paper 2's terms too."""

    contrast: float
    """α"""
    temperature: float
    """T, on top of the method's own."""
    pairs: tuple[tuple[float, float], ...]
    """All (λ, t) that it stands for."""


def paper_grid() -> list[Point]:
    """The 24 pairs of λ and t, which are 18 values of α = λ/t; α ascends."""
    pairs: dict[float, list[tuple[float, float]]] = {}
    for strength in STRENGTHS:
        for temperature in TEMPERATURES:
            pairs.setdefault(round(strength / temperature, 12), []).append((strength, temperature))
    return [Point(alpha, 1.0, tuple(pairs[alpha])) for alpha in sorted(pairs)]


def code_grid() -> list[Point]:
    """The same pairs as the published code reads them: (α, T) = (λ·t, t), 24 points."""
    return sorted(
        Point(round(strength * temperature, 12), temperature, ((strength, temperature),))
        for strength in STRENGTHS
        for temperature in TEMPERATURES
    )


def contrasted(
    table: Table, assistant: str, points: Sequence[Point], temperature: float = 1.0
) -> Float[Tensor, "points items levels"]:
    """(l̂ - α·a) / T of all items at each point."""
    alpha = torch.tensor([point.contrast for point in points], dtype=torch.float64)
    own = torch.tensor([point.temperature for point in points], dtype=torch.float64)
    difference = table.logprobs.log_softmax(-1) - alpha[:, None, None] * table.assistants[assistant]
    return difference / (temperature * own)[:, None, None]


def greedy_score(
    logits: Float[Tensor, "*problems items levels"], values: Float[Tensor, " levels"]
) -> Float[Tensor, "*problems items"]:
    """The value of the likeliest label; the lower of two that are equally likely."""
    return values[logits.argmax(-1)]


class Contrast(NamedTuple):
    """A way to contrast: what it is scored by, where the temperature stands, what is tried."""

    assistant: str
    points: list[Point]
    temperature: float = 1.0
    greedy: bool = False

    @property
    def baseline(self) -> tuple[str, str]:
        """The method that answers the same way without contrast."""
        if self.greedy:
            return "greedy", "–"
        return ("raw", "1") if self.temperature == 1 else ("vanilla", f"{self.temperature:g}")

    def scores(
        self, logits: Float[Tensor, "points items levels"], table: Table
    ) -> Float[Tensor, "points items"]:
        """What the items are ranked by."""
        score = greedy_score if self.greedy else rankable_score
        return score(logits, table.values)

    def dev_figures(self, sets: DevSets) -> Float[Tensor, "problems points"]:
        """Dev Spearman of every point under each problem; undefined where all scores are equal."""
        table = sets.table
        scores = self.scores(
            contrasted(table, self.assistant, self.points, self.temperature), table
        )
        return dev_spearman(scores, sets)

    def answer(self, chosen: Sequence[int], sets: DevSets) -> Answers:
        """Scores at each problem's own point."""
        table = sets.table
        picked = [self.points[index] for index in chosen]
        logits = contrasted(table, self.assistant, picked, self.temperature)
        settings = {
            "alpha": [point.contrast for point in picked],
            # The first pair of a point: the paper's tables state one.
            "lambda": [point.pairs[0][0] for point in picked],
            "t": [point.pairs[0][1] for point in picked],
        }
        if self.greedy:
            return Answers(greedy_score(logits, table.values), None, settings)
        return scored(logits, table, settings)

    def chosen_on_dev(self, sets: DevSets) -> Answers:
        """Scores at the point of best dev Spearman; ties to the smaller α."""
        return self.answer(best_points(self.dev_figures(sets)), sets)


def greedy(sets: DevSets) -> Answers:
    """The judge's likeliest label."""
    table = sets.table
    score = greedy_score(table.logprobs, table.values)
    return Answers(score.expand(len(sets.train), -1).clone(), None, {})


def contrasts(assistant: str, vanilla: float) -> dict[tuple[str, str], Contrast]:
    """The contrasts with one assistant, by name and stated temperature, α chosen on dev."""
    points = paper_grid()
    return {
        (f"contrast, {assistant}", "1"): Contrast(assistant, points),
        (f"contrast, {assistant}", f"{vanilla:g}"): Contrast(assistant, points, vanilla),
        (f"contrast, {assistant}, main tempered", "1"): Contrast(assistant, code_grid()),
        (f"contrast, {assistant}, greedy", "–"): Contrast(assistant, points, greedy=True),
    }


def contrast_methods(table: Table, vanilla: float) -> list[Method]:
    """Contrast alone and with what else the head can do, for each assistant of a table."""
    found = []
    for name in table.assistants:
        for (title, temperature), contrast in contrasts(name, vanilla).items():
            found.append(
                Method(title, temperature, contrast.chosen_on_dev, baseline=contrast.baseline)
            )
        for title, settings in composed(table).items():
            found.append(Method(title.format(name), "learned", head(settings, name)))
    return found


def composed(table: Table) -> dict[str, HeadSettings]:
    """Heads that learn α: alone with T, with the number bias, and with all of the default head."""
    known = with_known_prior(HeadSettings(), table)
    return {
        "α and T, {}": HeadSettings(prior="none", strength=0.0, learn=["temperature", "contrast"]),
        "α, λ and T, {}": HeadSettings(
            prior=known.prior, learn=["strength", "temperature", "contrast"]
        ),
        "default head with α, {}": HeadSettings(
            prior=known.prior, learn=["strength", "temperature", "bias", "contrast"]
        ),
    }


def shared(contrast: Contrast, all_sets: Sequence[DevSets]) -> Callable[[DevSets], Answers]:
    """The same contrast on several scales, its point chosen by mean dev Spearman over them."""
    figures = torch.stack([contrast.dev_figures(sets) for sets in all_sets])
    chosen = best_points(figures.nanmean(0))
    return lambda sets: contrast.answer(chosen, sets)
