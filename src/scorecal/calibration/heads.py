"""The head as a method: fitted to many dev sets, each with its own inner folds."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.calibration.choice import choose, fit_problems, held_out_losses, parents_of
from scorecal.calibration.dev_sets import Answers, DevSets, scored
from scorecal.calibration.folds import MIXING_RIDGES, RIDGES, Folds, Search, Split, make_problems
from scorecal.calibration.head import HeadSettings, head_logits
from scorecal.calibration.solvers import Rows
from scorecal.judging.table import Table

_PROBLEMS = 4000  # fitted at once: what they hold is items x problems
_SHOWN = ("lambda", "temperature", "alpha", "ridge_bias", "ridge_mixing")
TEMPERATURE_ONLY = HeadSettings(prior="none", strength=0.0, learn=["temperature"])
AUTO = HeadSettings(
    learn=["strength", "temperature", "bias", "mixing"], ridge_bias="auto", ridge_mixing="auto"
)


def head(settings: HeadSettings, assistant: str = "") -> Callable[[DevSets], Answers]:
    """The fitted head, its `auto` ridges chosen on inner folds of each dev set.

    Args:
        settings: what it starts from and learns.
        assistant: which of the table's assistants it may subtract.
    """
    return lambda sets: _heads(settings, sets, {"": slice(None)}, assistant)[""]


def with_mixing(name: str) -> Callable[[DevSets], Answers]:
    """The head with M, ρ = 0.3 (`head with M`) or chosen too (`auto`): the same fits serve both."""

    def answer(sets: DevSets) -> Answers:
        if name not in sets.known:
            mixing = slice(-len(MIXING_RIDGES), None)
            settings = with_known_prior(AUTO, sets.table)
            sets.known |= _heads(settings, sets, {"auto": slice(None), "head with M": mixing})
        return sets.known[name]

    return answer


def _heads(
    settings: HeadSettings, sets: DevSets, among: dict[str, slice], assistant: str = ""
) -> dict[str, Answers]:
    """Fitted heads chosen among slices of the candidates."""
    # Problems that are fitted at once are divided in the same way.
    divided = [sets.dividing(problem) for problem in range(len(sets.train))]
    shape = (len(divided), *sets.table.logprobs.shape)
    logits = {name: sets.table.logprobs.new_empty(shape) for name in among}
    shown = {name: sets.table.logprobs.new_empty(len(_SHOWN), len(divided)) for name in among}
    for by, inner in dict.fromkeys((how.by, how.inner) for how in divided):
        folds = replace(sets.folds, by=by, inner=inner)
        same = torch.tensor([index for index, how in enumerate(divided) if how == folds])
        for index in same.split(_portion(settings, folds)):
            part = DevSets(sets.table, sets.train[index], folds, sets.seed)
            for name, (z, numbers) in _fitted(settings, part, among, assistant).items():
                logits[name][index], shown[name][:, index] = z, numbers
    return {
        name: scored(logits[name], sets.table, dict(zip(_SHOWN, shown[name].tolist(), strict=True)))
        for name in among
    }


def _fitted(
    settings: HeadSettings, sets: DevSets, among: dict[str, slice], assistant: str
) -> dict[str, tuple[Float[Tensor, "problems items levels"], Float[Tensor, "shown problems"]]]:
    table, on = sets.table, settings.temperature_on
    subtracted = table.assistants[assistant] if assistant else torch.zeros_like(table.logprobs)
    rows = Rows(table.logprobs, subtracted, table.gold, table.values)
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
        shown = [
            heads.strength, heads.temperature, heads.contrast, picked.ridge_bias,
            picked.ridge_mixing,
        ]  # fmt: skip
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


def with_known_prior(settings: HeadSettings, table: Table) -> HeadSettings:
    """The same settings, without a prior where the table has no random-number prompts."""
    return settings if "random_task" in table.evidence else replace(settings, prior="none")
