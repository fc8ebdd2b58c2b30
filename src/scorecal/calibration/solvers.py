"""The training objective of many problems at once, and Newton's method for it."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scorecal.calibration.head import Curved, Design, NaturalHead
from scorecal.functional.losses import (
    negative_pearson,
    ranked_probability_score,
    soft_cross_entropy,
    squared_error,
)
from scorecal.functional.scaling import label_probs
from scorecal.functional.targets import interpolated_target

Loss = Literal["nll", "mse", "rps", "pearson"]
_BLOCK = 3_000_000  # numbers of features held at once; more don't fit a cache
_ROUND = 5  # steps that a block's design serves, before the problems still waiting are put together
_ARRIVED = 1e-13  # half the squared Newton decrement, in units of the loss
_NEAR = 1e-6  # likewise, where another loss goes on from there; the last step about squares it


class Rows(NamedTuple):
    """What the objective reads of each item; the items of all problems, or of each its own."""

    logprobs: Float[Tensor, "*problems items levels"]
    assistant: Float[Tensor, "*problems items levels"]
    gold: Float[Tensor, "*problems items"]
    values: Float[Tensor, " levels"]

    def take(self, index: Int[Tensor, "..."]) -> "Rows":
        """Some items, or some problems, by their first axis."""
        return Rows(self.logprobs[index], self.assistant[index], self.gold[index], self.values)


def mean_loss(
    loss: Loss,
    logits: Float[Tensor, "problems items levels"],
    gold: Float[Tensor, "*#problems items"],
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


def own_rows(
    weights: Float[Tensor, "problems items"],
) -> tuple[Int[Tensor, "problems own"], Float[Tensor, "problems own"]]:
    """Items of each problem that have weight, and their weights.

    Where a problem has fewer of them than another, some of weight 0 follow.
    """
    most = int((weights > 0).sum(-1).max())
    own = (weights > 0).byte().sort(dim=-1, descending=True, stable=True).indices[:, :most]
    return own, weights.gather(1, own)


class Objective:
    """Mean training loss plus penalty of each problem, as a function of natural parameters."""

    def __init__(self, head: NaturalHead, rows: Rows, loss: Loss) -> None:
        own, self.weights = own_rows(head.problems.train)
        slim = head.problems._replace(train=self.weights, held_out=self.weights[:, :0])
        self.head = NaturalHead(slim, head.settings)
        self.rows = rows.take(own)
        self.loss = loss
        features = 1 + len(rows.values) * ("mixing" in head.columns)
        ranks = len(rows.values) - 1 if loss == "rps" else 1
        numbers = own.shape[1] * (4 * ranks * (head.width + len(rows.values)) + features**2)
        self._block = max(1, _BLOCK // max(1, numbers))
        self._design: Design | None = None

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
        part.rows = self.rows.take(index)
        if self._design is not None:
            part._design = self._design.take(index)
        return part

    @property
    def design(self) -> Design:
        """The training rows' logits as a linear function."""
        if self._design is None:
            self._design = self.head.design(self.rows.logprobs, self.rows.assistant)
        return self._design

    def value(self, natural: Float[Tensor, "problems columns"]) -> Float[Tensor, " problems"]:
        """Loss plus penalty."""
        return self._loss(self.design.logits(natural)) + self.head.penalty(natural)

    def _loss(self, logits: Float[Tensor, "problems items levels"]) -> Float[Tensor, " problems"]:
        return mean_loss(self.loss, logits, self.rows.gold, self.rows.values, self.weights)

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
        design = self.design
        with torch.enable_grad():
            logits = design.logits(natural.detach()).requires_grad_()
            natural = natural.detach().requires_grad_()
            loss, penalty = self._loss(logits), self.head.penalty(natural)
            [slopes] = torch.autograd.grad(loss.sum(), logits)
            [gradient] = torch.autograd.grad(penalty.sum(), natural)
        value, logits, natural = (loss + penalty).detach(), logits.detach(), natural.detach()
        gradient = gradient + design.pulled_back(slopes)
        penalty = self.head.penalty_hessian(natural)
        hessian = self._curvature(logits, exact=True) + penalty
        # Without a ridge a constant bias is a flat direction; this keeps the system solvable.
        jitter = torch.diag_embed(1e-10 * hessian.diagonal(dim1=-2, dim2=-1).abs() + 1e-30)
        hessian, penalty = hessian + jitter, penalty + jitter
        bad = torch.linalg.cholesky_ex(hessian).info > 0
        if self.loss != "nll" and bad.any():
            index = bad.nonzero().flatten()
            hessian[index] = (
                self._take(index)._curvature(logits[index], exact=False) + penalty[index]
            )
        return value, gradient, hessian

    def _curvature(
        self, logits: Float[Tensor, "problems items levels"], *, exact: bool
    ) -> Float[Tensor, "problems columns columns"]:
        """Hessian of the loss, or its positive semidefinite Gauss-Newton part."""
        gold, values = self.rows.gold, self.rows.values
        share = self.weights / self.weights.sum(-1, keepdim=True).clamp(min=1)
        if self.loss == "pearson":
            return _pearson_curvature(self.design, logits, gold, values, share, exact=exact)
        return self.design.curvature(
            _item_curvature(self.loss, logits, gold, values, share, exact=exact)
        )


