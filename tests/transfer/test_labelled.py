"""The view of training with labels: what is drawn, and what DALI makes of it."""

import math
import re
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline import Index, Loader
from transfer.labelled import BINS, IDENTITY, OPERATIONS, LabelledAugmentation

CPU = torch.device("cpu")


def test_draws_follow_their_laws():
    sizes = np.tile(np.int64([40, 60]), (20_000, 1))
    a = LabelledAugmentation(padding=4, magnitude_std=1)
    drawn = a.draw(sizes, np.arange(20_000), seed=3, epoch=5)
    number, magnitude, sign = drawn.operations.transpose(2, 0, 1).astype(np.float64)
    # Each position by itself: identity is drawn half the time, and else as one of fourteen.
    share = np.stack([(number == operation).mean(0) for operation in range(OPERATIONS)])
    expected = np.full((OPERATIONS, 1), 0.5 / OPERATIONS)
    expected[IDENTITY] += 0.5
    assert np.abs(share - expected).max() < 0.015
    assert np.abs(magnitude.mean(0) - 27).max() < 0.6 and magnitude.max() == BINS - 1
    assert np.abs(sign.mean(0) - 0.5).max() < 0.015 and set(np.unique(sign)) == {0, 1}
    assert abs(np.corrcoef(number.T)[0, 1]) < 0.03 and abs(np.corrcoef(magnitude[:, 0], number[:, 0])[0, 1]) < 0.03
    applied = number != IDENTITY
    assert abs(sign[applied].mean() - 0.5) < 0.015
    assert [np.abs((drawn.shifts == s).mean(0) - 1 / 9).max() < 0.01 for s in range(-4, 5)] == [True] * 9
    assert (drawn.boxes == [0, 0, 40, 60]).all() and abs(drawn.flips.mean() - 0.5) < 0.015

    some = np.array([17, 4, 1999])
    again = a.draw(sizes[some], some, seed=3, epoch=5)
    assert (again.operations == drawn.operations[some]).all() and (again.shifts == drawn.shifts[some]).all()
    other = a.draw(sizes[some], some, seed=3, epoch=6)
    assert (again.operations != other.operations).any()
    half = LabelledAugmentation(area=(0.5, 0.5)).draw(sizes, np.arange(20_000), seed=3, epoch=5).boxes[:, 0]
    assert abs((half[:, 2] * half[:, 3]).mean() / 2400 - 0.5) < 0.02


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    images = rng.integers(1, 256, (16, 16, 16, 3), dtype=np.uint8)
    for number, image in enumerate(images):
        (root / "ab"[number % 2]).mkdir(exist_ok=True)
        Image.fromarray(image).save(root / "ab"[number % 2] / f"{number:02}.png")
    index = Index.scan(root)
    order = [int(path[2:4]) for path in index.paths]
    return index, images[order]


def loader(index, augmentation, threads=1):
    return Loader(index, augmentation, image_size=16, batch_size=4, seed=1, device=CPU, threads=threads)


def test_magnitudes_are_normal_and_end_at_none_and_full():
    """Of both operations alike, in bins of a thirtieth, each with its share to 5 standard deviations."""
    n = 20_000
    for mean, deviation in ((5.0, 1.5), (1.0, 2.0), (9.0, 2.0), (0.0, 0.0), (10.0, 0.0), (7.0, 0.0)):
        a = LabelledAugmentation(magnitude=mean, magnitude_std=deviation)
        drawn = a.draw(np.full((n, 2), 32), np.arange(n), seed=2, epoch=1).operations[..., 1]
        assert drawn.min() >= 0 and drawn.max() <= BINS - 1
        if not deviation:
            assert (drawn == 3 * mean).all()
            continue
        edges = np.array([-math.inf, *np.arange(0.5, BINS - 1), math.inf]) / 3
        below = [0.5 * (1 + math.erf((edge - mean) / deviation / math.sqrt(2))) for edge in edges]
        shares = np.diff(below)
        found = np.stack([np.bincount(column, minlength=BINS) / n for column in drawn.T])
        assert (np.abs(found - shares) <= 5 * np.sqrt(shares * (1 - shares) / n) + 1e-4).all()
        assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.04


