"""Loss, accuracy and speed of one or several runs in one picture; of a run that still goes on, what there is so far."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

WIDTH = 1 / 60  # of the axis: standard deviation of the smoothing, alike for runs of most lengths,
MOST = 1 / 20  # but no more than this share of the run
GREY = "0.45"
STYLE = {
    "font.size": 9, "text.color": "0.2", "text.parse_math": False,  # names of folders may hold dollars
    "axes.edgecolor": "0.7", "axes.labelcolor": GREY, "axes.linewidth": 0.8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "0.92", "grid.linewidth": 0.8,
    "xtick.color": "0.7", "ytick.color": "0.7", "xtick.labelcolor": GREY, "ytick.labelcolor": GREY,
    "axes.formatter.useoffset": False, "axes.formatter.limits": (-9, 9), "legend.frameon": False, "legend.fontsize": 10,
    "savefig.dpi": 150,
}  # fmt: skip


class Panel(NamedTuple):
    name: str  # in metrics.jsonl
    title: str
    unit: str
    factor: float = 1  # from what is recorded to the unit
    shown: tuple[float, ...] = ()  # values that the axis always includes
    noisy: bool = True


PANELS = (
    Panel("loss", "Loss", ""),
    Panel("similarity", "Similarity of positive pairs", "cosine"),
    Panel("feature_std", "Spread of features", "1 spread out, 0 collapsed", shown=(0, 1)),
    Panel("knn_trained", "k-NN accuracy", "% (at 0: before training)", noisy=False),
    Panel("top1", "Top-1 accuracy", "%", noisy=False),
    Panel("learning_rate", "Learning rate", "10⁻³", factor=1000, shown=(0,), noisy=False),
    Panel("images_per_second", "Speed", "images/s", shown=(0,)),
    Panel("data_wait", "Waiting for data", "% of the time", factor=100, shown=(0, 10)),
    Panel("mfu", "Model FLOP utilisation", "% of the peak", factor=100, shown=(0,)),
)
OWN = "loss", "feature_std", "knn_trained", "top1", "images_per_second"  # panels of the picture that a run leaves


def leave(folder: Path) -> str:
    """Draws ``curves.png`` of a run into its folder, and says so, or why it could not: no run fails for its picture."""
    picture = folder / "curves.png"
    try:
        draw({folder.absolute().name: read(folder)}, picture, [panel for panel in PANELS if panel.name in OWN])
    except ImportError:
        return f"no {picture}: matplotlib is not installed"
    except Exception as error:
        return f"no {picture}: {error}"
    return f"curves: {picture}"


def read(folder: Path) -> list[dict[str, float]]:
    """The numbers of each record that has something to draw, NaN for those that were not finite.

    Damaged lines are left out: a crash cuts the last one, and so does reading while it is written. ValueError if none
    is left.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; expected the output folder of a run")
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line, parse_int=float)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            numbers = {name: v for name, v in record.items() if v is None or isinstance(v, float)}
            numbers = {name: v if v is not None and math.isfinite(v) else math.nan for name, v in numbers.items()}
            if any(panel.name in numbers for panel in PANELS):
                records.append(numbers)
    if not records:
        raise ValueError(f"{path} holds nothing to draw yet; expected a record of {PANELS[0].name}")
    return records


def common_axis(runs: dict[str, list[dict[str, float]]]) -> str:
    """What all runs can be drawn over: epochs, else steps; ValueError if neither."""
    for axis in ("epoch", "step"):
        lacking = [label for label, records in runs.items() if not np.isfinite(column(records, axis)).any()]
        if not lacking:
            return axis
    raise ValueError(
        f"{lacking[0]} counts no steps, and not every run counts epochs; expected runs that share one of them"
    )


def column(records: list[dict[str, float]], name: str) -> np.ndarray:
    """float64 [n], NaN where a record lacks it."""
    return np.array([record.get(name, math.nan) for record in records])


def positions(records: list[dict[str, float]], axis: str) -> np.ndarray:
    """Where the records lie on the axis, float64 [n]: as they say, else as those with both step and epoch imply."""
    here, there = column(records, axis), column(records, {"epoch": "step", "step": "epoch"}[axis])
    both = np.isfinite(here) & np.isfinite(there)
    if both.any():
        order = np.argsort(there[both])
        here = np.where(np.isnan(here), np.interp(there, there[both][order], here[both][order]), here)
    return here


