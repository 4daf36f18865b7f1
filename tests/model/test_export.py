"""What a run exports loads in timm alone, in a process that cannot import anything of this project."""

import inspect
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ONE_THREAD, run_program

from model import create_encoder
from model.export import export_encoder, export_folder, main
from transfer import knn
from transfer.pretrained import load_encoder

ALONE = """
import importlib.util, json, sys
import timm, torch
assert not any(map(importlib.util.find_spec, ("model", "run", "kernels", "pipeline"))), sys.path
torch.set_grad_enabled(False)
for folder in sys.argv[1:]:
    description = json.load(open(f"{folder}/encoder.json"))
    images = torch.load(f"{folder}/images.pt")
    file = timm.create_model(
        description["model"], checkpoint_path=f"{folder}/encoder.safetensors", **description["arguments"]
    ).eval()
    hub = timm.create_model(f"local-dir:{folder}/hub", pretrained=True).eval()
    data = timm.data.resolve_data_config({}, model=hub)
    data = {key: data[key] for key in ("mean", "std", "input_size", "interpolation", "crop_pct", "crop_mode")}
    result = {"file": file(images), "hub": hub(images), "data": data}
    if images.shape[2] == images.shape[3]:
        classes = timm.create_model(f"local-dir:{folder}/hub", pretrained=True, num_classes=7, img_size=64).eval()
        result |= {"head": classes.head.out_features, "larger": classes.forward_features(images.repeat(1, 1, 2, 2))}
    torch.save(result, f"{folder}/alone.pt")
"""
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)


def exported(folder, name="vit_tiny_patch16_224", **arguments):
    """An encoder that is trained a little, so to speak, and its files in ``folder``."""
    arguments = {"img_size": 32, "num_classes": 0, "patch_size": 8, "depth": 2, **arguments}
    vit = create_encoder(name, sincos=True, frozen_patch_embed=True, seed=3, **arguments).eval()
    torch.manual_seed(0)
    for parameter in vit.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    folder.mkdir(exist_ok=True)
    training = {"method": "APS", "recipe": "toy", "steps": 1200, "images": 48}
    export_encoder(vit, folder, name=name, arguments=arguments, mean=MEAN, std=STD, training=training)
    return vit


def test_timm_alone_loads_file_and_hub_folder(tmp_path):
    cases = {
        "class-token": ({}, "squash", 1.0),
        "registers": ({"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, "squash", 1.0),
        "not-square": ({"img_size": (64, 96), "qkv_bias": False}, "center", 0.875),
    }
    images, made = {}, {}
    for name, (arguments, _, _) in cases.items():
        made[name] = exported(tmp_path / name, **arguments)
        export_folder(tmp_path / name, tmp_path / name / "hub")
        images[name] = torch.randn(2, 3, *made[name].patch_embed.img_size)
        torch.save(images[name], tmp_path / name / "images.pt")
    # -I: neither the working directory nor PYTHONPATH is searched.
    command = [sys.executable, "-I", "-c", ALONE, *(tmp_path / name for name in cases)]
    subprocess.run(command, cwd=tmp_path, env=os.environ | ONE_THREAD, check=True, timeout=120)
    for name, (_, mode, share) in cases.items():
        folder, vit, alone = tmp_path / name, made[name], torch.load(tmp_path / name / "alone.pt")
        torch.testing.assert_close(alone["file"], vit(images[name]))
        assert torch.equal(alone["hub"], alone["file"])
        assert alone["data"] == {
            "mean": [*MEAN], "std": [*STD], "input_size": (3, *vit.patch_embed.img_size), "interpolation": "bilinear",
            "crop_pct": share, "crop_mode": mode,
        }  # fmt: skip
        again, description = load_encoder(folder / "hub")
        torch.testing.assert_close(again.eval()(images[name]), alone["hub"])
        assert json.loads(json.dumps(description)) == json.loads((folder / "encoder.json").read_text())
        if "larger" in alone:  # another size and a new classifier, by timm and by us
            again = load_encoder(folder / "hub", image_size=64)[0].eval()
            torch.testing.assert_close(again.forward_features(images[name].repeat(1, 1, 2, 2)), alone["larger"])
            assert alone["head"] == 7


def test_a_run_as_a_hub_folder(undisturbed, tmp_path, capsys):
    run = undisturbed[0]
    done = run_program("-W", "error", "-m", "model.export", run, "--to", tmp_path / "hub")
    assert done.stderr == "" and f"local-dir:{tmp_path / 'hub'}" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"hub"}
    assert {path.name for path in (tmp_path / "hub").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    card, training = (
        (tmp_path / "hub/README.md").read_text(),
        json.loads((run / "encoder.json").read_text())["training"],
    )
    for said in (
        "recipe | `toy`", "48 images", "steps | 32", f"**{training['knn_trained']:.1f} %**",
        f"{training['knn_untrained']:.1f} %", "Not measured: other seeds, linear probe, fine-tuning", "\nema: 0.9\n",
    ):  # fmt: skip
        assert said in card
    assert f"k = {inspect.signature(knn.accuracy).parameters['k'].default}," in card
    assert str(run) not in card and "eval_data" not in card  # nothing of this machine
    with pytest.raises(SystemExit, match="2"):
        main([str(run), "--to", str(tmp_path / "hub")])
    assert capsys.readouterr().err.endswith("hub is there already; expected a new or an empty folder\n")


def test_what_was_not_measured_is_said(tmp_path):
    exported(tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "deep" / "hub")
    config = json.loads((tmp_path / "deep" / "hub" / "config.json").read_text())
    assert config.keys() >= {"architecture", "num_features", "global_pool", "training"} and config["num_classes"] == 0
    assert config["model_args"] == {"img_size": 32, "patch_size": 8, "depth": 2}
    fixed = {"tag": "aps", "custom_load": False, "num_classes": 0, "fixed_input_size": True}
    assert config["pretrained_cfg"].items() >= fixed.items()
    card = (tmp_path / "deep" / "hub" / "README.md").read_text()
    assert "features | 192 an image: the class token |" in card
    assert "```\nnot known\n```" in card  # its options, without a config.json
    assert "Nothing: the run had no labelled images" in card and "Not measured: k-NN accuracy, linear probe" in card


def test_a_folder_is_written_where_there_is_none_and_into_an_empty_one_alone(tmp_path, capsys):
    exported(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    export_folder(tmp_path / "run", tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for name in ("empty", "file", "full"):
        with pytest.raises(ValueError, match=r"is there already; expected a new or an empty folder"):
            export_folder(tmp_path / "run", tmp_path / name)
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "file").read_text() == "mine"
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "run")])
    assert "required: --to" in capsys.readouterr().err


def test_unfinished_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no encoder.safetensors; expected .* a run that has come to its end"):
        export_folder(tmp_path, tmp_path / "hub")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"holds a fine-tuned model, .*; expected a run of train.py"):
        export_folder(tmp_path, tmp_path / "hub")
    exported(tmp_path)
    for broken in ("{", "[]", '{"model": "vit_tiny_patch16_224"}'):
        (tmp_path / "encoder.json").write_text(broken)
        with pytest.raises(ValueError, match=r"encoder.json does not describe an encoder"):
            export_folder(tmp_path, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    vit = create_encoder("vit_tiny_patch16_224", sincos=True, frozen_patch_embed=False, seed=0, depth=1, img_size=32)
    write = type(tmp_path).write_bytes

    def full(path, data):
        write(path, data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        export_encoder(vit, tmp_path, name="x", arguments={}, mean=[0] * 3, std=[1] * 3, training={})
    assert not list(tmp_path.iterdir())
