import pytest
import torch
import torch.nn.functional as F

import kernels
from kernels import reference
from tests.kernels.interpreter import interpret

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# patch, rows, columns, keep; the last two numbers: images cut off in front (the address is then odd), and dtype.
# None images: the crops are not contiguous.
SIZES = {
    "P1": (1, 3, 2, 4, 0, torch.float32),
    "P2": (2, 5, 3, 4, 0, torch.float32),
    "P4": (4, 3, 2, 6, 0, torch.float32),
    "P14": (14, 2, 3, 5, 0, torch.float16),
    "P16": (16, 2, 3, 5, 0, torch.float32),
    "P16 half": (16, 1, 2, 1, 0, torch.float16),
    "P32": (32, 1, 2, 2, None, torch.float32),
    "P7": (7, 3, 1, 2, 1, torch.float32),
    "P8 at an odd address": (8, 1, 3, 2, -1, torch.float32),
}

PAIRS = "P7", "P16", "P8 at an odd address"
PAIR = 2 * (torch.zeros(3, 12, 8, 3, dtype=torch.uint8),)  # of pictures of SIZES["P4"]


def arguments(patch, rows, columns, keep, skip, dtype):
    generator = torch.Generator().manual_seed(patch)
    shape = 3, rows * patch, columns * patch, 3
    pixels = torch.randint(0, 256, (shape[0] * shape[1] * shape[2] * 3 + 1,), generator=generator, dtype=torch.uint8)
    crops = (pixels[1:] if skip == -1 else pixels[:-1]).view(shape)[max(skip or 0, 0) :]
    if skip is None:
        crops = crops.transpose(1, 2).contiguous().transpose(1, 2)
    order = torch.stack([torch.randperm(rows * columns, generator=generator) for _ in crops])
    index = order[:, : 2 * keep].reshape(len(crops), -1)[:, :keep].int()
    index = torch.stack([index.flip(1), index], 1)[:, 1]  # a slice with strides, as first[:, r]
    return (crops, index), {"patch": patch, "mean": MEAN, "std": STD, "dtype": dtype}


def pair(patch, rows, columns, keep, skip, dtype):
    """Arguments of both views in one call: other pixels and patches for view 2, the indices with strides."""
    (crops, index), kwargs = arguments(patch, rows, columns, keep, skip, dtype)
    return ((crops, crops.flip(1)), torch.stack([index, index.flip(0)], 1).transpose(0, 1)), kwargs


def grouped(*size):
    """Arguments of three groups of both views in one call, the indices as ``sample_views`` gives them, stacked."""
    (crops, index), kwargs = pair(*size)
    return (crops, torch.stack([index, index.flip(1), index.flip(2)], 2)), kwargs


def written(args, kwargs):
    """The same into memory that is there, where nothing else is."""
    shape = reference.gathered_shape(args[1], kwargs["patch"])
    return args, kwargs | {"out": torch.full(shape, float("nan"), dtype=kwargs["dtype"])}


def unfolded(crops, index, patch):
    """The same patches by PyTorch's own unfold, of the picture normalised in float32 as gather.py documents."""
    offset, factor = (torch.tensor(x).view(3, 1, 1) for x in reference.normalisation(MEAN, STD))
    picture = (crops.permute(0, 3, 1, 2).float() - offset) * factor
    columns = F.unfold(picture, patch, stride=patch).transpose(1, 2)  # [B,N,3*P*P]
    return columns.gather(1, index.long()[:, :, None].expand(-1, -1, columns.shape[2]))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_equals_unfold(size):
    args, kwargs = arguments(*size)
    want = unfolded(*args, kwargs["patch"])
    got = kernels.gather_patches(*args, **kwargs)
    torch.testing.assert_close(got, want.to(kwargs["dtype"]), rtol=0, atol=0)
    half = kernels.gather_patches(*args, **kwargs | {"dtype": torch.bfloat16})
    torch.testing.assert_close(half, want.bfloat16(), rtol=0, atol=0)


def test_every_value_is_normalised_within_two_roundings():
    """Half an ulp of x - 255*mean (below 256) and of 255*mean (below 128), then the roundings of factor and product."""
    crops = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    got = kernels.gather_patches(crops, torch.zeros(1, 1).int(), patch=16, mean=MEAN, std=STD, dtype=torch.float32)
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None] for x in (MEAN, STD))
    exact = (torch.arange(256, dtype=torch.float64) / 255 - mean) / std
    error = (got.view(3, 256) - exact).abs()
    assert (error <= (2**-17 + 2**-18) / (255 * std) + exact.abs() * 2**-23).all(), error.max()


