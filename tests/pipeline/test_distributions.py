"""What the recipes draw, against torchvision's own draws: shape and place of the boxes, factors of the colours."""

import math

import numpy as np
import pytest
import torch
from torchvision.transforms import ColorJitter, RandomResizedCrop

from run.recipes import RECIPES

N = 4000
ALPHA = 1e-7  # false alarm rate of a comparison; 20 of them


def assert_same_law(ours, theirs, name):
    """Two-sample Kolmogorov-Smirnov."""
    grid = np.union1d(ours, theirs)
    distance = np.abs(np.subtract(*(np.searchsorted(np.sort(v), grid, "right") / len(v) for v in (ours, theirs)))).max()
    limit = math.sqrt(-math.log(ALPHA / 2) / 2) * math.sqrt(1 / len(ours) + 1 / len(theirs))
    assert distance < limit, f"{name}: distance {distance:.4f}, limit {limit:.4f}"


def shapes(boxes, height, width):
    """Area and aspect of boxes [m,4], and their place in the room they have."""
    y, x, h, w = boxes.astype(np.float64).T
    room_y, room_x = height - h, width - w
    places = {"y": y[room_y > 0] / room_y[room_y > 0], "x": x[room_x > 0] / room_x[room_x > 0]}
    return {"area": h * w / (height * width), "aspect": w / h} | places


@pytest.mark.parametrize("recipe, height, width", [("imagenet-vit-s", 375, 500), ("cifar-vit-t", 32, 32)])
def test_areas_aspects_and_places_follow_random_resized_crop(recipe, height, width):
    a = RECIPES[recipe].augmentation
    drawn = a.draw(np.tile(np.array([[height, width]], np.int32), (N, 1)), np.arange(N), seed=1, epoch=0)
    torch.manual_seed(1)
    image = torch.empty(1, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, list(a.area), list(a.aspect)) for _ in range(N)])
    expected = shapes(theirs, height, width)
    for view in range(2):
        for name, values in shapes(drawn.boxes[:, view], height, width).items():
            assert_same_law(values, expected[name], f"{name} of view {view}")


def test_factors_follow_color_jitter():
    a = RECIPES["cifar-vit-t"].augmentation
    drawn = a.draw(np.full((N, 2), 32), np.arange(N), seed=1, epoch=0)
    torch.manual_seed(1)
    jitter = ColorJitter(a.brightness, a.contrast, a.saturation, a.hue)
    ranges = jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue
    theirs = np.array([jitter.get_params(*ranges)[1:] for _ in range(N)], float)
    changed = drawn.hue != 0
    for k, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        ours = getattr(drawn, name)
        assert_same_law(ours[changed & (drawn.saturation > 0)], theirs[:, k], name)
