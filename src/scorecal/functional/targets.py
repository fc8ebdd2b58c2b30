"""Gold scores as distributions over the labels."""

import torch
from jaxtyping import Float
from torch import Tensor


def interpolated_target(
    gold: Float[Tensor, "*batch"], values: Float[Tensor, " levels"]
) -> Float[Tensor, "*batch levels"]:
    """Gold's mass on its two neighbouring values, by proximity (paper 1, §4.2).

    Raises:
        ValueError: a gold score is NaN or outside the values.

    >>> interpolated_target(torch.tensor([1.25]), torch.tensor([0.0, 1.0, 2.0]))
    tensor([[0.0000, 0.7500, 0.2500]])
    """
    outside = ~((gold >= values[0]) & (gold <= values[-1]))
    if outside.any():
        raise ValueError(
            f"gold scores must lie within {values[0]:g}..{values[-1]:g}, "
            f"got {gold[outside].flatten()[0]:g}. Check `data.task.scale` and `gold_factor`."
        )
    upper = torch.searchsorted(values, gold.contiguous()).clamp(min=1)
    low, high = values[upper - 1], values[upper]
    share = (gold - low) / (high - low)
    target = gold.new_zeros(*gold.shape, len(values))
    target.scatter_(-1, (upper - 1).unsqueeze(-1), (1 - share).unsqueeze(-1))
    return target.scatter_(-1, upper.unsqueeze(-1), share.unsqueeze(-1))
