"""Linear layers by the fastest products are torch's layers."""

import copy

import pytest
import torch
from torch import nn

from model import faster


@pytest.mark.parametrize("foreign", [False, True])
def test_gradients_are_those_of_torchs_layer(foreign):
    """Also compiled, but for a bias that gets its gradient elsewhere; a layer without a bias stays as it is."""
    generator, layer = torch.Generator().manual_seed(0), nn.Linear(20, 12, dtype=torch.float64)
    layer.__class__ = faster.ForeignBias if foreign else nn.Linear
    fast = copy.deepcopy(layer)
    faster.fastest_products(nn.Sequential(fast, plain := nn.Linear(3, 3, bias=False)))
    assert type(fast) is faster.FastLinear and type(plain) is nn.Linear
    x = torch.randn(3, 7, 20, generator=generator, dtype=torch.float64, requires_grad=True)
    dy, found = torch.randn(3, 7, 12, generator=generator, dtype=torch.float64), []
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    for of in (layer, fast, compiled):
        x.grad = of.weight.grad = of.bias.grad = None
        (y := of(x)).backward(dy)
        found.append((y, x.grad, of.weight.grad))
        assert (of.bias.grad is None) == foreign
        found[-1] += () if foreign else (of.bias.grad,)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)
