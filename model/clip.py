"""What is clipped together, by the adaptive clip (APS, Eq. 9 and 10; ``kernels/update.py``)."""

import re

from torch import nn


def clip_units(model: nn.Module) -> list[list[str]]:
    """The names of the trainable parameters in the groups that are clipped together.

    One group for each transformer block, one for each further direct part of the encoder (embedding with its tokens
    and positions, final norm), one for each head.
    """
    units: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            block = re.search(r"encoder\.blocks\.\d+\.", name)
            if block:
                unit = block.group()
            elif re.search(r"encoder\.(patch_embed|cls_token|reg_token|pos_embed|norm_pre)", name):
                unit = "embedding"
            else:  # encoder.norm, projector, predictor
                unit = re.search(r"encoder\.\w+|projector|predictor", name).group()
            units.setdefault(unit, []).append(name)
    return list(units.values())
