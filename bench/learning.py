"""The table of ``bench/learning.sh``: accuracy after fine-tuning, k-NN and loss before it; mean and spread over seeds.

The spread is the standard deviation of the seeds (n - 1). Runs that are not complete are not counted.
"""

import re
import statistics
import sys
from pathlib import Path

import numpy as np

from bench import environment
from bench.findings import bar, finding, plot
from bench.variants.changes import BY_NAME
from pipeline import Index
from run.curves import read
from run.program import opening

ARMS = {
    "scratch": "from scratch",
    "scratch-long": "from scratch, as long as pretraining and fine-tuning together",
    "aps": "APS",
    "uniform": "APS, patches drawn uniformly (gamma 0)",
    "one-group": "APS, one group instead of four, as many steps",
    **{f"window-{size}": f"APS, the groups of {size} batches in turn" for size in (4, 16)},
    **{f"redeal-{size}": f"APS, the groups of {size} batches in turn, images dealt anew" for size in (4, 16)},
    **{name: f"APS, {BY_NAME[name].what}" for name in ("key-gelu", "fp8-keys")},
}


def table(folder: Path) -> list[dict]:
    """A row for each arm that has complete runs; accuracies in percent."""
    rows = []
    for arm, what in ARMS.items():
        pretrained, finetuned = rf"{arm}-\d+", rf"{arm}-\d+-tuned"
        tuned = _figures(folder, finetuned, "top1")
        loss = _figures(folder, pretrained, "loss", last=2)
        knn = _figures(folder, pretrained, "knn_trained")
        untrained = _figures(folder, pretrained, "knn_untrained")
        steps, tuning_steps = (_figures(folder, runs, "step") for runs in (pretrained, finetuned))
        if tuned or knn:
            rows.append({
                "arm": what, "steps": int(max(steps, default=0)), "tuning_steps": int(max(tuning_steps, default=0)),
                "runs": len(tuned), "top1": _mean(tuned), "top1_spread": _spread(tuned),
                "knn": _mean(knn), "knn_spread": _spread(knn), "knn_untrained": _mean(untrained), "knn_runs": len(knn),
                "loss": _mean(loss), "loss_spread": _spread(loss),
            })  # fmt: skip
    return rows


def _figures(folder: Path, pattern: str, name: str, last: int = 1) -> list[float]:
    """The mean of the last figures of that name in each complete run of an arm."""
    complete = (
        run for run in sorted(folder.glob("*")) if re.fullmatch(pattern, run.name)
        and any((run / end / "config.json").exists() for end in ("model", "encoder"))
    )  # fmt: skip
    found = ([line[name] for line in read(run) if name in line][-last:] for run in complete)
    return [statistics.mean(values) for values in found if values]


def _mean(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None


def _spread(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def conclusions(d: dict) -> dict:
    def accuracy(mean, spread):
        return "-" if mean is None else f"{mean:.1f} %" + (f" +- {spread:.1f}" if spread is not None else "")

    def bars(name):
        for row in d["rows"]:
            if row[name] is not None:
                mean, spread = row[name], row[f"{name}_spread"] or 0
                yield bar(row["arm"], mean, mean - spread, mean + spread, ours=row["arm"] == ARMS["aps"])

    found = []
    for row in d["rows"]:
        parts = ("pretraining", row["steps"]), ("fine-tuning", row["tuning_steps"])
        steps = ", ".join(f"{count:,} steps of {what}" for what, count in parts if count)
        said = [f"runs: {row['runs'] or row['knn_runs']}"]
        if row["knn"] is not None:
            said.append(f"k-NN {accuracy(row['knn'], row['knn_spread'])}, untrained {row['knn_untrained']:.1f} %")
        if row.get("loss") is not None:  # results of before it was kept have none
            said.append(f"loss {row['loss']:.4f}" + (f" +- {row['loss_spread']:.4f}" if row["loss_spread"] else ""))
        if row["runs"]:
            said.insert(0, f"{accuracy(row['top1'], row['top1_spread'])} after fine-tuning")
        found.append(finding(f"accuracy: {row['arm']}; {steps}", *said))
    panels = {"after fine-tuning": [*bars("top1")], "k-NN before it": [*bars("knn")]}
    panels = {name: rows for name, rows in panels.items() if rows}
    plots = [plot("What pretraining is worth", "% (standard deviation of seeds)", panels)]
    return {"findings": found, "plots": plots}


def print_list(folder: Path, images: int) -> None:
    """Prints ``path<TAB>label`` of so many images (0: all), as many of each class, evenly spaced over its files; of
    each class one at least."""
    with opening("bench"):
        index = Index.scan(folder)
        if not index.classes:
            raise ValueError(f"{folder}: expected images in class folders")
    for label, name in enumerate(index.classes):
        samples = np.flatnonzero(index.labels == label)
        count = min(len(samples), max(1, images // len(index.classes)) if images else len(samples))
        for sample in samples[np.linspace(0, len(samples) - 1, count).round().astype(int)]:
            print(f"{Path(index.file(sample)).absolute()}\t{name}")


def main(arguments: list[str]) -> int:
    parser = environment.parser("learning", "What pretraining is worth: the table of bench/learning.sh.")
    parser.add_argument("runs", type=Path, help="its folder of runs")
    parser.add_argument("--list", type=Path, metavar="FOLDER", help="instead, print some images of a folder as a list")
    parser.add_argument("--images", type=int, default=0, help="how many; 0: all")
    options = parser.parse_args(arguments)
    if options.list is not None:
        print_list(options.list, options.images)
        return 0
    with opening("bench"):
        rows = table(options.runs)
    if not rows:
        print(f"bench learning: no complete run in {options.runs}", file=sys.stderr)
        return 2
    environment.save(options, {"command": "bench/learning.sh", "rows": rows} | conclusions({"rows": rows}))
    environment.print_table(rows)
    return 0
