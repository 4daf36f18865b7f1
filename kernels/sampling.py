"""Asymmetric patch sampling: which patches of the two views of an image does each optimizer step see?

View 1: a uniform permutation of the N patches, cut into R disjoint groups of K. View 2, for each group: K of the N
patches drawn one after the other without replacement, with weights (1 - r)**gamma (APS, arXiv 2306.02854, Eq. 4), r the
share of a patch that the group's view-1 patches cover (``overlap.py``). With the uncovered area v = h2*w2*(1 - r), and
h2*w2 common to all patches, the weights are v**gamma. Such a draw is a race (Efraimidis and Spirakis, 2006): with u
uniform in (0, 1), the K smallest of -log(u)/v**gamma in ascending order. Hence the sort key

    log2(-log2(u)) - gamma * log2(v)          and patches with v = 0 come after all others, in uniform order.

Integers only: v is exact, u = (m + 1/2)/2**42 comes from Philox, and one fixed-point log2 (``reference.log2_fixed``,
error below 2**-38) serves all three logarithms, so every device draws the same patches, bit for bit. The price: a key
is off by about (1 + gamma) * 2**-32 and, where u is close to 1, by up to 2**-27 + 2**-42/-log2(u); two patches whose
keys are closer than that may swap places. gamma is rounded to a multiple of 2**-16; 0 is uniform, fully covered patches
included (0**0 = 1). Keys end in the patch number, which makes them distinct.

Any gamma up to inf will do, but a key has 51 bits for its value (49 of more than 2048 patches, which are as good).
Beyond 1024 it therefore loses fraction bits: with the least s that makes gamma/2**s <= 1024, gamma is rounded to a
multiple of 2**(s-16), and patches of equal v, in uniform order until then, come in that of their numbers where their
log2(-log2(u)) agree to 2**(s-32). Beyond gamma = 2**30 (s = 20), where the weights of two areas up to 2**26 differ by a
factor of 2**23 or more, the K patches with the largest v are drawn in descending order, equal ones in that of 19 random
bits (17).

Counters: (patch, call, sample low, sample high); key by ``philox.stream_key``. The four words of call c are three draws
of 42 bits, 3*c to 3*c + 2: one word each, and ten bits of the last. Draw 0 is view 1, draw 1 + r group r of view 2.
Of 2048 patches two have equal bits in one image of 2**21; these come in the order of their numbers.

Kernel: one launch for all groups of both views, one program per image and group. The programs of an image all sort view
1 anew: 2*R sorts instead of R + 1, for R times as many programs that wait for nobody. Reads 42 bytes an image and a
32 KiB table that stays in the cache, writes 8*R*K bytes an image.
"""

import math

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.checks import INTERPRET, check_boxes_and_grid, check_tensor
from kernels.overlap import covered_area, tile
from kernels.philox import Purpose

# The fixed-point formats are explained in reference.py.
PATCHES, DRAWS = tl.constexpr(int(Purpose.PATCHES)), tl.constexpr(reference.DRAWS)
PATCH_BITS, WIDE_PATCH_BITS = tl.constexpr(reference.PATCH_BITS), tl.constexpr(reference.WIDE_PATCH_BITS)
PATCH_MASK, WIDE_PATCH_MASK = tl.constexpr(reference.NARROW - 1), tl.constexpr(reference.MAX_PATCHES - 1)
NARROW, UNIFORM_BITS = tl.constexpr(reference.NARROW), tl.constexpr(reference.UNIFORM_BITS)
ZERO_WEIGHT, LAST = tl.constexpr(reference.ZERO_WEIGHT), tl.constexpr(2**63 - 1)
LOG_BITS, LOG_TO_KEY = tl.constexpr(reference.LOG_BITS), tl.constexpr(reference.LOG_TO_KEY)
LOG_TOP, POWER_BITS = tl.constexpr(reference.LOG_TOP), tl.constexpr(reference.POWER_BITS)
KEY_OFFSET, STEEPEST = tl.constexpr(reference.KEY_OFFSET), tl.constexpr(reference.STEEPEST[0])
AREA_MASK, TABLE_BITS = tl.constexpr(reference.AREA_MASK), tl.constexpr(reference.TABLE_BITS)
STEEPEST_BITS = tl.constexpr(reference.STEEPEST_BITS)
WIDE_STEEPEST_BITS = tl.constexpr(reference.WIDE_STEEPEST_BITS)
SEGMENTS = tl.constexpr(reference.SEGMENTS)


