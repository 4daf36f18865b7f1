"""What a run exports loads in timm alone, in a process that cannot import anything of this project."""

import inspect
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from model import create_encoder
from model.export import export_model
from pipeline import Index
from transfer import knn
from transfer.pretrained import load_encoder

ALONE = """
import importlib.util, sys
import timm, torch
assert not any(map(importlib.util.find_spec, ("model", "run", "kernels", "pipeline"))), sys.path
torch.set_grad_enabled(False)
for folder in sys.argv[1:]:
    images = torch.load(f"{folder}.pt")
    vit = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    data = timm.data.resolve_data_config({}, model=vit)
    data = {key: data[key] for key in ("mean", "std", "input_size", "interpolation", "crop_pct", "crop_mode")}
    result = {"out": vit(images), "data": data, "names": vit.pretrained_cfg.get("label_names")}
    if images.shape[2] == images.shape[3]:
        classes = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=7, img_size=64).eval()
        result |= {"head": classes.head.out_features, "larger": classes.forward_features(images.repeat(1, 1, 2, 2))}
    torch.save(result, f"{folder}-alone.pt")
"""
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
TRAINING = {"method": "APS", "recipe": "toy", "steps": 1200, "images": 48}
TUNING = {
    "encoder": TRAINING, "recipe": "cifar", "steps": 60, "images": 40, "top1": 81.25, "eval_images": 32,
}  # fmt: skip


def exported(folder, name="vit_tiny_patch16_224", seed=0, classes=(), **arguments):
    """An encoder that is trained a little, so to speak, and its folder."""
    arguments = {"img_size": 32, "num_classes": len(classes), "patch_size": 8, "depth": 2, **arguments}
    vit = create_encoder(name, sincos=True, frozen_patch_embed=True, seed=3, **arguments).eval()
    torch.manual_seed(seed)
    for parameter in vit.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    how = {"training": TUNING if classes else TRAINING, "classes": classes}
    export_model(vit, folder, name=name, arguments=arguments, mean=MEAN, std=STD, **how)
    return vit


