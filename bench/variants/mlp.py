"""An MLP whose GELU happens inside of its products, forward and backward.

    forward:   h = x W1^T + b1    a = GELU(h)    slope = GELU'(h)          one product writes a and slope, h never
    backward:  dh = (dy W2) * slope              db1 = columns of dh       one product reads slope, writes dh

Beside the products, 4 bytes a number of h forward and 4 backward in half precision, where GELU apart moves 6 and 6, and
db1 another 2. x [M,K], W1 [N,K], dy [M,K], W2 [K,N], a, slope and dh [M,N].

One program a multiprocessor goes through tiles of the output, columns first, so that a tile of x is read from memory
once; the loads of the next tile are under way while the last one is finished, by parts of columns, so that registers
suffice. Loads and stores are bulk copies (TMA) where the card has them. At this depth (K 384) tiles decide: 128 x 256
takes 0.7 GB from the second-level cache at ViT-S's sizes, 128 x 128 0.94 GB and two programs a multiprocessor.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.variants.columns import _columns, _gelu, _launch_sum
from kernels.checks import INTERPRET


class Tile(NamedTuple):
    BM: int
    BN: int
    BK: int
    PARTS: int  # of BN columns, at the end
    num_warps: int
    num_stages: int
    programs: int  # a multiprocessor


TILES = Tile(128, 256, 64, 4, 8, 3, 1), Tile(128, 256, 64, 4, 8, 4, 1), Tile(128, 128, 64, 4, 8, 3, 2)


@triton.jit
def _end_up(total, bias, a, slope, m, n, N, PARTS: tl.constexpr):
    BM: tl.constexpr = total.shape[0]
    BN: tl.constexpr = total.shape[1]
    if PARTS > 1:
        left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        _end_up(left, bias, a, slope, m, n, N, PARTS // 2)
        _end_up(right, bias, a, slope, m, n + BN // 2, N, PARTS // 2)
    else:
        c = n + tl.arange(0, BN)
        h = total + tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
        below, derivative = _gelu(h)
        a.store([m, n], (h * below).to(a.dtype))
        slope.store([m, n], derivative.to(slope.dtype))


@triton.jit
def _up_kernel(
    x, weight, bias, a, slope, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    for number in tl.range(tl.program_id(0), tl.cdiv(M, BM) * across, PROGRAMS, flatten=True):
        m, n = number // across * BM, number % across * BN
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(x.load([m, k]), weight.load([n, k]).T, total)
        _end_up(total, bias, a, slope, m, n, N, PARTS)


@triton.jit
def _end_down(total, slope, dh, partial, m, n, N, PARTS: tl.constexpr):
    BM: tl.constexpr = total.shape[0]
    BN: tl.constexpr = total.shape[1]
    if PARTS > 1:
        left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        _end_down(left, slope, dh, partial, m, n, N, PARTS // 2)
        _end_down(right, slope, dh, partial, m, n + BN // 2, N, PARTS // 2)
    else:
        c = n + tl.arange(0, BN)
        total = total * slope.load([m, n]).to(tl.float32)
        dh.store([m, n], total.to(dh.dtype))
        tl.store(partial + c, tl.sum(total, axis=0), mask=c < N)


@triton.jit
def _down_backward_kernel(
    gradient, weight, slope, dh, partial, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    for number in tl.range(tl.program_id(0), tl.cdiv(M, BM) * across, PROGRAMS, flatten=True):
        m, n = number // across, number % across * BN
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(gradient.load([m * BM, k]), weight.load([k, n]), total)
        _end_down(total, slope, dh, partial + m * N, m * BM, n, N, PARTS)


def missing(device: torch.device) -> str:
    """Why the kernels cannot run there, as they are for a GPU; "" if they can."""
    if device.type != "cuda":
        return "needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    return "" if (9, 0) <= capability < (12, 0) else f"needs compute capability 9 or 10, this card has {capability}"


def sizes(tile: Tile, processors: int) -> dict:
    """Constants of a launch on a card of so many multiprocessors."""
    constants = {key: value for key, value in tile._asdict().items() if key != "programs"}
    return constants | {"PROGRAMS": processors * tile.programs}


def _processors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def launch_up(x, weight, bias, tile=TILES[0]):
    (m, k), n, of = x.shape, len(weight), TensorDescriptor.from_tensor
    a, slope = (torch.empty(m, n, dtype=x.dtype, device=x.device) for _ in range(2))
    rows, part, constants = [tile.BM, tile.BK], [tile.BM, tile.BN // tile.PARTS], sizes(tile, _processors(x.device))
    x, weight = of(x.contiguous(), rows), of(weight.contiguous(), [tile.BN, tile.BK])
    with torch.cuda.device_of(a):
        _up_kernel[(constants["PROGRAMS"],)](x, weight, bias, of(a, part), of(slope, part), m, n, k, **constants)
    return a, slope


def launch_down_backward(gradient, weight, slope, tile=TILES[0]):
    (m, k), n, of = gradient.shape, weight.shape[1], TensorDescriptor.from_tensor
    dh = torch.empty(m, n, dtype=slope.dtype, device=slope.device)
    partial = torch.empty(triton.cdiv(m, tile.BM), n, dtype=torch.float32, device=dh.device)
    rows, part, constants = [tile.BM, tile.BK], [tile.BM, tile.BN // tile.PARTS], sizes(tile, _processors(dh.device))
    gradient, weight = of(gradient.contiguous(), rows), of(weight.contiguous(), [tile.BK, tile.BN])
    with torch.cuda.device_of(dh):
        slope, out = of(slope.contiguous(), part), of(dh, part)
        _down_backward_kernel[(constants["PROGRAMS"],)](gradient, weight, slope, out, partial, m, n, k, **constants)
        return dh, _launch_sum(partial, dh.dtype)[1]


def _refer_up(x, weight, bias):
    h = F.linear(x, weight, bias.to(x.dtype))
    return F.gelu(h), torch.ops.aten.gelu_backward(torch.ones_like(h), h)


def _refer_down_backward(gradient, weight, slope):
    dh = gradient @ weight * slope
    return dh, _columns(dh)


@torch.library.custom_op("aps_bench::up", mutates_args=(), device_types="cpu")
def up(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GELU and its derivative of x W^T + b, [M,N] each, from x [M,K], W [N,K], b [N]."""
    return (launch_up if INTERPRET else _refer_up)(x, weight, bias)


@torch.library.custom_op("aps_bench::down_backward", mutates_args=(), device_types="cpu")
def down_backward(gradient: Tensor, weight: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """(dy W) * slope [M,N] and the sums of its columns [N], from dy [M,K], W [K,N], slope [M,N]."""
    return (launch_down_backward if INTERPRET else _refer_down_backward)(gradient, weight, slope)


up.register_kernel("cuda")(lambda x, weight, bias: launch_up(x, weight, bias))
down_backward.register_kernel("cuda")(lambda gradient, weight, slope: launch_down_backward(gradient, weight, slope))


@up.register_fake
def _(x, weight, bias):
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))


@down_backward.register_fake
def _(gradient, weight, slope):
    return torch.empty_like(slope), slope.new_empty(slope.shape[1])
