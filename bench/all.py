"""Every subject in sequence, each behind its tests, into one folder.

On a GPU in full; on a CPU in small sizes ("scale": "small" in the result), in minutes; with ``--smoke`` only to see
that all runs ("scale": "smoke"). A part's tests run first (on a CPU those that need no GPU): where they fail, its
result says "tests": "failed" and has no figures. ``--no-tests`` saves that time ("tests": "not run"). A part that
fails, or runs out of time, stops no other. All output is in log.txt too, with a summary at its end; the exit code is
the number of parts that failed.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.findings import finding
from run.checkpoint import write_atomically

ROOT = Path(__file__).resolve().parent.parent
TESTS_LIMIT = 600  # seconds, for the tests of a part
CPU_LIMIT = 600  # for a part, on a CPU


class Part(NamedTuple):
    name: str  # of the result
    arguments: str  # of python -m bench on a GPU
    seconds: int  # limit, on a GPU
    small: str | None = None  # instead of ``arguments`` on a CPU; None: the same
    tests: tuple[str, ...] = ()  # what has to pass, below tests/
    quick: bool = True  # of what bench/device.sh runs, which has 8 minutes
    where: str = "both"  # or "gpu" or "cpu", the other kind having no use for it
    images: bool = False  # takes --images


KERNELS = tuple(f"kernels/test_{name}.py" for name in ("sampling", "overlap", "gather", "short_attention"))
INPUT = tuple(f"pipeline/test_{name}.py" for name in ("graph", "stream", "loader"))
STEP = ("run/test_training.py",)
COSTS = ("bench/test_baselines.py::test_baselines_cost_what_is_counted",)
SCALING = ("bench/test_scaling.py",)
PARTS = (
    Part("machine", "machine", 40),
    Part("gpu_tests", "gpu_tests", 130, where="gpu"),
    Part("compile", "compile", 300, tests=("kernels/test_ttir.py",), quick=False),
    Part("kernels", "kernels", 80, tests=KERNELS),
    Part("step_vit_s", "step --recipe imagenet-vit-s --batch-size 512", 120, None, STEP, where="gpu"),
    Part("step_vit_b", "step --recipe imagenet-vit-b --batch-size 512", 120, None, STEP, where="gpu"),
    Part("step", "step --recipe toy --batch-size 64 --turns 4 --modes plain float32 eager", 0, None, STEP, where="cpu"),
    Part("pipeline", "pipeline", 60, "pipeline --batch-size 32 --batches 5", INPUT, images=True),
    Part("train", "train", 60, "train --recipe toy --batch-size 256 --steps 48 --ranks 1 2", STEP, images=True),
    Part("soak", "soak", 300, "soak --batches 400", INPUT, quick=False),
    Part("baselines", "baselines", 300, tests=COSTS, quick=False),
    Part("scaling", "scaling", 120, tests=SCALING, quick=False),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="everything in small, on the CPU: does it run at all?")
    parser.add_argument("--out", type=Path, help="folder for the results [bench/results/<card or cpu>-<date>]")
    parser.add_argument("--images", type=Path, help="folder of images for the input path [generated ones]")
    parser.add_argument("--quick", action="store_true", help="only what a GPU is needed for")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these")
    parser.add_argument("--no-tests", action="store_true", help="do not run the tests of the parts")
    parser.add_argument("--seconds", type=int, default=24 * 3600, help="limit for all parts together")
    options = parser.parse_args(arguments)
    if options.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    card = None if options.smoke else graphics_card()
    # Smoke runs stay out of the folder that a report reads.
    folder = "runs/smoke" if options.smoke else f"bench/results/{card or 'cpu'}"
    options.out = options.out or ROOT / f"{folder}-{datetime.date.today()}"
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "log.txt").open("w") as log:

        def say(line: str) -> None:
            for file in (sys.stdout, log):
                print(line, file=file, flush=True)

        return run_all(chosen(options, card), options, card, say)


def graphics_card() -> str | None:
    """Its name, as it may stand in the name of a folder; None without one. torch is not asked: that takes memory."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    names = done.stdout.splitlines() if done.returncode == 0 else []
    return re.sub(r"[^0-9A-Za-z]+", "-", names[0].strip()) if names else None


