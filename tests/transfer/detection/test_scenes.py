"""The generated scenes: what their annotations say, and the same ones every time."""

import base64

import numpy as np
import pytest
import torch
from conftest import coarse

from transfer.detection import scenes
from transfer.detection.coco import CocoData
from transfer.detection.scenes import KINDS, draw_scene, make_scenes

pytest.importorskip("pycocotools")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools

# Some scenes: size, objects (class, pixels of the mask, its mean row and column), mean grey of each part of 8 x 8.
DRAWN = {
    1: ((141, 126), [(2, 1015, 92, 31), (0, 1185, 37, 42), (1, 2025, 92, 102)],
        "c3Jyd4GFhIR1b2h3goWDg3xwbXuEhIKAhH50g4aEgH6EdoSHgIF8fG1saoSCjYd9d2BugoGMin92d3yBgH+AhQ=="),
    2: ((119, 132), [(3, 890, 87, 78), (0, 881, 37, 90)],
        "hIWFf3R0foOFhIN+dWx+gIaDf3x3boV4hoJ5eoJ5dXSDf3Z4blZsdH56dHVdb3t4endydHFleXx4dnFze35+fQ=="),
    5: ((140, 143), [(2, 1101, 100, 51), (1, 1344, 104, 84)],
        "iYV+f4eEenWIhH5/hYN7eISCfn6Cgn99f359fX+Ag4R8fXBseX6Ehnt0XWOFeYKGe31jZXl7hIR7fYGDg4CDhA=="),
    7: ((144, 116), [],
        "cXJzeICGiIl0dHR5gYaHiHh3dnmBhoaGfnx4eoKGhYSAfXl7g4aEg4B9eXuFiISCf314e4WIhIF/fHh7homEgQ=="),
}  # fmt: skip


def test_scenes_are_what_their_annotations_say(tmp_path):
    places = make_scenes(tmp_path / "scenes", train=16, evaluation=8)
    data = CocoData(*places["train"])
    assert list(data.categories.values()) == list(KINDS) and data.unusable == 0
    counts = [len(data.objects(position)) for position in range(16)]
    assert counts[7] == counts[15] == 0 and sum(counts) > 16
    for position in range(16):
        image, (_, masks) = data.read(position).float(), data.masks(position)
        for mask, one in zip(masks.bool(), data.objects(position), strict=True):
            ys, xs = torch.nonzero(mask, as_tuple=True)
            assert len(ys) == one["area"]
            assert one["bbox"] == [xs.min(), ys.min(), xs.max() + 1 - xs.min(), ys.max() + 1 - ys.min()]
            assert image[:, mask].std() > 2 * image[:, ~masks.bool().any(0)].std()  # a pattern before a soft background
    places_again = make_scenes(tmp_path / "again", train=16, evaluation=8)
    assert all(
        a[0].read_bytes() == b[0].read_bytes() for a, b in zip(places.values(), places_again.values(), strict=True)
    )


def test_drawings_are_those_of_their_version():
    """To two levels and a few pixels: what was measured on them was measured on these."""
    assert scenes._VERSION == 1, "the version of DRAWN"
    for number, (size, objects, expected) in DRAWN.items():
        picture, found = draw_scene(number, np.random.default_rng([0, 0, number]))
        assert picture.size == size
        assert np.abs(coarse(picture) - np.frombuffer(base64.b64decode(expected), np.uint8)).max() < 2
        about = [(kind, mask.sum(), *(place.mean() for place in np.nonzero(mask))) for kind, mask in found]
        assert [one[0] for one in about] == [one[0] for one in objects]
        assert np.abs(np.array(about) - np.array(objects)).max(initial=0) < 4


def test_runs_begin_with_those_of_zeros():
    for mask in ([[1, 0], [1, 1]], [[0, 0], [0, 0]], [[1, 1], [1, 1]], [[0, 1], [1, 0]], [[0, 0], [1, 1]]):
        whole = scenes._rle(np.array(mask, bool))
        values = np.repeat(np.arange(len(whole["counts"])) % 2, whole["counts"])
        assert whole["size"] == [2, 2] and values.reshape(2, 2).T.tolist() == mask
