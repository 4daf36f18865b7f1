"""What a run consists of: one frozen dataclass; and the recipes of pretraining as sets of its defaults.

Sources: text and appendix tables of APS (arXiv 2306.02854); where they are silent, MoCo v3 (arXiv 2104.02057).
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipeline.paths import expanded
from pipeline.stream import Augmentation


@dataclass(frozen=True)
class RunConfig:
    """What pretraining, fine-tuning and detection have in common."""

    output: Path = Path("runs/pretrain")
    """Folder for checkpoints, metrics and the result; a run that is found there is continued."""

    epochs: float = 3
    """Passes over the images."""
    max_steps: int | None = None
    """Stop after so many optimizer steps, with the schedules of the full run. Default: all of them."""
    batch_size: int = 64
    """Images per optimizer step, over all ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    seed: int = 0
    """Any 64-bit integer: all random choices follow from it."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue a run found in the output folder. never: refuse a folder that holds one."""
    max_bad: float = 0.05
    """Share of the files that may be unusable (20 files, if that is more; with 0 none) before a run stops."""
    checkpoint_every: int = 500
    """Optimizer steps between checkpoints."""
    keep_last: int = 3
    """So many of the newest checkpoints are kept."""
    keep_every: int = 0
    """Checkpoints whose step is a multiple of this are kept for good; 0: none."""
    log_every: int = 20
    """Optimizer steps between log lines."""
    dry_run: bool = False
    """Check everything, take a few steps, and say what the run would take in time and memory; nothing is written to the
    output folder."""

    lr: float = 1e-3
    """Peak learning rate of AdamW, as it is: not scaled with the batch size."""
    weight_decay: float = 0.05
    """Of AdamW."""

    PROGRAM: ClassVar[str] = "train.py"  # whose options these are
    GROUPS: ClassVar[dict[str, tuple[str, ...]]]  # {title: options}, as ``--help`` shows them; each once
    # Nothing that the trained weights depend on, but for rounding: a run may be continued with other values of these.
    # (That the images are the same is held by their fingerprint, wherever they lie.)
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (
        "output", "max_steps", "device", "resume", "max_bad", "checkpoint_every", "keep_last", "keep_every",
        "log_every", "dry_run",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Path):
                object.__setattr__(self, name, expanded(value))
            if name == "epochs" or (type(value) is int and name != "seed"):
                check(abs(value) < 2**31, self, name, "a number below 2,147,483,648")
                check(name != "depth" or value <= 1024, self, name, "at most 1,024 blocks")  # hours, and all memory
        for name in ("epochs", "batch_size", "checkpoint_every", "keep_last", "log_every"):
            check(getattr(self, name) > 0, self, name, "more than 0")
        for name in ("keep_every", "lr", "weight_decay"):
            check(getattr(self, name) >= 0, self, name, "0 or more")
        check(self.max_steps is None or self.max_steps > 0, self, "max_steps", "more than 0")
        check("://" not in str(self.output), self, "output", "a folder on a disk")
        check(0 <= self.max_bad <= 1, self, "max_bad", "a share from 0 to 1")
        check(-(2**63) <= self.seed < 2**63, self, "seed", "a 64-bit integer")
        for name in ("lr", "weight_decay"):
            check(math.isfinite(getattr(self, name)), self, name, "a finite number")


