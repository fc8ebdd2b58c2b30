"""Bootstrap over groups of items."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def bootstrap_weights(
    groups: Int[Tensor, " items"], *, resamples: int, generator: torch.Generator
) -> Float[Tensor, "resamples items"]:
    """How often each item's group (numbered 0..G-1) is drawn, G draws with replacement a row."""
    count = int(groups.max()) + 1
    drawn = torch.randint(count, (resamples, count), generator=generator)
    times = torch.zeros(resamples, count, dtype=torch.float64)
    times.scatter_add_(1, drawn, torch.ones_like(times))
    return times[:, groups]


def percentile_interval(
    samples: Float[Tensor, "samples ..."], *, level: float = 0.95
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Lower and upper percentile over axis 0; NaN samples (undefined metrics) are left out."""
    tail = (1 - level) / 2
    return samples.nanquantile(tail, dim=0), samples.nanquantile(1 - tail, dim=0)
