"""What a run of detect.py consists of: one frozen dataclass, and the recipes as sets of its defaults.

The schedule is that of ViTDet (arXiv 2203.16527): a short warm-up, then a tenth of the rate after 8/9 and a hundredth
after 26/27 of the steps.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from run.recipes import RunConfig, check


@dataclass(frozen=True)
class DetectionConfig(RunConfig):
    """Train Mask R-CNN on an encoder, on data in COCO's format, and measure its AP.

    A recipe gives all other options their defaults: --recipe NAME --help.
    """

    recipe: Literal["toy", "coco"] = "toy"
    """Where the defaults of all other options come from."""
    encoder: str = "none"
    """A run, a folder in timm's hub layout (as its encoder/) or a checkpoint of timm; none: a new encoder."""
    model: str | None = None
    """The encoder as timm names it, for checkpoints that do not say it and for a new one; its default there is ViT-T
    (toy) or ViT-B of 16 pixels a patch."""
    patch_size: int = 0
    """Pixels a side of a patch of a new encoder; 0 takes 8 (toy) or the model's own."""
    depth: int = 0
    """Transformer blocks of a new encoder; 0 takes 4 (toy) or the model's own."""
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
    """Regions an image that the second stage looks at; half as many are sampled in training."""

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
    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "data": (
            "recipe", "encoder", "train_annotations", "train_images", "eval_annotations", "eval_images", "max_bad",
        ),
        "run": (
            "output", "epochs", "batch_size", "max_steps", "resume", "checkpoint_every", "keep_last", "keep_every",
            "log_every", "seed", "dry_run",
        ),
        "model": ("model", "patch_size", "depth", "image_size", "scale", "window", "width", "proposals"),
        "optimisation": ("lr", "warmup_steps", "weight_decay", "layer_decay", "drop_path", "clip"),
        "hardware": ("device", "workers"),
    }  # fmt: skip
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (
        *RunConfig.FREE_ON_RESUME, "train_annotations", "train_images", "eval_annotations", "eval_images", "workers",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("width", "clip"):
            check(0 < getattr(self, name) < math.inf, self, name, "a number above 0")
        check(0 <= self.workers <= 1024, self, "workers", "0 to 1024")  # processes, all of which are started
        for name in ("patch_size", "depth", "window", "warmup_steps"):
            check(getattr(self, name) >= 0, self, name, "0 or more")
        whole = self.image_size > 0 and self.image_size % STRIDES[-1] == 0
        check(whole, self, "image_size", f"a multiple of {STRIDES[-1]}")
        check(0 < self.scale[0] <= self.scale[1] < math.inf, self, "scale", "two numbers above 0, the smaller first")
        check(self.proposals >= 2, self, "proposals", "2 or more")
        check(0 < self.layer_decay <= 1, self, "layer_decay", "a number above 0 and up to 1")
        check(0 <= self.drop_path < 1, self, "drop_path", "a share from 0 up to, not including, 1")
        if self.encoder != "none":
            for name in ("patch_size", "depth"):
                check(not getattr(self, name), self, name, "no such option beside --encoder, which has its own")
        for split in SPLITS:
            both = [getattr(self, f"{split}_{what}") is None for what in ("annotations", "images")]
            if both[0] != both[1]:
                raise ValueError(f"--{split}-annotations, --{split}-images: expected both or neither")
        if self.eval_annotations is not None and self.train_annotations is None:
            raise ValueError("--eval-annotations without --train-annotations: expected both or neither")


SPLITS = ("train", "eval")
STRIDES = (4, 8, 16, 32)  # pixels, of the levels of the pyramid
RECIPES = {
    "toy": DetectionConfig(
        batch_size=4, workers=0, checkpoint_every=200, log_every=50, image_size=128, scale=(0.8, 1.25), window=0,
        width=64, proposals=64, lr=5e-4, weight_decay=0.05, layer_decay=1.0, drop_path=0.0, warmup_steps=50,
    ),
    "coco": DetectionConfig(recipe="coco", epochs=100, checkpoint_every=1000, log_every=50, lr=1e-4),
}  # fmt: skip
NEW = {  # of a new encoder what no option says
    "toy": {"model": "vit_tiny_patch16_224", "patch_size": 8, "depth": 4},
    "coco": {"model": "vit_base_patch16_224", "patch_size": 0, "depth": 0},
}


def learning_rate(config: DetectionConfig, step: int, steps: int) -> float:
    """That of optimizer step number ``step``, from 0, of ``steps``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    return config.lr * (1 if step < steps * 8 // 9 else 0.1 if step < steps * 26 // 27 else 0.01)
