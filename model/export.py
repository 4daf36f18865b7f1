"""What comes out: a folder that timm loads and that can go to a model hub as it is."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save
from timm.models.vision_transformer import VisionTransformer
from torch import nn

# What the card leaves out of a run's options: where things lie, and what the weights do not depend on.
UNTOLD = (
    "data", "eval_data", "output", "device", "threads", "resume", "index_cache", "trust_index", "dry_run", "encoder",
)  # fmt: skip
KNN = ("knn_bank", "knn_queries", "knn_untrained", "knn_start", "knn_trained")


def export_model(
    vit: VisionTransformer, folder: Path, *, name: str, arguments: dict, mean, std, training: dict,
    classes=(), options=None,
) -> Path:  # fmt: skip
    """Writes a model as ``folder`` in timm's hub layout: ``model.safetensors``, ``README.md``, ``config.json``.

    ``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads it. ``name`` and ``arguments`` are what
    ``timm.create_model`` made it with; ``mean`` and ``std`` are per channel, of pixels in [0, 1]; ``training`` says
    where it comes from; ``classes`` are the names of what its classifier tells apart, if it has one; ``options`` of the
    run, for the card.

    The folder appears whole or not at all. One that is there already is replaced file by file, with whole files that
    are on the disk by then, and what else lies in it stays. OSError, of a full disk for one, changes nothing there.
    """
    about = {"model": name, "arguments": arguments, "mean": list(mean), "std": list(std), "training": training}
    told = {key: value for key, value in (options or {}).items() if key not in UNTOLD}
    files = {
        "model.safetensors": weights(vit),
        "README.md": model_card(vit, about, told, len(classes)).encode(),
        "config.json": _json(hub_config(vit, about) | ({"label_names": list(classes)} if classes else {})),
    }
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for file, data in files.items():
            _write(partial / file, data)
        if folder.exists():
            for file in files:
                (partial / file).replace(folder / file)
            partial.rmdir()
        else:
            partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def weights(module: nn.Module) -> bytes:
    """The state dict as safetensors; its save_file() would make a file that only its owner can read."""
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in module.state_dict().items()}
    return save(state, metadata={"format": "pt"})


def with_error(percent: float, images: int, digits: int = 1) -> str:
    """An accuracy as it is said: with the binomial standard error that so many images give it, sqrt(p (1 - p) / n)."""
    error = math.sqrt(percent * (100 - percent) / images)
    return f"{percent:.{digits}f} +- {error:.{digits}f} %"


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _write(path: Path, data: bytes) -> None:
    """A file that is on the disk when this returns: a rename behind it may not get there first."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def hub_config(vit: VisionTransformer, description: dict[str, Any]) -> dict[str, Any]:
    """timm's ``config.json``.

    Not by timm's ``save_for_hf``, which would hand on the licence, the tag and the preparation of images that belong to
    timm's own weights of this architecture. The one given here is that of our evaluation, but for sizes and places
    that timm rounds to whole pixels.
    """
    height, width = vit.patch_embed.img_size
    small = min(height, width) < 64  # as pipeline.evaluation_batches has it
    return {
        "architecture": description["model"],
        "num_classes": vit.num_classes,
        "num_features": vit.num_features,
        "global_pool": vit.global_pool,
        "model_args": {key: value for key, value in description["arguments"].items() if key != "num_classes"},
        "pretrained_cfg": {
            "tag": "aps",
            "custom_load": False,
            "num_classes": vit.num_classes,
            "input_size": [3, height, width],
            "fixed_input_size": True,
            "interpolation": "bilinear",
            "crop_pct": 1.0 if small else 0.875,
            "crop_mode": "squash" if small else "center",
            "mean": description["mean"],
            "std": description["std"],
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
        "training": description["training"],
    }


_CARD = """\
---
library_name: timm
pipeline_tag: {task}
tags:
- timm
- {task}
- self-supervised
---
# {title}

{what}

| | |
|---|---|
{table}

## Measured

{measured}, {unmeasured}, robustness, bias; other data than that of this run.

## Use

```python
import timm

{use}
```

`num_classes=10` adds a new classifier, `img_size=...` resamples the position embedding.

## Options of the run

```
{options}
```

No licence is stated here; whoever publishes this folder adds one.
"""
_ENCODER = {
    "task": "image-feature-extraction",
    "title": "{name}, pretrained by Asymmetric Patch Sampling",
    "what": "A Vision Transformer without a classifier, pretrained on images alone by Asymmetric Patch Sampling\n"
    "([arXiv 2306.02854](https://arxiv.org/abs/2306.02854)).",
    "unmeasured": "linear probe, fine-tuning, detection",
    "use": """\
encoder = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # of a hub: "hf-hub:OWNER/NAME"
transform = timm.data.create_transform(**timm.data.resolve_data_config({{}}, model=encoder))
features = encoder(transform(image).unsqueeze(0))  # [1, {features}]; image: of Pillow, RGB""",
}
_CLASSIFIER = {
    "task": "image-classification",
    "title": "{name}, fine-tuned on {classes:,} classes",
    "what": "A Vision Transformer with a classifier, trained on labelled images.",
    "unmeasured": "detection",
    "use": """\
model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # of a hub: "hf-hub:OWNER/NAME"
transform = timm.data.create_transform(**timm.data.resolve_data_config({{}}, model=model))
scores = model(transform(image).unsqueeze(0))  # [1, {classes}]; image: of Pillow, RGB
names = model.pretrained_cfg["label_names"]""",
}


def model_card(vit: VisionTransformer, description: dict[str, Any], options: dict[str, Any], classes: int = 0) -> str:
    """The ``README.md`` for a model hub: what the model is, what was measured, and what was not."""
    training = dict(description["training"])
    known = {key: training.pop(key, None) for key in ("method", "recipe", "steps", "images", "encoder", *KNN)}
    tops = {key: training.pop(key) for key in ("top1", "top5") if key in training}
    arguments = ", ".join(f"`{key}={value}`" for key, value in description["arguments"].items())
    height, width = vit.patch_embed.img_size
    rows = {
        "architecture": f"timm's `{description['model']}` with {arguments}",
        "parameters": f"{sum(parameter.numel() for parameter in vit.parameters()):,}",
        "features": f"{vit.num_features} an image: "
        + ("the class token" if vit.global_pool == "token" else f"pooled as `{vit.global_pool}`"),
        "input": f"RGB, {height} x {width} pixels in [0, 1]; mean {description['mean']}, std {description['std']}",
        "recipe": f"`{known['recipe']}`",
        "trained on" if classes else "pretrained on": f"{known['images']:,} images, "
        + ("with" if classes else "without") + " their labels",
        "optimizer steps": f"{known['steps']:,}",
    } | {key.replace("_", " "): str(value) for key, value in training.items()}  # fmt: skip
    if known["encoder"] is not None:
        rows["started from"] = ", ".join(f"{name} {value}" for name, value in known["encoder"].items())
    measured = "Nothing: the run had no labelled images to evaluate on (`--eval-data`).\n\nNot measured: k-NN accuracy"
    rounds = "(timm's transform, as below, rounds sizes to whole pixels: with it the figure may differ a little.)"
    if known["knn_trained"] is not None:
        began = "untrained" if known["knn_start"] is None else "start"
        trained, before = (with_error(known[f"knn_{name}"], known["knn_queries"]) for name in ("trained", began))
        what = {"untrained": "the same network untrained", "start": "the encoder that it began with"}[began]
        measured = (
            "k-NN accuracy (k = 20, votes weighted by cosine similarity) of the frozen features, on "
            f"{known['knn_queries']:,} evaluation images\nwith {known['knn_bank']:,} training images as the bank: "
            f"**{trained}**, against {before} of {what}. One run; +- is the standard error\n"
            f"of so many images.\n{rounds}\n\nNot measured: other seeds"
        )
    if classes:
        images = training["eval_images"]
        figures = ", ".join(f"{name.replace('top', 'top-')} **{with_error(v, images)}**" for name, v in tops.items())
        of = f"{images:,} evaluation images at the end of the last epoch"
        measured = (
            f"Accuracy on {of}: {figures}. One run; +- is the standard error\nof so many images.\n{rounds}\n\n"
            "Not measured: other seeds"
        )
    kind, fields = _CLASSIFIER if classes else _ENCODER, {"name": description["model"], "classes": classes}
    filled = {key: text.format(features=vit.num_features, **fields) for key, text in kind.items()}
    return _CARD.format(
        **filled, measured=measured, table="\n".join(f"| {name} | {text} |" for name, text in rows.items()),
        options="\n".join(f"{name}: {json.dumps(value)}" for name, value in options.items()) or "not known",
    )  # fmt: skip
