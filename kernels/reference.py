"""The three operations on the CPU, vectorised over the batch: the program's CPU path and the oracle of the tests.

B images, R groups, N patches of the full grid (Gh x Gw), K kept patches, P patch side in pixels, H, W crop size in
pixels. Each function takes the arguments and returns the results (CPU tensors) of the public one of the same name;
formulas and sources stand in ``sampling.py``, ``overlap.py`` and ``gather.py``. Arguments are checked there, values
here, where a look at them costs nothing. Integers go through numpy's view of the tensors: the same int64 operations at
twice the speed, a sort ten times faster, and no thread pool that would fight the data loader for cores.
"""

import functools
import math

import numpy as np
import torch

from kernels.philox import Purpose, philox, split64, stream_key

# A sort key is an int64: [class 1 bit | value 51 bits | patch number 11 bits]; class 1, of weight zero, comes last.
PATCH_BITS = 11
PATCH_MASK = (1 << PATCH_BITS) - 1
MAX_PATCHES = 1 << PATCH_BITS
ZERO_WEIGHT = 1 << 62
# Fixed point: logarithms have 44 fraction bits, keys 32 and gamma 16. For gamma <= 1024 every product fits an int64.
LOG_BITS, KEY_BITS, POWER_BITS = 44, 32, 16
MAX_POWER = 1 << 10
UNIFORM_BITS = 52  # u = (m + 1/2) / 2**52: never 0 or 1, and 2m + 1 < 2**53 is exact in a float64
LOG_TOP = UNIFORM_BITS + 1 << LOG_BITS  # -log2(u) = 53 - log2(2m + 1)
KEY_MIDDLE = 16 << KEY_BITS  # areas are below 2**32; halving their logarithm's range gains a bit for gamma
KEY_OFFSET = 1 << 48  # makes values positive: |log2(-log2(u))| <= 44 and |gamma * (log2(v) - 16)| <= 2**14
TABLE_BITS, RECIPROCAL_BITS = 11, 16
RECIPROCAL_MASK = (1 << RECIPROCAL_BITS) - 1
SERIES = tuple(round(math.log2(math.e) / i * 2**b) for i, b in ((1, 29), (2, 31), (3, 31)))  # d + d**2/2 + d**3/3
CHUNK = 1 << 14  # elements of a temporary: 128 KiB stay in the second-level cache, several times faster than memory


@functools.cache
def log2_table():
    """[2**11] int64 over the segments of [1, 2), each up to c: -log2(r / 2**16) * 2**44, above r = floor(2**16 / c).

    Made of integers alone (a bit of a logarithm says whether the square exceeds 2): every machine has the same table.
    """
    table = []
    for i in range(1 << TABLE_BITS):
        r = (1 << RECIPROCAL_BITS + TABLE_BITS) // ((1 << TABLE_BITS) + i + 1)
        x, log = (1 << RECIPROCAL_BITS + 63) // r, 0  # 1 <= x / 2**63 <= 2
        for _ in range(LOG_BITS + 1):
            x = x * x >> 63
            bit = x >> 64
            x, log = x >> bit, log << 1 | bit
        table.append((log + 1 >> 1) << RECIPROCAL_BITS | r)
    table[-1] = 1 << LOG_BITS + RECIPROCAL_BITS | 1 << RECIPROCAL_BITS - 1  # c = 2, and the loop is for numbers below 2
    return np.array(table)


def log2_fixed(n, table):
    """log2 of ``n`` (int64 array, 1 <= n < 2**53) in units of 2**-44, absolute error below 2**-38.

    The float64 of such an integer is exact, so its bits are exponent and mantissa M. With r just below 1/M from the
    table, d = 1 - M*r is in [0, 2**-10.8) and log2(M) = -log2(r) - log2(e) * (d + d**2/2 + d**3/3 + less than 2**-45).
    """
    bits = n.astype(np.float64).view(np.int64)
    mantissa = bits & (1 << 52) - 1
    entry = table[mantissa >> 52 - TABLE_BITS]
    # 1 - M*r in units of 2**-68: the 1 is 0 modulo 2**64, and the difference is small enough to survive a wrap.
    d = -((mantissa | 1 << 52) * (entry & RECIPROCAL_MASK)) >> 24
    q = d >> 12
    series = (((q * SERIES[2] >> 32) + SERIES[1]) * q >> 34) + SERIES[0]
    return ((bits >> 52) - 1023 << LOG_BITS) + (entry >> RECIPROCAL_BITS) - (d * series >> 29)


