"""Every way to turn one judge's log-probabilities into scores, fitted to many dev sets at once.

A method reads the items' log-probabilities and, of each problem, the gold scores of its own `train`
rows; it answers for all items. Nothing here sees another row's gold.
"""

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.calibration.calibrators import (
    beta_label_prior,
    constant_fit,
    isotonic_fit,
    isotonic_predict,
    ordinal_fit,
    ordinal_predict,
    ridge_fit,
    ridge_predict,
)
from scorecal.calibration.contrast import contrast_methods, greedy
from scorecal.calibration.dev_sets import (
    Answers,
    DevSets,
    Method,
    best_points,
    dev_spearman,
    scored,
)
from scorecal.calibration.head import RIDGE, HeadSettings
from scorecal.calibration.heads import TEMPERATURE_ONLY, head, with_known_prior, with_mixing
from scorecal.functional.scaling import debiasing_term, latent_number_bias, rankable_score
from scorecal.functional.targets import interpolated_target
from scorecal.judging.priors import latent_bias, prior_term
from scorecal.judging.table import Table

VANILLA = 0.2  # paper 1, §4.2: the temperature "in all experiments"
SHORT = tuple(round(0.1 * step, 1) for step in range(1, 11))  # paper 1, §4.1
LONG = tuple(round(0.1 * step, 1) for step in range(1, 101))  # paper 1, §4.5


def shifted_logits(
    table: Table,
    shift: Float[Tensor, "*problems levels"],
    temperature: float,
    *,
    temperature_on: str = "sum",
) -> Float[Tensor, "*problems items levels"]:
    """(l̂ + shift) / T of all items, or l̂ / T + shift, the other reading of paper 1."""
    normalised, shift = table.logprobs.log_softmax(-1), shift.unsqueeze(-2)
    if temperature_on == "logits":
        return normalised / temperature + shift
    return (normalised + shift) / temperature


def strength_scores(
    table: Table,
    term: Float[Tensor, " levels"],
    strengths: tuple[float, ...],
    temperature: float,
    *,
    temperature_on: str = "sum",
) -> Float[Tensor, "strengths items"]:
    """Scores of all items under each λ."""
    shifts = torch.tensor(strengths, dtype=term.dtype).unsqueeze(-1) * term
    logits = shifted_logits(table, shifts, temperature, temperature_on=temperature_on)
    return rankable_score(logits, table.values)


def best_strengths(scores: Float[Tensor, "strengths items"], sets: DevSets) -> list[int]:
    """The λ of best dev Spearman of each problem; ties, and undefined ones, to the smaller."""
    return best_points(dev_spearman(scores, sets))


def random_number_term(table: Table, kind: str, prompts: int) -> Float[Tensor, " levels"]:
    """B of Deb-R (`random`) or Deb-T (`random_task`) over the T_p prompts of lowest perplexity."""
    return debiasing_term(latent_bias(table.evidence[kind], prompts=prompts))


def debiased(
    kind: str,
    *,
    prompts: int = 10,
    strengths: tuple[float, ...] = SHORT,
    temperature: float = VANILLA,
    temperature_on: str = "sum",
) -> Callable[[DevSets], Answers]:
    """Deb-R or Deb-T with λ chosen by dev Spearman (paper 1, eq. 3 and §4.1)."""

    def answer(sets: DevSets) -> Answers:
        table = sets.table
        term = random_number_term(table, kind, prompts)
        scores = strength_scores(table, term, strengths, temperature, temperature_on=temperature_on)
        chosen = best_strengths(scores, sets)
        picked = torch.tensor([strengths[index] for index in chosen], dtype=torch.float64)
        shifts = picked.unsqueeze(-1) * term
        logits = shifted_logits(table, shifts, temperature, temperature_on=temperature_on)
        return scored(logits, table, {"lambda": picked.tolist()})

    return answer


def _shifted(kind: str, temperature: float) -> Callable[[DevSets], Answers]:
    """A prior of `prior_term` at λ = 1, or none at λ = 0."""

    def answer(sets: DevSets) -> Answers:
        table, train = sets.table, sets.train.double()
        term = prior_term(kind, table.evidence, table.logprobs, train, seed=sets.seed)
        return scored(shifted_logits(table, term, temperature), table, {})

    return answer


def _transductive_batch(temperature: float) -> Callable[[DevSets], Answers]:
    def answer(sets: DevSets) -> Answers:
        table, rest = sets.table, (~sets.train).double()
        term = prior_term("batch", {}, table.logprobs, rest)
        return scored(shifted_logits(table, term, temperature), table, {})

    return answer


def distribution_terms(
    sets: DevSets, *, sampled: bool
) -> tuple[Float[Tensor, "problems levels"], list[bool]]:
    """Log q - log p of Distribution Calibration, and where gold lies in one cell only.

    q are the cells of a Beta fitted to the problem's gold. p is the judge's mean answer to inputs
    that it invented, or to the problem's own items (paper 1, §2.3; Jiang et al. 2023).
    """
    table = sets.table
    if sampled:
        marginal = latent_number_bias(table.evidence["sampled"].logprobs)
    terms, alone = [], []
    for row in sets.train:
        q, one_cell = beta_label_prior(
            table.gold[row], float(table.values[0]), float(table.values[-1]), len(table.values)
        )
        p = marginal if sampled else latent_number_bias(table.logprobs[row])
        terms.append(q.log() - p.log())
        alone.append(one_cell)
    return torch.stack(terms), alone


