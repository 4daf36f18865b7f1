from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import reference
from tests.kernels.interpreter import interpret
from tests.kernels.test_sampling import PAIRS, strided


def patches(box, flip, grid):
    """The rectangles (top, left, bottom, right) of a crop's patches in the source image, as the model numbers them."""
    y, x, h, w = box
    rows, columns = grid
    for row in range(rows):
        for column in range(columns):
            c = columns - 1 - column if flip else column
            top, left = y + Fraction(h * row, rows), x + Fraction(w * c, columns)
            yield top, left, top + Fraction(h, rows), left + Fraction(w, columns)


def covered(pair, flips, kept, grid):
    """Exact share of every view-2 patch inside the kept view-1 patches, from rectangles with rational corners."""
    first = list(patches(pair[0], flips[0], grid))
    for top, left, bottom, right in patches(pair[1], flips[1], grid):
        area = Fraction(0)
        for k in kept:
            t, l, b, r = first[k]  # noqa: E741
            area += max(min(b, bottom) - max(t, top), 0) * max(min(r, right) - max(l, left), 0)
        yield area / ((bottom - top) * (right - left))


def arguments(grid, groups, keep):
    b = len(PAIRS)
    flips = torch.tensor([[i // 2 % 2, i % 2] for i in range(b)]).bool()
    n = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(n, generator=generator) for _ in range(b)])
    first = order[:, : groups * keep].view(b, groups, keep).int()
    return tuple(map(strided, (torch.tensor(PAIRS, dtype=torch.int32), flips, first))), {"grid": grid}


SIZES = {"3x5": ((3, 5), 2, 7), "7x2": ((7, 2), 1, 14), "1x9": ((1, 9), 3, 1), "none kept": ((2, 2), 1, 0)}
SIZES["37x37"] = (37, 37), 1, 3


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_shares_are_exact(size):
    (boxes, flips, first), kwargs = arguments(*size)
    got = kernels.patch_overlap(boxes, flips, first, **kwargs)
    for b, groups in enumerate(first.tolist()):
        for r, kept in enumerate(groups):
            want = [float(x) for x in covered(PAIRS[b], flips[b].tolist(), kept, size[0])]
            assert torch.equal(got[b, r], torch.tensor(want)), (b, r)


box = st.tuples(*[st.integers(0, 65535)] * 2, *[st.integers(1, 65535)] * 2) | st.tuples(*[st.integers(1, 40)] * 4)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.tuples(box, box), st.tuples(st.booleans(), st.booleans()), st.integers(1, 6), st.integers(1, 6))
def test_uncovered_area_is_an_exact_integer(data, pair, flips, rows, columns):
    kept = data.draw(st.sets(st.integers(0, rows * columns - 1), min_size=1))
    boxes, first = torch.tensor([pair], dtype=torch.int32).numpy(), torch.tensor([[sorted(kept)]]).numpy()
    got = reference.covered_area(boxes, torch.tensor([flips]).numpy(), first, (rows, columns))[0, 0]
    area = pair[1][2] * pair[1][3]
    assert got.tolist() == [share * area for share in covered(pair, flips, kept, (rows, columns))]


def test_interpreted_kernel_equals_reference(tmp_path):
    calls = [("patch_overlap", *arguments(*size)) for size in SIZES.values()]
    args, kwargs = arguments((32, 64), 1, 700)  # more kept patches than the interpreter takes at once
    calls.append(("patch_overlap", [x[4:5] for x in args], kwargs))
    for got, (_, args, kwargs) in zip(interpret(calls, tmp_path), calls, strict=True):
        torch.testing.assert_close(got, reference.patch_overlap(*args, **kwargs), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*SIZES.values(), ((32, 64), 2, 700)], ids=[*SIZES, "32x64"])
def test_device_equals_reference(size):
    args, kwargs = arguments(*size)
    got = kernels.patch_overlap(*(x.cuda() for x in args), **kwargs)
    torch.testing.assert_close(got.cpu(), reference.patch_overlap(*args, **kwargs), rtol=0, atol=0)


def test_errors_name_what_was_expected():
    (boxes, flips, first), kwargs = arguments((3, 5), 2, 7)
    with pytest.raises(TypeError, match=r"first.*int32.*int64"):
        kernels.patch_overlap(boxes, flips, first.long(), **kwargs)
    with pytest.raises(ValueError, match=r"first.*\[8, any, any\].*\[7, 2, 7\]"):
        kernels.patch_overlap(boxes, flips, first[:7], **kwargs)
    with pytest.raises(ValueError, match=r"first.*cpu.*meta"):
        kernels.patch_overlap(boxes, flips, first.to("meta"), **kwargs)
    with pytest.raises(ValueError, match=r"boxes.*65535"):
        kernels.patch_overlap(boxes * 0, flips, first, **kwargs)
    with pytest.raises(ValueError, match=r"first.*grid.*14"):
        kernels.patch_overlap(boxes, flips, first, grid=(2, 5))


def test_operator_contract():
    args, kwargs = arguments((3, 5), 2, 7)
    torch.library.opcheck(torch.ops.aps.patch_overlap.default, (*args, [3, 5]))
    compiled = torch.compile(lambda *a: kernels.patch_overlap(*a, **kwargs), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), kernels.patch_overlap(*args, **kwargs))
