"""Cut the kept patches out of the crops and normalise them: the input of a patch embedding, as a Conv2d flattens it.

    out[v, b, k, c*P*P + y*P + x] = (crops[v][b, P*row + y, P*column + x, c] / 255 - mean[c]) / std[c]
    index[v, b, k] = row * (W/P) + column

Computed as (value - 255*mean) * (1/(255*std)) in float32: a subtraction and then a multiplication, each rounded once.
No compiler may contract that (a fused multiply-add is a multiplication and then an addition), so the CPU, the
interpreter and every GPU agree bit for bit. The two constants are rounded to float32 on the host; a last rounding gives
bfloat16 or float16.

Kernel: one launch for both views and for all groups, out[r, v, b, k] from index[v, b, r, k]. A lane per V pixels in a
row of a patch; V = 8, 4, 2 or 1 is the largest that divides P and the crops' addresses. The 3*V interleaved bytes are
three whole words of V bytes, and each channel gets V neighbouring values (16 bytes for V = 8 in half precision). Pixels
that are not kept are never read. A view and group moves B*K*3*P*P bytes in, two or four times as many out, and 4 bytes
of index a patch.

Programs go image by image through all groups: memory comes in pieces that neighbouring patches share (a row of a patch
of 16 pixels is 48 bytes), and what one group has fetched of an image is still in the cache for the next.
"""

import math

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.checks import INTERPRET, check_tensor

DTYPES = torch.float32, torch.bfloat16, torch.float16


@triton.jit
def _pixels(word0, word1, word2, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr, V: tl.constexpr):
    """Bytes FIRST, FIRST+STEP, ... (COUNT of them) of three V-byte words: [..., COUNT] uint8, in registers."""
    if COUNT == 1:
        word = word0 if FIRST // V == 0 else (word1 if FIRST // V == 1 else word2)
        return (word >> (FIRST % V * 8)).to(tl.uint8)[:, :, None]
    else:
        even = _pixels(word0, word1, word2, FIRST, 2 * STEP, COUNT // 2, V)
        odd = _pixels(word0, word1, word2, FIRST + STEP, 2 * STEP, COUNT // 2, V)
        return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1], COUNT])


