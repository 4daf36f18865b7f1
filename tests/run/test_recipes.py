import dataclasses
import itertools
import math
import re
from pathlib import Path

import pytest
import timm
from conftest import ROOT

import train as program
from pipeline import Augmentation
from run.recipes import RECIPES, Config, learning_rate, momentum_coefficient
from run.training import encoder_arguments, plan_patches

# Every constant of the recipes for ImageNet and for CIFAR, and whose it is. APS: text and appendix tables of arXiv
# 2306.02854; MoCo v3: arXiv 2104.02057. Code: what they released, which for APS is CIFAR alone.
SETTINGS, AUGMENTATIONS = "APS, appendix, pretraining settings", "APS, appendix, augmentation"
TABLE = {
    "epochs": (300, 1600, SETTINGS),  # ImageNet also 800
    "batch_size": (4096, 512, SETTINGS),
    "lr": (1.28e-3, 1e-3, SETTINGS),  # the code of APS gives 2e-3 to ViT-T/2
    "betas": ((0.9, 0.999), (0.9, 0.999), SETTINGS),
    "weight_decay": (0.1, 0.05, SETTINGS),
    "warmup_epochs": (20, 20, SETTINGS),
    "temperature": (0.1, 0.1, SETTINGS),
    "ema": (0.99, None, "APS; MoCo v3, code: --moco-m; CIFAR: the keys are the network's own"),
    "clip": ("vector", "off", "APS, Eq. 9 and 10"),
    "clip_momentum": (0.4, 0.4, "APS, Eq. 9; CIFAR: not used"),
    "clip_alpha": (1.05, 1.05, "APS, Eq. 10; CIFAR: not used"),
    "keep_ratio": (0.25, 0.25, "APS, sparse patch sampling, s"),
    "groups": (4, 4, "APS, all patches of a view are used"),
    "window": (1, 1, "APS: the groups of an image one after the other"),
    "redeal": (False, False, "APS"),
    "power": (3, 3, "APS, Eq. 4, gamma"),
    "image_size": (224, 32, SETTINGS),
    "patch_size": (0, 2, "APS, ViT-S/16 and B/16 (the model's own); ViT-T/2, S/2 and B/2"),
    "depth": (0, 0, "Vision Transformers (the model's own, below)"),
    "position_embedding": ("sincos", "learned", "MoCo v3; CIFAR: APS, code"),
    "frozen_patch_embed": (True, False, "MoCo v3, code: --stop-grad-conv1; CIFAR: APS, code"),
    "head_hidden": (4096, 512, "APS; MoCo v3, code: --moco-mlp-dim"),
    "head_out": (256, 128, "APS; MoCo v3, code: --moco-dim"),
    "projector_layers": (3, 3, "APS; MoCo v3"),
    "predictor_layers": (2, 3, "APS; MoCo v3"),
    "mean": ((0.485, 0.456, 0.406), (0.4914, 0.4822, 0.4465), "MoCo v3, code; CIFAR: of all its pixels"),
    "std": ((0.229, 0.224, 0.225), (0.2470, 0.2435, 0.2616), "MoCo v3, code; CIFAR: of all its pixels"),
    "area": ((0.08, 1), (0.15, 1), AUGMENTATIONS),
    "aspect": ((3 / 4, 4 / 3), (3 / 4, 4 / 3), AUGMENTATIONS),
    "flip_p": (0.5, 0.5, AUGMENTATIONS),
    "jitter_p": (0.8, 0.8, AUGMENTATIONS),
    "brightness": (0.4, 0.4, AUGMENTATIONS),
    "contrast": (0.4, 0.4, AUGMENTATIONS),
    "saturation": (0.2, 0.4, AUGMENTATIONS),
    "hue": (0.1, 0.1, AUGMENTATIONS),
    "grey_p": (0.2, 0.2, AUGMENTATIONS),
    "blur_p": ((1, 0.1), (0, 0), AUGMENTATIONS),
    "blur_sigma": ((0.1, 2), (0.1, 2), AUGMENTATIONS + "; CIFAR: not used"),
    "solarise_p": ((0, 0.2), (0, 0), AUGMENTATIONS),
}
MODELS = {  # patch side in pixels, grid; width, blocks, attention heads
    "imagenet-vit-s": (16, (14, 14), 384, 12, 6),
    "imagenet-vit-b": (16, (14, 14), 768, 12, 12),
    "cifar-vit-t": (2, (16, 16), 192, 12, 3),
    "cifar-vit-s": (2, (16, 16), 384, 12, 6),
    "cifar-vit-b": (2, (16, 16), 768, 12, 12),
}
# No constants of the method: where things lie, what is shown and kept, the machine, which run of a recipe it is.
OURS = {
    "recipe", "data", "eval_data", "output", "max_steps", "device", "precision", "threads", "seed", "resume", "max_bad",
    "checkpoint_every", "keep_last", "keep_every", "log_every", "knn_images", "knn_every", "fsdp", "grad_checkpointing",
    "compress_gradients", "accumulate", "cuda_graph", "index_cache", "trust_index", "encoder", "dry_run",
}  # fmt: skip


