import re
from itertools import islice

import pytest
import torch
import torch.nn.functional as F

import kernels
from bench.compile import _nvidia
from kernels import reference, residual_norm
from kernels.compiled import compile_for
from kernels.residual_norm import TILES, Tile
from tests.kernels.interpreter import interpret

RANDOM = torch.Generator().manual_seed(0)
SIZES = (37, 40), (3, 96), (7, 200)  # rows, width


def random(*shape):
    return torch.randn(*shape, generator=RANDOM)


def inputs(rows, width, dtype=torch.float64):
    """Stream, branch, its product's bias, gamma, beta; and gradients of the sum and of the norm."""
    stream, branch, bias, *norm = 1 + random(rows, width), 2 * random(rows, width), *random(3, width)
    gradients = random(rows, width), random(rows, width)
    halves = [x.to(dtype) for x in (stream, branch, bias)]
    return [*halves, *(x.to(torch.promote_types(dtype, torch.float32)) for x in norm)], [x.to(dtype) for x in gradients]


def ours(stream, branch, bias, gamma, beta):
    return kernels.add_norm(stream, branch + bias.detach(), gamma, beta, eps=1e-6, bias=bias)


def by_torch(stream, branch, bias, gamma, beta):
    total = stream + (branch + bias)
    x = reference.wide(total)
    return total, F.layer_norm(x, x.shape[-1:], gamma, beta, 1e-6).to(total.dtype)


def found(function, tensors, gradients):
    """The sum, the norm and the gradients of all."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    return *(x.detach() for x in out), *torch.autograd.grad(out, tensors, gradients)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_equal_torchs_in_float64(size):
    given = inputs(*size)
    torch.testing.assert_close(found(ours, *given), found(by_torch, *given))


def backward_arguments(rows, width):
    """Those of the kernel; the rows are far from 0."""
    x = 3 + 2 * random(rows, width)
    mean, rstd = x.mean(1, keepdim=True), (x.var(1, correction=0, keepdim=True) + 1e-6).rsqrt()
    return random(rows, width), random(rows, width), x, mean, rstd, random(width)


def test_interpreted_kernels_equal_reference_in_float64(tmp_path):
    """With two programs, so that each has several rounds to make; and with more than there are rows."""
    given, tiles = [backward_arguments(*size) for size in SIZES], (Tile(programs=2), Tile(1024, 2, 3))
    calls = [(residual_norm._launch, (*args, of), {}) for args in given for of in tiles]
    wanted = [reference.norm_backward(*map(torch.Tensor.double, args)) for args in given for _ in range(2)]
    for got, want in zip(interpret(calls, tmp_path), wanted, strict=True):
        for mine, exact in zip(got, want, strict=True):
            torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


def test_operator_contract():
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.aps.norm_backward.default, backward_arguments(3, 8), test_utils=tests)
    stream, branch, bias, gamma, beta = inputs(3, 8)[0]
    with pytest.raises(ValueError, match=r"gamma: expected shape \[8\], got \[7\]"):
        kernels.add_norm(stream, branch, gamma[:7], beta, eps=1e-6, bias=bias)


@pytest.mark.parametrize("width", [384, 1280])
def test_compiled_for_an_h100(width):
    """Four programs share a multiprocessor, 16 bytes a load; sums in one order. (``bench compile`` has all kernels.)"""
    name, kernel = next(islice(compile_for(90, width=width), 11, None))
    [row] = _nvidia([kernel])
    assert name == "norm_backward" and row["spilled_bytes"] == row["spill_instructions"] == 0, row
    assert row["registers"] <= 128 and max(row["load_bits"]) == max(row["store_bits"]) == 128, row
    assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*SIZES, (3703, 384), (1031, 1280)], ids=str)
def test_half_precision_is_as_close_as_torch(size):
    """Distance to the float64 result of the same inputs, relative, at most 1.5 times that of torch's own operations;
    twice the same bits."""
    tensors, gradients = ([x.cuda() for x in part] for part in inputs(*size, dtype=torch.bfloat16))
    mine, again, theirs = (found(function, tensors, gradients) for function in (ours, ours, by_torch))
    exact = found(by_torch, *([x.double() for x in part] for part in (tensors, gradients)))
    for place, (one, twice, other, want) in enumerate(zip(mine, again, theirs, exact, strict=True)):
        distance, allowed = ((x.double() - want).norm() / want.norm() for x in (one, other))
        assert distance <= 1.5 * allowed + 2**-10, (place, distance, allowed)
        assert torch.equal(one, twice), place


@pytest.mark.gpu
@pytest.mark.parametrize("of", TILES, ids=str)
def test_tiles_on_a_gpu(of):
    args = backward_arguments(3703, 384)
    wanted = reference.norm_backward(*map(torch.Tensor.double, args))
    for mine, exact in zip(residual_norm._launch(*(x.cuda() for x in args), of), wanted, strict=True):
        torch.testing.assert_close(mine.double().cpu(), exact, rtol=1e-4, atol=1e-4)
