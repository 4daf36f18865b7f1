"""Forms that take a GPU less time, against those in whose place they are put."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from timm.layers import LayerNorm, RmsNorm
from timm.models.vision_transformer import Block
from torch import nn

from model import create_encoder, encode, faster, timm_arguments
from model.faster import Chain, ClassAttention, ShortGelu
from model.key_mlp import KeyMlp


def network(name="vit_tiny_patch16_224", *, size=32, patch=8, depth=3, keep=None, **more):
    """An encoder in float64 with weights of which none is 0, and patches with their numbers."""
    arguments = timm_arguments(image_size=size, patch_size=patch, depth=depth) | more
    vit = create_encoder(name, sincos=False, frozen_patch_embed=False, seed=0, **arguments).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    count = vit.patch_embed.num_patches
    index = torch.randperm(count, generator=generator)[: keep or count // 2].expand(3, -1)
    pixels = vit.patch_embed.proj.weight[0].numel()
    return vit, torch.randn(*index.shape, pixels, generator=generator, dtype=torch.float64), index


def put_in(vit):
    """A copy as a step runs it, as that of a network which learns."""
    other = copy.deepcopy(vit)
    faster.put_in(SimpleNamespace(encoder=other), None)
    return other


def found(vit, patches, index):
    """Features and gradients of all that is learned, and of the patches."""
    patches = patches.requires_grad_()
    features = encode(vit, patches, index)
    weights = torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view_as(features)
    gradients = torch.autograd.grad((features * weights).sum(), [patches, *vit.parameters()], allow_unused=True)
    return features, *gradients


def kinds(vit):
    return {type(module) for module in vit.modules()}


WIDE_HEADS = {"embed_dim": 96, "num_heads": 1}
NO_BIAS = {"qkv_bias": False, "proj_bias": False}
CASES = {
    "plain": ({}, {Chain, ClassAttention}),
    "one block": ({"depth": 1}, {ClassAttention}),
    "two blocks": ({"depth": 2}, {Chain, ClassAttention}),
    "one patch": ({"keep": 1}, {Chain, ClassAttention}),
    "more tokens than a kernel takes": ({"size": 64, "patch": 4, "keep": 200}, {Chain, ClassAttention}),
    "heads that no kernel takes": (WIDE_HEADS, {Chain, ClassAttention}),
    "mean of the tokens": ({"global_pool": "avg"}, {Chain}),
    "no biases": (NO_BIAS, set()),
    "layer scale": ({"init_values": 0.5}, {ClassAttention}),
    "norms of queries and keys": ({"qk_norm": True}, set()),
    "norms of another type": ({"norm_layer": RmsNorm}, {ClassAttention}),
    "norms without weights": ({"norm_layer": functools.partial(LayerNorm, affine=False)}, {ClassAttention}),
    "norm in the MLP": ({"scale_mlp_norm": True}, {ClassAttention}),
    "registers": ({"name": "vit_small_patch14_reg4_dinov2", "size": 56, "patch": 0, "embed_dim": 64, "num_heads": 2},
                  {ClassAttention}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_features_and_gradients_are_those_of_the_network(case):
    """But for GELU, within its distance from torch's; and forms are where they fit, and nowhere else."""
    arguments, wanted = CASES[case]
    vit, *given = network(**{"embed_dim": 48, "num_heads": 3} | arguments)
    other = put_in(vit)
    assert kinds(other) & {Chain, ClassAttention} == wanted and ShortGelu in kinds(other)
    names = [name for name, _ in vit.named_parameters()]
    for what, mine, exact in zip(
        ["features", "patches", *names], found(other, *given), found(vit, *given), strict=True
    ):
        if exact is None:
            assert mine is None, what
            continue
        distance = (mine - exact).norm() / max(exact.norm(), 1e-3)
        assert distance < 3e-6, (what, distance.item())


def test_what_drops_at_random_keeps_its_blocks():
    """Nor do blocks whose activations are computed again each by itself."""
    for more in ({"drop_path_rate": 0.2}, {"proj_drop_rate": 0.2}, {"attn_drop_rate": 0.2}):
        assert Chain not in kinds(put_in(network(**more)[0])), more
    vit, *given = network()
    vit.set_grad_checkpointing()
    other = put_in(vit.train())
    assert Block in map(type, other.blocks) and Chain not in kinds(other)
    torch.testing.assert_close(found(other, *given), found(vit, *given), rtol=1e-5, atol=1e-5)


def test_short_gelu_is_as_near_as_torchs():
    """To float64, the derivative too."""
    x = torch.linspace(-12, 12, 100_001, dtype=torch.float64, requires_grad=True)
    short = x.detach().float().requires_grad_()
    exact, near = nn.functional.gelu(x), ShortGelu()(short)
    torch.testing.assert_close(near.double(), exact, rtol=0, atol=1e-6)
    exact.sum().backward()
    near.sum().backward()
    torch.testing.assert_close(short.grad.double(), x.grad, rtol=0, atol=1e-6)
    assert ShortGelu not in kinds(put_in(network(act_layer=functools.partial(nn.GELU, "tanh"))[0]))


def test_keys_have_gelu_in_their_products_and_no_chain():
    query, key = (SimpleNamespace(encoder=network()[0]) for _ in range(2))
    faster.put_in(query, key)
    assert {KeyMlp, ClassAttention} <= kinds(key.encoder) and Chain not in kinds(key.encoder)
    assert KeyMlp not in kinds(query.encoder)
