"""What a measurement says of itself, which it keeps in its result beside the figures: ``bench report`` lays it out.

``findings``: rows of what was measured and what came out. ``plots``: panels of bars or of lines. ``path``: what the
picture of the data path needs, seconds of a stage by its name. ``table``: cells as text, by rows, the first of heads.
"""

PATH_RECIPE, PATH_BATCH = "imagenet-vit-s", 512  # of the picture of the data path


def finding(what: str, result: str | float, *more: str, unit: str = "", headline: str = "", commit: str = "") -> dict:
    """A row. ``result``: a text, or a number with its ``unit``; ``more``: what else there is to say, in clauses.

    ``headline``: of the rows of a device that have the same word here, the newest is one that a reader meets first.
    ``commit``: of a row that was measured at another one than the rest of its file.
    """
    row = {"what": what, "result": result, "unit": unit, "more": "; ".join(more)}
    return {key: value for key, value in (row | {"headline": headline, "commit": commit}).items() if value != ""}


def bar(label: str, value: float, low: float | None = None, high: float | None = None, *, ours: bool = True) -> dict:
    """``low`` to ``high``: the spread, where it is known; ``ours``: in the colour of this project."""
    spread = {} if low is None else {"low": low, "high": high}
    return {"label": label, "value": value, **spread, "ours": ours}


def plot(title: str, unit: str, panels: dict[str, list], name: str = "") -> dict:
    """Panels {title: bars, or values over equal steps}, those left out that are empty. ``name``: for a second plot."""
    row = {"title": title, "unit": unit, "panels": {key: panel for key, panel in panels.items() if panel}}
    return row | ({"name": name} if name else {})


def failure(error: Exception) -> str:
    """The line that a row keeps as "failed"."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def without_figures(row: dict) -> str:
    """Why a row has none: "not run" or "failed", and what it says of that; "" where it has some."""
    return next((f"{state.replace('_', ' ')}: {row[state]}" for state in ("not_run", "failed") if state in row), "")


def number(value: float) -> str:
    """With three or four digits: 14,380, 35.6, 0.159."""
    if abs(value) >= 1000:
        return f"{float(f'{value:.4g}'):,.0f}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
