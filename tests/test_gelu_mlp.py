import pytest
import torch
import torch.nn.functional as F

import kernels
from kernels import gelu_mlp, reference
from tests.interpreter import interpret

SIZES = (300, 64, 256), (1, 128, 128), (128, 64, 128)  # rows, width, hidden width; a band has 128 rows


def arguments(rows, width, hidden, dtype=torch.float32):
    """x, w1, b1, w2, b2, such that |H| goes up to 6 or so."""
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, width), (hidden, width), (hidden,), (width, hidden), (width,)
    scales = 1, 1.4 * width**-0.5, 0.5, hidden**-0.5, 0.5
    return [(torch.randn(x, generator=generator) * s).to(dtype) for x, s in zip(shapes, scales, strict=True)]


def by_torch(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def test_gradients_in_float64():
    x, w1, b1, w2, b2 = (tensor.requires_grad_() for tensor in arguments(5, 3, 4, torch.float64))
    torch.testing.assert_close(gelu_mlp._Mlp.apply(x, w1, b1, w2, b2), by_torch(x, w1, b1, w2, b2))
    torch.autograd.gradcheck(gelu_mlp._Mlp.apply, (x, w1, b1, w2, b2))


def test_interpreted_kernels_equal_reference(tmp_path):
    """To 1e-5: sums of up to 128 products in float32, and the polynomial's 8e-8."""
    calls, wanted = [], []
    for size in SIZES:
        x, w1, b1, w2, _ = arguments(*size)
        hidden, out = reference.mlp_up(x.double(), w1.double(), b1.double(), True)
        gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        calls += [(f"gelu_mlp.{name}", args, {}) for name, args in (
            ("_launch", (x, w1, b1, True)), ("_launch", (x, w1, b1, False)),
            ("_launch_backward", (gradient, w2, hidden.float())),
        )]  # fmt: skip
        wanted += [(hidden, out), (hidden[:0], out), reference.mlp_up_backward(gradient, w2, hidden)]
        assert hidden.abs().max() > 2
    for got, want in zip(interpret(calls, tmp_path), wanted, strict=True):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


def test_operator_contract():
    x, w1, b1, w2, _ = arguments(5, 3, 4)
    for keep in (True, False):
        torch.library.opcheck(torch.ops.aps.mlp_up.default, (x, w1, b1, keep))
    hidden, _ = reference.mlp_up(x, w1, b1, True)
    torch.library.opcheck(torch.ops.aps.mlp_up_backward.default, (x, w2, hidden))
    args = [tensor.requires_grad_() for tensor in arguments(6, 8, 16)]
    compiled = torch.compile(gelu_mlp._Mlp.apply, fullgraph=True, backend="aot_eager")
    for run in (compiled, kernels.mlp):
        torch.testing.assert_close(run(*args), by_torch(*args))
        torch.testing.assert_close(
            torch.autograd.grad(run(*args).sum(), args), torch.autograd.grad(by_torch(*args).sum(), args)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*SIZES, (51200, 384, 1536), (6400, 768, 3072)], ids=str)
@pytest.mark.parametrize("dtype", gelu_mlp.DTYPES, ids=str)
def test_device_is_as_close_as_torch(size, dtype):
    """Distance to the float64 result of the same inputs, relative, at most 1.5 times that of torch's operations."""
    args = [tensor.cuda().requires_grad_() for tensor in arguments(*size, dtype)]
    gradient = torch.randn(args[0].shape, device="cuda", dtype=dtype)
    assert gelu_mlp.suits(args[0], args[1])

    def results(run, args, gradient):
        out = run(*args)
        return out, *torch.autograd.grad(out, args, gradient)

    exact = results(by_torch, [x.detach().double().requires_grad_() for x in args], gradient.double())
    theirs, ours = results(by_torch, args, gradient), results(kernels.mlp, args, gradient)
    for mine, other, want in zip(ours, theirs, exact, strict=True):
        distance, allowed = ((x.double() - want).norm() / want.norm() for x in (mine, other))
        assert distance <= 1.5 * allowed + torch.finfo(dtype).eps / 4, (distance, allowed)
    with torch.no_grad():
        torch.testing.assert_close(kernels.mlp(*args), ours[0].detach(), rtol=0, atol=0)
