"""The view of training with labels: what is drawn, and what DALI makes of it."""

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
    """Whatever the batch, the threads or where the run was resumed."""
    index, _ = pictures
    a = LabelledAugmentation(padding=1, operations=1, operation_p=1.0, flip_p=0)
    found = list(loader(index, a).batches(0, 48))
    plain = loader(index, LabelledAugmentation(padding=1, operations=0, flip_p=0)).batches(0, 48)
    seen = []
    for position, (batch, before) in enumerate(zip(found, plain, strict=True)):
        sample = batch.sample.numpy()
        operations = a.draw(index.sizes[sample], sample, 1, position // 4).operations[:, 0]
        for view, x, (number, magnitude, sign) in zip(batch.views[0], before.views[0], operations, strict=True):
            x, strength = x.double(), magnitude / (BINS - 1)
            expected = {
                IDENTITY: x,
                5: (x * (1 + 0.9 * strength * (1 - 2 * sign))).clamp(0, 255),  # brightness
                10: torch.where(x >= 256 - 256 * strength, 255 - x, x),  # solarise
            }.get(number)
            if expected is not None:
                assert (view - expected).abs().max() <= 0.51
                seen.append(number)
            elif number != 12:  # DALI's contrast to the full range, which these images have
                assert (view.double() != x).any()
    assert set(seen) == {IDENTITY, 5, 10}
    for one, other in zip(found[17:20], loader(index, a, threads=3).batches(17, 20), strict=True):
        assert torch.equal(one.views[0], other.views[0])
