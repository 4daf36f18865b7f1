"""The optimizer step: what is trained, and one step of it on one group of patches of a batch."""

import collections
import contextlib
import copy
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from kernels import gather_patches, sample_views
from kernels.reference import MAX_PATCHES
from model import (
    FlatParameters,
    KeyNetwork,
    Optimizer,
    QueryNetwork,
    by_class_token,
    clip_units,
    contrastive_loss,
    create_encoder,
    faster,
    patch_grid,
    timm_arguments,
)
from pipeline import Batch
from pipeline.headers import counted

from .checkpoint import copied
from .recipes import Config, ImagesConfig, learning_rate, momentum_coefficient
from .recorded import Recorded

AHEAD = 2  # steps that a GPU has before it, so that it never waits for the next one


def encoder_arguments(config: Config) -> dict[str, int]:
    """What ``timm.create_model`` takes beside the name."""
    return timm_arguments(image_size=config.image_size, patch_size=config.patch_size, depth=config.depth)


def new_encoder(config: Config) -> VisionTransformer:
    """The untrained encoder of a config, always the same."""
    return create_encoder(
        config.model, sincos=config.position_embedding == "sincos", frozen_patch_embed=config.frozen_patch_embed,
        seed=config.seed, **encoder_arguments(config),
    )  # fmt: skip


def plan_patches(config: Config) -> tuple[int, tuple[int, int], int]:
    """Patch side P in pixels, grid (Gh, Gw), and number K of patches kept per view; ValueError if they do not fit."""
    patch, grid = patch_grid(config.model, **encoder_arguments(config))
    patches = grid[0] * grid[1]
    keep = int(config.keep_ratio * patches + 1e-9)  # floor, but 0.29 * 100 is 28.999...
    if keep < 1:
        raise ValueError(
            f"--keep-ratio {config.keep_ratio} keeps none of {patches} patches; expected {1 / patches:.4g} or more"
        )
    if config.groups * keep > patches:
        raise ValueError(
            f"--groups {config.groups} --keep-ratio {config.keep_ratio}: {config.groups} disjoint groups of {keep} "
            f"patches do not fit into {patches}; expected at most {counted(patches // keep, 'group')}"
        )
    if patches > MAX_PATCHES:
        raise ValueError(
            f"{patches} patches ({grid[0]} x {grid[1]}) per crop; expected at most {MAX_PATCHES}: larger patches"
        )
    return patch, grid, keep


