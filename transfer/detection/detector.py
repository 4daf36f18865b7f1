"""Mask R-CNN (arXiv 1703.06870) of torchvision's parts on the simple feature pyramid, with the heads of ViTDet.

Two convolutions in the proposal head, four and one linear layer in the box head, four in the mask head, the last two
with layer normalisation (arXiv 2203.16527). torchvision is imported where it is used.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import LayerNorm2d
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from model.encoder import create_plain

from .pyramid import SimpleFeaturePyramid


def create_detector(
    vit: VisionTransformer, *, categories: int, width: int, window: int, proposals: int, mean, std, seed: int
) -> nn.Module:
    """torchvision's MaskRCNN on an encoder made for square images, its other weights new, the same for each ``seed``.

    ``categories``: without the background. ``width``: channels of pyramid and heads. ``window``: see
    ``SimpleFeaturePyramid``. ``proposals``: regions an image that reach the second stage; half as many are sampled in
    training. ``mean``, ``std``: per channel, of pixels in [0, 1]. ValueError for an encoder that does not fit.
    """
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, RPNHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    size = vit.patch_embed.img_size[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**64)
        detector = MaskRCNN(
            SimpleFeaturePyramid(vit, width=width, window=window),
            num_classes=categories + 1,
            # In training the images come as they should be; in an evaluation their longer side is ``size`` already.
            min_size=size, max_size=size, size_divisible=size, _skip_resize=True, image_mean=mean, image_std=std,
            rpn_anchor_generator=AnchorGenerator(((32,), (64,), (128,), (256,), (512,)), ((0.5, 1.0, 2.0),) * 5),
            rpn_head=RPNHead(width, num_anchors=3, conv_depth=2),
            rpn_pre_nms_top_n_train=2 * proposals, rpn_pre_nms_top_n_test=proposals,  # of each level
            rpn_post_nms_top_n_train=proposals, rpn_post_nms_top_n_test=proposals,
            box_batch_size_per_image=proposals // 2,
            box_head=FastRCNNConvFCHead((width, 7, 7), [width] * 4, [1024], norm_layer=LayerNorm2d),
            mask_head=MaskRCNNHeads(width, [width] * 4, 1, norm_layer=LayerNorm2d),
        )  # fmt: skip
        detector.roi_heads.mask_predictor = MaskRCNNPredictor(width, width, categories + 1)
    # torchvision computes boxes in the type of these outputs, and half precision would round them to several pixels.
    for module in (detector.rpn.head, detector.roi_heads.box_predictor, detector.roi_heads.mask_predictor):
        module.register_forward_hook(_in_float32)
    # torchvision infers the strides of the maps, once, from the sizes of the first images and not of the square that
    # they are padded to: by images lower than 0.7 of it they would come out half as large.
    for pool in (detector.roi_heads.box_roi_pool, detector.roi_heads.mask_roi_pool):
        pool.register_forward_pre_hook(lambda _, inputs: (*inputs[:2], [(size, size)] * len(inputs[2])))
    return detector.to(memory_format=torch.channels_last)  # as the norms leave the maps


def _in_float32(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.float()
    return type(outputs)(_in_float32(module, inputs, part) for part in outputs)


def load_detector(folder: Path) -> tuple[nn.Module, list[str]]:
    """What a run of detect.py has left: a detector in evaluation mode, on the CPU, and the names of its labels from 1.

    ``detector.json`` holds "encoder" (what ``timm.create_model`` takes), "arguments" (of ``create_detector``) and
    "classes". OSError or ValueError where the files are not there or do not fit each other.
    """
    known = json.loads((folder / "detector.json").read_text())
    try:
        vit = create_plain(known["encoder"]["model"], known["encoder"]["arguments"])
        detector = create_detector(vit, **known["arguments"], seed=0)
        detector.load_state_dict(load_file(folder / "detector.safetensors"))
        return detector.eval(), known["classes"]
    except (RuntimeError, SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} does not hold a detector.json and weights that fit it ({error!r:.300})") from None


@torch.inference_mode()
def detect(detector: nn.Module, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
    """What a detector in evaluation mode finds in images uint8 [3,h,w] whose longer side is that of its encoder.

    ``sizes``: (height, width) of the original images, in whose pixels the answers are: for each image "boxes" float32
    [n,4] (x, y, x, y), "scores" float32 [n], "labels" int64 [n], "masks" bool [n,height,width].
    """
    batch, _ = detector.transform([image.float() / 255 for image in images])
    features = detector.backbone(batch.tensors)
    proposals, _ = detector.rpn(batch, features)
    found, _ = detector.roi_heads(features, proposals, batch.image_sizes)
    found = detector.transform.postprocess(found, batch.image_sizes, sizes)
    return [one | {"masks": one["masks"][:, 0] > 0.5} for one in found]
