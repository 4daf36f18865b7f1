"""Gradients of biases from less than a second look at what was written.

    y = GELU(x)         dx = dy GELU'(x)         dbias = columns of dx, summed over all rows

Bytes in half precision: 6 a number. Of queries, keys and values the bias of the keys has no gradient: what it adds to
all scores of a query alike, no softmax shows.

A first form of GELU's backward pass with sums, with four programs of 16 numbers a thread on a multiprocessor,
took an H200 longer than GELU and sums apart (``bench/LOG.md``); here up to twelve share one, or fewer load ahead.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import INTERPRET
from kernels.reference import wide
from kernels.residual_norm import Tile
from model import faster

COLUMNS = 128  # of a program
# As many programs as fit on 132 multiprocessors at once. The first is what the variant takes.
TILES = Tile(1024, 4, 1, 1584), Tile(1024, 4, 3, 1584), Tile(2048, 4, 1, 1188), Tile(2048, 4, 3, 792)


@triton.jit
def _slope(x):
    """As ``model.faster.slope``."""
    density = tl.exp2(x * x * -0.7213475204444817)
    t = 1 + 0.3275911 * 0.7071067811865476 * tl.abs(x)
    t = tl.rsqrt(t * t)
    tail = t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    tail = 0.5 * t * (0.254829592 + tail) * density
    return tl.where(x >= 0, 1 - tail, tail) + x * density * 0.3989422804014327


@triton.jit
def _gelu_backward_kernel(
    gradient, x, out, partial, rows, each, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    c, chunk = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1)
    total = tl.zeros([R, C], tl.float32)
    for start in tl.range(chunk * each, chunk * each + each, R, num_stages=STAGES):
        r = start + tl.arange(0, R)
        known = (r < rows)[:, None] & (c < N)[None, :]
        at = r.to(tl.int64)[:, None] * N + c[None, :]
        slope = _slope(tl.load(x + at, mask=known, other=0.0).to(tl.float32))
        dx = tl.load(gradient + at, mask=known, other=0.0).to(tl.float32) * slope
        tl.store(out + at, dx.to(out.dtype.element_ty), mask=known)
        total += dx
    tl.store(partial + chunk * N + c, tl.sum(total, axis=0), mask=c < N)


def tile(columns: int, of: Tile = TILES[0]) -> dict:
    """Sizes of one program."""
    return {"N": columns, "R": of.elements // COLUMNS, "C": COLUMNS, "STAGES": of.stages, "num_warps": of.warps}


def shares(rows: int, columns: int, of: Tile = TILES[0]) -> tuple[int, int]:
    """How many programs share the rows of some columns, and how many rows each has."""
    each = triton.cdiv(rows, max(1, of.programs // triton.cdiv(columns, COLUMNS)))
    each = triton.cdiv(each, of.elements // COLUMNS) * (of.elements // COLUMNS)
    return triton.cdiv(rows, each), each


def launch(gradient: Tensor, x: Tensor, of: Tile = TILES[0]) -> tuple[Tensor, Tensor]:
    gradient, x, columns = gradient.contiguous(), x.contiguous(), x.shape[-1]
    rows = x.numel() // columns
    programs, each = shares(rows, columns, of)
    out = torch.empty(*x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(out):
        grid = triton.cdiv(columns, COLUMNS), programs
        _gelu_backward_kernel[grid](gradient, x, out, partial, rows, each, **tile(columns, of))
    return out, partial


@torch.library.custom_op("aps_bench::gelu_backward", mutates_args=(), device_types="cpu")
def gelu_backward(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """dx, and sums of its columns by parts of the rows, in float32 or wider: [...,N] and [parts,N] from [...,N]."""
    if INTERPRET:
        return launch(gradient, x)
    dx = wide(gradient) * faster.slope(wide(x))
    _, each = shares(x.numel() // x.shape[-1], x.shape[-1])
    return dx.to(x.dtype), torch.stack([part.sum(0) for part in dx.flatten(0, -2).split(each)])


gelu_backward.register_kernel("cuda")(launch)


@gelu_backward.register_fake
def _(gradient, x):
    programs, _ = shares(x.numel() // x.shape[-1], x.shape[-1])
    kind = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(programs, x.shape[-1], dtype=kind)


class _Gelu(torch.autograd.Function):
    """Of x, in which the bias [N] is already; its gradient comes from here."""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.kind = bias.dtype
        return faster.ShortGeluFunction.forward(ctx, x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        dx, parts = gelu_backward(gradient, x)
        return dx, parts.sum(0).to(ctx.kind)


gelu = _Gelu.apply


class _QueryValueBias(torch.autograd.Function):
    """qkv [...,3D], in which the bias [3D] is already; its gradient comes from here, for queries and values."""

    @staticmethod
    def forward(ctx, qkv, bias):
        ctx.kind = bias.dtype
        return qkv.view_as(qkv)

    @staticmethod
    def backward(ctx, gradient):
        queries, _, values = gradient.flatten(0, -2).chunk(3, -1)
        queries, values = queries.sum(0), values.sum(0)
        return gradient, torch.cat([queries, torch.zeros_like(queries), values]).to(ctx.kind)


query_value_bias = _QueryValueBias.apply
