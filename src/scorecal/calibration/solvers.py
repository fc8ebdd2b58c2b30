"""The training objective of many problems at once, and Newton's method for it."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scorecal.calibration.head import NaturalHead
from scorecal.functional.losses import (
    negative_pearson,
    ranked_probability_score,
    soft_cross_entropy,
    squared_error,
)
from scorecal.functional.targets import interpolated_target

Loss = Literal["nll", "mse", "rps", "pearson"]
_BLOCK = 8_000_000  # numbers of features held at once
_ARRIVED = 1e-13  # half the squared Newton decrement, in units of the loss


class Rows(NamedTuple):
    """What the objective reads of each item."""

    logprobs: Float[Tensor, "items levels"]
    assistant: Float[Tensor, "items levels"]
    gold: Float[Tensor, " items"]
    values: Float[Tensor, " levels"]


def mean_loss(
    loss: Loss,
    logits: Float[Tensor, "problems items levels"],
    gold: Float[Tensor, " items"],
    values: Float[Tensor, " levels"],
    weights: Float[Tensor, "problems items"],
) -> Float[Tensor, " problems"]:
    """Each problem's weighted mean loss, in units of gold; 0 where no item has weight."""
    if loss == "pearson":
        return negative_pearson(logits, gold, values, weights).nan_to_num(0.0)
    if loss == "mse":
        per_item = squared_error(logits, gold, values)
    elif loss == "nll":
        per_item = soft_cross_entropy(logits, interpolated_target(gold, values))
    else:
        per_item = ranked_probability_score(logits, interpolated_target(gold, values))
    return (weights * per_item).sum(-1) / weights.sum(-1).clamp(min=1)


