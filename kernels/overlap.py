"""Which share of every view-2 patch do the kept patches of view 1 show already?

    r[j] = area(patch j of view 2, inside the union of the K kept patches of view 1) / area(patch j of view 2)

(APS, arXiv 2306.02854, Eq. 2-3.) Everything is measured in the upright source image: a crop (y, x, h, w) cut into
Gh x Gw patches has its edges at y + h*i/Gh and x + w*i/Gw, columns counted from the right where the crop is flipped. In
units of 1/Gh and 1/Gw pixel these are the integers Gh*y + h*i and Gw*x + w*i, below 2**30. The patches of one view do
not overlap each other, so the covered area is the sum over k of products of two 1-D overlaps, an integer up to 2**32.

Kernel: one program per image and group, a lane per view-2 patch, a loop over the K kept patches; all lanes read the
same kept patch, so nothing is exchanged between them. Reads 34 + 4*R*K bytes an image, writes 4*R*N; one launch.
"""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.checks import INTERPRET, check_boxes_and_grid, check_tensor


@triton.jit
def covered_area(boxes, flips, kept, patch, GH: tl.constexpr, GW: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr):
    """Area of the view-2 patches ``patch`` [NP] inside the K view-1 patches at ``kept``: [NP] int64, 1/(Gh*Gw) px^2.

    ``boxes`` and ``flips`` point at the image's 8 integers and 2 bytes. STEP kept patches are taken at a time.
    """
    h1, w1 = tl.load(boxes + 2), tl.load(boxes + 3)
    h2, w2 = tl.load(boxes + 6), tl.load(boxes + 7)
    column2 = tl.where(tl.load(flips + 1) != 0, GW - 1 - patch % GW, patch % GW)
    top2 = (GH * tl.load(boxes + 4) + h2 * (patch // GW))[:, None]
    left2 = (GW * tl.load(boxes + 5) + w2 * column2)[:, None]
    origin_y, origin_x = GH * tl.load(boxes), GW * tl.load(boxes + 1)
    flip1 = tl.load(flips) != 0

    area = tl.zeros([patch.shape[0], STEP], tl.int64)
    for k in tl.range(0, K, STEP, num_stages=1):
        o_k = k + tl.arange(0, STEP)
        p = tl.load(kept + o_k, mask=o_k < K, other=0)
        column1 = tl.where(flip1, GW - 1 - p % GW, p % GW)
        top1 = (origin_y + h1 * (p // GW))[None, :]
        left1 = (origin_x + w1 * column1)[None, :]
        height = tl.minimum(top1 + h1, top2 + h2) - tl.maximum(top1, top2)
        width = tl.minimum(left1 + w1, left2 + w2) - tl.maximum(left1, left2)
        height = tl.where((o_k < K)[None, :], tl.maximum(height, 0), 0)
        area += height.to(tl.int64) * tl.maximum(width, 0)
    return tl.sum(area, axis=1)


@triton.jit
def _overlap_kernel(
    boxes, flips, first, out,
    GH: tl.constexpr, GW: tl.constexpr, K: tl.constexpr, R: tl.constexpr, NP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    group, patch = b * R + tl.program_id(1), tl.arange(0, NP)
    covered = covered_area(boxes + b * 8, flips + b * 2, first + group * K, patch, GH, GW, K, STEP)
    area = tl.load(boxes + b * 8 + 6).to(tl.int64) * tl.load(boxes + b * 8 + 7)
    # Triton's float64 division is correctly rounded on every device, its float32 division is not.
    share = covered.to(tl.float64) / area.to(tl.float64)
    tl.store(out + group * (GH * GW) + patch, share.to(tl.float32), mask=patch < GH * GW)


def tile(grid, keep, groups):
    """Sizes of one program: NP lanes, 8 of them a thread (not tuned on a GPU yet)."""
    lanes = triton.next_power_of_2(grid[0] * grid[1])
    # The interpreter pays per operation, not per element: it takes all kept patches at once (Triton's limit is 2**20).
    step = min(triton.next_power_of_2(max(1, keep)), 2**20 // lanes) if INTERPRET else 1
    sizes = {"GH": grid[0], "GW": grid[1], "K": keep, "R": groups, "NP": lanes, "STEP": step}
    return sizes | {"num_warps": max(1, lanes // 256)}


def _launch(boxes, flips, first, grid):
    b, r, k = first.shape
    out = torch.empty(b, r, grid[0] * grid[1], dtype=torch.float32, device=boxes.device)
    if out.numel():
        args = boxes.contiguous(), flips.contiguous().view(torch.uint8), first.contiguous(), out
        with torch.cuda.device_of(out):
            _overlap_kernel[(b, r)](*args, **tile(grid, k, r))
    return out


@torch.library.custom_op("aps::patch_overlap", mutates_args=(), device_types="cpu")
def _op(boxes: torch.Tensor, flips: torch.Tensor, first: torch.Tensor, grid: list[int]) -> torch.Tensor:
    if INTERPRET:
        return _launch(boxes, flips, first, grid)
    return reference.patch_overlap(boxes, flips, first, grid=grid)


_op.register_kernel("cuda")(_launch)


@_op.register_fake
def _(boxes, flips, first, grid):
    return boxes.new_empty(*first.shape[:2], grid[0] * grid[1], dtype=torch.float32)


def patch_overlap(boxes, flips, first, *, grid):
    """Share of every view-2 patch covered by the view-1 patches of each group (for analysis, not for sampling).

    ``boxes`` int32 [B,2,4] (y, x, h, w) in pixels of the upright source image, 0..65535; ``flips`` bool [B,2];
    ``first`` int32 [B,R,K], row-major patch numbers of view 1 as the model sees it, distinct within a group; ``grid``
    (Gh, Gw). Returns float32 [B,R,N].
    """
    check_boxes_and_grid(boxes, flips, grid)
    check_tensor("first", first, torch.int32, (boxes.shape[0], None, None), boxes.device)
    return _op(boxes, flips, first, list(grid))
