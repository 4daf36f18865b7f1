"""The training of a detector: its options, its optimizer, one step, its data."""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from model import create_encoder, timm_arguments
from model.encoder import sincos_position_embedding
from model.export import export_model
from run.ranks import Ranks
from tests.run.test_loop import ALONE
from tests.transfer.detection.test_detector import SMALL
from transfer.detection.detector import create_detector
from transfer.detection.recipes import RECIPES, SPLITS, DetectionConfig, learning_rate
from transfer.detection.scenes import make_scenes
from transfer.detection.training import DetectorTraining, new_detector, new_optimizer, open_data

pytest.importorskip("pycocotools")


def test_every_option_is_read_somewhere():
    code = "".join(path.read_text() for folder in ("run", "transfer") for path in (ROOT / folder).rglob("*.py"))
    code += (ROOT / "detect.py").read_text()
    options = {field.name for field in dataclasses.fields(DetectionConfig)}
    places = {f"{split}_{what}" for split in SPLITS for what in ("annotations", "images")}  # by their parts
    assert not {name for name in options - places if not re.search(rf"config\.{name}\b", code)}


def test_recipes_are_those_of_the_field():
    """ViTDet (arXiv 2203.16527), appendix A.2, for ViT-B on COCO: 100 epochs at 1024 pixels with large-scale jitter."""
    coco = RECIPES["coco"]
    assert (coco.recipe, coco.epochs, coco.image_size, coco.scale) == ("coco", 100, 1024, (0.1, 2.0))
    assert (coco.lr, coco.weight_decay, coco.layer_decay, coco.drop_path) == (1e-4, 0.1, 0.7, 0.1)
    assert (coco.warmup_steps, coco.width, coco.proposals, coco.clip, coco.batch_size) == (250, 256, 1000, 1.0, 64)
    assert (coco.window, coco.patch_size, coco.depth) == (16, 0, 0)


