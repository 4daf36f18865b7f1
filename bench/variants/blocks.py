"""Where a variant takes hold: modules put in the place of timm's and ours in a network, with the same parameters.

All that a network computes stays what it was, but for the forms said to differ. Those for a network that learns change
how its gradients come about, those for a network of keys know that there are none.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from bench.variants import mlp
from bench.variants.columns import attention_backward, gelu_backward, norm_backward, wide
from bench.variants.one import one, one_backward
from kernels import attention
from model.encoder import PackedAttention
from model.faster import ForeignBias
from model.heads import EPS, BatchNorm
from model.key_mlp import KeyMlp


def _below(x: Tensor) -> tuple[Tensor, Tensor]:
    """The normal distribution up to x, and exp(-x^2 / 2), in 18 instead of 36 instructions of an H100 a number.

    erf by Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most: its exponential is that of the density. The reciprocal
    is a root, as Inductor makes one instruction of that and four of a division.
    """
    density = torch.exp2(x * x * -0.7213475204444817)
    t = 1 + 0.3275911 * 0.7071067811865476 * x.abs()
    t = torch.rsqrt(t * t)
    tail = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    tail = 0.5 * tail * t * density
    return torch.where(x >= 0, 1 - tail, tail), density


def gelu(x: Tensor) -> Tensor:
    """GELU of x, computed in float32 where that is in half precision."""
    exact = wide(x)
    return (exact * _below(exact)[0]).to(x.dtype)


class _ShortGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return gelu(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        exact = wide(x)
        below, density = _below(exact)
        return (wide(gradient) * (below + exact * density * 0.3989422804014327)).to(x.dtype)


class ShortGelu(nn.GELU):
    """Torch's, in whose place it is put, but for the last bits of float32."""

    def forward(self, x: Tensor) -> Tensor:
        return _ShortGelu.apply(x)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x)
        ctx.type = bias.dtype
        return gelu(x)

    @staticmethod
    def backward(ctx, gradient):
        dx, dbias = gelu_backward(gradient, *ctx.saved_tensors)
        return dx, dbias.to(ctx.type)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stream, branch, bias, gamma, beta, eps):
        total = stream + branch
        x = wide(total)
        normed, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], gamma.to(x.dtype), beta.to(x.dtype), eps)
        ctx.save_for_backward(total, mean, rstd, gamma)
        ctx.types = bias.dtype, gamma.dtype
        return total, normed.to(total.dtype)

    @staticmethod
    def backward(ctx, passing, gradient):
        total, mean, rstd, gamma = ctx.saved_tensors
        ds, dnorm, dbias = norm_backward(gradient, passing, total, mean, rstd, gamma)
        dgamma, dbeta = dnorm.unflatten(0, (2, -1)).unbind()
        bias, norm = ctx.types
        return ds, ds, dbias.to(bias), dgamma.to(norm), dbeta.to(norm), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, bias, heads):
        ctx.save_for_backward(qkv)
        ctx.heads, ctx.type = heads, bias.dtype
        return attention(qkv, heads=heads)

    @staticmethod
    def backward(ctx, gradient):
        dqkv, dbias = attention_backward(*ctx.saved_tensors, gradient, ctx.heads)
        return dqkv, dbias.to(ctx.type), None


class _One(torch.autograd.Function):
    """``bias``: that of the product which wrote ``others``."""

    @staticmethod
    def forward(ctx, query, others, bias, heads):
        ctx.save_for_backward(query, others)
        ctx.heads, ctx.type = heads, bias.dtype
        return one(query, others, heads)

    @staticmethod
    def backward(ctx, gradient):
        dquery, dothers = one_backward(*ctx.saved_tensors, gradient, ctx.heads)
        values = wide(gradient).flatten(0, 1).sum(0)
        return dquery, dothers, torch.cat([torch.zeros_like(values), values]).to(ctx.type), None


