"""The networks, the loss and the gradient clip."""

from .clip import AdaptiveClip, clip_units
from .encoder import by_class_token, create_encoder, encode, patch_grid, timm_arguments
from .flat import FlatParameters
from .heads import KeyNetwork, QueryNetwork
from .loss import contrastive_loss

__all__ = [
    "AdaptiveClip",
    "FlatParameters",
    "KeyNetwork",
    "QueryNetwork",
    "by_class_token",
    "clip_units",
    "contrastive_loss",
    "create_encoder",
    "encode",
    "patch_grid",
    "timm_arguments",
]
