"""The update of an optimizer step in one pass: adaptive clip, AdamW, momentum network and copies in half precision.

Parameters lie one behind the other in flat float32 tensors; a unit (a transformer block, ...) is a run of neighbours.
With the gradient g of a unit and the moving average G of its own past (APS, Eq. 9 and 10; G is a vector, or the average
of norms, one number a unit), the rate lr, and c the share of the new weights in the momentum network's k:

    g' = g * |G_prev| / |g|   where |g| > alpha * |G_prev|, else g
    G  = clip_m * G_prev + (1 - clip_m) * g
    m  = beta1 * m + (1 - beta1) * g'                v = beta2 * v + (1 - beta2) * g'^2
    p  = (1 - lr * decay) * p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)       as torch's AdamW
    k  = k + c * (p - k)                             copies = p and k, rounded

The gradient before clipping is in G, so that a lasting change of scale gets through; in the first step G = g' = g.
Where any unit's |g| is not finite, nothing changes, t included. Nothing is read back from the device, and whatever
differs from step to step is a tensor on it, so that a step can be recorded.

Kernels: sums of squares of blocks, norms of units from them (no atomics: equal from run to run), one program for what
all units share, in float64 where small differences matter, and one pass over the parameters. A block lies in one unit.
With a vector G, a momentum network and bfloat16 copies, 56 bytes a parameter pass: 8 for the norms, 24 in and 24 out.
"""

import functools
import math
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.checks import INTERPRET, check_tensor

BLOCK, WARPS = 1024, 4  # parameters of a program, 32 bytes a lane and tensor: 83 % of the copy rate of an H200
CHUNK = 512  # sums of blocks that are added at a time
OFF, NORM, VECTOR = (tl.constexpr(kind) for kind in range(3))  # the clip
# What all units share, in the order of ``_shared_kernel``'s output; behind it the factor of each unit's gradient.
SHARED = tl.constexpr(5)


class State(NamedTuple):
    """What an update changes, of n parameters in all. What there is not is a tensor without elements."""

    values: torch.Tensor  # float32 [n]
    first: torch.Tensor  # m, float32 [n]
    second: torch.Tensor  # v, float32 [n]
    step: torch.Tensor  # t, float32 []
    average: torch.Tensor  # G, float32: a vector [n], or norms [units], or none for no clip
    keys: torch.Tensor  # k, float32 [k], which goes with the first of the values
    copies: torch.Tensor  # of values, in half precision
    key_copies: torch.Tensor  # of keys


