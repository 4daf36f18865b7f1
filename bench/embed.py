"""The features of all images of a folder by embed.py, and by the loop that one writes: Pillow, timm, a DataLoader.

The same files and the same encoder, a folder that timm loads, in one process, in turns, in float32; with the encoder
and without ("input alone"). Each pass is timed from nothing to the last row, the start of pipelines and workers too.

The two prepare an image alike but not bit for bit: embed.py cuts the central 7/8 of the shorter side out of the image
and resizes that once, by a triangle filter, from a place that is no whole pixel; timm resizes all of the image (the
shorter side to 8/7), rounds both sides to whole pixels and cuts out the centre, at whole pixels too. ``cosine`` is that
of the features of an image by both, from which the mean over all images is taken away, as it says nothing of an image.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import environment
from bench.findings import finding, number
from bench.pipeline import (
    Files,
    decodable,
    folder_of_images,
    opened,
    processor_seconds,
    read_by_dali,
    skip,
    without_dali,
)
from model.export import export_model
from pipeline import Index, evaluation_batches
from run.recipes import RECIPES
from run.training import encoder_arguments, new_encoder
from transfer import knn
from transfer.pretrained import load_encoder, square

BATCH = 64  # as embed.py
RECIPE = "imagenet-vit-s"  # whose encoder is taken, as it begins
OURS, PLAIN = "embed.py", "Pillow, timm and a DataLoader"


def main(arguments: list[str]) -> int:
    parser = environment.parser("embed", "embed.py beside a plain loop.")
    parser.add_argument("--images", type=Path, help="folder or list of images; default: generated ones")
    parser.add_argument("--count", type=int, default=512, help="of the generated images")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each, in turns")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="that read, or processes")
    options = parser.parse_args(arguments)
    if reason := without_dali():
        return skip(options, reason)
    config, count, rounds = RECIPES[RECIPE], options.count, options.rounds
    if options.smoke:
        config, count, rounds = dataclasses.replace(config, depth=1, image_size=64), 8, 1
    with folder_of_images(options.images, count) as (_, index), tempfile.TemporaryDirectory() as encoder:
        if not read_by_dali(index):
            print(f"bench: {options.images}: expected images that are files of their own", file=sys.stderr)
            return 2
        index = decodable(index, len(index), Pillow=opened) if options.images else index
        export_model(
            new_encoder(config), Path(encoder), name=config.model, arguments=encoder_arguments(config),
            mean=config.mean, std=config.std, training={"recipe": RECIPE, "steps": 0, "images": 0},
        )  # fmt: skip
        result = {"model": config.model, "image_size": config.image_size, "threads": options.threads}
        result |= compared(index, Path(encoder), options, rounds) | {"load": os.getloadavg()[0]}
    environment.save(options, result | conclusions(result))
    environment.print_table(result["rows"])
    print(f"cosine of the features: mean {result['cosine']['mean']:.4f}, least {result['cosine']['least']:.4f}")
    return 0


def conclusions(d: dict) -> dict:
    def said(row: dict) -> str:
        ms = row["CPU ms/image"]  # wall time, beside it, is also that of whatever else ran: see "load"
        return f"{number(ms)} ms of processor time an image ({number(1000 / ms)} images/s of a core)"

    ours, plain, our_input, plain_input = d["rows"]
    what = f"features of all images, {d['model']}, {d['image_size']} px, threads or workers: {d['threads']}"
    cosine = d["cosine"]
    return {"findings": [finding(
        what, said(ours), f"{PLAIN}: {said(plain)}", f"input alone: {said(our_input)}, and {said(plain_input)}",
        f"cosine of the centred features of both: mean {cosine['mean']:.4f}, least {cosine['least']:.4f}",
    )]}  # fmt: skip


def compared(index: Index, encoder: Path, options: argparse.Namespace, rounds: int) -> dict:
    """{"images", "rows": one of each way, of medians, "cosine"}."""
    ours, description = load_encoder(encoder)
    plain = timm.create_model(f"local-dir:{encoder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=plain))
    samples, cpu = np.arange(len(index)), torch.device("cpu")
    files = Files([index.file(i) for i in samples], opened, (transform,))

    def our_rows():
        how = {"mean": description["mean"], "std": description["std"], "device": cpu, "threads": options.threads}
        return (rows for (rows,), _, _ in knn.batches([ours], index, samples, **how))

    def our_input():
        how = {"image_size": square(ours), "batch_size": BATCH, "device": cpu, "threads": options.threads}
        return (images for images, _, _ in evaluation_batches(index, samples, **how))

    def plain_input():
        loader = torch.utils.data.DataLoader(
            files, BATCH, num_workers=options.threads, multiprocessing_context="fork"
        )  # fmt: skip
        return (images for (images,) in loader)

    def plain_rows():
        for images in plain_input():
            with torch.inference_mode():
                yield plain(images)

    ways = {OURS: our_rows, PLAIN: plain_rows, f"{OURS}, input alone": our_input, f"{PLAIN}, input alone": plain_input}
    found, measured = {}, {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name], *figures = timed(way, keep=way in (our_rows, plain_rows))
            measured[name].append(figures)
    rows = []
    for name, figures in measured.items():
        wall, spent = (statistics.median(column) for column in zip(*figures, strict=True))
        rows.append({"way": name, "images/s": len(index) / wall, "CPU ms/image": 1000 * spent / len(index)})
    cosine = F.cosine_similarity(*(found[name] - found[name].mean(0) for name in (OURS, PLAIN)))
    return {"images": len(index), "rows": rows, "cosine": {"mean": cosine.mean().item(), "least": cosine.min().item()}}


def timed(way, keep: bool) -> tuple[Tensor | None, float, float]:
    """What comes out, if it is to be kept, seconds, and seconds of processors, worker processes included."""
    before, start, parts = processor_seconds(), time.perf_counter(), []
    for part in way():
        if keep:
            parts.append(part)
    wall, spent = time.perf_counter() - start, processor_seconds() - before
    return torch.cat(parts) if keep else None, wall, spent
