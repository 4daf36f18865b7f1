"""The networks, the loss and the optimizer."""

from .clip import clip_units
from .encoder import by_class_token, create_encoder, encode, patch_grid, timm_arguments
from .flat import FlatParameters
from .heads import KeyNetwork, QueryNetwork
from .loss import contrastive_loss
from .optimizer import Optimizer

__all__ = [
    "FlatParameters", "KeyNetwork", "Optimizer", "QueryNetwork", "by_class_token", "clip_units", "contrastive_loss",
    "create_encoder", "encode", "patch_grid", "timm_arguments",
]  # fmt: skip