@triton.jit
def _uniform(seed, epoch, sample, draw, patch):
    """42 random bits for every patch: [NP] int64."""
    zero = patch.to(tl.uint32) * 0
    epoch0, epoch1 = zero + epoch.to(tl.uint32), zero + (epoch >> 32).to(tl.uint32)
    key0, key1, _, _ = tl.philox(seed, epoch0, epoch1, zero + PATCHES, zero)
    sample0, sample1 = zero + sample.to(tl.uint32), zero + (sample >> 32).to(tl.uint32)
    key = key0.to(tl.uint64) | key1.to(tl.uint64) << 32
    draw += patch * 0
    word0, word1, word2, low = tl.philox(key, patch, draw // DRAWS, sample0, sample1)
    turn = draw % DRAWS
    word = tl.where(turn == 0, word0, tl.where(turn == 1, word1, word2))
    return word.to(tl.int64) << 10 | (low >> 10 * turn & 1023).to(tl.int64)


@triton.jit
def _log2(n, table):
    """``reference.log2_fixed``, operation by operation."""
    bits = n.to(tl.float64).to(tl.int64, bitcast=True)
    segment = bits >> 52 - TABLE_BITS & SEGMENTS - 1
    t = bits >> 20 - TABLE_BITS & (1 << 32) - 1
    curve = tl.load(table + SEGMENTS + segment)
    slope = (curve >> 32) - ((curve & (1 << 32) - 1) * t >> 37)
    return (bits >> 52 - LOG_BITS) + tl.load(table + segment) + (slope * t >> 31)


@triton.jit
def _store_smallest(out, keys, patch, start, K: tl.constexpr, SORT: tl.constexpr):
    """Write the patch numbers of the keys of ranks start .. start+K-1 to ``out``, in ascending order of the keys."""
    if SORT:
        mask: tl.constexpr = PATCH_MASK if patch.shape[0] <= NARROW else WIDE_PATCH_MASK
        rank, number = patch, tl.sort(keys) & mask
    else:  # comparing all pairs is much faster than a sort in the interpreter, and much too large for a GPU
        rank, number = tl.sum((keys[None, :] < keys[:, None]).to(tl.int32), axis=1), patch
    tl.store(out + rank - start, number.to(tl.int32), mask=(rank >= start) & (rank < start + K))


@triton.jit
def _sample_kernel(
    boxes, flips, sample, seed, epoch, table, first, second, factor, shift, SORT: tl.constexpr,
    GH: tl.constexpr, GW: tl.constexpr, K: tl.constexpr, R: tl.constexpr, NP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    b, r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bits: tl.constexpr = PATCH_BITS if NP <= NARROW else WIDE_PATCH_BITS
    steepest: tl.constexpr = STEEPEST_BITS if NP <= NARROW else WIDE_STEEPEST_BITS
    first += (b * R + r) * K
    second += (b * R + r) * K
    seed, epoch, sample = tl.load(seed), tl.load(epoch), tl.load(sample + b)
    patch = tl.arange(0, NP)

    m = _uniform(seed, epoch, sample, 0, patch)
    keys = tl.where(patch < GH * GW, m << bits | patch, LAST)
    _store_smallest(first, keys, patch, r * K, K, SORT)
    tl.debug_barrier()  # every lane goes on to read the K numbers that other lanes of this program have just written

    v = tl.load(boxes + b * 8 + 6).to(tl.int64) * tl.load(boxes + b * 8 + 7)
    v -= covered_area(boxes + b * 8, flips + b * 2, first, patch, GH, GW, K, STEP)
    v = tl.where(factor == 0, 1, v)
    m = _uniform(seed, epoch, sample, 1 + r, patch)
    exponential = LOG_TOP - _log2(2 * m + 1, table)
    race = (_log2(exponential, table) >> LOG_TO_KEY + shift) + KEY_OFFSET
    value = race - ((_log2(v, table) >> LOG_TO_KEY) * factor >> POWER_BITS)
    value = tl.where(factor == STEEPEST, AREA_MASK - v << steepest | m >> UNIFORM_BITS - steepest, value)
    keys = tl.where(v > 0, value << bits, ZERO_WEIGHT | m << bits)
    keys = tl.where(patch < GH * GW, keys | patch, LAST)
    _store_smallest(second, keys, patch, 0, K, SORT)


_tables = {}


def _table(device):
    """The logarithm table on ``device``. The first call copies it there: call once before capturing a CUDA graph."""
    if device not in _tables:
        _tables[device] = torch.from_numpy(reference.log2_table()).to(device)
    return _tables[device]


def _launch(boxes, flips, sample, seed, epoch, grid, keep, groups, power, sort=not INTERPRET):
    b, device = boxes.shape[0], boxes.device
    first, second = (torch.empty(b, groups, keep, dtype=torch.int32, device=device) for _ in range(2))
    if b:
        boxes, flips, sample = boxes.contiguous(), flips.contiguous().view(torch.uint8), sample.contiguous()
        args = boxes, flips, sample, seed, epoch, _table(device), first, second, *reference.fixed_power(power)
        # All pairs of more than 1024 keys exceed Triton's largest tensor, so there the interpreter sorts too.
        sort = sort or math.prod(grid) > 1024
        with torch.cuda.device_of(boxes):
            _sample_kernel[(b, groups)](*args, SORT=sort, **tile(grid, keep, groups))
    return first, second


@torch.library.custom_op("aps::sample_views", mutates_args=(), device_types="cpu")
def _op(
    boxes: torch.Tensor, flips: torch.Tensor, sample: torch.Tensor, seed: torch.Tensor, epoch: torch.Tensor,
    grid: list[int], keep: int, groups: int, power: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if INTERPRET:
        return _launch(boxes, flips, sample, seed, epoch, grid, keep, groups, power)
    sizes = {"grid": grid, "keep": keep, "groups": groups, "power": power}
    return reference.sample_views(boxes, flips, sample, seed=seed, epoch=epoch, **sizes)


_op.register_kernel("cuda")(_launch)


@_op.register_fake
def _(boxes, flips, sample, seed, epoch, grid, keep, groups, power):
    return tuple(boxes.new_empty(boxes.shape[0], groups, keep) for _ in range(2))


def _number(name, value, device):
    """A one-element int64 tensor on the device: from an integer by a fill, as a copy would wait for the device."""
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{name}: expected a signed 64-bit integer, got {value}")
        return torch.full((1,), value, dtype=torch.int64, device=device)
    check_tensor(name, value, torch.int64, (1,) if getattr(value, "ndim", 0) else (), device)
    return value


def sample_views(boxes, flips, sample, *, grid, keep, groups, power, seed, epoch):
    """Draw the patches of both views: (first, second), int32 [B,R,K], row-major numbers in the crop the model sees.

    ``boxes`` int32 [B,2,4] (y, x, h, w) in pixels of the upright source image, 0..65535, h and w at least 1; ``flips``
    bool [B,2], left-right; ``sample`` int64 [B] ids; ``grid`` (Gh, Gw), N <= 8192; ``keep`` K, ``groups`` R, R*K <= N;
    ``power`` gamma, 0..inf; ``seed`` and ``epoch`` signed 64-bit integers or one-element int64 tensors on the device.
    Impossible boxes raise on a CPU; on a GPU, where nobody looks, they still give distinct patches of the grid.
    """
    check_boxes_and_grid(boxes, flips, grid)
    check_tensor("sample", sample, torch.int64, (boxes.shape[0],), boxes.device)
    if not isinstance(keep, int) or not isinstance(groups, int):
        raise TypeError(f"keep, groups: expected two integers, got {keep} and {groups}")
    if keep < 1 or groups < 1 or groups * keep > math.prod(grid):
        limit = f"groups * keep <= {math.prod(grid)}, the patches of the {grid[0]}x{grid[1]} grid"
        raise ValueError(f"keep, groups: expected at least 1 and {limit}, got keep {keep} and groups {groups}")
    if not power >= 0:
        raise ValueError(f"power: expected 0 or more, got {power}")
    seed, epoch = _number("seed", seed, boxes.device), _number("epoch", epoch, boxes.device)
    return _op(boxes, flips, sample, seed, epoch, list(grid), keep, groups, float(power))