def curve(records: list[dict[str, float]], axis: str, panel: Panel) -> tuple[np.ndarray, np.ndarray]:
    """x and y of the records that have the panel's figure."""
    x, y = positions(records, axis), panel.factor * column(records, panel.name)
    there = np.array([panel.name in record for record in records]) & np.isfinite(x)
    x, y = x[there], y[there]
    if panel.name == "knn_trained":  # the encoder before its first step
        start = np.append(column(records, "knn_untrained"), column(records, "knn_start"))
        start = start[np.isfinite(start)][:1]
        x, y = np.append(np.zeros_like(start), x), np.append(start, y)
    return x, y


def smooth(y: np.ndarray, deviation: float) -> np.ndarray:
    """Gaussian means over neighbours, ``deviation`` in points; gaps stay gaps."""
    reach = math.ceil(3 * deviation)
    kernel = np.exp(-((np.arange(-reach, reach + 1) / deviation) ** 2) / 2)
    known = np.isfinite(y)
    sums, weights = (np.convolve(row, kernel)[reach : reach + len(y)] for row in (np.where(known, y, 0), known))
    return np.where(known, sums / np.maximum(weights, 1e-9), np.nan)


def draw(runs: dict[str, list[dict[str, float]]], path: Path, among: Sequence[Panel] = PANELS) -> None:
    """One panel for each figure that some run has, one colour for each run; the format by the suffix of ``path``."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    axis = common_axis(runs)
    end = max(np.nanmax(positions(records, axis)) for records in runs.values()) or 1
    panels = [panel for panel in among if any(panel.name in record for records in runs.values() for record in records)]
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    colours = matplotlib.color_sequences["petroff10"]
    if len(runs) > len(colours):
        colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(runs)))
    with matplotlib.rc_context(STYLE):
        key = {label: Line2D([], [], color=colour, linewidth=3) for label, colour in zip(runs, colours, strict=False)}
        figure = Figure(layout="constrained")
        thin = False
        for number, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, number + 1)
            for label, records in runs.items():
                thin |= plot(axes, *curve(records, axis, panel), panel.noisy, WIDTH * end, key[label].get_color())
            frame(axes, panel, end)
            if number // columns == rows - 1:
                axes.set_xlabel(axis)
        if thin:
            figure.supxlabel("thin: as recorded; thick: smoothed", x=0.99, ha="right", fontsize=9, color=GREY)
        width = 4.2 * columns  # inches, as all sizes of a figure
        across = max(1, int(width / (0.7 + 0.09 * max(map(len, key)))))  # entries of the key side by side
        names = [os.fsencode(label).decode(errors="replace") for label in key]  # of folders, which may be any bytes
        figure.legend(key.values(), names, loc="outside upper left", ncols=across)
        figure.set_size_inches(width, 2.6 * rows + 0.4 + 0.22 * -(-len(key) // across))
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.07)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=path.suffix[1:] or "png")


def plot(axes, x: np.ndarray, y: np.ndarray, noisy: bool, width: float, colour) -> bool:
    """Draws a line, and marks its points where they lie apart. A line of dense points that is ``noisy`` is drawn thin,
    under its smoothed line; whether it was is returned. ``width``: of the smoothing, in units of x."""
    deviation = (len(x) - 1) * min(MOST, width / max(np.ptp(x), width)) if len(x) else 0  # in points
    dense = deviation >= 1
    if dense and noisy:
        axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.3)
        y = smooth(y, deviation)
    axes.plot(x, y, color=colour, linewidth=1.8, marker="" if dense else "o", markersize=3.5, zorder=3)
    return dense and noisy


def frame(axes, panel: Panel, end: float) -> None:
    """Title, unit, limits and ticks; the x axes of all panels reach to ``end``."""
    title = axes.set_title(panel.title)
    axes.annotate(
        panel.unit, (1, 0), xycoords=title, xytext=(6, 0), textcoords="offset points", va="bottom", color=GREY
    )
    axes.set_xlim(-0.02 * end, 1.02 * end)
    low, high = axes.get_ylim()
    if panel.shown:
        low, high = min(low, *panel.shown), max(high, *panel.shown)
    axes.set_ylim(low, high)
    axes.locator_params(nbins=6, steps=(1, 2, 5, 10))
    axes.tick_params(length=3)
    for side in (axes.xaxis, axes.yaxis):
        if side.get_view_interval()[1] >= 10_000:
            side.set_major_formatter("{x:,.0f}")
