"""The operations on the CPU, vectorised over the batch: the program's CPU path and the oracle of the tests.

B images, R groups, N patches of the full grid (Gh x Gw), K kept patches, P patch side in pixels, H, W crop size in
pixels. Each function takes the arguments and returns the results (CPU tensors) of the public one of the same name;
formulas and sources stand in the file of each. Arguments are checked there, values here, where a look at them costs
nothing. Integers go through numpy's view of the tensors: the same int64 operations at twice the speed, a sort ten times
faster, and no thread pool that would fight the data loader for cores.
"""

import functools
import math
from itertools import pairwise

import numpy as np
import torch

from kernels.philox import Purpose, philox, split64, stream_key

# A sort key is an int64: [class 1 bit | value 51 bits | patch number 11 bits]; class 1, of weight zero, comes last. Of
# more than 2048 patches the number has 13 bits and the value 49, which it needs no more of but with gamma = inf.
PATCH_BITS, WIDE_PATCH_BITS = 11, 13
NARROW, MAX_PATCHES = 1 << PATCH_BITS, 1 << WIDE_PATCH_BITS
ZERO_WEIGHT = 1 << 62
# Fixed point: logarithms have 44 fraction bits, keys 32 and gamma 16, with gamma / 2**shift <= 1024 (``fixed_power``).
# Then value = (log2(-log2(u)) >> shift) - gamma / 2**shift * log2(v), and every product fits an int64.
LOG_BITS, KEY_BITS, POWER_BITS = 44, 32, 16
LOG_TO_KEY = LOG_BITS - KEY_BITS
KEY_OFFSET = 1 << 48  # makes values positive: 0 <= gamma / 2**shift * log2(v) < 2**15, as areas are below 2**32
MAX_SHIFT = 20
# Beyond gamma = 2**30: value = [32 bits of the covered rather than the uncovered area | 19 random, 17 of many patches]
STEEPEST = -1, 0
AREA_MASK, STEEPEST_BITS, WIDE_STEEPEST_BITS = (1 << 32) - 1, 19, 17
UNIFORM_BITS = 42  # u = (m + 1/2) / 2**42: never 0 or 1, and 2m + 1 < 2**43 is exact in a float64
DRAWS = 3  # by one call of Philox: 128 bits
LOG_TOP = UNIFORM_BITS + 1 << LOG_BITS  # -log2(u) = 43 - log2(2m + 1)
TABLE_BITS = 11
SEGMENTS = 1 << TABLE_BITS
CHUNK = 3 << 13  # elements of a temporary: 192 KiB stay in the second-level cache, several times faster than memory


