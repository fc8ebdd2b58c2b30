"""The calibration head: one fixed formula whose unused terms are zero.

    z = (l̂ + λ·B + δ + M·(l̂ - μ) - α·a) / T        p = softmax(z)        l̂ = log_softmax(l)

It is fitted in natural parameters u = 1/T, s = λ/T, d = δ/T, N = M/T, w = α/T, in which z is linear
and cross-entropy therefore convex. A term that isn't learned keeps its start; a fixed λ or α that
shares a learned T moves with u.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scorecal.functional.scaling import label_logprobs

RIDGE = 0.3
_NO_MIXING = 1e12  # what an infinite ridge on M becomes: inf times 0 is NaN


@dataclass
class HeadSettings:
    """What the head starts from and what it learns.

    Attributes:
        prior: whose debiasing term B is; see `judging.priors.prior_term`.
        prior_prompts: T_p, how many random-number prompts count (paper 1, §3.1).
        prior_temperature: of the answers to random-number prompts.
        strength: λ; start and shrinkage target.
        temperature: T; start and shrinkage target.
        temperature_on: T divides all terms (`sum`), or l̂ alone (`logits`).
        contrast: α, of the assistant's log-probabilities; start and shrinkage target.
        learn: which of strength, temperature, bias, mixing, contrast are fitted.
        ridge_bias: ρ of all terms but M; `auto` chooses it on inner folds.
        ridge_mixing: ρ_M; `auto` chooses it on inner folds, infinity included.
    """

    prior: Literal[
        "random_task", "random", "content_free", "batch", "position", "none", "permuted"
    ] = "random_task"
    prior_prompts: int = 10
    prior_temperature: float = 1.0
    strength: float = 1.0
    temperature: float = 1.0
    temperature_on: Literal["sum", "logits"] = "sum"
    contrast: float = 0.0
    learn: list[Literal["strength", "temperature", "bias", "mixing", "contrast"]] = field(
        default_factory=lambda: ["strength", "temperature", "bias"]
    )
    ridge_bias: float | Literal["auto"] = RIDGE
    ridge_mixing: float | Literal["auto"] = "auto"

    def check(self) -> None:
        """Raise ValueError where a number is outside its domain."""
        for name in ("strength", "temperature", "contrast"):
            if not abs(getattr(self, name)) <= 1e6:
                raise ValueError(
                    f"`model.head.{name}` must lie within ±1e6, got {getattr(self, name)}."
                )
        for name in ("temperature", "prior_temperature", "prior_prompts"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`model.head.{name}` must be above 0, got {getattr(self, name)}.")
        for name in ("ridge_bias", "ridge_mixing"):
            value = getattr(self, name)
            if value != "auto" and not value >= 0:
                raise ValueError(f"`model.head.{name}` must be `auto` or at least 0, got {value}.")


class Problems(NamedTuple):
    """Everything in which one fit differs from another."""

    train: Float[Tensor, "problems items"]
    held_out: Float[Tensor, "problems items"]
    strength: Float[Tensor, " problems"]
    temperature: Float[Tensor, " problems"]
    contrast: Float[Tensor, " problems"]
    ridge_bias: Float[Tensor, " problems"]
    ridge_mixing: Float[Tensor, " problems"]
    prior: Float[Tensor, "problems levels"]
    centre: Float[Tensor, "problems levels"]

    def take(self, index: Int[Tensor, " chosen"]) -> "Problems":
        """Some of the problems."""
        return Problems(*(values[index] for values in self))


class HeadParameters(NamedTuple):
    """The head in the terms that people read, one row a problem."""

    strength: Float[Tensor, " problems"]
    temperature: Float[Tensor, " problems"]
    bias: Float[Tensor, "problems levels"]
    mixing: Float[Tensor, "problems levels levels"]
    contrast: Float[Tensor, " problems"]
    prior: Float[Tensor, "problems levels"]
    centre: Float[Tensor, "problems levels"]

    def take(self, index: Int[Tensor, " chosen"]) -> "HeadParameters":
        """The rows of some problems."""
        return HeadParameters(*(values[index] for values in self))

    def total_bias(self) -> Float[Tensor, "problems levels"]:
        """The per-score bias vector that users see: b = λ·B + δ."""
        return self.strength.unsqueeze(-1) * self.prior + self.bias


def head_logits(
    head: HeadParameters,
    logprobs: Float[Tensor, "*#problems items levels"],
    assistant: Float[Tensor, "*#problems items levels"],
    *,
    temperature_on: str = "sum",
) -> Float[Tensor, "problems items levels"]:
    """Logits z of every item under every problem's head; `assistant` is a, all zeros without one.

    λ = 1, T = 1 and zeros elsewhere give Deb-T or Deb-R (paper 1, eq. 3), λ = 0 the raw judge.
    """
    normalised = logprobs.log_softmax(-1)
    deviation = normalised - head.centre.unsqueeze(1)
    shift = (
        head.total_bias().unsqueeze(1)
        + deviation @ head.mixing.mT
        - head.contrast[:, None, None] * assistant
    )
    temperature = head.temperature[:, None, None]
    if temperature_on == "logits":
        return normalised / temperature + shift
    return (normalised + shift) / temperature


class Design(NamedTuple):
    """Logits that are linear in natural parameters: shared ones first, then those of each level.

    A level's parameters multiply the same features of the item: 1 for δ, l̂ - μ for its row of M.
    The columns [..., levels x features] of all items are never written out. In memory items come
    last: levels are few, and what is short is slow to walk along.
    """

    offset: Float[Tensor, "problems items levels"]
    shared: Float[Tensor, "problems items levels shared"]
    per_level: Float[Tensor, "problems items features"]
    bias_first: bool
    """All of δ stands before M in the natural parameters."""

    def take(self, index: Int[Tensor, " chosen"]) -> "Design":
        """The rows of some problems."""
        return Design(
            self.offset[index], self.shared[index], self.per_level[index], self.bias_first
        )

    def _by_level(self, flat: Float[Tensor, "problems columns"]) -> Tensor:
        """Level parameters as [problems, levels, features]."""
        levels = self.offset.shape[-1]
        if self.bias_first:
            mixing = flat[:, levels:].unflatten(-1, (levels, levels))
            return torch.cat([flat[:, :levels].unsqueeze(-1), mixing], -1)
        return flat.unflatten(-1, (levels, self.per_level.shape[-1]))

    def _flat(self, by_level: Float[Tensor, "problems *left levels features"]) -> Tensor:
        """The inverse of `_by_level` along the last two axes."""
        if self.bias_first:
            return torch.cat([by_level[..., 0], by_level[..., 1:].flatten(-2)], -1)
        return by_level.flatten(-2)

    def logits(
        self, natural: Float[Tensor, "problems columns"]
    ) -> Float[Tensor, "problems items levels"]:
        """The head's logits."""
        count = self.shared.shape[-1]
        result = self.offset
        if count:
            columns = self.shared.transpose(1, 3).flatten(2)
            result = result + (natural[:, None, :count] @ columns).view(result.mT.shape).mT
        if self.per_level.shape[-1]:
            result = result + (self._by_level(natural[:, count:]) @ self.per_level.mT).mT
        return result

    def pulled_back(
        self, slopes: Float[Tensor, "problems items levels"]
    ) -> Float[Tensor, "problems columns"]:
        """Sum over items of a derivative by logits, as one by natural parameters."""
        shared = (self.shared * slopes.unsqueeze(-1)).sum((1, 2))
        return torch.cat([shared, self._flat(slopes.mT @ self.per_level)], -1)

    def curvature(self, curved: "Curved") -> Float[Tensor, "problems columns columns"]:
        """Sum over items of second derivatives by logits, as one by natural parameters."""
        problems, _, levels, count = self.shared.shape
        features = self.per_level.shape[-1]
        outer = self._by_column(curved.left).mT @ self._by_column(curved.right)
        total = (outer + outer.mT) / 2
        # What is left is diagonal in the levels: d_ik · J_ik · J_ikᵀ of each item and level.
        scaled = self.shared * curved.diagonal.unsqueeze(-1)
        total[:, :count, :count] += (
            scaled.transpose(1, 3).flatten(2) @ self.shared.transpose(1, 3).flatten(2).mT
        )
        if not features:
            return total
        side = scaled.transpose(1, 3).flatten(1, 2) @ self.per_level
        side = side.view(problems, count, levels * features)
        total[:, :count, count:] += side
        total[:, count:, :count] += side.mT
        square = (self.per_level.unsqueeze(-1) * self.per_level.unsqueeze(-2)).flatten(2)
        blocks = (curved.diagonal.mT @ square).view(problems, levels, features, features)
        for level in range(levels):
            own = slice(count + level * features, count + (level + 1) * features)
            total[:, own, own] += blocks[:, level]
        return self._ordered(self._ordered(total).mT)

    def _by_column(
        self, slopes: Float[Tensor, "problems items ranks levels"]
    ) -> Float[Tensor, "problems rows columns"]:
        """Derivatives by logits as those by parameters, level by level; a row an item and rank."""
        count, shape = self.shared.shape[-1], (slopes.shape[-1], self.per_level.shape[-1])
        problems, items, ranks, _ = slopes.shape
        rows = slopes.new_empty(problems, count + math.prod(shape), items, ranks)
        rows = rows.permute(0, 2, 3, 1)
        for column in range(count):
            rows[..., column] = (slopes * self.shared[:, :, None, :, column]).sum(-1)
        by_level = rows[..., count:].unflatten(-1, shape)
        torch.mul(slopes.unsqueeze(-1), self.per_level[:, :, None, None], out=by_level)
        return rows.flatten(1, 2)

    def _ordered(self, columns: Float[Tensor, "problems rows columns"]) -> Tensor:
        """Columns that stand level by level, in the order of the natural parameters."""
        count, shape = self.shared.shape[-1], (self.shared.shape[-2], self.per_level.shape[-1])
        by_level = columns[..., count:].unflatten(-1, shape)
        return torch.cat([columns[..., :count], self._flat(by_level)], -1)


