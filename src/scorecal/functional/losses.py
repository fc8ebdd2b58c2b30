"""Losses of a score distribution: one value per item, `negative_pearson` one per batch."""

from jaxtyping import Float
from torch import Tensor

from scorecal.functional.correlation import pearson
from scorecal.functional.scaling import expected_score, label_logprobs, label_probs


def soft_cross_entropy(
    logits: Float[Tensor, "*#batch levels"], target: Float[Tensor, "*#batch levels"]
) -> Float[Tensor, "*batch"]:
    """Cross-entropy of softmax(logits) against a target distribution."""
    # A label without target mass contributes 0 even where its log-probability is -inf.
    return -(target * label_logprobs(logits)).masked_fill(target == 0, 0.0).sum(-1)


def squared_error(
    logits: Float[Tensor, "*#batch levels"],
    gold: Float[Tensor, "*#batch"],
    values: Float[Tensor, " levels"],
) -> Float[Tensor, "*batch"]:
    """Squared distance of the expected score from gold."""
    return (expected_score(logits, values) - gold).square()


def ranked_probability_score(
    logits: Float[Tensor, "*#batch levels"], target: Float[Tensor, "*#batch levels"]
) -> Float[Tensor, "*batch"]:
    """Mean over the K-1 thresholds of the squared difference of the two CDFs (Epstein 1969)."""
    difference = (label_probs(logits) - target).cumsum(-1)[..., :-1]
    return difference.square().mean(-1)


def negative_pearson(
    logits: Float[Tensor, "*#batch items levels"],
    gold: Float[Tensor, "*#batch items"],
    values: Float[Tensor, " levels"],
    weights: Float[Tensor, "*#batch items"],
) -> Float[Tensor, "*batch"]:
    """Minus the weighted Pearson correlation of the expected scores with gold."""
    return -pearson(expected_score(logits, values), gold, weights)
