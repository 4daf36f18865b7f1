"""What the class token gets from all tokens, forward and backward in a kernel each, for the last block.

    p = softmax of K q / sqrt(D)    o = p V          with q, o and its gradient g vectors [D] of a head

    dp = V g    ds = p * (dp - p.dp) / sqrt(D)    dq = ds K    dK = ds q^T    dV = p g^T

One program per image and head, T padded to a power of two in registers only. In half precision, forward reads keys and
values, 4*B*T*H*D bytes; backward reads them and writes their gradients, 8*B*T*H*D. Those of their biases need no sum
over tokens: p adds up to 1 and ds to 0, so that of the values is the sum of g over images, and that of the keys is 0.
"""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.checks import INTERPRET, check_tensor
from kernels.short_attention import _LOG2_E, MAX_TOKENS, WIDTHS, attention_of_one, tile


@triton.jit
def _place(T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TP: tl.constexpr):
    """This program's place in [B,H,D] and in [B,T,2,H,D], with the mask of existing tokens."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, d = tl.arange(0, TP), tl.arange(0, D)
    return (b * H + h) * D + d, (b * T + t[:, None]) * (2 * H * D) + h * D + d[None, :], t < T


@triton.jit
def _weights(q, k, known, scale):
    """p [TP]; ``scale`` holds log2(e)."""
    s = tl.where(known, tl.sum(k * q[None, :], axis=1) * scale, float("-inf"))
    p = tl.exp2(s - tl.max(s, axis=0))
    return p / tl.sum(p, axis=0)


@triton.jit
def _class_attention_kernel(
    query, others, out, scale, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TP: tl.constexpr
):  # fmt: skip
    o_one, o_all, known = _place(T, H, D, TP)
    q = tl.load(query + o_one).to(tl.float32)
    k = tl.load(others + o_all, mask=known[:, None], other=0.0).to(tl.float32)
    v = tl.load(others + o_all + H * D, mask=known[:, None], other=0.0).to(tl.float32)
    p = _weights(q, k, known, scale)
    tl.store(out + o_one, tl.sum(p[:, None] * v, axis=0).to(out.dtype.element_ty))


@triton.jit
def _class_attention_backward_kernel(
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


def _launch(query, others, heads):
    query, others = query.contiguous(), others.contiguous()
    b, t, width = others.shape
    out = torch.empty(b, 1, width // 2, dtype=query.dtype, device=query.device)
    sizes = tile(t, width // 2, heads)
    with torch.cuda.device_of(out):
        _class_attention_kernel[(b, heads)](query, others, out, sizes["D"] ** -0.5 * _LOG2_E, **sizes)
    return out


def _launch_backward(query, others, gradient, heads):
    query, others, gradient = query.contiguous(), others.contiguous(), gradient.contiguous()
    b, t, width = others.shape
    dquery = torch.empty(b, 1, width // 2, dtype=query.dtype, device=query.device)
    dothers = torch.empty(b, t, width, dtype=others.dtype, device=others.device)
    sizes = tile(t, width // 2, heads)
    scale = sizes["D"] ** -0.5
    with torch.cuda.device_of(dquery):
        how = scale * _LOG2_E, scale
        _class_attention_backward_kernel[(b, heads)](query, others, gradient, dquery, dothers, *how, **sizes)
    return dquery, dothers


@torch.library.custom_op("aps::class_attention", mutates_args=(), device_types="cpu")
def _op(query: torch.Tensor, others: torch.Tensor, heads: int) -> torch.Tensor:
    return _launch(query, others, heads) if INTERPRET else attention_of_one(query, others, heads=heads)


@torch.library.custom_op("aps::class_attention_backward", mutates_args=(), device_types="cpu")
def _op_backward(
    query: torch.Tensor, others: torch.Tensor, gradient: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of queries, and of keys and values."""
    return (_launch_backward if INTERPRET else reference.class_attention_backward)(query, others, gradient, heads)


_op.register_kernel("cuda")(_launch)
_op_backward.register_kernel("cuda")(_launch_backward)


@_op.register_fake
def _(query, others, heads):
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@_op_backward.register_fake
def _(query, others, gradient, heads):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, others))


class _ClassAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, others, bias, heads):
        ctx.save_for_backward(query, others)
        ctx.heads, ctx.type = heads, bias.dtype
        return _op(query, others, heads)

    @staticmethod
    def backward(ctx, gradient):
        dquery, dothers = _op_backward(*ctx.saved_tensors, gradient, ctx.heads)
        values = reference.wide(gradient).flatten(0, 1).sum(0)
        return dquery, dothers, torch.cat([torch.zeros_like(values), values]).to(ctx.type), None


def takes(tokens, head):
    """Whether there are kernels for so many tokens, and heads so wide."""
    return tokens <= MAX_TOKENS and head in WIDTHS


def class_attention(query, others, bias, *, heads):
    """As ``attention_of_one``: [B,1,H*D] of queries [B,1,H*D] and packed keys and values [B,T,2*H*D], of sizes that
    ``takes`` allows.

    ``bias`` [2*H*D]: that of the product which wrote ``others``. It is in there already, and nothing is added; but its
    gradient comes from here, so that the product has to be given it detached.
    """
    check_tensor("query", query, others.dtype, (len(others), 1, others.shape[2] // 2), others.device)
    check_tensor("bias", bias, bias.dtype, others.shape[2:], others.device)
    if heads < 1 or others.shape[2] % (2 * heads) or not takes(others.shape[1], others.shape[2] // (2 * heads)):
        sizes = f"[B, T, 2 * {heads} heads * D] with T up to {MAX_TOKENS} and D one of {WIDTHS}"
        raise ValueError(f"others: expected shape {sizes}, got {list(others.shape)}")
    return _ClassAttention.apply(query, others, bias, heads)
