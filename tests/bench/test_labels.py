"""The table of few labels: from the files of runs to rows and the points of the plot."""

import json

import pytest

from bench import labels


def test_lengths_are_rows_and_the_better_one_on_the_mean_of_draws_is_plotted(tmp_path):
    def tuned(name, top1):
        model = tmp_path / name / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"training": {"top1": top1}}))

    for name, top1 in (
        ("scratch-10-0-80", 20.0), ("scratch-10-1-80", 30.0), ("scratch-10-0-320", 27.0), ("scratch-10-1-320", 25.0),
        ("scratch-400-0-12", 35.0), ("window-16-400-0-12", 50.0), ("tuned-10-0-80", 40.0),
    ):  # fmt: skip
        tuned(name, top1)
    (tmp_path / "scratch-10-2-320").mkdir()  # not complete
    probed = [{"method": "k-NN", "labels": 10, "draw": draw, "top1": 30.0 + draw} for draw in range(2)]
    (tmp_path / "one-group.json").write_text(json.dumps(probed))
    rows = labels.table(tmp_path)
    by = {(row["method"], row["labels"], row["epochs"]): (row["draws"], row["top1"], row["best"]) for row in rows}
    assert by == {
        ("from scratch", 10, 80): (2, 25, False), ("from scratch", 10, 320): (2, 26, True),
        ("from scratch", 400, 12): (1, 35, True),
        ("APS, fine-tuned", 10, 80): (1, 40, True),
        ("APS, the groups of 16 batches in turn, fine-tuned", 400, 12): (1, 50, True),
        ("APS, one group instead of four, k-NN", 10, None): (2, 30.5, True),
    }  # fmt: skip
    spread = [row["spread"] for row in rows if row["method"] == "from scratch"]
    assert spread[:2] == pytest.approx([50**0.5, 2**0.5]) and spread[2] is None
    (plot,) = labels.conclusions({"rows": rows})["plots"]
    assert plot["panels"] == {"from scratch": [26, 35]}, "of all numbers of labels"
