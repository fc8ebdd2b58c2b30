"""Rearranged weights compute what they did before."""

import pytest
import torch

from scorecal.judging.linear import PackedLinear, can_pack, pack_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 24), (1, 3, 24), (2, 500, 24)])
def test_a_packed_linear_equals_the_linear(bias, shape):
    if not can_pack(torch.float32):
        pytest.skip("this CPU has no oneDNN products")
    linear = torch.nn.Linear(24, 10, bias=bias).requires_grad_(False)
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(PackedLinear(linear, 512)(inputs), linear(inputs))


def test_only_plain_linears_are_replaced():
    class Quantised(torch.nn.Linear):
        pass

    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(Quantised(4, 4)))
    if can_pack(torch.float32):
        pack_linears(network.requires_grad_(False), 8)
        assert type(network[0]) is PackedLinear
    assert type(network[1][0]) is Quantised


def test_half_precision_is_left_to_torch():
    assert not can_pack(torch.float16)
