"""What a judge answers when there is nothing to judge, as debiasing terms."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from scorecal.functional.scaling import debiasing_term, latent_number_bias


class Evidence(NamedTuple):
    """Answers to the prompts of one kind; perplexity None where the judge can't give it."""

    logprobs: Float[Tensor, "prompts levels"]
    perplexity: Float[Tensor, " prompts"] | None


def latent_bias(
    evidence: Evidence, *, prompts: int, temperature: float = 1.0
) -> Float[Tensor, " levels"]:
    """P_rand over the `prompts` prompts of lowest perplexity (paper 1, §3.1 and eq. 1)."""
    logprobs = evidence.logprobs
    if evidence.perplexity is not None and prompts < len(logprobs):
        logprobs = logprobs[evidence.perplexity.argsort(stable=True)[:prompts]]
    return latent_number_bias(logprobs, temperature=temperature)


def prior_term(
    kind: str,
    evidence: dict[str, Evidence],
    logprobs: Float[Tensor, "items levels"],
    train: Float[Tensor, "problems items"],
    *,
    mass: Float[Tensor, "items levels"] | None = None,
    prompts: int = 10,
    temperature: float = 1.0,
    seed: int = 0,
) -> Float[Tensor, "problems levels"]:
    """B(y) = log(1/K) - log P(y) of each problem.

    Args:
        kind: `random` (Deb-R), `random_task` (Deb-T), `content_free` (CC), `batch`, `position`,
            `none`, or `permuted`, Deb-T's term with its labels shuffled: a placebo.
        evidence: answers by kind of prompt.
        logprobs: label log-probabilities of all items, for `batch`.
        train: weights of each problem's own rows, for `batch` and `position`.
        mass: of the position at which each label stands, for `position`; see
            `positions.fixed_order_mass`.
        prompts: T_p, how many random-number prompts count.
        temperature: of the answers to random-number prompts.
        seed: of the placebo's shuffle.

    Raises:
        ValueError: the table has no answers of that kind.
    """
    problems, levels = len(train), logprobs.shape[1]
    if kind == "none":
        return logprobs.new_zeros(problems, levels)
    measured = logprobs.softmax(-1) if kind == "batch" else mass if kind == "position" else None
    if measured is not None:
        total = train.sum(-1, keepdim=True)
        probs = train / total.where(total > 0, 1) @ measured
        # A problem without rows has no marginal; uniform leaves its start unmoved.
        return debiasing_term(probs.where(total > 0, 1 / levels))
    source = "random_task" if kind == "permuted" else kind
    if source not in evidence:
        raise ValueError(
            f"this table has no judgements of the kind {source!r}, which the prior {kind!r} "
            "needs. Set `--model.head.prior batch` or `none`, or elicit with a judge."
        )
    if source == "content_free":
        probs = latent_number_bias(evidence[source].logprobs)
    else:
        probs = latent_bias(evidence[source], prompts=prompts, temperature=temperature)
    term = debiasing_term(probs)
    if kind == "permuted":
        generator, kept = torch.Generator().manual_seed(seed), torch.arange(levels)
        while torch.equal(order := torch.randperm(levels, generator=generator), kept):
            pass  # the identity would be Deb-T itself
        term = term[order]
    return term.expand(problems, levels)
