"""Self-attention over short sequences: all T tokens of a head fit in one tile, so nothing is exchanged or kept.

    S = Q K^T / sqrt(D)        P = softmax of the rows of S        O = P V

forward, and backward with P computed again (dO the gradient of O, * element by element):

    dV = P^T dO    dP = dO V^T    dS = P * (dP - row sums of P * dP) / sqrt(D)    dQ = dS K    dK = dS^T Q

At the 50 tokens of a quarter of an image the arithmetic is 2 % of a ViT's, and what counts is traffic: kernels for long
sequences fill a third of their tiles and take the packed gradient apart and together again. Here q, k and v are read
where the projection wrote them and their gradients written where its backward reads them.

Kernels: one program per image and head, T padded to a power of two in registers only. Forward moves 8*B*T*H*D bytes and
backward 14*B*T*H*D in half precision; one launch each.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels import reference
from kernels.checks import INTERPRET

MAX_TOKENS = 128
WIDTHS = 16, 32, 64  # of a head; with 128 the tiles of 128 tokens spill
DTYPES = torch.bfloat16, torch.float16  # in float32 the tensor cores would round to tf32
_LOG2_E = 1.4426950408889634


@triton.jit
def _tile(qkv, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TP: tl.constexpr):
    """This program's place in [B,T,3,H,D] and in [B,T,H,D], with the mask of existing tokens: offsets [TP,D]."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, d = tl.arange(0, TP)[:, None], tl.arange(0, D)[None, :]
    row = b * T + t
    return row * (3 * H * D) + h * D + d, row * (H * D) + h * D + d, t < T


@triton.jit
def _weights(q, k, scale, T: tl.constexpr, TP: tl.constexpr):
    """Numerators exp(S - max) of P and their sums: [TP,TP] and [TP,1]; ``scale`` holds log2(e)."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where((tl.arange(0, TP) < T)[None, :], s, float("-inf"))
    p = tl.exp2(s - tl.max(s, axis=1)[:, None])
    return p, tl.sum(p, axis=1)[:, None]


@triton.jit
def _attention_kernel(qkv, out, scale, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TP: tl.constexpr):
    o_qkv, o_out, known = _tile(qkv, T, H, D, TP)
    q = tl.load(qkv + o_qkv, mask=known, other=0.0)
    k = tl.load(qkv + o_qkv + H * D, mask=known, other=0.0)
    v = tl.load(qkv + o_qkv + 2 * H * D, mask=known, other=0.0)
    p, total = _weights(q, k, scale, T, TP)
    o = tl.dot(p.to(v.dtype), v, input_precision="ieee") / total
    tl.store(out + o_out, o.to(out.dtype.element_ty), mask=known)


@triton.jit
def _attention_backward_kernel(
    qkv, gradient, out, scale, unscale, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TP: tl.constexpr
):
    o_qkv, o_gradient, known = _tile(qkv, T, H, D, TP)
    q = tl.load(qkv + o_qkv, mask=known, other=0.0)
    k = tl.load(qkv + o_qkv + H * D, mask=known, other=0.0)
    v = tl.load(qkv + o_qkv + 2 * H * D, mask=known, other=0.0)
    g = tl.load(gradient + o_gradient, mask=known, other=0.0)
    p, total = _weights(q, k, scale, T, TP)
    p = p / total
    dv = tl.dot(tl.trans(p.to(g.dtype)), g, input_precision="ieee")
    tl.store(out + o_qkv + 2 * H * D, dv.to(out.dtype.element_ty), mask=known)
    dp = tl.dot(g, tl.trans(v), input_precision="ieee")
    ds = (p * (dp - tl.sum(p * dp, axis=1)[:, None]) * unscale).to(q.dtype)
    dq = tl.dot(ds, k, input_precision="ieee")
    tl.store(out + o_qkv, dq.to(out.dtype.element_ty), mask=known)
    dk = tl.dot(tl.trans(ds), q, input_precision="ieee")
    tl.store(out + o_qkv + H * D, dk.to(out.dtype.element_ty), mask=known)


def tile(tokens, width, heads):
    """Sizes of one program; 4 warps are the fastest for both directions on an H100 (see bench/LOG.md)."""
    padded = max(16, triton.next_power_of_2(tokens))
    return {"T": tokens, "H": heads, "D": width // heads, "TP": padded, "num_warps": 4 if padded <= 64 else 8}


def _launch(qkv, heads):
    b, t, width = qkv.shape
    qkv = qkv.contiguous()
    out = torch.empty(b, t, width // 3, dtype=qkv.dtype, device=qkv.device)
    sizes = tile(t, width // 3, heads)
    if out.numel():
        with torch.cuda.device_of(out):
            _attention_kernel[(b, heads)](qkv, out, sizes["D"] ** -0.5 * _LOG2_E, **sizes)
    return out


def _launch_backward(qkv, gradient, heads):
    b, t, width = qkv.shape
    qkv, gradient = qkv.contiguous(), gradient.contiguous()
    out = torch.empty(b, t, width, dtype=qkv.dtype, device=qkv.device)
    sizes = tile(t, width // 3, heads)
    scale = sizes["D"] ** -0.5
    if out.numel():
        with torch.cuda.device_of(out):
            _attention_backward_kernel[(b, heads)](qkv, gradient, out, scale * _LOG2_E, scale, **sizes)
    return out


@torch.library.custom_op("aps::attention", mutates_args=(), device_types="cpu")
def _op(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    return _launch(qkv, heads) if INTERPRET else reference.attention(qkv, heads=heads)


@torch.library.custom_op("aps::attention_backward", mutates_args=(), device_types="cpu")
def _op_backward(qkv: torch.Tensor, gradient: torch.Tensor, heads: int) -> torch.Tensor:
    return (_launch_backward if INTERPRET else reference.attention_backward)(qkv, gradient, heads)


_op.register_kernel("cuda")(_launch)
_op_backward.register_kernel("cuda")(_launch_backward)


@_op.register_fake
def _(qkv, heads):
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)


@_op_backward.register_fake
def _(qkv, gradient, heads):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.heads = inputs[1]


def _backward(ctx, gradient):
    return _op_backward(ctx.saved_tensors[0], gradient, ctx.heads), None


_op.register_autograd(_backward, setup_context=_keep)


def suits(qkv, heads):
    """Whether our operator takes packed queries, keys and values, [B,T,3*H*D]; torch's attention takes the others."""
    tokens, head = qkv.shape[1], qkv.shape[2] // (3 * heads)
    return qkv.dtype in DTYPES and tokens <= MAX_TOKENS and head in WIDTHS


