"""Methods that are not the head: score-only references to compare it with."""

import torch
from jaxtyping import Float
from torch import Tensor

_PENALTIES = tuple(10.0 ** (step / 2) for step in range(-6, 9))


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
