"""The stream: pure, and of the same law as torchvision's transforms."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from kernels.philox import Purpose, philox, stream_key
from pipeline import Augmentation, graph
from pipeline.stream import Draw, epoch_order, replacement

FIELDS = [field.name for field in dataclasses.fields(Draw)]


def sizes(n, height=300, width=500):
    return np.tile(np.array([[height, width]], np.int32), (n, 1))


def test_a_draw_depends_on_the_sample_and_on_nothing_beside_it():
    sample = np.array([5, 2**40 + 1, 0, 77, 1_281_166])
    whole = Augmentation().draw(sizes(5), sample, seed=3, epoch=2)
    picked = np.array([3, 0])
    part = Augmentation().draw(sizes(2), sample[picked], seed=3, epoch=2)
    for field in FIELDS:
        assert np.array_equal(getattr(whole, field)[picked], getattr(part, field)), field


@pytest.mark.parametrize("seed, epoch", [(4, 2), (3, 3)])
def test_seed_and_epoch_change_everything(seed, epoch):
    a = Augmentation(blur_p=(1.0, 0.5), solarise_p=(0.5, 0.5))
    one, other = (a.draw(sizes(1000), np.arange(1000), *key) for key in ((3, 2), (seed, epoch)))
    for field in FIELDS:
        first, second = getattr(one, field), getattr(other, field)
        assert (first != second).any(axis=tuple(range(2, first.ndim))).mean() > 0.15, field
        assert (first[:, 0] != first[:, 1]).mean() > 0.15, f"{field}: both views alike"


def test_the_order_is_a_permutation_that_changes_with_the_epoch():
    n = 40_007
    orders = [epoch_order(n, seed=1, epoch=e) for e in (0, 1)] + [epoch_order(n, seed=2, epoch=0)]
    for order in orders:
        assert order.dtype == np.int64 and np.array_equal(np.sort(order), np.arange(n))
    # Uniform, independent permutations have Poisson(1) fixed points in common: more than 12 with probability 1e-10.
    assert (orders[0] == np.arange(n)).sum() < 13
    assert (orders[0] == orders[1]).sum() < 13 and (orders[0] == orders[2]).sum() < 13
    assert np.array_equal(orders[0], epoch_order(n, seed=1, epoch=0))
    # Nor do samples follow each other at a fixed distance: each of 80,000 distances occurs at most Poisson(1) times.
    assert np.unique(np.diff(orders[0]), return_counts=True)[1].max() < 13


def test_the_order_is_that_of_keys_of_64_bits():
    for n, seed, epoch in ((500, 1, 0), (31, -7, 2**40), (1, 0, 0)):
        words = [philox((s, 0, 0, 0), stream_key(seed, epoch, Purpose.ORDER)) for s in range(n)]
        keys = [int(first) << 32 | int(second) for first, second, *_ in words]
        assert epoch_order(n, seed, epoch).tolist() == sorted(range(n), key=keys.__getitem__)


def test_areas_and_aspects_are_those_of_their_ranges():
    """Uniform and log-uniform, where all fit: means within 5 standard deviations, and the ends are reached."""
    a, n = Augmentation(area=(0.2, 0.25), aspect=(2.0, 3.0)), 5000
    boxes = a.draw(sizes(n, 20_000, 20_000), np.arange(n), seed=0, epoch=0).boxes.reshape(-1, 4).astype(float)
    h, w = boxes[:, 2:].T
    for values, low, high in ((h * w / 20_000**2, 0.2, 0.25), (np.log(w / h), math.log(2), math.log(3))):
        width = high - low
        assert low - 1e-3 * width <= values.min() < low + 0.01 * width
        assert high - 0.01 * width < values.max() <= high + 1e-3 * width
        assert abs(values.mean() - (low + high) / 2) < 5 * width / math.sqrt(12 * len(values))
    places = [boxes[:, k] / (20_000 - boxes[:, k + 2]) for k in (0, 1)]
    assert abs(np.corrcoef(*places)[0, 1]) < 5 / math.sqrt(len(boxes)), "one tells nothing of the other"


def test_crops_of_very_long_images_are_central():
    """The largest of an aspect that is allowed, as torchvision's."""
    for height, width in ((1, 1000), (1000, 1), (3, 4001), (4001, 3)):
        top, left, h, w = RandomResizedCrop.get_params(torch.empty(1, height, width), [0.5, 0.5], [0.5, 1.5])
        box = Augmentation(area=(0.5, 0.5), aspect=(0.5, 1.5)).draw(sizes(1, height, width), np.array([3]), 0, 0).boxes
        assert box.tolist() == [[[top, left, max(h, 1), max(w, 1)]] * 2]


