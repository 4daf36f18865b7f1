"""What every result carries: the machine, the versions and the commit; and how a result becomes a file."""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from run.checkpoint import write_atomically

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "timm", "numpy", "nvidia-dali-cuda130", "tyro")
WATCHED = "clocks.sm,power.draw.instant,enforced.power.limit,clocks_event_reasons.active"
AT_ITS_LIMIT = 0x4  # of the last of these: the limit of its power holds the clock down


def parser(subject: str, description: str) -> argparse.ArgumentParser:
    """The options that all subjects share."""
    options = argparse.ArgumentParser(prog=f"python -m bench {subject}", description=description)
    options.set_defaults(subject=subject)
    options.add_argument("--json", type=Path, help="file for the result")
    options.add_argument("--smoke", action="store_true", help="everything in small: does it run at all?")
    return options


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def describe() -> dict:
    """Card or processor, driver, clock now and, of a card's SMs, at most (MHz), versions (None: not installed), thread
    counts, commit ("+" where files differ)."""
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _processor("model name") or platform.machine(),
        "driver": _card("driver_version") if on_gpu else None,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
        "clock_mhz": _card("clocks.sm,clocks.max.sm") if on_gpu else _processor("cpu MHz"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "commit": _commit(),
    }


def _processor(key: str) -> str | None:
    found = re.search(rf"^{key}\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(), re.M)
    return found and found[1]


def _card(what: str) -> str | None:
    """Of the first card, which is the one that torch sees unless CUDA_VISIBLE_DEVICES says otherwise."""
    lines = _output("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits")
    return lines and lines.splitlines()[0]


@contextlib.contextmanager
def watched() -> Iterator[dict]:
    """What the first card says of itself every tenth of a second, in the mapping given, once all is over: ``of_card``.
    Nothing on a CPU."""
    found = {}
    if not torch.cuda.is_available() or None in map(shutil.which, ("nvidia-smi", "stdbuf")):
        yield found
        return
    how = "--id=0", f"--query-gpu={WATCHED}", "--format=csv,noheader,nounits", "--loop-ms=100"
    with tempfile.TemporaryFile("w+") as lines:
        with subprocess.Popen(["stdbuf", "-oL", "nvidia-smi", *how], stdout=lines) as process:
            try:
                yield found
            finally:
                process.kill()
        lines.seek(0)
        found |= of_card(lines.read())


def of_card(lines: str) -> dict:
    """Medians of the clock (MHz) and the power (W), the limit of the power, and the share of the time that it has held
    the clock down. {} where a driver does not know all of it."""
    row = re.compile(r"(\d+), ([\d.]+), ([\d.]+), 0x([0-9a-f]+)$", re.M | re.I)
    if not (rows := row.findall(lines)):
        return {}
    clock, watts, limit, reasons = zip(*rows, strict=True)
    held = [bool(int(reason, 16) & AT_ITS_LIMIT) for reason in reasons]
    return {
        "clock_mhz": statistics.median(map(int, clock)), "watts": statistics.median(map(float, watts)),
        "watts_limit": float(limit[0]), "held_down": sum(held) / len(held),
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> str | None:
    commit = _output("git", "rev-parse", "HEAD")
    return commit and commit + ("+" if _output("git", "status", "--porcelain") else "")


def command(options: argparse.Namespace) -> str:
    """What makes such a result: all options that have a value, and for paths the names of their options."""
    threads = os.environ.get("OMP_NUM_THREADS")
    words = [f"OMP_NUM_THREADS={threads}"] * bool(threads) + ["python -m bench", options.subject]
    for name, value in vars(options).items():
        if name not in ("subject", "json") and value is not None and value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words.append(f"--{name.replace('_', '-')}")
            words += (name.upper() if isinstance(x, Path) else str(x) for x in values)
    return " ".join(words)


def save(options: argparse.Namespace, result: dict) -> None:
    """Write {subject, command, machine, **result} to ``options.json`` (None: nowhere), whole or not at all; may be
    called repeatedly."""
    if options.json is None:
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"subject": options.subject, "command": command(options), "machine": describe()}
    write_atomically(options.json, (json.dumps(about | result, indent=1) + "\n").encode())


def print_table(rows: list[dict]) -> None:
    """Rows with the same keys, as columns; numbers to the right, with four digits."""
    text = [[_cell(row[name]) for name in rows[0]] for row in rows]
    widths = [max(map(len, column)) for column in zip(rows[0], *text, strict=True)]
    numeric = [isinstance(value, (int, float)) for value in rows[0].values()]
    for line in (list(rows[0]), *text):
        cells = zip(line, widths, numeric, strict=True)
        print("  ".join(x.rjust(w) if right else x.ljust(w) for x, w, right in cells).rstrip())


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)