def fields(kind):
    return {field.name for field in dataclasses.fields(kind)}


def value(config, name):
    return getattr(config.augmentation if name in fields(Augmentation) else config, name)


def test_every_field_has_its_source():
    """A new option has to be placed: in the table, with whose it is, or among ours."""
    assert not fields(Config) & fields(Augmentation)
    assert fields(Config) - {"augmentation", "model"} | fields(Augmentation) == TABLE.keys() | OURS
    assert not TABLE.keys() & OURS
    assert OURS - {"recipe", "seed", "encoder"} == set(Config.FREE_ON_RESUME)


def test_recipes_hold_the_constants_of_their_sources():
    assert MODELS.keys() == RECIPES.keys() - {"toy"}
    defaults = Config()
    for recipe, (patch, grid, width, blocks, heads) in MODELS.items():
        config = RECIPES[recipe]
        column = 0 if recipe.startswith("imagenet") else 1
        assert {name: value(config, name) for name in TABLE} == {name: row[column] for name, row in TABLE.items()}
        assert all(getattr(config, name) == getattr(defaults, name) for name in OURS - {"recipe"})
        vit = timm.create_model(config.model, device="meta", **encoder_arguments(config))
        assert plan_patches(config)[:2] == (patch, grid)
        assert (vit.embed_dim, len(vit.blocks), vit.blocks[0].attn.num_heads) == (width, blocks, heads)
        assert vit.blocks[0].mlp.fc1.out_features == 4 * width and vit.norm.eps == 1e-6


def test_every_option_is_read_somewhere():
    code = "".join(path.read_text() for folder in (".", "run") for path in (ROOT / folder).glob("*.py"))
    unread = {name for name in fields(Config) if not re.search(rf"config\.{name}\b", code)}
    assert not unread


def test_command_line_is_the_recipe_and_what_is_said_over_it():
    assert program.parse(["--recipe", "cifar-vit-s"]) == RECIPES["cifar-vit-s"]
    config = program.parse(["--recipe", "imagenet-vit-b", "--lr", "1e-4", "--blur-p", "0.5", "0", "--ema", "None"])
    expected = dataclasses.replace(RECIPES["imagenet-vit-b"].augmentation, blur_p=(0.5, 0.0))
    assert config == dataclasses.replace(RECIPES["imagenet-vit-b"], lr=1e-4, ema=None, augmentation=expected)


