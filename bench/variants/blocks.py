"""Where a variant takes hold: modules put in the place of timm's and ours in a network, with the same parameters.

All that a network computes stays what it was, but for the forms said to differ.
"""

import math
from collections.abc import Callable

import torch
from timm.layers import Mlp
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from bench.variants.columns import gelu, query_value_bias
from kernels.reference import wide
from model.heads import EPS, BatchNorm
from model.key_mlp import KeyMlp


class _BothViews(torch.autograd.Function):
    """x [V, B, D]; weight and bias [D], or None."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        exact = wide(x)
        variance, mean = torch.var_mean(exact, 1, correction=0, keepdim=True)
        scale = torch.rsqrt(variance + EPS)
        ctx.save_for_backward(x, mean, scale, weight)
        out = (exact - mean) * scale
        return (out if weight is None else out * weight + bias).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, mean, scale, weight = ctx.saved_tensors
        g, n = wide(gradient), (wide(x) - mean) * scale
        dbias, dweight = g.sum(1, keepdim=True), (g * n).sum(1, keepdim=True)
        dx = (g - (dbias + n * dweight) / x.shape[1]) * (scale if weight is None else scale * weight)
        of = (None, None) if weight is None else (d.sum((0, 1)).to(weight.dtype) for d in (dweight, dbias))
        return dx.to(x.dtype), *of


class BothViews(BatchNorm):
    """Ours, in whose place it is put: sums of both views at once, where there is one rank."""

    def forward(self, x: Tensor) -> Tensor:
        return _BothViews.apply(x, self.weight, self.bias)


class ColumnsMlp(Mlp):
    """timm's MLP, in whose place it is put, its first layer's bias detached: the gradient of that comes from GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x), self.fc1.bias))


class QueryValueBias(nn.Module):
    """Around a layer that makes queries, keys and values, its bias detached."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return query_value_bias(self.layer(x), self.layer.bias)


E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
MARGIN = 2.0  # how much larger than last time a number may be before it is cut off


def scales(largest: Tensor) -> Tensor:
    """By which ``MARGIN`` times ``largest``, float32, becomes the largest number of e4m3."""
    return (largest * (MARGIN / LARGEST)).clamp_min(torch.finfo(torch.float32).tiny)


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    """x over a scale (float32 scalar) as e4m3."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


@torch.library.custom_op("aps_bench::fp8_product", mutates_args=(), device_types="cpu")
def fp8_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Tensor:
    """a b^T + bias in the type of ``bias``: [M,N] from e4m3 a [M,K], b [N,K]. On a CPU in float32, to the same bits but
    for the order of sums."""
    with torch.autocast("cpu", enabled=False):
        return ((a.float() @ b.float().t()) * (scale_a * scale_b) + bias).to(bias.dtype)


@fp8_product.register_kernel("cuda")
def _(a, b, scale_a, scale_b, bias):
    how = {"scale_a": scale_a, "scale_b": scale_b, "bias": bias, "out_dtype": bias.dtype}
    return torch._scaled_mm(a, b.t(), use_fast_accum=True, **how)


@fp8_product.register_fake
def _(a, b, scale_a, scale_b, bias):
    return bias.new_empty(len(a), len(b))


class Fp8Linear(nn.Linear):
    """A linear layer without gradient whose product is one of e4m3 numbers, with a scale for input and weight each.

    The input's is that of the time before, so that nothing waits for the largest number of this one, which goes to its
    ``place`` in ``largest``. ``kind``: the type of what comes out.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        a, b = (quantised(*of) for of in zip((rows, self.weight), self.scales, strict=True))
        self.largest[self.place] = rows.abs().amax()
        out = fp8_product(a, b, *self.scales, self.bias.to(self.kind))
        return out.unflatten(0, x.shape[:-1])


def fp8(vit: VisionTransformer, kind: torch.dtype) -> Callable[[], None]:
    """Products of all blocks but the last, which computes only what is read, in fp8. What it returns makes all scales
    before each pass, at once, as for each layer they would be launches of their own; of inputs they are 1 at first."""
    for module in vit.blocks[:-1].modules():
        if isinstance(module, KeyMlp):  # which would not ask its first layer
            module.__class__ = Mlp
    layers = [module for block in vit.blocks[:-1] for module in block.modules() if isinstance(module, nn.Linear)]
    weights = [layer.weight for layer in layers]
    largest = weights[0].new_full((len(layers),), LARGEST / MARGIN, dtype=torch.float32)
    both = torch.stack([largest, largest])
    for place, layer in enumerate(layers):
        layer.__class__, layer.kind, layer.place, layer.largest = Fp8Linear, kind, place, largest
        layer.scales = both[:, place].unbind()

    def rescale():
        both.copy_(scales(torch.stack([largest, torch.stack(torch._foreach_norm(weights, math.inf))])))

    return rescale
