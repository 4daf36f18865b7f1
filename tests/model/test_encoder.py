import copy
import math

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention, Block
from torch.utils.flop_counter import FlopCounterMode

from model import by_class_token, create_encoder, encode, patch_grid, timm_arguments
from model.encoder import PackedAttention, pack, rows_by_product, sincos_position_embedding


def encoder(name="vit_tiny_patch16_224", image_size=32, patch_size=8, depth=2, sincos=True, frozen=False, seed=0):
    arguments = timm_arguments(image_size=image_size, patch_size=patch_size, depth=depth)
    return create_encoder(name, sincos=sincos, frozen_patch_embed=frozen, seed=seed, **arguments)


def patches_of(images, patch):
    """[B, N, 3*P*P] of [B, 3, H, W], in the order of a convolution's weights."""
    return F.unfold(images, patch, stride=patch).transpose(1, 2)


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch14_reg4_dinov2",  # registers without positions, layer scale
        "deit3_small_patch16_224",  # class token without position
        "vit_base_patch16_clip_224",  # norm before the blocks, no patch bias
        "vit_base_patch16_siglip_224",  # no class token, attention pooling
        "vit_so150m_patch16_reg4_gap_256",  # mean of all tokens
    ],
)
def test_all_patches_in_any_order_give_what_timm_gives(name):
    side = 56 if "patch14" in name else 64
    vit = encoder(name, image_size=side, patch_size=0, sincos=False).eval()
    vit.reset_classifier(7)  # which encode() leaves aside
    images = torch.randn(2, 3, side, side)
    patch = vit.patch_embed.patch_size[0]
    order = torch.stack([torch.randperm(vit.patch_embed.num_patches) for _ in images])
    patches = patches_of(images, patch).gather(1, order[..., None].expand(-1, -1, 3 * patch * patch))
    expected = vit.forward_head(vit.forward_features(images), pre_logits=True)
    torch.testing.assert_close(encode(vit, patches, order.int()), expected, rtol=1e-4, atol=1e-5)


def test_attention_is_packed_where_it_is_plain_and_stays_the_same():
    torch.manual_seed(0)
    norm = {"norm_layer": torch.nn.LayerNorm}
    parts = (
        {"qk_norm": True} | norm,
        {"scale_norm": True} | norm,
        {"gated": True},
        {"attn_drop": 0.1},
        {"proj_drop": 0.1},
    )
    for more in ({}, *parts):
        plain = torch.nn.Sequential(Attention(32, 2, **more)).eval()
        packed = copy.deepcopy(plain)
        pack(packed)
        assert type(packed[0]) is (Attention if more else PackedAttention), more
        x = torch.randn(2, 5, 32)
        for how in ({}, {"is_causal": True}, {"attn_mask": torch.randn(5, 5)}):
            torch.testing.assert_close(packed[0](x, **how), plain[0](x, **how))


def test_a_feature_depends_on_kept_patches_and_their_places_only():
    vit = encoder()
    patches, index = torch.randn(1, 4, 192), torch.tensor([[0, 5, 6, 15]])
    moved = torch.tensor([[1, 5, 6, 15]])
    assert not torch.allclose(encode(vit, patches, index), encode(vit, patches, moved), atol=1e-4)
    flops = []
    for kept in (4, 16):  # 5 and 17 tokens
        with FlopCounterMode(display=False) as counter:
            encode(vit, torch.randn(1, kept, 192), torch.arange(kept)[None])
        flops.append(counter.get_total_flops())
    assert flops[1] > 3 * flops[0]


def test_activations_are_computed_again_in_training_alone():
    vit, calls = encoder(depth=1), []
    vit.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for checkpointing, training in ((False, True), (True, False), (True, True)):
        vit.set_grad_checkpointing(checkpointing)
        vit.train(training)
        calls.clear()
        encode(vit, torch.randn(1, 3, 192), torch.tensor([[0, 1, 2]])).sum().backward()
        assert len(calls) == (2 if checkpointing and training else 1)


def test_the_class_token_gets_alone_what_it_gets_among_all():
    """Output and every gradient, in float64, with all that a block can have: layer scale, registers, drop path."""
    more = {"init_values": 0.5, "reg_tokens": 2, "drop_path_rate": 0.5}
    arguments = timm_arguments(image_size=32, patch_size=8, depth=3) | more
    alone = create_encoder("vit_tiny_patch16_224", sincos=False, frozen_patch_embed=False, seed=0, **arguments).double()
    for parameter in alone.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    among = copy.deepcopy(alone)
    among.blocks[-1].__class__ = Block
    assert by_class_token(alone) and not by_class_token(among)
    patches, index = torch.randn(6, 5, 192).double(), torch.rand(6, 16).argsort(1)[:, :5]
    found = []
    for vit, again in ((among, False), (alone, False), (alone, True)):
        vit.set_grad_checkpointing(again)
        vit.zero_grad()
        torch.manual_seed(0)
        with FlopCounterMode(display=False) as counter:
            features = encode(vit, patches, index)
        features.square().sum().backward()
        gradients = [parameter.grad for parameter in vit.parameters()]
        found.append((counter.get_total_flops(), [features.detach(), *gradients]))
    (whole, expected), *others = found
    for flop, results in others:
        assert flop < 0.8 * whole
        for one, other in zip(results, expected, strict=True):
            assert (one - other).norm() < 1e-10 * other.norm()


