"""APS, MoCo v3, MAE, SimMIM and iBOT as modules on the same backbone, each as its paper defines it, with its work.

An image is one of a step's batch, with all the views that a method takes of it. Crops come as patches [B,n,3*P*P], so
that only those that are encoded are embedded; at 32 px they are scaled down with the image.
"""

import copy
import dataclasses
from dataclasses import dataclass
from itertools import pairwise

import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from bench.roofline import Sizes
from model import QueryNetwork, contrastive_loss
from model.encoder import sincos_position_embedding
from run.recipes import Config
from run.training import encoder_arguments, plan_patches


@dataclass(frozen=True)
class Part:
    """``flop`` of a forward pass for one image. ``times``: 1 for that alone, 2 with one gradient, 3 with both."""

    name: str
    flop: float
    times: int


def blocks(times: int, *, views: int, tokens: int, depth: int, width: int, hidden: int) -> list[Part]:
    """Of transformer blocks that ``views`` sequences of so many tokens pass."""
    weights = 4 * width**2 + 2 * width * hidden
    return [
        Part("blocks", 2 * weights * depth * views * tokens, times),
        Part("attention", 4 * views * tokens**2 * width * depth, times),
    ]


def backbone(config: Config) -> VisionTransformer:
    """timm's ViT of the config, all of it trained."""
    values = {"weight_init": "skip"} if torch.get_default_device().type == "meta" else {}  # of which none is kept
    return timm.create_model(config.model, **encoder_arguments(config), **values)


def encode(vit: VisionTransformer, patches: Tensor, positions: Tensor, masked: tuple | None = None) -> Tensor:
    """All tokens [B,1+n,D] of patches [B,n,3*P*P] at positions [n,D] or [B,n,D]. ``masked``: which of them a token
    takes the place of, bool [B,n], and that token [D]."""
    tokens = F.linear(patches, vit.patch_embed.proj.weight.flatten(1), vit.patch_embed.proj.bias)
    if masked is not None:
        tokens = torch.where(masked[0].unsqueeze(2), masked[1].to(tokens.dtype), tokens)
    tokens = tokens + positions.to(tokens.dtype)
    first = (vit.cls_token + vit.pos_embed[:, :1]).to(tokens.dtype).expand(len(tokens), -1, -1)
    return vit.norm(vit.blocks(torch.cat([first, tokens], 1)))


class Method(nn.Module):
    """``forward(*inputs(batch, device))`` is the loss. ``averages``: networks and their moving averages."""

    averages: tuple[tuple[nn.Module, nn.Module], ...] = ()

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.sizes = config, Sizes.of(config)
        _, self.grid, self.keep = plan_patches(config)
        self.patches = self.grid[0] * self.grid[1]

    def encoder_parts(self, times: int, *, views: int, patches: int, embedding: int = 2) -> list[Part]:
        """``embedding``: its times."""
        s = self.sizes
        return [
            Part("embedding", 2 * views * patches * s.pixels * s.width, embedding),
            *blocks(times, views=views, tokens=patches + 1, depth=s.depth, width=s.width, hidden=s.hidden),
        ]

    def update_averages(self) -> None:
        for network, average in self.averages:
            with torch.no_grad():
                torch._foreach_lerp_(list(average.parameters()), list(network.parameters()), 0.01)


