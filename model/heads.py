"""Projector and predictor, and the two networks of the method: the one that learns and the one that gives keys."""

import copy
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

from .encoder import encode


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduce of the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return _sum_over_ranks(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return _sum_over_ranks(gradient)


def _sum_over_ranks(x: Tensor) -> Tensor:
    """In functional form, which torch.compile keeps in the graph: torch 2.11 loses in-place ones of a backward pass."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", dist.group.WORLD))


EPS = 1e-5  # torch's own


class BatchNorm(nn.Module):
    """Batch normalisation of [V, B, D], each view by itself, over the batch of all ranks, on every device (torch's
    SyncBatchNorm refuses CPUs); the sums of all views go round at once.

    Without running statistics: the heads are thrown away after pretraining and never run outside of it.
    """

    def __init__(self, width: int, affine: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            rest = None, None, self.weight, self.bias, True, 0.0, EPS
            return torch.stack([F.batch_norm(view, *rest) for view in x])
        wide = x.float()
        sums = _SumOverRanks.apply(torch.stack([wide.sum(1, keepdim=True), wide.square().sum(1, keepdim=True)]))
        mean, square = sums / (x.shape[1] * dist.get_world_size())  # every rank holds the same number of samples
        scale = torch.rsqrt((square - mean.square()).clamp_min(0) + EPS)
        shift = -mean * scale
        if self.weight is not None:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        return torch.addcmul(shift, wide, scale).to(x.dtype)


def mlp(width: int, hidden: int, out: int, layers: int) -> nn.Sequential:
    """Linear layers without bias on [V, B, width], each followed by BN, ReLU in between, the last BN without affine
    parameters."""
    widths = [width, *[hidden] * (layers - 1), out]
    modules: list[nn.Module] = []
    for number, (i, o) in enumerate(pairwise(widths), 1):
        modules += [nn.Linear(i, o, bias=False), BatchNorm(o, affine=number < layers), nn.ReLU(inplace=True)]
    return nn.Sequential(*modules[:-1])


def spread(features: Tensor) -> Tensor:
    """How far normalised features [B, D] differ from image to image, over the batch of all ranks: sqrt(D) times their
    standard deviation, in the mean over the dimensions. 0 where all are the same (collapse), at most 1 (SimSiam, arXiv
    2011.10566, Fig. 2)."""
    rows = F.normalize(features.float(), dim=1)
    width = rows.shape[1]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows.std(0, correction=0).mean() * width**0.5
    own = rows.mean(0)  # every rank holds the same number of samples
    sums = torch.stack([rows.var(0, correction=0), own, own.square()])
    within, mean, square = _sum_over_ranks(sums) / dist.get_world_size()
    between = (square - mean.square()).clamp_min(0)
    return (within + between).sqrt().mean() * width**0.5


class KeyNetwork(nn.Module):
    """Encoder and projector."""

    def __init__(self, encoder: nn.Module, projector: nn.Module):
        super().__init__()
        self.encoder = encoder
        self.projector = projector

    def forward(self, patches: Tensor, index: Tensor) -> Any:
        """What ``heads`` makes of both views; ``patches`` [2, B, K, 3*P*P], ``index`` [2, B, K].

        The views share one pass through all layers; BN sees each view on its own.
        """
        return self.heads(encode(self.encoder, patches.flatten(0, 1), index.flatten(0, 1)))

    def features(self, patches: Tensor, index: Tensor) -> Tensor:
        """The encoder's features [b, D] of any views; ``patches`` [b, K, 3*P*P], ``index`` [b, K]."""
        return encode(self.encoder, patches, index).clone()  # FSDP's hook is on it, and warns of views

    def heads(self, features: Tensor) -> Tensor:
        """Projections [2, B, E] of features [2*B, D], of the first view and then of the second."""
        return self.projector(features.unflatten(0, (2, -1)))


class QueryNetwork(KeyNetwork):
    """Encoder, projector and predictor: the network that is trained."""

    def __init__(
        self, encoder: nn.Module, *, hidden: int, out: int, projector_layers: int, predictor_layers: int, seed: int
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(encoder, mlp(encoder.num_features, hidden, out, projector_layers))
            self.predictor = mlp(out, hidden, out, predictor_layers)

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and projections of both views, each [2, B, E], and the spread of the features (scalar)."""
        projections = super().heads(features)
        return self.predictor(projections), projections, spread(features.detach())

    def key_network(self) -> KeyNetwork:
        """A frozen copy of encoder and projector, for the momentum encoder."""
        return KeyNetwork(copy.deepcopy(self.encoder), copy.deepcopy(self.projector)).requires_grad_(False)