BOUNDS = {  # option: values that are taken, values that are refused
    "width": ((1, 8), (0, -1)),
    "clip": ((0.1, 8), (0, -1, math.inf, math.nan)),
    "patch_size": ((0, 8), (-1,)),
    "depth": ((0, 8), (-1,)),
    "workers": ((0, 8), (-1, 1025)),
    "window": ((0, 8), (-1,)),
    "warmup_steps": ((0, 8), (-1,)),
    "image_size": ((32, 96), (0, -32, 48)),
    "scale": (((0.1, 0.1), (1, 9)), ((0, 1), (2, 1), (1, math.inf), (math.nan, 1))),
    "proposals": ((2, 3), (1, 0)),
    "layer_decay": ((0.1, 1), (0, 1.1, math.nan)),
    "drop_path": ((0, 0.9), (-0.1, 1, math.nan)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_values_out_of_range_are_refused_by_name(name):
    taken, refused = BOUNDS[name]
    for value in taken:
        assert getattr(DetectionConfig(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=re.escape(f"--{name.replace('_', '-')} {value}: expected")):
            DetectionConfig(**{name: value})


def test_annotations_come_with_their_images_and_something_to_train_on():
    here = Path("x")
    train = {"train_annotations": here, "train_images": here}
    for given in ({}, train, train | {"eval_annotations": here, "eval_images": here}):
        assert {name for name, value in vars(DetectionConfig(**given)).items() if value == here} == set(given)
    for split in SPLITS:
        for what in ("annotations", "images"):
            given = {f"{split}_{what}": here} | (train if split == "eval" else {})
            with pytest.raises(ValueError, match=f"--{split}-annotations, --{split}-images: expected both or neither"):
                DetectionConfig(**given)
    with pytest.raises(ValueError, match="--eval-annotations without --train-annotations"):
        DetectionConfig(eval_annotations=here, eval_images=here)


def test_starts_from_a_pretrained_encoder(tmp_path):
    sizes = timm_arguments(image_size=32, patch_size=8, depth=2)
    name = "vit_tiny_patch16_224"
    vit = create_encoder(name, sincos=True, frozen_patch_embed=True, seed=7, **sizes)
    statistics = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    training = {"method": "APS", "recipe": "toy", "steps": 5, "images": 6}
    encoder = export_model(vit, tmp_path / "encoder", name=name, arguments=sizes, training=training, **statistics)
    config = dataclasses.replace(SMALL, encoder=str(encoder), depth=0, window=4)
    detector, description = new_detector(config, 4)
    assert detector.transform.image_mean == statistics["mean"] and detector.transform.image_std == statistics["std"]
    loaded = detector.backbone.vit.state_dict()
    for key, tensor in vit.state_dict().items():
        assert key == "pos_embed" or torch.equal(tensor, loaded[key]), key
    assert loaded["pos_embed"].shape == (1, 65, 192)

    fresh, known = new_detector(SMALL, 4)
    expected = sincos_position_embedding((8, 8), 192)
    assert torch.equal(fresh.backbone.vit.pos_embed[0, 1:], expected) and not fresh.backbone.vit.pos_embed.requires_grad
    assert fresh.backbone.vit.patch_embed.proj.weight.requires_grad
    arguments = {"img_size": 64, "num_classes": 0, "patch_size": 8, "depth": 1}
    assert known["encoder"] == {"model": "vit_tiny_patch16_224", "arguments": arguments}
    assert "drop_path_rate" not in description["encoder"]["arguments"]


def test_learning_rates_by_layer_and_step():
    """Of ViTDet: 0.7 to the power of the layers above, weights only decay; a tenth after 8/9 of the steps."""
    config = dataclasses.replace(
        RECIPES["coco"], model="vit_tiny_patch16_224", image_size=64, window=0, width=8, warmup_steps=10
    )

    def rates(detector):
        return {
            id(parameter): (group["lr_scale"], group["weight_decay"])
            for group in new_optimizer(config, detector).param_groups
            for parameter in group["params"]
        }

    detector, description = new_detector(config, 4)
    of = rates(detector)
    trainable = {name: p for name, p in detector.named_parameters() if p.requires_grad}
    assert len(of) == len(trainable)
    vit, head = "backbone.vit.", "roi_heads.box_predictor.cls_score."
    for name, power, decay in (
        (vit + "patch_embed.proj.weight", 13, 0.1), (vit + "cls_token", 13, 0),
        (vit + "blocks.0.attn.qkv.weight", 12, 0.1), (vit + "blocks.11.mlp.fc1.bias", 1, 0), (head + "weight", 0, 0.1),
        (head + "bias", 0, 0), ("backbone.levels.0.0.weight", 0, 0.1), (vit + "norm.weight", 0, 0),
    ):  # fmt: skip
        assert of[id(trainable[name])] == (pytest.approx(0.7**power), decay), name
    averaged = create_encoder(  # its norm is behind the pooling
        config.model, sincos=True, frozen_patch_embed=False, seed=0, img_size=64, num_classes=0, global_pool="avg"
    )
    of, blocks = rates(create_detector(averaged, **description["arguments"], seed=0)), averaged.blocks
    assert [of[id(block.attn.qkv.weight)][0] for block in blocks] == pytest.approx([0.7 ** (12 - i) for i in range(12)])
    steps = 0, 9, 10, 2399, 2400, 2599, 2600, 2699
    shares = [learning_rate(config, step, 2700) / config.lr for step in steps]
    assert shares == pytest.approx([0.1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def a_batch():
    generator = torch.Generator().manual_seed(0)
    images = [
        torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in ((64, 48), (40, 64))
    ]
    masks = [torch.zeros(1, *image.shape[1:], dtype=torch.uint8) for image in images]
    for mask in masks:
        mask[:, 5:30, 3:40] = 1
    boxes = torch.tensor([[3.0, 5.0, 40.0, 30.0]])
    return images, [{"boxes": boxes, "labels": torch.tensor([2]), "masks": mask} for mask in masks]


def test_a_step_is_that_of_adamw_on_the_sum_of_the_losses():
    """And follows from its number, whatever was drawn before; without a finite gradient it changes no weight."""
    config = dataclasses.replace(SMALL, clip=0.7, warmup_steps=4, lr=0.01, layer_decay=0.5, seed=-9)
    training = DetectorTraining(config, *new_detector(config, 4), ALONE, steps=100)
    assert training.forward is training.detector and training.state_dict(keep=False) == {}
    images, targets = a_batch()
    begun, losses = training.state_dict(), []
    for step, rank in ((1, 0), (2, 0), (2, 1), (2, 0)):
        training.load_state_dict(copy.deepcopy(begun))
        training.ranks = Ranks(rank, 1, 1, ALONE.device)
        figures, finite = training.step(images, targets, step)
        assert finite and len(figures) == len(DetectorTraining.FIGURES)
        assert figures[0].item() == pytest.approx(sum(figures[1:]).item(), rel=1e-5)
        losses.append(figures[0].item())
        assert not any(parameter.grad is not None for parameter in training.detector.parameters())
    assert losses[1] == losses[3] and len(set(losses)) == 3

    other = DetectorTraining(config, *new_detector(config, 4), ALONE, steps=100)
    other.load_state_dict(begun)
    words = np.random.SeedSequence([(-9) % 2**64, 2, 0]).generate_state(1, np.uint64)
    torch.manual_seed(int(words[0]))
    parts = other.detector.train()([image / 255 for image in images], targets)
    assert dict(zip(DetectorTraining.FIGURES[1:], figures[1:], strict=True)) == pytest.approx(
        {k: v.item() for k, v in parts.items()}
    )
    sum(parts.values()).backward()
    gradients = [parameter.grad for parameter in other.detector.parameters() if parameter.grad is not None]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert norm > config.clip
    for gradient in gradients:
        gradient.mul_(config.clip / norm)
    for group in other.optimizer.param_groups:
        group["lr"] = config.lr * 0.75 * group["lr_scale"]
    other.optimizer.step()
    before = begun["detector"]
    for name, expected in other.detector.state_dict().items():
        moved = (expected - before[name]).float().norm()
        assert (training.detector.state_dict()[name] - expected).float().norm() <= 0.02 * moved + 1e-7, name

    whole = copy.deepcopy(training.detector.state_dict())
    training.detector.transform.image_mean = [math.nan] * 3
    _, finite = training.step(images, targets, 3)
    assert not finite
    assert all(torch.equal(tensor, whole[name]) for name, tensor in training.detector.state_dict().items())


def test_data_that_do_not_fit_each_other_are_refused(tmp_path):
    places = make_scenes(tmp_path / "data", train=8, evaluation=2)
    given = {f"{s}_{what}": p for s in SPLITS for what, p in zip(("annotations", "images"), places[s], strict=True)}
    config = dataclasses.replace(SMALL, max_bad=0.5, **given)
    (tmp_path / "data/train/00003.jpg").write_bytes(b"no image")
    training, bad, evaluation = open_data(config, ALONE)
    assert (len(training), bad, len(evaluation)) == (8, {3: "not an image"}, 2)
    alone = dataclasses.replace(config, eval_annotations=None, eval_images=None)
    assert open_data(alone, ALONE)[2] is None
    (tmp_path / "data/eval/00001.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 of [28] files cannot be used"):
        open_data(dataclasses.replace(config, max_bad=0), ALONE)

    whole = json.loads(places["train"][0].read_text())
    renamed = [category | {"name": category["name"] + "s" * (category["id"] == 2)} for category in whole["categories"]]
    for change, said in (
        (
            {"categories": renamed},
            r"other categories than .* \(2 'checked-square', 2 'checked-squares'\); expected the same",
        ),
        ({"annotations": []}, "has no object to train on; expected some with an area, beside crowds"),
        ({"annotations": [one | {"iscrowd": 1} for one in whole["annotations"]]}, "has no object to train on"),
    ):
        places["train"][0].write_text(json.dumps(whole | change))
        with pytest.raises(ValueError, match=said):
            open_data(config, ALONE)
