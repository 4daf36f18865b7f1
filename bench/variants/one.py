"""What the class token gets from all tokens, forward and backward in one kernel each, in the last block.

    p = softmax of K q / sqrt(D)    o = p V          with q, o and its gradient g vectors [D] of a head

    dp = V g    ds = p * (dp - p.dp) / sqrt(D)    dq = ds K    dK = ds q^T    dV = p g^T

One program per image and head, T padded to a power of two in registers only. Forward reads keys and values once,
backward reads them and writes their gradients. Those of their biases need no sum over tokens: p adds up to 1 and ds to
0, so that of the values is the sum of g over images, and that of the keys 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.variants.columns import wide
from kernels import attention_of_one
from kernels.checks import INTERPRET
from kernels.short_attention import _LOG2_E, tile


@triton.jit
def _place(T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TP: tl.constexpr):
    """This program's place in [B,H,D] and in [B,T,2,H,D], with the mask of existing tokens."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, d = tl.arange(0, TP), tl.arange(0, D)
    return (b * H + h) * D + d, (b * T + t[:, None]) * (2 * H * D) + h * D + d[None, :], t < T


@triton.jit
def _weights(q, k, known, scale):
    s = tl.where(known, tl.sum(k * q[None, :], axis=1) * scale, float("-inf"))
    p = tl.exp2(s - tl.max(s, axis=0))
    return p / tl.sum(p, axis=0)


@triton.jit
def _one_kernel(
    query, others, out, scale, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TP: tl.constexpr
):  # fmt: skip
    o_one, o_all, known = _place(T, H, D, TP)
    q = tl.load(query + o_one).to(tl.float32)
    k = tl.load(others + o_all, mask=known[:, None], other=0.0).to(tl.float32)
    v = tl.load(others + o_all + H * D, mask=known[:, None], other=0.0).to(tl.float32)
    p = _weights(q, k, known, scale)
    tl.store(out + o_one, tl.sum(p[:, None] * v, axis=0).to(out.dtype.element_ty))


@triton.jit
def _one_backward_kernel(
    query, others, gradient, dquery, dothers, scale, unscale,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    o_one, o_all, known = _place(T, H, D, TP)
    q, g = tl.load(query + o_one).to(tl.float32), tl.load(gradient + o_one).to(tl.float32)
    k = tl.load(others + o_all, mask=known[:, None], other=0.0).to(tl.float32)
    v = tl.load(others + o_all + H * D, mask=known[:, None], other=0.0).to(tl.float32)
    p = _weights(q, k, known, scale)
    dp = tl.sum(v * g[None, :], axis=1)
    ds = p * (dp - tl.sum(p * dp, axis=0)) * unscale
    tl.store(dquery + o_one, tl.sum(ds[:, None] * k, axis=0).to(dquery.dtype.element_ty))
    tl.store(dothers + o_all, (ds[:, None] * q[None, :]).to(dothers.dtype.element_ty), mask=known[:, None])
    tl.store(dothers + o_all + H * D, (p[:, None] * g[None, :]).to(dothers.dtype.element_ty), mask=known[:, None])


def launch(query, others, heads):
    query, others, (b, t, width) = query.contiguous(), others.contiguous(), others.shape
    out, sizes = torch.empty_like(query), tile(t, width // 2, heads)
    with torch.cuda.device_of(out):
        _one_kernel[(b, heads)](query, others, out, sizes["D"] ** -0.5 * _LOG2_E, **sizes)
    return out


def launch_backward(query, others, gradient, heads):
    query, others, gradient = (x.contiguous() for x in (query, others, gradient))
    (b, t, width), dquery, dothers = others.shape, torch.empty_like(query), torch.empty_like(others)
    sizes = tile(t, width // 2, heads)
    scale = sizes["D"] ** -0.5
    with torch.cuda.device_of(dquery):
        how = scale * _LOG2_E, scale
        _one_backward_kernel[(b, heads)](query, others, gradient, dquery, dothers, *how, **sizes)
    return dquery, dothers


def _refer(query, others, heads):
    return attention_of_one(query, others, heads=heads)


def _refer_backward(query, others, gradient, heads):
    q, g = (wide(x).unflatten(2, (heads, -1)) for x in (query, gradient))
    (k, v), scale = wide(others).unflatten(2, (2, heads, -1)).unbind(2), q.shape[3] ** -0.5
    p, dp = ((q * k).sum(3, keepdim=True) * scale).softmax(1), (v * g).sum(3, keepdim=True)
    ds = p * (dp - (p * dp).sum(1, keepdim=True)) * scale
    dothers = torch.stack([ds * q, p * g], 2).flatten(2)
    return (ds * k).sum(1, keepdim=True).flatten(2).to(query.dtype), dothers.to(others.dtype)


@torch.library.custom_op("aps_bench::one", mutates_args=(), device_types="cpu")
def one(query: Tensor, others: Tensor, heads: int) -> Tensor:
    """As ``kernels.attention_of_one``: [B,1,H*D] of queries [B,1,H*D], keys and values [B,T,2*H*D]."""
    return (launch if INTERPRET else _refer)(query, others, heads)


@torch.library.custom_op("aps_bench::one_backward", mutates_args=(), device_types="cpu")
def one_backward(query: Tensor, others: Tensor, gradient: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Gradients of queries and of keys and values."""
    return (launch_backward if INTERPRET else _refer_backward)(query, others, gradient, heads)


one.register_kernel("cuda")(launch)
one_backward.register_kernel("cuda")(launch_backward)
one.register_fake(lambda query, others, heads: torch.empty_like(query, memory_format=torch.contiguous_format))


@one_backward.register_fake
def _(query, others, gradient, heads):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, others))
