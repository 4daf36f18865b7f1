"""Adaptive gradient clipping per transformer block (APS, Eq. 9 and 10)."""

import re

import torch
from torch import Tensor, nn

from .flat import FlatParameters


def clip_units(model: nn.Module) -> list[list[str]]:
    """The names of the trainable parameters in the groups that are clipped together.

    One group for each transformer block, one for each further direct part of the encoder (embedding with its tokens
    and positions, final norm), one for each head.
    """
    units: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            block = re.search(r"encoder\.blocks\.\d+\.", name)
            if block:
                unit = block.group()
            elif re.search(r"encoder\.(patch_embed|cls_token|reg_token|pos_embed|norm_pre)", name):
                unit = "embedding"
            else:  # encoder.norm, projector, predictor
                unit = re.search(r"encoder\.\w+|projector|predictor", name).group()
            units.setdefault(unit, []).append(name)
    return list(units.values())


class AdaptiveClip:
    """Holds each unit's gradient g near the moving average G of its own past.

    ::

        g <- g * |G_prev| / |g|     where |g| > alpha * |G_prev|
        G  = m * G_prev + (1 - m) * g_raw

    with the gradient before clipping in the average, so that a lasting change of scale gets through. G is a vector as
    in the paper (``variant="vector"``, one more copy of the gradient) or the average of norms (``"norm"``, one number a
    unit). The first step passes unchanged and sets G. Nothing is read back from the device.
    """

    def __init__(self, flat: FlatParameters, *, momentum: float, alpha: float, variant: str):
        self.flat = flat
        self.momentum = momentum
        self.alpha = alpha
        self.vector = variant == "vector"
        self.average = torch.zeros(len(flat.values) if self.vector else len(flat.units), device=flat.values.device)
        self.started = torch.zeros((), dtype=torch.bool, device=flat.values.device)

    def __call__(self, gradient: Tensor, norms: Tensor, finite: Tensor) -> None:
        """Clip ``gradient`` [n], whose units have the ``norms`` [units], in place.

        Where ``finite`` (a scalar on the device) is false, the gradient has to be 0 and G stays as it is.
        """
        previous = self.flat.norms(self.average) if self.vector else self.average
        scale = torch.where(self.started & (norms > self.alpha * previous), previous / norms, 1.0)
        weight = torch.where(self.started, 1 - self.momentum, 1.0) * finite
        self.average.lerp_(gradient if self.vector else norms.nan_to_num(), weight)
        self.started |= finite
        for unit, factor in zip(self.flat.units, scale.unbind(), strict=True):
            gradient[unit] *= factor

    def state_dict(self) -> dict[str, Tensor]:
        return {"average": self.average, "started": self.started}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.average.copy_(state["average"])
        self.started.copy_(state["started"])