def test_flattened_as_a_patch_embedding():
    (crops, index), kwargs = arguments(4, 3, 2, 6, 0, torch.float32)
    embedding = torch.nn.Conv2d(3, 5, 4, stride=4).double()
    offset, factor = (torch.tensor(x).view(3, 1, 1) for x in reference.normalisation(MEAN, STD))
    tokens = embedding(((crops.permute(0, 3, 1, 2).float() - offset) * factor).double()).flatten(2).transpose(1, 2)
    patches = kernels.gather_patches(crops, index, **kwargs).double()
    got = patches @ embedding.weight.flatten(1).T + embedding.bias
    torch.testing.assert_close(got, tokens.gather(1, index.long()[:, :, None].expand(-1, -1, 5)))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    calls = [("gather_patches", *arguments(*size)) for size in SIZES.values()]
    (crops, index), kwargs = arguments(*SIZES["P4"])
    index = index.clone()
    index[0, 0], index[1, 2], index[2, 5] = -1, 6, 2**31 - 1
    # The launcher itself: the public function would refuse these indices here, but a GPU has no time to look at them.
    calls.append(("gather._launch", ([crops], index[None]), kwargs))
    calls += [("gather_patches", *pair(*SIZES[name])) for name in PAIRS]
    calls += [("gather_patches", *written(*grouped(*SIZES[name]))) for name in PAIRS]
    names = [*SIZES, "unknown", *(f"{form} {name}" for form in ("pair", "groups") for name in PAIRS)]
    return dict(zip(names, interpret(calls, tmp_path_factory.mktemp("gather")), strict=True))


@pytest.mark.parametrize("name", SIZES)
def test_interpreted_kernel_equals_reference(interpreted, name):
    args, kwargs = arguments(*SIZES[name])
    torch.testing.assert_close(interpreted[name], reference.gather_patches(*args, **kwargs), rtol=0, atol=0)


@pytest.mark.parametrize("name", PAIRS)
def test_both_views_in_one_call(interpreted, name):
    (crops, index), kwargs = pair(*SIZES[name])
    want = torch.stack([kernels.gather_patches(*view, **kwargs) for view in zip(crops, index, strict=True)])
    for got in (kernels.gather_patches(crops, index, **kwargs), interpreted[f"pair {name}"]):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", PAIRS)
def test_all_groups_in_one_call(interpreted, name):
    (crops, index), kwargs = grouped(*SIZES[name])
    want = torch.stack([kernels.gather_patches(crops, group, **kwargs) for group in index.unbind(2)])
    args, into = written((crops, index), kwargs)
    assert kernels.gather_patches(*args, **into) is into["out"]
    for got in (kernels.gather_patches(crops, index, **kwargs), into["out"], interpreted[f"groups {name}"]):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_unknown_patches_show_as_nan(interpreted):
    args, kwargs = arguments(*SIZES["P4"])
    got, want = interpreted["unknown"][0], reference.gather_patches(*args, **kwargs)
    for b, k in ((0, 0), (1, 2), (2, 5)):
        assert got[b, k].isnan().all()
        got[b, k] = want[b, k]
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_device_equals_reference(size):
    (crops, index), kwargs = arguments(*size)
    offset = crops.storage_offset()
    device = crops.new_empty(crops.numel() + offset).cuda()[offset:].view(crops.shape).copy_(crops)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = kernels.gather_patches(device, index.cuda(), **kwargs | {"dtype": dtype})
        want = reference.gather_patches(crops, index, **kwargs | {"dtype": dtype})
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [pair, grouped])
@pytest.mark.parametrize("name", PAIRS)
def test_both_views_and_all_groups_on_a_device(name, form):
    (crops, index), kwargs = form(*SIZES[name])
    want, out = reference.gather_patches(crops, index, **kwargs), written((crops, index), kwargs)[1]["out"].cuda()
    for into in (None, out):
        got = kernels.gather_patches([view.cuda() for view in crops], index.cuda(), **kwargs, out=into)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.gpu
