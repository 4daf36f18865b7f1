"""What detect.py trains: its options, encoder and optimizer; its data and output folder, opened and checked.

Optimizer and schedule are those of ViTDet (arXiv 2203.16527): AdamW with a learning rate that falls from layer to layer
of the encoder; a short warm-up, then a tenth of the rate after 8/9 and a hundredth after 26/27 of the steps.
"""

import dataclasses
import importlib.util
import json
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

from model import create_encoder, timm_arguments
from model.detector import create_detector
from model.pyramid import STRIDES
from pipeline.coco import CocoData
from pipeline.scenes import make_scenes

from . import checkpoint
from .pretrained import load_encoder
from .ranks import Ranks
from .session import lock

# The generated dataset: drawn once, then shared by all runs of a checkout.
SCENES = Path(__file__).resolve().parent.parent / "runs" / "toy-scenes"


@dataclass(frozen=True)
class DetectionConfig:
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

    epochs: float = 100
    """Passes over the images."""
    max_steps: int | None = None
    """Stop after so many optimizer steps, with the schedule of the full run. Default: all of them."""
    batch_size: int = 64
    """Images per optimizer step, over all ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    workers: int = 4
    """Processes a rank that read images; 0 reads them in the program itself."""
    seed: int = 0
    """Any 64-bit integer: new weights, order, crops and samples follow from it."""
    checkpoint_every: int = 1000
    """Optimizer steps between checkpoints, of which the newest three are kept."""
    log_every: int = 50
    """Optimizer steps between log lines."""

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

    lr: float = 1e-4
    """Peak learning rate of AdamW, as it is: not scaled with the batch size."""
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

    def __post_init__(self) -> None:
        for name in ("train_annotations", "train_images", "eval_annotations", "eval_images", "output"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, getattr(self, name).expanduser())
        for name in ("epochs", "batch_size", "checkpoint_every", "log_every", "width", "lr", "clip"):
            self._check(name, 0 < getattr(self, name) < math.inf, "a number above 0")
        for name in ("patch_size", "depth", "workers", "window", "weight_decay", "warmup_steps"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "0 or more")
        self._check("max_steps", self.max_steps is None or self.max_steps > 0, "more than 0")
        self._check("seed", -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        coarsest = STRIDES[-1]
        self._check("image_size", self.image_size > 0 and self.image_size % coarsest == 0, f"a multiple of {coarsest}")
        self._check("scale", 0 < self.scale[0] <= self.scale[1] < math.inf, "two numbers above 0, the smaller first")
        self._check("proposals", self.proposals >= 2, "2 or more")
        self._check("layer_decay", 0 < self.layer_decay <= 1, "a number above 0 and up to 1")
        self._check("drop_path", 0 <= self.drop_path < 1, "a share from 0 up to, not including, 1")
        for split in ("train", "eval"):
            both = [getattr(self, f"{split}_{what}") is None for what in ("annotations", "images")]
            if both[0] != both[1]:
                raise ValueError(f"--{split}-annotations, --{split}-images: expected both or neither")
        if self.eval_annotations is not None and self.train_annotations is None:
            raise ValueError("--eval-annotations without --train-annotations: expected both or neither")

    def _check(self, name: str, right: bool, expected: str) -> None:
        if not right:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected {expected}")


SPLITS = ("train", "eval")
LOSSES = ("loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask")  # torchvision's names
MAX_BAD = 0.05  # share of the images that may be unreadable (20, if that is more) before a run stops
# Nothing that the trained weights depend on: a run may be continued with other values of these.
FREE_ON_RESUME = (
    "train_annotations", "train_images", "eval_annotations", "eval_images", "output", "max_steps", "device", "workers",
    "checkpoint_every", "log_every",
)  # fmt: skip

RECIPES = {
    "toy": DetectionConfig(
        patch_size=8, depth=4, epochs=5, batch_size=4, workers=0, checkpoint_every=200,
        image_size=128, scale=(0.8, 1.25), window=0, width=64, proposals=64, lr=5e-4, weight_decay=0.05,
        layer_decay=1.0, drop_path=0.0, warmup_steps=50,
    ),
    "coco": DetectionConfig(recipe="coco"),
}  # fmt: skip
NEW = {"toy": "vit_tiny_patch16_224", "coco": "vit_base_patch16_224"}  # where neither an encoder nor a model is named


def learning_rate(config: DetectionConfig, step: int, steps: int) -> float:
    """That of optimizer step number ``step``, from 0, of ``steps``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    return config.lr * (1 if step < steps * 8 // 9 else 0.1 if step < steps * 26 // 27 else 0.01)


def new_detector(config: DetectionConfig, categories: int) -> nn.Module:
    """The detector of a config before any training; ValueError for an encoder that cannot be loaded or does not fit."""
    more = {"drop_path_rate": config.drop_path}
    if config.encoder == "none":
        sizes = timm_arguments(image_size=config.image_size, patch_size=config.patch_size, depth=config.depth)
        name = config.model or NEW[config.recipe]
        vit = create_encoder(name, sincos=True, frozen_patch_embed=False, seed=config.seed, **sizes, **more)
        known = vit.pretrained_cfg
    else:
        source = Path(config.encoder).expanduser()
        vit, known = load_encoder(source, model=config.model, image_size=config.image_size, **more)
    return create_detector(
        vit, categories=categories, width=config.width, window=config.window, proposals=config.proposals,
        mean=known["mean"], std=known["std"], seed=config.seed,
    )  # fmt: skip


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
    return torch.optim.AdamW(groups, lr=config.lr)


def open_data(config: DetectionConfig) -> tuple[CocoData, CocoData | None]:
    """What is trained on, and what is evaluated on, if anything; ValueError or OSError for data that cannot be used."""
    for package in ("pycocotools", "torchvision"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{package} is not installed; expected it from: pip install -e '.[coco]'")
    places = {split: (getattr(config, f"{split}_annotations"), getattr(config, f"{split}_images")) for split in SPLITS}
    if config.train_annotations is None:
        places = make_scenes(SCENES)
    training, evaluation = (CocoData(*places[split]) if places[split][0] else None for split in SPLITS)
    if len(training) < config.batch_size:
        raise ValueError(f"--batch-size {config.batch_size}: expected at most {len(training)}, the images there are")
    if evaluation is not None and evaluation.categories != training.categories:
        differing = sorted(set(evaluation.categories.items()) ^ set(training.categories.items()))
        named = ", ".join(f"{number} {name!r}" for number, name in differing[:5])
        raise ValueError(
            f"{evaluation.annotations} has other categories than {training.annotations} ({named}); expected the same"
        )
    return training, evaluation


def open_output(config: DetectionConfig, data: CocoData, ranks: Ranks) -> tuple[dict[str, Any] | None, list[str]]:
    """Makes the output folder, or finds a run in it: the state to go on from, or None; and what to tell the user.

    ValueError if the folder holds a run of another config or other data, or something else.
    """

    def open_it() -> tuple[Path | None, list[str]]:
        output, path = config.output, config.output / "config.json"
        if output.exists() and not output.is_dir():
            raise ValueError(f"--output {output} is a file; expected a folder")
        if path.exists():
            _check_same_run(path, config, data)
        elif output.is_dir() and any(output.iterdir()):
            raise ValueError(f"--output {output} is not empty and holds no run; expected another folder")
        output.mkdir(parents=True, exist_ok=True)
        lock(output)
        checkpoint.write_atomically(path, (json.dumps(describe(config, data), indent=2) + "\n").encode())
        return checkpoint.newest(output / "checkpoints")

    newest, damaged = ranks.on_first(open_it)
    return checkpoint.load(newest) if newest else None, damaged


def describe(config: DetectionConfig, data: CocoData) -> dict[str, Any]:
    """The content of ``config.json``."""
    import torchvision

    return {
        "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        "data": {"images": len(data), "categories": list(data.categories.values()), "fingerprint": data.fingerprint},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "timm": timm.__version__,
        },
    }


def _check_same_run(path: Path, config: DetectionConfig, data: CocoData) -> None:
    now = describe(config, data)
    try:
        stored = json.loads(path.read_text())
        there, images = dict(stored["config"]), dict(stored["data"])
        if there["proposals"] is None:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not the config of a detection run; expected another --output") from None
    changed = [
        f"{name} {there.get(name)} there and {value} now"
        for name, value in now["config"].items()
        if name not in FREE_ON_RESUME and there.get(name) != value
    ]
    if images != now["data"]:
        changed.append(f"{data.annotations} is not the file that it was trained on")
    if changed:
        raise ValueError(
            f"{config.output} holds another run ({'; '.join(changed)}); expected the same options or another --output"
        )