class Training:
    """The networks of a config on one device, their optimizer and clip.

    On a GPU the networks are compiled, which takes the first step a minute and more, unless ``compiled`` is False.
    ``encoder``: what to begin with, in place of ``new_encoder(config)``, and ``origin``, its description, which is then
    part of the state.
    """

    FIGURES = "loss", "similarity", "feature_std"  # what a step returns

    def __init__(
        self, config: Config, device: torch.device, *, ranks: int = 1, compiled: bool | None = None,
        encoder: VisionTransformer | None = None, origin: dict[str, Any] | None = None,
    ):  # fmt: skip
        self.config, self.device, self.origin = config, device, origin
        self.patch, self.grid, self.keep = plan_patches(config)
        self.on_gpu = device.type == "cuda"
        self.half = in_half(config, device)
        encoder = encoder or new_encoder(config)
        self.network = QueryNetwork(
            encoder, hidden=config.head_hidden, out=config.head_out, seed=config.seed,
            projector_layers=config.projector_layers, predictor_layers=config.predictor_layers,
        ).to(device)  # fmt: skip
        self.network.encoder.set_grad_checkpointing(config.grad_checkpointing)
        self.key_network = self.network.key_network() if config.ema is not None else None
        self.flop_per_pair = flop_per_pair(self.network, self.keep, momentum=self.key_network is not None)
        compiled = self.on_gpu if compiled is None else compiled
        sharded = config.fsdp and ranks > 1
        self.faster = self.half and not sharded and faster.pays(device)  # whether steps use its forms
        if sharded:
            self.form = copy.deepcopy(encoder).to("meta")  # the encoder without shards
            mesh = init_device_mesh(device.type, (ranks,))  # FSDP's own would be of GPUs wherever there are any
            for network in filter(None, (self.network, self.key_network)):
                _shard(network, mesh, compiled=compiled, half=self.half, in_pieces=config.accumulate > 1)
        units = clip_units(self.network)
        self.flat = FlatParameters([[self.network.get_parameter(name) for name in unit] for unit in units])
        self.key_flat = None
        if self.key_network is not None:  # all units but the predictor, which is the last
            shared = [[self.key_network.get_parameter(name) for name in unit] for unit in units[:-1]]
            self.key_flat = FlatParameters(shared)
        # What a step calls; the networks themselves are what is saved and exported.
        self.query, self.key, self.loss = self.network, self.key_network, contrastive_loss
        if self.half and not sharded:  # so that autocast casts no weight; FSDP casts by itself
            self.query = self.flat.working(self.network)
            self.key = self.key_network and self.key_flat.working(self.key_network)
            if self.faster:
                faster.put_in(self.query, self.key)
        self.optimizer = Optimizer(
            self.flat, self.key_flat, betas=config.betas, weight_decay=config.weight_decay,
            clip=config.clip, clip_momentum=config.clip_momentum, clip_alpha=config.clip_alpha,
        )  # fmt: skip
        if compiled and not sharded:  # batch normalisation over the ranks included
            how = {"dynamic": False, "fullgraph": True}
            if config.accumulate == 1:
                self.query, self.key = (part and torch.compile(part, **how) for part in (self.query, self.key))
            else:
                for network in filter(None, (self.query, self.key)):
                    network.features = torch.compile(network.features, **how)
                    network.heads = torch.compile(network.heads, **how)
        self.shares = 1 if sharded else ranks  # ranks whose gradients are added up here; FSDP does that by itself
        # Keys beside the queries, each network's kernels in the gaps of the other's; measured on one rank.
        beside = self.faster and self.on_gpu and ranks == 1 and self.key is not None
        self.beside = torch.cuda.Stream(device) if beside else None
        self.queued: collections.deque[torch.cuda.Event] = collections.deque()
        self.recorded = self.given = None
        if config.cuda_graph and self.on_gpu and not sharded:
            self.recorded = Recorded(self.take, clean=self.flat.forget)

    def sample(self, batch: Batch, epoch: int) -> Tensor:
        """Patch numbers of both views for all groups of a batch: int32 [2,B,R,K]."""
        return sample_patches(self.config, batch, epoch, grid=self.grid, keep=self.keep)

    def gather(self, crops: tuple[Tensor, Tensor], chosen: Tensor) -> tuple[Tensor, Tensor]:
        """What ``step`` takes of each group: patches, normalised, [R,2,B,K,3*P*P], and their numbers, int32 [R,2,B,K].

        ``chosen``: these numbers as ``sample`` gives them; ``crops``: uint8 [B,H,W,3] each, which nothing else reads.
        Once a batch for all of its groups. Where steps are recorded, the next batch is written over this one.
        """
        config, dtype, numbers = self.config, torch.bfloat16 if self.half else torch.float32, chosen.permute(2, 0, 1, 3)
        how = {"patch": self.patch, "mean": config.mean, "std": config.std, "dtype": dtype}
        if self.given is None or self.given[1].shape != numbers.shape:
            given = gather_patches(crops, chosen, **how), numbers.contiguous()
            self.given = given if self.recorded else None
            return given
        gather_patches(crops, chosen, **how, out=self.given[0])
        self.given[1].copy_(numbers)
        return self.given

    def step(self, patches: Tensor, numbers: Tensor, epoch: float) -> tuple[Tensor, Tensor]:
        """One optimizer step on a group's patches, [2,B,K,3*P*P], with their numbers, int32 [2,B,K].

        ``epoch``: passes over the images so far, fractions included, as the schedules count. Returns the ``FIGURES``,
        [3]: the loss, the mean cosine similarity of positive pairs, the spread of the features; and whether the
        gradient was finite: where it was not, nothing is changed, on all ranks, which have the same gradient. Both are
        on the device. On a GPU the step ``AHEAD`` steps before is waited for: with more of them the driver has no room
        for launches, and whoever launches then waits in it, the decoder too.
        """
        config = self.config
        momentum = momentum_coefficient(config, epoch) if self.key_network is not None else 1.0
        self.optimizer.set_rates(learning_rate(config, epoch), momentum)
        results = (self.recorded or self.take)(patches, numbers)
        if self.on_gpu:
            self.queued.append(event := torch.cuda.Event(blocking=True))
            event.record()
            while len(self.queued) > AHEAD:
                self.queued.popleft().synchronize()
        return results

    def take(self, patches: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The part of a step that can be recorded: what differs between steps is in memory that stays where it is."""
        if self.config.accumulate > 1:
            loss, similarity, spread, gradient = self._in_pieces(patches, numbers)
        else:
            with self._autocast():
                with torch.no_grad(), self._beside():
                    keys = self.key(patches, numbers) if self.key is not None else None
                queries, projections, spread = self.query(patches, numbers)
                if self.beside is not None:
                    torch.cuda.current_stream().wait_stream(self.beside)
                keys = projections if keys is None else keys
                loss, similarity = self.loss(queries, keys, self.config.temperature)
            (loss / self.shares).backward()
            gradient = self.flat.collect()
        if self.shares > 1:  # all parameters at once: after a compiled backward pass there is nothing to overlap with
            sent = gradient.bfloat16() if self.config.compress_gradients else gradient
            dist.all_reduce(sent)
            gradient.copy_(sent)
        finite = self.optimizer.step()
        return torch.stack([loss.detach(), similarity, spread]), finite

    @contextlib.contextmanager
    def _beside(self):
        """On the stream ``beside``, if there is one, behind all that is queued by now."""
        if self.beside is None:
            yield
        else:
            self.beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.beside):
                yield

    def _in_pieces(self, patches: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, similarity, spread and gradient of a step, with the encoder's activations of a part of the views at a
        time, as GradCache (arXiv 2101.06983): the features of all, without a graph; heads and loss, which see the whole
        batch of all ranks, and the gradient of the features; then the encoder again, part by part, with its part of
        that gradient. Parts are added up in float32."""
        views = (both.flatten(0, 1).chunk(self.config.accumulate) for both in (patches, numbers))
        pieces = list(zip(*views, strict=True))
        with self._autocast(), torch.no_grad():
            features = torch.cat([self.query.features(*piece) for piece in pieces])
            if self.key is not None:
                keys = self.key.heads(torch.cat([self.key.features(*piece) for piece in pieces]))
        with self._autocast():  # another one: the first keeps its casts of weights, which were made without a graph
            queries, projections, spread = self.query.heads(features.requires_grad_())
            keys = keys if self.key is not None else projections
            loss, similarity = self.loss(queries, keys, self.config.temperature)
        (loss / self.shares).backward()
        for number, piece in enumerate(pieces):
            with self._autocast():
                again = self.query.features(*piece)
            again.backward(features.grad.chunk(len(pieces))[number])
            gradient = self.flat.collect(add=number > 0)  # the first time those of the heads too
        return loss, similarity, spread, gradient

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """A copy of all that a step changes, as one process alone has it: the same for any number of ranks, sharded
        (and then on the CPU) or not. All ranks have to call it; those that do not ``keep`` it get nothing of it."""
        parts = {"network": self.network, "key_network": self.key_network}
        parts |= {"optimizer": self.optimizer, "clip": self.optimizer.clip}
        origin = {} if self.origin is None or not keep else {"origin": json.dumps(self.origin)}
        if not self.flat.sharded:
            return copied(**parts) | origin if keep else {}

        def whole(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            elif tensor.shape == self.flat.values.shape:
                tensor = self.flat.whole(tensor, keep=keep)
            return tensor.detach().to("cpu", copy=True) if keep else torch.empty(0)

        state = {name: part.state_dict() for name, part in parts.items() if part is not None}
        return tree_map_only(Tensor, whole, state) | origin

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what ``state_dict`` has returned."""
        for name, flat in (("network", self.flat), ("key_network", self.key_flat)):
            if flat is not None:
                network = getattr(self, name)
                there = network.state_dict()
                network.load_state_dict({key: _like(there.get(key), value) for key, value in state[name].items()})
                flat.read()
        for name, part in (("optimizer", self.optimizer), ("clip", self.optimizer.clip)):
            if part is not None:
                part.load_state_dict(tree_map_only(Tensor, self._own, state[name]))

    def encoder(self) -> VisionTransformer:
        """The encoder as it is now, whole: where it is sharded, a copy. All ranks have to call it."""
        if not self.flat.sharded:
            return self.network.encoder
        vit = copy.deepcopy(self.form).to_empty(device=self.device)
        vit.load_state_dict({name: t.full_tensor() for name, t in self.network.encoder.state_dict().items()})
        return vit

    def _own(self, tensor: Tensor) -> Tensor:
        return self.flat.own(tensor) if tensor.shape == (self.flat.whole_size,) else tensor


def sample_patches(config: Config, batch: Batch, epoch: int, *, grid: tuple[int, int], keep: int) -> Tensor:
    """Patch numbers of both views for all groups of a batch: int32 [2,B,R,K]."""
    return torch.stack(sample_views(
        batch.boxes, batch.flips, batch.sample, grid=grid, keep=keep, groups=config.groups, power=config.power,
        seed=config.seed, epoch=epoch,
    ))  # fmt: skip


def in_half(config: ImagesConfig, device: torch.device) -> bool:
    """Whether products and activations are bfloat16, not float32."""
    if config.precision == "auto":
        return device.type == "cuda" or torch.cpu._is_amx_tile_supported()
    return config.precision == "bfloat16"


def flop_per_pair(network: QueryNetwork, keep: int, *, momentum: bool) -> float:
    """Floating-point operations of a pair of views in an optimizer step, 2 per multiply-add, matrix products of
    the networks only.

    Forward F: 2 per weight and token, and 4 T^2 D for the attention of a block over T tokens; in the last block, where
    it is for the class token alone, that is one token for all weights but those of keys and values, and 4 T D.
    Backward: 2 F (F for the embedding, whose input needs no gradient; nothing where it is frozen). Keys of a momentum
    encoder: F, without the predictor.
    """
    vit = network.encoder
    depth, tokens = len(vit.blocks), keep + vit.num_prefix_tokens
    in_blocks, projector, predictor = (
        sum(m.weight.numel() for m in part.modules() if isinstance(m, nn.Linear))
        for part in (vit.blocks, network.projector, network.predictor)
    )
    embed = 2 * keep * vit.patch_embed.proj.weight.numel()
    answers = 2 * vit.embed_dim**2  # weights of a block that give keys and values
    others = in_blocks / depth - answers
    blocks = sum(
        2 * (tokens * answers + asking * others) + 4 * tokens * asking * vit.embed_dim
        for asking in [tokens] * (depth - 1) + [1 if by_class_token(vit) else tokens]
    )
    learned = vit.patch_embed.proj.weight.requires_grad
    query = embed * (1 + learned) + 3 * (blocks + 2 * projector + 2 * predictor)
    keys = embed + blocks + 2 * projector if momentum else 0
    return 2 * (query + keys)


def product_rate(device: torch.device, *, half: bool) -> float:
    """FLOP per second of a large matrix product (bfloat16 if ``half``, else float32) at its best on a GPU: MFU is the
    share of it. (The rate of a processor depends on what else runs there.) Takes a tenth of a second."""
    side = 8192
    dtype = torch.bfloat16 if half else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds)


def _shard(network: KeyNetwork, mesh: DeviceMesh, *, compiled: bool, half: bool, in_pieces: bool) -> None:
    """FSDP2: each rank keeps its part of every parameter, and the blocks are put together when they are needed.
    ``in_pieces``: not the network is called, but its ``features`` and ``heads``."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how = {"mesh": mesh} | ({"mp_policy": precision} if half else {})
    for block in network.encoder.blocks:
        if compiled:
            block.compile(dynamic=False)
        fully_shard(block, **how)
    # The default keeps what is left at the root together until a backward pass, which the key network never has.
    fully_shard(network, reshard_after_forward=True, **how)
    for method in ("features", "heads") if in_pieces else ():
        register_fsdp_forward_method(network, method)


def _like(there: Tensor | None, whole: Tensor) -> Tensor:
    """``whole``, or, where ``there`` is sharded, this rank's part of it."""
    if not isinstance(there, DTensor):
        return whole
    return distribute_tensor(whole.to(there.device), there.device_mesh, there.placements, src_data_rank=None)
