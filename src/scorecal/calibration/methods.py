"""Every way to turn one judge's log-probabilities into scores, fitted to many dev sets at once.

A method reads the items' log-probabilities and, of each problem, the gold scores of its own `train`
rows; it answers for all items. Nothing here sees another row's gold.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
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
from scorecal.calibration.choice import choose, fit_problems, held_out_losses, parents_of
from scorecal.calibration.folds import (
    MIXING_RIDGES,
    RIDGES,
    Folds,
    Search,
    Split,
    make_problems,
    partition,
)
from scorecal.calibration.head import RIDGE, HeadSettings, head_logits
from scorecal.calibration.solvers import Rows
from scorecal.functional.correlation import spearman
from scorecal.functional.scaling import debiasing_term, expected_score, latent_number_bias
from scorecal.functional.targets import interpolated_target
from scorecal.judging.priors import latent_bias, prior_term
from scorecal.judging.table import Table

VANILLA = 0.2  # paper 1, §4.2: the temperature "in all experiments"
SHORT = tuple(round(0.1 * step, 1) for step in range(1, 11))  # paper 1, §4.1
LONG = tuple(round(0.1 * step, 1) for step in range(1, 101))  # paper 1, §4.5
_PROBLEMS = 4000  # fitted at once: what they hold is items x problems
_SHOWN = ("lambda", "temperature", "ridge_bias", "ridge_mixing")


@dataclass
class DevSets:
    """One judge's items and the dev sets that methods are fitted to, one a problem."""

    table: Table
    train: Bool[Tensor, "problems items"]
    folds: Folds
    seed: int = 0
    known: dict[str, "Answers"] = field(default_factory=dict, init=False, repr=False)
    """Answers that came with another method's: `head with M` is fitted on the way to `auto`."""

    def dividing(self, problem: int) -> Folds:
        """How a problem's dev set is divided: by row where it is one group."""
        if self.folds.by == "group":
            row = self.train[problem].tolist()
            groups = {group for group, own in zip(self.table.groups, row, strict=True) if own}
            if len(groups) < 2:
                return replace(self.folds, by="row")
        return self.folds

    def parts(self, problem: int) -> list[Float[Tensor, " items"]]:
        """The inner folds of a problem's dev set."""
        folds, row = self.dividing(problem), self.train[problem]
        return [
            part.double() for part in partition(self.table, row, folds.inner, folds.by, self.seed)
        ]

    def take(self, index: Int[Tensor, " chosen"]) -> "DevSets":
        """Some of the dev sets."""
        return DevSets(self.table, self.train[index], self.folds, self.seed)


class Answers(NamedTuple):
    """A method's scores of all items under each problem; score-only methods have no logits."""

    score: Float[Tensor, "problems items"]
    logits: Float[Tensor, "problems items levels"] | None
    settings: dict[str, list[float]]
    """What was chosen or fitted, one number a problem."""


class Method(NamedTuple):
    """A way to score: its name in tables, the temperature it states, and how it is done."""

    name: str
    temperature: str
    answer: Callable[[DevSets], Answers]
    transductive: bool = False
    """It reads the test items' log-probabilities, not their gold."""


def _scored(
    logits: Float[Tensor, "problems items levels"], table: Table, settings: dict[str, list[float]]
) -> Answers:
    # Equal distributions must tie: rounding noise would be ranked.
    return Answers(expected_score(logits, table.values).round(decimals=10), logits, settings)


def _constant_terms(
    sets: DevSets,
    term: Float[Tensor, "*problems levels"],
    strength: float,
    temperature: float,
) -> Answers:
    """softmax((l̂ + λ·B) / T) with λ given."""
    shape = (len(sets.train), *sets.table.logprobs.shape)
    term = term.expand(len(sets.train), -1).unsqueeze(1)
    logits = (sets.table.logprobs.log_softmax(-1) + strength * term) / temperature
    return _scored(logits.expand(shape), sets.table, {})


