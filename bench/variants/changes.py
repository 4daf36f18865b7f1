"""The variants: what each changes in a ``run.training.Training``, from outside, before its first step.

Modules are changed in the networks that run (``training.query`` and ``training.key``, below what compiles them), and
what a step calls is wrapped.

``predicted``: milliseconds that a step of 512 images should lose, of ViT-S and ViT-B, by arithmetic from an H100's
profile (``step_variants.json``).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.products import NO_GPU, without_fp8
from bench.variants import blocks, memsets
from model import key_mlp
from model.encoder import PackedAttention
from model.faster import ForeignBias
from model.heads import BatchNorm
from model.products import FastLinear
from run.training import Training


class Variant(NamedTuple):
    """``exact``: the same numbers but for rounding; otherwise another form, which only the k-NN accuracy of a run can
    judge, and ``cosine`` is what its keys have to reach with those of the base. ``place``: of two that change the same
    one, only one can be applied."""

    name: str
    what: str
    predicted: tuple[float, float]
    apply: Callable[[Training, nn.Module, nn.Module | None], None]  # the networks of queries and of keys that run
    missing: Callable[[Training], str]  # why it cannot be applied, "" if it can
    cosine: float | None = None
    place: str = ""

    @property
    def exact(self) -> bool:
        return self.cosine is None


def kind(training: Training) -> torch.dtype:
    return torch.bfloat16 if training.half else torch.float32


def apply(names: list[str], training: Training) -> None:
    """These variants, given in the order of ``VARIANTS``."""
    networks = [getattr(called, "_orig_mod", called) for called in (training.query, training.key)]
    for name in names:
        BY_NAME[name].apply(training, *networks)


def both_views(training: Training, *networks: nn.Module | None) -> None:
    for module in (module for network in filter(None, networks) for module in network.modules()):
        if type(module) is BatchNorm:
            module.__class__ = blocks.BothViews


def bias_sums(training: Training, queries: nn.Module, _) -> None:
    """In all blocks but the last, of which the class token alone is computed."""
    for module in list(queries.encoder.blocks[:-1].modules()):
        if key_mlp.is_plain(module) and isinstance(module.act, nn.GELU) and module.fc1.bias is not None:
            module.__class__, layer = blocks.ColumnsMlp, module.fc1
        elif type(module) is PackedAttention and module.qkv.bias is not None:
            layer = module.qkv
            module.qkv = blocks.QueryValueBias(layer)
        else:
            continue
        if isinstance(layer, FastLinear):
            layer.foreign = True
        else:
            layer.__class__ = ForeignBias


def compiled_loss(training: Training, *_) -> None:
    training.loss = torch.compile(training.loss, dynamic=False, fullgraph=True)


def key_gelu(training: Training, _, keys: nn.Module) -> None:
    key_mlp.gelu_in_products(keys.encoder, kind(training))


def fp8_keys(training: Training, _, keys: nn.Module) -> None:
    rescale, key = blocks.fp8(keys.encoder, kind(training)), training.key

    def scaled(patches: Tensor, index: Tensor) -> Tensor:
        rescale()
        return key(patches, index)

    training.key = scaled


def kernel_memsets(training: Training, *_) -> None:
    training.recorded.kind = memsets.graph


def anywhere(training: Training) -> str:
    return ""


def with_keys(training: Training) -> str:
    return "" if training.key_network is not None else "there is no momentum network"


def with_exact_keys(training: Training) -> str:
    return with_keys(training) or ("it is part of the step" if training.faster else "")


def on_gpu(training: Training) -> str:
    return "" if training.on_gpu else NO_GPU


def in_a_graph(training: Training) -> str:
    return on_gpu(training) or ("" if training.recorded else "steps are not recorded")


def with_fp8(training: Training) -> str:
    return with_keys(training) or (without_fp8(training.device) if training.on_gpu else "")


# In the order in which several are applied: those that wrap what a step calls come last.
VARIANTS = (
    Variant("both-views", "batch normalisation of both views at once", (0.1, 0.1), both_views, anywhere),
    Variant("bias-sums", "columns summed in GELU's backward, and those of keys not (queries)", (0.56, 1.1), bias_sums,
            anywhere),
    Variant("kernel-memsets", "small memsets of the graph as kernels", (0.2, 0.2), kernel_memsets, in_a_graph),
    Variant("compiled-loss", "the loss compiled too", (0.08, 0.08), compiled_loss, on_gpu),
    Variant("key-gelu", "GELU in cuBLASLt's epilogue (keys, tanh form)", (1.2, 2.7), key_gelu, with_exact_keys, 0.999,
            place="MLP of keys"),
    Variant("fp8-keys", "products in fp8 (keys)", (0.8, 3.7), fp8_keys, with_fp8, 0.9, place="MLP of keys"),
)  # fmt: skip
BY_NAME = {variant.name: variant for variant in VARIANTS}


def compatible(names: list[str]) -> list[str]:
    """Of these, best first, those that can be applied together, in the order in which to do so."""
    taken: dict[str, str] = {}
    for name in names:
        taken.setdefault(BY_NAME[name].place or name, name)
    return [name for name in BY_NAME if name in taken.values()]