@dataclass(frozen=True)
class ImagesConfig(RunConfig):
    """What pretraining and fine-tuning, which read images by DALI, have in common beside ``RunConfig``."""

    data: Path | None = None
    """Training images: a folder (one subfolder a class, or flat), a list of paths and labels, tar shards, Parquet
    files, or s3://BUCKET/FOLDER. Default: a generated dataset."""
    eval_data: Path | None = None
    """Labelled images with the same classes, to measure accuracy on."""
    index_cache: Path | None = None
    """Folder that keeps what scans found, and Parquet files unpacked, for all runs on the same data. Default:
    $XDG_CACHE_HOME/aps, or ~/.cache/aps."""
    trust_index: bool = False
    """Take what the last scan found, if there was one, without looking at the files: images that were added, removed
    or changed since are not noticed."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of products and activations; weights, loss and optimizer are float32 always. auto: bfloat16 on a GPU and on
    processors with AMX, where it is twice as fast; float32 on others."""
    threads: int = 0
    """Threads of the input path per rank; 0 divides the cores among the ranks of this machine."""
    resume: Literal["auto", "never", "changed"] = "auto"
    """auto: continue a run found in the output folder. never: refuse a folder that holds one. changed: continue it also
    where the images are not the same any more: without those that are gone or changed, and without new ones."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Averaging coefficients of AdamW."""
    warmup_epochs: float = 0.2
    """Epochs of linear warm-up, before the cosine to zero."""

    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (
        *RunConfig.FREE_ON_RESUME, "data", "eval_data", "index_cache", "trust_index", "precision", "threads",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 <= self.threads <= 1024, self, "threads", "0 to 1024")
        check(0 <= self.warmup_epochs < math.inf, self, "warmup_epochs", "a finite number, 0 or more")
        check(self.warmup_epochs < self.epochs, self, "warmup_epochs", f"less than the {self.epochs:g} of --epochs")
        right = all(0 <= beta < 1 for beta in self.betas)  # min and max may pass over nan
        check(right, self, "betas", "two numbers from 0 up to, not including, 1")
        check(self.eval_data is None or self.data is not None, self, "eval_data", "--data beside it")


