"""The parameters of a network as parts of one tensor: an update is then a few operations on all of them at once."""

import copy
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from kernels import unit_norms

ALIGNMENT = 64  # elements; what lies between two parameters stays 0


class FlatParameters:
    """Parameters, and their gradients, one behind the other; the parameters of a unit (``clip_units``) are neighbours.

    ``values`` and ``gradient`` are float32 [n]; of a network that is not trained, ``gradient`` is [0]. The parameters
    of the modules become views of ``values`` and keep their shapes; unit i goes from ``bounds[i]`` to
    ``bounds[i + 1]``.

    Of a network that FSDP2 has sharded, each rank holds the parts that are its own. FSDP keeps the storage of the
    parameters, so ``values`` is then a copy, which ``publish`` writes back.

    For products in bfloat16, ``working`` gives a network with weights in that type; ``copies``, bfloat16 [n], are then
    what its weights are views of, and the gradients are its own.
    """

    def __init__(self, units: list[list[nn.Parameter]]):
        self.parameters = [parameter for unit in units for parameter in unit]
        self.sharded = isinstance(self.parameters[0], DTensor)
        self._places, self.bounds = _layout([[_own(parameter).shape for parameter in unit] for unit in units])
        self._whole_places, whole_bounds = _layout([[parameter.shape for parameter in unit] for unit in units])
        self.whole_size = whole_bounds[-1]
        self.values = torch.zeros(self.bounds[-1], device=_own(self.parameters[0]).device)
        learned = any(parameter.requires_grad for parameter in self.parameters)
        self.gradient = torch.zeros_like(self.values) if learned else self.values.new_zeros(0)
        self._values = _views(self.values, self._places)
        self._gradients = _views(self.gradient, self._places) if learned else []
        self.copies = self.values.new_zeros(0, dtype=torch.bfloat16)
        self._running = self.parameters  # those of the network that runs
        self._fixed: dict[Tensor, Tensor] = {}  # further copies, of parameters that nothing changes but a checkpoint
        self.read()
        if not self.sharded:
            for parameter, view in zip(self.parameters, self._values, strict=True):
                parameter.data = view

    def working(self, network: nn.Module) -> nn.Module:
        """A twin of ``network``, whose parameters these are, with weights and biases of linear and convolution layers
        in bfloat16, as autocast casts them; all other parameters are those of ``network`` itself. Not for shards."""
        self.copies = torch.zeros_like(self.values, dtype=torch.bfloat16)
        views = dict(zip(self.parameters, _views(self.copies, self._places), strict=True))
        twins = {parameter: parameter for parameter in network.parameters()}
        for module in network.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                for parameter in module.parameters(recurse=False):
                    if parameter not in views:
                        views[parameter] = self._fixed[parameter] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    twins[parameter] = nn.Parameter(views[parameter], requires_grad=parameter.requires_grad)
        self._running = [twins[parameter] for parameter in self.parameters]
        self.read()
        return copy.deepcopy(network, {id(parameter): twin for parameter, twin in twins.items()})

    @torch.no_grad()
    def read(self) -> None:
        """Copies the parameters to ``values``, and these to what is made of them."""
        torch._foreach_copy_(self._values, [_own(parameter) for parameter in self.parameters])
        self.copies.copy_(self.values[: len(self.copies)])
        for parameter, fixed in self._fixed.items():
            fixed.copy_(parameter)

    @torch.no_grad()
    def publish(self) -> None:
        """Copies ``values`` to the parameters, where these are no views of it."""
        if self.sharded:
            torch._foreach_copy_([_own(parameter) for parameter in self.parameters], self._values)

    def collect(self, *, add: bool = False) -> Tensor:
        """Moves the gradients of the network that runs into ``gradient``, which is returned; ``add``: adds them to it,
        without those of parameters that have none."""
        # A call for each type is a few kernels on a GPU. Only bfloat16 is added to float32 tensor by tensor (torch
        # 2.14): cast before, it would be few kernels too, but 18 bytes a parameter instead of 10.
        found: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter, place in zip(self._running, self._gradients, strict=True):
            if add and parameter.grad is None:
                continue
            places, gradients = found.setdefault(parameter.dtype, ([], []))
            places.append(place)
            gradients.append(_own(parameter.grad))
            parameter.grad = None
        for places, gradients in found.values():
            (torch._foreach_add_ if add else torch._foreach_copy_)(places, gradients)
        return self.gradient

    def forget(self) -> None:
        """Lets the gradients of the network that runs go."""
        for parameter in self._running:
            parameter.grad = None

    def norms(self, *flats: Tensor) -> Tensor:
        """L2 norms of each unit's part, over all ranks, of one or two tensors like ``values``: [1 or 2,units]."""
        norms = unit_norms(flats, bounds=self.bounds)
        if self.sharded:
            squares = norms.square()
            dist.all_reduce(squares)
            norms = squares.sqrt()
        return norms

    @torch.no_grad()
    def whole(self, flat: Tensor, *, keep: bool = True) -> Tensor:
        """A tensor like ``values`` as one process alone has it: [whole_size]. All ranks have to call it; those that do
        not ``keep`` it get nothing of it."""
        if not self.sharded:
            return flat
        result = torch.zeros(self.whole_size, device="cpu" if keep else "meta")
        for parameter, part, view in zip(
            self.parameters, _views(flat, self._places), _views(result, self._whole_places), strict=True
        ):
            view.copy_(
                DTensor.from_local(
                    part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
                ).full_tensor()
            )
        return result

    @torch.no_grad()
    def own(self, whole: Tensor) -> Tensor:
        """A copy of this rank's part of what ``whole`` has returned, on the device of ``values``."""
        whole = whole.to(self.values.device, copy=True)
        if not self.sharded:
            return whole
        result = torch.zeros_like(self.values)
        for parameter, part, view in zip(
            self.parameters, _views(result, self._places), _views(whole, self._whole_places), strict=True
        ):
            part.copy_(
                distribute_tensor(view, parameter.device_mesh, parameter.placements, src_data_rank=None)._local_tensor
            )
        return result


def _own(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, which is all of it where nothing is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


def _layout(units: list[list[torch.Size]]) -> tuple[list[tuple[int, torch.Size]], list[int]]:
    """(start, shape) of each parameter, and where the units end, from 0."""
    places, bounds, end = [], [0], 0
    for unit in units:
        for shape in unit:
            places.append((end, shape))
            end += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        bounds.append(end)
    return places, bounds


def _views(flat: Tensor, places: list[tuple[int, torch.Size]]) -> list[Tensor]:
    return [flat[start : start + math.prod(shape)].view(shape) for start, shape in places]