@pytest.mark.parametrize("height, width", [(300, 500), (32, 32), (400, 60), (7, 300)])
def test_boxes_follow_the_law_of_random_resized_crop(height, width):
    """Two-sample Kolmogorov-Smirnov on y, x, h, w at a false alarm rate of 1e-6 for a comparison, 2e-5 in all."""
    n, alpha, aspect = 3000, 1e-6, (3 / 4, 2.0)
    drawn = Augmentation(aspect=aspect).draw(sizes(n, height, width), np.arange(n), seed=0, epoch=0)
    ours = drawn.boxes.reshape(-1, 4)
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], list(aspect)) for _ in range(n)])
    limit = math.sqrt(-math.log(alpha / 2) / 2) * math.sqrt(1 / len(ours) + 1 / n)
    for k, name in enumerate("yxhw"):
        grid = np.union1d(ours[:, k], theirs[:, k])
        below = [np.searchsorted(np.sort(v), grid, "right") / len(v) for v in (ours[:, k], theirs[:, k])]
        distance = np.abs(below[0] - below[1]).max()
        assert distance < limit, f"{name}: KS distance {distance:.4f}, limit {limit:.4f}"
    for side, k in ((height, 0), (width, 1)):  # the last position is a position: Kolmogorov-Smirnov would not see that
        ends = [((v[:, k] + v[:, k + 2] == side) & (v[:, k + 2] < side)).any() for v in (ours, theirs)]
        assert ends[0] == ends[1]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 65535), st.integers(1, 65535), st.integers(0, 2**62))
def test_boxes_lie_inside_images_of_any_size(height, width, sample):
    box = Augmentation().draw(sizes(1, height, width), np.array([sample]), seed=1, epoch=1).boxes.astype(np.int64)
    assert (box >= [0, 0, 1, 1]).all() and (box[..., :2] + box[..., 2:] <= [height, width]).all(), box


def test_probabilities_and_ranges():
    """Shares of n = 40,000 images within 5 standard deviations: a false alarm rate of 6e-7 for each."""
    n, a = 40_000, Augmentation(flip_p=0.3)
    d = a.draw(sizes(n), np.arange(n), seed=0, epoch=0)
    jittered = d.hue != 0
    shares = {
        "flip": (d.flips, (0.3, 0.3)),
        "jitter": (jittered, (0.8, 0.8)),
        "grey": (d.saturation == 0, (0.2, 0.2)),
        "blur": (d.blur_sigma > 0, (1.0, 0.1)),
        "solarise": (d.solarise, (0.0, 0.2)),
    }
    for name, (happened, expected) in shares.items():
        for view, p in enumerate(expected):
            assert abs(happened[:, view].mean() - p) <= 5 * math.sqrt(p * (1 - p) / n), (name, view)
    assert np.array_equal(d.brightness != 1, jittered) and np.array_equal(d.contrast != 1, jittered)
    drawn = {
        (0.6, 1.4): (d.brightness[jittered], d.contrast[jittered]),
        (0.8, 1.2): (d.saturation[jittered & (d.saturation > 0)],),
        (-0.1, 0.1): (d.hue[jittered],),
        (0.1, 2.0): (d.blur_sigma[d.blur_sigma > 0],),
    }
    for (low, high), arrays in drawn.items():
        for values in arrays:  # uniform: mean and variance within 5 standard deviations, and the ends are reached
            width = high - low
            assert low <= values.min() + 1e-6 and values.max() <= high + 1e-6
            assert values.min() < low + 0.01 * width and values.max() > high - 0.01 * width
            assert abs(values.mean() - (low + high) / 2) < 5 * width / math.sqrt(12 * len(values))
            assert abs(values.var() - width**2 / 12) < 5 * width**2 / math.sqrt(180 * len(values))
    # What is drawn for one purpose tells nothing about another: correlation of n uniforms, 5 standard deviations.
    first = d.boxes[:, 0, 0], d.boxes[:, 0, 3], d.flips[:, 0], d.blur_sigma[:, 0]
    columns = np.stack([*first, d.flips[:, 1], d.boxes[:, 1, 0]])
    correlation = np.corrcoef(columns) - np.eye(6)
    correlation[0, 1] = correlation[1, 0] = 0  # position and size of one box do depend on each other
    assert np.abs(correlation).max() < 5 / math.sqrt(n)