def test_defaults_are_those_of_the_field():
    """timm's rand-m9-mstd0.5, two operations, each with probability 1/2; crops as everywhere."""
    assert LabelledAugmentation() == LabelledAugmentation(
        area=(0.08, 1.0), aspect=(3 / 4, 4 / 3), padding=0, flip_p=0.5, operations=2, operation_p=0.5, magnitude=9.0,
        magnitude_std=0.5,
    )  # fmt: skip


BOUNDS = {  # option: values that are taken, values that are refused
    "area": (((0.1, 1.0), (1.0, 1.0)), ((0.0, 1.0), (0.5, 0.4), (0.5, 1.1))),
    "aspect": (((0.1, 9.0), (2.0, 2.0)), ((0.0, 1.0), (0.5, 0.4), (0.5, math.inf))),
    "flip_p": ((0, 0.5, 1), (-0.1, 1.1, math.nan)),
    "operation_p": ((0, 0.5, 1), (-0.1, 1.1, math.nan)),
    "magnitude": ((0, 9, 10), (-0.1, 10.1, math.nan)),
    "magnitude_std": ((0, 9, 10), (-0.1, 10.1, math.nan)),
    "padding": ((0, 1024), (-1, 1025)),
    "operations": ((0, 8), (-1, 9)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_values_out_of_range_are_refused_by_name(name):
    taken, refused = BOUNDS[name]
    for value in taken:
        assert getattr(LabelledAugmentation(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=re.escape(f"--{name.replace('_', '-')} {value}: expected 0 ")):
            LabelledAugmentation(**{name: value})


def test_a_shift_is_a_crop_of_the_padded_image(pictures):
    index, images = pictures
    a = LabelledAugmentation(padding=4, operations=0)
    for batch in loader(index, a).batches(0, 4):
        sample = batch.sample.numpy()
        drawn = a.draw(index.sizes[sample], sample, 1, 0)
        for view, i, (y, x), (flip,) in zip(batch.views[0], sample, drawn.shifts, drawn.flips, strict=True):
            padded = np.pad(images[i][:, ::-1] if flip else images[i], ((4, 4), (4, 4), (0, 0)))
            assert (view.numpy() == padded[4 + y : 20 + y, 4 + x : 20 + x]).all()
        assert (batch.label.numpy() == index.labels[sample]).all()


def test_rand_augment_does_what_was_drawn(pictures):
    """Whatever the batch, the threads or where the run was resumed. At full magnitude: shifts of 0.45 of the side, over
    grey; four bits; everything inverted."""
    index, _ = pictures
    a = LabelledAugmentation(padding=1, operations=1, operation_p=1.0, flip_p=0, magnitude=10, magnitude_std=4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # of the library that DALI parses with, from Python 3.13 on
        found = list(loader(index, a).batches(0, 48))
    assert not warned
    plain = loader(index, LabelledAugmentation(padding=1, operations=0, flip_p=0)).batches(0, 48)
    seen = set()
    for position, (batch, before) in enumerate(zip(found, plain, strict=True)):
        sample = batch.sample.numpy()
        operations = a.draw(index.sizes[sample], sample, 1, position // 4).operations[:, 0]
        for view, x, (number, magnitude, sign) in zip(batch.views[0], before.views[0], operations, strict=True):
            x, strength = x.double(), magnitude / (BINS - 1)
            expected = {
                IDENTITY: x,
                5: (x * (1 + 0.9 * strength * (1 - 2 * sign))).clamp(0, 255),  # brightness
                10: torch.where(x >= 256 - 256 * strength, 255 - x, x),  # solarise
            }
            if strength == 1:
                by = -7 if sign else 7
                around = torch.full((30, 30, 3), 128.0, dtype=torch.double)
                around[7:23, 7:23] = x
                expected |= {0: around[7:23, 7 - by : 23 - by], 1: around[7 - by : 23 - by, 7:23], 9: x // 16 * 16}
            if number in expected:
                assert (view - expected[number]).abs().max() <= 0.51
                seen.add((number, bool(sign)) if number in (0, 1, 5) else number)
            elif number != 12 and strength > 0.3:  # DALI's contrast to the full range, which these images have
                assert (view.double() != x).any()
    assert seen == {IDENTITY, 9, 10, *((number, sign) for number in (0, 1, 5) for sign in (False, True))}
    for one, other in zip(found[17:20], loader(index, a, threads=3).batches(17, 20), strict=True):
        assert torch.equal(one.views[0], other.views[0])
