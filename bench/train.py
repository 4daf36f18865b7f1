"""train.py as a user runs it, from images to weights: pairs per second, and the share of the time it waits for data."""

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from bench import environment
from bench.pipeline import folder_of_images, options_of, skip


def main(arguments: list[str]) -> int:
    parser = options_of("train", "train.py end to end.")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps; the first half is warm-up")
    options = parser.parse_args(arguments)
    if find_spec("tyro") is None:
        return skip(options, "train", "tyro is not installed")
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        return skip(options, "train", f"DALI cannot be imported: {error}")
    recipe, batch, steps, more = options.recipe, options.batch_size, options.steps, []
    if options.smoke:
        recipe, batch, steps, more = "toy", 8, 8, ["--image-size", "32", "--depth", "2"]
    with tempfile.TemporaryDirectory() as output, folder_of_images(options.images, 4 * batch) as images:
        command = [
            sys.executable, environment.ROOT / "train.py", "--recipe", recipe, "--data", images, "--output", output,
            "--batch-size", batch, "--max-steps", steps, "--log-every", max(1, steps // 4), *more,
        ]  # fmt: skip
        done = subprocess.run([*map(str, command)], cwd=environment.ROOT)
        if done.returncode:
            return done.returncode
        lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    steady = [line for line in lines if line.get("step", 0) > steps // 2 and "data_wait" in line]
    rates, waits = ([line[name] for line in steady] for name in ("pairs_per_second", "data_wait"))
    result = {
        "recipe": recipe, "batch_size": batch, "steps": steps, "source": "given" if options.images else "generated",
        "pairs_per_second": len(rates) / sum(1 / rate for rate in rates), "data_wait": sum(waits) / len(waits),
        "metrics": lines,
    }  # fmt: skip
    environment.save(options.json, "train", result)
    print(f"{result['pairs_per_second']:,.1f} pairs/s, {result['data_wait']:.1%} of the time waiting for data")
    return 0