def chosen(options: argparse.Namespace, card: str | None) -> list[Part]:
    """Smoke runs take all that a GPU would, but each subject that only a GPU has once."""
    there = [part for part in PARTS if importlib.util.find_spec(f"bench.{part.arguments.split()[0]}")]
    if options.parts:
        return [part for part in there if part.name in options.parts]
    if options.quick:
        there = [part for part in there if part.quick]
    there = [part for part in there if part.where in ("both", "gpu" if card or options.smoke else "cpu")]
    if options.smoke:
        there = list({part.arguments.split()[0] if part.where == "gpu" else part: part for part in there}.values())
    return there


def run_all(parts: list[Part], options: argparse.Namespace, card: str | None, say: Callable) -> int:
    start, summary, failed = time.monotonic(), [], 0
    scale = "smoke" if options.smoke else "full" if card else "small"
    passing = functools.cache(lambda tests: tests_pass(tests, bool(card), say))
    for part in parts:
        began, file = time.monotonic(), options.out / f"{part.name}.json"
        file.unlink(missing_ok=True)
        command = part.small if scale == "small" and part.small else part.arguments
        words = command.split() + ["--smoke"] * options.smoke
        words += ["--images", str(options.images)] if part.images and options.images else []
        words += ["--json", str(file)]
        tests = "not run" if options.no_tests else "none"
        if part.tests and not options.no_tests:
            tests = "passed" if passing(part.tests) else "failed"
        say(f"== {part.name}: python -m bench {' '.join(words)}")
        if tests == "failed":
            refuse(file, part)
            state = "not measured: its tests failed"
        else:
            limit = min(part.seconds if card else CPU_LIMIT, options.seconds - (time.monotonic() - start))
            code = stream([sys.executable, "-m", "bench", *words], limit, say)
            state = ended(code, file)
            mark(file, tests, scale)
        failed += not (state == "ok" or state.startswith("skipped"))
        summary.append(f"{part.name:16} {time.monotonic() - began:4.0f} s  {state}")
    say(f"== {time.monotonic() - start:.0f} s, {failed} failed, results in {options.out}")
    say("\n".join(summary))
    return failed


def tests_pass(tests: tuple[str, ...], gpu: bool, say: Callable) -> bool:
    paths = [str(ROOT / "tests" / test) for test in tests]
    say(f"== tests: {' '.join(paths)}")
    return stream(pytest(paths, gpu), TESTS_LIMIT, say) == 0


def pytest(paths: list[str], gpu: bool) -> list[str]:
    """The command that runs tests, without those for a GPU where there is none."""
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(() if gpu else ("-m", "not gpu")), *paths]


def stream(command: list[str], limit: float, say: Callable) -> int:
    """Runs a command, its output line by line to ``say``; 124 or 137 if it took longer than ``limit`` seconds."""
    if limit < 1:
        return 124
    process = subprocess.Popen(
        ["timeout", "--kill-after=5", f"{limit:.1f}", *command],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    try:
        for line in process.stdout:
            say(line.rstrip("\n"))
        return process.wait()
    finally:
        process.terminate()  # on Ctrl-C; timeout hands it on


def ended(code: int, file: Path) -> str:
    if code in (124, 137):
        return "out of time"
    if code:
        return f"failed, exit code {code}"
    reason = json.loads(file.read_text()).get("skipped") if file.exists() else None
    return f"skipped: {reason}" if isinstance(reason, str) else "ok"


def mark(file: Path, tests: str, scale: str) -> None:
    """Adds to a result whether its tests passed and what scale it has."""
    if file.exists():
        data = json.loads(file.read_text()) | {"scale": scale}
        data = {"tests": tests} | data if "tests" not in data else data  # gpu_tests lists its own
        write_atomically(file, (json.dumps(data, indent=1) + "\n").encode())


def refuse(file: Path, part: Part) -> None:
    """A result without figures."""
    from bench import environment

    subject = part.arguments.split()[0]
    rows = [finding(f"{subject} ({part.name})", "no figures: its correctness tests failed")]
    result = {"tests": "failed", "test_files": list(part.tests), "findings": rows}
    environment.save(argparse.Namespace(json=file, subject=subject), result)
