"""Large models: an optimizer step, a checkpoint, and the memory of a rank, on one rank and sharded over several.

Each row is of processes of its own: a network built, steps on random crops, of which the first is not timed, and a
checkpoint as train.py saves it, if the machine has room for the copy. Peaks are of each of these parts: on a CPU of the
resident set, which begins with that of the imports, on a GPU of what torch has taken there. ``--batch-size`` is that of
a rank. glibc keeps what is let go of for itself, and so much that it hides what sharding saves: here it is told not to.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import environment
from bench.findings import finding, number
from bench.kernels import batch_of_boxes
from bench.step import SMALL, wait
from pipeline import Batch
from run.checkpoint import Saver
from run.ranks import Ranks
from run.recipes import RECIPES
from run.training import Training

MODELS = ["vit_base_patch16_224", "vit_large_patch16_224"]
STEPS = 3  # of which the first is not timed
COPIES = 5  # of all parameters in a checkpoint: both networks, two moments, the clip's average


def main(arguments: list[str]) -> int:
    parser = environment.parser("big", "Time and memory of large models.")
    parser.add_argument("--models", nargs="+", default=MODELS, help="of timm")
    parser.add_argument("--batch-size", type=int, default=2, help="images of a rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="sharded (FSDP2) where more than one")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        return work(options)
    del options.worker
    rows = []
    for model in options.models:
        for ranks in options.ranks:
            rows.append({"model": model, "ranks": ranks} | measured(model, ranks, options))
            result = {"batch_size": options.batch_size, "rows": rows}
            environment.save(options, result | conclusions(result))
    environment.print_table([{name: row.get(name) for name in COLUMNS} for row in rows])
    return int(any("failed" in row for row in rows))


GIVE_BACK = {"MALLOC_TRIM_THRESHOLD_": "131072"}  # bytes
COLUMNS = "model", "ranks", "parameters", "step_seconds", "step_processor_seconds", "checkpoint_seconds", "failed"


def conclusions(d: dict) -> dict:
    found = []
    for row in d["rows"]:
        where = "one rank" if row["ranks"] == 1 else f"{row['ranks']} ranks, sharded"
        what = f"{row['model']}, batch {d['batch_size']} a rank, float32, {where}"
        if "failed" in row:
            found.append(finding(what, f"failed: {row['failed']}"))
            continue
        peaks = ", ".join(f"{number(max(row['peak_gib'][part]))} ({part})" for part in row["peak_gib"])
        step, processor = number(row["step_seconds"]), number(row["step_processor_seconds"])
        if "checkpoint_seconds" in row:
            goes_on, written = number(row["checkpoint_seconds"]), number(row["checkpoint_written_seconds"])
            size = number(row["checkpoint_bytes"] / 2**30)
            saved = f"a checkpoint of {size} GiB: {goes_on} s until training goes on, {written} s to the disk"
        else:
            saved = f"no checkpoint: {row['no_checkpoint']}"
        found.append(finding(
            what, f"step {step} s, {processor} s of processor time of a rank", f"peak of a rank in GiB: {peaks}",
            saved, f"{number(row['parameters'] / 1e6)} million parameters with the heads",
        ))  # fmt: skip
    return {"findings": found}


def measured(model: str, ranks: int, options: argparse.Namespace) -> dict:
    """What ``work`` says on all ranks, the slowest of each; {"failed"} where they ended otherwise."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, "-m", "bench", "big", "--models", model, "--worker", folder]
        command += ["--batch-size", options.batch_size, *["--smoke"] * options.smoke]
        how = {"cwd": environment.ROOT, "env": os.environ | GIVE_BACK, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run([*map(str, command)], **how)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "Error" in line] or [f"exit code {done.returncode}"]
            return {"failed": lines[0]}
        rows = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    row = {name: max(row[name] for row in rows) for name in rows[0] if name != "peak_gib"}
    return row | {"peak_gib": {part: [row["peak_gib"][part] for row in rows] for part in rows[0]["peak_gib"]}}


def work(options: argparse.Namespace) -> int:
    ranks = Ranks.join("auto")
    config = dataclasses.replace(
        RECIPES["imagenet-vit-b"], model=options.models[0], batch_size=max(2, options.batch_size * ranks.count),
        precision="float32", fsdp=ranks.count > 1, **(SMALL if options.smoke else {}),
    )  # fmt: skip
    peaks, device = {"imports": peak(ranks.device)}, ranks.device
    training = Training(config, device, ranks=ranks.count, compiled=False)
    peaks["network"] = peak(device)

    shape = options.batch_size, config.image_size, config.image_size, 3
    crops = tuple(torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(2))
    boxes, flips, sample = batch_of_boxes(options.batch_size, device)
    loaded = Batch(crops, boxes, flips, sample, label=torch.full_like(sample, -1))
    patches, numbers = training.gather(crops, training.sample(loaded, epoch=0))
    times = [timed(lambda: training.step(patches[0], numbers[0], 0.5), device) for _ in range(STEPS)]
    peaks["step"] = peak(device)

    parameters = sum(parameter.numel() for parameter in training.network.parameters())
    wall, processor = (statistics.median(column[1:]) for column in zip(*times, strict=True))
    row = {"parameters": parameters, "step_seconds": wall, "step_processor_seconds": processor}
    lacking = ranks.on_first(lambda: no_room(4 * COPIES * parameters, device))
    row |= {"no_checkpoint": lacking} if lacking else checkpoint(training, ranks)
    peaks |= {} if lacking else {"checkpoint": peak(device)}
    row["peak_gib"] = {part: peak / 2**30 for part, peak in peaks.items()}
    (options.worker / f"{ranks.rank}.json").write_text(json.dumps(row))
    ranks.leave()
    return 0


def checkpoint(training: Training, ranks: Ranks) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        saver, start = Saver(Path(folder), last=1, every=0), time.perf_counter()
        state = training.state_dict(keep=ranks.first)
        if ranks.first:
            saver.save(1, state)
        del state
        goes_on = time.perf_counter() - start
        saver.wait()
        ranks.meet()
        written, size = time.perf_counter() - start, sum(path.stat().st_size for path in Path(folder).iterdir())
    return {"checkpoint_seconds": goes_on, "checkpoint_written_seconds": written, "checkpoint_bytes": size}


def no_room(needed: int, device: torch.device) -> str:
    """What to say where the machine has hardly more memory than that; on a GPU torch sees to it."""
    there = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    if device.type == "cuda" or there > 1.5 * needed:  # others are there too
        return ""
    return f"its copy takes {number(needed / 2**30)} GiB, {number(there / 2**30)} were free"


def timed(call: Callable, device: torch.device) -> tuple[float, float]:
    """Seconds of the clock, and of the processor."""
    wait(device)
    clocks = time.perf_counter, time.process_time
    start = [clock() for clock in clocks]
    call()
    wait(device)
    return tuple(clock() - then for clock, then in zip(clocks, start, strict=True))


def peak(device: torch.device) -> int:
    """The most bytes since the last call."""
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most
    most = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    Path("/proc/self/clear_refs").write_text("5")
    return most
