"""Backward passes that also sum the columns of what they write: gradients of biases and norms without a second look.

    y = GELU(x):                    dx = dy GELU'(x)                                    dbias = columns of dx
    s = x + branch, y = norm(s):    ds = gs + (g - mean g - n mean(g n)) / deviation    dbias = columns of ds
                                    dgamma = columns of dy n, dbeta of dy               g = dy gamma, n = s normalised
    attention of qkv:               dqkv as in ``kernels/short_attention.py``           dbias = columns of dqkv

where ``bias`` is that of the product which wrote x, branch or qkv, and ``gs`` the gradient that passes by the norm.
Each program sums the rows it goes through in float32; those sums, [programs, columns], are added in a second pass, in
an order that does not change: no atomics.

The forward pass is plain torch, which the compiler fuses as it did, to the same bits. Bytes in half precision: GELU 6 a
number, norm 8 (with ``gs`` read and ds written once, for both ways on), attention 14 per token and dimension.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.checks import INTERPRET
from kernels.short_attention import _LOG2_E, _tile, _weights, tile


class Tile(NamedTuple):
    """``elements`` of a program's step; ``times``: ``PROGRAMS``."""

    warps: int = 4
    elements: int = 2048
    times: int = 1

    def __str__(self) -> str:
        return (
            f"{self.elements} elements on {self.warps} warp{'s' * (self.warps > 1)}, {self.times * PROGRAMS} programs"
        )


PROGRAMS = 528  # four for each of the 132 multiprocessors of an H100; a number of its own keeps sums the same elsewhere
# The first is what variants take, the others what ``bench passes`` tries too.
GELU_TILES = Tile(), Tile(times=2), Tile(times=4), Tile(elements=1024, times=2)
NORM_TILES = Tile(), Tile(1, 512, 4), Tile(2, 512, 4), Tile(2, 1024, 2)
SUM = {"R": 128, "C": 32, "num_warps": 4}  # of the second pass


@triton.jit
def _gelu(x):
    """The normal distribution up to x, and the derivative of GELU there.

    erf by Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most: its exponential is that of the density.
    """
    density = tl.exp2(x * x * -0.7213475204444817)  # exp(-x^2 / 2)
    t = 1 + 0.3275911 * 0.7071067811865476 * tl.abs(x)
    t = tl.rsqrt(t * t)  # a reciprocal in one instruction
    tail = t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    tail = 0.5 * t * (0.254829592 + tail) * density
    below = tl.where(x >= 0, 1 - tail, tail)
    return below, below + x * density * 0.3989422804014327


@triton.jit
def _gelu_backward_kernel(
    gradient, x, out, partial, rows, each, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    c, chunk = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1)
    total = tl.zeros([R, C], tl.float32)
    for start in range(chunk * each, chunk * each + each, R):
        r = start + tl.arange(0, R)
        known = (r < rows)[:, None] & (c < N)[None, :]
        at = r.to(tl.int64)[:, None] * N + c[None, :]
        _, slope = _gelu(tl.load(x + at, mask=known, other=0.0).to(tl.float32))
        dx = tl.load(gradient + at, mask=known, other=0.0).to(tl.float32) * slope
        tl.store(out + at, dx.to(out.dtype.element_ty), mask=known)
        total += dx
    tl.store(partial + chunk * N + c, tl.sum(total, axis=0), mask=c < N)


