"""The two products of an elicitation: layers with packed weights, and the LM head in float32."""

import contextlib
import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_VOCABULARY_BLOCK = 16384
_PAGEOUT = 21  # MADV_PAGEOUT, which Python doesn't name; Linux 5.4


class PackedLinear(torch.nn.Module):
    """What an `nn.Linear` computes, for inference on a CPU.

    oneDNN rearranges a weight in every call; doing it once saves 6 to 10 % of an elicitation.

    Args:
        linear: whose weight is rearranged.
        rows: how many rows its inputs usually have; others are right too.
    """

    def __init__(self, linear: torch.nn.Linear, rows: int) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, rows)
        self.bias = linear.bias

    def forward(self, inputs: Float[Tensor, "*batch in_width"]) -> Float[Tensor, "*batch width"]:
        """The inputs times the weight, plus the bias."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU has oneDNN's products for a dtype."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def pack_linears(network: torch.nn.Module, rows: int) -> None:
    """Replace every `nn.Linear` of a frozen network, in place."""
    # oneDNN keeps a kernel for each shape it has seen, a thousand of them. Chunks have a new number
    # of rows each time, so all but the last few are hundreds of megabytes of no use. Read once, at
    # the first product.
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            # Not its subclasses: a quantised layer keeps its own product.
            if type(child) is torch.nn.Linear:
                setattr(module, name, PackedLinear(child, rows))
                _page_out(child.weight.data)


def _page_out(weight: Tensor) -> None:
    """Let go of a weight's pages of the mapped file, which stays mapped for the other weights.

    Harmless where the weight isn't mapped or still used: pages come back when they are read.
    """
    if sys.platform != "linux":
        return
    size = mmap.PAGESIZE
    start = -(-weight.data_ptr() // size) * size
    length = (weight.data_ptr() + weight.nbytes) // size * size - start
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _PAGEOUT)


def log_softmax_at(
    hidden: Float[Tensor, "places width"],
    head: Any,
    tokens: list[list[int]],
    *,
    softcap: float | None = None,
) -> tuple[list[list[float]], list[float]]:
    """Full-vocabulary log-softmax in float32 of each place at its own tokens.

    Also the log-normaliser of each place.

    Args:
        hidden: last hidden states.
        head: the LM head, with `weight` [vocabulary, width] and `bias`.
        tokens: token ids wanted at each place.
        softcap: bound of the logits, as Gemma 2 has it.
    """
    hidden = hidden.float()
    normaliser = hidden.new_full((len(hidden),), -torch.inf)
    picked = [(place, token) for place, row in enumerate(tokens) for token in row]
    lines = torch.tensor([place for place, _ in picked], device=hidden.device)
    columns = torch.tensor([token for _, token in picked], device=hidden.device)
    values = hidden.new_empty(len(picked))
    for start, scores in _blocks(hidden, head):
        if softcap:
            scores = (scores / softcap).tanh() * softcap
        normaliser = torch.logaddexp(normaliser, scores.logsumexp(-1))
        here = (columns >= start) & (columns < start + _VOCABULARY_BLOCK)
        values[here] = scores[lines[here], columns[here] - start]
    flat = iter((values - normaliser[lines]).tolist())
    return [[next(flat) for _ in row] for row in tokens], normaliser.tolist()


def _blocks(
    hidden: Float[Tensor, "*places width"], head: Any
) -> Iterator[tuple[int, Float[Tensor, "*places block"]]]:
    """The LM head's float32 scores, and at which token they start.

    In blocks: a float32 copy of a large vocabulary's head would be the peak of memory.
    """
    for start in range(0, head.weight.shape[0], _VOCABULARY_BLOCK):
        block = slice(start, start + _VOCABULARY_BLOCK)
        bias = None if head.bias is None else head.bias[block].float()
        yield start, torch.nn.functional.linear(hidden, head.weight[block].float(), bias)


@contextlib.contextmanager
def float32_head(network: Any) -> Iterator[None]:
    """Let a causal language model give the logits of its last token only, in float32.

    On the grid of bfloat16 logits neighbouring scores tie, and the first token of two would win.
    """
    head = network.get_output_embeddings()
    before = head.__dict__.get("forward")

    def forward(hidden: Tensor) -> Tensor:
        return torch.cat([scores for _, scores in _blocks(hidden[:, -1:].float(), head)], dim=-1)

    head.forward = forward
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before
