"""Encoders to start from, wherever they come from: our runs, their exports, any plain ViT of timm."""

import json
import math
import re
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay
from torch import Tensor

from model import timm_arguments
from model.encoder import create_plain
from run import checkpoint

HEAD = ("head.weight", "head.bias")  # the classifier, as timm calls it
HUB_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in timm's hub layout, the first that is there
FLOATS = torch.float32, torch.float16, torch.bfloat16, torch.float64
SHOWN = 30  # keys of a kind in an error


def load_encoder(
    source: Path, *, model: str | None = None, image_size: int | None = None, **more
) -> tuple[VisionTransformer, dict[str, Any]]:
    """An encoder with its weights, as timm's own VisionTransformer on the CPU, and the description of it.

    ``source``: the folder of a run (its encoder, or its newest whole checkpoint where that is further), a checkpoint
    of a run, a folder in timm's hub layout (as ``encoder`` of a run) or the weights in it, ``encoder.safetensors`` with
    its JSON beside it, as runs of older versions left them, or a checkpoint with the keys of timm, for which ``model``
    names the architecture as ``timm.create_model`` takes it (of several sets of weights in it timm prefers averaged
    ones). Nothing but tensors and plain values is unpickled.

    ``image_size``: pixels a side; where it is not the encoder's own, the position embedding is resampled by timm's
    function. ``more`` goes to ``timm.create_model``. There is no classifier unless ``num_classes`` asks for one, which
    is new but where the source has one of as many classes.

    The description: ``model``, ``arguments`` (which made the encoder that is returned), ``mean`` and ``std`` per
    channel of pixels in [0, 1], ``training`` (what is known of it). ValueError for anything that is no such source, and
    for weights that are missing, left over, of another shape or type, or not finite.
    """
    source = Path(source)
    description, state = _read(source, model)
    name, arguments = description["model"], description["arguments"] | {"num_classes": 0} | more
    # The weights are here: what ``timm.create_model`` takes for itself would have it fetch others.
    arguments = {key: value for key, value in arguments.items() if key not in signature(timm.create_model).parameters}
    own = create_plain(name, arguments, device="meta")
    prefix = own.pos_embed.shape[1] - own.patch_embed.num_patches  # class and register tokens that have positions
    positions = state.get("pos_embed")
    grid = own.patch_embed.grid_size
    if positions is not None and "img_size" not in arguments:
        grid = _grid(positions.numel() // own.embed_dim - prefix, grid)
    height, width = (image_size or side * own.patch_embed.patch_size[0] for side in grid)
    arguments["img_size"] = height if height == width else (height, width)
    vit = create_plain(name, arguments)

    if positions is not None and positions.shape == (1, prefix + math.prod(grid), vit.embed_dim):
        state["pos_embed"] = resample_abs_pos_embed(
            positions, new_size=vit.patch_embed.grid_size, old_size=grid, num_prefix_tokens=prefix
        )
    if HEAD[0] in state and state[HEAD[0]].shape[:1] != (vit.num_classes,):
        for key in HEAD:
            state.pop(key, None)
    fresh = () if any(key in state for key in HEAD) else HEAD
    _check_fit(f"{source} does not fit {name} {arguments}", vit.state_dict(), state, fresh)
    other = [f"{key} of {tensor.dtype}" for key, tensor in state.items() if tensor.dtype not in FLOATS]
    if other:
        raise ValueError(f"{source} has {other[0].replace('torch.', '')}; expected weights in float32, or half of it")
    broken = [key for key, tensor in state.items() if not tensor.isfinite().all()]
    if broken:
        raise ValueError(
            f"{source} has weights that are not finite, in {len(broken)} of {len(state)} tensors ({broken[0]}); "
            "expected an encoder whose training did not diverge"
        )
    vit.load_state_dict(state, strict=False)
    for statistic in ("mean", "std"):
        numbers = description.setdefault(statistic, list(vit.pretrained_cfg[statistic]))
        if not _are_three(numbers, above=0 if statistic == "std" else -math.inf):
            raise ValueError(f"{source} has a {statistic} of {numbers}; expected three numbers, of std above 0")
    return vit, description | {"arguments": arguments}


def square(vit: VisionTransformer) -> int:
    """Side of the images of a model; ValueError where they are not square."""
    height, width = vit.patch_embed.img_size
    if height != width:
        raise ValueError(f"--encoder takes images of {height} x {width} pixels; expected square ones: set --image-size")
    return height


def layer_groups(vit: VisionTransformer, *, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """timm's groups of parameters with their "lr_scale", ``layer_decay`` to the power of the layers above, without the
    final norm: to timm it is a part of the last block, and for us it learns as what is new on top of the encoder."""
    groups = param_groups_layer_decay(
        vit, weight_decay=weight_decay, layer_decay=layer_decay, no_weight_decay_list=vit.no_weight_decay()
    )
    norm = set(vit.norm.parameters())
    return [group | {"params": [p for p in group["params"] if p not in norm]} for group in groups]


def _grid(patches: int, own: tuple[int, int]) -> tuple[int, int]:
    """The grid of so many patches: the model's own where that fits, or else a square, as all models of timm have."""
    side = math.isqrt(max(patches, 0))
    return own if math.prod(own) == patches or side * side != patches or not side else (side, side)


def _are_three(numbers: Any, *, above: float) -> bool:
    """Whether what JSON says is a list of three finite numbers above another one."""
    known = isinstance(numbers, list) and all(type(number) in (int, float) for number in numbers)
    return known and len(numbers) == 3 and all(above < number < math.inf for number in numbers)


def _check_fit(what: str, expected: dict[str, Tensor], got: dict[str, Tensor], fresh: tuple[str, ...]) -> None:
    problems = {
        "missing": [key for key in expected if key not in got and key not in fresh],
        "left over": [key for key in got if key not in expected],
        "of another shape": [
            f"{key} {list(got[key].shape)} instead of {list(tensor.shape)}"
            for key, tensor in expected.items()
            if key in got and got[key].shape != tensor.shape
        ],
    }
    found = [
        f"{len(keys)} {kind}: {', '.join(keys[:SHOWN])}" + (f" and {len(keys) - SHOWN} more" if keys[SHOWN:] else "")
        for kind, keys in problems.items()
        if keys
    ]
    if found:
        raise ValueError(f"{what}: {'; '.join(found)}")


# ---- Sources: what is said about an encoder, and its weights


def _read(source: Path, model: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not source.exists():
        raise ValueError(f"{source} does not exist; expected a run, a folder in timm's hub layout or a checkpoint")
    if source.is_dir():
        description, state = _read_folder(source)
    elif source.suffix == ".safetensors" and source.with_suffix(".json").exists():
        description, state = _read_export(source)
    elif source.name in HUB_WEIGHTS and (known := _layout(source.parent)):
        description, state = _read_hub(source.parent, known)
    elif source.match("checkpoints/step-*.pt"):
        description, state = _read_checkpoint(source)
    elif model is None:
        raise ValueError(f"{source} does not say which model it is of; expected --model with its name in timm")
    else:
        return {"model": model, "arguments": {}, "training": {"checkpoint": source.name}}, _weights(source)
    if model not in (None, description["model"]):
        raise ValueError(f"--model {model}: {source} is a {description['model']}; expected that or no --model")
    return description, state


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    newest, damaged = checkpoint.newest(folder / "checkpoints")
    for line in damaged:
        warnings.warn(f"{line}; the one before it is used", stacklevel=4)
    exported = _read_exported(folder)
    if exported and (newest is None or checkpoint.step_of(newest) <= exported[0]["training"].get("steps", 0)):
        return exported
    if newest is not None:
        return _read_checkpoint(newest)
    if known := _layout(folder):
        return _read_hub(folder, known)
    raise ValueError(
        f"{folder} holds no encoder, no checkpoint of a run and no model in timm's hub layout; expected one of these "
        "(a run writes its first checkpoint after --checkpoint-every steps)"
    )


def _read_exported(run: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """What pretraining or fine-tuning has left: timm's hub layout, or two files of an older version of this project."""
    for name in ("encoder", "model"):
        if known := _layout(run / name):
            return _read_hub(run / name, known)
    for name in ("encoder", "model"):
        if (path := run / f"{name}.safetensors").exists() and path.with_suffix(".json").exists():
            return _read_export(path)
    return None


def _layout(folder: Path) -> dict[str, Any] | None:
    """The ``config.json`` of a folder in timm's hub layout; None if it is in another one."""
    known = _json(path) if (path := folder / "config.json").exists() else {}
    return known if "architecture" in known else None


def _read_export(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    description = _json(path.with_suffix(".json"))
    if not {"model", "arguments", "mean", "std", "training"} <= set(description):
        raise ValueError(f"{path.with_suffix('.json')} does not describe an encoder; expected what a run writes")
    return description, _weights(path)


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    stored = checkpoint.load(path)
    try:
        run, network, step = json.loads(stored["run"]), stored["network"], stored["step"]
        config, images = run["config"], run["data"]["images"]
        sizes = {name: config[name] for name in ("image_size", "patch_size", "depth")}
        training = {"method": "APS", "recipe": config["recipe"], "steps": step, "images": images}
        description = {
            "model": config["model"], "arguments": timm_arguments(**sizes), "mean": config["mean"],
            "std": config["std"], "training": training,
        }  # fmt: skip
        if "origin" in stored:  # what the run has begun with may have further arguments
            origin = json.loads(stored["origin"])
            description["arguments"], training["encoder"] = origin["arguments"], origin["training"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not a checkpoint of a run of train.py; expected one of those") from None
    prefix = "encoder."
    return description, {key.removeprefix(prefix): t for key, t in network.items() if key.startswith(prefix)}


def _read_hub(folder: Path, known: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    training = known.get("training", {"checkpoint": folder.name})
    description = {"model": known["architecture"], "arguments": known.get("model_args", {}), "training": training}
    data = known.get("pretrained_cfg") or known  # older files have it at the top
    description |= {name: data[name] for name in ("mean", "std") if name in data}
    found = next((folder / name for name in HUB_WEIGHTS if (folder / name).exists()), None)
    if found is None:
        raise ValueError(f"{folder} has a config.json and no weights; expected {' or '.join(HUB_WEIGHTS)} beside it")
    return description, _weights(found)


def _json(path: Path) -> dict[str, Any]:
    try:
        known = dict(json.loads(path.read_text()))
        objects = "model_args", "arguments", "pretrained_cfg", "training"
        return known | {name: dict(known[name] or {}) for name in objects if name in known}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the JSON of an encoder or a run ({error})") from None


def _weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, also one within another or with the prefixes of wrappers, as far as timm knows them."""
    try:
        path.open("rb").close()  # safetensors would say of a file that may not be read that it is not there
        with warnings.catch_warnings(action="ignore"):  # of what it looks like; an error says more
            state = timm.models.load_state_dict(str(path), weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever safetensors, zip, pickle or torch find wrong with it
        # Behind its first sentence torch proposes to read it unsafely. An empty file has none.
        why = re.split(r"\n|\. (?=[A-Z])", str(error))[0] or type(error).__name__
        raise ValueError(
            f"{path} is no checkpoint that can be read safely ({why}); expected tensors by name, as torch.save or "
            "safetensors writes a state_dict"
        ) from None
    if not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{path} holds {', '.join(list(state)[:5])}; expected the weights of a model by name")
    return state
