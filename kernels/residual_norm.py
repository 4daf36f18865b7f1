"""The sum of a residual stream and a branch, the norm that reads it, and a backward pass with all sums of columns.

    s = stream + branch         n = (s - mean s) / deviation of s         y = n * gamma + beta

forward, by rows of D, and backward, with gs and gy the gradients of s and y, and g = gy * gamma:

    ds = gs + (g - mean g - n * mean(g * n)) / deviation of s         the gradient of stream, and of branch
    dgamma = columns of gy * n         dbeta = columns of gy         dbias = columns of ds

where "columns" means their sums over all rows, and ``bias`` is that of the product which wrote branch: its gradient
costs no second look at ds.

Forward is plain torch, of which the compiler makes one pass. Backward moves 8 bytes a number in half precision. Its
kernel: some hundred programs go through the rows, each adds its own up in float32, and those sums, [programs,3*D], are
added in a second pass, in an order that does not change (no atomics: equal from run to run, and on every card).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.checks import INTERPRET, check_tensor


class Tile(NamedTuple):
    """How rows are shared out: the numbers that a program takes at a time, its warps, the steps of its loop that load
    at once, and the programs, as many on every card, so that sums are the same. All programs should fit on a card at
    once, or the last wait for the first to end. Registers limit that, and triton 3.6 takes more of them than 3.8."""

    elements: int = 2048
    warps: int = 4
    stages: int = 1
    programs: int = 528  # four for each of the 132 multiprocessors of an H100 or H200

    def __str__(self) -> str:
        return f"{self.elements} on {self.warps} warps, {self.stages} stages, {self.programs} programs"


# The first is what an H200 has measured in a step, at half of its copy rate; `bench passes` tries the others.
TILES = (
    Tile(),
    Tile(stages=2, programs=396),
    Tile(1024, programs=924),
    Tile(1024, 4, 3, 792),
    Tile(2048, 8, 3, 396),
    Tile(512, 1, 3, 1056),
)
SUM = {"R": 256, "C": 8, "num_warps": 4}  # of the second pass: little to do for each of many programs


@triton.jit
def _norm_backward_kernel(
    gradient, passing, x, mean, rstd, gamma, out, partial, rows, each,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    c, chunk = tl.arange(0, C), tl.program_id(0)
    inside = c < D
    weight = tl.load(gamma + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    dgamma, dbeta, dbias = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    for start in tl.range(chunk * each, chunk * each + each, R, num_stages=STAGES):
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
def _sum_kernel(partial, norm, bias, programs, D, R: tl.constexpr, C: tl.constexpr):
    """Columns of [programs,3*D]: the first 2*D to ``norm``, the others to ``bias``, in its type."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, programs, R):
        r = start + tl.arange(0, R)
        known = (r < programs)[:, None] & (c < 3 * D)[None, :]
        total += tl.load(partial + r[:, None] * (3 * D) + c[None, :], mask=known, other=0.0)
    found = tl.sum(total, axis=0)
    tl.store(norm + c, found, mask=c < 2 * D)
    c -= 2 * D
    tl.store(bias + c, found.to(bias.dtype.element_ty), mask=(c >= 0) & (c < D))


def tile(width, of=TILES[0]):
    """Sizes of one program, which sees whole rows."""
    padded = triton.next_power_of_2(width)
    rows = max(1, of.elements // padded)
    return {"D": width, "R": rows, "C": padded, "STAGES": of.stages, "num_warps": of.warps}


def _launch(gradient, passing, x, mean, rstd, gamma, of=TILES[0]):
    tensors = [tensor.contiguous() for tensor in (gradient, passing, x, mean, rstd, gamma)]
    width, sizes = x.shape[-1], tile(x.shape[-1], of)
    rows = x.numel() // width
    each = triton.cdiv(rows, of.programs * sizes["R"]) * sizes["R"]
    programs = triton.cdiv(rows, max(1, each))
    out = torch.empty(*x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs, 3 * width, dtype=torch.float32, device=x.device)
    norm = torch.empty(2 * width, dtype=torch.float32, device=x.device)
    bias = torch.empty(width, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(out):
        if programs:
            _norm_backward_kernel[(programs,)](*tensors, out, partial, rows, each, **sizes)
        _sum_kernel[(triton.cdiv(3 * width, SUM["C"]),)](partial, norm, bias, programs, width, **SUM)
    return out, norm, bias


@torch.library.custom_op("aps::norm_backward", mutates_args=(), device_types="cpu")
def _op(
    gradient: torch.Tensor, passing: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    gamma: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """ds; dgamma and dbeta, [2*D] in the type of mean and rstd, [...,1]; dbias [D] in that of x. ``gradient`` gy,
    ``passing`` gs and ``x`` s are [...,D], gamma [D]."""
    return (_launch if INTERPRET else reference.norm_backward)(gradient, passing, x, mean, rstd, gamma)


_op.register_kernel("cuda")(_launch)


@_op.register_fake
def _(gradient, passing, x, mean, rstd, gamma):
    out, width = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    return out, mean.new_empty(2 * width), x.new_empty(width)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stream, branch, bias, gamma, beta, eps):
        total = stream + branch
        x = reference.wide(total)
        normed, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], gamma.to(x.dtype), beta.to(x.dtype), eps)
        ctx.save_for_backward(total, mean, rstd, gamma)
        ctx.types = bias.dtype, gamma.dtype
        return total, normed.to(total.dtype)

    @staticmethod
    def backward(ctx, passing, gradient):
        total, mean, rstd, gamma = ctx.saved_tensors
        ds, dnorm, dbias = _op(gradient, passing, total, mean, rstd, gamma)
        dgamma, dbeta = dnorm.unflatten(0, (2, -1)).unbind()
        bias, norm = ctx.types
        return ds, ds, dbias.to(bias), dgamma.to(norm), dbeta.to(norm), None


def add_norm(stream, branch, gamma, beta, *, eps, bias):
    """The sum of two tensors [...,D], and its rows normalised, times gamma, plus beta, [D] each: both in the type of
    the sum, in float32 or wider between.

    ``bias`` [D]: that of the product which wrote ``branch``. It is in there already, and nothing is added; but its
    gradient comes from here, so that the product has to be given it detached.
    """
    for name, tensor in (("gamma", gamma), ("beta", beta), ("bias", bias)):
        check_tensor(name, tensor, tensor.dtype, stream.shape[-1:], stream.device)
    check_tensor("branch", branch, branch.dtype, stream.shape, stream.device)
    return _AddNorm.apply(stream, branch, bias, gamma, beta, eps)
