"""Parts of a network in forms that take a GPU less time, where that was measured: ``bench/LOG.md``, "On an H200".

They compute what they stand for, but for rounding (``key_mlp`` alone: another form of GELU), with the same parameters.
What a form does not fit keeps torch's. They are put into the networks that a step runs, never into those that are saved
and exported.
"""

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from kernels import add_norm, class_attention
from kernels.class_token import takes
from kernels.reference import wide

from .encoder import PackedAttention, active_parts, by_class_token
from .key_mlp import gelu_in_products, is_plain
from .products import FastLinear


class ForeignBias(nn.Linear):
    """A linear layer, in whose place it is put, whose bias gets its gradient from the operation that comes next."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias.detach())


def _below(x: Tensor) -> tuple[Tensor, Tensor]:
    """The normal distribution up to x, and exp(-x^2 / 2), in 18 instead of 36 instructions of an H100 a number.

    erf by Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most: its exponential is that of the density. The reciprocal
    is a root, as Inductor makes one instruction of that and four of a division.
    """
    density = torch.exp2(x * x * -0.7213475204444817)
    t = 1 + 0.3275911 * 0.7071067811865476 * x.abs()
    t = torch.rsqrt(t * t)
    tail = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    tail = 0.5 * tail * t * density
    return torch.where(x >= 0, 1 - tail, tail), density


def slope(x: Tensor) -> Tensor:
    """The derivative of GELU, in float32 or wider."""
    below, density = _below(x)
    return below + x * density * 0.3989422804014327


class ShortGeluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        exact = wide(x)
        return (exact * _below(exact)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (wide(gradient) * slope(wide(x))).to(x.dtype)


class ShortGelu(nn.GELU):
    """GELU, in the place of torch's, from which it differs in the last bits of float32."""

    def forward(self, x: Tensor) -> Tensor:
        return ShortGeluFunction.apply(x)


class ClassAttention(PackedAttention):
    """``PackedAttention`` with a bias, in whose place it is put in a last block, where the class token alone asks."""

    def of_first(self, x: Tensor, ask: Tensor, answer: Tensor, ask_bias: Tensor, answer_bias: Tensor) -> Tensor:
        if not takes(x.shape[1], self.head_dim):
            return super().of_first(x, ask, answer, ask_bias, answer_bias)
        query, others = F.linear(x[:, :1], ask, ask_bias), F.linear(x, answer, answer_bias.detach())
        return class_attention(query, others, answer_bias, heads=self.num_heads)


class Chain(nn.Sequential):
    """Blocks one after the other, each sum of the stream and a branch made together with the norm that reads it."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = list(self)
        normed = blocks[0].norm1(x)
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            x, normed = _add_norm(x, block.attn(normed), block.attn.proj, block.norm2)
            branch = block.mlp(normed)
            if following is not None:
                x, normed = _add_norm(x, branch, block.mlp.fc2, following.norm1)
        return x + branch


def _add_norm(stream: Tensor, branch: Tensor, product: nn.Linear, norm: LayerNorm) -> tuple[Tensor, Tensor]:
    return add_norm(stream, branch, norm.weight, norm.bias, eps=norm.eps, bias=product.bias)


def _can_be_chained(block: nn.Module) -> bool:
    """Two branches that end in a product with a bias, each behind a norm with weights, and nothing else."""
    if type(block) is not Block or active_parts(block) != {"norm1", "attn", "norm2", "mlp"}:
        return False
    norms, attention, mlp = (block.norm1, block.norm2), block.attn, block.mlp
    return (
        type(attention) is PackedAttention
        and is_plain(mlp)
        and all(type(norm) is LayerNorm for norm in norms)
        and all(part.bias is not None for part in (*norms, attention.proj, mlp.fc2))
    )


def _chain(vit: VisionTransformer) -> None:
    """Makes a ``Chain`` of all blocks but the last, which may be of another kind. With gradient checkpointing, which
    computes the activations of each block again by itself, they stay apart."""
    *blocks, last = vit.blocks
    if not blocks or vit.grad_checkpointing or not all(map(_can_be_chained, blocks)):
        return
    for block in blocks:
        block.attn.proj.__class__ = ForeignBias
    for block in blocks[:-1]:
        block.mlp.fc2.__class__ = ForeignBias
    vit.blocks = nn.Sequential(Chain(*blocks), last)


def fastest_products(network: nn.Module) -> None:
    """Puts ``FastLinear`` in the place of all linear layers with a bias. To be called last: other forms look for the
    layers that are replaced here."""
    for layer in network.modules():
        if type(layer) in (nn.Linear, ForeignBias) and layer.bias is not None:
            layer.foreign = isinstance(layer, ForeignBias)
            layer.__class__ = FastLinear


def pays(device: torch.device) -> bool:
    """Whether these forms save time on a device, as has been measured in bfloat16 on compute capability 9 alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def put_in(query: nn.Module, key: nn.Module | None) -> None:
    """Puts these forms into the network that learns and the one that gives keys, as they run in bfloat16."""
    if key is not None:
        gelu_in_products(key.encoder, torch.bfloat16)
    for vit in (network.encoder for network in (query, key) if network is not None):
        for module in vit.modules():
            if type(module) is nn.GELU and module.approximate == "none":
                module.__class__ = ShortGelu
        attention = vit.blocks[-1].attn
        if by_class_token(vit) and attention.qkv.bias is not None:
            attention.__class__ = ClassAttention
    _chain(query.encoder)
    for network in filter(None, (query, key)):
        fastest_products(network.encoder.blocks)