@functools.cache
def log2_table():
    """The quadratics of ``log2_fixed``: [2,2**11] int64 over the segments of [1, 2).

    A segment's a + b*t - c*t**2 is log2(M) - (M - 1) - 1023 at its ends, t = 0 and 1, and in its middle. Row 0 is a in
    units of 2**-44, row 1 b in units of 2**-43 above 32 bits of c in units of 2**-48. Made of integers alone (a bit of
    a logarithm says whether the square exceeds 2): every machine has the same table.
    """
    bits, points = 56, 2 * SEGMENTS
    excess = []  # log2(M) - (M - 1) in units of 2**-56 at the ends and middles
    for i in range(points):
        x, log = (points + i << 63) // points, 0  # 1 <= x / 2**63 < 2
        for _ in range(bits):
            x = x * x >> 63
            bit = x >> 64
            x, log = x >> bit, log << 1 | bit
        excess.append(log - (i << bits) // points)
    left, middle, right = (np.array(x) for x in (excess[::2], excess[1::2], [*excess[2::2], 0]))
    slope, bend = 4 * middle - 3 * left - right, 4 * middle - 2 * left - 2 * right

    def rounded(x, fraction):
        return (x >> bits - fraction - 1) + 1 >> 1

    return np.stack([rounded(left, LOG_BITS) - (1023 << LOG_BITS), rounded(slope, 43) << 32 | rounded(bend, 48)])


def log2_fixed(n, table):
    """log2 of ``n`` (integers 1 <= n < 2**53, int64 or float64) in units of 2**-44, int64, absolute error below 2**-38.

    As a float64, n = 2**E * M is exact and its bits are the exponent E + 1023 and the fraction M - 1. Read as one
    fixed-point number they are log2(n) + 1023 but for log2(M) - (M - 1) < 0.09, which a quadratic in t, the place
    within a segment of the table, gives up to a cubic remainder of at most 0.024 * 2**-33 and to rounding, 2**-41.
    """
    bits = n.astype(np.float64, copy=False).view(np.int64)
    segment = bits >> 52 - TABLE_BITS & SEGMENTS - 1
    t = bits >> 20 - TABLE_BITS & (1 << 32) - 1
    curve = table[1].take(segment)
    bend = curve & (1 << 32) - 1
    bend *= t  # in place, as fewer temporaries fit the cache better: 1.5 to 2 ms less for 512 images of 14x14
    bend >>= 37
    curve >>= 32
    curve -= bend
    curve *= t
    curve >>= 31
    curve += table[0].take(segment)
    curve += bits >> 52 - LOG_BITS
    return curve


def overlap_1d(intervals1, intervals2):
    """Lengths shared by intervals (start [B,M], size [B]) and others (start [B,N], size [B]): [B,M,N]."""
    (start1, size1), (start2, size2) = ((start, size[:, None]) for start, size in (intervals1, intervals2))
    length = np.minimum((start1 + size1)[:, :, None], (start2 + size2)[:, None])
    length -= np.maximum(start1[:, :, None], start2[:, None])
    return np.maximum(length, 0, out=length)


def covered_area(boxes, flips, first, grid):
    """Area of every view-2 patch inside the union of a group's view-1 patches: [B,R,N] float64, 1/(Gh*Gw) px^2.

    Integers below 2**33, so float64 products (the only fast ones on a CPU) are exact in any order of summation.
    """
    (gh, gw), (b, r, _) = grid, first.shape
    (y, x, h, w), row, column = boxes.astype(float).transpose(2, 1, 0), np.arange(gh), np.arange(gw)
    # Intervals in units of 1/Gh and 1/Gw pixels, of view 1 and view 2.
    rows = [(gh * y[view, :, None] + h[view, :, None] * row, h[view]) for view in range(2)]
    column = np.where(flips[:, :, None], column[::-1], column)
    columns = [(gw * x[view, :, None] + w[view, :, None] * column[:, view], w[view]) for view in range(2)]
    mask = np.zeros((b, r, gh * gw))
    mask.reshape(-1)[first + np.arange(b * r).reshape(b, r, 1) * (gh * gw)] = 1
    # Sums over the columns of view 1 first, where one product of matrices serves all groups, then over its rows.
    covered = mask.reshape(b, r * gh, gw) @ overlap_1d(*columns)
    covered = overlap_1d(*rows[::-1])[:, None] @ covered.reshape(b, r, gh, gw)
    return covered.reshape(b, r, gh * gw)


def fixed_power(power):
    """gamma as (factor, shift), gamma = factor * 2**(shift - 16) rounded, or ``STEEPEST``."""
    if power > 1 << 10 + MAX_SHIFT:
        return STEEPEST
    shift = 0
    while power > 1 << 10 + shift:
        shift += 1
    return round(power * 2.0 ** (POWER_BITS - shift)), shift


def patch_area(boxes):
    """Area of a view-2 patch, [B,1,1] float64 in units of 1/(Gh*Gw) px^2."""
    return boxes[:, 1, 2:].astype(float).prod(-1)[:, None, None]


def check_boxes(boxes):
    """Refuse CPU boxes with impossible values (for boxes on a GPU nothing looks: that would wait for the device)."""
    if boxes.numel() and (boxes.min() < 0 or boxes.max() > 65535 or boxes[..., 2:].min() < 1):
        raise ValueError("boxes: expected 0 <= y, x <= 65535 and 1 <= h, w <= 65535 pixels, got a box outside of that")


def sample_views(boxes, flips, sample, *, grid, keep, groups, power, seed, epoch):
    check_boxes(boxes)
    key = stream_key(int(seed), int(epoch), Purpose.PATCHES)
    n, (factor, shift), table = math.prod(grid), fixed_power(power), log2_table()
    patch, call = np.arange(n), np.arange(groups // DRAWS + 1)[:, None]
    bits, steepest = (PATCH_BITS, STEEPEST_BITS) if n <= NARROW else (WIDE_PATCH_BITS, WIDE_STEEPEST_BITS)

    def uniform(sample):
        """m for draw 0, view 1, and draw 1 + r, group r of view 2: [B,R + 1 or more,N] int64."""
        *high, low = philox((patch, call, *split64(sample[:, None, None])), key)
        m = np.empty((len(sample), len(call), DRAWS, n), np.int64)
        for i, word in enumerate(high):
            m[:, :, i] = word << 10 | low >> 10 * i & 1023
        return m.reshape(len(sample), -1, n)

    def smallest(values, count):
        keys = values << bits
        keys |= patch
        keys.sort(-1)
        return keys[..., :count] & (1 << bits) - 1

    def chunk(boxes, flips, sample):
        m = uniform(sample)
        first, m = smallest(m[:, 0], groups * keep).reshape(-1, groups, keep), m[:, 1 : 1 + groups]
        # With gamma = 0 every weight is 1, that of a fully covered patch too (0**0 = 1).
        v = patch_area(boxes) - covered_area(boxes, flips, first, grid) if factor else np.ones_like(m)
        if (factor, shift) == STEEPEST:
            values = AREA_MASK - v.astype(np.int64) << steepest | m >> UNIFORM_BITS - steepest
        else:
            exponential = LOG_TOP - log2_fixed(2 * m + 1, table)  # -log2(u)
            values = (log2_fixed(exponential, table) >> LOG_TO_KEY + shift) + KEY_OFFSET
            values -= (log2_fixed(v, table) >> LOG_TO_KEY) * factor >> POWER_BITS  # where v = 0, anything: not used
        return first, smallest(np.where(v > 0, values, ZERO_WEIGHT >> bits | m), keep)

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


def gathered_shape(index, patch):
    """[V,B,K,3*P*P] of ``index`` [V,B,K], [R,V,B,K,3*P*P] of [V,B,R,K]."""
    views, b, *groups, keep = index.shape
    return *groups, views, b, keep, 3 * patch * patch


def gather_patches(crops, index, *, patch, mean, std, dtype):
    if isinstance(crops, torch.Tensor):
        return gather_patches([crops], index[None], patch=patch, mean=mean, std=std, dtype=dtype)[0]
    b, h, w, _ = crops[0].shape
    columns = w // patch
    if index.numel() and not 0 <= index.min() <= index.max() < h // patch * columns:
        grid = f"{h // patch}x{columns} grid"
        raise ValueError(f"index: expected patch numbers of the {grid}, got {index.min()} to {index.max()}")
    out = torch.empty(gathered_shape(index, patch), dtype=dtype)
    groups = index.long().unsqueeze(2) if index.dim() == 3 else index.long()
    numbers = groups.transpose(1, 2) + torch.arange(b)[:, None] * (h // patch * columns)  # [V,R,B,K], of all images
    offset, factor = (torch.tensor(x).view(3, 1, 1) for x in normalisation(mean, std))
    by_group = out if index.dim() == 4 else out.unsqueeze(0)
    by_view = by_group.unflatten(-1, (3, patch, patch)).unbind(1)
    for pixels, chosen, view in zip(crops, numbers, by_view, strict=True):
        tiles = pixels.view(b, h // patch, patch, columns, patch, 3).permute(0, 1, 3, 5, 2, 4).flatten(0, 2)
        torch.mul(tiles[chosen].float().sub_(offset), factor, out=view)
    return out


def wide(x):
    """In float32, where it is in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention_weights(qkv, heads):
    """q, k, v [B,H,T,D] of packed ones, and the softmax weights P [B,H,T,T], in float32 or better."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).contiguous()
    scores = wide(q) @ wide(k).transpose(2, 3)
    return q, k, v, torch.softmax(scores.div_(math.sqrt(q.shape[3])), -1)


@torch.autocast("cpu", enabled=False)
def attention(qkv, *, heads):
    _, _, v, p = attention_weights(qkv, heads)
    return (p.to(v.dtype) @ v).transpose(1, 2).flatten(2)


@torch.autocast("cpu", enabled=False)
def attention_backward(qkv, gradient, heads):
    """Gradient of ``attention`` with respect to ``qkv``, by the formulas in ``short_attention.py``."""
    q, k, v, p = attention_weights(qkv, heads)
    g = gradient.unflatten(2, (heads, -1)).transpose(1, 2).contiguous()
    ds = p * (g @ v.transpose(2, 3))
    ds -= p * ds.sum(-1, keepdim=True)
    ds, p = ds.div_(math.sqrt(q.shape[3])).to(q.dtype), p.to(g.dtype)
    parts = torch.stack([ds @ k, ds.transpose(2, 3) @ q, p.transpose(2, 3) @ g])  # [3,B,H,T,D]
    return parts.permute(1, 3, 0, 2, 4).flatten(2)


def class_attention_backward(query, others, gradient, heads):
    """Gradients of ``attention_of_one`` with respect to queries and to keys and values, as in ``class_token.py``."""
    q, g = (wide(x).unflatten(2, (heads, -1)) for x in (query, gradient))
    (k, v), scale = wide(others).unflatten(2, (2, heads, -1)).unbind(2), q.shape[3] ** -0.5
    p, dp = ((q * k).sum(3, keepdim=True) * scale).softmax(1), (v * g).sum(3, keepdim=True)
    ds = p * (dp - (p * dp).sum(1, keepdim=True)) * scale
    dothers = torch.stack([ds * q, p * g], 2).flatten(2)
    return (ds * k).sum(1, keepdim=True).flatten(2).to(query.dtype), dothers.to(others.dtype)


def norm_backward(gradient, passing, x, mean, rstd, gamma):
    """ds, dgamma with dbeta, and dbias, as in ``residual_norm.py``."""
    dy, n = wide(gradient), (x - mean) * rstd
    g = dy * gamma
    out = passing + rstd * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
    dnorm = torch.cat([columns.flatten(0, -2).sum(0) for columns in (dy * n, dy)])
    return out.to(x.dtype), dnorm.to(mean.dtype), out.flatten(0, -2).sum(0).to(x.dtype)


def unit_norms(flats, bounds):
    norms = torch._foreach_norm([flat[a:b] for flat in flats for a, b in pairwise(bounds)])
    return torch.stack(norms).view(len(flats), -1)


def update_parameters(state, gradient, norms, rates, *, bounds, rule):
    finite = norms[0].isfinite().all()
    if not finite:
        return finite
    (lr, share), average = rates.tolist(), state.average
    if len(average):
        vector, started = len(norms) == 2, state.step > 0
        previous = norms[1] if vector else average
        factors = torch.where(started & (norms[0] > rule.alpha * previous), previous / norms[0], 1.0).tolist()
        average.lerp_(gradient if vector else norms[0], torch.where(started, 1 - rule.clip_momentum, 1.0))
        for (a, b), factor in zip(pairwise(bounds), factors, strict=True):
            if factor != 1:
                gradient[a:b] *= factor
    state.step.add_(1)
    torch._fused_adamw_(
        [state.values], [gradient], [state.first], [state.second], [], [state.step], lr=lr, beta1=rule.beta1,
        beta2=rule.beta2, weight_decay=rule.decay, eps=rule.eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    state.keys.lerp_(state.values[: len(state.keys)], torch.tensor(share))
    for copy, of in ((state.copies, state.values), (state.key_copies, state.keys)):
        copy.copy_(of[: len(copy)])
    return finite
