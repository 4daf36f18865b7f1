"""What comes out: an encoder that timm loads, and a folder that can go to a model hub as it is.

python -m model.export RUN --to DIR
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from .encoder import create_plain

# What the card leaves out of a run's options: where things lie, and what the weights do not depend on.
UNTOLD = ("data", "eval_data", "output", "device", "threads", "resume")
KNN = ("knn_bank", "knn_queries", "knn_untrained", "knn_trained")


def export_encoder(
    vit: VisionTransformer, folder: Path, *, name: str, arguments: dict, mean, std, training: dict,
    stem: str = "encoder", **more,
) -> Path:  # fmt: skip
    """Writes ``encoder.safetensors`` (timm's own keys) and ``encoder.json`` (what to call timm with) into ``folder``.

    Load it with ``timm.create_model(d["model"], checkpoint_path=..., **d["arguments"])``, d being the JSON. ``mean``
    and ``std`` are per channel, of pixels in [0, 1]; ``training`` says where the encoder comes from. ``stem``: another
    name for both files; ``more`` goes into the JSON as it is.
    """
    description = {"model": name, "arguments": arguments, "mean": list(mean), "std": list(std), "training": training}
    return write_weights(vit, folder / f"{stem}.safetensors", description | more)


def write_weights(module: nn.Module, path: Path, description: dict[str, Any]) -> Path:
    """Writes the state dict of a module as safetensors, whole or not at all, and its description as JSON beside it."""
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in module.state_dict().items()}
    weights = save(state, metadata={"format": "pt"})  # save_file() would make it readable to its owner alone
    about = json.dumps(description, indent=2) + "\n"
    for file, data in ((path, weights), (path.with_suffix(".json"), about.encode())):
        partial = file.with_name(file.name + ".partial")
        try:
            partial.write_bytes(data)
            partial.replace(file)
        except OSError:
            partial.unlink(missing_ok=True)  # of a full disk
            raise
    return path


def export_folder(run: Path, to: Path) -> None:
    """Writes the encoder of a finished run in timm's hub layout: ``config.json``, ``model.safetensors``, ``README.md``.

    ``timm.create_model("local-dir:DIR", pretrained=True)`` loads it. ``to`` may be an empty folder and appears whole or
    not at all. Raises ValueError where the run has no encoder yet, or where ``to`` holds something.
    """
    weights = run / "encoder.safetensors"
    if (run / "model.safetensors").exists() and not weights.exists():
        raise ValueError(
            f"{run} holds a fine-tuned model, whose model.safetensors timm loads; expected a run of train.py"
        )
    if not weights.exists():
        raise ValueError(
            f"{run} holds no encoder.safetensors; expected the output folder of a run that has come to its end"
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"--to {to} is there already; expected a new or an empty folder")
    try:
        description = json.loads((run / "encoder.json").read_text())
        vit = create_plain(description["model"], description["arguments"], device="meta")
        config, card = hub_config(vit, description), model_card(vit, description, _options(run))
    except (KeyError, TypeError, FileNotFoundError, json.JSONDecodeError) as error:
        raise ValueError(f"{run / 'encoder.json'} does not describe an encoder ({error!r})") from None
    partial = to.with_name(to.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        shutil.copyfile(weights, partial / "model.safetensors")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (partial / "README.md").write_text(card)
        partial.replace(to)
    except BaseException:
        shutil.rmtree(partial)
        raise


def hub_config(vit: VisionTransformer, description: dict[str, Any]) -> dict[str, Any]:
    """timm's ``config.json``.

    Not by timm's ``save_for_hf``, which would hand on the licence, the tag and the preparation of images that belong to
    timm's own weights of this architecture. The one given here is that of our k-NN accuracy, but for sizes and places
    that timm rounds to whole pixels.
    """
    height, width = vit.patch_embed.img_size
    small = min(height, width) < 64  # as pipeline.evaluation_batches has it
    return {
        "architecture": description["model"],
        "num_classes": 0,
        "num_features": vit.num_features,
        "global_pool": vit.global_pool,
        "model_args": {key: value for key, value in description["arguments"].items() if key != "num_classes"},
        "pretrained_cfg": {
            "tag": "aps",
            "custom_load": False,
            "num_classes": 0,
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


def _options(run: Path) -> dict[str, Any]:
    """The options of the run that its encoder depends on, as far as they are known."""
    path = run / "config.json"
    options = json.loads(path.read_text())["config"] if path.exists() else {}
    return {name: value for name, value in options.items() if name not in UNTOLD}


_CARD = """\
---
library_name: timm
pipeline_tag: image-feature-extraction
tags:
- timm
- image-feature-extraction
- self-supervised
---
# {name}, pretrained by Asymmetric Patch Sampling

A Vision Transformer without a classifier, pretrained on images alone by Asymmetric Patch Sampling
([arXiv 2306.02854](https://arxiv.org/abs/2306.02854)).

| | |
|---|---|
{table}

## Measured

{measured}, linear probe, fine-tuning, detection, robustness, bias; other data than that of this run.

## Use

```python
import timm

encoder = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # of a hub: "hf-hub:OWNER/NAME"
transform = timm.data.create_transform(**timm.data.resolve_data_config({{}}, model=encoder))
features = encoder(transform(image).unsqueeze(0))  # [1, {features}]; image: of Pillow, RGB
```

`num_classes=10` adds a new classifier, `img_size=...` resamples the position embedding.

## Options of the run

```
{options}
```

No licence is stated here; whoever publishes this folder adds one.
"""


def model_card(vit: VisionTransformer, description: dict[str, Any], options: dict[str, Any]) -> str:
    """The ``README.md`` for a model hub: what the encoder is, what was measured, and what was not."""
    training = dict(description["training"])
    known = {key: training.pop(key, None) for key in ("method", "recipe", "steps", "images", *KNN)}
    arguments = ", ".join(f"`{key}={value}`" for key, value in description["arguments"].items())
    height, width = vit.patch_embed.img_size
    rows = {
        "architecture": f"timm's `{description['model']}` with {arguments}",
        "parameters": f"{sum(parameter.numel() for parameter in vit.parameters()):,}",
        "features": f"{vit.num_features} an image: "
        + ("the class token" if vit.global_pool == "token" else f"pooled as `{vit.global_pool}`"),
        "input": f"RGB, {height} x {width} pixels in [0, 1]; mean {description['mean']}, std {description['std']}",
        "recipe": f"`{known['recipe']}`",
        "pretrained on": f"{known['images']:,} images, without their labels",
        "optimizer steps": f"{known['steps']:,}",
    } | {key: str(value) for key, value in training.items()}
    measured = "Nothing: the run had no labelled images to evaluate on (`--eval-data`).\n\nNot measured: k-NN accuracy"
    if known["knn_trained"] is not None:
        measured = (
            "k-NN accuracy (k = 20, votes weighted by cosine similarity) of the frozen features, on "
            f"{known['knn_queries']:,} evaluation images\nwith {known['knn_bank']:,} training images as the bank: "
            f"**{known['knn_trained']:.1f} %**, against {known['knn_untrained']:.1f} % of the same network untrained. "
            "One run.\n"
            "(timm's transform, as below, rounds sizes to whole pixels: with it the figure may differ a little.)\n\n"
            "Not measured: other seeds"
        )
    return _CARD.format(
        name=description["model"], features=vit.num_features, measured=measured,
        table="\n".join(f"| {name} | {text} |" for name, text in rows.items()),
        options="\n".join(f"{name}: {json.dumps(value)}" for name, value in options.items()) or "not known",
    )  # fmt: skip


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m model.export", description="Write an encoder in the hub layout of timm."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the output folder of a finished run")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to write: new, or empty")
    options = parser.parse_args(arguments)
    try:
        export_folder(options.run, options.to)
    except (ValueError, OSError) as error:
        print(f"model.export: {error}", file=sys.stderr)
        sys.exit(2)
    print(f'timm.create_model("local-dir:{options.to}", pretrained=True)')


if __name__ == "__main__":
    main(sys.argv[1:])
