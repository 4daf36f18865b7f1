"""The input path on JPEGs that its engines do not like: progressive ones, and photographs of 24 megapixels.

Generated as in ``bench pipeline``. ``memory_bytes``: what DALI holds of the GPU's memory afterwards, beside torch.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import cpu_count
from pathlib import Path

import torch

from bench import environment
from bench.findings import failure, finding, number, without_figures
from bench.pipeline import AHEAD, drain, generate, skip, without_dali
from pipeline import Index, Loader
from run.ranks import Ranks
from run.recipes import RECIPES

KINDS = {  # height, width in pixels, images of a batch
    "baseline": (375, 500, 256),
    "progressive": (375, 500, 256),
    "24 megapixels": (4000, 6000, 64),
}
BATCHES = 6
COLUMNS = "kind", "height", "width", "batch_size", "images/s", "CPU ms/image", "memory_bytes", "failed"


def row_of(kind: str, config, device: torch.device, small: bool) -> dict:
    height, width, batch = KINDS[kind]
    if small:
        height, width, batch = height // 10, width // 10, 4
    on_gpu = device.type == "cuda"
    make = partial(generate, height=height, width=width, progressive=kind == "progressive")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cpu_count()) as pool:
        list(pool.map(lambda number: make(Path(folder) / f"{number:05}.jpg", number), range(batch)))
        before = torch.cuda.mem_get_info(device)[0] if on_gpu else 0
        loader = Loader(
            Index.scan(Path(folder)), config.augmentation, image_size=config.image_size, batch_size=batch, seed=0,
            device=device, threads=Ranks(0, 1, 1, device).threads(),
        )  # fmt: skip
        views = (both.views[1] for both in loader.batches(0, (1 if small else BATCHES) + 2 * AHEAD))
        rate, cost = drain(views, batch)
        held = before - torch.cuda.mem_get_info(device)[0] if on_gpu else None
        row = {"kind": kind, "height": height, "width": width, "batch_size": batch, "images/s": rate}
        row |= {"CPU ms/image": cost, "memory_bytes": held}
        if loader.bad:
            raise RuntimeError(f"{kind}: {len(loader.bad)} images do not decode: {next(iter(loader.bad.values()))}")
    if on_gpu:
        from nvidia.dali import backend

        backend.ReleaseUnusedMemory()
    return row


def conclusions(d: dict) -> dict:
    found = []
    for row in d["rows"]:
        memory = row.get("memory_bytes")
        more = [f"{number(memory / 2**30)} GiB of the GPU's memory held"] if memory is not None else []
        what = f"input path, {row['kind']} JPEGs of {row['height']} x {row['width']}, batch {row['batch_size']}"
        found.append(finding(what, without_figures(row) or f"{number(row['images/s'])} images/s", *more))
    return {"findings": found}


def main(arguments: list[str]) -> int:
    options = environment.parser("kinds", "The input path on progressive and on large JPEGs.").parse_args(arguments)
    if reason := without_dali():
        return skip(options, reason)
    config, result = RECIPES["imagenet-vit-s"], {"recipe": "imagenet-vit-s", "rows": []}
    for kind, (height, width, batch) in KINDS.items():
        try:
            row = row_of(kind, config, environment.device(), options.smoke)
        except Exception as error:  # one that fails stops no other
            row = {"kind": kind, "height": height, "width": width, "batch_size": batch, "failed": failure(error)}
        result["rows"].append(row)
        environment.save(options, result | conclusions(result))
    environment.print_table([{name: row.get(name) for name in COLUMNS} for row in result["rows"]])
    return int(any("failed" in row for row in result["rows"]))
