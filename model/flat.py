"""The parameters of a network as parts of one tensor: an update is then a few operations on all of them at once."""

import math

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # elements; what lies between two parameters stays 0


class FlatParameters:
    """Parameters, and their gradients, one behind the other; the parameters of a unit (``clip_units``) are neighbours.

    ``values`` and ``gradient`` are float32 [n]. The parameters of the modules become views of ``values`` and keep their
    shapes; ``units`` holds the slice of each unit.
    """

    def __init__(self, units: list[list[nn.Parameter]]):
        self.parameters = [parameter for unit in units for parameter in unit]
        self._places, self.units, end = [], [], 0
        for unit in units:
            start = end
            for parameter in unit:
                self._places.append((end, parameter.shape))
                end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            self.units.append(slice(start, end))
        self.values = torch.zeros(end, device=self.parameters[0].device)
        self.gradient = torch.zeros_like(self.values)
        self._gradients = self._views(self.gradient)
        for parameter, view in zip(self.parameters, self._views(self.values), strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[start : start + math.prod(shape)].view(shape) for start, shape in self._places]

    def collect(self) -> Tensor:
        """``gradient``, from the gradients of the parameters."""
        torch._foreach_copy_(self._gradients, [parameter.grad for parameter in self.parameters])
        return self.gradient

    def norms(self, flat: Tensor) -> Tensor:
        """L2 norm of each unit's part of a tensor like ``values``: [units]."""
        return torch.stack(torch._foreach_norm([flat[unit] for unit in self.units]))
