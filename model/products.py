"""Linear layers by the fastest products that give the bits of torch's: ``kernels/cublaslt.py``."""

import torch
from torch import Tensor, nn

from kernels.cublaslt import linear, linear_input, linear_weight


class _Linear(torch.autograd.Function):
    """x [...,i], weight [o,i] and bias [o] of one type: [...,o]."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        dx, dweight = linear_input(rows, weight).view_as(x), linear_weight(rows, x.flatten(0, -2))
        return dx, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None  # last, of what the products have read


class FastLinear(nn.Linear):
    """torch's, in whose place it is put, in the type of its weight; ``foreign``: as ``model.faster.ForeignBias``."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.detach() if self.foreign else self.bias
        return _Linear.apply(x.to(self.weight.dtype), self.weight, bias)