def test_timm_alone_loads_a_folder(tmp_path):
    cases = {
        "class-token": ({}, "squash", 1.0),
        "registers": ({"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, "squash", 1.0),
        "not-square": ({"img_size": (64, 96), "qkv_bias": False}, "center", 0.875),
        "classifier": ({"classes": ("cat", "dog", "eel")}, "squash", 1.0),
    }
    images, made = {}, {}
    for name, (arguments, _, _) in cases.items():
        made[name] = exported(tmp_path / name, **arguments)
        images[name] = torch.randn(2, 3, *made[name].patch_embed.img_size)
        torch.save(images[name], tmp_path / f"{name}.pt")
    # -I: neither the working directory nor PYTHONPATH is searched.
    command = [sys.executable, "-I", "-c", ALONE, *(tmp_path / name for name in cases)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    for name, (arguments, mode, share) in cases.items():
        folder, vit, alone = tmp_path / name, made[name], torch.load(tmp_path / f"{name}-alone.pt")
        torch.testing.assert_close(alone["out"], vit(images[name]))
        assert alone["data"] == {
            "mean": [*MEAN], "std": [*STD], "input_size": (3, *vit.patch_embed.img_size), "interpolation": "bilinear",
            "crop_pct": share, "crop_mode": mode,
        }  # fmt: skip
        classes = arguments.get("classes", ())
        assert alone["names"] == (list(classes) or None)
        for source in (folder, folder / "model.safetensors"):
            again, description = load_encoder(source, num_classes=len(classes))
            torch.testing.assert_close(again.eval()(images[name]), alone["out"])
            assert description["training"] == (TUNING if classes else TRAINING)
            assert (description["mean"], description["std"]) == ([*MEAN], [*STD])
        if "larger" in alone:  # another size and a new classifier, by timm and by us
            again = load_encoder(folder, image_size=64)[0].eval()
            torch.testing.assert_close(again.forward_features(images[name].repeat(1, 1, 2, 2)), alone["larger"])
            assert alone["head"] == 7


@pytest.mark.parametrize("size", [32, 96])
def test_features_by_timms_transform_are_those_of_our_evaluation(tmp_path, size):
    """On a photograph, but for sizes and places that timm rounds to whole pixels; those of others are further away."""
    photo = Image.open(pytest.importorskip("matplotlib.cbook").get_sample_data("grace_hopper.jpg", asfileobj=False))
    folder, images = tmp_path / "encoder", tmp_path / "images"
    images.mkdir()
    for number, box in enumerate([(40, 0, 400, 470), (0, 30, 151, 240), (100, 300, 512, 567), (13, 90, 260, 399)]):
        photo.crop(box).save(images / f"{number}.png")
    vit = exported(folder, img_size=size)
    how = {"mean": MEAN, "std": STD, "device": torch.device("cpu"), "threads": 1}
    (ours,), _ = knn.features([vit], Index.scan(images), np.arange(4), **how)
    encoder = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=encoder))
    pixels = torch.stack([transform(Image.open(images / f"{number}.png")) for number in range(4)])
    with torch.inference_mode():
        similarity = F.normalize(encoder(pixels), dim=1) @ ours.T
    assert similarity.diagonal().min() > 0.99, similarity
    assert similarity[~torch.eye(4, dtype=torch.bool)].max() < 0.97, similarity


def test_the_card_of_a_run(undisturbed):
    folder = undisturbed[0] / "encoder"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert not [path for path in (folder, *folder.iterdir()) if not path.stat().st_mode & 0o004], "not for others"
    card, training = (folder / "README.md").read_text(), json.loads((folder / "config.json").read_text())["training"]
    for said in (
        "recipe | `toy`", "48 images", "steps | 32", f"**{training['knn_trained']:.1f} +- ",
        f"{training['knn_untrained']:.1f} +- ", "% of the same network untrained. One run; +- is the",
        "Not measured: other seeds, linear probe, fine-tuning", "\nema: 0.9\n",
    ):  # fmt: skip
        assert said in card
    assert f"k = {inspect.signature(knn.accuracy).parameters['k'].default}," in card
    assert str(undisturbed[0]) not in card and "eval_data" not in card  # nothing of this machine


def test_what_was_not_measured_is_said(tmp_path):
    exported(tmp_path / "deep" / "run")
    config = json.loads((tmp_path / "deep" / "run" / "config.json").read_text())
    assert config.keys() >= {"architecture", "num_features", "global_pool", "training"} and config["num_classes"] == 0
    assert config["model_args"] == {"img_size": 32, "patch_size": 8, "depth": 2}
    fixed = {"tag": "aps", "custom_load": False, "num_classes": 0, "fixed_input_size": True}
    assert config["pretrained_cfg"].items() >= fixed.items()
    card = (tmp_path / "deep" / "run" / "README.md").read_text()
    assert "features | 192 an image: the class token |" in card
    assert "```\nnot known\n```" in card  # its options, if they are not given
    assert "Nothing: the run had no labelled images" in card and "Not measured: k-NN accuracy, linear probe" in card
    exported(tmp_path / "tuned", classes=("cat", "dog"))
    card = (tmp_path / "tuned" / "README.md").read_text()
    assert "fine-tuned on 2 classes" in card and "on 32 evaluation images at the end of the last epoch: top-1" in card
    assert "started from | method APS, recipe toy, steps 1200, images 48 |" in card and "**81.2 +- 6.9 %**" in card


def test_a_folder_is_replaced_and_what_else_is_in_it_stays(tmp_path, monkeypatch):
    """At any moment, also where the disk is full, it is loaded whole: before, between and after the renames."""
    before = exported(tmp_path / "it", seed=0)
    (tmp_path / "it" / "LICENSE").write_text("mine")
    seen, replace, write = [], type(tmp_path).replace, os.fsync

    def looked(path, to):
        seen.append(load_encoder(tmp_path / "it")[0].norm.bias)
        return replace(path, to)

    def full(file):
        raise OSError(28, "No space left on device")

    for number in range(3):  # the file for which there is no room
        left = iter([write] * number + [full])
        monkeypatch.setattr(os, "fsync", lambda file, left=left: next(left)(file))
        for folder in ("it", "new"):
            left = iter([write] * number + [full])
            monkeypatch.setattr(os, "fsync", lambda file, left=left: next(left)(file))
            with pytest.raises(OSError, match="No space"):
                exported(tmp_path / folder, seed=1)
    assert {path.name for path in tmp_path.iterdir()} == {"it"}
    assert torch.equal(load_encoder(tmp_path / "it")[0].norm.bias, before.norm.bias)

    monkeypatch.undo()
    monkeypatch.setattr(type(tmp_path), "replace", looked)
    after = exported(tmp_path / "it", seed=1)
    seen.append(load_encoder(tmp_path / "it")[0].norm.bias)
    assert not torch.equal(before.norm.bias, after.norm.bias)
    assert [torch.equal(found, before.norm.bias) for found in seen] == [True] + [False] * (len(seen) - 1)
    assert all(torch.equal(found, after.norm.bias) for found in seen[1:])
    assert (tmp_path / "it" / "LICENSE").read_text() == "mine" and not (tmp_path / "it.partial").exists()
