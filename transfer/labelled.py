"""Augmentation of training with labels: one view, by a crop or a shift, a flip and RandAugment.

As in ``stream``, every parameter is a pure function of (seed, epoch, sample id). The operations of RandAugment
(arXiv 1909.13719) are DALI's own (``nvidia.dali.auto_aug``), chosen here rather than by its random numbers; timm's list
has invert and a solarisation by addition beside them, and no identity.
"""

import dataclasses
import math
import warnings

import numpy as np

from kernels.philox import Purpose, philox, split64, stream_key
from pipeline import graph, stream
from run.recipes import check

OPERATIONS, IDENTITY = 14, 13  # in DALI's suite of RandAugment: their number, and that of the one that does nothing
BINS = 31  # their magnitudes: 0 is none, 30 is full


@dataclasses.dataclass(frozen=True)
class LabelledAugmentation:
    """What is done to an image; the names are timm's where it has the same. ValueError when out of range."""

    area: tuple[float, float] = (0.08, 1.0)  # share of the image's area a crop covers
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # width / height of a crop, drawn log-uniformly
    padding: int = 0  # pixels: above 0, the whole image is shifted by up to this, over black, instead of a crop
    flip_p: float = 0.5  # probability of a horizontal flip
    operations: int = 2  # of RandAugment, one after the other; 0 = none
    operation_p: float = 0.5  # probability of each of them
    magnitude: float = 9.0  # mean strength, of 10
    magnitude_std: float = 0.5  # its standard deviation, of 10

    def __post_init__(self):
        for name, top in (("area", 1), ("aspect", math.inf)):
            low, high = getattr(self, name)
            check(0 < low <= high <= top and high < math.inf, self, name, f"0 < low <= high <= {top}")
        tops = {"flip_p": 1, "operation_p": 1, "magnitude": 10, "magnitude_std": 10, "padding": 1024, "operations": 8}
        for name, top in tops.items():
            check(0 <= getattr(self, name) <= top, self, name, f"0 to {top}")

    def draw(self, sizes: np.ndarray, sample: np.ndarray, seed: int, epoch: int) -> "LabelledDraw":
        """Parameters of ``sample`` (int64 [m]), upright images of ``sizes`` (int [m,2]; h, w)."""
        a, sizes = self, np.asarray(sizes, np.int64)
        cropped = stream.Augmentation(area=a.area, aspect=a.aspect, flip_p=a.flip_p)
        drawn = cropped.draw(sizes, sample, seed, epoch)
        boxes = drawn.boxes[:, :1]
        if a.padding:
            boxes = np.concatenate([np.zeros_like(sizes), sizes], 1)[:, None].astype(np.int32)
        low, high = split64(np.asarray(sample, np.int64)[:, None])
        key = stream_key(seed, epoch, Purpose.LABELLED)
        words = np.stack(np.broadcast_arrays(*philox((low, high, 0, np.arange(1 + 2 * a.operations)[None]), key)))
        shifts = (words[:2, :, 0] * (2 * a.padding + 1) >> 32) - a.padding
        which, what = words[:, :, 1::2], (words[:, :, 2::2] + 0.5) * 2.0**-32  # [4,m,operations]
        applied = (which[1] + 0.5) * 2.0**-32 < a.operation_p
        normal = np.sqrt(-2 * np.log(what[0])) * np.cos(2 * math.pi * what[1])  # Box and Muller
        magnitude = np.rint((a.magnitude + a.magnitude_std * normal) / 10 * (BINS - 1)).clip(0, BINS - 1)
        number = np.where(applied, which[0] * OPERATIONS >> 32, IDENTITY)
        operations = np.stack([number, magnitude, which[2] >> 31], -1).astype(np.int32)
        return LabelledDraw(boxes, drawn.flips[:, :1], np.ascontiguousarray(shifts.T, np.int32), operations)

    def views(self) -> tuple[graph.View]:
        """The one view of the graph."""
        return (LabelledView(shift=self.padding > 0, operations=self.operations),)


@dataclasses.dataclass(frozen=True)
class LabelledDraw:
    """The parameters of m images."""

    boxes: np.ndarray  # int32 [m,1,4] (y, x, h, w), pixels of the upright image
    flips: np.ndarray  # bool [m,1]
    shifts: np.ndarray  # int32 [m,2] (y, x), pixels of the result
    operations: np.ndarray  # int32 [m,operations,3]: number in DALI's suite, magnitude to 30, sign (1 = negative)


@dataclasses.dataclass(frozen=True)
class LabelledView(graph.View):
    """A view of training with labels: a shift over black, then RandAugment."""

    shift: bool
    operations: int  # of RandAugment

    @property
    def inputs(self):
        return self.shift + (self.operations > 0)

    def feeds(self, drawn, number):
        return [drawn.shifts] * self.shift + [drawn.operations] * (self.operations > 0)

    def apply(self, image, arrays, *, side, gpu_form):
        from nvidia.dali import fn

        if self.shift:
            where = {"axes": [0, 1], "out_of_bounds_policy": "pad", "fill_values": 0}
            image = fn.slice(image, start=next(arrays), shape=[side, side], **where)
        if self.operations:
            image = _rand_augment(image, next(arrays), self.operations, side)
        return image


def _rand_augment(image, chosen, count, side):
    """RandAugment on an image [side,side,3] by DALI's operations; ``chosen`` [count,3]: number, magnitude and sign.

    At full magnitude: 30 degrees, shear 0.3, shift by 0.45 of the side, factors 1 +- 0.9, 4 bits, threshold 0.
    """
    from nvidia.dali.auto_aug import rand_augment
    from nvidia.dali.auto_aug.core import select, signed_bin

    suite = rand_augment.get_rand_augment_suite(max_translate_abs=round(0.45 * side))
    assert len(suite) == OPERATIONS and suite[IDENTITY].name == "identity"
    with warnings.catch_warnings(record=True):  # kept from the user: DALI's, that it has deprecated what it uses here
        for number in range(count):
            magnitude = signed_bin(chosen[number, 1], random_sign=chosen[number, 2])
            how = {"magnitude_bin": magnitude, "num_magnitude_bins": BINS, "fill_value": 128}
            image = select(suite, chosen[number, 0], data=image, **how)
    return image
