"""What a fine-tuning run consists of: one frozen dataclass, and the recipes as sets of its defaults.

Sources, as no recipe here is of our own making:
- ``imagenet``: the protocol of MAE (arXiv 2111.06377, table 9, and its code release) for ViT-B, which is that of the
  field: 100 epochs, batch 1024, base rate 5e-4 per 256 images and so 2e-3, layer-wise decay 0.65.
- ``cifar``: the code release of APS (config/finetune): 100 epochs, batch 128, ViT-T with 2e-3 per 512 images and so
  5e-4 (half of that for ViT-S, a quarter for ViT-B), no layer-wise decay; the padded image shifted. Without repeated
  augmentation, which that code sets and does not use; its crops are those of CIFAR since ResNet (arXiv 1512.03385).
- of both: AdamW, weight decay 0.05, 5 epochs of warm-up, drop path 0.1, mixup 0.8, cutmix 1, smoothing 0.1, erasing
  0.25, RandAugment of two operations at 9 of 10, each with probability 1/2 (timm's rand-m9-mstd0.5-inc1).
They decay to 1e-5 or 1e-6 where we decay to 0, and resize by cubic filters where DALI's is a triangle. MAE pools the
patches; here an encoder is pooled as it was pretrained.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from pipeline.paths import expanded
from run.recipes import ImagesConfig, check

from .labelled import LabelledAugmentation


@dataclass(frozen=True)
class TuneConfig(ImagesConfig):
    """Fine-tune an encoder on labelled images, or train one so from scratch.

    A recipe gives all other options their defaults: --recipe NAME --help.
    """

    recipe: Literal["toy", "cifar", "imagenet"] = "toy"
    """Where the defaults of all other options come from."""
    encoder: str = "none"
    """Where to start: a run, a folder in timm's hub layout (as its encoder/), a checkpoint with the keys of timm (and
    --model), or none: from scratch."""
    probe: Literal["linear", "knn"] | None = None
    """Instead of fine-tuning, measure what the frozen encoder is worth, by a linear classifier or by k-NN."""
    probe_images: int = 0
    """For a probe: at most so many images of each of --data and --eval-data, evenly spaced; 0 takes all."""
    output: Path = Path("runs/finetune")
    """Folder for checkpoints, metrics and the model; a run that is found there is continued. Probes add a line to
    probes.jsonl there."""
    epochs: float = 100
    """Passes over the images."""
    eval_every: int = 1
    """Epochs between evaluations; there is one at the end in any case."""

    model: str | None = None
    """A plain Vision Transformer of timm by its name: of a checkpoint that does not say, or from scratch, where the
    default is that of the pretraining recipe."""
    image_size: int = 0
    """Pixels a side of a crop; 0 takes the encoder's own, from scratch that of the pretraining recipe."""
    patch_size: int = 0
    """From scratch: pixels a side of a patch; 0 takes that of the pretraining recipe."""
    depth: int = 0
    """From scratch: transformer blocks; 0 takes that of the pretraining recipe."""
    position_embedding: Literal["sincos", "learned"] = "sincos"
    """From scratch: what the position embedding, which is trained, is at first."""

    layer_decay: float = 1.0
    """Factor of the learning rate from each block to the one before it; from scratch it is 1 in any case."""
    drop_path: float = 0.1
    """Probability of leaving out a block for an image, rising linearly from 0 to this with depth."""
    clip_norm: float = 0.0
    """Largest L2 norm of the gradient; 0: no limit."""
    ema: float = 0.9999
    """Largest coefficient of the running mean of the weights, which rises to it as 1 - (1 + step)^(-2/3); 0: none."""
    mixup: float = 0.8
    """Parameter of the Beta distribution in mixup; 0: none."""
    cutmix: float = 1.0
    """Parameter of the Beta distribution in cutmix, which takes the place of mixup in half the batches; 0: none."""
    smoothing: float = 0.1
    """Share of the label that is spread over all classes."""
    erasing: float = 0.25
    """Probability of replacing a rectangle of an image by noise."""

    augmentation: LabelledAugmentation = field(default_factory=LabelledAugmentation)

    PROGRAM: ClassVar[str] = "finetune.py"
    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "data": ("recipe", "encoder", "data", "eval_data", "index_cache", "trust_index", "max_bad"),
        "run": (
            "output", "epochs", "batch_size", "max_steps", "resume", "checkpoint_every", "keep_last", "keep_every",
            "log_every", "eval_every", "probe", "probe_images", "seed", "dry_run",
        ),
        "model": ("model", "image_size", "patch_size", "depth", "position_embedding"),
        "optimisation": (
            "lr", "warmup_epochs", "weight_decay", "betas", "layer_decay", "drop_path", "clip_norm", "ema", "mixup",
            "cutmix", "smoothing", "erasing",
        ),
        "hardware": ("device", "precision", "threads"),
    }  # fmt: skip
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (*ImagesConfig.FREE_ON_RESUME, "eval_every", "probe_images")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.eval_every > 0, self, "eval_every", "more than 0")
        check(not (self.dry_run and self.probe), self, "dry_run", "no --probe beside it")
        for name in ("image_size", "patch_size", "depth", "probe_images"):
            check(getattr(self, name) >= 0, self, name, "0 or more")
        for name in ("clip_norm", "mixup", "cutmix"):
            check(0 <= getattr(self, name) < math.inf, self, name, "a finite number, 0 or more")
        for name in ("drop_path", "smoothing", "ema"):
            check(0 <= getattr(self, name) < 1, self, name, "0 up to, not including, 1")
        check(0 < self.layer_decay <= 1, self, "layer_decay", "a factor above 0 and up to 1")
        check(0 <= self.erasing <= 1, self, "erasing", "a probability")
        mixing = self.mixup > 0 or self.cutmix > 0
        check(
            not mixing or self.batch_size % 2 == 0, self, "batch_size", "an even number, as images are mixed in pairs"
        )
        if self.encoder != "none":
            for name in ("patch_size", "depth"):
                check(not getattr(self, name), self, name, "no such option beside --encoder, which has its own")
            object.__setattr__(self, "encoder", str(expanded(Path(self.encoder))))


TUNE_RECIPES: dict[str, TuneConfig] = {
    "toy": TuneConfig(
        epochs=10, batch_size=64, warmup_epochs=1, mixup=0, cutmix=0, erasing=0, log_every=50, ema=0.99,
        augmentation=LabelledAugmentation(area=(0.3, 1.0), operations=0),
    ),
    "cifar": TuneConfig(
        epochs=100, batch_size=128, warmup_epochs=5, lr=5e-4, position_embedding="learned",
        augmentation=LabelledAugmentation(padding=4),
    ),
    "imagenet": TuneConfig(epochs=100, batch_size=1024, warmup_epochs=5, lr=2e-3, layer_decay=0.65),
}  # fmt: skip
TUNE_RECIPES = {name: dataclasses.replace(config, recipe=name) for name, config in TUNE_RECIPES.items()}
