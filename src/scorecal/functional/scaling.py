"""From label log-probabilities to a latent number bias, a debiasing term and a score."""

import math

from jaxtyping import Float
from torch import Tensor


def latent_number_bias(
    logprobs: Float[Tensor, "prompts levels"], *, temperature: float = 1.0, floor: float = 1e-12
) -> Float[Tensor, " levels"]:
    """Mean label-renormalised distribution over prompts (paper 1, eq. 1).

    Values up to `floor` are set to it afterwards, without another normalisation.
    """
    return (logprobs / temperature).softmax(-1).mean(0).clamp(min=floor)


def debiasing_term(probs: Float[Tensor, "*batch levels"]) -> Float[Tensor, "*batch levels"]:
    """B(y) = log(1/K) - log P(y) (paper 1, eq. 2)."""
    return -math.log(probs.shape[-1]) - probs.log()


def expected_score(
    logits: Float[Tensor, "*batch levels"], values: Float[Tensor, " levels"]
) -> Float[Tensor, "*batch"]:
    """Mean of the label values under softmax(logits) (paper 1, eq. 4)."""
    return logits.softmax(-1) @ values


def rankable_score(
    logits: Float[Tensor, "*batch levels"], values: Float[Tensor, " levels"]
) -> Float[Tensor, "*batch"]:
    """The expected score to ten decimals: equal distributions tie, rounding noise is not ranked."""
    return expected_score(logits, values).round(decimals=10)
