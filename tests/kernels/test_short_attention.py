import functools

import pytest
import torch
import torch.nn.functional as F

import kernels
from kernels import reference, short_attention
from tests.kernels.interpreter import interpret

# images, tokens, heads, width of a head
SIZES = (2, 50, 3, 64), (1, 1, 2, 16), (3, 17, 1, 32), (1, 64, 1, 16), (1, 65, 2, 64), (1, 128, 1, 32)


def arguments(images, tokens, heads, width, dtype=torch.float32):
    """Packed queries, keys and values, and a gradient of the output; scaled so that some weights are nearly 1."""
    generator = torch.Generator().manual_seed(tokens)
    qkv = 2 * torch.randn(images, tokens, 3 * heads * width, generator=generator)
    return qkv.to(dtype), torch.randn(images, tokens, heads * width, generator=generator).to(dtype)


def by_torch(qkv, gradient, heads):
    """Output and gradient of torch's attention."""
    qkv = qkv.detach().requires_grad_()
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return out.detach(), torch.autograd.grad(out, qkv, gradient)[0]


def of_one(attend, qkv, gradient):
    """What ``attend`` gives the first token, and the gradient of all."""
    qkv = qkv.detach().requires_grad_()
    query, others = qkv.split((qkv.shape[2] // 3, qkv.shape[2] // 3 * 2), 2)
    out = attend(query[:, :1], others)
    return out.detach(), torch.autograd.grad(out, qkv, gradient[:, :1])[0]


def one_by_torch(qkv, gradient, heads):
    """Of the first token alone, by torch's attention of all."""
    only = torch.zeros_like(gradient)
    only[:, 0] = gradient[:, 0]
    out, back = by_torch(qkv, only, heads)
    return out[:, :1], back


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_reference_equals_torch_in_float64(size):
    qkv, gradient = arguments(*size, dtype=torch.float64)
    out, back = by_torch(qkv, gradient, size[2])
    torch.testing.assert_close(kernels.attention(qkv, heads=size[2]), out)
    torch.testing.assert_close(reference.attention(qkv, heads=size[2]), out)
    torch.testing.assert_close(reference.attention_backward(qkv, gradient, size[2]), back)

    def by_sums(query, others):
        q, (k, v) = query.unflatten(2, (size[2], -1)), others.unflatten(2, (2, size[2], -1)).unbind(2)
        return short_attention.one_by_sums(q, k, v).flatten(2)

    one = one_by_torch(qkv, gradient, size[2])
    for attend in (by_sums, functools.partial(kernels.attention_of_one, heads=size[2])):
        torch.testing.assert_close(of_one(attend, qkv, gradient), one)


def test_interpreted_kernels_equal_reference(tmp_path):
    calls, wanted = [], []
    for *size, heads, width in SIZES:
        qkv, gradient = arguments(*size, heads, width)
        strided = torch.stack([gradient, gradient], 1)[:, 1]
        calls.append(("short_attention._launch", (qkv, heads), {}))
        calls.append(("short_attention._launch_backward", (qkv, strided, heads), {}))
        wanted += by_torch(qkv.double(), gradient.double(), heads)
    for got, want in zip(interpret(calls, tmp_path), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_operator_contract():
    qkv, _ = arguments(2, 5, 2, 16)
    torch.library.opcheck(torch.ops.aps.attention.default, (qkv.requires_grad_(), 2))
    compiled = torch.compile(torch.ops.aps.attention.default, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(qkv, 2), kernels.attention(qkv, heads=2))


def test_what_the_kernels_do_not_take_goes_to_torch():
    assert not short_attention.suits(torch.empty(2, 50, 192), 1)  # float32
    assert not short_attention.suits(torch.empty(2, 129, 192, dtype=torch.bfloat16), 1)
    for shape, heads in (((2, 5, 32), 2), ((2, 5, 96), 0), ((5, 96), 2)):
        with pytest.raises(ValueError, match=r"qkv: expected shape \[B, T, 3"):
            kernels.attention(torch.zeros(shape), heads=heads)


@pytest.mark.parametrize("size", [*SIZES, (30, 50, 6, 64)], ids=str)
@pytest.mark.parametrize("dtype", short_attention.DTYPES, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_half_precision_is_as_close_as_torch(size, dtype, device):
    """Distance to the float64 result of the same inputs, relative, at most 1.5 times that of torch's own attention."""
    qkv, gradient = (x.to(device) for x in arguments(*size, dtype=dtype))
    want = by_torch(qkv.double(), gradient.double(), size[2])
    theirs = by_torch(qkv, gradient, size[2])
    want += one_by_torch(qkv.double(), gradient.double(), size[2])
    theirs += one_by_torch(qkv, gradient, size[2])
    qkv.requires_grad_()
    with torch.autocast(device, torch.bfloat16):  # as in training; nothing of it may reach the inside
        out = kernels.attention(qkv, heads=size[2])
        ours = out.detach(), torch.autograd.grad(out, qkv, gradient)[0]
    attend = torch.autocast(device, torch.bfloat16)(functools.partial(kernels.attention_of_one, heads=size[2]))
    ours += of_one(attend, qkv, gradient)
    assert out.dtype == dtype and short_attention.suits(qkv, size[2])
    for mine, other, exact in zip(ours, theirs, want, strict=True):
        distance, allowed = ((x.double() - exact).norm() / exact.norm() for x in (mine, other))
        assert distance <= 1.5 * allowed + torch.finfo(dtype).eps / 4, (distance, allowed)