def test_crops_beyond_two_to_the_31_bytes():
    crops = torch.zeros(750, 1024, 1024, 3, dtype=torch.uint8, device="cuda")  # 2.4 GB
    crops[-1] = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(4 * 1024 * 3).view(1024, 1024, 3)
    index = torch.tensor([[4095, 77]] * 750, dtype=torch.int32)
    kwargs = {"patch": 16, "mean": MEAN, "std": STD, "dtype": torch.float32}
    got = kernels.gather_patches(crops, index.cuda(), **kwargs)
    assert torch.equal(got[-1:].cpu(), reference.gather_patches(crops[-1:].cpu(), index[-1:], **kwargs))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"crops": torch.zeros(3, 12, 8, 3)}, TypeError, "crops.*uint8.*float32"),
        ({"crops": torch.zeros(3, 3, 12, 8, dtype=torch.uint8)}, ValueError, r"crops.*\[any, any, any, 3\]"),
        ({"index": torch.zeros(3, 6, dtype=torch.int64)}, TypeError, "index.*int32"),
        ({"index": torch.zeros(2, 6, dtype=torch.int32)}, ValueError, r"index.*\[3, any\].*\[2, 6\]"),
        ({"index": torch.zeros(3, 6, dtype=torch.int32, device="meta")}, ValueError, "index.*cpu.*meta"),
        ({"index": torch.full((3, 6), 6, dtype=torch.int32)}, ValueError, "index.*3x2.*6 to 6"),
        ({"crops": ()}, ValueError, "crops.*pair.*0"),
        ({"crops": PAIR}, ValueError, r"index.*\[2, 3, any\].*\[3, 6\]"),
        ({"crops": PAIR, "index": torch.zeros(2, 2, 6).int()}, ValueError, r"index.*\[2, 3, any\].*\[2, 2, 6\]"),
        ({"crops": (PAIR[0], PAIR[1][:, :8])}, ValueError, r"crops\[1\].*\[3, 12, 8, 3\].*\[3, 8, 8, 3\]"),
        ({"crops": (PAIR[0], PAIR[1].int())}, TypeError, r"crops\[1\].*uint8.*int32"),
        ({"crops": (PAIR[0], PAIR[1].to("meta"))}, ValueError, r"crops\[1\].*cpu.*meta"),
        ({"index": torch.zeros(1, 3, 2, 6).int()}, ValueError, r"index.*\[3, any\].*\[1, 3, 2, 6\]"),
        ({"crops": (*PAIR, PAIR[0])}, ValueError, "crops.*pair.*3"),
        ({"crops": PAIR, "index": torch.zeros(2, 3, 6, device="meta").int()}, ValueError, "index.*cpu.*meta"),
        ({"index": torch.tensor([[-1] * 6] * 3).int()}, ValueError, "index.*3x2.*-1 to -1"),
        ({"patch": 0}, ValueError, "patch.*12x8.*0"),
        ({"patch": 5}, ValueError, "patch.*12x8.*5"),
        ({"patch": 3}, ValueError, "patch.*12x8.*3"),
        ({"patch": 8}, ValueError, "patch.*12x8.*8"),
        ({"dtype": torch.float64}, TypeError, "dtype.*float64"),
        ({"out": torch.zeros(3, 6, 48).half()}, TypeError, "out.*float32.*float16"),
        ({"out": torch.zeros(3, 6, 47)}, ValueError, r"out.*\[1, 3, 6, 48\].*\[1, 3, 6, 47\]"),
        ({"out": torch.zeros(3, 48, 6).transpose(1, 2)}, ValueError, "out.*contiguous"),
        ({"mean": (0.5,)}, ValueError, "mean.*three"),
        ({"std": (0.5,)}, ValueError, "std.*three"),
        ({"std": (0.5, 0.0, 0.5)}, ValueError, "std above 0"),
    ],
)
def test_errors_name_what_was_expected(change, error, words):
    (crops, index), kwargs = arguments(*SIZES["P4"])
    with pytest.raises(error, match=words):
        kernels.gather_patches(**{"crops": crops, "index": index} | kwargs | change)


def test_operator_contract():
    args, kwargs = arguments(*SIZES["P4"])
    op = torch.ops.aps.gather_patches.default
    index = args[1][None, :, None].expand(-1, -1, 2, -1)
    torch.library.opcheck(op, ([args[0]], index, 4, list(MEAN), list(STD), torch.bfloat16))
    out = torch.empty(reference.gathered_shape(index, 4))
    torch.library.opcheck(torch.ops.aps.gather_patches_into.default, (out, [args[0]], index, 4, list(MEAN), list(STD)))
    compiled = torch.compile(lambda *a: kernels.gather_patches(*a, **kwargs), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), kernels.gather_patches(*args, **kwargs))
    assert list(kernels.gather_patches(args[0], args[1][:, :0], **kwargs).shape) == [3, 0, 48]
