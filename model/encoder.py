"""A timm VisionTransformer that only ever sees the kept patches.

The module is timm's own, so its state dict loads in timm unchanged; what differs from ``vit(image)`` is the way in:
patches are gathered first and embedded afterwards (``encode``), at a cost proportional to the K kept ones.
"""

import math

import timm
import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import attention, attention_of_one


class PackedAttention(Attention):
    """timm's attention, in whose place it is put (same parameters), with ``kernels.attention`` in the middle."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, first_only: bool = False
    ) -> Tensor:
        """As timm's; with ``first_only`` what the first token gets, [B,1,D]: no other one asks."""
        if attn_mask is not None or is_causal:
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        if not first_only:
            return self.proj(attention(self.qkv(x), heads=self.num_heads))
        # One split of each, so that their gradients are put together once.
        sizes, bias = (self.attn_dim, 2 * self.attn_dim), self.qkv.bias
        biases = (None, None) if bias is None else bias.split(sizes)
        return self.proj(self.of_first(x, *self.qkv.weight.split(sizes), *biases))

    def of_first(
        self, x: Tensor, ask: Tensor, answer: Tensor, ask_bias: Tensor | None, answer_bias: Tensor | None
    ) -> Tensor:
        """What the first of the tokens [B,T,D] gets: [B,1,H*D], by weights of queries, and of keys and values."""
        query, others = F.linear(x[:, :1], ask, ask_bias), F.linear(x, answer, answer_bias)
        return attention_of_one(query, others, heads=self.num_heads)


