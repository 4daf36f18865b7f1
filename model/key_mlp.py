"""The MLPs of the momentum network on a GPU: GELU at the end of their first product, not in a pass of its own.

cuBLASLt has GELU in its tanh form alone, off by 5e-4 at most. Keys differ by that (a cosine of .9997 to the exact ones
on an H200, at weights of the start, in bfloat16); what is trained and exported has torch's GELU. Accuracy with and
without, and the time that it takes off a step: ``bench/LOG.md``, ``key-gelu``.
"""

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from kernels.cublaslt import product

from .encoder import active_parts


@torch.library.custom_op("aps::linear_gelu", mutates_args=(), device_types="cpu")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU, in its tanh form, of x W^T + b: [r,o] from x [r,i], W [o,i], b [o], all of one type."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


@linear_gelu.register_kernel("cuda")
def _(x, weight, bias):
    return product("gelu", *x.shape, len(weight), x)(x, weight, bias)


@linear_gelu.register_fake
def _(x, weight, bias):
    return x.new_empty(len(x), len(weight))


class KeyMlp(Mlp):
    """timm's MLP, in whose place it is put, without gradient; ``kind``: the type of its products."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).to(self.kind)
        a = linear_gelu(rows, self.fc1.weight.to(self.kind), self.fc1.bias.to(self.kind))
        return self.fc2(a).unflatten(0, x.shape[:-1])


def is_plain(module: nn.Module) -> bool:
    """Whether it is timm's MLP, of two layers with a function between them and nothing else."""
    return type(module) is Mlp and active_parts(module) == {"fc1", "act", "fc2"}


def gelu_in_products(network: nn.Module, kind: torch.dtype) -> None:
    """Puts ``KeyMlp`` in the place of each plain MLP with torch's GELU and with a bias in its first layer."""
    for module in network.modules():
        if is_plain(module) and type(module.act) is nn.GELU and module.fc1.bias is not None:
            module.__class__, module.kind = KeyMlp, kind
