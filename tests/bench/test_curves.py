"""Runs as a picture: what their lines of metrics hold, and no more."""

import json

import numpy as np
import pytest
from conftest import run_program
from PIL import Image

from bench import curves


def test_curves_draw_what_is_there(tmp_path):
    """Two runs of one name, the second still being written; the k-NN record at the end says a step and no epoch."""
    pytest.importorskip("matplotlib")
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
    assert curves.labels([*runs, tmp_path / "c"]) == ["a/run", "b/run", "c"]

    picture = tmp_path / "new" / "curves.png"
    run_program("-m", "bench", "curves", *runs, runs[0], "--output", picture)
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3).astype(int)
    for colour in ((63, 144, 218), (255, 169, 14)):  # of the two runs
        assert (abs(pixels - colour).sum(1) < 9).sum() > 2000
    done = run_program("-m", "bench", "curves", runs[0], tmp_path, "--output", picture, check=2)
    assert done.stderr.startswith(f"bench curves: {tmp_path} holds no metrics.jsonl") and done.stderr.count("\n") == 1
