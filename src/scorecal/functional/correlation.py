"""Correlations of weighted samples; a weight acts like repeating the item that many times.

`weights` may carry leading axes (folds, bootstrap resamples). A correlation is NaN where either
side is constant: a silent 0 would read as a measured absence of correlation.
"""

import torch
from jaxtyping import Float, Num
from torch import Tensor


def pearson(
    x: Num[Tensor, "*#batch items"],
    y: Num[Tensor, "*#batch items"],
    weights: Float[Tensor, "*#batch items"],
) -> Float[Tensor, "*batch"]:
    """Weighted Pearson correlation."""
    # An item of weight 0 is absent: its value, NaN or infinite, must not enter.
    x, y = x.where(weights > 0, 0.0), y.where(weights > 0, 0.0)
    total = weights.sum(-1, keepdim=True)
    x_centred = x - (weights * x).sum(-1, keepdim=True) / total
    y_centred = y - (weights * y).sum(-1, keepdim=True) / total
    covariance = (weights * x_centred * y_centred).sum(-1)
    return covariance / (_spread(x, x_centred, weights) * _spread(y, y_centred, weights))


def _spread(x: Tensor, centred: Tensor, weights: Tensor) -> Tensor:
    """Root of the weighted sum of squares; NaN where it is no more than rounding noise."""
    squares = (weights * centred.square()).sum(-1)
    noise = 1e-28 * (weights * x.square()).sum(-1)
    return squares.where(squares > noise, torch.nan).sqrt()


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
    return pearson(_mid_ranks(x, weights), _mid_ranks(y, weights), weights)


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
