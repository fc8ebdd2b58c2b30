"""Correlations of weighted samples; a weight acts like repeating the item that many times.

`weights` may carry leading axes (folds, bootstrap resamples). A correlation is NaN where either
side is constant: a silent 0 would read as a measured absence of correlation.
"""

import torch
from jaxtyping import Float, Num
from torch import Tensor


def weighted_sum(
    values: Num[Tensor, "*#batch items"], weights: Float[Tensor, "*#batch items"]
) -> Float[Tensor, "*batch"]:
    """Sum of values times weights; an item of weight 0 is absent, whatever its value."""
    if values.isfinite().all():
        if values.dim() == 1:
            return weights @ values.to(weights.dtype)  # many weights, one sample: one product
        return (values * weights).sum(-1)
    return (values * weights).where(weights > 0, 0.0).sum(-1)


def pearson(
    x: Num[Tensor, "*#batch items"],
    y: Num[Tensor, "*#batch items"],
    weights: Float[Tensor, "*#batch items"],
) -> Float[Tensor, "*batch"]:
    """Weighted Pearson correlation."""
    if not (x.isfinite().all() and y.isfinite().all()):
        x, y = x.where(weights > 0, 0.0), y.where(weights > 0, 0.0)
    # About the plain mean first: what is left is small against no offset of the data's.
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    total = weights.sum(-1)
    x_mean, y_mean = weighted_sum(x, weights) / total, weighted_sum(y, weights) / total
    covariance = weighted_sum(x * y, weights) / total - x_mean * y_mean
    return covariance / (_deviation(x, x_mean, weights) * _deviation(y, y_mean, weights))


def _deviation(x: Tensor, mean: Tensor, weights: Tensor) -> Tensor:
    """Standard deviation; NaN where it is no more than rounding noise."""
    square = weighted_sum(x.square(), weights) / weights.sum(-1)
    variance = square - mean.square()
    return variance.where(variance > 1e-13 * square, torch.nan).sqrt()


def _mid_ranks(
    x: Float[Tensor, "*#batch items"], weights: Float[Tensor, "*#batch items"]
) -> Float[Tensor, "*#batch items"]:
    """Ranks with ties averaged, of the sample in which item i stands weights[i] times."""
    ordered, order = x.sort(-1)  # once per x, however many rows of weights there are
    level = torch.zeros_like(order)
    level[..., 1:] = (ordered.diff(dim=-1) > 0).long().cumsum(-1)
    inverse = torch.empty_like(level).scatter_(-1, order, level)
    inverse, weights = torch.broadcast_tensors(inverse, weights)
    mass = torch.zeros_like(weights).scatter_add_(-1, inverse, weights)
    return (mass.cumsum(-1) - (mass - 1) / 2).gather(-1, inverse).where(~x.isnan(), x)


def spearman(
    x: Float[Tensor, "*#batch items"],
    y: Float[Tensor, "*#batch items"],
    weights: Float[Tensor, "*#batch items"],
) -> Float[Tensor, "*batch"]:
    """Spearman's rank correlation with ties averaged."""
    total = weights.sum(-1, keepdim=True)
    # The mean rank on either side is (total + 1) / 2, whatever the ties.
    x, y = (_mid_ranks(side, weights) - (total + 1) / 2 for side in (x, y))
    if x.isnan().any() or y.isnan().any():
        x, y = x.where(weights > 0, 0.0), y.where(weights > 0, 0.0)
    weighted = weights * x
    covariance, x_square = (weighted * y).sum(-1), (weighted * x).sum(-1)
    y_square = (weights * y * y).sum(-1)
    noise = 1e-26 * total[..., 0] ** 3  # of ranks that are all the same
    defined = (x_square > noise) & (y_square > noise)
    return (covariance / (x_square * y_square).sqrt()).where(defined, torch.nan)


def kendall(
    x: Float[Tensor, "*#batch items"],
    y: Float[Tensor, "*#batch items"],
    weights: Float[Tensor, "*#batch items"],
) -> Float[Tensor, "*batch"]:
    """Kendall's tau-b. Quadratic in the items: for point estimates, not for resampling."""
    shape = torch.broadcast_shapes(x.shape, y.shape, weights.shape)
    x, y, weights = x.expand(shape), y.expand(shape), weights.expand(shape)
    missing = ((weights > 0) & (x.isnan() | y.isnan())).any(-1)
    concordance = weights.new_zeros(shape[:-1]).masked_fill(missing, torch.nan)
    untied_x, untied_y = concordance.clone(), concordance.clone()
    for start in range(0, shape[-1], 512):  # blocks of rows bound the memory
        block = slice(start, start + 512)
        sign_x = (x[..., block, None] - x[..., None, :]).sign()
        sign_y = (y[..., block, None] - y[..., None, :]).sign()
        pair = weights[..., block, None] * weights[..., None, :]
        concordance += (pair * sign_x * sign_y).sum((-2, -1))
        untied_x += (pair * sign_x.abs()).sum((-2, -1))
        untied_y += (pair * sign_y.abs()).sum((-2, -1))
    return concordance / (untied_x * untied_y).sqrt()