@pytest.mark.parametrize("name", ["imagenet-vit-s", "cifar-vit-t", "toy"])
def test_learning_rate_warms_up_and_falls_as_half_a_cosine(name):
    """At fractions of an epoch: of ImageNet, 312 batches of 4 groups; the cosine by its half angle."""
    config = RECIPES[name]
    peak, warmup, epochs = config.lr, config.warmup_epochs, config.epochs
    rise = [step / 1248 for step in range(0, int(warmup * 1248), 7)]
    fall = [warmup + (epochs - warmup) * share for share in (0, 1e-6, 1 / 1248, 0.1, 1 / 3, 0.5, 0.77, 0.999, 1)]
    for epoch in rise:
        assert learning_rate(config, epoch) == pytest.approx(peak * epoch / warmup, rel=1e-12)
    for epoch in fall:
        angle = math.pi / 2 * (epoch - warmup) / (epochs - warmup)
        assert learning_rate(config, epoch) == pytest.approx(peak * math.cos(angle) ** 2, rel=1e-9, abs=1e-18)
    assert learning_rate(config, warmup) == peak and learning_rate(config, 0) == 0
    assert learning_rate(config, epochs + 1) == learning_rate(config, epochs)
    steps = [learning_rate(config, epoch) for epoch in (warmup / 2 + group / 1248 for group in range(5))]
    for one, next_one in itertools.pairwise(steps):  # from group to group of a batch, too
        assert next_one - one == pytest.approx(peak / warmup / 1248, rel=1e-6)


@pytest.mark.parametrize("name", ["imagenet-vit-s", "imagenet-vit-b"])
def test_momentum_coefficient_rises_to_one(name):
    config = RECIPES[name]
    for epoch in (0, 1 / 1248, 0.5, 1 + 3 / 1248, 20.25, 100, 150, 299.999, 300):
        expected = 1 - 0.01 * math.cos(math.pi / 2 * epoch / 300) ** 2
        assert momentum_coefficient(config, epoch) == pytest.approx(expected, rel=1e-12)
    assert momentum_coefficient(config, 0) == pytest.approx(0.99) and momentum_coefficient(config, 301) == 1


def test_kept_patches_are_the_floor_of_the_share():
    assert plan_patches(RECIPES["imagenet-vit-s"]) == (16, (14, 14), 49)
    assert plan_patches(RECIPES["cifar-vit-b"]) == (2, (16, 16), 64)
    a_third = dataclasses.replace(RECIPES["toy"], keep_ratio=0.3, groups=3)
    assert plan_patches(a_third)[2] == 19
    one = dataclasses.replace(RECIPES["toy"], keep_ratio=1 / 64, groups=64)
    assert plan_patches(one)[2] == 1
    for ratio, groups, said in ((0.27, 4, "at most 3 groups"), (0.5, 3, "at most 2 groups"), (0.001, 1, "or more")):
        with pytest.raises(ValueError, match=f"expected .*{said}"):
            plan_patches(dataclasses.replace(RECIPES["toy"], keep_ratio=ratio, groups=groups))