def test_sincos_embedding_is_the_formula():
    grid, width = (3, 5), 16
    table = sincos_position_embedding(grid, width)
    for row in range(3):
        for column in range(5):
            waves = [10000 ** (-i / 4) for i in range(4)]
            expected = [f(at * w) for at, f in ((column, math.sin), (column, math.cos), (row, math.sin), (row, math.cos)) for w in waves]  # fmt: skip # noqa: E501
            torch.testing.assert_close(table[row * 5 + column], torch.tensor(expected))
    assert len(torch.unique(table, dim=0)) == 15


def test_initial_weights_follow_from_the_seed_and_disturb_nothing():
    state = torch.random.get_rng_state()
    first, again, other = encoder(seed=1), encoder(seed=1), encoder(seed=2)
    assert torch.equal(state, torch.random.get_rng_state())
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.std() == 0 or not a.requires_grad or not torch.equal(a, c)


def test_frozen_parts_do_not_learn():
    vit = encoder(frozen=True)
    encode(vit, torch.randn(2, 3, 192), torch.tensor([[0, 1, 2], [3, 4, 5]])).sum().backward()
    still = {name for name, parameter in vit.named_parameters() if parameter.grad is None}
    assert still == {"pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "no_such_model",
        "deit_tiny_distilled_patch16_224",
        "vit_small_r26_s32_224",
        "swin_tiny_patch4_window7_224",
    ],
)
def test_other_models_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"--model {name}"):
        patch_grid(name, **timm_arguments(image_size=224, patch_size=0, depth=0))


def test_image_size_must_be_divisible():
    with pytest.raises(ValueError, match="--image-size 30 is not divisible by the patch size 8"):
        encoder(image_size=30)


def test_initial_weights_are_those_of_moco_v3():
    """Kind by kind, as vits.py of its code release; the position embedding in float64, to float32's last digit."""
    vit = encoder("vit_small_patch16_224", image_size=224, patch_size=0, depth=1, frozen=True)
    width, state = 384, dict(vit.named_parameters())

    def uniform(fan_in, fan_out):  # Xavier
        return math.sqrt(6 / (fan_in + fan_out))

    bounds = {
        "patch_embed.proj.weight": uniform(3 * 16 * 16, width),
        "blocks.0.attn.qkv.weight": uniform(width, width),  # of queries, keys and values each, not of the three as one
        "blocks.0.attn.proj.weight": uniform(width, width),
        "blocks.0.mlp.fc1.weight": uniform(width, 4 * width),
        "blocks.0.mlp.fc2.weight": uniform(4 * width, width),
    }
    for name, bound in bounds.items():
        weight = state.pop(name).detach()
        assert 0.999 * bound < weight.abs().max() <= bound, name
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01), name
        assert abs(weight.mean().item()) < 0.01 * bound, name
    cls_token = state.pop("cls_token")
    assert 0 < cls_token.abs().max() < 5e-6 and cls_token.std().item() == pytest.approx(1e-6, rel=0.2)
    positions = state.pop("pos_embed")
    assert not positions.requires_grad and not positions[0, 0].any()
    rows, columns = torch.arange(196).div(14, rounding_mode="floor").double(), torch.arange(196).double() % 14
    waves = 10000.0 ** -(torch.arange(96).double() / 96)
    angles = columns[:, None] * waves, rows[:, None] * waves
    expected = torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], 1)
    torch.testing.assert_close(positions[0, 1:].double(), expected, rtol=0, atol=6e-8)
    for name, value in state.items():  # biases and norms
        assert torch.equal(value, torch.full_like(value, "norm" in name and name.endswith("weight"))), name


def test_a_learned_position_embedding_starts_small_and_random():
    positions = encoder(sincos=False).pos_embed
    assert positions.requires_grad and positions.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_by_product_are_those_of_an_embedding(precision):
    """In half precision to the bit too, but for the gradient's rounding to that."""
    index = torch.stack([torch.randperm(49)[:12] for _ in range(5)]).int()
    table = torch.randn(49, 24, dtype=torch.promote_types(precision, torch.float32), requires_grad=True)
    with torch.autocast("cpu", enabled=precision == torch.bfloat16):
        found = rows_by_product(index, table)
    expected = F.embedding(index, table)
    assert found.dtype == precision and torch.equal(found, expected.to(precision))
    given = torch.randn(found.shape, dtype=precision)
    got, known = (torch.autograd.grad(rows, table, given.to(rows.dtype))[0] for rows in (found, expected))
    torch.testing.assert_close(got, known, rtol=0.01 if precision == torch.bfloat16 else 1e-5, atol=1e-5)
