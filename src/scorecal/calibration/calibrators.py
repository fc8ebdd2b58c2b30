"""Methods that are not the head, to compare it with: constant, ridge, isotonic, ordinal, Beta."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from scorecal.calibration.solvers import own_rows

_PENALTIES = tuple(10.0 ** (step / 2) for step in range(-6, 9))
_CONCENTRATION = 1e3  # of a Beta whose gold lies in one cell: its likelihood has no maximum
_FLOOR = 1e-12


def constant_fit(
    gold: Float[Tensor, " items"], train: Float[Tensor, "problems items"]
) -> Float[Tensor, " problems"]:
    """The constant predictor: mean gold of the training rows."""
    return (train * gold).sum(-1) / train.sum(-1).clamp(min=1)


def ridge_fit(
    features: Float[Tensor, "items features"],
    gold: Float[Tensor, " items"],
    train: Float[Tensor, " items"],
    inner: list[Float[Tensor, " items"]],
) -> Float[Tensor, " coefficients"]:
    """Ridge regression of gold on standardised features: intercept, then one slope a feature.

    Standardisation and penalty come from the training rows alone; the penalty is the one of least
    squared error on the inner held-out parts.
    """
    errors = torch.zeros(len(_PENALTIES), dtype=features.dtype)
    for part in inner:
        rest = train * (1 - part)
        for index, penalty in enumerate(_PENALTIES):
            predicted = ridge_predict(_solve(features, gold, rest, penalty), features)
            errors[index] += (part * (predicted - gold).square()).sum()
    return _solve(features, gold, train, _PENALTIES[int(errors.argmin())])


def ridge_predict(
    coefficients: Float[Tensor, " coefficients"], features: Float[Tensor, "items features"]
) -> Float[Tensor, " items"]:
    """Scores of a `ridge_fit`."""
    return coefficients[0] + features @ coefficients[1:]


def _solve(
    features: Tensor, gold: Tensor, weights: Float[Tensor, " items"], penalty: float
) -> Float[Tensor, " coefficients"]:
    total = weights.sum().clamp(min=1)
    mean, target = weights @ features / total, weights @ gold / total
    centred = features - mean
    spread = (weights @ centred.square() / total).sqrt().clamp(min=1e-12)
    scaled = centred / spread
    unit = torch.eye(features.shape[1], dtype=features.dtype)
    gram = scaled.T @ (weights.unsqueeze(-1) * scaled) + penalty * unit
    slopes = torch.linalg.solve(gram, scaled.T @ (weights * (gold - target))) / spread
    return torch.cat([(target - mean @ slopes).unsqueeze(0), slopes])


class Steps(NamedTuple):
    """An isotonic regression: knots, linear between and constant outside."""

    x: Float[Tensor, " knots"]
    y: Float[Tensor, " knots"]


def isotonic_fit(score: Float[Tensor, " items"], gold: Float[Tensor, " items"]) -> Steps:
    """Isotonic regression of gold on the score, which keeps its order and makes ties."""
    from scipy.optimize import isotonic_regression

    knots, position, count = score.unique(return_inverse=True, return_counts=True)
    mean = torch.zeros_like(knots).scatter_add_(0, position, gold) / count
    fit = isotonic_regression(mean.numpy(), weights=count.double().numpy())
    return Steps(knots, torch.from_numpy(fit.x))


def isotonic_predict(steps: Steps, score: Float[Tensor, " items"]) -> Float[Tensor, " items"]:
    """Scores of an `isotonic_fit`."""
    import numpy

    return torch.from_numpy(numpy.interp(score.numpy(), steps.x.numpy(), steps.y.numpy()))


def beta_label_prior(
    gold: Float[Tensor, " items"], low: float, high: float, levels: int
) -> tuple[Float[Tensor, " levels"], bool]:
    """Probabilities of K equal cells under a Beta fitted to gold, and whether gold fills one only.

    The likelihood is of the cells that gold lies in, so that gold at the ends stays finite.
    """
    from scipy.optimize import minimize
    from scipy.special import betainc

    edges = torch.linspace(0, 1, levels + 1, dtype=torch.float64).numpy()
    share = (gold - low) / (high - low)
    cells = (share * levels + 1e-9).long().clamp(0, levels - 1)
    count = torch.bincount(cells, minlength=levels).double().numpy()

    def masses(a: float, b: float) -> Tensor:
        below = torch.from_numpy(betainc(a, b, edges))
        return below.diff().clamp(min=_FLOOR)

    alone = bool((count > 0).sum() == 1)
    if alone:
        centre = (int(cells[0]) + 0.5) / levels
        return masses(_CONCENTRATION * centre, _CONCENTRATION * (1 - centre)), True

    def shape(point: Any) -> tuple[float, float]:
        mean, total = 1 / (1 + math.exp(-point[0])), math.exp(point[1])
        return max(mean * total, 1e-9), max((1 - mean) * total, 1e-9)

    def cost(point: Any) -> float:
        a, b = shape(point)
        return -float((torch.from_numpy(count) * masses(a, b).log()).sum()) / count.sum()

    mean, variance = share.mean().item(), max(share.var(correction=0).item(), 1e-6)
    mean = min(max(mean, 1e-3), 1 - 1e-3)
    total = max(mean * (1 - mean) / variance - 1, 0.1)
    # Mean and concentration: gold at the ends alone wants the smallest one, at its own mean.
    start = [math.log(mean / (1 - mean)), math.log(total)]
    bounds = [(-12.0, 12.0), (-10.0, 14.0)]
    fit = minimize(
        cost, start, method="Nelder-Mead", bounds=bounds, options={"xatol": 1e-7, "fatol": 1e-12}
    )
    return masses(*shape(fit.x)), False


class Ordinal(NamedTuple):
    """Cumulative-link models, one a problem: P(y <= v_k) = sigmoid(threshold_k - slopes·x)."""

    slopes: Float[Tensor, "problems features"]
    thresholds: Float[Tensor, "problems cuts"]


def ordinal_fit(
    features: Float[Tensor, "items features"],
    target: Float[Tensor, "items levels"],
    train: Float[Tensor, "problems items"],
    *,
    ridge: float,
) -> Ordinal:
    """Proportional-odds regression of a target distribution (McCullagh 1980), by Newton's method.

    The ridge acts on the slopes of standardised features and, as pseudo-observations of every level
    at their mean, keeps a level without gold from closing up.
    """
    total = train.sum(-1, keepdim=True).clamp(min=1)
    mean = train @ features / total
    spread = ((train @ features.square()) / total - mean.square()).clamp(min=1e-24).sqrt()
    own, weights = own_rows(train)
    weights = weights / total
    x = (features[own] - mean.unsqueeze(1)) / spread.unsqueeze(1)
    levels, count = target.shape[1], features.shape[1]
    pseudo = ridge / total
    y = torch.cat([target[own], target.new_full((len(train), 1, levels), 1 / levels)], 1)
    x = torch.cat([x, x.new_zeros(len(train), 1, count)], 1)
    weights = torch.cat([weights, pseudo], 1)

    share = (weights.unsqueeze(-1) * y).sum(1) / weights.sum(1, keepdim=True)
    start = (0.9 * share + 0.1 / levels).cumsum(-1)[:, :-1].logit()
    flat = torch.cat([start.new_zeros(len(train), count), start], -1)

    def value(flat: Tensor) -> Float[Tensor, " problems"]:
        model = Ordinal(flat[:, :count], flat[:, count:])
        logprobs = _ordinal_logprobs(
            (x * model.slopes.unsqueeze(1)).sum(-1), model.thresholds.unsqueeze(1)
        )
        fit = -(weights * (y * logprobs).sum(-1)).sum(-1)
        return (fit + pseudo[:, 0] * model.slopes.square().sum(-1)).where(
            (model.thresholds.diff(dim=-1) > 0).all(-1), torch.inf
        )

    waiting = torch.ones(len(flat), dtype=torch.bool)
    for _ in range(100):
        gradient, hessian = _ordinal_derivatives(flat, x, y, weights)
        gradient[:, :count] += 2 * pseudo * flat[:, :count]
        hessian[:, range(count), range(count)] += 2 * pseudo
        step = -torch.linalg.solve(hessian, gradient.unsqueeze(-1)).squeeze(-1)
        decrement = -(gradient * step).sum(-1)
        waiting = waiting & (decrement > 1e-14)
        length, now = waiting.double(), value(flat)
        for _ in range(40):
            worse = waiting & ~(value(flat + length.unsqueeze(-1) * step)
                                <= now - 1e-4 * length * decrement)  # fmt: skip
            if not worse.any():
                break
            length = length.where(~worse, length / 2)
        waiting = waiting & ~worse  # no descent at any length: rounding noise is left
        flat = torch.where(waiting.unsqueeze(-1), flat + length.unsqueeze(-1) * step, flat)
        if not waiting.any():
            break
    slopes = flat[:, :count] / spread
    return Ordinal(slopes, flat[:, count:] + (slopes * mean).sum(-1, keepdim=True))


def ordinal_predict(
    model: Ordinal, features: Float[Tensor, "items features"]
) -> Float[Tensor, "problems items levels"]:
    """Log-probabilities of an `ordinal_fit`."""
    return _ordinal_logprobs(model.slopes @ features.T, model.thresholds.unsqueeze(1))


def _ordinal_logprobs(
    position: Float[Tensor, "problems items"], thresholds: Float[Tensor, "problems one cuts"]
) -> Float[Tensor, "problems items levels"]:
    distance = thresholds - position.unsqueeze(-1)
    # sigmoid(a) - sigmoid(b) = sigmoid(a) · sigmoid(-b) · (1 - exp(b - a)), which does not cancel
    gaps = thresholds.diff(dim=-1).clamp(min=1e-300)
    closing = torch.log(-torch.expm1(-gaps)).expand(*distance.shape[:-1], -1)
    upper = torch.cat([logsigmoid(distance), torch.zeros_like(distance[..., :1])], -1)
    lower = torch.cat([torch.zeros_like(distance[..., :1]), logsigmoid(-distance)], -1)
    ends = torch.zeros_like(distance[..., :1])
    return upper + lower + torch.cat([ends, closing, ends], -1)


def _ordinal_derivatives(
    flat: Float[Tensor, "problems columns"],
    x: Float[Tensor, "problems items features"],
    y: Float[Tensor, "problems items levels"],
    weights: Float[Tensor, "problems items"],
) -> tuple[Float[Tensor, "problems columns"], Float[Tensor, "problems columns columns"]]:
    """Gradient and Hessian of the cross-entropy by slopes and thresholds."""
    count = x.shape[-1]
    position, thresholds = (x * flat[:, None, :count]).sum(-1), flat[:, None, count:]
    distance = thresholds - position.unsqueeze(-1)
    logprobs = _ordinal_logprobs(position, thresholds)
    density = logsigmoid(distance) + logsigmoid(-distance)
    turn = 1 - 2 * torch.sigmoid(distance)  # density' = density · turn
    # Each cut ends the level below it and begins the one above.
    ends, begins = (density - logprobs[..., :-1]).exp(), (density - logprobs[..., 1:]).exp()
    below, above = y[..., :-1], y[..., 1:]
    slopes = above * begins - below * ends
    curves = torch.diag_embed(below * ends * (ends - turn) + above * begins * (begins + turn))
    shared = -(y[..., 1:-1] * ends[..., 1:] * begins[..., :-1])
    curves = curves + torch.diag_embed(shared, 1) + torch.diag_embed(shared, -1)
    slopes, curves = weights.unsqueeze(-1) * slopes, weights[..., None, None] * curves
    rows = curves.sum(-1)
    gradient = torch.cat([-(slopes.sum(-1, keepdim=True) * x).sum(1), slopes.sum(1)], -1)
    corner = x.mT @ (rows.sum(-1, keepdim=True) * x)
    side = -(x.mT @ rows)
    hessian = torch.cat(
        [torch.cat([corner, side], -1), torch.cat([side.mT, curves.sum(1)], -1)], -2
    )
    return gradient, hessian
