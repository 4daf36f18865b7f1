"""The code that only a GPU runs (``tl.sort``, whole words of pixels, bf16, the barrier), held to the reference."""

import math
import re
from itertools import islice

import numpy as np
import pytest
import torch

from kernels import gather, reference, residual_norm, sampling, update
from kernels.compiled import compile_for
from kernels.short_attention import attention_of_one
from tests.kernels.test_gather import MEAN, STD
from tests.kernels.test_sampling import PAIRS
from tests.kernels.test_update import BOUNDS, RULE, arguments, check
from tests.kernels.ttir import evaluate

# grid, keep, groups, pairs of crops, patch, dtype of the patches: Triton's name, PyTorch's, numpy's for its bits
CASES = {
    "all of 3x5": ((3, 5), 15, 1, PAIRS, 4, ("fp32", torch.float32, np.int32)),
    "14x14": ((14, 14), 49, 4, PAIRS, 16, ("bf16", torch.bfloat16, np.int16)),
    "46x45": ((46, 45), 340, 2, PAIRS[4:7], 14, ("fp16", torch.float16, np.int16)),  # keys of many patches
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request):
    grid, keep, groups, pairs, patch, dtypes = request.param
    made = islice(compile_for(90, grid=grid, keep=keep, groups=groups, patch=patch, dtype=dtypes[0]), 3)  # no attention
    flips = torch.tensor([[i // 2 % 2, (i + 1) % 2] for i in range(len(pairs))]).bool()
    boxes = torch.tensor(pairs, dtype=torch.int32)
    return {name: kernel.asm["ttir"] for name, kernel in made}, boxes, flips, request.param


def arrays(*tensors):
    return [x.contiguous().view(torch.uint8).numpy() if x.dtype == torch.bool else x.numpy() for x in tensors]


@pytest.mark.parametrize(
    ("power", "seed", "epoch"), [(0.0, -5, 2**40), (3.0, 2**63 - 1, -1), (1e5, 7, 2), (math.inf, 0, 1)]
)
def test_sampling(case, power, seed, epoch):
    made, boxes, flips, (grid, keep, groups, *_) = case
    images = len(boxes)
    sample = torch.tensor([0, -1, 2**32, -(2**63), 2**63 - 1, 977, 2**32 + 1, 12345])[:images]
    sizes = {"grid": grid, "keep": keep, "groups": groups, "power": power, "seed": seed, "epoch": epoch}
    first, second = (np.full((images, groups, keep), -(2**31), np.int32) for _ in range(2))
    numbers = torch.tensor([seed]), torch.tensor([epoch]), sampling._table(torch.device("cpu"))
    args = *arrays(boxes, flips, sample, *numbers), first, second, *reference.fixed_power(power)
    evaluate(made["sample_views"], args, list(np.ndindex(images, groups)))
    for got, want in zip((first, second), reference.sample_views(boxes, flips, sample, **sizes), strict=True):
        np.testing.assert_array_equal(got, want.numpy())


def test_overlap(case):
    made, boxes, flips, (grid, keep, groups, *_) = case
    images = len(boxes)
    n, generator = math.prod(grid), torch.Generator().manual_seed(1)
    first = torch.stack([torch.randperm(n, generator=generator)[: groups * keep] for _ in boxes]).int()
    first, out = first.view(images, groups, keep), np.full((images, groups, n), np.nan, np.float32)
    evaluate(made["patch_overlap"], [*arrays(boxes, flips, first), out], list(np.ndindex(images, groups)))
    np.testing.assert_array_equal(out, reference.patch_overlap(boxes, flips, first, grid=grid).numpy())


@pytest.mark.parametrize(
    ("line", "replacement", "error", "words"),
    [
        (r"\S+\.barrier.*", "", AssertionError, "no barrier"),
        (r"arith\.minsi", "arith.minui", NotImplementedError, "minui"),
        (r"(tt\.store %\w+, %\w+), %\w+", r"\1", AssertionError, "outside|one address"),
    ],
    ids=["race", "unknown operation", "unmasked store"],
)
def test_evaluator_refuses(line, replacement, error, words):
    _, made = next(compile_for(90, grid=(3, 5), keep=15, groups=1, patch=4, dtype="fp32"))
    code, count = re.subn(line, replacement, made.asm["ttir"])
    boxes, numbers = np.full((1, 2, 4), 60, np.int32), [np.zeros(1, np.int64) for _ in range(3)]
    first, second = (np.zeros((1, 1, 15), np.int32) for _ in range(2))
    assert count
    with pytest.raises(error, match=words):
        args = boxes, np.zeros((1, 2), np.int8), *numbers, reference.log2_table(), first, second, 0, 0
        evaluate(code, args, [(0, 0)])


def evaluate_gather(made, crops, index, out, strides, programs):
    offset, factor = reference.normalisation(MEAN, STD)
    for view in range(len(crops)):  # the evaluator wants the pointers of one load in one buffer
        args = crops[0], crops[-1], index, out, *offset, *factor, *out.shape[1:3], *strides
        evaluate(made["gather_patches"], args, [(x, view) for x in programs])


def test_gather(case):
    made, _, _, (grid, keep, groups, _, patch, (_, dtype, bits)) = case
    n, generator = math.prod(grid), torch.Generator().manual_seed(1)
    shape = 2, 2, grid[0] * patch, grid[1] * patch, 3
    crops = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    index = torch.stack([torch.randperm(n, generator=generator)[:keep] for _ in range(4 * groups)]).int()
    index = index.view(2, 2, groups, keep)
    strided = torch.stack([index, -index], -1)
    strided[0, 1, -1, 2, 0] = n  # on a GPU, where nobody looks, it shows as NaN
    out = np.full((groups, 2, 2, keep, 3 * patch**2), -1, bits)
    programs = range(-(-2 * groups * keep // gather.tile(grid, groups, keep, patch, 16)["BLOCK"]))
    strides = 4 * groups * keep, 2 * groups * keep, 2 * keep, 2
    evaluate_gather(made, arrays(*crops), *arrays(strided), out, strides, programs)
    want = reference.gather_patches(list(crops), index, patch=patch, mean=MEAN, std=STD, dtype=dtype)
    want[-1, 0, 1, 2] = math.nan
    torch.testing.assert_close(torch.from_numpy(out).view(dtype), want, rtol=0, atol=0, equal_nan=True)


def test_gather_beyond_two_to_the_31_words(tmp_path):
    """The last of 114,200 images: word 2**31 of the crops and element 2**32 of the output lie before it."""
    grid, groups, keep, patch, images = (14, 14), 4, 49, 16, 114_200
    made = {name: kernel.asm["ttir"] for name, kernel in islice(compile_for(90), 3)}
    shapes = (images, 224, 224, 3), (groups, 2, images, keep, 3 * patch**2)
    crops = np.memmap(tmp_path / "crops", np.uint8, "w+", shape=shapes[0])  # sparse files: only touched pages exist
    out = np.memmap(tmp_path / "out", np.int16, "w+", shape=shapes[1])
    assert crops[:-1].size > 8 * 2**31 and out[0, 0, :-1].size > 2**32
    crops[-1] = np.random.default_rng(0).integers(0, 256, shapes[0][1:])
    index = [torch.randperm(196, generator=torch.Generator().manual_seed(x))[: groups * keep] for x in (1, 2)]
    index = torch.stack(index).view(2, groups, keep).int()
    block = gather.tile(grid, groups, keep, patch, 16)["BLOCK"]
    programs = range((images - 1) * groups * keep // block, -(-images * groups * keep // block))
    evaluate_gather(made, [crops, crops], index.numpy(), out, (groups * keep, 0, keep, 1), programs)
    kwargs = {"patch": patch, "mean": MEAN, "std": STD, "dtype": torch.bfloat16}
    want = reference.gather_patches([torch.from_numpy(crops[-1:])] * 2, index[:, None], **kwargs)
    assert torch.equal(torch.from_numpy(out[:, :, -1:]).view(torch.bfloat16), want)


@pytest.mark.parametrize("wrong", [None, math.nan], ids=["finite", "not finite"])
def test_update(monkeypatch, wrong):
    """A step with all that there may be: clip by a vector, momentum network, copies in bfloat16."""
    monkeypatch.setattr(update, "CHUNK", 2)  # the blocks of a unit in several turns
    made = {name: kernel.asm["ttir"] for name, kernel in islice(compile_for(90, rule=RULE), 5, 9)}
    args = arguments("vector", half=torch.bfloat16, wrong=wrong)
    state = update.State(*(x.clone() for x in args[0]))
    arrays = {
        name: x.view(torch.int16 if x.dtype == torch.bfloat16 else x.dtype) for name, x in state._asdict().items()
    }
    arrays = {name: x.view(-1).numpy() for name, x in (arrays | {"gradient": args[1], "rates": args[2]}).items()}
    starts, ends, unit, bounds = (x.numpy() for x in update._blocks(BOUNDS, torch.device("cpu")))
    blocks, units = len(starts), len(BOUNDS) - 1
    squares, norms = np.full((2, blocks), np.nan, np.float32), np.full((2, units), np.nan, np.float32)
    for row in range(2):  # the evaluator wants the pointers of one load in one buffer, and the bounds of one loop
        flats, programs = (arrays["gradient"], arrays["average"]), [(block, row) for block in range(blocks)]
        evaluate(made["unit_squares"], [*flats, starts, ends, squares, blocks], programs)
        for number in range(units):
            evaluate(made["unit_norms"], [squares, bounds, norms, blocks, units], [(number, row)])
    shared, finite = np.full(update.SHARED.value + units, np.nan, np.float32), np.full(1, -1, np.int8)
    previous = norms[1].copy()
    evaluate(made["update_shared"], [norms, arrays["rates"], arrays["step"], previous, shared, finite, units], [(0, 0)])
    names = "values", "gradient", "first", "second", "average", "keys", "copies", "key_copies"
    constants = finite, shared, starts, ends, unit, len(state.keys)
    evaluate(made["update"], [*(arrays[name] for name in names), *constants], [(block, 0) for block in range(blocks)])
    check((*state, torch.tensor(bool(finite[0]))), args)


def halves(generator, *shape):
    """Random numbers in bfloat16, as a tensor and as their bits."""
    x = torch.randn(shape, generator=generator).bfloat16()
    return x, x.view(torch.int16).numpy()


def check_halves(pairs, width=2**-8):
    """Bits within two roundings of bfloat16 of what they should be."""
    for bits, exact in pairs:
        got = torch.from_numpy(bits).view(torch.bfloat16).double().view(exact.shape)
        assert (got - exact).norm() <= width * exact.norm()


def test_class_attention():
    made = {name: kernel.asm["ttir"] for name, kernel in islice(compile_for(90, rule=RULE), 9, 11)}
    generator, heads, width = torch.Generator().manual_seed(0), 6, 384
    (query, q), (others, o), (gradient, g) = (halves(generator, 2, x, y) for x, y in ((1, 384), (50, 768), (1, 384)))
    out, dquery, dothers = (np.full_like(x, -1) for x in (q, q, o))
    scale, programs = (width // heads) ** -0.5, list(np.ndindex(2, heads))
    evaluate(made["class_attention"], [q, o, out, scale / math.log(2)], programs)
    evaluate(made["class_attention_backward"], [q, o, g, dquery, dothers, scale / math.log(2), scale], programs)
    exact = [x.double() for x in (query, others, gradient)]
    wanted = attention_of_one(*exact[:2], heads=heads), *reference.class_attention_backward(*exact, heads)
    check_halves(zip((out, dquery, dothers), wanted, strict=True))


@pytest.mark.parametrize("width", [384, 1280])
def test_norm_backward(width):
    """Of rows that leave the last program some that are none."""
    made = {name: kernel.asm["ttir"] for name, kernel in islice(compile_for(90, width=width, rule=RULE), 11, None)}
    generator, rows, each, programs = torch.Generator().manual_seed(0), 18, 8, 3
    (gradient, gy), (passing, gs), (x, s) = (halves(generator, rows, width) for _ in range(3))
    mean, rstd, gamma = torch.randn(rows, 1, generator=generator), torch.rand(rows, 1), torch.randn(width)
    out, bias, norm = np.full_like(s, -1), np.full(width, -1, np.int16), np.full(2 * width, np.nan, np.float32)
    partial = np.full((programs, 3 * width), np.nan, np.float32)
    given = [gy, gs, s, *(t.numpy() for t in (mean, rstd, gamma)), out, partial, rows, each]
    for program in range(programs):  # the bounds of one loop are the same in all that are evaluated at once
        evaluate(made["norm_backward"], given, [(program, 0)])
    blocks = [(block, 0) for block in range(-(-3 * width // residual_norm.SUM["C"]))]
    evaluate(made["norm_sums"], [partial, norm, bias, programs, width], blocks)
    exact = reference.norm_backward(*(t.double() for t in (gradient, passing, x, mean, rstd, gamma)))
    check_halves([(out, exact[0]), (bias, exact[2])])
    torch.testing.assert_close(torch.from_numpy(norm).double(), exact[1], rtol=1e-4, atol=1e-4)