class LastBlock(Block):
    """timm's block, in whose place it is put (same parameters), able to leave out what is not read behind it."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, first_only: bool = False
    ) -> Tensor:
        """As timm's; with ``first_only`` the first token alone, [B,1,D], to which all are keys and values."""
        if not first_only:
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        x = x[:, :1] + self.drop_path1(self.ls1(self.attn(self.norm1(x), first_only=True)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


def active_parts(module: nn.Module) -> set[str]:
    """Names of the parts that change what goes through them: no identities, and no dropout that drops nothing."""
    parts = module.named_children()
    return {name for name, part in parts if not isinstance(part, nn.Identity) and getattr(part, "p", 1)}


def pack(vit: VisionTransformer) -> None:
    """Put our form of attention in the place of timm's, where that has no further parts (norms, a gate, dropout), and
    with it that of the last block."""
    for module in vit.modules():
        if type(module) is Attention and active_parts(module) == {"qkv", "proj"}:
            module.__class__ = PackedAttention
    last = vit.blocks[-1] if isinstance(vit, VisionTransformer) else None
    if type(last) is Block and type(last.attn) is PackedAttention:
        last.__class__ = LastBlock


def timm_arguments(*, image_size: int, patch_size: int, depth: int) -> dict[str, int]:
    """Arguments of ``timm.create_model`` beside the name; ``patch_size`` and ``depth`` of 0 mean the model's own."""
    own = {"patch_size": patch_size, "depth": depth}
    return {"img_size": image_size, "num_classes": 0} | {name: value for name, value in own.items() if value}


def create_encoder(name: str, *, sincos: bool, frozen_patch_embed: bool, seed: int, **arguments) -> VisionTransformer:
    """A ViT of timm by name, initialised as MoCo v3 (arXiv 2104.02057, code release), on the CPU.

    That is Xavier's uniform law for linear layers, for queries, keys and values each by themselves, and for the patch
    embedding as a layer on the flattened patch; biases 0; a class token of standard deviation 1e-6. The same for CIFAR,
    where the code of APS leaves the blocks as torch makes them. Learned positions have a standard deviation of 0.02.
    ``arguments`` go to ``timm.create_model`` (see ``timm_arguments``). ``sincos``: fixed 2-D sine-cosine position
    embedding, stored in timm's ``pos_embed``; otherwise a learned one. Raises ValueError for a model that cannot run
    on a subset of its patches. The result depends on the arguments alone; the global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vit = create_plain(name, arguments, weight_init="moco")
        projection = vit.patch_embed.proj
        bound = math.sqrt(6 / (projection.weight[0].numel() + vit.embed_dim))  # Xavier, the patch seen as a vector
        nn.init.uniform_(projection.weight, -bound, bound)
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)
    if sincos:
        prefix = vit.pos_embed.shape[1] - vit.patch_embed.num_patches
        with torch.no_grad():
            vit.pos_embed.zero_()
            vit.pos_embed[0, prefix:] = sincos_position_embedding(vit.patch_embed.grid_size, vit.embed_dim)
        vit.pos_embed.requires_grad_(False)
    if frozen_patch_embed:
        vit.patch_embed.requires_grad_(False)
    pack(vit)
    return vit


def patch_grid(name: str, **arguments) -> tuple[int, tuple[int, int]]:
    """Patch side P in pixels and grid (Gh, Gw) of a model, without allocating it; ValueError as ``create_encoder``."""
    vit = create_plain(name, arguments, device="meta")
    return vit.patch_embed.patch_size[0], vit.patch_embed.grid_size


def create_plain(name: str, arguments: dict, **more) -> VisionTransformer:
    """``timm.create_model`` for models that can run on a subset of their patches; ValueError for all others."""
    try:
        # Where memory is never lacking, and values would take time for nothing.
        vit = timm.create_model(name, **arguments | more | {"device": "meta", "weight_init": "skip"})
    except TypeError:  # an architecture that has no such argument
        vit = None
    except Exception as error:  # timm's constructors raise nearly anything for arguments that do not go together
        known = isinstance(error, RuntimeError)  # timm's answer to an unknown name
        said = error if known else f"{type(error).__name__}: {error}, for {arguments}"
        raise ValueError(
            f"--model {name}: {said}; expected a Vision Transformer of timm, such as vit_small_patch16_224"
        ) from None
    # A subclass may have ways of its own from patches to features (a distillation token, relative positions).
    if type(vit) is not VisionTransformer or type(vit.patch_embed) is not PatchEmbed or vit.pos_embed is None:
        raise ValueError(
            f"--model {name} is no plain Vision Transformer (linear patch embedding, absolute positions), "
            "so it cannot run on a subset of patches; expected one such as vit_small_patch16_224"
        )
    height, width = vit.patch_embed.patch_size
    if height != width or any(side % height for side in vit.patch_embed.img_size):
        raise ValueError(
            f"--image-size {arguments.get('img_size')} is not divisible by the patch size {height} of {name}; "
            "change one of them"
        )
    return vit if more.get("device") == "meta" else timm.create_model(name, **arguments, **more)


def encode(vit: VisionTransformer, patches: Tensor, index: Tensor) -> Tensor:
    """Features of images given as some of their patches.

    ``patches``: [B, K, 3*P*P] normalised, in (channel, row, column) order; ``index``: int [B, K], row-major numbers of
    these patches in the grid. Returns [B, D], pooled as the model pools (class token or mean). With all N patches the
    result is that of ``vit(image)``. Where the class token is all that is read, the last block (see ``pack``) computes
    no other.
    """
    projection = vit.patch_embed.proj
    tokens = vit.patch_embed.norm(F.linear(patches, projection.weight.flatten(1), projection.bias))
    prefix = vit.pos_embed.shape[1] - vit.patch_embed.num_patches  # class and register tokens that have positions
    positions = vit.pos_embed[0, prefix:]
    # Learned ones on a GPU by a product: the gradient of an embedding is summed by atomics, in any order.
    rows = rows_by_product if positions.requires_grad and positions.device.type != "cpu" else F.embedding
    # Under autocast the sum of all blocks stays in half precision, which halves its traffic: float32 positions would
    # make it float32.
    tokens = tokens + rows(index, positions).to(tokens.dtype)
    extra = [token for token in (vit.cls_token, vit.reg_token) if token is not None]
    if extra:
        extra = torch.cat(extra, 1)
        if prefix:
            extra = extra + vit.pos_embed[:, :prefix]
        tokens = torch.cat([extra.expand(len(tokens), -1, -1).to(tokens.dtype), tokens], 1)
    tokens = vit.norm_pre(vit.pos_drop(tokens))
    for block in vit.blocks:
        how = {"first_only": True} if block is vit.blocks[-1] and by_class_token(vit) else {}
        if vit.grad_checkpointing and vit.training:
            tokens = checkpoint(block, tokens, use_reentrant=False, **how)
        else:
            tokens = block(tokens, **how)
    tokens = vit.norm(tokens)
    return vit.forward_head(tokens, pre_logits=True)


def rows_by_product(index: Tensor, table: Tensor) -> Tensor:
    """As ``F.embedding`` of numbers [B,K] and a table [N,D], but with a gradient that is equal from run to run."""
    chosen = index[..., None] == torch.arange(len(table), device=index.device)
    return chosen.to(table.dtype) @ table


def by_class_token(vit: VisionTransformer) -> bool:
    """Whether ``encode`` computes nothing but the class token in the last block."""
    return vit.global_pool == "token" and vit.attn_pool is None and isinstance(vit.blocks[-1], LastBlock)


def sincos_position_embedding(grid: tuple[int, int], width: int) -> Tensor:
    """Fixed 2-D position embedding, float32 [Gh*Gw, D].

    A quarter each of sin(x w_i), cos(x w_i), sin(y w_i), cos(y w_i), with w_i = 10000^(-i / (D/4)), x the column and y
    the row of the patch, as MoCo v3 (Vaswani et al. 2017, in 2-D).
    """
    if width % 4:
        raise ValueError(f"a 2-D sine-cosine position embedding needs a width divisible by 4, got {width}")
    frequency = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    y, x = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    x, y = x.reshape(-1, 1) * frequency, y.reshape(-1, 1) * frequency
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], 1).float()
