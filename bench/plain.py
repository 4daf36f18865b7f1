"""The plain form of the optimizer step, which the speed of train.py's is stated against.

What one writes from the paper without a thought for time: float32; every patch of a crop is embedded before the kept
ones are picked; one pass per view; timm's blocks as they are, nothing compiled; optimizer, clip and momentum encoder
parameter by parameter. The patches, the loss and the update are those of ``run.training.Training``.
"""

import copy
from itertools import pairwise

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import clip_units
from run.recipes import Config, learning_rate, momentum_coefficient
from run.training import Training, encoder_arguments, plan_patches


def head(*widths: int) -> nn.Sequential:
    modules = []
    for width, out in pairwise(widths):
        modules += [nn.Linear(width, out, bias=False), nn.BatchNorm1d(out, track_running_stats=False), nn.ReLU()]
    modules[-2:] = [nn.BatchNorm1d(out, affine=False, track_running_stats=False)]
    return nn.Sequential(*modules)


class Network(nn.Module):
    """Encoder, projector and predictor, with the names that ``model.QueryNetwork`` gives its parameters."""

    def __init__(self, config: Config):
        super().__init__()
        self.encoder = timm.create_model(config.model, **encoder_arguments(config))
        self.encoder.patch_embed.requires_grad_(not config.frozen_patch_embed)
        self.encoder.pos_embed.requires_grad_(config.position_embedding == "learned")
        hidden, out = config.head_hidden, config.head_out
        self.projector = head(self.encoder.embed_dim, *[hidden] * (config.projector_layers - 1), out)
        self.predictor = head(out, *[hidden] * (config.predictor_layers - 1), out)

    def project(self, image: Tensor, index: Tensor) -> Tensor:
        """Projections [B,E] of images [B,3,H,W] seen through the patches ``index``, int [B,K]."""
        vit = self.encoder
        tokens = vit._pos_embed(vit.patch_embed(image))
        first, patches = tokens.split([vit.num_prefix_tokens, vit.patch_embed.num_patches], 1)
        kept = patches.gather(1, index.long()[:, :, None].expand(-1, -1, patches.shape[2]))
        tokens = vit.norm(vit.blocks(torch.cat([first, kept], 1)))
        return self.projector(vit.forward_head(tokens, pre_logits=True))


class Plain:
    """``sample``, ``gather`` and ``step`` as those of ``Training``; what is gathered are the crops as they are."""

    half = False
    sample = Training.sample

    def __init__(self, config: Config, device: torch.device):
        self.config = config
        _, self.grid, self.keep = plan_patches(config)
        self.network = self.query = Network(config).to(device)
        self.key_network = copy.deepcopy(self.network).requires_grad_(False) if config.ema is not None else None
        self.optimizer = torch.optim.AdamW(
            (p for p in self.network.parameters() if p.requires_grad),
            lr=config.lr, betas=config.betas, weight_decay=config.weight_decay,
        )  # fmt: skip
        self.units = [[self.network.get_parameter(name) for name in unit] for unit in clip_units(self.network)]
        self.averages = {}
        self.mean, self.std = (torch.tensor(x, device=device)[:, None, None] for x in (config.mean, config.std))

    def gather(self, crops: tuple[Tensor, Tensor], chosen: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        return [crops] * chosen.shape[2], chosen.permute(2, 0, 1, 3)

    def step(self, crops: tuple[Tensor, Tensor], chosen: Tensor, epoch: float) -> Tensor:
        config = self.config
        images = [(crop.permute(0, 3, 1, 2) / 255 - self.mean) / self.std for crop in crops]
        projections = [self.network.project(*view) for view in zip(images, chosen, strict=True)]
        queries = [self.network.predictor(projection) for projection in projections]
        with torch.no_grad():
            keys = projections
            if self.key_network is not None:
                keys = [self.key_network.project(*view) for view in zip(images, chosen, strict=True)]
        loss = 0
        for query, key in ((queries[0], keys[1]), (queries[1], keys[0])):
            similarity = F.normalize(query, dim=1) @ F.normalize(key.detach(), dim=1).T
            own = torch.arange(len(query), device=query.device)
            loss = loss + config.temperature * F.cross_entropy(similarity / config.temperature, own)
        self.optimizer.zero_grad()
        loss.backward()
        if config.clip != "off":
            for number, unit in enumerate(self.units):
                self.clip(number, [parameter.grad for parameter in unit])
        self.optimizer.param_groups[0]["lr"] = learning_rate(config, epoch)
        self.optimizer.step()
        if self.key_network is not None:
            momentum = momentum_coefficient(config, epoch)
            for key, parameter in zip(self.key_network.parameters(), self.network.parameters(), strict=True):
                key.mul_(momentum).add_(parameter.detach(), alpha=1 - momentum)
        return loss.detach()

    def clip(self, number: int, gradients: list[Tensor]) -> None:
        """Of one unit, in place (APS, Eq. 9 and 10)."""
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        measured = [gradient.clone() for gradient in gradients] if self.config.clip == "vector" else [norm]
        previous = self.averages.setdefault(number, measured)
        if previous is measured:
            return
        limit = torch.stack([average.norm() for average in previous]).norm()
        for average, value in zip(previous, measured, strict=True):
            average.mul_(self.config.clip_momentum).add_(value, alpha=1 - self.config.clip_momentum)
        if norm > self.config.clip_alpha * limit:
            for gradient in gradients:
                gradient.mul_(limit / norm)
