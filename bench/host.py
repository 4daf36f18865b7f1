"""What the thread that launches kernels spends on data: its processor time in ``next()``, and the order of an epoch.

Decoding is left out, for other threads do it: the images are small, and the time is that of this thread alone.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from bench import environment
from bench.findings import finding, number
from bench.pipeline import skip
from pipeline import Index, Loader, stream
from run.recipes import RECIPES

IMAGES = 1_281_167  # those of ImageNet
AHEAD = 3  # batches before the clock


def conclusions(d: dict) -> dict:
    text = f"{number(d['next_ms'])} ms of the thread that asks for a batch of {d['batch_size']}"
    order = f"the order of an epoch of {d['images']:,} images, computed ahead, {number(d['order_ms'])} ms"
    return {"findings": [finding(f"host time of the input path, {d['recipe']}", text, order)]}


def main(arguments: list[str]) -> int:
    parser = environment.parser("host", "Host time of the input path.")
    parser.add_argument("--recipe", choices=RECIPES, default="imagenet-vit-s")
    parser.add_argument("--batch-size", type=int, default=512, help="images")
    options = parser.parse_args(arguments)
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        return skip(options, f"DALI cannot be imported: {error}")
    batch, images, turns = (8, 1000, 2) if options.smoke else (options.batch_size, IMAGES, 20)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(2 * batch):
            Image.new("RGB", (16, 12), (i % 256, 9, 9)).save(Path(folder) / f"{i:08}.jpg")
        loader = Loader(
            Index.scan(Path(folder)), RECIPES[options.recipe].augmentation, image_size=32, batch_size=batch, seed=0,
            device=environment.device(), threads=2,
        )  # fmt: skip
        batches = loader.batches(0, AHEAD + turns)
        for _ in range(AHEAD):
            next(batches)
        asking = own_ms(lambda: next(batches), turns)
        order = own_ms(functools.partial(stream.epoch_order, images, 0, 0), min(turns, 5))
    result = {"recipe": options.recipe, "batch_size": batch, "images": images, "next_ms": asking, "order_ms": order}
    environment.save(options, result | conclusions(result))
    print(f"next(), batch {batch}: {asking:.2f} ms; order of {images:,} images: {order:.1f} ms")
    return 0


def own_ms(call: Callable, turns: int) -> float:
    """Milliseconds of this thread's processor time, the median."""
    times = []
    for _ in range(turns):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return 1000 * statistics.median(times)
