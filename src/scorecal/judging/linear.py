"""Linear layers whose weights lie as the CPU's matrix product reads them.

oneDNN rearranges a weight in every call. Doing it once saves 5 to 10 % of a whole elicitation
(`benchmarks/README.md`).
"""

import platform

import torch
from jaxtyping import Float
from torch import Tensor


class PackedLinear(torch.nn.Module):
    """What an `nn.Linear` computes, for inference on a CPU.

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
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            # Not its subclasses: a quantised layer keeps its own product.
            if type(child) is torch.nn.Linear:
                setattr(module, name, PackedLinear(child, rows))
