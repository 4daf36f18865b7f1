"""Adaptive gradient clipping per transformer block (APS, Eq. 9 and 10)."""

import re

import torch
import torch.nn.functional as F
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
    unit). The first step passes unchanged and sets G. Nothing is read back from the device, and launches are few: all
    units are measured together.
    """

    def __init__(self, units: list[list[nn.Parameter]], *, momentum: float, alpha: float, variant: str):
        self.units = units
        self.momentum = momentum
        self.alpha = alpha
        self.variant = variant
        self.average: list[Tensor] = []  # tensors like the parameters, or one with a number for each unit
        # Row u: the places of unit u's parameters among all, padded with the place behind the last one.
        count, length = sum(map(len, units)), max(map(len, units))
        numbers = iter(range(count))
        rows = [[next(numbers) for _ in unit] + [count] * (length - len(unit)) for unit in units]
        self.members = torch.tensor(rows, device=units[0][0].device)

    @torch.no_grad()
    def __call__(self) -> None:
        gradients = [parameter.grad for unit in self.units for parameter in unit]
        norms = self._norms(gradients)
        measured = [norms] if self.variant == "norm" else gradients
        if not self.average:
            self.average = [tensor.clone() for tensor in measured]
            return
        previous = self.average[0].clone() if self.variant == "norm" else self._norms(self.average)
        scale = torch.where(norms > self.alpha * previous, previous / norms, 1.0)
        torch._foreach_lerp_(self.average, measured, 1 - self.momentum)
        for unit, factor in zip(self.units, scale.unbind(), strict=True):
            torch._foreach_mul_([parameter.grad for parameter in unit], factor)

    def _norms(self, tensors: list[Tensor]) -> Tensor:
        """L2 norm of each unit, [units], from tensors like the parameters."""
        squares = torch.stack(torch._foreach_norm(tensors)).square()
        return F.pad(squares, (0, 1))[self.members].sum(1).sqrt()

    def state_dict(self) -> dict[str, list[Tensor]]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        self.average = [tensor.to(self.members.device) for tensor in state["average"]]
