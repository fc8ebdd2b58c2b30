"""Token ids that continue others: the likeliest, or drawn with randomness of each row's own."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scorecal.judging.trie import Tokens


class _Draws:
    """Noise under which the largest logit is a draw from softmax(logits / temperature).

    This is the Gumbel-max trick. Each row has a generator of its own, so that neither the rest of
    its batch nor what ran before matters.
    """

    def __init__(self, temperature: float, seeds: Sequence[int]) -> None:
        self.temperature = temperature
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(
        self, input_ids: Int[Tensor, "rows tokens"], scores: Float[Tensor, "rows vocabulary"]
    ) -> Float[Tensor, "rows vocabulary"]:
        noise = torch.stack(
            [torch.empty(scores.shape[1]).exponential_(generator=own) for own in self.generators]
        )
        return scores.float() / self.temperature - noise.log().to(scores.device)


@torch.inference_mode()
def continuations(
    network: Any,
    rows: Sequence[Tokens],
    *,
    ends: Collection[int],
    max_tokens: int,
    temperature: float,
    seeds: Sequence[int],
) -> list[list[int]]:
    """Up to `max_tokens` tokens after each row, without the one that ended it.

    Args:
        network: a causal language model of transformers.
        rows: token ids; padded on the left, where a mask hides the padding.
        ends: tokens that end a text.
        max_tokens: that a row gets, at most.
        temperature: 0 takes the likeliest token.
        seeds: of each row.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    width = max(map(len, rows))
    pad = min(ends, default=0)
    ids = torch.tensor([[*[pad] * (width - len(row)), *row] for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    settings = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        use_cache=True,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
    )
    draws = [_Draws(temperature, seeds)] if temperature else []
    answers = network.generate(
        ids.to(network.device),
        attention_mask=mask.to(network.device),
        generation_config=settings,
        logits_processor=LogitsProcessorList(draws),
    )[:, width:].tolist()
    return [
        answer[: next((at for at, token in enumerate(answer) if token in ends), len(answer))]
        for answer in answers
    ]
