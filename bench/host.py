"""What the thread that launches kernels spends beside them: on a batch, and on a checkpoint.

Of ``next()`` its own processor time: decoding is left out, for other threads do it. (The order of an epoch, which a
thread computes ahead: ``bench index``.) Of a checkpoint the time until training goes on, and until it is on the disk.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from bench import environment
from bench.findings import finding, number
from bench.pipeline import skip, without_dali
from bench.step import wait
from pipeline import Index, Loader
from run.checkpoint import Saver
from run.recipes import RECIPES
from run.training import Training

AHEAD = 3  # batches before the clock


def conclusions(d: dict) -> dict:
    text = f"{number(d['next_ms'])} ms of the thread that asks for a batch of {d['batch_size']}"
    saved = (
        f"{number(d['checkpoint_ms'])} ms until training goes on, {number(d['checkpoint_written_ms'])} ms to the disk"
    )
    rows = [finding(f"host time of the input path, {d['recipe']}", text)]
    return {"findings": [*rows, finding(f"checkpoint, {d['recipe']}", saved)]}


def main(arguments: list[str]) -> int:
    parser = environment.parser("host", "Host time of the input path.")
    parser.add_argument("--recipe", choices=RECIPES, default="imagenet-vit-s")
    parser.add_argument("--batch-size", type=int, default=512, help="images")
    options = parser.parse_args(arguments)
    if reason := without_dali():
        return skip(options, reason)
    batch, turns = (8, 2) if options.smoke else (options.batch_size, 20)
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
    result = {"recipe": options.recipe, "batch_size": batch, "next_ms": asking}
    result |= checkpoint_ms(options.recipe, options.smoke)
    environment.save(options, result | conclusions(result))
    print(f"next(), batch {batch}: {asking:.2f} ms")
    print("checkpoint: {checkpoint_ms:.1f} ms, to the disk {checkpoint_written_ms:.1f} ms".format(**result))
    return 0


def checkpoint_ms(recipe: str, small: bool) -> dict:
    """Of one checkpoint, the second: {"checkpoint_ms" until training goes on, "checkpoint_written_ms"}."""
    config = RECIPES[recipe]
    config = dataclasses.replace(config, depth=1, head_hidden=64) if small else config
    training = Training(config, environment.device(), compiled=False)
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), last=1, every=0)
        for step in (1, 2):
            wait(training.device)
            start = time.perf_counter()
            saver.save(step, training.state_dict())
            goes_on = time.perf_counter() - start
            saver.wait()
            written = time.perf_counter() - start
    return {"checkpoint_ms": 1000 * goes_on, "checkpoint_written_ms": 1000 * written}


def own_ms(call: Callable, turns: int) -> float:
    """Milliseconds of this thread's processor time, the median."""
    times = []
    for _ in range(turns):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return 1000 * statistics.median(times)