def overlap_1d(origin1, size1, origin2, size2, cells):
    """Lengths shared by the cells of two 1-D crops: [B, cells of view 2, cells of view 1] int64, in 1/cells px."""
    size1, size2 = size1[:, None, None], size2[:, None, None]
    start1 = cells * origin1[:, None, None] + size1 * np.arange(cells)
    start2 = cells * origin2[:, None, None] + size2 * np.arange(cells)[:, None]
    return np.maximum(np.minimum(start1 + size1, start2 + size2) - np.maximum(start1, start2), 0)


def covered_area(boxes, flips, first, grid):
    """Area of every view-2 patch inside the union of a group's view-1 patches: [B,R,N] int64, 1/(Gh*Gw) px^2."""
    gh, gw = grid
    (b, r, _), (box1, box2) = first.shape, boxes.astype(np.int64).swapaxes(0, 1)
    rows = overlap_1d(box1[:, 0], box1[:, 2], box2[:, 0], box2[:, 2], gh)
    columns = overlap_1d(box1[:, 1], box1[:, 3], box2[:, 1], box2[:, 3], gw)
    columns = np.where(flips[:, :1, None], columns[:, :, ::-1], columns)
    columns = np.where(flips[:, 1:, None], columns[:, ::-1], columns)
    mask = np.zeros((b, r, gh * gw))
    np.put_along_axis(mask, first, 1, -1)
    # Integers below 2**33, so float64 products (the only fast ones on a CPU) are exact in any order of summation.
    covered = rows[:, None].astype(float) @ mask.reshape(b, r, gh, gw) @ columns[:, None].astype(float).swapaxes(2, 3)
    return covered.reshape(b, r, gh * gw).astype(np.int64)


def fixed_power(power):
    return round(power * 2**POWER_BITS)


def patch_area(boxes):
    """Area of a view-2 patch, [B,1,1] int64 in units of 1/(Gh*Gw) px^2."""
    return boxes[:, 1, 2:].astype(np.int64).prod(-1)[:, None, None]


def check_boxes(boxes):
    """Refuse CPU boxes with impossible values (for boxes on a GPU nothing looks: that would wait for the device)."""
    if boxes.numel() and (boxes.min() < 0 or boxes.max() > 65535 or boxes[..., 2:].min() < 1):
        raise ValueError("boxes: expected 0 <= y, x <= 65535 and 1 <= h, w <= 65535 pixels, got a box outside of that")