@triton.jit
def _gather_kernel(
    crops0, crops1, index, out, offset0, offset1, offset2, factor0, factor1, factor2, views, images,
    stride_v, stride_b, stride_r, stride_k,
    R: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    WORD: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    o_patch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_patch = o_patch < images * (R * K)
    b, r, k = (o_patch // (R * K)).to(tl.int64), o_patch // K % R, o_patch % K
    view = tl.program_id(1).to(tl.int64)
    crops = tl.where(view == 0, crops0, crops1)
    o_index = view * stride_v + b * stride_b + r * stride_r + k * stride_k
    number = tl.load(index + o_index, mask=m_patch, other=0)
    known = (number >= 0) & (number < ROWS * COLUMNS)
    # Offsets in words of V bytes; those of images and of output patches may exceed 2**31.
    corner = (number // COLUMNS * (P * COLUMNS) + number % COLUMNS) * (P * 3 // V)
    o_corner = b * (ROWS * COLUMNS * P * P * 3 // V) + corner
    unit = tl.arange(0, LANES)
    o_unit = unit // (P // V) * (COLUMNS * P * 3 // V) + unit % (P // V) * 3
    p_word = crops.to(tl.pointer_type(WORD)) + o_corner[:, None] + o_unit[None, :]
    m_unit = m_patch[:, None] & (unit < P * P // V)[None, :]
    m_word = m_unit & known[:, None]
    word0 = tl.load(p_word, mask=m_word, other=0)
    word1 = tl.load(p_word + 1, mask=m_word, other=0)
    word2 = tl.load(p_word + 2, mask=m_word, other=0)

    o_out = (((r * views + view) * images + b) * K + k) * (3 * P * P)
    p_out = (out + o_out)[:, None, None] + (unit * V)[None, :, None]
    p_out += tl.arange(0, V)[None, None, :]
    for c in tl.static_range(3):
        offset = offset0 if c == 0 else (offset1 if c == 1 else offset2)
        factor = factor0 if c == 0 else (factor1 if c == 1 else factor2)
        factor = tl.where(known, factor, float("nan"))[:, None, None]  # a patch outside of the grid shows
        value = (_pixels(word0, word1, word2, c, 3, V, V).to(tl.float32) - offset) * factor
        tl.store(p_out + c * (P * P), value.to(out.dtype.element_ty), mask=m_unit[:, :, None])


def tile(grid, groups, keep, patch, alignment):
    """Sizes of one program: about 128 lanes in 2 warps, 48 bytes each at V = 8; 512 are slower by 6 % on an H100."""
    width = math.gcd(8, patch, alignment)
    lanes = triton.next_power_of_2(patch * patch // width)
    word = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[width]
    sizes = {"R": groups, "K": keep, "ROWS": grid[0], "COLUMNS": grid[1], "P": patch, "V": width, "WORD": word}
    return sizes | {"BLOCK": max(1, 128 // lanes), "LANES": lanes, "num_warps": 2}


def _launch(crops, index, patch, mean, std, dtype, out=None):
    if out is None:
        out = torch.empty(*reference.gathered_shape(index, patch), dtype=dtype, device=index.device)
    if out.numel():
        crops = [view.contiguous() for view in crops]
        index = index if index.dim() == 4 else index.unsqueeze(2)
        views, b, groups, keep = index.shape
        grid = crops[0].shape[1] // patch, crops[0].shape[2] // patch
        sizes = tile(grid, groups, keep, patch, math.gcd(*(view.data_ptr() for view in crops)))
        offset, factor = reference.normalisation(mean, std)
        programs = triton.cdiv(b * groups * keep, sizes["BLOCK"]), views
        with torch.cuda.device_of(out):
            args = crops[0], crops[-1], index, out, *offset, *factor, views, b, *index.stride()
            _gather_kernel[programs](*args, **sizes)
    return out


@torch.library.custom_op("aps::gather_patches", mutates_args=(), device_types="cpu")
def _op(
    crops: list[torch.Tensor], index: torch.Tensor, patch: int, mean: list[float], std: list[float], dtype: torch.dtype
) -> torch.Tensor:
    if INTERPRET:
        return _launch(crops, index, patch, mean, std, dtype)
    return reference.gather_patches(crops, index, patch=patch, mean=mean, std=std, dtype=dtype)


@torch.library.custom_op("aps::gather_patches_into", mutates_args=("out",), device_types=("cpu", "cuda"))
def _op_into(
    out: torch.Tensor, crops: list[torch.Tensor], index: torch.Tensor, patch: int, mean: list[float], std: list[float]
) -> None:
    if INTERPRET or out.is_cuda:
        _launch(crops, index, patch, mean, std, out.dtype, out)
    else:
        out.copy_(reference.gather_patches(crops, index, patch=patch, mean=mean, std=std, dtype=out.dtype))


_op.register_kernel("cuda")(_launch)


@_op.register_fake
def _(crops, index, patch, mean, std, dtype):
    return index.new_empty(reference.gathered_shape(index, patch), dtype=dtype)


@_op_into.register_fake
def _(out, crops, index, patch, mean, std):
    pass


def gather_patches(crops, index, *, patch, mean, std, dtype, out=None):
    """Normalised pixels of the kept patches, [B,K,3*P*P] of ``dtype`` in (channel, row, column) order.

    ``crops`` uint8 [B,H,W,3], H and W multiples of P; ``index`` int32 [B,K], row-major patch numbers, with any strides
    (such as ``first[:, r]`` from ``sample_views``); ``mean``, ``std`` three floats each, in units of pixel/255;
    ``dtype`` float32, bfloat16 or float16. With ``crops`` a pair of such tensors of the same shape and ``index``
    [2,B,K], both views come from one launch: [2,B,K,3*P*P]; with ``index`` [2,B,R,K], all groups of ``sample_views``
    too: [R,2,B,K,3*P*P]. ``out``: contiguous, of that shape, where they are to lie. A number outside of the grid raises
    on a CPU and gives NaN on a GPU.
    """
    if isinstance(crops, torch.Tensor):
        check_tensor("index", index, torch.int32, (*crops.shape[:1], None), crops.device)
        out = None if out is None else out[None]
        return gather_patches([crops], index[None], patch=patch, mean=mean, std=std, dtype=dtype, out=out)[0]
    if len(crops) not in (1, 2):
        raise ValueError(f"crops: expected one tensor or a pair, got {len(crops)}")
    check_tensor("crops", crops[0], torch.uint8, (None, None, None, 3))
    for view in crops[1:]:
        check_tensor("crops[1]", view, torch.uint8, crops[0].shape, crops[0].device)
    groups = (None,) if len(crops) == 2 and getattr(index, "ndim", 0) == 4 else ()
    check_tensor("index", index, torch.int32, (len(crops), crops[0].shape[0], *groups, None), crops[0].device)
    h, w = crops[0].shape[1:3]
    if patch < 1 or h % patch or w % patch:
        raise ValueError(f"patch: expected a divisor of the crops' {h}x{w} pixels, got {patch}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"mean, std: expected three numbers each and every std above 0, got {mean} and {std}")
    if out is None:
        return _op(list(crops), index, patch, list(mean), list(std), dtype)
    check_tensor("out", out, dtype, reference.gathered_shape(index, patch), crops[0].device)
    if not out.is_contiguous():
        raise ValueError(f"out: expected a contiguous tensor, got strides {out.stride()}")
    _op_into(out, list(crops), index, patch, list(mean), list(std))
    return out
