"""Figures of result files, as SVG that takes the colour of the text around it, and as PNG."""

import io
from pathlib import Path

INK = "#010203"  # stands for the colour of the text, in SVG
OURS, OTHER = "#2da44e", "#8b949e"
STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "axes.titlesize": 10, "axes.titleweight": "bold", "axes.axisbelow": True,
    "axes.linewidth": 0.6, "figure.facecolor": "none", "axes.facecolor": "none", "svg.fonttype": "path",
} | dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)  # fmt: skip


def draw(plot: dict, png: Path) -> str:
    """The figure (``bench.findings.plot``) as SVG, for a page; writes it as PNG on white too. Needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = plot["panels"]
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": png.stem}):
        bars = [panel for panel in panels.values() if isinstance(panel[0], dict)]
        height = 0.7 + sum(0.24 * len(panel) + 0.5 for panel in bars) if bars else 2.4  # inches
        figure = Figure(figsize=(9, height), layout="constrained")
        ratios = [len(panel) + 1.5 for panel in panels.values()]
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=ratios)[:, 0]
        for axis, (title, panel) in zip(axes, panels.items(), strict=True):
            axis.set_title(title)
            if isinstance(panel[0], dict):
                _bars(axis, panel)
                axis.set_xlabel(plot["unit"] if axis is axes[-1] else "")
            else:
                axis.plot(panel, color=OURS, marker="o", markersize=3)
                axis.set_ylim(0, 1.1 * max(panel))
                axis.set_ylabel(plot["unit"])
        figure.get_layout_engine().set(hspace=0.06)
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=150, facecolor="white", metadata={"Software": None})
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def _bars(axis, panel: list[dict]) -> None:
    """Horizontal, the first on top; logarithmic where small ones would not be seen."""
    values = [max(bar["value"], 0) for bar in panel]
    wide = min(values) > 0 and max(values) > 50 * min(values)
    axis.barh(range(len(panel)), values, color=[OURS if bar["ours"] else OTHER for bar in panel], height=0.7, log=wide)
    for at, bar in enumerate(panel):
        value, end = bar["value"], bar.get("high", bar["value"])
        if bar.get("low", end) < end:
            axis.plot([bar["low"], end], [at, at], color=INK, linewidth=1)
        text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        axis.annotate(text, (max(end, 0), at), xytext=(4, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(panel)), [bar["label"] for bar in panel])
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.margins(x=0.1)
    axis.tick_params(axis="y", length=0)
