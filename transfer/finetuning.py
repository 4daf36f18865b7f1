"""Fine-tuning: the model, one optimizer step of it, and its accuracy."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.models.vision_transformer import VisionTransformer
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model import create_encoder, timm_arguments
from model.encoder import create_plain, pack
from pipeline import Index, evaluation_batches
from pipeline.waiting import Stopped
from run.checkpoint import copied
from run.ranks import Ranks
from run.recipes import RECIPES, learning_rate
from run.training import in_half

from .pretrained import layer_groups, load_encoder
from .recipes import TuneConfig

PRETRAINING = {"toy": "toy", "cifar": "cifar-vit-t", "imagenet": "imagenet-vit-s"}  # what from scratch is compared with


def new_model(
    config: TuneConfig, classes: int, origin: dict[str, Any] | None = None
) -> tuple[VisionTransformer, dict[str, Any]]:
    """The network as fine-tuning begins with it, on the CPU, with a new classifier (none for 0 ``classes``), and its
    description as ``load_encoder`` has it. ValueError for an encoder that cannot be had. ``origin``: this description,
    of a run that has begun, whose checkpoint has the weights."""
    more = {"num_classes": classes, "drop_path_rate": config.drop_path}
    if origin is not None:
        description = origin | {"arguments": origin["arguments"] | more}
        vit = create_plain(description["model"], description["arguments"])
    elif config.encoder != "none":
        size = config.image_size or None
        vit, description = load_encoder(config.encoder, model=config.model, image_size=size, **more)
    else:
        like = RECIPES[PRETRAINING[config.recipe]]
        name = config.model or like.model
        sizes = {key: getattr(config, key) or getattr(like, key) for key in ("image_size", "patch_size", "depth")}
        arguments = timm_arguments(**sizes) | more
        sincos = config.position_embedding == "sincos"
        vit = create_encoder(name, sincos=sincos, frozen_patch_embed=False, seed=config.seed, **arguments)
        training = {"method": "none"}
        description = {"model": name, "arguments": arguments, "mean": like.mean, "std": like.std, "training": training}
    if classes:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            nn.init.trunc_normal_(vit.head.weight, std=2e-5)  # as MAE: the encoder hears of the labels by and by
        nn.init.zeros_(vit.head.bias)
    vit.requires_grad_(True)
    pack(vit)
    description["arguments"].pop("drop_path_rate")  # of the training, not of the model
    return vit, description


class Tuning:
    """A model in training on one device: the network, its optimizer and the running mean of its weights.

    On a GPU the network is compiled, which takes the first step a minute.
    """

    FIGURES = "loss", "gradient_norm"  # what a step returns

    def __init__(self, config: TuneConfig, vit: VisionTransformer, description: dict[str, Any], ranks: Ranks):
        self.config, self.ranks, self.device = config, ranks, ranks.device
        self.half = in_half(config, self.device)
        self.description = description
        self.network = vit.to(self.device)
        mean, std = (255 * torch.tensor(description[name], device=self.device) for name in ("mean", "std"))
        self.mean, self.std = mean[:, None, None], std[:, None, None]
        decay = config.layer_decay if config.encoder != "none" else 1.0
        groups = layer_groups(vit, weight_decay=config.weight_decay, layer_decay=decay)
        # To MAE (code release, util/lr_decay.py) the final norm is a part of the classifier.
        groups.append({"params": list(vit.norm.parameters()), "weight_decay": 0.0, "lr_scale": 1.0})
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
        self.ema = ModelEmaV3(vit, decay=config.ema, use_warmup=True) if config.ema else None
        classes = vit.num_classes
        self.mix = None
        if config.mixup or config.cutmix:
            self.mix = Mixup(config.mixup, config.cutmix, label_smoothing=config.smoothing, num_classes=classes)
        self.erase = RandomErasing(config.erasing, mode="pixel", device=self.device)
        self.forward = torch.compile(vit, dynamic=False) if self.device.type == "cuda" else vit
        if ranks.count > 1:
            self.forward = DistributedDataParallel(self.forward, gradient_as_bucket_view=True)

    def step(self, images: Tensor, labels: Tensor, step: int, epoch: float) -> tuple[list[Tensor], Tensor]:
        """Optimizer step number ``step`` (the first is 0) on uint8 [B,H,W,3] and int64 [B].

        ``epoch``: passes over the images so far, fractions included, as the schedule counts. Returns the ``FIGURES``
        and whether the gradient was finite (where not, the weights stay as they are): scalars on the device.
        """
        config = self.config
        seed_everything(config.seed, step, self.ranks.rank)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, epoch) * group["lr_scale"]
        images = self.erase(self.normalised(images))
        if self.mix is not None:
            images, labels = self.mix(images, labels)
        self.network.train()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            scores = self.forward(images)
        smoothing = config.smoothing if self.mix is None else 0.0  # mixed labels are smooth already
        loss = F.cross_entropy(scores.float(), labels, label_smoothing=smoothing)
        loss.backward()
        parameters = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if config.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, config.clip_norm, norm)
        finite = norm.isfinite()
        self.optimizer.found_inf = 1 - finite.float()  # at 1, the fused AdamW leaves everything as it is
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.network, step=step + 1)
        return [loss.detach(), norm], finite

    def normalised(self, images: Tensor) -> Tensor:
        """uint8 [B,H,W,3] as float32 [B,3,H,W]."""
        images = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return images.sub_(self.mean).div_(self.std)

    def networks(self) -> dict[str, VisionTransformer]:
        """What is evaluated: the network, and where there is one, the running mean of its weights, as "ema"."""
        return {"": self.network} | ({"ema": self.ema.module} if self.ema is not None else {})

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """A copy of all that a step changes, and where the model comes from; nothing unless ``keep``."""
        if not keep:
            return {}
        state = copied(network=self.network, optimizer=self.optimizer, ema=self.ema)
        return state | {"origin": json.dumps(self.description)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what ``state_dict`` has returned."""
        for name in ("network", "optimizer", "ema"):
            if getattr(self, name) is not None:
                getattr(self, name).load_state_dict(state[name])


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Sets the random states that timm and torch draw from: what a step draws follows from its number."""
    words = np.random.SeedSequence([seed % 2**64, step, rank]).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(words[1:3])
    torch.manual_seed(int(words[3]))


@torch.inference_mode()
def evaluate(
    tuning: Tuning, index: Index, classes: tuple[str, ...], *, threads: int, batch_size: int = 256, record=None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, float], dict[int, str]]:  # fmt: skip
    """Top-1 and, with more than 5 classes, top-5 accuracy in percent, and {sample: reason} of what was left out.

    Each image of ``index`` counts once, whichever rank has it; labels are matched with ``classes`` by name. All ranks
    have to call it, and all raise Stopped where one is asked to stop. Keys: "top1", "top5", "top1_ema", "top5_ema",
    "eval_images". ``record``: as of ``pipeline.evaluation_batches``. ``progress`` is told how many images of all are
    done on this rank.
    """
    ranks, networks = tuning.ranks, tuning.networks()
    translated = torch.from_numpy(index.labels_among(classes)).to(ranks.device)
    samples = np.flatnonzero(index.labels >= 0)[ranks.rank :: ranks.count]
    bad: dict[int, str] = {}
    size = tuning.network.patch_embed.img_size[0]
    right = torch.zeros(len(networks), 2, dtype=torch.int64, device=ranks.device)
    for network in networks.values():
        network.eval()
    batches = evaluation_batches(
        index, samples, image_size=size, batch_size=batch_size, device=ranks.device, threads=threads, bad=bad,
        record=record,
    )  # fmt: skip
    seen, stopped = 0, False
    try:
        for images, _, labels in batches:
            images, truth = tuning.normalised(images), translated[labels][:, None]
            seen += len(images)
            for row, network in zip(right, networks.values(), strict=True):
                with torch.autocast(ranks.device.type, torch.bfloat16, enabled=tuning.half):
                    scores = network(images)
                hits = scores.topk(min(5, len(classes)), dim=1).indices == truth
                row += torch.stack([hits[:, 0].sum(), hits.any(1).sum()])
            if progress:
                progress(seen, len(samples))
    except Stopped:
        stopped = True
    if any(ranks.gather(stopped)):
        raise Stopped
    counts = ranks.sum(torch.cat([right.flatten(), right.new_tensor([seen])])).tolist()
    for found in ranks.gather(bad):
        bad.update(found)
    images = counts.pop()
    if not images:
        raise OSError(f"no evaluation image in {index.root} decodes, of {len(index):,}")
    scores: dict[str, float] = {}
    for name, top1, top5 in zip(networks, counts[::2], counts[1::2], strict=True):
        ending = f"_{name}" if name else ""
        scores[f"top1{ending}"] = 100 * top1 / images
        if len(classes) > 5:
            scores[f"top5{ending}"] = 100 * top5 / images
    return scores | {"eval_images": images}, bad
