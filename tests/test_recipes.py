import dataclasses
import math
import re

import pytest
from conftest import ROOT

from pipeline import Augmentation
from run.recipes import RECIPES, Config, learning_rate, momentum_coefficient
from run.session import plan_patches
from train import parse


def test_recipes_are_the_papers_tables():
    """APS, appendix tables: pretraining settings and augmentation of ImageNet and CIFAR."""
    for name, model in (("imagenet-vit-s", "vit_small_patch16_224"), ("imagenet-vit-b", "vit_base_patch16_224")):
        config = RECIPES[name]
        assert (config.model, config.image_size, config.batch_size, config.lr) == (model, 224, 4096, 1.28e-3)
        assert (config.weight_decay, config.betas, config.warmup_epochs, config.epochs) == (0.1, (0.9, 0.999), 20, 300)
        assert (config.head_hidden, config.head_out, config.projector_layers, config.predictor_layers) == (
            4096,
            256,
            3,
            2,
        )
        assert (config.clip, config.clip_momentum, config.clip_alpha, config.ema) == ("vector", 0.4, 1.05, 0.99)
        assert (config.position_embedding, config.frozen_patch_embed) == ("sincos", True)
        assert config.augmentation == Augmentation(
            area=(0.08, 1), aspect=(3 / 4, 4 / 3), flip_p=0.5, jitter_p=0.8, brightness=0.4, contrast=0.4,
            saturation=0.2, hue=0.1, grey_p=0.2, blur_p=(1, 0.1), blur_sigma=(0.1, 2), solarise_p=(0, 0.2),
        )  # fmt: skip
    for letter, size in (("t", "tiny"), ("s", "small"), ("b", "base")):
        config = RECIPES[f"cifar-vit-{letter}"]
        assert (config.model, config.image_size, config.patch_size) == (f"vit_{size}_patch16_224", 32, 2)
        assert (config.batch_size, config.lr, config.weight_decay) == (512, 1e-3, 0.05)
        assert (config.warmup_epochs, config.epochs, config.clip, config.ema) == (20, 1600, "off", None)
        assert (config.head_hidden, config.head_out, config.projector_layers, config.predictor_layers) == (
            512,
            128,
            3,
            3,
        )
        assert (config.position_embedding, config.frozen_patch_embed) == ("learned", False)
        augmentation = config.augmentation
        assert (augmentation.area, augmentation.saturation) == ((0.15, 1), 0.4)
        assert (augmentation.blur_p, augmentation.solarise_p) == ((0, 0), (0, 0))
    for config in RECIPES.values():
        assert (config.keep_ratio, config.groups, config.power, config.temperature) == (0.25, 4, 3, 0.1)


def test_every_option_is_read_somewhere():
    code = "".join(path.read_text() for folder in (".", "run") for path in (ROOT / folder).glob("*.py"))
    unread = {field.name for field in dataclasses.fields(Config) if not re.search(rf"config\.{field.name}\b", code)}
    assert not unread


def test_command_line_is_the_recipe_and_what_is_said_over_it():
    assert parse(["--recipe", "cifar-vit-s"]) == RECIPES["cifar-vit-s"]
    config = parse(["--recipe", "imagenet-vit-b", "--lr", "1e-4", "--blur-p", "0.5", "0", "--ema", "None"])
    expected = dataclasses.replace(RECIPES["imagenet-vit-b"].augmentation, blur_p=(0.5, 0.0))
    assert config == dataclasses.replace(RECIPES["imagenet-vit-b"], lr=1e-4, ema=None, augmentation=expected)


@pytest.mark.parametrize("name", ["imagenet-vit-s", "cifar-vit-t"])
def test_learning_rate_warms_up_and_falls_as_half_a_cosine(name):
    config = RECIPES[name]
    assert learning_rate(config, 0) == 0
    assert learning_rate(config, 10) == pytest.approx(config.lr / 2)
    assert learning_rate(config, 20) == pytest.approx(config.lr)
    middle = (config.epochs + 20) / 2
    assert learning_rate(config, middle) == pytest.approx(config.lr / 2)
    assert learning_rate(config, config.epochs) == pytest.approx(0, abs=1e-12)
    assert learning_rate(config, 21.25) == pytest.approx(
        config.lr * (1 + math.cos(math.pi * 1.25 / (config.epochs - 20))) / 2
    )


def test_momentum_coefficient_rises_to_one():
    config = RECIPES["imagenet-vit-s"]
    assert momentum_coefficient(config, 0) == pytest.approx(0.99)
    assert momentum_coefficient(config, 150) == pytest.approx(0.995)
    assert momentum_coefficient(config, 300) == pytest.approx(1)


def test_kept_patches_are_the_floor_of_the_share():
    assert plan_patches(RECIPES["imagenet-vit-s"]) == (16, (14, 14), 49)
    assert plan_patches(RECIPES["cifar-vit-b"]) == (2, (16, 16), 64)
    a_third = dataclasses.replace(RECIPES["toy"], keep_ratio=0.3, groups=3)
    assert plan_patches(a_third)[2] == 19
    for ratio, groups in ((0.27, 4), (0.5, 3), (0.001, 1)):
        with pytest.raises(ValueError, match=r"expected"):
            plan_patches(dataclasses.replace(RECIPES["toy"], keep_ratio=ratio, groups=groups))
