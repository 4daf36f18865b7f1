"""Gives out what the sampling kernel keeps to itself: its logarithms, and its sort keys rather than their order alone.

Errors in the last bits move hardly any patch, so that tests of the patches drawn do not see them.
"""

from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import compiled, reference, sampling
from kernels.sampling import _log2
from tests.kernels.ttir import evaluate

SIZES = {"grid": (32, 32), "keep": 64, "groups": 4}  # all NP = 1024 lanes are patches
LOGARITHMS = 2048


def images_of(pairs):
    """Arguments of ``sample_views``, one image each: the pairs of crops with flips, ids, powers, seeds and epochs."""
    powers = 3.0, 0.0, 0.7, torch.inf, 3.0, 1e5, 2.0, 1024.0
    for i, (pair, power) in enumerate(zip(pairs, powers, strict=True)):
        flips = torch.tensor([[i // 2 % 2, i % 2]]).bool()
        more = {"power": power, "seed": (-7) ** 19 * i, "epoch": 5**25 * (i - 3)}
        yield (torch.tensor([pair], dtype=torch.int32), flips, torch.tensor([2**40 * i - 9])), more


def numbers():
    """Integers of 1 to 53 bits, and those next to powers of two."""
    rng = np.random.default_rng(0)
    powers = 1 << np.arange(53)
    bits = rng.integers(0, 53, LOGARITHMS - 3 * 53)
    n = [powers, np.maximum(powers - 1, 1), powers + 1, (1 << bits) + rng.integers(0, 1 << bits)]
    return torch.from_numpy(np.concatenate(n).clip(max=2**53 - 1))


def by_reference(images, n):
    """View 1 of the images, and what the others have to give: keys of view 2 [B,R,N], and logarithms of ``n``."""
    firsts, keys, where = [], [], np.where
    for args, more in images:
        found = []
        with mock.patch.object(np, "where", lambda *x, found=found: found.append(where(*x)) or found[-1]):
            firsts.append(reference.sample_views(*args, **SIZES, **more)[0])
        keys.append(torch.from_numpy(found[-1][0] << reference.PATCH_BITS | np.arange(1024)))
    return firsts, (torch.stack(keys), torch.from_numpy(reference.log2_fixed(n.numpy(), reference.log2_table())))


@triton.jit
def _log_kernel(n, table, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, _log2(tl.load(n + i), table))


@triton.jit
def _store_keys(out, keys, patch, start, K: tl.constexpr, SORT: tl.constexpr):
    """In the place of ``_store_smallest``: the keys of view 2 to ``out``, int64 [R,NP]; nothing of view 1, int32."""
    if out.dtype.element_ty == tl.int64:
        tl.store(out + tl.program_id(1) * (patch.shape[0] - K) + patch, keys)


def _table():
    return torch.from_numpy(reference.log2_table())


def _arguments(image, first):
    """Those of the kernel up to ``second``, which is to hold the keys, and the numbers after it."""
    (boxes, flips, sample), more = image
    seed, epoch = torch.tensor([more["seed"]]), torch.tensor([more["epoch"]])
    keys = torch.full((SIZES["groups"], 1024), -1)
    return [boxes, flips.view(torch.uint8), sample, seed, epoch, _table(), first, keys], reference.fixed_power(
        more["power"]
    )


def interpreted(images, firsts, n):
    """Keys and logarithms by the kernel's code in the interpreter."""
    logarithms, keys = torch.full_like(n, -1), []
    _log_kernel[(1,)](n, _table(), logarithms, COUNT=len(n))
    with mock.patch.object(sampling, "_store_smallest", _store_keys):
        for image, first in zip(images, firsts, strict=True):
            tensors, power = _arguments(image, first)
            sampling._sample_kernel[(1, SIZES["groups"])](*tensors, *power, SORT=False, **sampling.tile(**SIZES))
            keys.append(tensors[-1])
    return torch.stack(keys), logarithms


def evaluated(images, firsts, n):
    """Keys and logarithms by the TTIR of the compiled code."""
    types = {"n": "*i64", "table": "*i64", "out": "*i64", "COUNT": "constexpr"}
    log = triton.compile(ASTSource(_log_kernel, types, {"COUNT": len(n)}), GPUTarget("cuda", 90, 32))
    with (
        mock.patch.object(sampling, "_store_smallest", _store_keys),
        mock.patch.object(sampling._sample_kernel, "hash", None),  # triton's, of all the code that the kernel calls
        mock.patch.dict(compiled._TYPES, second="*i64"),
    ):
        _, kernel = next(compiled.compile_for(90, **SIZES))
    logarithms, keys = torch.full_like(n, -1), []
    evaluate(log.asm["ttir"], [x.numpy() for x in (n, _table(), logarithms)], [(0, 0)])
    for image, first in zip(images, firsts, strict=True):
        tensors, power = _arguments(image, first)
        evaluate(kernel.asm["ttir"], [x.numpy() for x in tensors] + [*power], [(0, r) for r in range(SIZES["groups"])])
        keys.append(tensors[-1])
    return torch.stack(keys), logarithms
