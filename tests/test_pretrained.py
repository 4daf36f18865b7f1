"""Encoders come back as they were saved, from every kind of source; nothing is loaded in part."""

import json
import shutil

import pytest
import timm
import torch

from run import checkpoint
from run.pretrained import load_encoder

TINY = {"img_size": 32, "patch_size": 8, "depth": 2}
NAME = "vit_tiny_patch16_224"


def foreign(**more):
    torch.manual_seed(5)
    return timm.create_model(NAME, **TINY | more).eval()


def features(vit, side=32):
    return vit.eval()(torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def run(undisturbed, tmp_path_factory):
    """A finished run that may be changed."""
    return shutil.copytree(undisturbed[0], tmp_path_factory.mktemp("pretrained") / "run")


def test_a_run(run, tmp_path):
    description = json.loads((run / "encoder.json").read_text())
    plain = timm.create_model(NAME, checkpoint_path=str(run / "encoder.safetensors"), **description["arguments"])
    expected = features(plain)
    for name in ("encoder.safetensors", "encoder.json"):
        shutil.copy(run / name, tmp_path / name.replace("encoder", "mine"))
    newest = checkpoint.newest(run / "checkpoints")[0]
    for source in (run, run / "encoder.safetensors", tmp_path / "mine.safetensors", newest):
        vit, found = load_encoder(source)
        assert torch.equal(features(vit), expected), source
        assert {key: found[key] for key in ("model", "arguments", "mean", "std")} == {
            key: description[key] for key in ("model", "arguments", "mean", "std")
        }
        assert found["training"]["steps"] == 32 and found["training"]["images"] == 48
