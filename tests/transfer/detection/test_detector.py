"""The detector: the heads of ViTDet on torchvision's Mask R-CNN, float32 where it matters, saved and loaded whole."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from model import create_encoder, timm_arguments
from run.checkpoint import write_weights
from transfer.detection.detector import create_detector, detect, load_detector
from transfer.detection.recipes import RECIPES
from transfer.detection.training import new_detector

pytest.importorskip("torchvision")

SMALL = dataclasses.replace(
    RECIPES["toy"], device="cpu", depth=1, width=8, batch_size=4, epochs=1, image_size=64, proposals=16, drop_path=0.2
)


def layers(module, kind):
    return [part for part in module.modules() if isinstance(part, kind)]


def test_its_parts_are_those_of_vitdet():
    """Two convolutions in the proposal head, four and a linear layer of 1024 in the box head, four in the mask head; an
    anchor of each of three shapes a place, from 32 pixels a side on the finest level to 512 on the coarsest."""
    sizes = timm_arguments(image_size=64, patch_size=8, depth=1)
    before = torch.random.get_rng_state()
    vit = create_encoder("vit_tiny_patch16_224", sincos=True, frozen_patch_embed=False, seed=0, **sizes)
    how = {"categories": 4, "width": 8, "window": 0, "proposals": 31, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    detector = create_detector(vit, **how, seed=-3)
    assert torch.equal(before, torch.random.get_rng_state())
    heads, rpn = detector.roi_heads, detector.rpn
    assert len(layers(rpn.head.conv, nn.Conv2d)) == 2 and len(layers(heads.mask_head, nn.Conv2d)) == 4
    assert len(layers(heads.box_head, nn.Conv2d)) == 4
    assert [(part.in_features, part.out_features) for part in layers(heads.box_head, nn.Linear)] == [(8 * 49, 1024)]
    for head in (rpn.head, heads.mask_head, heads.box_head, heads.mask_predictor):
        for part in layers(head, nn.Conv2d):
            assert part.dilation == (1, 1)
            assert part.in_channels == 8 and part.out_channels in (8, 3, 12, 5), (
                "shapes, and four numbers of each; labels"
            )
    assert heads.box_predictor.cls_score.out_features == 5 and heads.mask_predictor.mask_fcn_logits.out_channels == 5
    assert rpn.anchor_generator.sizes == ((32,), (64,), (128,), (256,), (512,))
    assert set(rpn.anchor_generator.aspect_ratios) == {(0.5, 1.0, 2.0)} and rpn.head.cls_logits.out_channels == 3
    assert (rpn._pre_nms_top_n, rpn._post_nms_top_n) == (
        {"training": 62, "testing": 31},
        {"training": 31, "testing": 31},
    )
    assert heads.fg_bg_sampler.batch_size_per_image == 15, "half of the proposals"
    assert detector.transform.size_divisible == 64 and detector.transform.image_mean == how["mean"]

    assert detector.transform([torch.rand(3, 20, 30)])[0].image_sizes == [(20, 30)], "smaller images stay as they are"

    again, one, other = (create_detector(vit, **how, seed=seed) for seed in (-3, 4, 5))
    for name, tensor in detector.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    drawn = [each.roi_heads.box_head[5].weight.sum().item() for each in (detector, one, other)]
    assert len(set(drawn)) == 3


def test_what_it_finds_is_what_torchvision_finds():
    """In the images' own pixels, and stretched to others; masks where they are more likely than not."""
    detector = new_detector(SMALL, 4)[0].eval()
    torch.manual_seed(0)
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in ((64, 48), (40, 64))]
    with torch.inference_mode():
        expected = detector([image / 255 for image in images])
    found = detect(detector, images, [(64, 48), (40, 64)])
    [alone] = detect(new_detector(SMALL, 4)[0].eval(), images[1:], [(40, 64)])  # whose first images are low
    torch.testing.assert_close(alone["boxes"], found[1]["boxes"])
    twice = detect(detector, images, [(128, 96), (80, 128)])
    assert any(len(one["boxes"]) for one in found)
    for theirs, one, other, image in zip(expected, found, twice, images, strict=True):
        for name in ("boxes", "scores", "labels"):
            torch.testing.assert_close(one[name], theirs[name])
        assert torch.equal(one["masks"], theirs["masks"][:, 0] > 0.5)
        assert one["masks"].any() and not one["masks"].all()
        torch.testing.assert_close(other["boxes"], 2 * one["boxes"])
        assert other["masks"].shape == (len(one["boxes"]), 2 * image.shape[1], 2 * image.shape[2])


def test_a_detector_comes_back_as_it_was_saved(tmp_path):
    detector, description = new_detector(SMALL, 4)
    write_weights(detector, tmp_path / "detector.safetensors", description | {"classes": ["a", "b", "c", "d"]})
    loaded, classes = load_detector(tmp_path)
    assert classes == ["a", "b", "c", "d"] and not loaded.training
    for name, tensor in detector.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    arguments = description["arguments"]
    for broken in (
        {"encoder": description["encoder"]}, description | {"arguments": arguments | {"width": 16}},
        description | {"arguments": arguments | {"height": 1}},
    ):  # fmt: skip
        (tmp_path / "detector.json").write_text(json.dumps(broken | {"classes": []}))
        with pytest.raises(ValueError, match=r"does not hold a detector.json and weights that fit it"):
            load_detector(tmp_path)


def test_half_precision_does_not_reach_the_boxes(monkeypatch):
    """Under bfloat16 as on a GPU: the losses are those of float32 for the same proposals (of an untrained network the
    best are chosen by the last bits of their scores), and proposals and anchors stay in float32."""
    config = SMALL
    detector, _ = new_detector(config, 4)
    torch.manual_seed(0)
    images = [torch.rand(3, 64, 48), torch.rand(3, 40, 64)]
    targets = [
        {
            "boxes": torch.tensor([[3.3, 5.1, 40.7, 30.9]]),
            "labels": torch.tensor([1]),
            "masks": torch.ones(1, *i.shape[1:]),
        }
        for i in images
    ]
    propose, first, losses = detector.rpn.filter_proposals, [], []

    def first_ones(*found):
        first[:] = first or propose(*found)
        return first

    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            with monkeypatch.context() as patch:
                patch.setattr(detector.rpn, "filter_proposals", first_ones)
                losses.append(detector.train()(images, targets))
            batch, _ = detector.eval().transform(images)
            features, heads = detector.backbone(batch.tensors), detector.roi_heads
            proposals, _ = detector.rpn(batch, features)
            outputs = heads.box_predictor(heads.box_head(heads.box_roi_pool(features, proposals, batch.image_sizes)))
        anchors = detector.rpn.anchor_generator.cell_anchors
        assert {tensor.dtype for tensor in (*proposals, *anchors, *outputs)} == {torch.float32}
    for name, loss in losses[0].items():
        assert losses[1][name].item() == pytest.approx(loss.item(), rel=0.01), name
