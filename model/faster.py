"""Parts of a network in forms that take a GPU less time, where that was measured: ``bench/LOG.md``, "On an H200".

They are put into the networks that a step runs, never into those that are saved and exported.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .key_mlp import gelu_in_products
from .products import FastLinear


class ForeignBias(nn.Linear):
    """A linear layer, in whose place it is put, whose bias gets its gradient from what comes behind."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias.detach())


def fastest_products(network: nn.Module) -> None:
    """In all linear layers with a bias; behind all else that looks for such layers."""
    for layer in network.modules():
        if type(layer) in (nn.Linear, ForeignBias) and layer.bias is not None:
            layer.foreign = isinstance(layer, ForeignBias)
            layer.__class__ = FastLinear


def pays(device: torch.device) -> bool:
    """Where it has been measured to, in bfloat16: on GPUs of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def put_in(query: nn.Module, key: nn.Module | None) -> None:
    """Into the network that learns and the one that gives keys, as they run in bfloat16."""
    if key is not None:
        gelu_in_products(key.encoder, torch.bfloat16)
    for network in filter(None, (query, key)):
        fastest_products(network.encoder.blocks)