def strength_scores(
    table: Table,
    term: Float[Tensor, " levels"],
    strengths: tuple[float, ...],
    temperature: float,
    *,
    temperature_on: str = "sum",
) -> Float[Tensor, "strengths items"]:
    """Scores of all items under each λ."""
    normalised = table.logprobs.log_softmax(-1)
    scores = []
    for strength in strengths:
        if temperature_on == "logits":
            logits = normalised / temperature + strength * term
        else:
            logits = (normalised + strength * term) / temperature
        scores.append(expected_score(logits, table.values).round(decimals=10))
    return torch.stack(scores)


def best_strengths(scores: Float[Tensor, "strengths items"], sets: DevSets) -> list[int]:
    """The λ of best dev Spearman of each problem; ties, and undefined ones, to the smaller."""
    chosen = []
    for row in sets.train:
        found = spearman(
            scores[:, row], sets.table.gold[row], torch.ones(int(row.sum()), dtype=scores.dtype)
        )
        found = found.nan_to_num(nan=-math.inf)
        chosen.append(int((found >= found.max() - 1e-12).nonzero()[0]))
    return chosen


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
        normalised, shift = table.logprobs.log_softmax(-1), picked[:, None, None] * term
        if temperature_on == "logits":
            logits = normalised / temperature + shift
        else:
            logits = (normalised + shift) / temperature
        return _scored(logits, table, {"lambda": picked.tolist()})

    return answer


def _shifted(kind: str, temperature: float) -> Callable[[DevSets], Answers]:
    """A prior of `prior_term` at λ = 1, or none at λ = 0."""

    def answer(sets: DevSets) -> Answers:
        table, train = sets.table, sets.train.double()
        term = prior_term(kind, table.evidence, table.logprobs, train, seed=sets.seed)
        return _constant_terms(sets, term, 1.0, temperature)

    return answer


def _transductive_batch(temperature: float) -> Callable[[DevSets], Answers]:
    def answer(sets: DevSets) -> Answers:
        rest = (~sets.train).double()
        term = prior_term("batch", {}, sets.table.logprobs, rest)
        return _constant_terms(sets, term, 1.0, temperature)

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
        made = _constant_terms(sets, terms, 1.0, temperature)
        return made._replace(settings={"one_cell": [float(flag) for flag in alone]})

    return answer


def head(settings: HeadSettings) -> Callable[[DevSets], Answers]:
    """The fitted head, its `auto` ridges chosen on inner folds of each dev set."""
    return lambda sets: _heads(settings, sets, {"": slice(None)})[""]


def _with_mixing(name: str) -> Callable[[DevSets], Answers]:
    """The head with M, ρ = 0.3 (`head with M`) or chosen too (`auto`): the same fits serve both."""

    def answer(sets: DevSets) -> Answers:
        if name not in sets.known:
            mixing = slice(-len(MIXING_RIDGES), None)
            settings = with_known_prior(AUTO, sets.table)
            sets.known |= _heads(settings, sets, {"auto": slice(None), "head with M": mixing})
        return sets.known[name]

    return answer


def _heads(settings: HeadSettings, sets: DevSets, among: dict[str, slice]) -> dict[str, Answers]:
    """Fitted heads chosen among slices of the candidates."""
    # Problems that are fitted at once are divided in the same way.
    divided = [sets.dividing(problem).by for problem in range(len(sets.train))]
    shape = (len(divided), *sets.table.logprobs.shape)
    logits = {name: sets.table.logprobs.new_empty(shape) for name in among}
    shown = {name: sets.table.logprobs.new_empty(len(_SHOWN), len(divided)) for name in among}
    for by in dict.fromkeys(divided):
        same = torch.tensor([index for index, how in enumerate(divided) if how == by])
        for index in same.split(_portion(settings, sets.folds)):
            folds = replace(sets.folds, by=by)
            part = DevSets(sets.table, sets.train[index], folds, sets.seed)
            for name, (z, numbers) in _fitted(settings, part, among).items():
                logits[name][index], shown[name][:, index] = z, numbers
    return {
        name: _scored(
            logits[name], sets.table, dict(zip(_SHOWN, shown[name].tolist(), strict=True))
        )
        for name in among
    }