def attention(qkv, *, heads):
    """Softmax self-attention of packed queries, keys and values, [B,T,3*H*D] in (q/k/v, head, dimension) order.

    Returns [B,T,H*D] of the same type. Sequences of up to 128 tokens, D 16, 32 or 64, bfloat16 or float16, run as one
    kernel on a GPU, with float32 sums and P and dS rounded to the type of ``qkv``, and as the reference's products on a
    CPU, where torch's backward pass is five times as slow in these types; everything else goes through torch's
    ``scaled_dot_product_attention``.
    """
    if qkv.dim() != 3 or heads < 1 or qkv.shape[2] % (3 * heads):
        raise ValueError(f"qkv: expected shape [B, T, 3 * {heads} heads * D], got {list(qkv.shape)}")
    if suits(qkv, heads):
        return _op(qkv, heads)
    # Taken apart first: backward, the three gradients then come together as they are wanted, without another copy.
    q, k, v = (part.transpose(1, 2) for part in qkv.unflatten(2, (3, heads, -1)).unbind(2))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def attention_of_one(query, others, *, heads):
    """What one token, queries [B,1,H*D], gets from all: packed keys and values [B,T,2*H*D], in (k/v, head, dimension)
    order. Returns [B,1,H*D].

    On a GPU by sums of products in float32, of which the compiler makes kernels that read keys and values once in each
    direction. torch would choose cuDNN there, which is reported to fail for one query (pytorch#138529). On a CPU by
    torch's ``scaled_dot_product_attention``; in half precision, where that takes three times as long, by plain products
    with scores in float32.
    """
    q = query.unflatten(2, (heads, -1))
    k, v = others.unflatten(2, (2, heads, -1)).unbind(2)
    if query.device.type != "cpu":
        return one_by_sums(q, k, v).flatten(2)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    if query.dtype in DTYPES:
        with torch.autocast("cpu", enabled=False):
            weights = (q.float() @ k.float().transpose(2, 3) / q.shape[3] ** 0.5).softmax(-1)
            return (weights.to(v.dtype) @ v).transpose(1, 2).flatten(2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def one_by_sums(q, k, v):
    """One query, [B,1,H,D], to k and v [B,T,H,D]: [B,1,H,D] in the type of v; in float32 or wider between."""
    q, k, values = (reference.wide(part) for part in (q, k, v))
    weights = ((q * k).sum(3, keepdim=True) * q.shape[3] ** -0.5).softmax(1)
    return (weights * values).sum(1, keepdim=True).to(v.dtype)
