"""Two results side by side: result files, folders of them, or two commits that are measured in turns here.

Times are compared at the median, as B / A, so that above 1 B is slower; rates as A / B, so that it reads the same. The
interval is that which holds the ratio of the medians with 95 % confidence if runs are independent and their logarithms
normal: the standard deviation follows from p20 and p80, 2 x 0.8416 of them apart, the error of a median is 1.2533 of it
over the root of the runs, and few runs widen it as Student's t does. It knows nothing of a machine that was busier one
day: two commits are for that, which take turns, every turn counting as one run, once the tests of what is measured
have passed at both (``bench all`` names them). Figures without percentiles have no
interval and are taken at their word. Alternatives that are not this project's are shown as controls: where they changed
too, the machine did.

Exit code 1 where something is slower: the ratio beyond ``--threshold`` and the interval above 1. Exit code 2, with one
line, where there is nothing to compare: other subjects, cards or sizes, or results whose tests failed.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench import environment
from bench.all import PARTS, pytest
from bench.timing import summary

SETTINGS = "recipe", "model", "image_size", "batch_size", "batch", "source", "scale", "depth", "head_hidden"
RATES = {"images/s", "images_per_second", "pairs_per_second", "pairs/s"}  # the larger, the better
NAMES = {"batch", "at a time", "ranks", "queues"}  # numbers that tell rows apart
NOT_OURS = "DALI's client", "Pillow, timm and a DataLoader"  # rows of such names are controls
TIMES = {"CPU ms/image"}  # single ones; with percentiles every "..._seconds" and "..._us"
SPARE = {"profile", "metrics", "tests", "machine", "stages", "findings", "plots", "path"}  # not compared


class Figure(NamedTuple):
    """A time, or a rate; ``spread``: the standard error of its logarithm, None where nothing tells."""

    value: float
    rate: bool
    spread: float | None = None
    runs: int = 1
    control: bool = False


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A", help="a result file, a folder of result files, or a commit")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument("--threshold", type=float, default=1.05, help="ratio beyond which B is slower [%(default)s]")
    parser.add_argument(
        "--subject", default="kernels", help="of two commits: what to measure, with its options [kernels]"
    )
    parser.add_argument("--turns", type=int, default=5, help="of two commits: how often to run each [%(default)s]")
    options = parser.parse_args(arguments)
    try:
        if options.threshold < 1:
            raise ValueError(f"got --threshold {options.threshold}; expected 1 or more")
        if Path(options.a).exists() and Path(options.b).exists():
            pairs = matched(Path(options.a), Path(options.b))
        else:
            pairs = {options.subject: measured(options.a, options.b, options.subject.split(), options.turns)}
        rows = [row for name, pair in pairs.items() for row in compared(name, *pair, options.threshold)]
        notes = dict.fromkeys(note for pair in pairs.values() for note in differences(*pair))
        if not rows:
            raise ValueError("the two have no time and no rate in common")
    except (ValueError, OSError) as error:
        print(f"bench compare: {error}", file=sys.stderr)
        return 2
    environment.print_table(rows)
    slower = sum(row["verdict"].startswith("slower") for row in rows)
    print("".join(f"\ndiffers: {note}" for note in notes))
    print(f"{slower} of {len(rows)} slower by more than {options.threshold:g}")
    return int(slower > 0)


def matched(a: Path, b: Path) -> dict[str, tuple[dict, dict]]:
    """{name: the two results} of two files, or of the files that two folders both have."""
    if a.is_dir() != b.is_dir():
        raise ValueError(f"{a} and {b}: expected two files or two folders")
    if a.is_file():
        return {a.stem: (load(a), load(b))}
    names = sorted({path.name for path in a.glob("*.json")} & {path.name for path in b.glob("*.json")})
    if not names:
        raise ValueError(f"{a} and {b} have no result file of the same name")
    return {Path(name).stem: (load(a / name), load(b / name)) for name in names}


def load(path: Path) -> dict:
    try:
        data = json.loads(path.read_text())
    except ValueError as error:  # also where it is no text
        raise ValueError(f"{path} is no JSON ({error}); expected a result of python -m bench") from None
    if not isinstance(data, dict) or "subject" not in data or "machine" not in data:
        raise ValueError(f'{path} has no "subject" and "machine"; expected a result of python -m bench')
    return data


def differences(a: dict, b: dict) -> Iterator[str]:
    """What the machines and versions of two results do not share."""
    one, other = ({**m, **m.get("versions", {})} for m in (a["machine"], b["machine"]))
    for key in (one | other).keys() - {"versions", "clock_mhz"}:  # the clock of the moment always differs
        if one.get(key) != other.get(key):
            yield f"{key}: {one.get(key)}, {other.get(key)}"


def compared(name: str, a: dict, b: dict, threshold: float) -> Iterator[dict]:
    """A row for each figure that both have; ValueError where they must not be compared."""
    for data in (a, b):
        if data.get("tests") == "failed":
            raise ValueError(f"{name}: the correctness tests of a result failed; its speed means nothing")
    if a["subject"] != b["subject"]:
        raise ValueError(f"{name}: got subjects {a['subject']} and {b['subject']}; expected the same")
    devices = [data["machine"].get("device") for data in (a, b)]
    if devices[0] != devices[1]:
        raise ValueError(f"{name}: measured on {devices[0]} and on {devices[1]}; expected the same card")
    for key in SETTINGS:
        one, other = (data.get(key, "full" if key == "scale" else None) for data in (a, b))
        if one != other:
            raise ValueError(f"{name}: got {key} {one} and {other}; expected the same")
    ours, theirs = dict(figures(a)), dict(figures(b))
    for figure in (figure for figure in ours if figure in theirs):
        one, other = ours[figure], theirs[figure]
        if min(one.value, other.value) <= 0:
            raise ValueError(f"{name}: {figure} is {one.value} and {other.value}; expected more than 0")
        yield {"what": f"{name}: {figure}"} | judged(one, other, threshold)


def judged(a: Figure, b: Figure, threshold: float) -> dict:
    """Ratio, interval and verdict; above 1 B is slower."""
    ratio = a.value / b.value if a.rate else b.value / a.value
    row, control = {"A": a.value, "B": b.value, "ratio": ratio}, "control: " * a.control
    if a.spread is None or b.spread is None:
        verdict = "slower" if ratio > threshold else "faster" if ratio < 1 / threshold else "same"
        return row | {"95 % interval": "unknown", "verdict": f"{control}{verdict}, no spread recorded"}
    error = student(min(a.runs, b.runs) - 1) * math.hypot(a.spread, b.spread)
    low, high = ratio * math.exp(-error), ratio * math.exp(error)
    if 1 / threshold <= ratio <= threshold:
        verdict = "same"
    elif low <= 1 <= high:
        verdict = "not sure"
    else:
        verdict = "slower" if ratio > 1 else "faster"
    return row | {"95 % interval": f"{low:.3f} to {high:.3f}", "verdict": control + verdict}


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, by its expansion about the normal one: 2 % off at 4 degrees, 10 at 2."""
    z = 1.95996
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def figures(data: dict, prefix: str = "", control: bool = False) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every time and rate at any depth; rows of lists are named by their text."""
    control |= any(data.get(key) not in (None, 1) for key in ("times_ours", "times this loader's CPU"))
    for key, value in data.items():
        if key in SPARE:
            continue
        name = f"{prefix}{key}"
        if isinstance(value, dict) and {"p20", "p50", "p80", "runs"} <= value.keys():
            if not key.startswith("times_"):  # quotients within a turn
                yield name, spread(*(value[p] for p in ("p20", "p50", "p80")), value["runs"], control)
        elif isinstance(value, dict):
            yield from figures(value, f"{name}, ", control or key == "plain")
        elif isinstance(value, list) and all(isinstance(row, dict) for row in value):
            for row in value:
                texts = [(k, str(v)) for k, v in row.items() if k in NAMES or isinstance(v, str)]
                words = [text for k, text in texts if k not in ("commit", "limited_by")]
                yield from figures(row, f"{prefix}{', '.join(words)}, ", any(w.startswith(NOT_OURS) for w in words))
        elif value is not None and key in RATES | TIMES and "step_seconds" not in data:
            yield name, Figure(value, key in RATES, control=control)
    if {"p20_us", "p50_us", "p80_us", "runs"} <= data.keys():
        yield f"{prefix}us", spread(*(data[f"{p}_us"] for p in ("p20", "p50", "p80")), data["runs"], control)


def spread(p20: float, p50: float, p80: float, runs: int, control: bool) -> Figure:
    if min(p20, p50) <= 0 or runs < 3:
        return Figure(p50, False, control=control)
    return Figure(p50, False, 1.2533 * math.log(p80 / p20) / (2 * 0.8416) / math.sqrt(runs), runs, control)


# Two commits


def measured(a: str, b: str, subject: list[str], turns: int) -> tuple[dict, dict]:
    """Results of a subject at two commits, each in a worktree of its own, in turns; the figures' medians over turns."""
    if turns < 3:
        raise ValueError(f"got --turns {turns}; expected 3 or more")
    there = [name for name in (a, b) if Path(name).exists()]
    if there:
        missing = b if there == [a] else a
        raise ValueError(f"{missing} does not exist; expected results to compare with {there[0]}, or two commits")
    found: tuple[list, list] = [], []
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / name for name in "ab"]
        try:
            for tree, commit in zip(trees, (a, b), strict=True):
                done = git("worktree", "add", "--detach", tree, commit)
                if done.returncode:
                    last = done.stderr.strip().splitlines()[-1]
                    raise ValueError(f"{commit} is no file, folder or commit ({last}); expected two of a kind")
            for tree, commit in zip(trees, (a, b), strict=True):
                if not tests_pass(tree, subject[0]):
                    raise ValueError(f"the correctness tests of {subject[0]} fail at {commit}; its speed means nothing")
            for turn in range(turns):
                for tree, results in zip(trees, found, strict=True):
                    print(f"turn {turn + 1} of {turns}: {tree.name.upper()}", file=sys.stderr)
                    results.append(run(tree, subject))
                one, other = (dict(figures(results[0])) for results in found)
                if not one.keys() & other.keys():
                    raise ValueError(f"{' '.join(subject)} gives no times and no rates; expected another --subject")
        finally:
            for tree in trees:
                git("worktree", "remove", "--force", tree)
    return merged(found[0]), merged(found[1])


