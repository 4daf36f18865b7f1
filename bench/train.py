"""train.py as a user runs it, from images to weights: pairs per second, how long it waits for data, and what limits it.

The input path is measured alone as well, with as many threads. Its need is what the steps would take if they never
waited; from its rate, taken to be proportional to threads, follows how many threads a rank needs for both to balance.
(Where a GPU's own engines decode, that is a lower bound of what they give with more threads.)

A run that fails or is cut off leaves figures all the same, of what it has logged by then.
"""

import contextlib
import json
import math
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from bench import environment
from bench.findings import finding, number, percent
from bench.pipeline import drain, folder_of_images, options_of, skip, without_dali
from pipeline import Loader
from run import quiet
from run.ranks import Ranks
from run.recipes import RECIPES

SMALL = ["--image-size", "32", "--depth", "2"]


def missing() -> str:
    """Why train.py cannot run here; "" where it can."""
    return without_dali() if find_spec("tyro") else "tyro is not installed"


def main(arguments: list[str]) -> int:
    parser = options_of("train", "train.py end to end.")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps; the first half is warm-up")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1], help="processes, one run for each of these numbers"
    )
    options = parser.parse_args(arguments)
    if reason := missing():
        return skip(options, reason)
    recipe, batch, steps, more = options.recipe, options.batch_size, options.steps, []
    if options.smoke:
        recipe, batch, steps, more = "toy", 8, 8, SMALL
    config = RECIPES[recipe]
    result = {
        "recipe": recipe, "batch_size": batch, "steps": steps, "source": "given" if options.images else "generated",
        "runs": [],
    }  # fmt: skip
    with folder_of_images(options.images, 4 * batch) as (images, index):
        environment.describe()  # asks the driver, for which a limit leaves no time
        for ranks in options.ranks:
            lines, row = [], {"ranks": ranks}
            try:
                code = run(images, recipe, batch, steps, ranks, more, lines)
            finally:
                rates, waits = speeds(lines)
                if rates:
                    seconds = [1 / rate for rate in rates]  # of a pair; all lines are of as many steps, not as long
                    row["pairs_per_second"] = len(rates) / sum(seconds)
                    row["data_wait"] = sum(w * s for w, s in zip(waits, seconds, strict=True)) / sum(seconds)
                    if ranks == options.ranks[0]:
                        result |= {"metrics": lines} | {name: row[name] for name in row if name != "ranks"}
                        environment.save(options, result | conclusions(result))
            if code or not rates:
                return 1
            threads = Ranks(0, ranks, ranks, environment.device()).threads()
            loader = Loader(
                index, config.augmentation, image_size=32 if options.smoke else config.image_size,
                batch_size=batch // ranks, seed=0, device=environment.device(), threads=threads,
            )  # fmt: skip
            with quiet.decoder():
                alone, _ = drain((both.views[1] for both in loader.batches(0, 12)), batch // ranks)
            row |= balance(row["pairs_per_second"] / ranks, row["data_wait"], config.groups, alone, threads)
            result["runs"].append(row)
            environment.save(options, result | conclusions(result))
    environment.print_table(result["runs"])
    return 0


def conclusions(d: dict) -> dict:
    """Of the first number of ranks pairs per second, with the range of the log's lines; of each what limits it."""
    of = f"{d['recipe']}, batch {d['batch_size']}"
    (rates, waits), last = speeds(d["metrics"]), d["metrics"][-1]["step"]
    spans = f"{number(min(rates))}-{number(max(rates))}, {100 * min(waits):.1f}-{percent(max(waits))}"
    spans += f"; until step {last} of {d['steps']}" * (last < d["steps"])
    speed = f"{number(d['pairs_per_second'])} pairs/s, {percent(d['data_wait'])} of the time waiting for data"
    headline = "" if d["recipe"] == "toy" else f"train.py, {d['recipe']}"  # the demo has its own
    more = f"after warm-up; lines of the log: {spans}"
    found = [finding(f"train.py on files, {of}", speed, more, headline=headline)]
    for row in d.get("runs", ()):
        speed = f"{number(row['pairs_per_second'])} pairs/s, {percent(row['data_wait'])} of the time waiting for data"
        needed, alone = (number(row[f"images_per_second_{name}"]) for name in ("needed", "alone"))
        found.append(finding(
            f"what limits train.py, {of}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}",
            f"the {row['limited_by']}: {speed}",
            f"a rank needs {needed} images/s, its input alone (threads: {row['threads']}) gives {alone}, enough for "
            f"{number(row['ranks_fed'])} such ranks",
            f"threads to balance one: {row['threads_to_balance']}",
        ))  # fmt: skip
    return {"findings": found}


def speeds(lines: list[dict]) -> tuple[list[float], list[float]]:
    """Pairs per second, and shares of the time waited for data, of the lines of metrics of the second half of the steps
    so far; without the first that has a speed, in which compiling counts."""
    lines = [line for line in lines if "data_wait" in line][1:]
    lines = [line for line in lines if line["step"] > lines[-1]["step"] / 2]
    return [line["pairs_per_second"] for line in lines], [line["data_wait"] for line in lines]


def run(images: Path, recipe: str, batch: int, steps: int, ranks: int, more: list[str], lines: list[dict]) -> int:
    """The exit code of a run, whose lines of metrics come to ``lines``, however it ends."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as output:
        command = [
            sys.executable, *launcher, environment.ROOT / "train.py", "--recipe", recipe, "--data", images, "--output",
            output, "--batch-size", batch, "--epochs", steps, "--max-steps", steps, "--log-every", max(1, steps // 8),
            *more,
        ]  # fmt: skip
        try:
            return subprocess.run([*map(str, command)], cwd=environment.ROOT).returncode
        finally:
            with contextlib.suppress(FileNotFoundError):
                lines += map(json.loads, (Path(output) / "metrics.jsonl").read_text().splitlines())


def balance(pairs: float, wait: float, groups: int, alone: float, threads: int) -> dict:
    """What limits a rank: ``pairs`` a second, ``wait`` the share of the time for data, ``alone`` the images a second
    that the input path gives with ``threads`` where nothing else runs. ``ranks_fed``: how many such ranks (on GPUs, one
    each) the input threads of one could feed."""
    needed = pairs / max(1 - wait, 1e-9) / groups
    return {
        "images_per_second_needed": needed, "images_per_second_alone": alone, "threads": threads,
        "threads_to_balance": math.ceil(needed * threads / alone), "ranks_fed": alone / needed,
        "limited_by": "input" if needed > alone else "steps",
    }  # fmt: skip