@triton.jit
def _norm_backward_kernel(
    gradient, passing, x, mean, rstd, gamma, out, partial, rows, each,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    c, chunk = tl.arange(0, C), tl.program_id(0)
    inside = c < D
    weight = tl.load(gamma + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    dgamma, dbeta, dbias = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    for start in range(chunk * each, chunk * each + each, R):
        r = start + tl.arange(0, R)
        known = (r < rows)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None] * D + c[None, :]
        middle = tl.load(mean + r, mask=r < rows, other=0.0)[:, None]
        scale = tl.load(rstd + r, mask=r < rows, other=0.0)[:, None]
        dy = tl.load(gradient + at, mask=known, other=0.0).to(tl.float32)
        n = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
        n = tl.where(known, (n - middle) * scale, 0.0)
        g = dy * weight
        g = g - (tl.sum(g, axis=1)[:, None] + n * tl.sum(g * n, axis=1)[:, None]) / D
        dx = tl.load(passing + at, mask=known, other=0.0).to(tl.float32) + g * scale
        tl.store(out + at, dx.to(out.dtype.element_ty), mask=known)
        dgamma += dy * n
        dbeta += dy
        dbias += tl.where(known, dx, 0.0)
    at = partial + chunk * 3 * D + c
    tl.store(at, tl.sum(dgamma, axis=0), mask=inside)
    tl.store(at + D, tl.sum(dbeta, axis=0), mask=inside)
    tl.store(at + 2 * D, tl.sum(dbias, axis=0), mask=inside)


@triton.jit
def _attention_backward_kernel(
    qkv, gradient, out, partial, scale, unscale, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TP: tl.constexpr
):
    """That of ``kernels/short_attention.py``; rows that are none come out as 0, so that sums need no mask."""
    o_qkv, o_gradient, known = _tile(qkv, T, H, D, TP)
    q = tl.load(qkv + o_qkv, mask=known, other=0.0)
    k = tl.load(qkv + o_qkv + H * D, mask=known, other=0.0)
    v = tl.load(qkv + o_qkv + 2 * H * D, mask=known, other=0.0)
    g = tl.load(gradient + o_gradient, mask=known, other=0.0)
    column = partial + tl.program_id(0) * 3 * H * D + tl.program_id(1) * D + tl.arange(0, D)
    p, total = _weights(q, k, scale, T, TP)
    p = p / total
    dv = tl.dot(tl.trans(p.to(g.dtype)), g, input_precision="ieee")
    tl.store(out + o_qkv + 2 * H * D, dv.to(out.dtype.element_ty), mask=known)
    tl.store(column + 2 * H * D, tl.sum(dv, axis=0))
    dp = tl.dot(g, tl.trans(v), input_precision="ieee")
    ds = (p * (dp - tl.sum(p * dp, axis=1)[:, None]) * unscale).to(q.dtype)
    dq = tl.dot(ds, k, input_precision="ieee")
    tl.store(out + o_qkv, dq.to(out.dtype.element_ty), mask=known)
    tl.store(column, tl.sum(dq, axis=0))
    dk = tl.dot(tl.trans(ds), q, input_precision="ieee")
    tl.store(out + o_qkv + H * D, dk.to(out.dtype.element_ty), mask=known)
    tl.store(column + H * D, tl.sum(dk, axis=0))


@triton.jit
def _sum_kernel(partial, wide, out, rows, columns, wide_columns, R: tl.constexpr, C: tl.constexpr):
    """The first sums go to ``wide``, in float32, the others to ``out``."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, rows, R):
        r = start + tl.arange(0, R)
        known = (r < rows)[:, None] & (c < columns)[None, :]
        total += tl.load(partial + r[:, None] * columns + c[None, :], mask=known, other=0.0)
    found = tl.sum(total, axis=0)
    tl.store(wide + c, found, mask=c < wide_columns)
    c -= wide_columns
    tl.store(out + c, found.to(out.dtype.element_ty), mask=(c >= 0) & (c < columns - wide_columns))


def gelu_tile(columns: int, tile: Tile = GELU_TILES[0]) -> tuple[dict, int]:
    """Sizes of a program, and how many of them share the rows."""
    sizes = {"N": columns, "R": 8, "C": tile.elements // 8, "num_warps": tile.warps}
    return sizes, max(1, tile.times * PROGRAMS // triton.cdiv(columns, sizes["C"]))


def norm_tile(width: int, tile: Tile = NORM_TILES[0]) -> tuple[dict, int]:
    """The same of the norm: a program sees whole rows."""
    padded = triton.next_power_of_2(width)
    sizes = {"D": width, "R": max(1, tile.elements // padded), "C": padded, "num_warps": tile.warps}
    return sizes, tile.times * PROGRAMS


def _shares(rows: int, sizes: dict, programs: int) -> tuple[int, int]:
    """How many programs there are, and rows of each, a multiple of R."""
    each = triton.cdiv(rows, programs * sizes["R"]) * sizes["R"]
    return triton.cdiv(rows, each), each


def _launch_sum(partial, dtype, wide_columns=0):
    """Columns of [programs,N], added up in float32: the first as they are, the others in another type."""
    programs, columns = partial.shape
    wide = torch.empty(wide_columns, dtype=torch.float32, device=partial.device)
    out = torch.empty(columns - wide_columns, dtype=dtype, device=partial.device)
    _sum_kernel[(triton.cdiv(columns, SUM["C"]),)](partial, wide, out, programs, columns, wide_columns, **SUM)
    return wide, out


def launch_gelu(gradient, x, tile=GELU_TILES[0]):
    gradient, x, columns = gradient.contiguous(), x.contiguous(), x.shape[-1]
    (sizes, programs), rows = gelu_tile(columns, tile), x.numel() // columns
    programs, each = _shares(rows, sizes, programs)
    out = torch.empty(*x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(out):
        grid = triton.cdiv(columns, sizes["C"]), programs
        _gelu_backward_kernel[grid](gradient, x, out, partial, rows, each, **sizes)
        return out, _launch_sum(partial, x.dtype)[1]


def launch_norm(gradient, passing, x, mean, rstd, gamma, tile=NORM_TILES[0]):
    gradient, passing, x, width = gradient.contiguous(), passing.contiguous(), x.contiguous(), x.shape[-1]
    (sizes, programs), rows = norm_tile(width, tile), x.numel() // width
    programs, each = _shares(rows, sizes, programs)
    out = torch.empty(*x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs, 3 * width, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(out):
        more = mean.contiguous(), rstd.contiguous(), gamma.contiguous()
        _norm_backward_kernel[(programs,)](gradient, passing, x, *more, out, partial, rows, each, **sizes)
        return out, *_launch_sum(partial, x.dtype, 2 * width)


def launch_attention(qkv, gradient, heads):
    b, t, width = qkv.shape
    qkv, gradient, sizes = qkv.contiguous(), gradient.contiguous(), tile(t, width // 3, heads)
    out = torch.empty(b, t, width, dtype=qkv.dtype, device=qkv.device)
    partial = torch.empty(b, width, dtype=torch.float32, device=qkv.device)
    scale = sizes["D"] ** -0.5
    with torch.cuda.device_of(out):
        _attention_backward_kernel[(b, heads)](qkv, gradient, out, partial, scale * _LOG2_E, scale, **sizes)
        return out, _launch_sum(partial, qkv.dtype)[1]


def wide(x):
    """In float32, where it is in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _columns(x, dtype=None):
    """Added up in float32 or better; in ``dtype``, by default that of x."""
    return wide(x).flatten(0, -2).sum(0).to(dtype or x.dtype)


def _refer_gelu(gradient, x):
    out = torch.ops.aten.gelu_backward(gradient, x)
    return out, _columns(out)


def _refer_norm(gradient, passing, x, mean, rstd, gamma):
    n = (x - mean) * rstd
    g = gradient * gamma
    out = passing + rstd * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
    dnorm = torch.cat([_columns(part, mean.dtype) for part in (gradient * n, gradient)])
    return out.to(x.dtype), dnorm, _columns(out, x.dtype)


def _refer_attention(qkv, gradient, heads):
    out = reference.attention_backward(qkv, gradient, heads)
    return out, _columns(out)


@torch.library.custom_op("aps_bench::gelu_backward", mutates_args=(), device_types="cpu")
def gelu_backward(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """dx, and its columns' sums [N], of [..., N]."""
    return (launch_gelu if INTERPRET else _refer_gelu)(gradient, x)


@torch.library.custom_op("aps_bench::norm_backward", mutates_args=(), device_types="cpu")
def norm_backward(
    gradient: Tensor, passing: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """ds; dgamma and dbeta, [2*D] in the type of mean and rstd [...,1]; the columns' sums of ds [D]. All else [...,D],
    gamma [D]."""
    return (launch_norm if INTERPRET else _refer_norm)(gradient, passing, x, mean, rstd, gamma)


@torch.library.custom_op("aps_bench::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(qkv: Tensor, gradient: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """dqkv, and its columns' sums [3*H*D]."""
    return (launch_attention if INTERPRET else _refer_attention)(qkv, gradient, heads)


gelu_backward.register_kernel("cuda")(lambda gradient, x: launch_gelu(gradient, x))
norm_backward.register_kernel("cuda")(lambda *tensors: launch_norm(*tensors))
attention_backward.register_kernel("cuda")(launch_attention)


def _like(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(x.shape[-1])


@norm_backward.register_fake
def _(gradient, passing, x, mean, rstd, gamma):
    out, sums = _like(x)
    return out, mean.new_empty(2 * len(sums)), sums


gelu_backward.register_fake(lambda gradient, x: _like(x))
attention_backward.register_fake(lambda qkv, gradient, heads: _like(qkv))
