"""What detect.py trains: its data, opened and checked, the detector and one optimizer step. The learning rate of AdamW
falls from layer to layer of the encoder, as that of ViTDet (arXiv 2203.16527)."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model import create_encoder, timm_arguments
from model.encoder import create_plain
from pipeline.paths import expanded
from run.checkpoint import copied
from run.ranks import Ranks
from run.session import check_share
from transfer.pretrained import layer_groups, load_encoder

from .coco import CocoData
from .detector import create_detector
from .recipes import NEW, SPLITS, DetectionConfig, learning_rate
from .scenes import make_scenes

# The generated dataset: drawn once, then shared by all runs of a checkout.
SCENES = Path(__file__).resolve().parents[2] / "runs" / "toy-scenes"
LOSSES = ("loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask")  # torchvision's names


def new_detector(
    config: DetectionConfig, categories: int, origin: dict[str, Any] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The detector of a config before any training, and what ``load_detector`` has to know of it; ValueError for an
    encoder that cannot be loaded or does not fit. ``origin``: this, of a run that has begun, whose checkpoint has the
    weights."""
    more = {"drop_path_rate": config.drop_path}
    if origin is not None:
        vit = create_plain(origin["encoder"]["model"], origin["encoder"]["arguments"] | more)
        return create_detector(vit, **origin["arguments"], seed=config.seed), origin
    if config.encoder == "none":
        own = {key: getattr(config, key) or value for key, value in NEW[config.recipe].items()}
        name, sizes = own.pop("model"), timm_arguments(image_size=config.image_size, **own)
        vit = create_encoder(name, sincos=True, frozen_patch_embed=False, seed=config.seed, **sizes, **more)
        known = {key: vit.pretrained_cfg[key] for key in ("mean", "std")} | {"model": name, "arguments": sizes}
    else:
        source = expanded(Path(config.encoder))
        vit, known = load_encoder(source, model=config.model, image_size=config.image_size, **more)
        known["arguments"].pop("drop_path_rate")  # of the training, not of the model
    arguments = {
        "categories": categories, "width": config.width, "window": config.window, "proposals": config.proposals,
        "mean": known["mean"], "std": known["std"],
    }  # fmt: skip
    description = {"encoder": {key: known[key] for key in ("model", "arguments")}, "arguments": arguments}
    return create_detector(vit, **arguments, seed=config.seed), description


def new_optimizer(config: DetectionConfig, detector: nn.Module) -> torch.optim.AdamW:
    """AdamW; the learning rate of each of its groups is to be multiplied with the "lr_scale" there.

    By the rule of ViTDet's code (detectron2, ``get_vit_lr_decay_rate``): what is in no block and no embedding, so the
    encoder's last norm too, learns at the full rate. The class token, which that code does not have, is an embedding.
    """
    vit, decay = detector.backbone.vit, config.weight_decay
    groups = layer_groups(vit, weight_decay=decay, layer_decay=config.layer_decay)
    rest = [parameter for name, parameter in detector.named_parameters() if not name.startswith("backbone.vit.")]
    rest += vit.norm.parameters()
    # timm counts from the last block, or from a pooling with parameters, which the pyramid leaves out; here the heads
    # are above it.
    top = max(group["lr_scale"] for group in groups)
    for group in groups:
        group["lr_scale"] *= config.layer_decay / top
    for flat in (False, True):  # biases and norms have one dimension
        some = [parameter for parameter in rest if (parameter.ndim < 2) == flat]
        groups.append({"params": some, "weight_decay": 0.0 if flat else decay, "lr_scale": 1.0})
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


class DetectorTraining:
    """A detector in training on one device, with its optimizer; ``description``: as of ``new_detector``; ``steps``:
    those of the whole schedule."""

    FIGURES = "loss", *LOSSES  # what a step returns

    def __init__(
        self, config: DetectionConfig, detector: nn.Module, description: dict[str, Any], ranks: Ranks, steps: int
    ):
        self.config, self.description, self.ranks, self.steps = config, description, ranks, steps
        self.detector = detector.to(ranks.device)
        self.optimizer = new_optimizer(config, detector)
        self.forward = DistributedDataParallel(detector) if ranks.count > 1 else detector

    def step(self, images: list[Tensor], targets: list[dict[str, Tensor]], step: int) -> tuple[list[Tensor], Tensor]:
        """Optimizer step number ``step`` (the first is 0) on what ``CocoLoader`` gives. Returns the ``FIGURES`` and
        whether the gradient was finite (where not, the weights stay as they are): scalars on the device."""
        words = np.random.SeedSequence([self.config.seed % 2**64, step, self.ranks.rank])
        torch.manual_seed(int(words.generate_state(1, np.uint64)[0]))  # of the samples of regions, and of drop path
        rate = learning_rate(self.config, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self.detector.train()
        kind = self.ranks.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            losses: dict[str, Tensor] = self.forward([image.float() / 255 for image in images], targets)
        loss = sum(losses.values())
        loss.backward()
        finite = nn.utils.clip_grad_norm_(self.detector.parameters(), self.config.clip).isfinite()
        self.optimizer.found_inf = 1 - finite.float()  # at 1, the fused AdamW leaves everything as it is
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [value.detach() for value in (loss, *map(losses.get, LOSSES))], finite

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """A copy of all that a step changes, and what the detector is; nothing unless ``keep``."""
        if not keep:
            return {}
        return copied(detector=self.detector, optimizer=self.optimizer) | {"origin": json.dumps(self.description)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what ``state_dict`` has returned."""
        self.detector.load_state_dict(state["detector"])
        self.optimizer.load_state_dict(state["optimizer"])


def open_data(config: DetectionConfig, ranks: Ranks) -> tuple[CocoData, dict[int, str], CocoData | None]:
    """What is trained on, its images that are known to be bad, and what is evaluated on, if anything; the same on all
    ranks. ValueError or OSError for data that cannot be used, such as more than ``max_bad`` bad images in either."""
    for package in ("pycocotools", "torchvision"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{package} is not installed; expected it from: pip install -e '.[coco]'")
    places = {split: (getattr(config, f"{split}_annotations"), getattr(config, f"{split}_images")) for split in SPLITS}
    if config.train_annotations is None:
        places = make_scenes(SCENES)
    training, evaluation = (CocoData(*places[split]) if places[split][0] else None for split in SPLITS)
    if evaluation is not None and evaluation.categories != training.categories:
        differing = sorted(set(evaluation.categories.items()) ^ set(training.categories.items()))
        named = ", ".join(f"{number} {name!r}" for number, name in differing[:5])
        raise ValueError(
            f"{evaluation.annotations} has other categories than {training.annotations} ({named}); expected the same"
        )

    if not training.usable:
        raise ValueError(f"{training.annotations} has no object to train on; expected some with an area, beside crowds")

    def check_images() -> dict[int, str]:
        bad: dict[str, dict[int, str]] = {}
        for split, data in zip(SPLITS, (training, evaluation), strict=True):
            if data is not None:
                bad[split] = data.check()
                check_share(config, f"--{split}-images {data.root}", data, bad[split])
        return bad["train"]

    return training, ranks.on_first(check_images), evaluation
