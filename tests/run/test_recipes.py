import dataclasses
import itertools
import math
import re

import pytest
import timm
from conftest import ROOT, SMALL

import run.training
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
    "compress_gradients",
}  # fmt: skip


def fields(kind):
    return {field.name for field in dataclasses.fields(kind)}


def value(config, name):
    return getattr(config.augmentation if name in fields(Augmentation) else config, name)


def changed(config, name, to):
    if name in fields(Augmentation):
        return dataclasses.replace(config, augmentation=dataclasses.replace(config.augmentation, **{name: to}))
    return dataclasses.replace(config, **{name: to})


def test_every_field_has_its_source():
    """A new option has to be placed: in the table, with whose it is, or among ours."""
    assert not fields(Config) & fields(Augmentation)
    assert fields(Config) - {"augmentation", "model"} | fields(Augmentation) == TABLE.keys() | OURS
    assert not TABLE.keys() & OURS
    assert OURS - {"recipe", "seed"} == set(Config.FREE_ON_RESUME)


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


OTHER = {  # another value of everything that the weights may depend on
    "epochs": 3.0, "batch_size": 6, "lr": 2e-3, "betas": (0.9, 0.9), "weight_decay": 0.5, "warmup_epochs": 0.05,
    "temperature": 0.2, "ema": 0.5, "clip": "norm", "clip_momentum": 0.9, "clip_alpha": 1.5, "keep_ratio": 0.2,
    "groups": 3, "power": 0.0, "image_size": 40, "patch_size": 4, "depth": 2, "position_embedding": "learned",
    "frozen_patch_embed": True, "head_hidden": 24, "head_out": 12, "projector_layers": 2, "predictor_layers": 3,
    "mean": (0.485, 0.456, 0.5), "std": (0.229, 0.224, 0.3), "area": (0.5, 1), "aspect": (1, 1), "flip_p": 1.0,
    "jitter_p": 0.0, "brightness": 0.1, "contrast": 0.1, "saturation": 0.8, "hue": 0.3, "grey_p": 0.8,
    "blur_p": (1.0, 1.0), "blur_sigma": (1.0, 2.0), "solarise_p": (0.0, 1.0), "model": "vit_small_patch16_224",
    "seed": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    """What a run of a config, four steps long, exports."""
    start = Config(
        data=photos, device="cpu", threads=1, depth=1, image_size=32, batch_size=12, epochs=1.0, warmup_epochs=0.1,
        max_steps=4, head_hidden=16, head_out=8, ema=0.9, clip="vector",
    )  # fmt: skip

    def run(**changes):
        config = dataclasses.replace(start, output=tmp_path_factory.mktemp("trained"))
        for name, to in changes.items():
            assert value(config, name) != to
            config = changed(config, name, to)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program, "parse", lambda arguments: config)
            program.main([])
        return (config.output / "encoder.safetensors").read_bytes()

    return run


@pytest.fixture(scope="module")
def plain(trained):
    return trained()


@pytest.mark.parametrize("name", sorted(OTHER))
def test_every_constant_makes_a_difference(trained, plain, name):
    assert trained(**{name: OTHER[name]}) != plain


def test_nothing_else_makes_a_difference(trained, plain):
    """As it is promised to a run that is continued with other values of these."""
    assert OTHER.keys() == TABLE.keys() | {"model", "seed"}
    free = {
        "threads": 2, "resume": "never", "max_bad": 0.5, "checkpoint_every": 1, "keep_last": 1, "keep_every": 2,
        "log_every": 1, "knn_images": 8,
    }  # fmt: skip
    assert trained(**free) == plain


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


def test_schedules_advance_with_every_group(photos, tmp_path, monkeypatch):
    """2 epochs of 4 batches of 4 groups: each step is 1/16 epoch on, also in a run that stopped within a batch."""
    seen = {"learning_rate": [], "momentum_coefficient": []}

    def note(name, function):
        def noted(config, epoch):
            seen[name].append(epoch)
            return function(config, epoch)

        monkeypatch.setattr(run.training, name, noted)

    note("learning_rate", learning_rate)
    note("momentum_coefficient", momentum_coefficient)
    for steps in ("6", "32"):
        program.main([*SMALL, "--data", str(photos), "--output", str(tmp_path), "--ema", "0.9", "--max-steps", steps])
    assert seen["learning_rate"] == seen["momentum_coefficient"] == [step / 16 for step in range(32)]


def test_kept_patches_are_the_floor_of_the_share():
    assert plan_patches(RECIPES["imagenet-vit-s"]) == (16, (14, 14), 49)
    assert plan_patches(RECIPES["cifar-vit-b"]) == (2, (16, 16), 64)
    a_third = dataclasses.replace(RECIPES["toy"], keep_ratio=0.3, groups=3)
    assert plan_patches(a_third)[2] == 19
    for ratio, groups in ((0.27, 4), (0.5, 3), (0.001, 1)):
        with pytest.raises(ValueError, match=r"expected"):
            plan_patches(dataclasses.replace(RECIPES["toy"], keep_ratio=ratio, groups=groups))
