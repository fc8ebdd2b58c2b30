"""Where in a rubric a judge's probability lies, whatever score stands there (paper 3)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

PERMUTATIONS = 2000
_BLOCK = 2_000_000  # permuted groups held at once
_ROUNDING = 1e-24  # squared: what a mass of exactly 1/K is off by


def position_mass(
    logprobs: Float[Tensor, "orders items levels"], shown: Int[Tensor, "orders levels"]
) -> Float[Tensor, "items levels"]:
    """Mean label-renormalised probability at each position of the rubric, over the orders.

    Over balanced orders every score stands once at every position, so that what an item deserves
    drops out: a judge that answers all orders alike has exactly 1/K at each of K positions.

    Args:
        logprobs: label log-probabilities under each order.
        shown: the level that stands at each position of each order.

    Returns:
        One probability a position; an item's sum to 1.
    """
    at_position = shown.unsqueeze(1).expand_as(logprobs)
    return logprobs.softmax(-1).gather(-1, at_position).mean(0)


def cramers_v(shares: Float[Tensor, "*batch levels"]) -> Float[Tensor, "*batch"]:
    """How far shares lie from uniform: 0 where they are, 1 where one has everything.

    V = √(χ² / (n·(K - 1))) of the one-way table of n answers, χ² = Σ_k (n·p_k - n/K)² / (n/K), an
    item's answer counted in parts by its probabilities. n drops out: V = √(K·Σ_k (p_k - 1/K)² /
    (K - 1)). Sampling noise alone makes it positive: `shift_test` says how probably.
    """
    levels = shares.shape[-1]
    return ((shares - 1 / levels).square().sum(-1) * levels / (levels - 1)).sqrt()


def shift_test(
    mass: Float[Tensor, "items levels"],
    groups: Int[Tensor, " items"],
    *,
    permutations: int = PERMUTATIONS,
    generator: torch.Generator,
) -> float:
    """P-value of positions not mattering, by turning whole groups of items through the positions.

    The statistic is Σ_k (mean mass at k - 1/K)² over the items, which is Cramér's V squared but for
    a constant. If the orders of an item differ by noise alone, they may be exchanged. Beginning the
    rotations elsewhere moves an item's masses round by as many positions; it does not permute them
    freely, since neighbouring scores rise and fall together, and with them the masses at
    neighbouring positions. So a group's masses, summed, are turned by one uniform number of
    positions. Free permutations would take the positions for independent: at a nominal 5 % they
    found a bias in 12 % of simulated draws without one (10 scores, orders that move the score),
    turns in 5 %.

    An effect of single orders that is none of position, but the same for all items, can't be told
    from one: the balanced orders are all that there is to compare.

    Items of a group may depend on each other in any way; groups may not. With one group nothing can
    be told and p is 1. (A χ² test would count the items, or even their orders, as independent.)

    Args:
        mass: `position_mass` over balanced orders.
        groups: each item's group, numbered 0..G-1.
        permutations: turned data sets that are drawn, beside the data themselves.
        generator: of the draws.

    Returns:
        (1 + turned data sets at least as far from uniform) / (1 + `permutations`).
    """
    items, levels = mass.shape
    sums = mass.new_zeros(int(groups.max()) + 1, levels).index_add_(0, groups, mass - 1 / levels)
    bound = (sums.sum(0) / items).square().sum() * (1 - 1e-9) - _ROUNDING
    as_far = 0
    block = max(1, _BLOCK // len(sums))
    for start in range(0, permutations, block):
        drawn = min(block, permutations - start)
        turns = torch.randint(levels, (drawn, len(sums)), generator=generator)
        total = mass.new_zeros(drawn, levels)
        for turn in range(levels):
            total += (turns == turn).to(mass.dtype) @ sums.roll(turn, -1)
        as_far += int(((total / items).square().sum(-1) >= bound).sum())
    return (1 + as_far) / (1 + permutations)