TOY = {  # what the demo trains with, and what every option is unless a recipe says otherwise
    "index_cache": None, "trust_index": False, "dry_run": False,
    "output": Path("runs/pretrain"), "epochs": 3, "max_steps": None, "batch_size": 64, "device": "auto", "seed": 0,
    "resume": "auto", "max_bad": 0.05, "checkpoint_every": 500, "keep_last": 3, "keep_every": 0, "log_every": 50,
    "lr": 1e-3, "weight_decay": 0.05, "data": None, "eval_data": None, "precision": "auto", "threads": 0,
    "betas": (0.9, 0.999), "warmup_epochs": 0.2, "recipe": "toy", "knn_images": 4000, "knn_every": 0, "fsdp": False,
    "compress_gradients": False, "grad_checkpointing": False, "accumulate": 1, "cuda_graph": True, "image_size": 64,
    "encoder": "none", "model": "vit_tiny_patch16_224", "patch_size": 8, "depth": 4, "position_embedding": "sincos",
    "frozen_patch_embed": False, "head_hidden": 512,
    "head_out": 128, "projector_layers": 3, "predictor_layers": 2, "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225), "keep_ratio": 0.25, "groups": 4, "window": 1, "redeal": False,
    "power": 3.0, "temperature": 0.1, "ema": None, "clip": "off", "clip_momentum": 0.4, "clip_alpha": 1.05,
    "augmentation": {
        "area": (0.3, 1.0), "aspect": (3 / 4, 4 / 3), "flip_p": 0.5, "jitter_p": 0.8, "brightness": 0.4,
        "contrast": 0.4, "saturation": 0.2, "hue": 0.3, "grey_p": 0.5, "blur_p": (0.0, 0.0), "blur_sigma": (0.1, 2.0),
        "solarise_p": (0.0, 0.0),
    },
}  # fmt: skip
NAN, INF = math.nan, math.inf
BOUNDS = {  # values at the edges of what is taken, and what is refused next to them
    "epochs": ((0.21, 2e9), (0, -1, NAN, 1e15, INF)), "batch_size": ((2,), (1, 0)), "checkpoint_every": ((1,), (0,)),
    "keep_last": ((1,), (0,)), "log_every": ((1,), (0,)), "keep_every": ((0, 1), (-1,)), "max_steps": ((1, None), (0,)),
    "max_bad": ((0, 1), (-0.01, 1.01)), "seed": ((-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63)),
    "lr": ((0, 1), (-1e-9, NAN, INF)), "weight_decay": ((0, 1), (-1e-9, NAN, INF)), "threads": ((0, 1024), (-1, 1025)),
    "warmup_epochs": ((0, 2.9), (-0.1, 3, NAN)),
    "betas": (((0, 0), (0.999, 0.999)), ((-0.1, 0.9), (0.9, 1), (0.9, NAN))),
    "image_size": ((1,), (0,)), "groups": ((1,), (0,)), "window": ((1,), (0,)), "accumulate": ((1,), (0,)),
    "redeal": ((False,), (True,)), "head_hidden": ((1,), (0,)), "head_out": ((1,), (0,)),
    "projector_layers": ((1,), (0,)), "predictor_layers": ((1,), (0,)), "temperature": ((1e-9,), (0, INF, NAN)),
    "clip_alpha": ((1e-9,), (0, INF)), "knn_images": ((0,), (-1,)), "patch_size": ((0,), (-1,)),
    "depth": ((0, 1024), (-1, 1025, 10**20)), "output": ((Path("run"),), (Path("s3://bucket/run"),)),
    "power": ((0, INF), (-0.1, NAN)), "knn_every": ((0, 0.5), (-0.1,)), "keep_ratio": ((1e-3, 1), (0, 1.001)),
    "clip_momentum": ((0, 0.999), (-0.1, 1)), "ema": ((None, 0, 1), (-0.1, 1.1)),
    "std": (((1e-9, 1, 1),), ((0, 1, 1), (1, NAN, 1), (1, 1, INF))),
    "mean": (((0, 0.5, 1),), ((0, NAN, 0), (128, 0, 0))),
}  # fmt: skip


def test_defaults_are_those_of_the_demo():
    assert dataclasses.asdict(RECIPES["toy"]) == TOY
    shared = {"data": None, "log_every": 20, "knn_images": 0, "augmentation": dataclasses.asdict(Augmentation())}
    assert dataclasses.asdict(Config()) == TOY | shared


@pytest.mark.parametrize("name", BOUNDS)
def test_options_are_taken_up_to_their_bounds(name):
    taken, refused = BOUNDS[name]
    for to in taken:
        assert getattr(dataclasses.replace(RECIPES["toy"], **{name: to}), name) == to
    for to in refused:
        with pytest.raises(ValueError, match=rf"^--{name.replace('_', '-')} \S+.*: expected "):
            dataclasses.replace(RECIPES["toy"], **{name: to})


def test_options_that_exclude_or_need_each_other():
    for options in ({"fsdp": True}, {"compress_gradients": True}, {"data": Path("a"), "eval_data": Path("b")}):
        Config(**options)
    for options, said in (
        ({"fsdp": True, "compress_gradients": True}, "no --fsdp beside it"),
        ({"eval_data": Path("b")}, "--data"),
        ({"data": Path("a"), "knn_every": 1}, "--knn-every 1: expected --eval-data beside it"),
    ):
        with pytest.raises(ValueError, match=said):
            Config(**options)
    assert Config(output=Path("~/run")).output == Path.home() / "run"
