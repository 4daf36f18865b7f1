"""Every subject in sequence, each behind its tests, into one folder.

On a GPU in full; on a CPU in small sizes ("scale": "small" in the result), in minutes; with ``--smoke`` only to see
that all runs ("scale": "smoke"). A part's tests run first (on a CPU those that need no GPU): where they fail, its
result says "tests": "failed" and has no figures. A part that fails, or runs out of time, stops no other.

``--stage`` is what a GPU is needed for, in stages of four minutes (``bench/device.sh``), each with what is worth most
first, so that its limit cuts off the least. Tests are parts of their own there; where one fails, no speed is measured
of what stands behind them.

What lacks something that it needs is "not run", what has not come to its end "out of time", never "ok"; a result that
is not whole says so ("ended"). All output is in log.txt too, with a summary at its end; the exit code is the number of
parts that failed and, but for smoke runs, of those that were not run.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.findings import finding
from run.checkpoint import write_atomically

ROOT = Path(__file__).resolve().parent.parent
TESTS_LIMIT = 600  # seconds, for the tests of a part
CPU_LIMIT = 600  # for a part, on a CPU
STAGE_LIMIT = 240  # for a stage, unless --limit says otherwise
GRACE = 5  # for what is asked to stop, until it is killed


class Part(NamedTuple):
    name: str  # of the result
    arguments: str  # of python -m bench on a GPU; TRACE is a file beside the result
    seconds: int  # limit, on a GPU
    small: str | None = None  # instead of ``arguments`` on a CPU; None: the same
    tests: tuple[str, ...] = ()  # what has to pass, below tests/
    where: str = "both"  # or "gpu" or "cpu", the other kind having no use for it
    images: bool = False  # takes --images
    behind: str = "gpu_tests"  # the part of its stage, if that has it, whose tests have to pass


OURS = "sampling", "overlap", "gather", "short_attention", "class_token", "residual_norm", "update"
KERNELS = tuple(f"kernels/test_{name}.py" for name in OURS)
INPUT = tuple(f"pipeline/test_{name}.py" for name in ("graph", "stream", "loader"))
STEP = ("run/test_training.py",)
COSTS = ("bench/test_baselines.py::test_baselines_cost_what_is_counted",)
SCALING = ("bench/test_scaling.py",)
PARTS = (
    Part("machine", "machine", 40),
    Part("gpu_tests", "gpu_tests", 400, where="gpu"),
    Part("compile", "compile", 300, tests=("kernels/test_ttir.py",)),
    Part("kernels", "kernels", 80, tests=KERNELS),
    Part("step_vit_s", "step --recipe imagenet-vit-s --batch-size 512", 120, None, STEP, where="gpu"),
    Part("step_vit_b", "step --recipe imagenet-vit-b --batch-size 512", 120, None, STEP, where="gpu"),
    Part("step", "step --recipe toy --batch-size 64 --turns 4 --modes plain float32 eager", 0, None, STEP, where="cpu"),
    Part("host", "host", 60, tests=INPUT),
    Part("pipeline", "pipeline", 60, "pipeline --batch-size 32 --batches 5", INPUT, images=True),
    Part("train", "train", 60, "train --recipe toy --batch-size 256 --steps 48 --ranks 1 2", STEP, images=True),
    Part("soak", "soak", 300, "soak --batches 400", INPUT),
    Part("baselines", "baselines", 300, tests=COSTS),
    Part("scaling", "scaling", 120, tests=SCALING),
)
GPU_TESTS = (
    "run/test_recorded.py run/test_training.py run/test_checkpoint.py kernels/test_sampling.py kernels/test_gather.py "
    "kernels/test_overlap.py kernels/test_short_attention.py kernels/test_class_token.py kernels/test_residual_norm.py "
    "kernels/test_update.py kernels/test_cublaslt.py"
)
DATA_TESTS = "pipeline/test_loader.py pipeline/test_sources.py test_train.py"
PROGRAM_TESTS = "test_survival.py test_finetune.py test_detect.py run/test_progress.py"
TRAIN = "train --recipe imagenet-vit-s --batch-size 512 --steps 200"
STEP_S, STEP_B = (f"step --recipe imagenet-vit-{size} --batch-size" for size in "sb")
STAGES = {
    1: (  # neither DALI nor tyro, nor in 2 and 4
        Part("machine", "machine", 40),
        Part("gpu_tests", f"gpu_tests --workers 8 --files {GPU_TESTS}", 130),
        Part("step_vit_s", f"{STEP_S} 512 --modes graph --trace TRACE", 150, where="gpu"),
        Part("kernels", "kernels", 90),
        Part("passes", "passes", 60),
    ),
    2: (
        # Behind no tests: each is compared with the step before it is timed, and says what came of it.
        Part("variants", f"{STEP_S} 512 --turns 5 --variants bias-sums kernel-memsets both-views compiled-loss", 240),
    ),
    3: (
        Part("data_tests", f"gpu_tests --files {DATA_TESTS}", 120),
        Part("train", TRAIN, 150, images=True, behind="data_tests"),
        Part("pipeline", "pipeline", 90, images=True),
    ),
    4: (
        Part("products", "products", 100),
        Part("sanitizer", "sanitizer", 170),
        Part("counters", "counters", 90),
        Part("collectives", "collectives", 90),
    ),
    5: (
        Part("program_tests", f"gpu_tests --workers 3 --files {PROGRAM_TESTS}", 150),
        Part("step_vit_b", f"{STEP_B} 512 --modes graph", 120, where="gpu"),
        Part("kinds", "kinds", 75),
        Part("step_vit_s_compiled", f"{STEP_S} 512 --modes compiled", 120, where="gpu"),
    ),
    6: (
        Part("waits", "waits", 150, images=True),
        Part("variants_later", f"{STEP_S} 512 --turns 5 --variants fp8-keys", 180),
    ),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="everything in small, on the CPU: does it run at all?")
    parser.add_argument("--out", type=Path, help="folder for the results [bench/results/<card or cpu>-<date>]")
    parser.add_argument("--images", type=Path, help="folder of images for the input path [generated ones]")
    parser.add_argument("--stage", type=int, choices=STAGES, help="only this part of what a GPU is needed for")
    parser.add_argument("--limit", type=int, default=STAGE_LIMIT, help="seconds for the stage [%(default)s]")
    parser.add_argument("--parts", nargs="+", help="only these")
    options = parser.parse_args(arguments)
    card = None if options.smoke else graphics_card()
    # Smoke runs stay out of the folder that a report reads.
    folder = "runs/smoke" if options.smoke else f"bench/results/{card or 'cpu'}"
    options.out = options.out or ROOT / f"{folder}-{datetime.date.today()}"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    log = options.out / ("log.txt" if options.stage is None else f"log_{options.stage}.txt")
    with log.open("a") as log:  # of an earlier run, too, of which this takes up a part

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
    parts = PARTS if options.stage is None else STAGES[options.stage]
    if unknown := set(options.parts or ()) - {part.name for part in parts}:
        known = ", ".join(part.name for part in parts)
        raise SystemExit(f"--parts {' '.join(sorted(unknown))}: expected some of {known}")
    if options.parts:
        return [part for part in parts if part.name in options.parts]
    there = [part for part in parts if part.where in ("both", "gpu" if card or options.smoke else "cpu")]
    if options.smoke:
        once = {part.arguments.split()[0] if part.where == "gpu" else part: part for part in reversed(there)}
        there = list(once.values())[::-1]
    return there


def run_all(parts: list[Part], options: argparse.Namespace, card: str | None, say: Callable) -> int:
    start, summary, failed, missing = time.monotonic(), [], 0, 0
    scale = "smoke" if options.smoke else "full" if card else "small"
    passing = functools.cache(lambda tests: tests_pass(tests, bool(card), say))
    tested = {}  # what each part of tests of a stage says of those behind it
    for part in parts:
        began, file = time.monotonic(), options.out / f"{part.name}.json"
        file.unlink(missing_ok=True)
        command = part.small if scale == "small" and part.small else part.arguments
        words = [str(file.with_suffix(".trace.json.gz")) if w == "TRACE" else w for w in command.split()]
        words += ["--smoke"] * options.smoke
        words += ["--images", str(options.images)] if part.images and options.images else []
        words += ["--json", str(file)]
        tests = tested.get(part.behind, "none")
        if part.tests:
            tests = "passed" if passing(part.tests) else "failed"
        say(f"== {part.name}: python -m bench {' '.join(words)}")
        if tests == "failed":
            refuse(file, part)
            state = "not measured: its tests failed"
        else:
            limit = part.seconds if card else CPU_LIMIT
            if options.stage is not None:
                limit = min(limit, options.limit - (time.monotonic() - start))
            code = stream([sys.executable, "-m", "bench", *words], limit, say)
            state = ended(code, file)
            mark(file, tests, scale, state)
            if options.stage is not None and words[0] == "gpu_tests":
                tested[part.name] = tests_said(state, file)
        missing += state.startswith("not run")
        failed += not state.startswith(("ok", "not run"))
        summary.append(f"{part.name:16} {time.monotonic() - began:4.0f} s  {state}")
    say(f"== {time.monotonic() - start:.0f} s, {failed} failed, {missing} not run, results in {options.out}")
    say("\n".join(summary))
    return failed + (0 if options.smoke else missing)


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
    began = time.monotonic()
    process = subprocess.Popen(
        ["timeout", f"--kill-after={GRACE}", f"{limit:.1f}", *command],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    reader = threading.Thread(target=lambda: [say(line.rstrip("\n")) for line in process.stdout], daemon=True)
    reader.start()
    try:
        return by_timeout(process.wait(), time.monotonic() - began, limit)
    finally:
        process.terminate()  # on Ctrl-C; timeout hands it on
        process.wait()
        with contextlib.suppress(ProcessLookupError):  # what is left of it would take time from the next part
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(5)  # something in a session of its own may still hold the other end


def by_timeout(code: int, seconds: float, limit: float) -> int:
    """The exit code of ``timeout --kill-after``, which kills itself too where its manual promises 137."""
    return 137 if code == -signal.SIGKILL and seconds >= limit else code


def tests_said(state: str, file: Path) -> str:
    """Of a part of tests; those that it did not get to are not run, not failed."""
    failed = json.loads(file.read_text()).get("failed", 0) if file.exists() else 1
    if state == "ok":
        return "passed"
    return "not run" if state.startswith("not run") or (state == "out of time" and not failed) else "failed"


def ended(code: int, file: Path) -> str:
    if code in (124, 137):
        return "out of time"
    if code:
        return f"failed, exit code {code}"
    result = json.loads(file.read_text()) if file.exists() else {}
    return f"not run: {result['not_run']}" if "not_run" in result else "ok"


def mark(file: Path, tests: str, scale: str, state: str) -> None:
    """Adds to a result whether its tests passed, what scale it has and, where it is not whole, why."""
    if file.exists():
        data = json.loads(file.read_text()) | {"scale": scale}
        data |= {} if state == "ok" or state.startswith("not run") else {"ended": state}
        data = {"tests": tests} | data if "tests" not in data else data  # gpu_tests lists its own
        write_atomically(file, (json.dumps(data, indent=1) + "\n").encode())


def refuse(file: Path, part: Part) -> None:
    """A result without figures."""
    from bench import environment

    subject = part.arguments.split()[0]
    rows = [finding(f"{subject} ({part.name})", "no figures: its correctness tests failed")]
    result = {"tests": "failed", "test_files": list(part.tests), "findings": rows}
    environment.save(argparse.Namespace(json=file, subject=subject), result)