def sample_views(boxes, flips, sample, *, grid, keep, groups, power, seed, epoch):
    check_boxes(boxes)
    key1, key2 = (stream_key(int(seed), int(epoch), p) for p in (Purpose.FIRST_VIEW, Purpose.SECOND_VIEW))
    n, power, table = math.prod(grid), fixed_power(power), log2_table()
    patch, group = np.arange(n), np.arange(groups)[:, None]

    def uniform(position, sample, key):
        word0, word1, _, _ = philox((patch, position, *split64(sample[:, None, None])), key)
        return word0 << 20 | word1 >> 12

    def smallest(keys, count):
        return np.sort(keys << PATCH_BITS | patch, -1)[..., :count] & PATCH_MASK

    def chunk(boxes, flips, sample):
        first = smallest(uniform(0, sample, key1), groups * keep).reshape(-1, groups, keep)
        m = uniform(group, sample, key2)
        # With gamma = 0 every weight is 1, that of a fully covered patch too (0**0 = 1).
        v = patch_area(boxes) - covered_area(boxes, flips, first, grid) if power else np.ones_like(m)
        exponential = LOG_TOP - log2_fixed(2 * m + 1, table)  # -log2(u), too small to tell from 0 for the last u
        race = (log2_fixed(np.maximum(exponential, 1), table) >> LOG_BITS - KEY_BITS) + KEY_OFFSET
        weight = (log2_fixed(np.maximum(v, 1), table) >> LOG_BITS - KEY_BITS) - KEY_MIDDLE
        keys = np.where(v > 0, race - (weight * power >> POWER_BITS), ZERO_WEIGHT >> PATCH_BITS | m >> 1)
        return first, smallest(keys, keep)

    b, step = len(boxes), max(1, CHUNK // (groups * n))
    first, second = (torch.empty(b, groups, keep, dtype=torch.int32) for _ in range(2))
    for i in range(0, b, step):
        part = slice(i, i + step)
        first.numpy()[part], second.numpy()[part] = chunk(*(x[part].numpy() for x in (boxes, flips, sample)))
    return first, second


def patch_overlap(boxes, flips, first, *, grid):
    check_boxes(boxes)
    if first.numel() and not 0 <= first.min() <= first.max() < math.prod(grid):
        raise ValueError(f"first: expected patch numbers of the grid {grid}, got {first.min()} to {first.max()}")
    boxes, flips, first = boxes.numpy(), flips.numpy(), first.numpy()
    return torch.from_numpy((covered_area(boxes, flips, first, grid) / patch_area(boxes)).astype(np.float32))


def normalisation(mean, std):
    """Offset 255*mean and factor 1/(255*std) of the three channels, rounded to float32: two lists of floats."""
    offset = torch.tensor([255 * m for m in mean], dtype=torch.float64)
    factor = torch.tensor([1 / (255 * s) for s in std], dtype=torch.float64)
    return offset.float().tolist(), factor.float().tolist()


def gather_patches(crops, index, *, patch, mean, std, dtype):
    if isinstance(crops, torch.Tensor):
        return gather_patches([crops], index[None], patch=patch, mean=mean, std=std, dtype=dtype)[0]
    b, h, w, _ = crops[0].shape
    columns = w // patch
    if index.numel() and not 0 <= index.min() <= index.max() < h // patch * columns:
        grid = f"{h // patch}x{columns} grid"
        raise ValueError(f"index: expected patch numbers of the {grid}, got {index.min()} to {index.max()}")
    out = torch.empty(*index.shape, 3, patch, patch, dtype=dtype)
    offset, factor = (torch.tensor(x) for x in normalisation(mean, std))
    for pixels, number, view in zip(crops, index.long(), out, strict=True):
        tiles = pixels.view(b, h // patch, patch, columns, patch, 3)
        kept = tiles[torch.arange(b)[:, None], number // columns, :, number % columns]  # [B,K,P,P,3]
        view.copy_(((kept - offset) * factor).permute(0, 1, 4, 2, 3))
    return out.flatten(3)


def attention_weights(qkv, heads):
    """q, k, v [B,H,T,D] of packed ones, and the softmax weights P [B,H,T,T]."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v, torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[3]), -1)


def attention(qkv, *, heads):
    _, _, v, p = attention_weights(qkv, heads)
    return (p @ v).transpose(1, 2).flatten(2)


def attention_backward(qkv, gradient, heads):
    """Gradient of ``attention`` with respect to ``qkv``, by the formulas in ``short_attention.py``."""
    q, k, v, p = attention_weights(qkv, heads)
    g = gradient.unflatten(2, (heads, -1)).transpose(1, 2)
    dp = g @ v.transpose(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(q.shape[3])
    parts = torch.stack([ds @ k, ds.transpose(2, 3) @ q, p.transpose(2, 3) @ g])  # [3,B,H,T,D]
    return parts.permute(1, 3, 0, 2, 4).flatten(2)
