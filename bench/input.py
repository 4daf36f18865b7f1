"""The input path alone: source images per second from JPEG files to both augmented views, as ``pipeline.Loader`` gives.

``--images`` is a folder of images; otherwise JPEGs of 375 x 500 px are generated, smooth with some noise (quality 90,
about the bytes of a photograph of that size).
"""

import argparse
import contextlib
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from bench import environment
from bench.timing import summary
from pipeline import Index, Loader
from run.recipes import RECIPES


@contextlib.contextmanager
def folder_of_images(given: Path | None, count: int):
    """The folder given, or one with ``count`` generated images that goes away afterwards."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda number: generate(Path(folder) / f"{number:05}.jpg", number), range(count)))
        yield Path(folder)


def generate(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    picture = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = picture + rng.integers(-12, 13, picture.shape, dtype=np.int16)
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def options_of(subject: str, description: str) -> argparse.ArgumentParser:
    """The options of the two subjects that read images."""
    parser = environment.parser(subject, description)
    parser.add_argument("--images", type=Path, help="folder, list or shards of images; default: generated ones")
    parser.add_argument("--recipe", choices=RECIPES, default="imagenet-vit-s")
    parser.add_argument("--batch-size", type=int, default=512, help="images")
    return parser


def skip(options: argparse.Namespace, subject: str, reason: str) -> int:
    environment.save(options.json, subject, {"skipped": reason})
    print(f"skipped: {reason}")
    return 0


def main(arguments: list[str]) -> int:
    parser = options_of("input", "Decoded and augmented images per second.")
    parser.add_argument("--batches", type=int, default=40, help="timed ones")
    options = parser.parse_args(arguments)
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        return skip(options, "input", f"DALI cannot be imported: {error}")
    config, batch, batches = RECIPES[options.recipe], options.batch_size, options.batches
    if options.smoke:
        batch, batches = 8, 3
    device, threads = environment.device(), len(os.sched_getaffinity(0))
    with folder_of_images(options.images, 4 * batch) as folder:
        index = Index.scan(folder)
        sampled = range(min(100, len(index)))
        file_bytes = [index.places[i, 2] if index.shards else os.path.getsize(index.file(i)) for i in sampled]
        loader = Loader(
            index, config.augmentation, image_size=config.image_size, batch_size=batch, seed=0, device=device,
            threads=threads,
        )  # fmt: skip
        seconds = time_batches(loader.batches(0, batches + 3), warm_up=3, device=device)
    result = {
        "recipe": config.recipe, "image_size": config.image_size, "batch_size": batch, "threads": threads,
        "images": len(index), "source": "given" if options.images else "generated",
        "mean_file_bytes": round(float(np.mean(file_bytes))),
        "mean_height": float(index.sizes[:, 0].mean()), "mean_width": float(index.sizes[:, 1].mean()),
        "batch_seconds": summary(seconds), "images_per_second": batch * len(seconds) / sum(seconds),
        "bad": len(loader.bad),
    }  # fmt: skip
    environment.save(options.json, "input", result)
    print(f"{result['images_per_second']:,.1f} images/s with {threads} threads, {config.image_size} px, batch {batch}")
    return 0


def time_batches(batches, *, warm_up: int, device) -> list[float]:
    """Seconds from each batch to the next, complete on the device."""
    seconds, last = [], None
    for number, batch in enumerate(batches):
        batch.views[1][-1, -1, -1].tolist()  # waits for the device
        now = time.perf_counter()
        if number >= warm_up:
            seconds.append(now - last)
        last = now
    return seconds
