"""The pyramid: what each level sees, the encoder's features as timm has them, windows that keep to themselves."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from transfer.detection.pyramid import GLOBAL_BLOCKS, STRIDES, SimpleFeaturePyramid, WindowAttention
from transfer.pretrained import load_encoder

NAME = "vit_tiny_patch16_224"


def encoder(seed=0, **more):
    torch.manual_seed(seed)
    vit = timm.create_model(NAME, num_classes=0, **({"img_size": 64, "patch_size": 8, "depth": 1} | more)).eval()
    torch.nn.init.normal_(vit.pos_embed)  # large enough to matter
    return vit


@pytest.mark.parametrize("patch, size", [(1, 32), (2, 64), (8, 64), (16, 128), (32, 64)])
def test_each_level_has_its_stride_and_looks_at_its_place(patch, size):
    """A change in one patch of the features changes a level there, and no further than a 3 x 3 convolution reaches."""
    torch.manual_seed(0)
    pyramid = SimpleFeaturePyramid(encoder(img_size=size, patch_size=patch), width=16)
    maps = pyramid(torch.randn(2, 3, size, size))
    assert list(maps) == ["0", "1", "2", "3", "pool"]
    sides = [size // stride for stride in STRIDES]
    assert [tuple(level.shape) for level in maps.values()] == [(2, 16, n, n) for n in (*sides, -(-sides[-1] // 2))]
    assert torch.equal(maps["pool"], maps["3"][:, :, ::2, ::2])
    for level, stride in zip(pyramid.levels, STRIDES, strict=True):
        steps = max(0, (patch // stride).bit_length() - 1)  # of a factor of two; each halves the width
        finer = [(layer.in_channels, layer.out_channels) for layer in level if type(layer) is nn.ConvTranspose2d]
        assert finer == [(192 >> n, 192 >> n + 1) for n in range(steps)]
        assert [layer.kernel_size for layer in level if type(layer) is nn.MaxPool2d] == [stride // patch] * (
            stride > patch
        )
        assert sum(type(layer) is nn.GELU for layer in level) == max(0, steps - 1)
        assert [layer.kernel_size[0] for layer in level if type(layer) is nn.Conv2d] == [1, 3]
    grid = size // patch
    features = torch.randn(1, 192, grid, grid)
    row, column = grid - 1, grid // 2
    changed = features.clone()
    changed[:, :, row, column] += 100
    for level, stride in zip(pyramid.levels, STRIDES, strict=True):
        difference = (level(features) - level(changed)).abs().amax((0, 1))
        assert difference.shape == (size // stride,) * 2
        seen = torch.zeros_like(difference, dtype=torch.bool)
        (top, bottom), (left, right) = (
            (at * patch // stride, (at * patch + patch - 1) // stride) for at in (row, column)
        )
        assert (difference[top : bottom + 1, left : right + 1] > 0).all()
        seen[max(top - 1, 0) : bottom + 2, max(left - 1, 0) : right + 2] = True
        assert (difference[~seen] == 0).all()


def test_features_are_those_of_timm_at_any_size(tmp_path):
    """At the encoder's own size, and where the positions are resampled, for which timm itself has a flag."""
    vit = encoder(img_size=32, depth=2)
    save_file(vit.state_dict(), tmp_path / "encoder.safetensors")
    for size in (32, 96):
        images = torch.randn(2, 3, size, size)
        timms = timm.create_model(
            NAME, img_size=32, patch_size=8, depth=2, num_classes=0, dynamic_img_size=True,
            checkpoint_path=str(tmp_path / "encoder.safetensors"),
        ).eval()  # fmt: skip
        [expected] = timms.forward_intermediates(images, indices=1, norm=True, intermediates_only=True)
        ours, _ = load_encoder(tmp_path / "encoder.safetensors", model=NAME, image_size=size, patch_size=8, depth=2)
        pyramid = SimpleFeaturePyramid(ours.eval(), width=16)
        for level, found in zip(pyramid.levels, pyramid(images).values(), strict=False):
            torch.testing.assert_close(found, level(expected))


def test_one_window_is_global_attention():
    images = torch.randn(2, 3, 64, 64)
    plain, windowed = (SimpleFeaturePyramid(encoder(depth=6), width=8, window=window) for window in (0, 8))
    windowed.levels.load_state_dict(plain.levels.state_dict())
    joined = [not isinstance(block.attn, WindowAttention) for block in windowed.vit.blocks]
    assert sum(joined) == GLOBAL_BLOCKS and joined[-1] and not joined[1]
    for ours, theirs in zip(windowed(images).values(), plain(images).values(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_window_sees_itself_and_the_class_token():
    attention = WindowAttention(encoder().blocks[0].attn, grid=(4, 6), window=2, prefix=1)
    tokens = torch.randn(3, 1 + 24, 192)
    before = attention(tokens)
    where = torch.zeros(4, 6, dtype=torch.bool)
    where[2:4, 4:6] = True
    inside = torch.cat([torch.tensor([False]), where.flatten()])
    tokens[:, inside] += 1
    difference = (attention(tokens) - before).abs().amax((0, 2))
    assert (difference[inside] > 1e-4).all() and difference[0] > 1e-4  # the class token looks into all windows
    assert (difference[1:][~inside[1:]] == 0).all()
    tokens[:, 0] += 1
    assert ((attention(tokens) - before).abs().amax((0, 2)) > 1e-4).all()


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="--window 3 does not divide the 8 x 8 patches"):
        SimpleFeaturePyramid(encoder(), window=3)
    with pytest.raises(ValueError, match="patch size 14"):
        SimpleFeaturePyramid(encoder(img_size=56, patch_size=14))
