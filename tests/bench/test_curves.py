"""Runs as one picture."""

import json

import numpy as np
import pytest
from conftest import run_program
from PIL import Image

from bench.curves import labels


def test_runs_of_one_name_are_told_apart_and_each_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [json.dumps({"step": i, "epoch": i / 2, "loss": 1 / i, "images_per_second": 9 * i}) for i in range(1, 101)]
    runs = [tmp_path / parent / "run" for parent in "ab"]
    for run, count in zip(runs, (100, 60), strict=True):
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("\n".join(lines[:count]))
    assert labels([*runs, tmp_path / "c"]) == ["a/run", "b/run", "c"]

    picture = tmp_path / "new" / "curves.png"
    run_program("-m", "bench", "curves", *runs, runs[0], "--output", picture)
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3).astype(int)
    for colour in ((63, 144, 218), (255, 169, 14)):  # of the two runs
        assert (abs(pixels - colour).sum(1) < 9).sum() > 1000
    done = run_program("-m", "bench", "curves", runs[0], tmp_path, "--output", picture, check=2)
    assert done.stderr.startswith(f"bench curves: {tmp_path} holds no metrics.jsonl") and done.stderr.count("\n") == 1
