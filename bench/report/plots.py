"""Figures of result files, as SVG that takes the colour of the text around it, and as PNG."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.report.results import Result

INK = "#010203"  # stands for the colour of the text, in SVG
OURS, OTHER = "#2da44e", "#8b949e"
STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "axes.titlesize": 10, "axes.titleweight": "bold", "axes.axisbelow": True,
    "axes.linewidth": 0.6, "figure.facecolor": "none", "axes.facecolor": "none", "svg.fonttype": "path",
} | dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)  # fmt: skip


class Bar(NamedTuple):
    label: str
    value: float
    low: float
    high: float
    ours: bool


class Plot(NamedTuple):
    """Panels of bars, or of a line over equal steps, side by side: {title: bars or values}."""

    name: str
    title: str
    unit: str
    panels: dict
    source: Result


def plots(results: list[Result]) -> Iterator[Plot]:
    for result in results:
        if result.reported and result.subject in DRAWN:
            for suffix, title, unit, panels in DRAWN[result.subject](result.data):
                name = f"{result.path.parent.name}-{result.path.stem}{suffix}"
                yield Plot(name, title, unit, {key: bars for key, bars in panels.items() if bars}, result)


def _rates(row: dict, pairs: int) -> tuple[float, float, float]:
    """Pairs per second at the median, and at p80 and p20 of the time."""
    return tuple(pairs / row["step_seconds"][name] for name in ("p50", "p80", "p20"))


def _step_variants(d):
    panels = {}
    for row in d["rows"]:
        model, label = row["variant"].split(", ", 1)
        bars = panels.setdefault(model, [])
        bars.append(Bar(label, *_rates(row, d["batch_size"]), False))
    for bars in panels.values():
        bars.sort(key=lambda bar: -bar.value)
        bars[0] = bars[0]._replace(ours=True)
    yield "", "Optimizer step", "pairs/s (p20 to p80)", panels


def _step(d):
    modes = [mode for mode in ("plain", "float32", "eager", "compiled") if mode in d]
    bars = [Bar(mode, *_rates(d[mode], d["batch_size"]), mode != "plain") for mode in modes]
    yield "", "Optimizer step", "pairs/s (p20 to p80)", {f"{d['recipe']}, batch {d['batch_size']}": bars}


def _pipeline(d):
    name = f"{d['recipe']}, {d['image_size']} px"
    rows = [row for row in d["rates"] if row["images/s"]]
    alone = all(row["provider"].startswith("this loader") for row in rows)  # on a GPU: with several numbers of threads
    unit = "images/s" if alone else "CPU ms/image"
    bars = [Bar(r["provider"], *[r[unit]] * 3, r["provider"].startswith("this")) for r in rows]
    yield "", "Input path, both views", unit, {name: bars}
    if "stages" in d:
        bars = [Bar(row["stage"], *[row["its own"]] * 3, True) for row in d["stages"]]
        yield "-stages", "Its stages", "CPU ms/image", {name: bars}


def _kernels(d):
    panels = {}
    for row in d["rows"]:
        bars = panels.setdefault(f"{row['size']}, batch {row['batch']}", [])
        times = [row[f"{name}_us"] / 1e3 for name in ("p50", "p20", "p80")]
        bars.append(Bar(f"{row['operation']}: {row['provider']}", *times, row["times_ours"] == 1))
    yield "", "Kernels and their alternatives", "ms (p20 to p80)", panels


def _backends(d):
    bars = [
        Bar(f"share {name.split()[1]}, {name.split()[2]} threads", rate, rate, rate, "1.0" in name)
        for name, rate in sorted(d["rows"].items(), key=lambda row: row[0].split()[::-1])
        if name.startswith("decode ")
    ]
    yield "", "Decoding alone, by what the hardware engines take", "images/s", {"batch 256": bars}


def _soak(d):
    yield "", "Resident set over tenths of the batches", "MiB", {f"{d['batches']:,} batches": d["resident_mib"]}


def _learning(d):
    def bars(name):
        found = []
        for row in d["rows"]:
            if row[name] is not None:
                value, spread = row[name], row[f"{name}_spread"] or 0
                found.append(Bar(row["arm"], value, value - spread, value + spread, row["arm"] == "APS"))
        return found

    panels = {"after fine-tuning": bars("top1"), "k-NN before it": bars("knn")}
    yield "", "What pretraining is worth", "% (standard deviation of seeds)", panels


def _baselines(d):
    panels = {
        f"ViT-{size}": [Bar(name, *[found["flop"] / 1e9] * 3, name == "APS") for name, found in methods.items()]
        for size, methods in d["sizes"].items()
    }
    yield "", "Arithmetic of a training step", "GFLOP an image", panels


DRAWN = {
    "step variants": _step_variants, "step": _step, "pipeline": _pipeline, "kernels": _kernels, "soak": _soak,
    "DALI on CPU and GPU": _backends, "learning": _learning,
    "baselines": _baselines,
}  # fmt: skip


def draw(plot: Plot, png: Path) -> str:
    """The figure as SVG, for a page; writes it as PNG on white too. Needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": plot.name}):
        bars = [panel for panel in plot.panels.values() if isinstance(panel[0], Bar)]
        height = 0.7 + sum(0.24 * len(panel) + 0.5 for panel in bars) if bars else 2.4  # inches
        figure = Figure(figsize=(9, height), layout="constrained")
        ratios = [len(panel) + 1.5 for panel in plot.panels.values()]
        axes = figure.subplots(len(plot.panels), 1, squeeze=False, height_ratios=ratios)[:, 0]
        for axis, (title, panel) in zip(axes, plot.panels.items(), strict=True):
            axis.set_title(title)
            if isinstance(panel[0], Bar):
                _bars(axis, panel)
                axis.set_xlabel(plot.unit if axis is axes[-1] else "")
            else:
                axis.plot(panel, color=OURS, marker="o", markersize=3)
                axis.set_ylim(0, 1.1 * max(panel))
                axis.set_ylabel(plot.unit)
        figure.get_layout_engine().set(hspace=0.06)
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=150, facecolor="white", metadata={"Software": None})
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def _bars(axis, panel: list[Bar]) -> None:
    """Horizontal, the first on top; logarithmic where small ones would not be seen."""
    values = [max(bar.value, 0) for bar in panel]
    wide = min(values) > 0 and max(values) > 50 * min(values)
    positions = range(len(panel))
    axis.barh(positions, values, color=[OURS if bar.ours else OTHER for bar in panel], height=0.7, log=wide)
    for at, bar in enumerate(panel):
        if bar.high > bar.low:
            axis.plot([bar.low, bar.high], [at, at], color=INK, linewidth=1)
        text = f"{bar.value:,.0f}" if bar.value >= 1000 else f"{bar.value:.3g}"
        axis.annotate(text, (max(bar.high, 0), at), xytext=(4, 0), textcoords="offset points", va="center")
    axis.set_yticks(positions, [bar.label for bar in panel])
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.margins(x=0.1)
    axis.tick_params(axis="y", length=0)