class Objective:
    """Mean training loss plus penalty of each problem, as a function of natural parameters."""

    def __init__(self, head: NaturalHead, rows: Rows, loss: Loss) -> None:
        used = head.problems.train.any(0)
        self.head = head
        self.rows = Rows(rows.logprobs[used], rows.assistant[used], rows.gold[used], rows.values)
        self.weights = head.problems.train[:, used]
        self.loss = loss
        numbers = self.rows.logprobs.numel() * max(head.width, 1)
        self._block = max(1, _BLOCK // max(1, numbers))
        self._affine: tuple[Tensor, Tensor] | None = None

    def blocks(
        self, problems: Int[Tensor, " chosen"]
    ) -> Iterator[tuple[Int[Tensor, " block"], "Objective"]]:
        """The same objective over runs of the chosen problems that fit in memory together."""
        for block in problems.split(self._block):
            everything = len(block) == len(self.weights)
            yield block, self if everything else self._take(block)

    def _take(self, index: Int[Tensor, " chosen"]) -> "Objective":
        part = Objective.__new__(Objective)
        part.__dict__.update(self.__dict__)
        part.head, part.weights = self.head.take(index), self.weights[index]
        if self._affine is not None:
            part._affine = (self._affine[0][index], self._affine[1][index])
        return part

    def _offset_and_features(self) -> tuple[Tensor, Tensor]:
        if self._affine is None:
            self._affine = self.head.affine(self.rows.logprobs, self.rows.assistant)
        return self._affine

    def logits(
        self, natural: Float[Tensor, "problems columns"]
    ) -> Float[Tensor, "problems items levels"]:
        """Logits of the training rows."""
        offset, features = self._offset_and_features()
        flat = features.flatten(1, 2) @ natural.unsqueeze(-1)
        return offset + flat.view(offset.shape)

    def value(self, natural: Float[Tensor, "problems columns"]) -> Float[Tensor, " problems"]:
        """Loss plus penalty."""
        loss = mean_loss(
            self.loss, self.logits(natural), self.rows.gold, self.rows.values, self.weights
        )
        return loss + self.head.penalty(natural)

    def derivatives(
        self, natural: Float[Tensor, "problems columns"]
    ) -> tuple[
        Float[Tensor, " problems"],
        Float[Tensor, "problems columns"],
        Float[Tensor, "problems columns columns"],
    ]:
        """Value, gradient and a positive definite curvature.

        The curvature is the Hessian wherever that is positive definite, which for cross-entropy is
        everywhere, and its Gauss-Newton part elsewhere.
        """
        natural = natural.detach().requires_grad_()
        with torch.enable_grad():
            logits = self.logits(natural)
            value = self.value(natural)
            [gradient] = torch.autograd.grad(value.sum(), natural)
        _, features = self._offset_and_features()
        curvature = _pearson_curvature if self.loss == "pearson" else _curvature
        exact, gauss_newton = curvature(
            self.loss, logits.detach(), features, self.rows.gold, self.rows.values, self.weights
        )
        penalty = self.head.penalty_hessian(natural.detach())
        hessian = exact + penalty
        # Without a ridge a constant bias is a flat direction; this keeps the system solvable.
        jitter = torch.diag_embed(1e-10 * hessian.diagonal(dim1=-2, dim2=-1).abs() + 1e-30)
        hessian, penalty = hessian + jitter, penalty + jitter
        bad = torch.linalg.cholesky_ex(hessian).info > 0
        hessian = torch.where(bad[:, None, None], gauss_newton + penalty, hessian)
        return value.detach(), gradient, hessian


def _curvature(
    loss: Loss,
    logits: Float[Tensor, "problems items levels"],
    features: Float[Tensor, "problems items levels columns"],
    gold: Float[Tensor, " items"],
    values: Float[Tensor, " levels"],
    weights: Float[Tensor, "problems items"],
) -> tuple[Float[Tensor, "problems columns columns"], Float[Tensor, "problems columns columns"]]:
    """Hessian of a mean of per-item losses, and its Gauss-Newton part."""
    probs = logits.softmax(-1)
    share = (weights / weights.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)
    mean_features = _mean_over_levels(features, probs)
    if loss == "nll":
        outer = mean_features.mT @ (share * mean_features)
        hessian = _diagonal(features, share * probs) - outer
        return hessian, hessian
    # MSE and RPS are squared distances of means E[a] = a·p from targets, MSE with one vector a.
    if loss == "rps":
        vectors = torch.ones(len(values), len(values), dtype=probs.dtype, device=probs.device)
        vectors = vectors.tril()[:-1]
        targets = interpolated_target(gold, values) @ vectors.T
        share = share / (len(values) - 1)
    else:
        vectors, targets = values.unsqueeze(0), gold.unsqueeze(-1)
    means = probs @ vectors.T
    width = features.shape[-1]
    gauss_newton = probs.new_zeros(len(probs), width, width)
    pulled = torch.zeros_like(probs)
    for vector, mean, target in zip(vectors, means.unbind(-1), targets.unbind(-1), strict=True):
        slopes = probs * (vector - mean.unsqueeze(-1))  # ∂ mean / ∂ z
        jacobian = _mean_over_levels(features, slopes)
        gauss_newton = gauss_newton + jacobian.mT @ (2 * share * jacobian)
        pulled += 2 * (mean - target).unsqueeze(-1) * slopes
    curved = _mean_curvature(features, mean_features, share * pulled)
    return gauss_newton + curved, gauss_newton


def _mean_over_levels(features: Tensor, factors: Tensor) -> Float[Tensor, "problems items columns"]:
    return (features * factors.unsqueeze(-1)).sum(-2)


def _diagonal(features: Tensor, factors: Tensor) -> Float[Tensor, "problems columns columns"]:
    flat = features.flatten(1, 2)
    return flat.mT @ (factors.flatten(1, 2).unsqueeze(-1) * flat)


def _mean_curvature(
    features: Tensor, mean_features: Tensor, pulled: Tensor
) -> Float[Tensor, "problems columns columns"]:
    """Second derivative of means a·p whose slopes p·(a - E[a]), times a factor, are `pulled`."""
    cross = _mean_over_levels(features, pulled).mT @ mean_features
    return _diagonal(features, pulled) - cross - cross.mT


def _pearson_curvature(
    loss: Loss,
    logits: Float[Tensor, "problems items levels"],
    features: Float[Tensor, "problems items levels columns"],
    gold: Float[Tensor, " items"],
    values: Float[Tensor, " levels"],
    weights: Float[Tensor, "problems items"],
) -> tuple[Float[Tensor, "problems columns columns"], Float[Tensor, "problems columns columns"]]:
    """Hessian of minus the correlation, which couples all items, and a semidefinite part of it."""
    probs = logits.softmax(-1)
    score = probs @ values
    share = weights / weights.sum(-1, keepdim=True).clamp(min=1)
    centred = score - (share * score).sum(-1, keepdim=True)
    deviation = (share * centred.square()).sum(-1, keepdim=True).sqrt().clamp(min=1e-9)
    gold = gold - (share * gold).sum(-1, keepdim=True)
    gold = gold / (share * gold.square()).sum(-1, keepdim=True).sqrt().clamp(min=1e-9)
    correlation = (share * centred * gold).sum(-1, keepdim=True) / deviation
    slopes = probs * (values - score.unsqueeze(-1))
    jacobian = _mean_over_levels(features, slopes)

    def mean(item_weights: Tensor) -> Tensor:
        return ((share * item_weights).unsqueeze(-2) @ jacobian).mT

    by_gold, by_score, plain = mean(gold), mean(centred), mean(torch.ones_like(gold))
    deviation, correlation = deviation.unsqueeze(-1), correlation.unsqueeze(-1)
    spread = jacobian.mT @ (share.unsqueeze(-1) * jacobian) - plain @ plain.mT
    along = by_score @ by_score.mT / deviation.square()
    gauss_newton = correlation.clamp(min=0.05) / deviation.square() * (spread - along)
    pull = share * (correlation[..., 0] * centred / deviation[..., 0] - gold) / deviation[..., 0]
    mean_features = _mean_over_levels(features, probs)
    curved = _mean_curvature(features, mean_features, pull.unsqueeze(-1) * slopes)
    cross = by_gold @ by_score.mT / deviation**3
    exact = curved + correlation / deviation.square() * (spread - 3 * along) + cross + cross.mT
    return exact, gauss_newton


def newton_step(
    objective: Objective,
    natural: Float[Tensor, "problems columns"],
    waiting: Bool[Tensor, " problems"],
) -> tuple[Float[Tensor, "problems columns"], Bool[Tensor, " problems"]]:
    """One damped Newton step of every waiting problem, and which still wait after it.

    Problems don't influence one another: each has its own step length.
    """
    natural, still = natural.clone(), waiting.clone()
    for index, block in objective.blocks(waiting.nonzero().flatten()):
        natural[index], still[index] = _block_step(block, natural[index])
    return natural, still


def _block_step(
    objective: Objective, natural: Float[Tensor, "problems columns"]
) -> tuple[Float[Tensor, "problems columns"], Bool[Tensor, " problems"]]:
    value, gradient, hessian = objective.derivatives(natural)
    step = -torch.linalg.solve(hessian, gradient.unsqueeze(-1)).squeeze(-1)
    # A problem without rows has nothing to move it.
    step = step.masked_fill((objective.weights.sum(-1) == 0).unsqueeze(-1), 0.0)
    slope = (gradient * step).sum(-1)
    length = torch.ones_like(value)
    if (columns := objective.head.columns.get("temperature")) is not None:
        # u = 1/T stays above 0, where the logarithm of the penalty is defined.
        at = columns.start
        length = length.minimum(0.9 * natural[:, at] / (-step[:, at]).clamp(min=1e-300))
    # So near the minimum the value can't show a descent; one full step ends the search.
    arrived = -slope / 2 <= _ARRIVED
    result = torch.where(arrived.unsqueeze(-1), natural + length.unsqueeze(-1) * step, natural)
    index = (~arrived).nonzero().flatten()
    for _ in range(40):
        if len(index) == 0:
            break
        trial = natural[index] + length[index].unsqueeze(-1) * step[index]
        part = objective if len(index) == len(natural) else objective._take(index)
        wanted = value[index] + 1e-4 * length[index] * slope[index]
        better = part.value(trial) <= wanted
        result[index[better]] = trial[better]
        index = index[~better]
        length[index] /= 2
    arrived[index] = True  # no descent at any length: rounding noise is all that is left
    return result, ~arrived


def newton(
    objective: Objective, natural: Float[Tensor, "problems columns"], *, steps: int = 200
) -> Float[Tensor, "problems columns"]:
    """Newton steps until every problem has arrived."""
    waiting = torch.ones(len(natural), dtype=torch.bool, device=natural.device)
    for _ in range(steps):
        natural, waiting = newton_step(objective, natural, waiting)
        if not waiting.any():
            break
    return natural
