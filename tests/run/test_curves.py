"""Runs as a picture: what their lines of metrics hold, and no more."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

from run import curves


def test_curves_are_of_what_is_there(tmp_path):
    """Two runs, the second still being written; the k-NN record at the end says a step and no epoch."""
    steps = [{"step": 4 * i, "epoch": i / 2, "loss": 1 / i, "images_per_second": 9 * i} for i in range(1, 101)]
    knn = {"step": 398, "knn_trained": 60.0, "knn_untrained": 40.0, "knn_bad": {}}
    lines = [json.dumps(record) for record in (*steps, {"step": 404, "epoch": 50.5, "loss": None}, knn)]
    runs = [tmp_path / parent / "run" for parent in "ab"]
    for run, text in zip(runs, ["\n".join(lines), "\n".join(["\0\0", "[1]", *lines[:60]])[:-9]], strict=True):
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(text)
    records = [curves.read(run) for run in runs]
    assert [len(found) for found in records] == [102, 59]
    panels = {panel.name: panel for panel in curves.PANELS}
    x, y = curves.curve(records[0], "epoch", panels["knn_trained"])
    assert x.tolist() == [0, 49.75] and y.tolist() == [40, 60]
    begun = [
        {"step": 4, "epoch": 0.5, "knn_trained": 50.0},
        {"step": 8, "epoch": 1.0, "knn_trained": 60.0, "knn_start": 45.0},
    ]
    assert curves.curve(begun, "epoch", panels["knn_trained"])[1].tolist() == [45, 50, 60]
    x, y = curves.curve(records[0], "step", panels["loss"])
    assert x.tolist() == [*range(4, 405, 4)] and np.isnan(y[-1]) and y[1] == 0.5
    for deviation in (1, 2.5, 100):  # means of equal figures, beside a gap and at the ends
        level = curves.smooth(np.where(np.isnan(y), y, 3.0), deviation)
        assert np.isnan(level[-1]) and abs(level[:-1] - 3).max() < 1e-12
    assert curves.common_axis({"a": records[0], "b": [{"epoch": 1.0}]}) == "epoch"
    assert curves.common_axis({"a": records[0], "b": [{"step": 1.0}]}) == "step"


def test_a_run_leaves_its_picture_and_never_fails_for_it(tmp_path, monkeypatch):
    """Four panels where all is there, fewer where not; a line to say where there is none."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    told = f"no {picture}: {tmp_path} holds no metrics.jsonl; expected the output folder of a run"
    assert curves.leave(tmp_path) == told and not picture.exists()
    steps = [{"step": i, "epoch": i / 10, "loss": 1 / i, "feature_std": 0.5, "mfu": 0.1} for i in range(1, 10)]
    sizes = []
    for more in ({}, {"knn_trained": 60.0, "images_per_second": 300.0}):
        lines = [json.dumps(record | more) for record in steps]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        assert curves.leave(tmp_path) == f"curves: {picture}"
        with Image.open(picture) as drawn:
            sizes.append(drawn.size)
            shades = np.asarray(drawn.convert("RGB")).reshape(-1, 3).astype(int)
        assert (abs(shades - (63, 144, 218)).sum(1) < 9).sum() > 1000
    assert sizes[0][0] == sizes[1][0] and sizes[1][1] > 1.7 * sizes[0][1]  # a row of two panels, and two
    picture.unlink()
    monkeypatch.setattr(curves, "plot", lambda *_: 1 / 0)
    assert curves.leave(tmp_path) == f"no {picture}: division by zero"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert curves.leave(tmp_path) == f"no {picture}: matplotlib is not installed"
