"""Pretraining that begins with an encoder: what the run takes from it, and the copy that the run keeps of it."""

import dataclasses
from pathlib import Path
from typing import Any

from timm.models.vision_transformer import VisionTransformer

from model.encoder import pack
from run.checkpoint import write_weights
from run.ranks import Ranks
from run.recipes import Config

from .pretrained import load_encoder, square

STEM = "start"  # of the copy in the output folder: the weights, and as JSON their description
# timm's probabilities of leaving something out. All are 0 here, as a step of pretraining draws no random numbers.
DROPS = "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"


def begin(config: Config) -> tuple[Config, VisionTransformer, dict[str, Any]]:
    """The config of a run that begins with an encoder, the encoder on the CPU and its description (``load_encoder``).

    Model, patch size and depth are the encoder's; ValueError where an option says otherwise. So are image size, mean
    and std where no option does: another image size resamples the position embedding. Of a run that has begun, the
    encoder is the copy in its folder: the one that it came from may have changed or gone. What the recipe fixes (the
    position embedding, the patch embedding) stays as it was loaded.
    """
    copied = config.output / f"{STEM}.json"  # which is written last
    source = copied.with_suffix(".safetensors") if copied.exists() else Path(config.encoder)
    size = config.image_size or None
    vit, description = load_encoder(source, model=config.model, image_size=size, **dict.fromkeys(DROPS, 0.0))
    for name in DROPS:
        description["arguments"].pop(name)
    own = {"patch_size": vit.patch_embed.patch_size[0], "depth": len(vit.blocks)}
    for name, value in own.items():
        if (given := getattr(config, name)) not in (0, value):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {given}: --encoder {config.encoder} has {value}; expected that or no {option}")
    own |= {"model": description["model"], "image_size": square(vit)}
    own |= {name: getattr(config, name) or tuple(description[name]) for name in ("mean", "std")}
    vit.pos_embed.requires_grad_(config.position_embedding == "learned")
    vit.patch_embed.requires_grad_(not config.frozen_patch_embed)
    pack(vit)
    return dataclasses.replace(config, **own), vit, description


def keep(config: Config, vit: VisionTransformer, description: dict[str, Any], ranks: Ranks) -> None:
    """Leaves a copy of the encoder in the output folder, unless one is there, and loads it on all ranks: the encoders
    that they have read may differ, if the run that it comes from has gone on meanwhile."""

    def write() -> None:
        if not (config.output / f"{STEM}.json").exists():
            write_weights(vit, config.output / f"{STEM}.safetensors", description)

    ranks.on_first(write)
    vit.load_state_dict(first(config).state_dict())


def first(config: Config) -> VisionTransformer:
    """The encoder that a run has begun with, from its folder."""
    vit, _ = load_encoder(config.output / f"{STEM}.safetensors")
    pack(vit)
    return vit