def _item_curvature(
    loss: Loss,
    logits: Float[Tensor, "problems items levels"],
    gold: Float[Tensor, "problems items"],
    values: Float[Tensor, " levels"],
    share: Float[Tensor, "problems items"],
    *,
    exact: bool,
) -> Curved:
    """Second derivative of each item's share of a mean loss by its logits."""
    probs = label_probs(logits)
    if loss == "nll":
        shared = share.unsqueeze(-1) * probs
        return Curved(shared, -shared.unsqueeze(-2), probs.unsqueeze(-2))
    # MSE and RPS are squared distances of means E[a] = a·p from targets, MSE with one vector a.
    if loss == "rps":
        vectors = torch.ones(len(values), len(values), dtype=probs.dtype, device=probs.device)
        vectors = vectors.tril()[:-1]
        targets = interpolated_target(gold, values) @ vectors.T
        share = share / (len(values) - 1)
    else:
        vectors, targets = values.unsqueeze(0), gold.unsqueeze(-1)
    means = probs @ vectors.T
    second = (2 * share).unsqueeze(-1).expand_as(means)
    first = second * (means - targets) if exact else torch.zeros_like(means)
    return _of_means(probs, vectors, first, second)


def _of_means(
    probs: Float[Tensor, "problems items levels"],
    vectors: Float[Tensor, "ranks levels"],
    first: Float[Tensor, "problems items ranks"],
    second: Float[Tensor, "problems items ranks"],
) -> Curved:
    """Of a function of the means a·p, by its first and second derivatives by each mean."""
    means = probs @ vectors.T
    slopes = probs.unsqueeze(-2) * (vectors - means.unsqueeze(-1))  # ∂ mean / ∂ z
    pulled = first.unsqueeze(-1) * slopes
    # A mean's own second derivative is diag(slopes) - slopes·pᵀ - p·slopesᵀ.
    right = second.unsqueeze(-1) * slopes - 2 * first.unsqueeze(-1) * probs.unsqueeze(-2)
    return Curved(pulled.sum(-2), slopes, right)


def _pearson_curvature(
    design: Design,
    logits: Float[Tensor, "problems items levels"],
    gold: Float[Tensor, "problems items"],
    values: Float[Tensor, " levels"],
    share: Float[Tensor, "problems items"],
    *,
    exact: bool,
) -> Float[Tensor, "problems columns columns"]:
    """Hessian of minus the correlation, which couples all items, or a semidefinite part of it."""
    probs = label_probs(logits)
    score = probs @ values
    centred = score - (share * score).sum(-1, keepdim=True)
    deviation = (share * centred.square()).sum(-1, keepdim=True).sqrt().clamp(min=1e-9)
    gold = gold - (share * gold).sum(-1, keepdim=True)
    gold = gold / (share * gold.square()).sum(-1, keepdim=True).sqrt().clamp(min=1e-9)
    correlation = (share * centred * gold).sum(-1, keepdim=True) / deviation
    slopes = probs * (values - score.unsqueeze(-1))

    def mean(item_weights: Tensor) -> Float[Tensor, "problems columns one"]:
        return design.pulled_back((share * item_weights).unsqueeze(-1) * slopes).unsqueeze(-1)

    by_gold, by_score, plain = mean(gold), mean(centred), mean(torch.ones_like(gold))
    scale = (correlation if exact else correlation.clamp(min=0.05)) / deviation.square()
    pull = share * (correlation * centred / deviation - gold) / deviation
    first = pull if exact else torch.zeros_like(pull)
    curved = _of_means(
        probs, values.unsqueeze(0), first.unsqueeze(-1), (scale * share).unsqueeze(-1)
    )
    deviation, scale = deviation.unsqueeze(-1), scale.unsqueeze(-1)
    along = by_score @ by_score.mT / deviation.square()
    hessian = design.curvature(curved) - scale * (plain @ plain.mT)
    if not exact:
        return hessian - scale * along
    cross = by_gold @ by_score.mT / deviation**3
    return hessian - 3 * scale * along + cross + cross.mT


def newton_step(
    objective: Objective,
    natural: Float[Tensor, "problems columns"],
    waiting: Bool[Tensor, " problems"],
    *,
    steps: int = 1,
    enough: float = _ARRIVED,
) -> tuple[Float[Tensor, "problems columns"], Bool[Tensor, " problems"]]:
    """Damped Newton steps of every waiting problem, and which still wait after them.

    Problems don't influence one another: each has its own step length.
    """
    natural, waiting = natural.clone(), waiting.clone()
    for index, block in objective.blocks(waiting.nonzero().flatten()):
        for _ in range(steps):
            natural[index], still = _block_step(block, natural[index], enough)
            waiting[index] = still
            if not still.any():
                break
            if not still.all():
                index, block = index[still], block._take(still.nonzero().flatten())
    return natural, waiting


def _block_step(
    objective: Objective, natural: Float[Tensor, "problems columns"], enough: float
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
    arrived = -slope / 2 <= enough
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
    objective: Objective,
    natural: Float[Tensor, "problems columns"],
    *,
    steps: int = 50,
    exact: bool = True,
) -> Float[Tensor, "problems columns"]:
    """Newton steps until every problem has arrived, or is as near as another loss needs."""
    enough = _ARRIVED if exact else _NEAR
    waiting = torch.ones(len(natural), dtype=torch.bool, device=natural.device)
    for done in range(0, steps, _ROUND):
        now = min(_ROUND, steps - done)
        natural, waiting = newton_step(objective, natural, waiting, steps=now, enough=enough)
        if not waiting.any():
            break
    return natural
