"""What comes out: an encoder that timm loads."""

import json
from pathlib import Path

from safetensors.torch import save
from timm.models.vision_transformer import VisionTransformer


def export_encoder(
    vit: VisionTransformer, folder: Path, *, name: str, arguments: dict, mean, std, training: dict
) -> Path:
    """Writes ``encoder.safetensors`` (timm's own keys) and ``encoder.json`` (what to call timm with) into ``folder``.

    Load it with ``timm.create_model(d["model"], checkpoint_path=..., **d["arguments"])``, d being the JSON. ``mean``
    and ``std`` are per channel, of pixels in [0, 1]; ``training`` says where the encoder comes from.
    """
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in vit.state_dict().items()}
    path = folder / "encoder.safetensors"
    partial = folder / "encoder.safetensors.partial"
    partial.write_bytes(save(state, metadata={"format": "pt"}))  # save_file() would make it readable to its owner alone
    partial.replace(path)
    description = {"model": name, "arguments": arguments, "mean": list(mean), "std": list(std), "training": training}
    (folder / "encoder.json").write_text(json.dumps(description, indent=2) + "\n")
    return path
