"""Every constant of a recipe reaches the weights, each step at its point of the schedules; nothing else does."""

import dataclasses

import pytest
from conftest import SMALL

import run.training
import train as program
from pipeline import Augmentation
from run.recipes import Config, learning_rate, momentum_coefficient
from tests.run.test_recipes import TABLE, fields, value

OTHER = {  # another value of everything that the weights may depend on
    "epochs": 3.0, "batch_size": 6, "lr": 2e-3, "betas": (0.9, 0.9), "weight_decay": 0.5, "warmup_epochs": 0.05,
    "temperature": 0.2, "ema": 0.5, "clip": "norm", "clip_momentum": 0.9, "clip_alpha": 1.5, "keep_ratio": 0.2,
    "groups": 3, "power": 0.0, "image_size": 40, "patch_size": 4, "depth": 2, "position_embedding": "learned",
    "frozen_patch_embed": True, "head_hidden": 24, "head_out": 12, "projector_layers": 2, "predictor_layers": 3,
    "mean": (0.485, 0.456, 0.5), "std": (0.229, 0.224, 0.3), "area": (0.5, 1), "aspect": (1, 1), "flip_p": 1.0,
    "jitter_p": 0.0, "brightness": 0.1, "contrast": 0.1, "saturation": 0.8, "hue": 0.3, "grey_p": 0.8,
    "blur_p": (1.0, 1.0), "blur_sigma": (1.0, 2.0), "solarise_p": (0.0, 1.0), "model": "vit_small_patch16_224",
    "seed": 1, "window": 2, "redeal": True,
}  # fmt: skip
BESIDE = {"redeal": {"window": 2}}  # without which an option is refused


def changed(config, name, to):
    if name in fields(Augmentation):
        return dataclasses.replace(config, augmentation=dataclasses.replace(config.augmentation, **{name: to}))
    return dataclasses.replace(config, **{name: to})


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
        return (config.output / "encoder/model.safetensors").read_bytes()

    return run


@pytest.fixture(scope="module")
def plain(trained):
    return trained()


@pytest.mark.parametrize("name", sorted(OTHER))
def test_every_constant_makes_a_difference(trained, plain, name):
    beside = BESIDE.get(name, {})
    assert trained(**beside, **{name: OTHER[name]}) != (trained(**beside) if beside else plain)


def test_nothing_else_makes_a_difference(trained, plain):
    """As it is promised to a run that is continued with other values of these."""
    assert OTHER.keys() == TABLE.keys() | {"model", "seed"}
    free = {
        "threads": 2, "resume": "never", "max_bad": 0.5, "checkpoint_every": 1, "keep_last": 1, "keep_every": 2,
        "log_every": 1, "knn_images": 8,
    }  # fmt: skip
    assert trained(**free) == plain


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