def _distribution(temperature: float, *, sampled: bool) -> Callable[[DevSets], Answers]:
    def answer(sets: DevSets) -> Answers:
        terms, alone = distribution_terms(sets, sampled=sampled)
        logits = shifted_logits(sets.table, terms, temperature)
        return scored(logits, sets.table, {"one_cell": [float(flag) for flag in alone]})

    return answer


def _ridge(sets: DevSets) -> Answers:
    table = sets.table
    features = table.logprobs.log_softmax(-1)
    scores = [
        ridge_predict(ridge_fit(features, table.gold, row.double(), sets.parts(problem)), features)
        for problem, row in enumerate(sets.train)
    ]
    return Answers(torch.stack(scores), None, {})


def _isotonic(sets: DevSets) -> Answers:
    table = sets.table
    raw = rankable_score(table.logprobs, table.values)
    scores, ties = [], []
    for row in sets.train:
        score = isotonic_predict(isotonic_fit(raw[row], table.gold[row]), raw)
        _, position, count = score[~row].unique(return_inverse=True, return_counts=True)
        scores.append(score)
        ties.append((count[position] > 1).double().mean().item() if len(position) else math.nan)
    return Answers(torch.stack(scores), None, {"tied": ties})


def _ordinal(sets: DevSets) -> Answers:
    table = sets.table
    features = table.logprobs.log_softmax(-1)
    target = interpolated_target(table.gold, table.values)
    logits = [
        ordinal_predict(ordinal_fit(features, target, train.double(), ridge=RIDGE), features)
        for train in sets.train.split(64)
    ]
    return scored(torch.cat(logits), table, {})


def _constant(sets: DevSets) -> Answers:
    mean = constant_fit(sets.table.gold, sets.train.double())
    return Answers(mean.unsqueeze(-1).expand(sets.train.shape).clone(), None, {})


_ANSWERS = {"generated": "generated", "contrasted": "generated in contrast"}


def _own_answers(kind: str) -> Callable[[DevSets], Answers]:
    """What the judge wrote, read as a score (paper 2, §4.1)."""

    def answer(sets: DevSets) -> Answers:
        score = sets.table.generated[kind].scores
        return Answers(score.expand(sets.train.shape).clone(), None, {})

    return answer


MOST_MIXED = 21  # labels: M has their square of parameters, a fit its cube of that


def methods(table: Table) -> list[Method]:
    """All methods that a table has the evidence for, in the order of the tables."""
    found: list[Method] = []
    for temperature in (1.0, VANILLA):
        shown = f"{temperature:g}"
        name, own = "raw" if temperature == 1 else "vanilla", _shifted("none", temperature)
        found.append(Method(name, shown, own, start=own))
        if "content_free" in table.evidence:
            found.append(Method("CC", shown, _shifted("content_free", temperature)))
        if "sampled" in table.evidence:
            found.append(Method("DC, sampled", shown, _distribution(temperature, sampled=True)))
        found.append(Method("DC, dev mean", shown, _distribution(temperature, sampled=False)))
        found.append(Method("batch", shown, _shifted("batch", temperature)))
        found.append(Method("batch of test inputs", shown, _transductive_batch(temperature), True))
        for kind, name in (("random", "Deb-R"), ("random_task", "Deb-T")):
            if kind in table.evidence:
                found.append(Method(name, shown, debiased(kind, temperature=temperature)))
                if temperature != 1:
                    placed = debiased(kind, temperature=temperature, temperature_on="logits")
                    found.append(Method(f"{name}, T on l alone", shown, placed))
    found.append(Method("greedy", "–", greedy, baseline=("greedy", "–")))
    default = head(with_known_prior(HeadSettings(), table))
    tempered = head(TEMPERATURE_ONLY)
    found.append(Method("temperature only", "learned", tempered, start=tempered))
    found.append(Method("default head", "learned", default, start=default))
    if not table.censored.any() and len(table.values) <= MOST_MIXED:
        for name in ("head with M", "auto"):
            found.append(Method(name, "learned", with_mixing(name), start=default))
    own_words = [_ANSWERS[kind] for kind in table.generated]
    answered = [
        Method(name, "–", _own_answers(kind), baseline=(own_words[0], "–"))
        for name, kind in zip(own_words, table.generated, strict=True)
    ]
    return [
        *found,
        *contrast_methods(table, VANILLA),
        *answered,
        Method("ordinal", "–", _ordinal),
        Method("ridge regression", "–", _ridge),
        Method("isotonic", "–", _isotonic),
        Method("constant", "–", _constant),
    ]


def shrinkage_arms(table: Table) -> Iterator[Method]:
    """The default head with different targets of its shrinkage: a claim about the prior."""
    targets = {
        "shrink to B": "random_task",
        "shrink to 0": "none",
        "shrink to CC": "content_free",
        "shrink to batch": "batch",
        "shrink to B, labels permuted": "permuted",
    }
    for name, prior in targets.items():
        source = "random_task" if prior == "permuted" else prior
        if source in ("none", "batch") or source in table.evidence:
            arm = head(HeadSettings(prior=prior))  # type: ignore[arg-type]
            yield Method(name, "learned", arm, start=arm)
