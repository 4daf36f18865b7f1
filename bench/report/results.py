"""Result files as ``bench/environment.py`` writes them, read back; and figures as text."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"torch": "torch", "triton": "triton", "nvidia-dali-cuda130": "DALI"}
# Subjects of files that were measured by hand, and what has taken their place since
ONE_OFF = {
    "input": "python -m bench pipeline --images IMAGES", "step variants": "python -m bench step",
    "kernel variants": "python -m bench kernels", "DALI on CPU and GPU": None,
    "GELU inside matrix products": None,
}  # fmt: skip


SCRIPTS = {"learning": "bench/learning.sh", "demo": "make demo"}


@dataclass(frozen=True)
class Result:
    path: Path
    data: dict

    @property
    def subject(self) -> str:
        return self.data["subject"]

    @property
    def machine(self) -> dict:
        return self.data["machine"]

    @property
    def on_gpu(self) -> bool:
        return bool(self.machine.get("driver"))

    @property
    def date(self) -> str:
        """As its folder says; "" if that says nothing."""
        found = re.search(r"\d{4}-\d\d-\d\d$", self.path.parent.name)
        return found[0] if found else ""

    @property
    def commit(self) -> str:
        """Of the code that was measured, short; "+": with changes that are in no commit."""
        commits = self.machine.get("commit") or ", ".join(
            dict.fromkeys(row["commit"] for row in self.data.get("rows", ()) if "commit" in row)
        )
        return short(commits)

    @property
    def small(self) -> bool:
        """Made by ``--smoke``: says that it runs and nothing about speed."""
        return self.data.get("scale") == "smoke"

    @property
    def reported(self) -> bool:
        """Has figures of its own; ``skipped`` is a reason, or of pytest's outcomes a count."""
        return not (self.small or self.data.get("tests") == "failed" or isinstance(self.data.get("skipped"), str))

    @property
    def command(self) -> str:
        """That makes such a file, without its output."""
        data, subject = self.data, self.subject
        if subject in ONE_OFF:
            now = ONE_OFF[subject]
            return "by hand" + (f"; now `{now}`" if now else "")
        if "command" in data or subject in SCRIPTS:
            return f"`{data.get('command') or SCRIPTS[subject]}`"
        threads = self.machine.get("omp_num_threads")
        words = [f"OMP_NUM_THREADS={threads}"] * bool(threads) + ["python -m bench", subject]
        words += ["--images IMAGES"] * (data.get("source") == "given")
        for name in ("recipe", "batch_size", "batches", "steps"):
            if name in data:
                words.append(f"--{name.replace('_', '-')} {data[name]}")
        ranks = [str(row["ranks"]) for row in data.get("runs", ()) if "ranks" in row]
        words += ["--ranks", *ranks] if len(ranks) > 1 else []
        return f"`{' '.join(words)}`"


def read(folder: Path) -> list[Result]:
    """All results below ``folder``, newest folder first, small sizes last of a day; ValueError for a file that is
    none."""
    found = []
    for path in sorted((*folder.glob("**/*.json"), *folder.glob("**/train.txt"))):
        try:
            data = json.loads(path.read_text()) if path.suffix == ".json" else _train_log(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON ({error}); expected a result of python -m bench") from None
        if not (isinstance(data, dict) and isinstance(data.get("subject"), str) and "machine" in data):
            raise ValueError(f'{path} has no "subject" and "machine"; expected a result of python -m bench')
        if path.suffix != ".json":  # says nothing of the machine: that of its neighbours
            others = [result.machine for result in found if result.path.parent == path.parent]
            data["machine"] |= {key: v for key, v in (others[0] if others else {}).items() if key != "commit"}
        found.append(Result(path, data))
    return sorted(found, key=lambda r: (r.date, r.data.get("scale") != "small", r.path.parent.name), reverse=True)


def _train_log(text: str) -> dict:
    """Lines that train.py printed, as a result of ``bench train``; the first half of the steps is warm-up."""
    pattern = r"step (\d+)/(\d+) .*?([\d,]+) pairs/s  waiting for data ([\d.]+)%"
    lines = [[float(x.replace(",", "")) for x in line] for line in re.findall(pattern, text)]
    steady = [line for line in lines if line[0] > line[1] / 2]
    options, commit = re.search(r"train\.py (.*?--max-steps \d+)", text), re.search(r"commit (.*?),? as ", text, re.S)
    return {
        "subject": "train", "machine": {"commit": " ".join(commit[1].split())}, "command": f"train.py {options[1]}",
        "recipe": re.search(r"--recipe (\S+)", text)[1], "batch_size": int(re.search(r"--batch-size (\d+)", text)[1]),
        "pairs_per_second": len(steady) / sum(1 / line[2] for line in steady),
        "data_wait": sum(line[3] for line in steady) / len(steady) / 100,
        "metrics": [{"step": a, "pairs_per_second": c, "data_wait": d / 100} for a, _, c, d in lines],
    }  # fmt: skip


def hardware(results: list[Result]) -> str:
    """Of results from one folder: device, cores, driver and versions; several where they differ."""

    def values(get):
        return " or ".join(dict.fromkeys(str(x) for result in results if (x := get(result.machine)) is not None))

    parts = [values(lambda m: m.get("device")), f"{values(lambda m: m.get('cores'))} cores"]
    parts += [f"driver {driver}"] if (driver := values(lambda m: m.get("driver"))) else []
    for package, name in PACKAGES.items():
        version = values(lambda m, package=package: m.get("versions", {}).get(package))
        parts += [f"{name} {version}"] if version else []
    return ", ".join([*parts, f"Python {values(lambda m: m.get('python'))}"])


def by_folder(results: list[Result]) -> dict[Path, list[Result]]:
    """In their order, but those of GPUs first."""
    folders = {}
    for result in sorted(results, key=lambda result: not result.on_gpu):
        folders.setdefault(result.path.parent, []).append(result)
    return folders


def short(commits: str) -> str:
    return re.sub(r"\b([0-9a-f]{7})[0-9a-f]{33}\b", r"\1", commits) or "unknown"


def number(value: float) -> str:
    """With three or four digits: 14,380, 35.6, 0.159."""
    if abs(value) >= 1000:
        return f"{float(f'{value:.4g}'):,.0f}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