class Curved(NamedTuple):
    """Second derivatives by each item's logits: diag(d) plus the symmetric part of Σ l·rᵀ.

    Written so, a matrix of levels x levels an item is never held.
    """

    diagonal: Float[Tensor, "problems items levels"]
    left: Float[Tensor, "problems items ranks levels"]
    right: Float[Tensor, "problems items ranks levels"]


class NaturalHead:
    """The head as a function of its learned natural parameters, linear in each.

    Columns, those learned only: u, s, w, d (K), N (K·K, row by row).
    """

    def __init__(self, problems: Problems, settings: HeadSettings) -> None:
        self.problems = problems
        self.settings = settings
        levels = problems.prior.shape[1]
        sizes = {"temperature": 1, "strength": 1, "contrast": 1, "bias": levels,
                 "mixing": levels * levels}  # fmt: skip
        self.columns: dict[str, slice] = {}
        width = 0
        for name, size in sizes.items():
            if name in settings.learn:
                self.columns[name] = slice(width, width + size)
                width += size
        self.width = width

    def take(self, index: Int[Tensor, " chosen"]) -> "NaturalHead":
        """The head of some of the problems."""
        return NaturalHead(self.problems.take(index), self.settings)

    @property
    def _divisor(self) -> Tensor:
        """What λ and α are divided by in natural parameters."""
        on_sum = self.settings.temperature_on == "sum"
        temperature = self.problems.temperature
        return temperature if on_sum else torch.ones_like(temperature)

    def start(self) -> Float[Tensor, "problems columns"]:
        """Natural parameters of the settings: with λ = T = 1, exactly Deb-T."""
        problems = self.problems
        natural = problems.prior.new_zeros(len(problems.prior), self.width)
        starts = {
            "temperature": 1 / problems.temperature,
            "strength": problems.strength / self._divisor,
            "contrast": problems.contrast / self._divisor,
        }
        for name, value in starts.items():
            if name in self.columns:
                natural[:, self.columns[name]] = value.unsqueeze(-1)
        return natural

    def design(
        self,
        logprobs: Float[Tensor, "*#problems items levels"],
        assistant: Float[Tensor, "*#problems items levels"],
    ) -> "Design":
        """The head's logits as a linear function of its learned natural parameters."""
        problems, settings = self.problems, self.settings
        normalised = label_logprobs(logprobs)
        shape = (len(problems.prior), *normalised.shape[-2:])
        scaled = normalised.expand(shape)
        offset = torch.zeros_like(scaled)
        prior, assisted = problems.prior.unsqueeze(1).expand(shape), (-assistant).expand(shape)
        for name, term in (("strength", prior), ("contrast", assisted)):
            fixed = getattr(problems, name)[:, None, None] * term
            if name in self.columns:
                continue
            if settings.temperature_on == "sum":
                scaled = scaled + fixed
            else:
                offset = offset + fixed
        if "temperature" not in self.columns:
            offset = offset + scaled / problems.temperature[:, None, None]
        terms = {"temperature": scaled, "strength": prior, "contrast": assisted}
        shared = [term for name, term in terms.items() if name in self.columns]
        per_level = []
        if "bias" in self.columns:
            per_level.append(normalised.new_ones(*shape[:-1], 1))
        if "mixing" in self.columns:
            per_level.append((normalised - problems.centre.unsqueeze(1)).expand(shape))
        return Design(
            offset,
            torch.stack([term.mT for term in shared], 1).transpose(1, 3)
            if shared
            else normalised.new_zeros(*shape, 0),
            torch.cat(per_level, -1) if per_level else normalised.new_zeros(*shape[:-1], 0),
            "bias" in self.columns and "mixing" in self.columns,
        )

    def penalty(self, natural: Float[Tensor, "problems columns"]) -> Float[Tensor, " problems"]:
        """Ridge on the distance from the start; no separable data escapes it.

        (ρ/n)·(‖d‖² + (s - s₀)² + (w - w₀)² + u/u₀ - 1 - log(u/u₀)) + (ρ_M/n)·‖N‖²
        """
        problems = self.problems
        distance = (natural - self.start()).square()
        ridge = torch.zeros_like(distance)
        for name, columns in self.columns.items():
            rho = problems.ridge_mixing if name == "mixing" else problems.ridge_bias
            ridge[:, columns] = rho.clamp(max=_NO_MIXING).unsqueeze(-1)
        total = natural.new_zeros(len(natural))
        if "temperature" in self.columns:
            columns = self.columns["temperature"]
            ratio = natural[:, columns.start] * problems.temperature
            total = problems.ridge_bias * (ratio - 1 - ratio.log())
            ridge[:, columns] = 0
        total = total + (ridge * distance).sum(-1)
        return total / problems.train.sum(-1).clamp(min=1)

    def penalty_hessian(
        self, natural: Float[Tensor, "problems columns"]
    ) -> Float[Tensor, "problems columns columns"]:
        """Second derivative of `penalty`: diagonal."""
        problems = self.problems
        diagonal = torch.zeros_like(natural)
        for name, columns in self.columns.items():
            rho = problems.ridge_mixing if name == "mixing" else problems.ridge_bias
            diagonal[:, columns] = 2 * rho.clamp(max=_NO_MIXING).unsqueeze(-1)
        if "temperature" in self.columns:
            column = self.columns["temperature"].start
            diagonal[:, column] = problems.ridge_bias / natural[:, column].square()
        return torch.diag_embed(diagonal / problems.train.sum(-1).clamp(min=1).unsqueeze(-1))

    def parameters(self, natural: Float[Tensor, "problems columns"]) -> HeadParameters:
        """λ, T, δ, M and α of natural parameters."""
        problems = self.problems
        levels = problems.prior.shape[1]

        def column(name: str) -> Tensor | None:
            found = self.columns.get(name)
            return None if found is None else natural[:, found]

        inverse = column("temperature")
        temperature = problems.temperature if inverse is None else 1 / inverse[:, 0]
        on_sum = self.settings.temperature_on == "sum"
        scale = (temperature if on_sum else torch.ones_like(temperature)).unsqueeze(-1)
        zero = problems.prior.new_zeros(len(natural), levels)
        bias, mixing = column("bias"), column("mixing")
        strength, contrast = column("strength"), column("contrast")
        return HeadParameters(
            strength=problems.strength if strength is None else (strength * scale)[:, 0],
            temperature=temperature,
            bias=zero if bias is None else bias * scale,
            mixing=(
                zero.unsqueeze(-1).expand(-1, -1, levels)
                if mixing is None
                else (mixing * scale).unflatten(-1, (levels, levels))
            ),
            contrast=problems.contrast if contrast is None else (contrast * scale)[:, 0],
            prior=problems.prior,
            centre=problems.centre,
        )
