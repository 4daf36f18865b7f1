"""Adaptive gradient clipping per transformer block (APS, Eq. 9 and 10)."""

import re

import torch
from torch import Tensor, nn


def clip_units(model: nn.Module) -> list[list[nn.Parameter]]:
    """The trainable parameters in the groups that are clipped together.

    One group for each transformer block, one for each further direct part of the encoder (embedding with its tokens
    and positions, final norm), one for each head.
    """
    units: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            block = re.search(r"encoder\.blocks\.\d+\.", name)
            if block:
                unit = block.group()
            elif re.search(r"encoder\.(patch_embed|cls_token|reg_token|pos_embed|norm_pre)", name):
                unit = "embedding"
            else:  # encoder.norm, projector, predictor
                unit = re.search(r"encoder\.\w+|projector|predictor", name).group()
            units.setdefault(unit, []).append(parameter)
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

    def __init__(self, units: list[list[nn.Parameter]], *, momentum: float, alpha: float, variant: str):
        self.units = units
        self.momentum = momentum
        self.alpha = alpha
        self.variant = variant
        self.average: list[list[Tensor]] = []  # per unit: tensors like its parameters, or one scalar

    @torch.no_grad()
    def __call__(self) -> None:
        gradients = [[parameter.grad for parameter in unit] for unit in self.units]
        measured = [[_norm(unit)] for unit in gradients] if self.variant == "norm" else gradients
        if not self.average:
            self.average = [[tensor.clone() for tensor in unit] for unit in measured]
            return
        for gradient, now, average in zip(gradients, measured, self.average, strict=True):
            previous = _norm(average)
            norm = _norm(gradient)
            scale = torch.where(norm > self.alpha * previous, previous / norm, 1.0)
            torch._foreach_lerp_(average, now, 1 - self.momentum)
            torch._foreach_mul_(gradient, scale)

    def state_dict(self) -> dict[str, list[list[Tensor]]]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, list[list[Tensor]]]) -> None:
        self.average = [
            [tensor.to(unit[0].device) for tensor in average]
            for unit, average in zip(self.units, state["average"], strict=bool(state["average"]))
        ]


def _norm(tensors: list[Tensor]) -> Tensor:
    """L2 norm of the concatenation."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
