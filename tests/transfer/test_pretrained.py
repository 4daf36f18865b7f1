"""Encoders come back as they were saved, from every kind of source, and never in part."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from transfer.pretrained import load_encoder

NAME, SHAPE = "vit_tiny_patch16_224", {"patch_size": 8, "depth": 2}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def made(**more):
    torch.manual_seed(0)
    return timm.create_model(NAME, **{"img_size": 32, "num_classes": 0} | SHAPE | more).eval()


def features(vit):
    return vit.forward_head(vit.eval().forward_features(IMAGES), pre_logits=True)


def load(path, **more):
    return load_encoder(path, model=NAME, **SHAPE | more)


@pytest.fixture
def run(undisturbed, tmp_path):
    """A finished run that may be changed."""
    return shutil.copytree(undisturbed[0], tmp_path / "run")


def as_two_files(run, stem="encoder"):
    """What older versions of this project left in the place of a folder."""
    known = json.loads((run / "encoder/config.json").read_text())
    data = known["pretrained_cfg"]
    arguments = {**known["model_args"], "num_classes": data["num_classes"]}
    description = {"model": known["architecture"], "arguments": arguments, "mean": data["mean"], "std": data["std"]}
    (run / f"{stem}.json").write_text(json.dumps(description | {"training": known["training"]}))
    shutil.move(run / "encoder/model.safetensors", run / f"{stem}.safetensors")
    shutil.rmtree(run / "encoder")


def test_a_run_its_encoder_and_its_checkpoints(run, tmp_path):
    description = load_encoder(run)[1]
    expected = features(timm.create_model(f"local-dir:{run / 'encoder'}", pretrained=True))
    shutil.copytree(run / "encoder", tmp_path / "mine")
    old = shutil.copytree(run, tmp_path / "old")
    as_two_files(old)
    tuned = shutil.copytree(run, tmp_path / "tuned")
    (tuned / "encoder").rename(tuned / "model")
    older = shutil.copytree(run, tmp_path / "older")
    as_two_files(older, "model")
    newest = run / "checkpoints" / "step-00000032.pt"

    def check(source):
        vit, found = load_encoder(source)
        assert type(vit) is VisionTransformer and torch.equal(features(vit), expected), source
        assert {**found, "training": None} == {**description, "training": None}
        assert (found["training"]["steps"], found["training"]["images"]) == (32, 48)

    sources = run, run / "encoder", tmp_path / "mine", run / "encoder/model.safetensors", newest
    for source in (*sources, old, old / "encoder.safetensors", tuned, older):
        check(source)
    # The export of the newest checkpoint is what is taken, a run that was continued past it, and one that has none yet.
    changed = load_file(run / "encoder/model.safetensors") | {"norm.bias": torch.full((192,), 3.0)}
    for weights in (run / "encoder/model.safetensors", old / "encoder.safetensors"):
        save_file(changed, weights)
        assert torch.equal(load_encoder(weights.parents[weights.parent != old])[0].norm.bias, changed["norm.bias"])
    for file in (run / "encoder/config.json", old / "encoder.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"training": {"steps": 24}}))
    check(run)
    check(old)
    shutil.rmtree(run / "encoder")
    check(run)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 255
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match=r"step-00000032.pt is damaged .*; the one before it is used"):
        assert load_encoder(run)[1]["training"]["steps"] == 30


@pytest.mark.parametrize("name", ["bare.safetensors", "bare.bin", "model.pth", "state_dict.pt"])
def test_checkpoints_of_timm(tmp_path, name):
    vit = made(num_classes=10)
    path, state = tmp_path / name, vit.state_dict()
    wrapped = {f"module.{key}": tensor for key, tensor in state.items()}
    nested = {"bare": state, "model": {"model": state, "epoch": 3}, "state_dict": {"state_dict": wrapped}}[path.stem]
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(nested, path)
    found, description = load(path)
    assert torch.equal(features(found), features(vit))
    assert description["arguments"] == {"img_size": 32, "num_classes": 0, **SHAPE}  # the size is that of the positions
    assert (description["mean"], description["std"]) == ([0.5] * 3, [0.5] * 3)  # as timm has it for this model
    assert torch.equal(load(path, num_classes=10)[0](IMAGES), vit(IMAGES))  # its own head
    assert load(path, num_classes=7, drop_path_rate=0.1)[0](IMAGES).shape == (2, 7)  # a fresh one
    with pytest.raises(ValueError, match=r"does not say which model it is of; expected --model"):
        load_encoder(path)


@pytest.mark.parametrize(
    "change, more, problem",
    [
        ({"norm.bias": None}, {}, r"1 missing: norm.bias$"),
        ({"cls_token_2": torch.zeros(1)}, {}, r"1 left over: cls_token_2$"),
        ({"norm.bias": torch.zeros(1)}, {}, r"1 of another shape: norm.bias \[1\] instead of \[192\]$"),
        ({"head.bias": torch.zeros(10)}, {"num_classes": 10}, r"1 missing: head.weight$"),
        ({"head.weight": torch.zeros(10, 64)}, {"num_classes": 10}, r"missing: head.bias; .*: head.weight \[10, 64"),
        ({"pos_embed": torch.zeros(1, 1 + 12, 192)}, {}, r"pos_embed \[1, 13, 192\] instead of"),
        ({"pos_embed": torch.zeros(1, 1 + 9, 192)}, {"img_size": 32}, r"pos_embed \[1, 10, 192\] instead of"),
        ({"pos_embed": torch.zeros(1, 1 + 16, 64)}, {"img_size": 32}, r"pos_embed \[1, 17, 64\] instead of"),
        ({}, {"depth": 1}, r"12 left over: blocks.1.attn.proj.bias, .*, blocks.1.norm2.weight$"),
        ({}, {"depth": 6}, r"48 missing: blocks.2.norm1.weight, .* and 18 more$"),
        ({}, {"patch_size": 16}, r"patch_embed.proj.weight \[192, 3, 8, 8\] instead of \[192, 3, 16, 16\]"),
        ({}, {"reg_tokens": 4}, r"1 missing: reg_token"),
    ],
)  # fmt: skip
def test_half_loads_are_refused(tmp_path, change, more, problem):
    state = {key: tensor for key, tensor in (made().state_dict() | change).items() if tensor is not None}
    save_file(state, tmp_path / "timm.safetensors")
    with pytest.raises(ValueError, match=rf"timm.safetensors does not fit {NAME} .*{problem}"):
        load(tmp_path / "timm.safetensors", **more)


@pytest.mark.parametrize("own, new", [(32, 48), (32, (16, 40)), ((16, 64), (64, 16)), ((24, 40), 32)])
def test_another_size_resamples_the_positions_as_timm_does(tmp_path, own, new):
    vit = made(img_size=own)
    (tmp_path / "mine.json").write_text(json.dumps({
        "model": NAME, "arguments": {"img_size": own, **SHAPE}, "mean": [0, 0, 0], "std": [1, 1, 1], "training": {},
    }))  # fmt: skip
    save_file(vit.state_dict(), tmp_path / "mine.safetensors")
    found, description = load_encoder(tmp_path / "mine.safetensors", image_size=new)
    assert description["arguments"]["img_size"] == new and found.patch_embed.img_size == timm.layers.to_2tuple(new)
    grids = {"old_size": vit.patch_embed.grid_size, "new_size": found.patch_embed.grid_size}
    state = vit.state_dict()
    expected = state | {"pos_embed": resample_abs_pos_embed(state["pos_embed"], **grids)}
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.state_dict().items())
    assert not torch.equal(found.pos_embed, vit.pos_embed)
    with pytest.raises(ValueError, match=r"--image-size 30 is not divisible by the patch size 8"):
        load_encoder(tmp_path / "mine.safetensors", image_size=30)


def test_a_model_of_timm_at_the_size_it_had_and_at_another(tmp_path):
    """Against timm's own way from a checkpoint to a model of another size."""
    vit = made(img_size=48, class_token=False, reg_tokens=2, global_pool="avg")  # registers, no class token
    save_file(vit.state_dict(), tmp_path / "timm.safetensors")
    pooling = {"class_token": False, "reg_tokens": 2, "global_pool": "avg"}
    for size in (48, 32):
        expected = made(img_size=size, **pooling)
        expected.load_state_dict(checkpoint_filter_fn(vit.state_dict(), expected))
        found = load(tmp_path / "timm.safetensors", image_size=size if size == 32 else None, **pooling)[0]
        assert found.patch_embed.img_size == (size, size)
        assert all(torch.equal(tensor, found.state_dict()[key]) for key, tensor in expected.state_dict().items())


