"""The momentum encoder: an exponential moving average of the trained weights."""

import torch
from torch import nn


@torch.no_grad()
def update_momentum(average: nn.Module, online: nn.Module, coefficient: float) -> None:
    """average <- coefficient * average + (1 - coefficient) * online, for every parameter of ``average``.

    ``online`` may have further parameters (the predictor); those that do not learn are equal already.
    """
    source = dict(online.named_parameters())
    pairs = [(target, source[name]) for name, target in average.named_parameters() if source[name].requires_grad]
    targets, sources = zip(*pairs, strict=True)
    torch._foreach_lerp_(targets, sources, 1 - coefficient)