class _Mlp(torch.autograd.Function):
    """x [..., K]; weights in the type of x, biases in any."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2):
        a, slope = mlp.up(x.flatten(0, -2), w1, b1)
        ctx.save_for_backward(x, a, slope, w1, w2)
        ctx.types = b1.dtype, b2.dtype
        return F.linear(a, w2, b2.to(a.dtype)).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, gradient):
        x, a, slope, w1, w2 = ctx.saved_tensors
        rows, (b1, b2) = gradient.flatten(0, -2), ctx.types
        dh, db1 = mlp.down_backward(rows, w2, slope)
        db2 = rows.sum(0, dtype=db1.dtype).to(b2) if ctx.needs_input_grad[4] else None
        return (dh @ w1).view_as(x), dh.t() @ x.flatten(0, -2), db1.to(b1), rows.t() @ a, db2


class GeluMlp(Mlp):
    """timm's MLP, in whose place it is put."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(_Gelu.apply(self.fc1(x), self.fc1.bias))


class FusedMlp(Mlp):
    """timm's MLP, in whose place it is put; ``kind``: the type of its products."""

    def forward(self, x: Tensor) -> Tensor:
        w1, w2 = self.fc1.weight.to(self.kind), self.fc2.weight.to(self.kind)
        b2 = self.fc2.bias.detach() if isinstance(self.fc2, ForeignBias) else self.fc2.bias
        return _Mlp.apply(x.to(self.kind), w1, self.fc1.bias, w2, b2)


class BiasAttention(PackedAttention):
    """Ours, in whose place it is put. (For the class token alone: as ours.)"""

    def forward(self, x: Tensor, **how) -> Tensor:
        if any(how.values()):
            return super().forward(x, **how)
        return self.proj(_Attention.apply(self.qkv(x), self.qkv.bias, self.num_heads))


class OneAttention(PackedAttention):
    """Ours, in whose place it is put where only the class token asks."""

    def forward(self, x: Tensor, **how) -> Tensor:
        sizes = self.attn_dim, 2 * self.attn_dim
        (ask, answer), (ask_bias, answer_bias) = self.qkv.weight.split(sizes), self.qkv.bias.split(sizes)
        query, others = F.linear(x[:, :1], ask, ask_bias), F.linear(x, answer, answer_bias.detach())
        return self.proj(_One.apply(query, others, answer_bias, self.num_heads))


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


class Chain(nn.Sequential):
    """Blocks one after the other, each sum of the stream and a branch made together with the norm that reads it."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = list(self)
        normed = blocks[0].norm1(x)
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            x, normed = _add_norm(x, block.attn(normed), block.attn.proj, block.norm2)
            branch = block.mlp(normed)
            if following is not None:
                x, normed = _add_norm(x, branch, block.mlp.fc2, following.norm1)
        return x + branch


def _add_norm(stream, branch, product, norm):
    return _AddNorm.apply(stream, branch, product.bias, norm.weight, norm.bias, norm.eps)


def sum_in_gelu(vit: VisionTransformer) -> None:
    for block in vit.blocks.modules():
        if isinstance(block, Mlp):
            block.__class__, block.fc1.__class__ = GeluMlp, ForeignBias


def sum_in_attention(vit: VisionTransformer) -> None:
    for module in vit.blocks.modules():
        if isinstance(module, PackedAttention):
            module.__class__, module.qkv.__class__ = BiasAttention, ForeignBias


def sum_in_norms(vit: VisionTransformer) -> None:
    """In all blocks but the last one, which may be of another kind; before the others, who look for their modules."""
    *blocks, last = vit.blocks
    for block in blocks:
        block.attn.proj.__class__ = ForeignBias
    for block in blocks[:-1]:
        block.mlp.fc2.__class__ = ForeignBias
    vit.blocks = nn.Sequential(Chain(*blocks), last)


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


def put(vit: VisionTransformer, old: type, new: type, kind: torch.dtype) -> None:
    """``new`` in the place of all modules ``old`` of the blocks."""
    for module in vit.blocks.modules():
        if isinstance(module, old):
            module.__class__, module.kind = new, kind


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
