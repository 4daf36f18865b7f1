"""What an evaluation counts, whichever rank has the image; how its figures are shown."""

import dataclasses

import pytest
import torch

from run.ranks import Ranks
from transfer.detection import precision
from transfer.detection.coco import CocoData
from transfer.detection.precision import FIGURES, average_precision, evaluate, table
from transfer.detection.scenes import make_scenes

pytest.importorskip("pycocotools")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools


@dataclasses.dataclass(frozen=True)
class Together(Ranks):
    """One of two ranks, and what all of them have gathered."""

    parts: list = dataclasses.field(default_factory=list)

    def gather(self, value):
        self.parts.append(value)
        return list(self.parts)


def test_each_image_is_looked_at_once(tmp_path, monkeypatch):
    """A detector that knows the truth of what it is shown finds all of it, but for images that cannot be read."""
    data = CocoData(*make_scenes(tmp_path / "data", train=20, evaluation=1)["train"])
    for position in (3, 8, 10, 12, 14, 16, 18):  # the first, and all of the last batch of one rank
        (data.root / data.paths[position]).write_bytes(b"no image")
    monkeypatch.setattr(precision, "BATCH", 4)
    shown = []

    def detect(detector, images, sizes):
        assert not torch.is_autocast_enabled("cpu")
        assert detector == network and not network.training and len(images) == len(sizes) <= 4
        found = []
        for image, (height, width) in zip(images, sizes, strict=True):
            assert max(image.shape[1:]) == 48
            (place,) = (
                p for p, (_, name, *size) in enumerate(data.images)
                if p not in shown and size == [height, width] and torch.equal(image, resized[p])
            )  # fmt: skip
            shown.append(place)
            labels, masks = data.masks(place)
            boxes = torch.tensor([one["bbox"] for one in data.objects(place)]).reshape(-1, 4).float()
            boxes[:, 2:] += boxes[:, :2]
            found.append({"boxes": boxes, "labels": labels, "masks": masks.bool(), "scores": torch.ones(len(labels))})
        return found

    monkeypatch.setattr(precision, "detect", detect)
    resized = {
        position: image for position, image, _ in map(precision.EvaluationImages(data, size=48).__getitem__, range(20))
    }
    network = torch.nn.Linear(1, 1)
    how, told = {"size": 48, "workers": 0, "progress": lambda *done: told.append(done)}, []
    figures, results, bad = evaluate(network, data, **how, ranks=Ranks(0, 1, 1, torch.device("cpu")))
    assert told == [(done, 20) for done in (4, 8, 12, 16, 20)], "images that cannot be read are done too"
    assert sorted(shown) == [n for n in range(20) if n not in bad] and sorted(bad) == [3, 8, 10, 12, 14, 16, 18]
    assert len(results) == sum(len(data.objects(n)) for n in shown)
    assert {one["image_id"] for one in results} == {data.images[n][0] for n in shown if data.objects(n)}
    assert figures == average_precision(data, results) and 40 < figures["mask_AP"] < 100

    shown.clear()
    parts = []
    outcomes = [
        evaluate(network, data, **how, ranks=Together(rank, 2, 2, torch.device("cpu"), parts=parts)) for rank in (1, 0)
    ]
    assert shown[:9] == [1, 5, 7, 9, 11, 13, 15, 17, 19] and outcomes[0][0] == {}
    assert outcomes[1][0] == pytest.approx(figures) and outcomes[1][2] == bad
    assert sorted(map(str, outcomes[1][1])) == sorted(map(str, results))


def test_figures_are_shown_in_columns():
    figures = {
        f"{kind}_{name}": 10 * n + place
        for n, kind in enumerate(("box", "mask"), 1)
        for place, name in enumerate(FIGURES)
    }
    figures |= {"box_AP75": None, "mask_AP50": 100.0, "box_AP": 3.14159}
    assert table(figures) == (
        "             AP       AP50       AP75   AP small  AP medium   AP large\n"
        "box         3.1       11.0          -       13.0       14.0       15.0\n"
        "mask       20.0      100.0       22.0       23.0       24.0       25.0"
    )