def test_replacements_are_in_range_and_differ_with_the_attempt():
    chosen = [replacement(5, attempt, 1000, seed=1, epoch=0) for attempt in range(50)]
    assert all(isinstance(s, int) and 0 <= s < 1000 for s in chosen) and len(set(chosen)) > 40
    assert min(chosen) < 100 and max(chosen) >= 900
    assert chosen[7] == replacement(np.int64(5), 7, 1000, seed=1, epoch=0)
    assert chosen != [replacement(5, attempt, 1000, seed=1, epoch=1) for attempt in range(50)]


def test_operations_that_never_happen_are_not_built():
    plain = Augmentation(jitter_p=0, grey_p=0, blur_p=(0, 1), solarise_p=(0, 0.5))
    assert plain.views() == (graph.Augmented(), graph.Augmented(blur=1, solarise=True))
    assert Augmentation(jitter_p=0).views()[0].colour and Augmentation(grey_p=0).views()[0].colour
    factors = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0)
    assert not Augmentation(grey_p=0, **factors).views()[0].colour
    for name in factors:
        assert Augmentation(grey_p=0, **(factors | {name: 0.1})).views()[1].colour


def test_defaults_are_those_of_the_table():
    """APS, appendix: data augmentation of pretraining on ImageNet."""
    assert Augmentation() == Augmentation(
        area=(0.08, 1.0), aspect=(3 / 4, 4 / 3), flip_p=0.5, jitter_p=0.8, brightness=0.4, contrast=0.4, saturation=0.2,
        hue=0.1, grey_p=0.2, blur_p=(1.0, 0.1), blur_sigma=(0.1, 2.0), solarise_p=(0.0, 0.2),
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"area": (0.5, 0.1)}, "^--area \\(0.5, 0.1\\): expected the lower number first"),
        ({"area": (0.0, 1.0)}, "area"),
        ({"area": (0.1, 1.5)}, "area"),
        ({"aspect": (0.75,)}, "two numbers"),
        ({"flip_p": 1.1}, "^--flip-p 1.1: expected"),
        ({"jitter_p": float("nan")}, "jitter-p"),
        ({"brightness": -0.1}, "brightness"),
        ({"hue": 0.6}, "hue"),
        ({"blur_p": 0.5}, "two numbers"),
        ({"blur_sigma": (0.0, 2.0)}, "blur-sigma"),
        ({"solarise_p": (0.0, -0.2)}, "solarise-p"),
        ({"aspect": (1.0, math.inf)}, "aspect"),
        ({"contrast": math.inf}, "contrast"),
        ({"blur_sigma": (1.0, 100.1)}, "blur-sigma"),
    ],
)
def test_augmentation_names_what_is_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**wrong)


def test_what_lies_at_the_ends_of_the_ranges_is_taken():
    for ends in (0.0, 1.0):
        both = {"area": (1.0, 1.0), "aspect": (2.0, 2.0), "blur_sigma": (100.0, 100.0), "blur_p": (ends, ends)}
        Augmentation(**both, flip_p=ends, jitter_p=ends, grey_p=ends, brightness=9 * ends, hue=0.5 * ends)
