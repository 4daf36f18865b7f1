"""The two layers of a transformer's MLP, with GELU and its derivative inside the matrix products that surround them.

    H = X W1^T + b1        A = GELU(H) = H * Phi(H)        Y = A W2^T + b2

    dH = (dY W2) * GELU'(H)        GELU'(h) = Phi(h) + h * phi(h)

Phi and phi are the normal distribution and its density. At the width of a ViT-S an H100 multiplies X by W1 in the time
that it takes to read H and write A, so GELU as a kernel of its own costs as much as the product (bench/LOG.md).
Phi(-|h|) is phi(h) times a polynomial in 1/(1 + c*|h|) (Abramowitz and Stegun 1964, 7.1.26; absolute error below 8e-8),
without a branch, and the derivative needs phi in any case.

Kernels: one program per tile of H. Forward writes A and, where a backward will follow, H; backward reads H, writes dH
and the sums of its columns over each tile, the parts of the gradient of b1. All other products are torch's. For m rows
(tokens) and a hidden width n a kernel moves 2*m*n bytes less than product and GELU one after the other, two or three
times (without and with H kept, backward).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels import reference
from kernels.checks import INTERPRET

DTYPES = torch.bfloat16, torch.float16


@triton.jit
def _normal(h):
    """Phi(h) and phi(h)."""
    t = 1.0 / (1.0 + 0.23164188826636 * tl.abs(h))  # 0.3275911 / sqrt(2)
    density = tl.exp2(h * h * -0.72134752044448) * 0.39894228040143  # exp(-h**2 / 2) / sqrt(2 pi)
    # The coefficients of 7.1.26 times sqrt(2 pi) / 2.
    series = -1.82125597910778 + t * 1.33027442958912
    series = 0.31938153025994 + t * (-0.35656378124892 + t * (1.78147793656981 + t * series))
    tail = t * series * density
    return tl.where(h < 0, tail, 1.0 - tail), density


@triton.jit
def _up_kernel(
    x, w, bias, hidden, out, rows,
    N: tl.constexpr, K: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # The tiles of one band of rows follow each other: X passes through the second-level cache once.
    first, n = (tl.program_id(0) // (N // BN)).to(tl.int64) * BM, tl.program_id(0) % (N // BN) * BN
    m, n, k = tl.arange(0, BM)[:, None], n + tl.arange(0, BN)[None, :], tl.arange(0, BK)
    known = m < rows - first
    x += first * K
    hidden += first * N
    out += first * N
    p_x, p_w = x + m * K + k[None, :], w + n * K + k[:, None]
    h = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        h = tl.dot(tl.load(p_x + start, mask=known, other=0.0), tl.load(p_w + start), h, input_precision="ieee")
    h = (h + tl.load(bias + n).to(tl.float32)).to(out.dtype.element_ty)
    if KEEP:
        tl.store(hidden + m * N + n, h, mask=known)
    h = h.to(tl.float32)  # GELU of what backward will read
    distribution, _ = _normal(h)
    tl.store(out + m * N + n, (h * distribution).to(out.dtype.element_ty), mask=known)


@triton.jit
def _up_backward_kernel(
    gradient, w, hidden, out, sums, rows,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    band, n = (tl.program_id(0) // (N // BN)).to(tl.int64), tl.program_id(0) % (N // BN) * BN
    m, n, k = tl.arange(0, BM)[:, None], n + tl.arange(0, BN)[None, :], tl.arange(0, BK)
    known = m < rows - band * BM
    gradient += band * BM * K
    hidden += band * BM * N
    out += band * BM * N
    p_g, p_w = gradient + m * K + k[None, :], w + k[:, None] * N + n
    d = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        g = tl.load(p_g + start, mask=known, other=0.0)
        d = tl.dot(g, tl.load(p_w + start * N), d, input_precision="ieee")
    h = tl.load(hidden + m * N + n, mask=known, other=0.0).to(tl.float32)
    distribution, density = _normal(h)
    d *= distribution + h * density  # rows that do not exist have gradients of 0
    tl.store(out + m * N + n, d.to(out.dtype.element_ty), mask=known)
    tl.store(sums + band * N + n, tl.sum(d, axis=0)[None, :])


def tile(hidden, width):
    """Sizes of one program: two share a multiprocessor, so that one multiplies while the other one evaluates GELU."""
    return {"N": hidden, "K": width, "BM": 128, "BN": 128, "BK": 64, "STAGES": 3, "num_warps": 8}


def _launch(x, w, bias, keep):
    rows, (n, k) = x.shape[0], w.shape
    x, w, sizes = x.contiguous(), w.contiguous(), tile(n, k)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    hidden = torch.empty(rows if keep else 0, n, dtype=x.dtype, device=x.device)
    if rows:
        programs = triton.cdiv(rows, sizes["BM"]) * (n // sizes["BN"])
        with torch.cuda.device_of(out):
            _up_kernel[(programs,)](x, w, bias.contiguous(), hidden if keep else out, out, rows, KEEP=keep, **sizes)
    return hidden, out


def _launch_backward(gradient, w, hidden):
    rows, (k, n) = gradient.shape[0], w.shape
    gradient, w, sizes = gradient.contiguous(), w.contiguous(), tile(n, k)
    out = torch.empty(rows, n, dtype=hidden.dtype, device=hidden.device)
    bands = triton.cdiv(rows, sizes["BM"])
    sums = torch.empty(bands, n, dtype=torch.float32, device=hidden.device)
    if rows:
        with torch.cuda.device_of(out):
            _up_backward_kernel[(bands * (n // sizes["BN"]),)](gradient, w, hidden, out, sums, rows, **sizes)
    return out, sums.sum(0)


@torch.library.custom_op("aps::mlp_up", mutates_args=(), device_types="cpu")
def _op(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return (_launch if INTERPRET else reference.mlp_up)(x, w, bias, keep)


@torch.library.custom_op("aps::mlp_up_backward", mutates_args=(), device_types="cpu")
def _op_backward(gradient: torch.Tensor, w: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (_launch_backward if INTERPRET else reference.mlp_up_backward)(gradient, w, hidden)


_op.register_kernel("cuda")(_launch)
_op_backward.register_kernel("cuda")(_launch_backward)


@_op.register_fake
def _(x, w, bias, keep):
    return x.new_empty(x.shape[0] if keep else 0, w.shape[0]), x.new_empty(x.shape[0], w.shape[0])


@_op_backward.register_fake
def _(gradient, w, hidden):
    return torch.empty_like(hidden), hidden.new_empty(w.shape[1], dtype=reference.sum_type(hidden))


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2):
        hidden, a = _op(x, w1, b1, True)
        ctx.save_for_backward(x, w1, w2, hidden, a)
        return F.linear(a, w2, b2)

    @staticmethod
    def backward(ctx, gradient):
        x, w1, w2, hidden, a = ctx.saved_tensors
        d, d_bias = _op_backward(gradient, w2, hidden)
        return d @ w1, d.t() @ x, d_bias.to(d.dtype), gradient.t() @ a, gradient.sum(0)


def suits(x, w1):
    """Whether the kernels take tokens ``x`` [..., D] and the first layer's weight ``w1`` [N,D]."""
    return x.is_cuda and x.dtype in DTYPES and w1.shape[0] % 128 == 0 and w1.shape[1] % 64 == 0


def mlp(x, w1, b1, w2, b2):
    """GELU(x W1^T + b1) W2^T + b2, the exact GELU: [..., D] -> [..., D].

    ``w1`` [N,D], ``b1`` [N], ``w2`` [D,N], ``b2`` [D], of the type of ``x``. On a GPU in half precision, D a multiple
    of 64 and N of 128, GELU is part of the products; everything else is three operations of torch. Differentiable once.
    """
    if not suits(x, w1):
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    flat = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        return _Mlp.apply(flat, w1, b1, w2, b2).view(x.shape)
    return F.linear(_op(flat, w1, b1, False)[1], w2, b2).view(x.shape)
