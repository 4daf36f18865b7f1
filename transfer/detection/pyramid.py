"""A plain ViT as the backbone of a detector: the simple feature pyramid of ViTDet (arXiv 2203.16527).

All levels are made from the last feature map of the encoder alone, of stride P: by transposed convolutions for finer
strides, as it is for its own, by max-pooling for coarser ones. For large images the attention of most blocks can be
confined to windows, four blocks, evenly spaced, joining them.

Two things differ from the paper's code: the class token (and registers, where there are any) stay, because the patches
have learned to attend to them, and the encoder's last norm is applied, so that the pyramid starts from the features
that timm gives.
"""

from collections import OrderedDict

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, cat, nn

from .recipes import STRIDES

GLOBAL_BLOCKS = 4  # blocks that attend to the whole image where the others attend in windows


class WindowAttention(nn.Module):
    """The attention of a block, each patch attending to those of its window and to the class and register tokens.

    These attend to the patches of each window in turn, and take the mean. With one window, or none to confine, that is
    what ``attention`` does.
    """

    def __init__(self, attention: nn.Module, grid: tuple[int, int], window: int, prefix: int):
        """``grid``: patches (Gh, Gw) of an image, divisible by ``window``, patches a side; ``prefix``: other tokens."""
        super().__init__()
        self.attention, self.grid, self.window, self.prefix = attention, grid, window, prefix

    def forward(self, tokens: Tensor, **how) -> Tensor:
        """[B, prefix + Gh * Gw, D] to the same; ``how`` goes to the attention."""
        (batch, _, width), side = tokens.shape, self.window
        rows, columns = (n // side for n in self.grid)
        first, patches = tokens[:, : self.prefix], tokens[:, self.prefix :]
        windows = patches.unflatten(1, (rows, side, columns, side)).transpose(2, 3).reshape(-1, side * side, width)
        first = first.repeat_interleave(rows * columns, 0)
        windows = self.attention(cat([first, windows], 1), **how)
        first, patches = windows[:, : self.prefix], windows[:, self.prefix :]
        first = first.unflatten(0, (batch, -1)).mean(1)
        patches = patches.unflatten(0, (batch, rows, columns)).unflatten(3, (side, side)).transpose(2, 3)
        return cat([first, patches.reshape(batch, -1, width)], 1)


class SimpleFeaturePyramid(nn.Module):
    """Images to feature maps of one width, as torchvision's detectors want it of a backbone."""

    def __init__(self, vit: VisionTransformer, *, width: int = 256, window: int = 0):
        """``vit``: made for images of the size that will come. ``window``: patches a side of the windows, which divide
        the grid of the encoder; 0 for none. ValueError for a patch size or a window that does not fit."""
        super().__init__()
        patch, grid = vit.patch_embed.patch_size[0], vit.patch_embed.grid_size
        if patch not in (1, 2, *STRIDES):
            raise ValueError(f"an encoder of patch size {patch}: expected one of 1, 2, 4, 8, 16 and 32 pixels")
        if window and any(side % window for side in grid):
            raise ValueError(
                f"--window {window} does not divide the {grid[0]} x {grid[1]} patches of an image; expected a number "
                "that does, or 0 for no windows"
            )
        for pooling in (vit.fc_norm, vit.attn_pool):  # left out here, so that no gradient comes to it
            if pooling is not None:
                pooling.requires_grad_(False)
        depth = len(vit.blocks)
        joined = {depth * (i + 1) // GLOBAL_BLOCKS - 1 for i in range(GLOBAL_BLOCKS)}
        if window:
            for number in set(range(depth)) - joined:
                block = vit.blocks[number]
                block.attn = WindowAttention(block.attn, grid, window, vit.num_prefix_tokens)
        self.vit, self.out_channels = vit, width
        self.levels = nn.ModuleList(_level(vit.embed_dim, width, patch, stride) for stride in STRIDES)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Normalised images [B,3,H,W] to float32 maps [B,width,H/stride,W/stride]: "0" to "3" of STRIDES, and "pool" of
        twice the last one, for proposals of large objects (Lin et al. 2017, arXiv 1612.03144)."""
        [features] = self.vit.forward_intermediates(images, indices=1, norm=True, intermediates_only=True)
        # Anchors, boxes and what is pooled from these maps take their type from them: half precision would round the
        # coordinates to several pixels.
        maps = [level(features).float() for level in self.levels]
        named = OrderedDict((str(number), level) for number, level in enumerate(maps))
        named["pool"] = F.max_pool2d(maps[-1], kernel_size=1, stride=2)
        return named


def _level(width: int, out: int, patch: int, stride: int) -> nn.Sequential:
    """From a map of ``width`` channels and stride ``patch`` to one of ``out`` channels and another stride."""
    layers: list[nn.Module] = []
    while patch > stride:
        if layers:
            layers += [LayerNorm2d(width), nn.GELU()]
        layers.append(nn.ConvTranspose2d(width, width // 2, kernel_size=2, stride=2))
        patch, width = patch // 2, width // 2
    if patch < stride:
        layers.append(nn.MaxPool2d(stride // patch))
    layers += [nn.Conv2d(width, out, 1, bias=False), LayerNorm2d(out)]
    layers += [nn.Conv2d(out, out, 3, padding=1, bias=False), LayerNorm2d(out)]
    return nn.Sequential(*layers)