class Rule(NamedTuple):
    """The constants of the equations."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    clip_momentum: float
    alpha: float


@triton.jit
def _squares_kernel(flat0, flat1, starts, ends, out, blocks, BLOCK: tl.constexpr):
    """Sums of squares of blocks, [2,blocks]: of ``flat0`` and of ``flat1``."""
    block, row = tl.program_id(0), tl.program_id(1)
    flat = tl.where(row == 0, flat0, flat1)
    start, end = tl.load(starts + block), tl.load(ends + block)
    o = tl.multiple_of(start, 16) + tl.arange(0, BLOCK)
    x = tl.load(flat + o, mask=o < tl.multiple_of(end, 16), other=0.0)
    tl.store(out + row * blocks + block, tl.sum(x * x, axis=0))


@triton.jit
def _norms_kernel(squares, bounds, out, blocks, units, CHUNK: tl.constexpr):
    """Norms of units, [2,units], whose blocks are those from bounds[unit] to bounds[unit + 1]."""
    unit, row = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(bounds + unit), tl.load(bounds + unit + 1)
    lane = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for block in range(first, last, CHUNK):
        total += tl.load(squares + row * blocks + block + lane, mask=block + lane < last, other=0.0)
    tl.store(out + row * units + unit, tl.sqrt(tl.sum(total, axis=0)))


@triton.jit
def _shared_kernel(
    norms, rates, step, average, out, finite, units, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    DECAY: tl.constexpr, MOMENTUM: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """One program of one warp, so that what is read below is read before it is written."""
    unit = tl.arange(0, UNITS)
    known = unit < units
    norm = tl.load(norms + unit, mask=known, other=1.0)
    right = tl.min((norm < float("inf")).to(tl.int32), axis=0)  # 0 for NaN too
    before, rate, share = tl.load(step), tl.load(rates), tl.load(rates + 1)
    count = before + right.to(tl.float32)
    weight = tl.where(before > 0, 1 - MOMENTUM, 1.0)
    if CLIP:
        previous = tl.load(average + unit, mask=known, other=0.0)
        if CLIP == NORM:
            tl.store(average + unit, previous + weight * (norm - previous), mask=unit < units * right)
        limit = tl.where(before > 0, ALPHA * previous, float("inf"))
        tl.store(out + SHARED + unit, tl.where(norm > limit, previous / norm, 1.0), mask=known)
    power = tl.maximum(count, 1.0).to(tl.float64)
    correction1 = 1 - tl.exp2(power * tl.full((), LOG_BETA1, tl.float64))
    correction2 = 1 - tl.exp2(power * tl.full((), LOG_BETA2, tl.float64))
    tl.store(out, weight)
    tl.store(out + 1, (1 - rate * DECAY).to(tl.float32))
    tl.store(out + 2, (rate / correction1).to(tl.float32))
    tl.store(out + 3, (1 / tl.sqrt(correction2)).to(tl.float32))
    tl.store(out + 4, share.to(tl.float32))
    tl.store(step, count)
    tl.store(finite, right.to(tl.int8))


@triton.jit
def _update_kernel(
    values, gradient, first, second, average, keys, copies, key_copies, finite, shared, starts, ends, unit, of_keys,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, CLIP: tl.constexpr, KEYS: tl.constexpr,
    COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    end = tl.load(ends + block) * tl.load(finite).to(tl.int64)  # nothing is read or written where it is not finite
    weight, keep, rate = tl.load(shared), tl.load(shared + 1), tl.load(shared + 2)
    root, share = tl.load(shared + 3), tl.load(shared + 4)
    o = tl.multiple_of(tl.load(starts + block), 16) + tl.arange(0, BLOCK)
    m = o < tl.multiple_of(end, 16)
    g = tl.load(gradient + o, mask=m, other=0.0)
    if CLIP == VECTOR:
        a = tl.load(average + o, mask=m, other=0.0)
        tl.store(average + o, a + weight * (g - a), mask=m)
    if CLIP:
        g *= tl.load(shared + SHARED + tl.load(unit + block))
    p = tl.load(values + o, mask=m, other=0.0)
    a1 = tl.load(first + o, mask=m, other=0.0)
    a2 = tl.load(second + o, mask=m, other=0.0)
    a1 += (1 - BETA1) * (g - a1)
    a2 = BETA2 * a2 + (1 - BETA2) * g * g
    p = p * keep - rate * a1 / (tl.sqrt(a2) * root + EPS)
    tl.store(first + o, a1, mask=m)
    tl.store(second + o, a2, mask=m)
    tl.store(values + o, p, mask=m)
    if COPIES:
        tl.store(copies + o, p.to(copies.dtype.element_ty), mask=m)
    if KEYS:
        m = o < tl.multiple_of(tl.minimum(end, of_keys), 16)
        k = tl.load(keys + o, mask=m, other=0.0)
        k += share * (p - k)
        tl.store(keys + o, k, mask=m)
        if COPIES:
            tl.store(key_copies + o, k.to(key_copies.dtype.element_ty), mask=m)


@functools.cache
def _blocks(bounds, device):
    """Of each block the start, the end (int64) and the unit, and of each unit the first block, with the number of all.

    The first call copies them to the device: call once before capturing a CUDA graph.
    """
    found = [
        (start, min(start + BLOCK, end), unit)
        for unit, (begin, end) in enumerate(pairwise(bounds))
        for start in range(begin, end, BLOCK)
    ]
    starts, ends, units = torch.tensor(found, dtype=torch.int64).reshape(-1, 3).T.contiguous().to(device)
    counts = [-(-(end - begin) // BLOCK) for begin, end in pairwise(bounds)]
    return starts, ends, units, torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(device)


def _launch_norms(flats, bounds):
    out = torch.empty(len(flats), len(bounds) - 1, dtype=torch.float32, device=flats[0].device)
    starts, ends, _, first_block = _blocks(tuple(bounds), out.device)
    squares = torch.empty(len(flats), len(starts), dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(out):
        if len(starts):
            _squares_kernel[squares.shape[::-1]](
                flats[0], flats[-1], starts, ends, squares, len(starts), BLOCK=BLOCK, num_warps=WARPS
            )
        _norms_kernel[out.shape[::-1]](
            squares, first_block, out, len(starts), out.shape[1], CHUNK=CHUNK, num_warps=WARPS
        )
    return out


def sizes(rule, units, clip, keys, copies):
    """The constants of the last two kernels."""
    log1, log2 = (math.log2(max(beta, 1e-300)) for beta in (rule.beta1, rule.beta2))
    shared = {"LOG_BETA1": log1, "LOG_BETA2": log2, "DECAY": rule.decay}
    shared |= {"MOMENTUM": rule.clip_momentum, "ALPHA": rule.alpha, "CLIP": clip}
    shared |= {"UNITS": triton.next_power_of_2(units), "num_warps": 1}
    one = {"BETA1": rule.beta1, "BETA2": rule.beta2, "EPS": rule.eps, "CLIP": clip, "KEYS": keys, "COPIES": copies}
    return shared, one | {"BLOCK": BLOCK, "num_warps": WARPS}


def _launch(state, gradient, norms, rates, bounds, rule):
    state, rule = State(*state), Rule(*rule)
    starts, ends, units, _ = _blocks(tuple(bounds), gradient.device)
    clip = (OFF if not len(state.average) else VECTOR if len(norms) == 2 else NORM).value
    finite = torch.empty(1, dtype=torch.bool, device=gradient.device)
    shared = torch.empty(SHARED.value + norms.shape[1], dtype=torch.float32, device=gradient.device)
    for_shared, for_update = sizes(rule, norms.shape[1], clip, len(state.keys) > 0, len(state.copies) > 0)
    with torch.cuda.device_of(gradient):
        _shared_kernel[(1,)](
            norms, rates, state.step, norms[1] if clip == VECTOR.value else state.average, shared,
            finite.view(torch.uint8), norms.shape[1], **for_shared,
        )  # fmt: skip
        if len(starts):
            _update_kernel[(len(starts),)](
                state.values, gradient, state.first, state.second, state.average, state.keys, state.copies,
                state.key_copies, finite.view(torch.uint8), shared, starts, ends, units, len(state.keys), **for_update,
            )  # fmt: skip
    return finite[0]


@torch.library.custom_op("aps::unit_norms", mutates_args=(), device_types="cpu")
def _op_norms(flats: list[torch.Tensor], bounds: list[int]) -> torch.Tensor:
    return (_launch_norms if INTERPRET else reference.unit_norms)(flats, bounds)


@torch.library.custom_op("aps::update_parameters", mutates_args=("state", "gradient"), device_types="cpu")
def _op(
    state: list[torch.Tensor], gradient: torch.Tensor, norms: torch.Tensor, rates: torch.Tensor, bounds: list[int],
    rule: list[float],
) -> torch.Tensor:  # fmt: skip
    if INTERPRET:
        return _launch(state, gradient, norms, rates, bounds, rule)
    return reference.update_parameters(State(*state), gradient, norms, rates, bounds=bounds, rule=Rule(*rule))


_op_norms.register_kernel("cuda")(_launch_norms)
_op.register_kernel("cuda")(_launch)


@_op_norms.register_fake
def _(flats, bounds):
    return flats[0].new_empty(len(flats), len(bounds) - 1)


@_op.register_fake
def _(state, gradient, norms, rates, bounds, rule):
    return gradient.new_empty((), dtype=torch.bool)


def _check_bounds(bounds, size):
    if bounds[0] or bounds[-1] != size or list(bounds) != sorted(bounds) or any(bound % 16 for bound in bounds):
        raise ValueError(f"bounds: expected ascending multiples of 16 from 0 to {size}, got {list(bounds)}")


def unit_norms(flats, *, bounds):
    """L2 norms of the units of one or two float32 tensors [n]: float32 [1 or 2,units].

    Unit i goes from ``bounds[i]`` to ``bounds[i + 1]``, multiples of 16 from 0 to n.
    """
    if len(flats) not in (1, 2):
        raise ValueError(f"flats: expected one tensor or two, got {len(flats)}")
    for flat in flats:
        check_tensor("flats", flat, torch.float32, flats[0].shape[:1], flats[0].device)
    _check_bounds(bounds, len(flats[0]))
    return _op_norms(list(flats), list(bounds))


def update_parameters(state, gradient, norms, rates, *, bounds, rule):
    """Brings a ``State`` up to date, in place; returns whether the gradient was finite (bool [], on the device).

    ``gradient`` float32 [n], of which nothing is to be expected afterwards; ``norms`` as ``unit_norms`` gives them with
    the same ``bounds``, of the gradient and, where ``state.average`` is a vector, of that; ``rates`` float64 [2]: the
    learning rate and the share c; ``rule`` a ``Rule``.
    """
    n, units, device = len(gradient), len(bounds) - 1, gradient.device
    average, keys, copies, key_copies = state[4:]
    _check_bounds(bounds, n)
    for name, flat in zip(("gradient", *State._fields), (gradient, *state[:3]), strict=False):
        check_tensor(name, flat, torch.float32, (n,), device)
    check_tensor("step", state.step, torch.float32, (), device)
    check_tensor("average", average, torch.float32, (None,), device)
    if len(average) not in (0, units, n):
        raise ValueError(f"average: expected none, one of each of {units} units or of all {n}, got {len(average)}")
    check_tensor("norms", norms, torch.float32, (1 + (len(average) == n), units), device)
    check_tensor("rates", rates, torch.float64, (2,), device)
    check_tensor("keys", keys, torch.float32, (None,), device)
    if len(keys) not in bounds:
        raise ValueError(f"keys: expected whole units, which end at {list(bounds)}, got {len(keys)}")
    if len(copies):
        check_tensor("copies", copies, copies.dtype, (n,), device)
        check_tensor("key_copies", key_copies, copies.dtype, (len(keys),), device)
    return _op(list(state), gradient, norms, rates, list(bounds), list(rule))
