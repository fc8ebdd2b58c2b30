"""The time below which no engine gets: a job's matrix products at this machine's peak."""

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from scorecal.judging.linear import PackedLinear

TOKENS = 1024  # of a batch
SECONDS = 0.2  # of measuring, a shape


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


@torch.inference_mode()
def seconds_a_token(shapes: Counter[tuple[int, int]], dtype: torch.dtype) -> float:
    """Seconds of one token's matrix products, plain or with weights packed before."""
    total = 0.0
    for (width, outputs), count in shapes.items():
        tokens = torch.randn(TOKENS, width).to(dtype)
        plain = nn.Linear(width, outputs, bias=False, dtype=dtype)
        packed = PackedLinear(plain, TOKENS)
        best = min(_seconds(lambda x=tokens, f=layer: f(x)) for layer in (plain, packed))
        total += count * best / TOKENS
    return total