@dataclass(frozen=True)
class Config(ImagesConfig):
    """Pretrain a Vision Transformer on a folder of images.

    A recipe gives all other options their defaults: --recipe NAME --help.
    """

    recipe: Literal["toy", "cifar-vit-t", "cifar-vit-s", "cifar-vit-b", "imagenet-vit-s", "imagenet-vit-b"] = "toy"
    """Where the defaults of all other options come from."""
    eval_data: Path | None = None
    """Labelled images with the same classes, for the k-NN accuracy at the end."""
    epochs: float = 3
    """Passes over the images. Each loaded image gives GROUPS optimizer steps."""
    seed: int = 0
    """Any 64-bit integer: initial weights, order, augmentation and patches follow from it."""
    # No exceptions: the code releases of MoCo v3 (main_moco.py) and of APS (main_pretrain.py) give AdamW all parameters
    # as one group, and a constant. Frozen parameters never get a gradient, and so no decay, there as here.
    weight_decay: float = 0.05
    """Of AdamW, constant, on every trained parameter: biases, norms, class token and position embeddings too."""
    knn_images: int = 0
    """Labelled images of the training set, and a quarter as many for evaluation, in the k-NN accuracy at the end;
    0 takes all of them on a GPU, at most 1.3 million, and 2,000 + 500 on a CPU."""
    knn_every: float = 0
    """Epochs between k-NN accuracies on the way, which all ranks share; 0: at the end only."""
    fsdp: bool = False
    """Divide parameters, gradients and optimizer among the ranks (FSDP2), for models that a GPU alone does not hold.
    Nothing changes with one rank."""
    compress_gradients: bool = False
    """Exchange gradients between ranks in bfloat16: half the bytes. Not with --fsdp."""
    grad_checkpointing: bool = False
    """Compute the activations of each block again in the backward pass: less memory, a third more work (a
    quarter with a momentum encoder)."""
    accumulate: int = 1
    """Keep the encoder's activations of one of so many pieces of a rank's images at a time, for batches that a GPU does
    not hold: the same step, a third more work (a quarter with a momentum encoder). It has to divide a rank's images."""
    cuda_graph: bool = True
    """On a GPU, record the optimizer step and launch it as a whole. Nothing changes with --fsdp or on a CPU."""

    # Beside an --encoder, options of ``OPEN`` that are not given are its own, whatever the recipe says.
    encoder: str = "none"
    """Where to begin: none, random weights; or all that finetune.py takes: the folder of a run, a folder in timm's hub
    layout, a checkpoint with the keys of timm (and --model). Sizes, mean and std are then the encoder's own, of which
    only --image-size, --mean and --std can be other ones."""
    model: str | None = "vit_tiny_patch16_224"
    """Any plain Vision Transformer of timm, by its name."""
    image_size: int = 64
    """Pixels a side of a crop."""
    patch_size: int = 8
    """Pixels a side of a patch; 0 takes the model's own."""
    depth: int = 4
    """Transformer blocks; 0 takes the model's own."""
    position_embedding: Literal["sincos", "learned"] = "sincos"
    """Fixed 2-D sine-cosine or learned position embeddings. Those of an --encoder stay as they are (sincos) or are
    trained from there (learned)."""
    frozen_patch_embed: bool = False
    """Keep the patch embedding at its random initialisation, as MoCo v3, or as an --encoder has it."""
    head_hidden: int = 512
    """Hidden width of projector and predictor."""
    head_out: int = 128
    """Width of the space in which views are compared."""
    projector_layers: int = 3
    """Linear layers of the projector."""
    predictor_layers: int = 2
    """Linear layers of the predictor."""
    mean: tuple[float, float, float] | None = (0.485, 0.456, 0.406)
    """Per channel, of pixels in [0, 1], subtracted."""
    std: tuple[float, float, float] | None = (0.229, 0.224, 0.225)
    """Per channel, of pixels in [0, 1], divided by."""

    keep_ratio: float = 0.25
    """Share s of the patches that each view keeps."""
    groups: int = 4
    """Disjoint groups R of patches drawn from each loaded image, one optimizer step each; at most 1 / KEEP_RATIO."""
    window: int = 1
    """Batches whose groups are trained on in turn, the first groups of all of them first: consecutive steps then see
    other images. Their patches are kept on the device."""
    redeal: bool = False
    """Within a window, mix the images of its batches anew for each step."""
    power: float = 3.0
    """Exponent gamma of the selective sampling: 0 uniform, larger avoids the patches of the other view more (Eq. 4)."""

    temperature: float = 0.1
    """tau of the contrastive loss."""
    ema: float | None = None
    """First coefficient of the momentum encoder that gives the keys, on a cosine to 1; None: the network's own keys."""
    clip: Literal["off", "vector", "norm"] = "off"
    """Adaptive gradient clipping per transformer block, by an average of gradients or of their norms."""
    clip_momentum: float = 0.4
    """Of that average."""
    clip_alpha: float = 1.05
    """How far a gradient may exceed that average before it is scaled down to it."""

    augmentation: Augmentation = field(default_factory=Augmentation)

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "data": ("recipe", "data", "eval_data", "index_cache", "trust_index", "max_bad"),
        "run": (
            "output", "epochs", "batch_size", "max_steps", "resume", "checkpoint_every", "keep_last", "keep_every",
            "log_every", "knn_every", "knn_images", "seed", "dry_run",
        ),
        "model": (
            "encoder", "model", "image_size", "patch_size", "depth", "position_embedding", "frozen_patch_embed",
            "head_hidden", "head_out", "projector_layers", "predictor_layers", "mean", "std",
        ),
        "optimisation": ("lr", "warmup_epochs", "weight_decay", "betas", "clip", "clip_momentum", "clip_alpha"),
        "method": ("keep_ratio", "groups", "window", "redeal", "power", "temperature", "ema"),
        "hardware": (
            "device", "precision", "threads", "fsdp", "compress_gradients", "grad_checkpointing", "accumulate",
            "cuda_graph",
        ),
    }  # fmt: skip
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (
        *ImagesConfig.FREE_ON_RESUME, "knn_images", "knn_every", "fsdp", "grad_checkpointing", "compress_gradients",
        "accumulate", "cuda_graph",
    )  # fmt: skip

    OPEN: ClassVar[dict[str, Any]] = {
        "model": None, "image_size": 0, "patch_size": 0, "depth": 0, "mean": None, "std": None,
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoder != "none":
            object.__setattr__(self, "encoder", str(expanded(Path(self.encoder))))
        for name in ("model", "image_size", "mean", "std"):
            missing = getattr(self, name) == self.OPEN[name] and self.encoder == "none"
            check(not missing, self, name, "a value, as there is no --encoder whose own it could be")
        heads = "head_hidden", "head_out", "projector_layers", "predictor_layers"
        for name in ("groups", "window", "accumulate", *heads):
            check(getattr(self, name) > 0, self, name, "more than 0")
        check(self.image_size >= 0, self, "image_size", "more than 0")
        for name in ("temperature", "clip_alpha"):
            check(0 < getattr(self, name) < math.inf, self, name, "a finite number above 0")
        for name in ("knn_images", "patch_size", "depth", "power", "knn_every"):
            check(getattr(self, name) >= 0, self, name, "0 or more")
        contrast = "2 or more: a contrastive loss needs something to contrast with"
        check(self.batch_size >= 2, self, "batch_size", contrast)
        check(0 < self.keep_ratio <= 1, self, "keep_ratio", "a share above 0 and up to 1")
        check(0 <= self.clip_momentum < 1, self, "clip_momentum", "0 up to, not including, 1")
        alone = self.knn_every > 0 and self.data is not None and self.eval_data is None
        check(not alone, self, "knn_every", "--eval-data beside it")
        check(not self.redeal or self.window > 1, self, "redeal", "a --window of 2 or more beside it")
        check(self.ema is None or 0 <= self.ema <= 1, self, "ema", "a coefficient from 0 to 1, or None")
        check(not (self.fsdp and self.compress_gradients), self, "compress_gradients", "no --fsdp beside it")
        check(all(0 < std < math.inf for std in self.std or ()), self, "std", "three numbers above 0")
        right = all(0 <= mean <= 1 for mean in self.mean or ())  # beside 128 images differ in nothing
        check(right, self, "mean", "three numbers from 0 to 1, as pixels are (--std too)")


def check(right: bool, config: RunConfig, name: str, expected: str) -> None:
    """ValueError, with the option's name and value, unless it is ``right``."""
    if not right:
        raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: expected {expected}")


# Where the sources differ: the learning rate is that of APS's table for all three CIFAR models (its code gives 2e-3 to
# ViT-T/2); ViT-S has 6 attention heads of 64, as in timm and in the code of APS, not 12 of 32 as in that of MoCo v3;
# CIFAR is divided by the standard deviation of all its pixels, the code of APS divides by the mean of its images' own.
_CIFAR = dict(
    epochs=1600, batch_size=512, warmup_epochs=20, lr=1e-3, weight_decay=0.05, temperature=0.1, image_size=32,
    patch_size=2, depth=0, position_embedding="learned", head_hidden=512, head_out=128,
    projector_layers=3, predictor_layers=3, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),
    augmentation=Augmentation(area=(0.15, 1.0), saturation=0.4, blur_p=(0.0, 0.0), solarise_p=(0.0, 0.0)),
)  # fmt: skip
_IMAGENET = dict(
    epochs=300, batch_size=4096, warmup_epochs=20, lr=1.28e-3, weight_decay=0.1, temperature=0.1, image_size=224,
    patch_size=0, depth=0, position_embedding="sincos", frozen_patch_embed=True, head_hidden=4096, head_out=256,
    projector_layers=3, predictor_layers=2, ema=0.99, clip="vector", clip_momentum=0.4, clip_alpha=1.05,
)  # fmt: skip

