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


def mean_logprobs(
    logprobs: Float[Tensor, "orders *batch levels"],
) -> Float[Tensor, "*batch levels"]:
    """Log of the mean label-renormalised distribution over the orders of a rubric (paper 3)."""
    return logprobs.softmax(-1).mean(0).log()


def label_logprobs(logits: Float[Tensor, "*batch levels"]) -> Float[Tensor, "*batch levels"]:
    """log_softmax(logits), with the items last in memory.

    Torch's own walks along the levels, and takes three times as long where they are few.
    """
    items = max(-2, -logits.dim())
    return logits.transpose(items, -1).log_softmax(items).transpose(items, -1)


def label_probs(logits: Float[Tensor, "*batch levels"]) -> Float[Tensor, "*batch levels"]:
    """softmax(logits), likewise."""
    items = max(-2, -logits.dim())
    return logits.transpose(items, -1).softmax(items).transpose(items, -1)


def expected_score(
    logits: Float[Tensor, "*batch levels"], values: Float[Tensor, " levels"]
) -> Float[Tensor, "*batch"]:
    """Mean of the label values under softmax(logits) (paper 1, eq. 4)."""
    return (label_probs(logits) * values).sum(-1)


def rankable_score(
    logits: Float[Tensor, "*batch levels"], values: Float[Tensor, " levels"]
) -> Float[Tensor, "*batch"]:
    """The expected score to ten decimals: equal distributions tie, rounding noise is not ranked."""
    return expected_score(logits, values).round(decimals=10)
