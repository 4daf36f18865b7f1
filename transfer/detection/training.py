"""What detect.py trains: its options, its data, opened and checked, and one optimizer step.

Optimizer and schedule are those of ViTDet (arXiv 2203.16527): AdamW with a learning rate that falls from layer to layer
of the encoder; a short warm-up, then a tenth of the rate after 8/9 and a hundredth after 26/27 of the steps.
"""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model import create_encoder, timm_arguments
from run.checkpoint import copied
from run.ranks import Ranks
from run.recipes import RunConfig, check
from run.session import check_share
from transfer.pretrained import load_encoder

from .coco import CocoData
from .detector import create_detector
from .pyramid import STRIDES
from .scenes import make_scenes

# The generated dataset: drawn once, then shared by all runs of a checkout.
SCENES = Path(__file__).resolve().parents[2] / "runs" / "toy-scenes"


@dataclass(frozen=True)
class DetectionConfig(RunConfig):
    """Train Mask R-CNN on a pretrained encoder, on data in COCO's format, and measure its average precision.

    A recipe gives every other option its default; `--recipe NAME --help` shows the defaults of that recipe.
    """

    recipe: Literal["toy", "coco"] = "toy"
    """Where the defaults of all other options come from."""
    encoder: str = "none"
    """A run, its encoder.safetensors, a model in timm's hub layout or a checkpoint of timm; none: a new encoder."""
    model: str | None = None
    """The encoder as timm names it, for checkpoints that do not say it and for a new one; its default there is ViT-T
    (toy) or ViT-B of 16 pixels a patch."""
    patch_size: int = 0
    """Pixels a side of a patch of a new encoder; 0 takes the model's own."""
    depth: int = 0
    """Transformer blocks of a new encoder; 0 takes the model's own."""
    train_annotations: Path | None = None
    """Instances to train on, as JSON in COCO's format. Default: a generated dataset."""
    train_images: Path | None = None
    """The folder of their images."""
    eval_annotations: Path | None = None
    """Instances for the average precision at the end."""
    eval_images: Path | None = None
    """The folder of their images."""
    output: Path = Path("runs/detect")
    """Folder for checkpoints, metrics and detections; a run that is found there is continued."""
    workers: int = 4
    """Processes a rank that read images; 0 reads them in the program itself."""

    image_size: int = 1024
    """Pixels a side of the square into which images are fitted."""
    scale: tuple[float, float] = (0.1, 2.0)
    """How much larger than that square images are made in training, at random, before it is cut out of them."""
    window: int = 16
    """Patches a side of the windows to which all but four blocks confine their attention; 0: none."""
    width: int = 256
    """Channels of the pyramid and the heads."""
    proposals: int = 1000
    """Regions a image that the second stage looks at; half as many are sampled in training."""

    weight_decay: float = 0.1
    """Of AdamW; not on biases, norms, positions and tokens."""
    layer_decay: float = 0.7
    """Factor of the learning rate from a layer of the encoder to the one below it; 1: none."""
    drop_path: float = 0.1
    """Share of the residual branches left out in the last block, in training; less in those before it."""
    warmup_steps: int = 250
    """Optimizer steps of linear warm-up."""
    clip: float = 1.0
    """Largest norm of the gradient; what is longer is scaled down to it."""

    PROGRAM: ClassVar[str] = "detect.py"
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (
        *RunConfig.FREE_ON_RESUME, "train_annotations", "train_images", "eval_annotations", "eval_images", "workers",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("width", "clip"):
            check(0 < getattr(self, name) < math.inf, self, name, "a number above 0")
        for name in ("patch_size", "depth", "workers", "window", "warmup_steps"):
            check(getattr(self, name) >= 0, self, name, "0 or more")
        coarsest = STRIDES[-1]
        whole = self.image_size > 0 and self.image_size % coarsest == 0
        check(whole, self, "image_size", f"a multiple of {coarsest}")
        check(0 < self.scale[0] <= self.scale[1] < math.inf, self, "scale", "two numbers above 0, the smaller first")
        check(self.proposals >= 2, self, "proposals", "2 or more")
        check(0 < self.layer_decay <= 1, self, "layer_decay", "a number above 0 and up to 1")
        check(0 <= self.drop_path < 1, self, "drop_path", "a share from 0 up to, not including, 1")
        for split in SPLITS:
            both = [getattr(self, f"{split}_{what}") is None for what in ("annotations", "images")]
            if both[0] != both[1]:
                raise ValueError(f"--{split}-annotations, --{split}-images: expected both or neither")
        if self.eval_annotations is not None and self.train_annotations is None:
            raise ValueError("--eval-annotations without --train-annotations: expected both or neither")


SPLITS = ("train", "eval")
LOSSES = ("loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask")  # torchvision's names
RECIPES = {
    "toy": DetectionConfig(
        patch_size=8, depth=4, batch_size=4, workers=0, checkpoint_every=200, log_every=50, image_size=128,
        scale=(0.8, 1.25), window=0, width=64, proposals=64, lr=5e-4, weight_decay=0.05, layer_decay=1.0,
        drop_path=0.0, warmup_steps=50,
    ),
    "coco": DetectionConfig(recipe="coco", epochs=100, checkpoint_every=1000, log_every=50, lr=1e-4),
}  # fmt: skip
NEW = {"toy": "vit_tiny_patch16_224", "coco": "vit_base_patch16_224"}  # where neither an encoder nor a model is named


def learning_rate(config: DetectionConfig, step: int, steps: int) -> float:
    """That of optimizer step number ``step``, from 0, of ``steps``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    return config.lr * (1 if step < steps * 8 // 9 else 0.1 if step < steps * 26 // 27 else 0.01)


def new_detector(config: DetectionConfig, categories: int) -> tuple[nn.Module, dict[str, Any]]:
    """The detector of a config before any training, and what ``load_detector`` has to know of it; ValueError for an
    encoder that cannot be loaded or does not fit."""
    more = {"drop_path_rate": config.drop_path}
    if config.encoder == "none":
        sizes = timm_arguments(image_size=config.image_size, patch_size=config.patch_size, depth=config.depth)
        name = config.model or NEW[config.recipe]
        vit = create_encoder(name, sincos=True, frozen_patch_embed=False, seed=config.seed, **sizes, **more)
        known = {key: vit.pretrained_cfg[key] for key in ("mean", "std")} | {"model": name, "arguments": sizes}
    else:
        source = Path(config.encoder).expanduser()
        vit, known = load_encoder(source, model=config.model, image_size=config.image_size, **more)
        known["arguments"].pop("drop_path_rate")  # of the training, not of the model
    arguments = {
        "categories": categories, "width": config.width, "window": config.window, "proposals": config.proposals,
        "mean": known["mean"], "std": known["std"],
    }  # fmt: skip
    description = {"encoder": {key: known[key] for key in ("model", "arguments")}, "arguments": arguments}
    return create_detector(vit, **arguments, seed=config.seed), description


def new_optimizer(config: DetectionConfig, detector: nn.Module) -> torch.optim.AdamW:
    """AdamW; the learning rate of each of its groups is to be multiplied with the "lr_scale" there."""
    vit, decay = detector.backbone.vit, config.weight_decay
    groups = param_groups_layer_decay(
        vit, weight_decay=decay, no_weight_decay_list=vit.no_weight_decay(), layer_decay=config.layer_decay
    )
    for group in groups:
        group["lr_scale"] *= config.layer_decay  # timm takes the last block for the top layer; that is the heads here
    rest = [parameter for name, parameter in detector.named_parameters() if not name.startswith("backbone.vit.")]
    for flat in (False, True):  # biases and norms have one dimension
        some = [parameter for parameter in rest if (parameter.ndim < 2) == flat]
        groups.append({"params": some, "weight_decay": 0.0 if flat else decay, "lr_scale": 1.0})
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


class DetectorTraining:
    """A detector in training on one device, with its optimizer; ``steps``: those of the whole schedule."""

    FIGURES = "loss", *LOSSES  # what a step returns

    def __init__(self, config: DetectionConfig, detector: nn.Module, ranks: Ranks, steps: int):
        self.config, self.ranks, self.steps = config, ranks, steps
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
        """A copy, on the CPU, of all that a step changes; nothing unless ``keep``."""
        return copied(detector=self.detector, optimizer=self.optimizer) if keep else {}

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