RECIPES: dict[str, Config] = {
    "toy": Config(
        log_every=50,
        knn_images=4000,
        augmentation=Augmentation(area=(0.3, 1.0), hue=0.3, grey_p=0.5, blur_p=(0.0, 0.0), solarise_p=(0.0, 0.0)),
    ),
    "cifar-vit-t": Config(model="vit_tiny_patch16_224", **_CIFAR),
    "cifar-vit-s": Config(model="vit_small_patch16_224", **_CIFAR),
    "cifar-vit-b": Config(model="vit_base_patch16_224", **_CIFAR),
    "imagenet-vit-s": Config(model="vit_small_patch16_224", **_IMAGENET),
    "imagenet-vit-b": Config(model="vit_base_patch16_224", **_IMAGENET),
}
RECIPES = {name: dataclasses.replace(config, recipe=name) for name, config in RECIPES.items()}


def learning_rate(config: ImagesConfig, epoch: float) -> float:
    """Linear warm-up, then half a cosine to zero; ``epoch`` counts passes over the data, fractions included."""
    if epoch < config.warmup_epochs:
        return config.lr * epoch / config.warmup_epochs
    progress = (epoch - config.warmup_epochs) / max(config.epochs - config.warmup_epochs, 1e-9)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def momentum_coefficient(config: Config, epoch: float) -> float:
    """Half a cosine from ``config.ema`` to 1 over the run, as MoCo v3; for the update that follows AdamW's."""
    return 1 - (1 - config.ema) * 0.5 * (1 + math.cos(math.pi * min(epoch / config.epochs, 1.0)))
