"""The networks, the loss and the gradient clip."""

from .clip import AdaptiveClip, clip_units
from .encoder import create_encoder, encode, patch_grid, timm_arguments
from .export import export_encoder
from .heads import KeyNetwork, QueryNetwork
from .loss import contrastive_loss
from .momentum import update_momentum

__all__ = [
    "AdaptiveClip",
    "KeyNetwork",
    "QueryNetwork",
    "clip_units",
    "contrastive_loss",
    "create_encoder",
    "encode",
    "export_encoder",
    "patch_grid",
    "timm_arguments",
    "update_momentum",
]