def git(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *map(str, arguments)], cwd=environment.ROOT, capture_output=True, text=True)


def tests_pass(tree: Path, subject: str) -> bool:
    """Whether those tests of a subject pass that a commit has, on a CPU without those for a GPU."""
    names = {test for part in PARTS if part.arguments.split()[0] == subject for test in part.tests}
    there = sorted(name for name in names if _has(tree / "tests", *name.split("::")))
    command = pytest([f"tests/{name}" for name in there], environment.device().type == "cuda")
    if not there:
        return True
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    passed = done.returncode in (0, 5)  # 5: none of them is for this machine
    if not passed:
        print(done.stdout, file=sys.stderr)
    return passed


def _has(folder: Path, file: str, function: str = "") -> bool:
    return (folder / file).exists() and f"def {function}" in (folder / file).read_text()


def run(tree: Path, subject: list[str]) -> dict:
    file = tree / "bench-compare.json"
    command = [sys.executable, "-m", "bench", *subject, "--json", str(file)]
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode or not file.exists():
        tail = done.stdout.strip().splitlines()[-1:] or ["nothing printed"]
        raise ValueError(
            f"{' '.join(subject)} at {tree.name.upper()} ended with exit code {done.returncode}: {tail[0]}"
        )
    result = load(file)
    file.unlink()
    return result


def merged(results: list[dict]) -> dict:
    """One result of several turns: each time with its percentiles over the turns, and each rate as the time of one."""
    values, controls = {}, set()
    for result in results:
        for name, figure in figures(result):
            controls |= {name} if figure.control else set()
            values.setdefault(name, []).append(1 / figure.value if figure.rate else figure.value)
    settings = {key: results[0][key] for key in ("subject", "machine", "tests", *SETTINGS) if key in results[0]}
    times = {name: summary(v) for name, v in values.items() if len(v) == len(results)}
    ours = {name: time for name, time in times.items() if name not in controls}
    return settings | ours | {"plain": {name: times[name] for name in times if name in controls}}