def test_a_folder_in_the_layout_of_a_hub(tmp_path):
    """Of today and of older versions of timm, as safetensors before anything else; of a fine-tuned model."""
    vit = made()
    statistics = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    own = {"img_size": 32, **SHAPE}
    for name, config, training in (
        ("new", {"model_args": own, "pretrained_cfg": statistics, "training": {"steps": 3}}, {"steps": 3}),
        ("old", {"model_args": own | {"pretrained": True}, **statistics}, {"checkpoint": "old"}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architecture": NAME} | config))
        with pytest.raises(ValueError, match=rf"{name} has a config.json and no weights; expected model.safetensors"):
            load_encoder(folder)
        torch.save(vit.state_dict(), folder / "pytorch_model.bin")
        for _ in range(2):
            found, description = load_encoder(folder)
            assert torch.equal(features(found), features(vit))
            arguments = {"num_classes": 0, **own}
            assert description == {"model": NAME, "arguments": arguments, "training": training, **statistics}
            save_file(vit.state_dict(), folder / "model.safetensors")
            (folder / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "new/config.json").write_text(json.dumps({"architecture": NAME, "model_args": own}))
    assert load_encoder(tmp_path / "new")[1]["mean"] == [0.5] * 3, "as timm has it for this model"
    (tmp_path / "new/config.json").write_text(json.dumps({"config": {}}))
    with pytest.raises(ValueError, match=r"holds no encoder, no checkpoint of a run and no model in"):
        load_encoder(tmp_path / "new")

    tuned = {"model": NAME, "arguments": own | {"num_classes": 5}, "training": {"steps": 1}, **statistics}
    (tmp_path / "old/model.json").write_text(json.dumps(tuned))
    save_file(made(num_classes=5).state_dict(), tmp_path / "old/model.safetensors")
    found, description = load_encoder(tmp_path / "old")
    assert torch.equal(features(found), features(made(num_classes=5))) and description["arguments"]["num_classes"] == 0
    assert description["training"] == {"steps": 1} and load_encoder(tmp_path / "old", num_classes=5)[0].num_classes == 5


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "unpickled")


def test_what_is_no_encoder_is_refused(run, tmp_path):
    def refused(source, problem, **more):
        with pytest.raises(ValueError, match=problem):
            load_encoder(source, **more)

    torch.save(made().state_dict() | {"more": Trap(tmp_path / "trap")}, tmp_path / "trap.pth")
    refused(tmp_path / "trap.pth", r"can be read safely \([^.\n]+\); expected tensors by name", model=NAME)
    assert not (tmp_path / "trap").exists()
    torch.save({"network": made().state_dict(), "step": 3}, tmp_path / "other.pt")
    refused(tmp_path / "other.pt", r"other.pt holds network, step; expected the weights", model=NAME)
    (tmp_path / "torn.safetensors").write_bytes((run / "encoder/model.safetensors").read_bytes()[:5000])
    refused(tmp_path / "torn.safetensors", r"torn.safetensors is no checkpoint", model=NAME)
    save_file(made().state_dict(), tmp_path / "whole.safetensors")
    refused(tmp_path / "whole.safetensors", r"--model resnet18 is no plain Vision Transformer", model="resnet18")
    refused(tmp_path / "nothing", r"nothing does not exist")
    refused(run, r"--model vit_base_patch16_224: .*run is a vit_tiny_patch16_224", model="vit_base_patch16_224")
    known = json.loads((run / "encoder/config.json").read_text())
    for change, problem in (
        ({"model_args": [1]}, r"encoder/config.json is not the JSON of an encoder"),
        ({"training": "much"}, r"encoder/config.json is not the JSON of an encoder"),
        ({"model_args": {"num_heads": 5}}, r"AssertionError: .*num_heads, for .*'num_heads': 5.*; expected a Vision"),
        ({"pretrained_cfg": {"mean": [0, 1]}}, r"encoder has a mean of \[0, 1\]; expected three numbers, of std above"),
        ({"pretrained_cfg": {"std": [1, 1, 0]}}, r"encoder has a std of \[1, 1, 0\]"),
    ):
        (run / "encoder/config.json").write_text(json.dumps(known | change))
        refused(run / "encoder", problem)
    (run / "encoder/config.json").write_text("[" * 100_000)
    refused(run, r"encoder/config.json is not the JSON of")
    shutil.rmtree(run / "encoder")
    save_file(made().state_dict(), run / "encoder.safetensors")
    (run / "encoder.json").write_text('{"model": 1}')
    refused(run, r"encoder.json does not describe an encoder")
    shutil.rmtree(run / "checkpoints")
    (run / "encoder.safetensors").unlink()
    refused(run, r"run holds no encoder, no checkpoint of a run and no model in timm's hub layout")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path, value):
    """One of them is enough: k-NN would give the accuracy of chance, a probe a traceback."""
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
    with torch.no_grad():
        vit.blocks[0].mlp.fc1.weight[3, 5] = value
    torch.save(vit.state_dict(), tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"not finite, in 1 of \d+ tensors \(blocks.0.mlp.fc1.weight\); expected"):
        load_encoder(tmp_path / "a.pth", model="vit_tiny_patch16_224", depth=1)
    torch.save(vit.state_dict() | {"norm.bias": torch.zeros(192, dtype=torch.int8)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"a.pth has norm.bias of int8; expected weights in float32, or half of it"):
        load_encoder(tmp_path / "a.pth", model="vit_tiny_patch16_224", depth=1)
