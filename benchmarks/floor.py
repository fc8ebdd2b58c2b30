"""The time below which no engine gets: a job's matrix products at this machine's peak."""

import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

TOKENS = 1024  # of a batch
SECONDS = 0.2  # of measuring, a shape


def trie_tokens(rows: Sequence[list[int]]) -> int:
    """Number of distinct prefixes of the rows: tokens that must be computed at least once.

    >>> trie_tokens([[1, 2, 3], [1, 2, 4], [1, 2]])
    4
    """
    pairs = itertools.pairwise([[], *sorted(rows)])
    return sum(len(row) - len(os.path.commonprefix([before, row])) for before, row in pairs)


def linear_shapes(folder: str) -> Counter[tuple[int, int]]:
    """Inputs and outputs of every linear layer that each token passes: all but the LM head."""
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        network = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
    return Counter((layer.in_features, layer.out_features) for layer in layers)


def _seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call."""
    call()
    taken: list[float] = []
    while sum(taken) < SECONDS or len(taken) < 5:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _packed_linear(tokens: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(tokens, packed, None, "none", [], "")


@torch.inference_mode()
def seconds_a_token(shapes: Counter[tuple[int, int]], dtype: torch.dtype) -> float:
    """Seconds of one token's matrix products, plain or with weights packed before."""
    total = 0.0
    for (width, outputs), count in shapes.items():
        tokens = torch.randn(TOKENS, width).to(dtype)
        weight = torch.randn(outputs, width).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS)
        best = min(
            _seconds(lambda x=tokens, w=weight: nn.functional.linear(x, w)),
            _seconds(lambda x=tokens, w=packed: _packed_linear(x, w)),
        )
        total += count * best / TOKENS
    return total