class APS(Method):
    """APS (arXiv 2306.02854): two views of a quarter of their patches; the heads of the recipe; at 224 px momentum."""

    def __init__(self, config: Config):
        super().__init__(config)
        vit = backbone(config)
        vit.patch_embed.requires_grad_(not config.frozen_patch_embed)
        vit.pos_embed.requires_grad_(config.position_embedding == "learned")
        self.network = QueryNetwork(
            vit, hidden=config.head_hidden, out=config.head_out, seed=0,
            projector_layers=config.projector_layers, predictor_layers=config.predictor_layers,
        )  # fmt: skip
        if config.ema is not None:
            self.key_network = self.network.key_network()
            self.averages = ((self.network.encoder, self.key_network.encoder),)
            self.averages += ((self.network.projector, self.key_network.projector),)

    def inputs(self, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        index = torch.rand(2, batch, self.patches, device=device).argsort(2)[:, :, : self.keep]
        return torch.randn(2, batch, self.keep, self.sizes.pixels, device=device), index

    def forward(self, patches: Tensor, index: Tensor) -> Tensor:
        queries, keys, _ = self.network(patches, index)
        if self.averages:
            with torch.no_grad():
                keys = self.key_network(patches, index)
        return contrastive_loss(queries, keys, self.config.temperature)[0]

    def parts(self, batch: int) -> list[Part]:
        s, views = self.sizes, {"views": 2, "patches": self.keep}
        projector, predictor = (4 * sum(i * o for i, o in pairwise(head)) for head in (s.projector, s.predictor))
        found = self.encoder_parts(3, **views, embedding=1 + s.learned_embedding)
        found += [Part("heads", projector + predictor, 3), Part("loss", 4 * batch * s.predictor[-1], 2)]
        if s.momentum:
            found += [*self.encoder_parts(1, **views, embedding=1), Part("heads", projector, 1)]
        return found


class MoCo(APS):
    """MoCo v3 (arXiv 2104.02057): two whole views, momentum encoder. The recipe's heads are its own at 224 px; at
    32 px, where it names none, they are those of APS."""

    def __init__(self, config: Config):
        super().__init__(dataclasses.replace(config, keep_ratio=1.0, groups=1, ema=0.99))


class MAE(Method):
    """MAE (arXiv 2111.06377): one view; a quarter of its patches is encoded; a decoder of 8 blocks of width 512 on all
    tokens predicts the pixels of the others, normalised by patch."""

    def __init__(self, config: Config):
        super().__init__(dataclasses.replace(config, keep_ratio=0.25))
        self.depth, self.width, heads = self.decoder()
        self.encoder = backbone(config)
        self.enter = nn.Linear(self.sizes.width, self.width)
        self.mask_token = nn.Parameter(torch.zeros(self.width))
        self.positions = nn.Parameter(sincos_position_embedding(self.grid, self.width), requires_grad=False)
        self.blocks = nn.Sequential(*(Block(self.width, heads, qkv_bias=True) for _ in range(self.depth)))
        self.norm = nn.LayerNorm(self.width)
        self.leave = nn.Linear(self.width, self.sizes.pixels)

    def decoder(self) -> tuple[int, int, int]:
        """Blocks, width, attention heads."""
        return 8, 512, 16

    def inputs(self, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        index = torch.rand(batch, self.patches, device=device).argsort(1)[:, : self.keep]
        return torch.randn(batch, self.patches, self.sizes.pixels, device=device), index

    def forward(self, patches: Tensor, index: Tensor) -> Tensor:
        vit = self.encoder
        visible = patches.gather(1, index.unsqueeze(2).expand(-1, -1, patches.shape[2]))
        seen = self.enter(encode(vit, visible, F.embedding(index, vit.pos_embed[0, 1:])))
        first, seen = seen.split([1, self.keep], 1)
        tokens = self.mask_token.to(seen.dtype).expand(*patches.shape[:2], -1)
        tokens = tokens.scatter(1, index.unsqueeze(2).expand_as(seen), seen) + self.positions.to(seen.dtype)
        predicted = self.leave(self.norm(self.blocks(torch.cat([first, tokens], 1)))[:, 1:])
        target = (patches - patches.mean(2, keepdim=True)) / (patches.var(2, keepdim=True) + 1e-6).sqrt()
        hidden = torch.ones_like(patches[:, :, 0]).scatter(1, index, 0)
        return ((predicted - target).square().mean(2) * hidden).sum() / hidden.sum()

    def parts(self, batch: int) -> list[Part]:
        s, tokens, width = self.sizes, self.patches + 1, self.width
        return [
            *self.encoder_parts(3, views=1, patches=self.keep),
            Part("heads", 2 * width * ((self.keep + 1) * s.width + self.patches * s.pixels), 3),
            *blocks(3, views=1, tokens=tokens, depth=self.depth, width=width, hidden=4 * width),
        ]


class MAE4(MAE):
    """MAE with a decoder of 4 blocks as wide as the encoder: not that of its paper, but what gives APS's row of it."""

    def decoder(self) -> tuple[int, int, int]:
        return 4, self.sizes.width, self.sizes.heads


class SimMIM(Method):
    """SimMIM (arXiv 2111.09886): one view, all tokens encoded, 60 % of them (in squares of 2 x 2) as a mask token; one
    linear layer predicts their pixels. With the absolute positions of the common backbone."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.encoder = backbone(config)
        self.mask_token = nn.Parameter(torch.zeros(self.sizes.width))
        self.head = nn.Linear(self.sizes.width, self.sizes.pixels)

    def inputs(self, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        squares = torch.rand(batch, self.patches // 4, device=device).argsort(1) < 0.6 * (self.patches // 4)
        squares = squares.unflatten(1, (self.grid[0] // 2, self.grid[1] // 2))
        masks = squares.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
        return torch.randn(batch, self.patches, self.sizes.pixels, device=device), masks

    def forward(self, patches: Tensor, masks: Tensor) -> Tensor:
        tokens = encode(self.encoder, patches, self.encoder.pos_embed[0, 1:], (masks, self.mask_token))
        return ((self.head(tokens[:, 1:]) - patches).abs().mean(2) * masks).sum() / masks.sum()

    def parts(self, batch: int) -> list[Part]:
        s = self.sizes
        return [
            *self.encoder_parts(3, views=1, patches=self.patches),
            Part("heads", 2 * self.patches * s.width * s.pixels, 3),
        ]


class Prototypes(nn.Module):
    """iBOT's head, for class and patch tokens alike: three layers to a point on a sphere, its cosines with 8,192."""

    def __init__(self, width: int, widths: tuple[int, ...]):
        super().__init__()
        hidden, _, bottleneck, out = widths
        layers = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden, bottleneck))
        self.prototypes = nn.Parameter(torch.randn(out, bottleneck))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(F.normalize(self.mlp(tokens), dim=-1), F.normalize(self.prototypes, dim=1))


