"""Token ids that continue others: the likeliest, or drawn with randomness of each row's own."""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scorecal.judging.linear import float32_head
from scorecal.judging.trie import Tokens

Scores = Callable[[Tensor, Tensor], Tensor]
"""From rows of token ids and their next-token logits to scores, the largest of which is taken."""


class Draws:
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
        """The logits with fresh noise."""
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
    scores: Scores | None = None,
) -> list[list[int]]:
    """Up to `max_tokens` tokens after each row, without the one that ended it.

    Args:
        network: a causal language model of transformers.
        rows: token ids; padded on the left, where a mask hides the padding.
        ends: tokens that end a text.
        max_tokens: that a row gets, at most.
        scores: of which the largest is taken instead of the likeliest token. It is shown the rows
            with their padding.
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
    answers = network.generate(
        ids.to(network.device),
        attention_mask=mask.to(network.device),
        generation_config=settings,
        logits_processor=LogitsProcessorList([scores] if scores else []),
    )[:, width:].tolist()
    return [
        answer[: next((at for at, token in enumerate(answer) if token in ends), len(answer))]
        for answer in answers
    ]


class Beside:
    """Next-token logits of a network that reads what another one writes, its keys and values kept.

    Args:
        network: a causal language model of transformers.
        lengths: of the rows before anything is written; what stands left of them is padding.
    """

    def __init__(self, network: Any, lengths: Sequence[int]) -> None:
        self._network = network
        self._lengths = torch.tensor(lengths)
        self._padding: Int[Tensor, " rows"] | None = None
        self._cache: Any = None
        self._seen = 0

    @torch.inference_mode()
    def __call__(
        self, input_ids: Int[Tensor, "rows tokens"]
    ) -> Float[Tensor, "rows own_vocabulary"]:
        """The logits after all that has been written so far."""
        width = input_ids.shape[1]
        if self._padding is None:
            self._padding = width - self._lengths
        places = torch.arange(width) - self._padding[:, None]
        device = self._network.device
        options = {"position_ids": places.clamp(min=0)[:, self._seen :].to(device)}
        if "position_ids" not in inspect.signature(self._network.forward).parameters:
            options = {}
        with float32_head(self._network):
            output = self._network(
                input_ids[:, self._seen :].to(device),
                attention_mask=(places >= 0).long().to(device),
                use_cache=True,
                cache=self._cache,
                **options,
            )
        self._cache, self._seen = output.cache, width
        return output.logits[:, -1].float()
