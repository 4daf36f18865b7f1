"""The table of ``bench/labels.sh``: accuracy with few labels of each class, as mean and spread over draws of labels.

The spread is the standard deviation of the draws (n - 1). Runs that are not complete are not counted.
"""

import json
import re
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

from bench import environment
from bench.compare import load
from bench.findings import finding, plot
from pipeline import Index
from run import command
from run.program import opening
from run.recipes import RECIPES
from run.training import new_encoder
from transfer import knn, probe
from transfer.pretrained import load_encoder

ARMS = {
    "aps": "APS", "uniform": "APS, patches drawn uniformly (gamma 0)", "one-group": "APS, one group instead of four",
    "window-16": "APS, the groups of 16 batches in turn", "untrained": "not pretrained",
}  # fmt: skip
TUNED = {
    "tuned": f"{ARMS['aps']}, fine-tuned", "scratch": "from scratch",
    **{arm: f"{ARMS[arm]}, fine-tuned" for arm in ("uniform", "one-group", "window-16")},
}  # fmt: skip


def print_draw(listed: Path, count: int, draw: int) -> None:
    """Prints so many lines of each label of a list, at random."""
    lines = listed.read_text().splitlines()
    labels = np.array([line.rpartition("\t")[2] for line in lines])
    rng = np.random.default_rng(draw)
    for label in np.unique(labels):
        for chosen in np.sort(rng.permutation(np.flatnonzero(labels == label))[:count]):
            print(lines[chosen])


def probes(folder: Path, encoder: torch.nn.Module, mean, std) -> list[dict]:
    """Linear and k-NN accuracy in percent, for each list of labels in the folder."""
    how = {"mean": mean, "std": std, "device": torch.device("cpu"), "threads": 1}
    evaluation = Index.scan(folder / "eval.txt")
    (asked,), truth = knn.features([encoder], evaluation, np.arange(len(evaluation)), **how)
    rows = []
    for listed in sorted(folder.glob("labels-*.txt")):
        count, draw = map(int, listed.stem.split("-")[1:])
        index = Index.scan(listed)
        (known,), labels = knn.features([encoder], index, np.arange(len(index)), **how)
        matched = torch.from_numpy(evaluation.labels_among(index.classes))[truth]
        for name, top1 in (
            ("linear probe", probe.linear(known, labels, asked, matched, len(index.classes))[0]),
            ("k-NN", knn.accuracy(known, labels, asked, matched)),
        ):
            rows.append({"method": name, "labels": count, "draw": draw, "top1": top1})
    return rows


def table(folder: Path) -> list[dict]:
    """A row for each way of using labels, each number of them and, of training with them, each length in "epochs";
    accuracies in percent, "best" the length that is better on the mean."""
    found: dict[tuple, dict[int, list[float]]] = {}
    for arm, what in ARMS.items():
        if (file := folder / f"{arm}.json").exists():
            for row in json.loads(file.read_text()):
                name = f"{what}, {row['method']}"
                found.setdefault((name, row["labels"]), {}).setdefault(0, []).append(row["top1"])
    for run in sorted(folder.glob("*/model/config.json")):
        if parts := re.fullmatch(r"([\w-]+)-(\d+)-(\d+)-(\d+)", run.parents[1].name):
            top1 = json.loads(run.read_text())["training"]["top1"]
            found.setdefault((TUNED[parts[1]], int(parts[2])), {}).setdefault(int(parts[4]), []).append(top1)
    rows = []
    for (name, count), lengths in sorted(found.items(), key=lambda item: (item[0][0], item[0][1])):
        means = {epochs: statistics.mean(values) for epochs, values in lengths.items()}
        for epochs, values in sorted(lengths.items()):
            rows.append({
                "method": name, "labels": count, "draws": len(values), "top1": means[epochs],
                "spread": statistics.stdev(values) if len(values) > 1 else None, "epochs": epochs or None,
                "best": means[epochs] == max(means.values()),
            })  # fmt: skip
    return rows


