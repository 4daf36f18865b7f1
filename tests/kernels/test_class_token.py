import functools

import pytest
import torch

import kernels
from kernels import class_token
from tests.kernels.interpreter import interpret
from tests.kernels.test_short_attention import SIZES, arguments, of_one, one_by_torch


def attend(heads, query, others):
    bias = others.new_zeros(others.shape[2])
    return kernels.class_attention(query, others, bias, heads=heads)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_reference_equals_torch_in_float64(size):
    qkv, gradient = arguments(*size, dtype=torch.float64)
    found = of_one(functools.partial(attend, size[2]), qkv, gradient)
    torch.testing.assert_close(found, one_by_torch(qkv, gradient, size[2]))


def test_the_bias_gets_the_gradient_that_it_has_in_the_product():
    others, query = torch.randn(3, 7, 64, dtype=torch.float64), torch.randn(3, 1, 32, dtype=torch.float64)
    bias, gradient = torch.randn(64, dtype=torch.float64, requires_grad=True), torch.randn(3, 1, 32).double()
    out = kernels.class_attention(query, others + bias.detach(), bias, heads=2)
    plain = kernels.attention_of_one(query, others + bias, heads=2)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(*(torch.autograd.grad(x, bias, gradient) for x in (out, plain)))


def test_interpreted_kernels_equal_torch_in_float64(tmp_path):
    calls, wanted = [], []
    for *size, heads, width in SIZES:
        qkv, gradient = arguments(*size, heads, width)
        query, others = qkv[:, :1, : heads * width], qkv[:, :, heads * width :]
        calls.append(("class_token._launch", (query, others, heads), {}))
        calls.append(("class_token._launch_backward", (query, others, gradient[:, :1], heads), {}))
        wanted.append(one_by_torch(qkv.double(), gradient.double(), heads))
    found = iter(interpret(calls, tmp_path))
    for out, (dquery, dothers), (want, back) in zip(found, found, wanted, strict=True):
        dqkv = torch.cat([torch.zeros_like(dothers[..., : dquery.shape[2]]), dothers], 2)
        dqkv[:, :1, : dquery.shape[2]] = dquery
        torch.testing.assert_close((out.double(), dqkv.double()), (want, back), rtol=1e-5, atol=1e-5)


def test_operator_contract():
    qkv, gradient = arguments(2, 5, 2, 16)
    query, others = qkv[:, :1, :32], qkv[:, :, 32:]
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.aps.class_attention.default, (query, others, 2), test_utils=tests)
    backward = torch.ops.aps.class_attention_backward.default
    torch.library.opcheck(backward, (query, others, gradient[:, :1], 2), test_utils=tests)
    for sizes in ((129, 32), (5, 24)):
        assert not class_token.takes(*sizes)
        query, others = torch.zeros(2, 1, sizes[1]), torch.zeros(2, sizes[0], 2 * sizes[1])
        with pytest.raises(ValueError, match=r"others: expected shape \[B, T, 2"):
            attend(1, query, others)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*SIZES, (30, 50, 6, 64)], ids=str)
def test_half_precision_is_as_close_as_torch(size):
    """Distance to the float64 result of the same inputs, relative, at most 1.5 times that of torch's own attention;
    twice the same bits."""
    qkv, gradient = (x.cuda().bfloat16() for x in arguments(*size))
    ours, again = (of_one(functools.partial(attend, size[2]), qkv, gradient) for _ in range(2))
    theirs = one_by_torch(qkv, gradient, size[2])
    exact = one_by_torch(qkv.double(), gradient.double(), size[2])
    for mine, twice, other, want in zip(ours, again, theirs, exact, strict=True):
        distance, allowed = ((x.double() - want).norm() / want.norm() for x in (mine, other))
        assert distance <= 1.5 * allowed + 2**-10, (distance, allowed)
        assert torch.equal(mine, twice)
