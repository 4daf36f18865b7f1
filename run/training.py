"""The optimizer step: what is trained, and one step of it on one group of patches of a batch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from kernels import gather_patches, sample_views
from model import AdaptiveClip, FlatParameters, QueryNetwork, clip_units, contrastive_loss, encode
from pipeline import Batch

from .recipes import Config, learning_rate, momentum_coefficient
from .session import new_encoder, plan_patches


class Training:
    """The networks of a config on one device, their optimizer and clip.

    On a GPU the networks are compiled, which takes the first step a minute and more, unless ``compiled`` is False.
    """

    def __init__(self, config: Config, device: torch.device, *, ranks: int = 1, compiled: bool | None = None):
        self.config, self.device = config, device
        self.patch, self.grid, self.keep = plan_patches(config)
        self.on_gpu = device.type == "cuda"
        self.network = QueryNetwork(
            new_encoder(config), hidden=config.head_hidden, out=config.head_out, seed=config.seed,
            projector_layers=config.projector_layers, predictor_layers=config.predictor_layers,
        ).to(device)  # fmt: skip
        self.key_network = self.network.key_network() if config.ema is not None else None
        units = clip_units(self.network)
        self.flat = FlatParameters([[self.network.get_parameter(name) for name in unit] for unit in units])
        if self.key_network is not None:  # all units but the predictor, which is the last
            shared = [[self.key_network.get_parameter(name) for name in unit] for unit in units[:-1]]
            self.key_flat = FlatParameters(shared)
        everything = torch.nn.Parameter(self.flat.values)
        everything.grad = self.flat.gradient
        self.optimizer = torch.optim.AdamW(
            [everything], lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.clip = None
        if config.clip != "off":
            self.clip = AdaptiveClip(
                self.flat, momentum=config.clip_momentum, alpha=config.clip_alpha, variant=config.clip
            )
        # What a step calls; the networks themselves are what is saved and exported.
        self.query, self.key = self.network, self.key_network
        compiled = self.on_gpu if compiled is None else compiled
        if compiled and ranks == 1:
            self.query = torch.compile(self.network, dynamic=False)
            self.key = self.key_network and torch.compile(self.key_network, dynamic=False)
        elif compiled:  # the heads talk to other ranks
            for network in filter(None, (self.network, self.key_network)):
                network.encode = torch.compile(encode, dynamic=False)
        if ranks > 1:
            self.query = DistributedDataParallel(self.network, gradient_as_bucket_view=True)

    def parts(self) -> dict[str, Any]:
        """What a checkpoint has to hold, by name."""
        return {name: getattr(self, name) for name in ("network", "key_network", "optimizer", "clip")}

    def sample(self, batch: Batch, epoch: int) -> Tensor:
        """Patch numbers of both views for all groups of a batch: int32 [2,B,R,K]."""
        config = self.config
        return torch.stack(sample_views(
            batch.boxes, batch.flips, batch.sample, grid=self.grid, keep=self.keep, groups=config.groups,
            power=config.power, seed=config.seed, epoch=epoch,
        ))  # fmt: skip

    def step(self, crops: tuple[Tensor, Tensor], chosen: Tensor, epoch: float) -> tuple[Tensor, Tensor, Tensor]:
        """One optimizer step on the patches ``chosen`` (int32 [2,B,K]) of the crops (uint8 [B,H,W,3] each).

        ``epoch``: passes over the images so far, fractions included, as the schedules count. Returns the loss, the mean
        cosine similarity of positive pairs, and whether the gradient was finite: where it was not, nothing is changed,
        on all ranks, which have the same gradient. All three are scalars on the device; nothing waits for it.
        """
        config = self.config
        self.optimizer.param_groups[0]["lr"] = learning_rate(config, epoch)
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        patches = gather_patches(crops, chosen, patch=self.patch, mean=config.mean, std=config.std, dtype=dtype)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            queries, projections = self.query(patches, chosen)
            with torch.no_grad():
                keys = self.key(patches, chosen) if self.key is not None else projections
            loss, similarity = contrastive_loss(queries, keys, config.temperature)
        loss.backward()
        finite = self.update(epoch)
        self.network.zero_grad(set_to_none=True)
        return loss.detach(), similarity, finite

    @torch.no_grad()
    def update(self, epoch: float) -> Tensor:
        """Clip, AdamW and momentum encoder, from the gradients of the parameters."""
        gradient = self.flat.collect()
        norms = self.flat.norms(gradient)
        finite = norms.isfinite().all()
        gradient.masked_fill_(~finite, 0)
        if self.clip is not None:
            self.clip(gradient, norms, finite)
        self.optimizer.found_inf = 1 - finite.float()  # at 1, the fused AdamW leaves everything as it is
        self.optimizer.step()
        if self.key_network is not None:
            keys = self.key_flat.values
            keys.lerp_(self.flat.values[: len(keys)], finite * (1 - momentum_coefficient(self.config, epoch)))
        return finite