def conclusions(d: dict) -> dict:
    found, panels, counts = [], {}, sorted({row["labels"] for row in d["rows"]})
    for row in d["rows"]:
        spread = "" if row["spread"] is None else f" +- {row['spread']:.1f}"
        more = [f"draws: {row['draws']}"] + ([f"{row['epochs']} epochs"] if row["epochs"] else [])
        found.append(finding(f"{row['labels']} labels a class: {row['method']}", f"{row['top1']:.1f} %{spread}", *more))
        if row["best"]:
            panels.setdefault(row["method"], []).append(row["top1"])
    panels = {method: values for method, values in panels.items() if len(values) == len(counts)}
    return {
        "findings": found,
        "plots": [plot("Few labels", f"% over {', '.join(map(str, counts))} labels a class", panels)],
    }


def draw(rows: list[dict], file: Path) -> None:
    """Accuracy over labels a class, as a picture; the spread of draws as bars."""
    from matplotlib import pyplot

    figure, (tuned, frozen) = pyplot.subplots(1, 2, figsize=(9, 4.6), layout="constrained", sharey=True)
    panels = {"fine-tuned": (tuned, "^-"), "from scratch": (tuned, "x--")}
    panels |= {"linear probe": (frozen, "o-"), "k-NN": (frozen, "s:")}
    arms = list(dict.fromkeys(row["method"].rpartition(", ")[0] for row in rows))
    counts = sorted({row["labels"] for row in rows})
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method and row["best"]]
        if len(own) < len(counts):  # of one length alone
            continue
        arm, _, way = method.rpartition(", ")
        axes, style = panels[way]
        x, y, spread = zip(*((row["labels"], row["top1"], row["spread"] or 0) for row in own), strict=True)
        how = {"color": f"C{arms.index(arm)}", "capsize": 2, "linewidth": 1.3, "markersize": 4}
        axes.errorbar(x, y, spread, fmt=style, label=method, **how)
    for axes, title in ((tuned, "all weights trained"), (frozen, "frozen encoder")):
        axes.set(title=title, xscale="log", xlabel="labels a class")
        axes.set_xticks(counts, counts)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    tuned.set(ylabel="accuracy, %")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main(arguments: list[str]) -> int:
    parser = environment.parser("labels", "Accuracy with few labels: the table of bench/labels.sh.")
    parser.add_argument("runs", type=Path, help="its folder of runs, or a result of this command")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it too")
    parser.add_argument("--draw", type=int, metavar="SEED", help="instead, print a random choice of train.txt ...")
    parser.add_argument("--count", type=int, help="... of so many images a class")
    parser.add_argument("--probe", type=Path, metavar="RUN", help="instead, probe the encoder of a run")
    options = parser.parse_args(arguments)
    if options.draw is not None:
        with opening("bench"):
            print_draw(options.runs / "train.txt", options.count, options.draw)
        return 0
    if options.probe is not None:
        with opening("bench"):
            encoder, about = load_encoder(options.probe)
        encoders = {}
        if options.probe.name == "aps":
            written = ["--config", str(options.probe / "config.json")]
            encoders["untrained"] = new_encoder(command.parse("train.py", RECIPES, written, own_data=lambda _: False))
        encoders[options.probe.name] = encoder  # last: labels.sh takes its file for the end of all
        for name, network in encoders.items():
            rows = probes(options.runs, network, about["mean"], about["std"])
            (options.runs / f"{name}.json").write_text(json.dumps(rows))
        return 0
    with opening("bench"):
        result = load(options.runs) if options.runs.is_file() else {"subject": "labels", "rows": table(options.runs)}
        if result["subject"] != "labels":
            raise ValueError(f"{options.runs} is a result of {result['subject']}; expected one of labels, or a folder")
    rows = result["rows"]
    if not rows:
        print(f"bench labels: no complete run in {options.runs}", file=sys.stderr)
        return 2
    environment.save(options, {"command": "bench/labels.sh", "rows": rows} | conclusions({"rows": rows}))
    environment.print_table(rows)
    if options.plot is not None:
        draw(rows, options.plot)
    return 0
