"""The options of fine-tuning: those of the field, and what is refused."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from conftest import ROOT

from transfer.recipes import TUNE_RECIPES, TuneConfig


def test_recipes_are_those_of_the_field():
    """MAE's fine-tuning of ViT-B on ImageNet (arXiv 2111.06377, table 9) and the code release of APS for CIFAR."""
    for name, recipe in (("imagenet", (1024, 2e-3, 0.65, 0)), ("cifar", (128, 5e-4, 1.0, 4))):
        config = TUNE_RECIPES[name]
        augmentation = config.augmentation
        assert (config.batch_size, config.lr, config.layer_decay, augmentation.padding) == recipe
        assert (config.recipe, config.epochs, config.warmup_epochs, config.weight_decay) == (name, 100, 5, 0.05)
        assert (config.mixup, config.cutmix, config.smoothing, config.erasing) == (0.8, 1.0, 0.1, 0.25)
        assert (augmentation.operations, augmentation.magnitude, augmentation.magnitude_std) == (2, 9, 0.5)
        assert augmentation.operation_p == 0.5 and augmentation.area == (0.08, 1.0)
        assert (config.drop_path, config.clip_norm) == (0.1, 0)
        assert not (config.image_size or config.patch_size or config.depth or config.probe_images)
    assert TUNE_RECIPES["cifar"].position_embedding == "learned"


def test_every_option_is_read_somewhere():
    code = "".join(path.read_text() for folder in ("run", "transfer") for path in (ROOT / folder).rglob("*.py"))
    code += "".join(path.read_text() for path in ROOT.glob("*.py"))
    assert not {f.name for f in dataclasses.fields(TuneConfig) if not re.search(rf"config\.{f.name}\b", code)}


BOUNDS = {  # option: values that are taken, values that are refused
    "eval_every": ((1, 7), (0, -1)),
    "image_size": ((0, 1), (-1,)),
    "patch_size": ((0, 1), (-1,)),
    "depth": ((0, 1), (-1,)),
    "probe_images": ((0, 1), (-1,)),
    "clip_norm": ((0, 0.5, 9), (-0.1, math.inf, math.nan)),
    "mixup": ((0, 0.5, 9), (-0.1, math.inf, math.nan)),
    "cutmix": ((0, 0.5, 9), (-0.1, math.inf, math.nan)),
    "drop_path": ((0, 0.99), (-0.1, 1, math.nan)),
    "smoothing": ((0, 0.99), (-0.1, 1, math.nan)),
    "ema": ((0, 0.99), (-0.1, 1, math.nan)),
    "layer_decay": ((0.01, 1), (0, 1.01, math.nan)),
    "erasing": ((0, 1), (-0.1, 1.01, math.nan)),
    "warmup_epochs": ((0, 2.9), (3, 4)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_values_out_of_range_are_refused_by_name(name):
    taken, refused = BOUNDS[name]
    for value in taken:
        assert getattr(TuneConfig(epochs=3, **{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} {value}: expected"):
            TuneConfig(epochs=3, **{name: value})


def test_images_are_mixed_in_pairs():
    for mixing in ({"mixup": 0.1, "cutmix": 0}, {"mixup": 0, "cutmix": 0.1}, {"mixup": 1, "cutmix": 1}):
        assert TuneConfig(batch_size=6, **mixing).batch_size == 6
        with pytest.raises(ValueError, match="--batch-size 7: expected an even number"):
            TuneConfig(batch_size=7, **mixing)
    assert TuneConfig(batch_size=7, mixup=0, cutmix=0).batch_size == 7


def test_an_encoder_has_its_own_shape(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert TuneConfig(encoder="~/run", image_size=32).encoder == str(Path("/somewhere/run"))
    for name in ("patch_size", "depth"):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} 1: expected no such option beside --encoder"):
            TuneConfig(encoder="run", **{name: 1})
        assert getattr(TuneConfig(**{name: 1}), name) == 1
