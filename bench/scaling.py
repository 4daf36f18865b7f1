"""What several GPUs should give, from what one gave: a model on paper, every assumption of which stands here.

For W ranks with b images each (``--gpus``, ``--images-per-gpu``), the time of an optimizer step is the sum of

- compute: the measured step of one GPU, of which the update (clip, AdamW, momentum encoder: 62 bytes a
  parameter through memory) does not depend on b and the rest is proportional to it. Launches are not modelled, so for
  few images a GPU this is too good;
- gradients: a ring all-reduce of all trainable parameters, 2 (W - 1) / W times 4 bytes each (2 with
  --compress-gradients), in one collective behind the backward pass, which is one compiled graph;
- batch normalisation: ``LATENCY`` for each sum over the ranks (every layer of the heads, forward and backward; of
  the keys forward);
- keys: an all-gather of 2 b E float32; and the loss: ``LOSS_PASSES`` passes through the [2, b, W b] similarities.

Links: ``WITHIN`` a node of 8 GPUs by NVLink, ``BETWEEN`` nodes by one 400 Gb/s adapter a GPU; both are data sheet
figures at 80 %. R groups being made of each image, a node has to decode 8 b / R images a step.

The step of one GPU is that of the newest folder of results that has it of both recipes (``--measured``).

And what a recipe takes on one GPU: epochs x images x R pairs, at the pairs/s that were measured; a larger batch is
taken to need as much time an image. The recipes of CIFAR were not measured on a GPU: ``LIKE`` names the recipe of the
same width that was, and they are taken to reach as many operations a second. Waiting for data, checkpoints and k-NN
come on top.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

from bench import environment
from bench.findings import number, percent
from run.recipes import RECIPES, Config
from run.training import Training, plan_patches

RESULTS = environment.ROOT / "bench/results"
BY_HAND = "step_variants.json"  # the H100's steps, before results had the form of today
ROWS = {  # the recipe, and its row of that file
    "imagenet-vit-s": "ViT-S, networks compiled, bfloat16 residual stream, kernels.attention",
    "imagenet-vit-b": "ViT-B, networks compiled, bfloat16 residual stream, kernels.attention",
}
MEASURED_BATCH = 512
DECODED = 15_348  # images/s of one H100 with 6 cores (input_6_cores.json beside that file)
FILE_BYTES = 111_847  # of an ImageNet JPEG, mean (there)
IMAGES = 1_281_167  # of ImageNet's training set
CIFAR_IMAGES = 50_000  # of CIFAR-10's
LIKE = {name: name for name in ROWS} | {"cifar-vit-s": "imagenet-vit-s", "cifar-vit-b": "imagenet-vit-b"}
OWN = 100_000, 100  # images and epochs of the last column

PER_NODE = 8
WITHIN, BETWEEN = 0.8 * 450e9, 0.8 * 50e9  # bytes/s and GPU and direction
LATENCY = {1: 20e-6, 2: 40e-6}  # seconds of a small all-reduce within a node, and between nodes
LOSS_PASSES = 8


def steps_of(folder: Path) -> dict:
    """What a folder of results says of one GPU; {} where it has not the steps of both recipes at ``MEASURED_BATCH``.

    {"device", "rows": by recipe of its step with ``MEASURED_BATCH`` images, "memory": bytes/s of a copy,
    "update_bytes": that the update of that step moved, a parameter}.
    """
    if (folder / BY_HAND).exists():
        found = json.loads((folder / BY_HAND).read_text())
        rows = {row["variant"]: row for row in found["rows"]}
        # Gradient collected 8, norms 8, clip 20, AdamW 28, momentum encoder 12.
        more = {"memory": 3.0e12, "update_bytes": 76}
        return {"device": found["machine"]["device"], "rows": {r: rows[row] for r, row in ROWS.items()}, **more}
    files = [folder / f"step_{recipe.removeprefix('imagenet-').replace('-', '_')}.json" for recipe in ROWS]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    found = [d for d in found if "graph" in d and d["batch_size"] == MEASURED_BATCH]
    rows = {d["recipe"]: d["graph"] | {"flop_per_pair": d["flop_per_pair"]} for d in found}
    if rows.keys() < set(ROWS):
        return {}
    # In one pass (kernels/update.py): gradient collected from bfloat16 6, the pass 56.
    more = {"memory": found[0]["copy_bytes_per_second"], "update_bytes": 62}
    return {"device": found[0]["machine"]["device"], "rows": rows, **more}


def newest(results: Path) -> Path:
    """The folder of the latest date, which ends its name, that has them."""
    return max(
        (folder for folder in results.iterdir() if folder.is_dir() and steps_of(folder)), key=lambda f: f.name[-10:]
    )


def predict(
    config: Config, parameters: int, *, step_seconds: float, memory: float, update_bytes: int, gpus: int, images: int,
    compress: bool,
) -> dict:  # fmt: skip
    """Seconds of a step by part, and what follows; ``step_seconds``: of one GPU with ``MEASURED_BATCH`` images."""
    link, ring = WITHIN if gpus <= PER_NODE else BETWEEN, (gpus - 1) / gpus
    layers = config.projector_layers + config.predictor_layers
    sums = (2 * layers + (config.projector_layers if config.ema is not None else 0)) * (gpus > 1)
    update = update_bytes * parameters / memory
    parts = {
        "compute": update + (step_seconds - update) * images / MEASURED_BATCH,
        "gradients": 2 * ring * parameters * (2 if compress else 4) / link,
        "batch_norm": sums * LATENCY[1 if gpus <= PER_NODE else 2],
        "keys": 2 * images * config.head_out * 4 * (gpus - 1) / link,
        "loss": LOSS_PASSES * 2 * images * (gpus - 1) * images * 4 / memory,
    }
    seconds = sum(parts.values())
    pairs = images * gpus / seconds
    decoded = pairs / config.groups / gpus
    return {
        "gpus": gpus, "images_per_gpu": images, **{f"{name}_ms": 1e3 * part for name, part in parts.items()},
        "step_ms": 1e3 * seconds, "pairs_per_second": pairs,
        "efficiency": pairs / gpus * step_seconds / MEASURED_BATCH,
        "node_images_per_second": decoded * min(gpus, PER_NODE),
        "node_gb_per_second": decoded * min(gpus, PER_NODE) * FILE_BYTES / 1e9,
        "decoder_share": decoded / DECODED,
        "epoch_seconds": IMAGES * config.groups / pairs,
    }  # fmt: skip


def cost(name: str, flop_per_pair: float, rows: dict[str, dict]) -> dict:
    """What a recipe takes on one GPU; None where nothing measured says so. ``rows``: the measured, by recipe."""
    config, images = RECIPES[name], IMAGES if name in ROWS else CIFAR_IMAGES
    measured = rows[LIKE[name]] if name in LIKE else None
    rate = measured and measured["pairs_per_second"]
    if measured and name not in ROWS:
        rate *= measured["flop_per_pair"] / flop_per_pair
    hours, own = (
        rate and count * epochs * config.groups / rate / 3600 for count, epochs in ((images, config.epochs), OWN)
    )
    return {
        "recipe": name, "model": config.model, "image_size": config.image_size, "patch_size": plan_patches(config)[0],
        "batch_size": config.batch_size, "epochs": config.epochs, "flop_per_pair": flop_per_pair,
        "pairs_per_second": rate, "hours": hours, "own_hours": own,
        "memory_bytes": measured["peak_memory_bytes"] if name in ROWS else None,
    }  # fmt: skip


def cost_table(costs: list[dict], device: str) -> list[list[str]]:
    card = next((word for word in device.split() if re.search(r"\d", word)), device)
    own = "hours for {:,} images, {} epochs".format(*OWN)
    table = [["recipe", "model", "image, patch (px)", "batch", "epochs", "GPU memory", f"hours on one {card}", own]]
    for row in costs:
        text = "{:.3g}" if row["memory_bytes"] else "about {:.2g}"  # as far as it was measured
        memory = f"{row['memory_bytes'] / 2**30:.3g} GiB at batch {MEASURED_BATCH}" if row["memory_bytes"] else "-"
        hours = [text.format(row[key]) if row[key] else "-" for key in ("hours", "own_hours")]
        size = f"{row['image_size']}, {row['patch_size']}"
        kind = "ViT-" + row["model"].split("_")[1][0].upper()
        table.append([f"`{row['recipe']}`", kind, size, f"{row['batch_size']:,}", f"{row['epochs']:,}", memory, *hours])
    return table


def conclusions(d: dict) -> dict:
    """Tables instead of rows: all models in each cell, a column for each number of GPUs; and a row for each recipe."""
    models = {name: d[name] for name in ROWS if name in d}
    columns = list(zip(*models.values(), strict=True))
    figures = {
        "step (ms)": "step_ms", "pairs/s": "pairs_per_second", "share of that many single GPUs": "efficiency",
        "images/s for a node to decode": "node_images_per_second", "GB/s for a node to read": "node_gb_per_second",
        "seconds for a pass over ImageNet": "epoch_seconds",
    }  # fmt: skip
    sizes = [(first["gpus"], first["images_per_gpu"]) for first, *_ in columns]
    heads = [f"{n} GPU{'s' * (n > 1)}, batch {n * images:,}" for n, images in sizes]
    table = [[", ".join(models), *heads]]
    for label, name in figures.items():
        text = percent if name == "efficiency" else number
        table.append([label, *(", ".join(text(row[name]) for row in column) for column in columns)])
    return {"findings": [], "table": table, "recipes": cost_table(d["costs"], d["device"])}


def main(arguments: list[str]) -> int:
    parser = environment.parser("scaling", "Steps on several GPUs, predicted from the measured one.")
    parser.add_argument("--recipe", choices=ROWS, nargs="+", default=list(ROWS))
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64, 64])
    parser.add_argument(
        "--images-per-gpu", type=int, nargs="+", default=[512, 512, 512, 64], help="one for each of these"
    )
    parser.add_argument("--compress-gradients", action="store_true")
    parser.add_argument("--measured", type=Path, help="folder of results with the steps of one GPU [the newest]")
    options = parser.parse_args(arguments)
    if len(options.gpus) != len(options.images_per_gpu):
        asked, given = len(options.gpus), len(options.images_per_gpu)
        parser.error(f"--images-per-gpu: expected {asked} numbers, one for each of --gpus; got {given}")
    folder = options.measured or newest(RESULTS)
    steps = steps_of(folder)
    if not steps:
        expected = f"results of bench step with batch {MEASURED_BATCH}, of {' and '.join(ROWS)}"
        print(f"--measured {folder}: expected {expected}", file=sys.stderr)
        return 2
    rows, how = steps["rows"], {name: steps[name] for name in ("memory", "update_bytes")}
    result = {"measured": folder.name, "device": steps["device"], "compress_gradients": options.compress_gradients}
    for recipe in options.recipe:
        config = RECIPES[recipe]
        parameters = trained_parameters(config)
        result[recipe] = [
            predict(
                config, parameters, step_seconds=rows[recipe]["step_seconds"]["p50"], gpus=gpus, images=images,
                compress=options.compress_gradients, **how,
            )
            for gpus, images in zip(options.gpus, options.images_per_gpu, strict=True)
        ]  # fmt: skip
        print(f"\n{recipe}: {parameters / 1e6:.1f} M trained parameters")
        environment.print_table(result[recipe])
    names = [name for name in RECIPES if name != "toy"]
    result["costs"] = [cost(name, network_of(RECIPES[name]).flop_per_pair, rows) for name in names]
    print()
    environment.print_table(result["costs"])
    environment.save(options, result | conclusions(result))
    return 0


def trained_parameters(config: Config) -> int:
    training = network_of(dataclasses.replace(config, ema=None, clip="off"))
    return sum(parameter.numel() for parameter in training.network.parameters() if parameter.requires_grad)


def network_of(config: Config) -> Training:
    return Training(config, environment.device(), compiled=False)