def _fitted(
    settings: HeadSettings, sets: DevSets, among: dict[str, slice]
) -> dict[str, tuple[Float[Tensor, "problems items levels"], Float[Tensor, "shown problems"]]]:
    table, on = sets.table, settings.temperature_on
    rows = Rows(table.logprobs, torch.zeros_like(table.logprobs), table.gold, table.values)
    splits = [Split(str(number), row, ~row) for number, row in enumerate(sets.train)]
    problems, searches = make_problems(
        table, splits, sets.folds, settings, None, sets.seed, choices_only=True
    )
    fitted = fit_problems(problems, settings, rows, "mse", parents_of(searches))
    if searches[0].inner.numel():
        losses = held_out_losses(fitted, problems, searches, rows, "mse", temperature_on=on)
    found = {}
    for name, kept in among.items():
        some = [Search(one.split, one.inner[kept], one.full[kept]) for one in searches]
        chosen = [0] * len(some)
        if len(some[0].full) > 1:
            chosen = choose(some, problems, losses, "mse", favour_default=True)
        full = torch.stack([one.full[pick] for one, pick in zip(some, chosen, strict=True)])
        heads, picked = fitted.take(full), problems.take(full)
        shown = [heads.strength, heads.temperature, picked.ridge_bias, picked.ridge_mixing]
        found[name] = (
            head_logits(heads, rows.logprobs, rows.assistant, temperature_on=on),
            torch.stack(shown),
        )
    return found


def _portion(settings: HeadSettings, folds: Folds) -> int:
    """Dev sets whose candidates and inner folds are fitted at once."""
    candidates = (len(RIDGES) if settings.ridge_bias == "auto" else 1) + (
        len(MIXING_RIDGES) if "mixing" in settings.learn and settings.ridge_mixing == "auto" else 0
    )
    return max(1, _PROBLEMS // (candidates * 2 * folds.inner))


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
    raw = expected_score(table.logprobs, table.values).round(decimals=10)
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
    return _scored(torch.cat(logits), table, {})


def _constant(sets: DevSets) -> Answers:
    mean = constant_fit(sets.table.gold, sets.train.double())
    return Answers(mean.unsqueeze(-1).expand(sets.train.shape).clone(), None, {})


TEMPERATURE_ONLY = HeadSettings(prior="none", strength=0.0, learn=["temperature"])
AUTO = HeadSettings(
    learn=["strength", "temperature", "bias", "mixing"], ridge_bias="auto", ridge_mixing="auto"
)
CONSTANT = "constant"


def methods(table: Table) -> list[Method]:
    """All methods that a table has the evidence for, in the order of the tables."""
    found: list[Method] = []
    for temperature in (1.0, VANILLA):
        shown = f"{temperature:g}"
        name = "raw" if temperature == 1 else "vanilla"
        found.append(Method(name, shown, _shifted("none", temperature)))
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
    default = head(with_known_prior(HeadSettings(), table))
    found.append(Method("temperature only", "learned", head(TEMPERATURE_ONLY)))
    found.append(Method("default head", "learned", default))
    if not table.censored.any():
        found += [Method(name, "learned", _with_mixing(name)) for name in ("head with M", "auto")]
    return [
        *found,
        Method("ordinal", "–", _ordinal),
        Method("ridge regression", "–", _ridge),
        Method("isotonic", "–", _isotonic),
        Method(CONSTANT, "–", _constant),
    ]


def with_known_prior(settings: HeadSettings, table: Table) -> HeadSettings:
    """The same settings, without a prior where the table has no random-number prompts."""
    return settings if "random_task" in table.evidence else replace(settings, prior="none")


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
            yield Method(name, "learned", head(HeadSettings(prior=prior)))  # type: ignore[arg-type]