class IBOT(Method):
    """iBOT (arXiv 2111.07832): student and momentum teacher; two global views, in half of which 10 to 50 % of the
    patches are masked for the student; ten local views of 96 of 224 px for the student alone.

    The class token of every student view predicts that of the teacher's other global views; masked patches predict the
    teacher's at their place. All tokens of global views pass the head, as in the paper's pseudo-code; of local ones the
    class token. The masks are not block-wise, which changes no cost.
    """

    WIDTHS = 2048, 2048, 256, 8192
    LOCALS = 10

    def __init__(self, config: Config):
        super().__init__(config)
        side = round(96 / 224 * self.grid[0])
        self.local_grid = side, side
        self.encoder, self.head = backbone(config), Prototypes(self.sizes.width, self.WIDTHS)
        self.mask_token = nn.Parameter(torch.zeros(self.sizes.width))
        self.teacher, self.teacher_head = (copy.deepcopy(x).requires_grad_(False) for x in (self.encoder, self.head))
        self.averages = ((self.encoder, self.teacher), (self.head, self.teacher_head))
        self.register_buffer("centre", torch.zeros(2, self.WIDTHS[-1]))  # of class tokens, of patches

    def inputs(self, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        local, pixels = self.local_grid[0] * self.local_grid[1], self.sizes.pixels
        ratio = (0.1 + 0.4 * torch.rand(2, batch, 1, device=device)) * (torch.rand(2, batch, 1, device=device) < 0.5)
        masks = torch.rand(2, batch, self.patches, device=device) < ratio
        whole = torch.randn(2, batch, self.patches, pixels, device=device)
        return whole, torch.randn(self.LOCALS, batch, local, pixels, device=device), masks

    def forward(self, whole: Tensor, local: Tensor, masks: Tensor) -> Tensor:
        batch, positions = whole.shape[1], self.encoder.pos_embed[0, 1:]
        square = positions.T.unflatten(1, self.grid).unsqueeze(0)
        small = F.interpolate(square, self.local_grid, mode="bicubic")[0].flatten(1).T
        whole, local, masks = whole.flatten(0, 1), local.flatten(0, 1), masks.flatten(0, 1)
        with torch.no_grad():
            teacher = self.teacher_head(encode(self.teacher, whole, self.teacher.pos_embed[0, 1:])).float()
            first, rest = teacher[:, :1], teacher[:, 1:]
            mean = torch.stack([first.mean((0, 1)), rest.mean((0, 1))])
            targets = torch.cat([first - self.centre[0], rest - self.centre[1]], 1).div_(0.04).softmax(2)
            self.centre.lerp_(mean, 0.1)
        student = self.head(encode(self.encoder, whole, positions, (masks, self.mask_token)))
        student = F.log_softmax(student / 0.1, 2)
        patches = -(targets[:, 1:] * student[:, 1:]).sum(2)
        loss = ((patches * masks).sum(1) / masks.sum(1).clamp(min=1)).mean()
        local = F.log_softmax(self.head(encode(self.encoder, local, small)[:, 0]) / 0.1, 1)
        views = torch.cat([student[:, 0], local]).unflatten(0, (-1, batch))
        for number, target in enumerate(targets[:, 0].unflatten(0, (2, batch))):
            others = torch.cat([views[:number], views[number + 1 :]])
            loss = loss - (target * others).sum(2).mean() / 2
        return loss

    def parts(self, batch: int) -> list[Part]:
        s, tokens = self.sizes, 2 * (self.patches + 1)
        head = 2 * sum(i * o for i, o in pairwise((s.width, *self.WIDTHS)))
        local = self.local_grid[0] * self.local_grid[1]
        return [
            *self.encoder_parts(3, views=2, patches=self.patches),
            *self.encoder_parts(3, views=self.LOCALS, patches=local),
            *self.encoder_parts(1, views=2, patches=self.patches, embedding=1),
            Part("heads", head * (tokens + self.LOCALS), 3),
            Part("heads", head * tokens, 1),
        ]


METHODS = {"APS": APS, "MoCo v3": MoCo, "MAE": MAE, "MAE, 4 x D": MAE4, "SimMIM": SimMIM, "iBOT": IBOT}
