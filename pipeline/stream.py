"""The data stream: order, crop boxes and augmentation parameters as pure functions of (seed, epoch, sample id).

Nothing here has a state: a call gives the same numbers on every rank, for every batch size and after every resume.
Philox counters are (sample id low, sample id high, view, block); the key holds seed, epoch and purpose.
"""

import dataclasses
import math
from typing import Any, Protocol

import numpy as np

from kernels.philox import Purpose, philox, split64, stream_key
from pipeline import graph

_ATTEMPTS = 10  # tries for a crop that fits, as torchvision's RandomResizedCrop


class Augments(Protocol):
    """An augmentation, as the loader knows it."""

    def draw(self, sizes: np.ndarray, sample: np.ndarray, seed: int, epoch: int) -> Any:
        """Parameters of ``sample`` (int64 [m]), upright images of ``sizes`` (int [m,2]; h, w), as a function of the
        arguments alone. They have ``boxes``, int32 [m,views,4], ``flips``, bool [m,views], and what the views take."""

    def views(self) -> tuple[graph.View, ...]:
        """The views of the graph, which take what was drawn."""


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What is done to a view; ``blur_p`` and ``solarise_p`` hold one value per view. ValueError when out of range."""

    area: tuple[float, float] = (0.08, 1.0)  # share of the image's area a crop covers
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # width / height of a crop, drawn log-uniformly
    flip_p: float = 0.5  # probability of a horizontal flip
    jitter_p: float = 0.8  # probability of brightness, contrast, saturation and hue, applied in this order
    brightness: float = 0.4  # factor from [max(0, 1 - this), 1 + this]
    contrast: float = 0.4  # factor about the mean luma of the crop, same range
    saturation: float = 0.2  # factor, same range
    hue: float = 0.1  # rotation from [-this, this], turns
    grey_p: float = 0.2  # probability of grey (saturation 0)
    blur_p: tuple[float, float] = (1.0, 0.1)  # probability of a Gaussian blur
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # its standard deviation, pixels of the crop
    solarise_p: tuple[float, float] = (0.0, 0.2)  # probability of inverting values of 128 and more

    def __post_init__(self):
        for name in ("flip_p", "jitter_p", "grey_p", "blur_p", "solarise_p"):
            _require(name, getattr(self, name), lambda p: 0 <= p <= 1, "probabilities in [0, 1]")
        for name in ("brightness", "contrast", "saturation"):
            _require(name, getattr(self, name), lambda x: 0 <= x < math.inf, "a number >= 0")
        _require("hue", self.hue, lambda x: 0 <= x <= 0.5, "turns in [0, 0.5]")
        for name, top in (("area", 1), ("aspect", math.inf), ("blur_sigma", 100)):
            pair = getattr(self, name)
            _require(name, pair, lambda x, top=top: 0 < x <= top and x < math.inf, f"0 < low <= high <= {top}")
            if pair[0] > pair[1]:
                raise ValueError(f"--{name.replace('_', '-')} {pair}: expected the lower number first")

    def draw(self, sizes: np.ndarray, sample: np.ndarray, seed: int, epoch: int) -> "Draw":
        """Parameters of both views of ``sample`` (int64 [m]), upright images of ``sizes`` (int [m,2]; h, w)."""
        a = self
        word = _unit(_words(sample, 3, seed, epoch, Purpose.COLOUR)).transpose(3, 0, 1, 2).reshape(12, -1, 2)
        flip, jitter, grey, blur, solarise = (word[i] for i in range(5))
        jitter = jitter < a.jitter_p

        def between(u, low, high):
            return low + u * (high - low)

        def factor(u, strength):
            return np.where(jitter, between(u, max(0.0, 1 - strength), 1 + strength), 1).astype(np.float32)

        return Draw(
            boxes=_boxes(a, np.asarray(sizes, np.int64), _words(sample, _ATTEMPTS, seed, epoch, Purpose.BOX)),
            flips=flip < a.flip_p,
            brightness=factor(word[5], a.brightness),
            contrast=factor(word[6], a.contrast),
            saturation=np.where(grey < a.grey_p, np.float32(0), factor(word[7], a.saturation)),
            hue=np.where(jitter, between(word[8], -a.hue, a.hue), 0).astype(np.float32),
            blur_sigma=np.where(blur < a.blur_p, between(word[9], *a.blur_sigma), 0).astype(np.float32),
            solarise=solarise < a.solarise_p,
        )

    def views(self) -> tuple[graph.View, ...]:
        """The two views of the graph."""
        jitter = self.jitter_p > 0 and (self.brightness or self.contrast or self.saturation or self.hue)
        colour = bool(jitter or self.grey_p > 0)
        return tuple(graph.Augmented(colour, self.blur_p[i], self.solarise_p[i] > 0) for i in range(2))


def _require(name, value, valid, expected):
    """Raise ValueError unless ``valid`` holds for the number, or for both numbers of the pair, ``value``."""
    pair = name in ("area", "aspect", "blur_p", "blur_sigma", "solarise_p")
    if pair and (not isinstance(value, (tuple, list)) or len(value) != 2):
        right, expected = False, "two numbers"
    else:
        right = all(valid(x) for x in (value if pair else (value,)))
    if not right:
        raise ValueError(f"--{name.replace('_', '-')} {value}: expected {expected}")


@dataclasses.dataclass(frozen=True)
class Draw:
    """The parameters of m images, two views each; neutral values where an operation does not apply."""

    boxes: np.ndarray  # int32 [m,2,4] (y, x, h, w), pixels of the upright image
    flips: np.ndarray  # bool [m,2]
    brightness: np.ndarray  # float32 [m,2] factor
    contrast: np.ndarray  # float32 [m,2] factor about the mean luma
    saturation: np.ndarray  # float32 [m,2] factor; 0 = grey
    hue: np.ndarray  # float32 [m,2] turns
    blur_sigma: np.ndarray  # float32 [m,2] pixels; 0 = no blur
    solarise: np.ndarray  # bool [m,2]


def _words(sample, blocks, seed, epoch, purpose):
    """Uniform words in [0, 2**32) for samples [m] and both views: int64 [4,m,2,blocks]."""
    low, high = split64(np.asarray(sample, np.int64)[:, None, None])
    view, block = np.arange(2, dtype=np.int64)[None, :, None], np.arange(blocks, dtype=np.int64)[None, None, :]
    return np.stack(np.broadcast_arrays(*philox((low, high, view, block), stream_key(seed, epoch, purpose))))


def _unit(words):
    """Words to float64 in (0, 1)."""
    return (words + 0.5) * 2.0**-32


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits n samples: int64 [n], a permutation (sorted by a 64-bit random key)."""
    key, keys = stream_key(seed, epoch, Purpose.ORDER), np.empty(n, np.uint64)
    step = 2**14  # pieces that stay in the cache: 60 instead of 360 ms for 1.28 M samples
    for start in range(0, n, step):
        low, high = split64(np.arange(start, min(start + step, n), dtype=np.int64))
        words = philox((low, high, 0, 0), key)
        keys[start : start + step] = (words[0].astype(np.uint64) << np.uint64(32)) | words[1].astype(np.uint64)
    return np.argsort(keys, kind="stable")


def replacement(sample: int, attempt: int, n: int, seed: int, epoch: int) -> int:
    """The sample in [0, n) that stands in for a bad ``sample``; if it is bad too, the next ``attempt`` has another."""
    return philox((*split64(int(sample)), attempt, 0), stream_key(seed, epoch, Purpose.REPLACEMENT))[0] * n >> 32


def _boxes(a, sizes, words):
    """Random resized crops, the law of torchvision's RandomResizedCrop: int32 [m,2,4] from words [4,m,2,attempts]."""
    height, width = sizes[:, 0, None, None], sizes[:, 1, None, None]
    area = height * width * (a.area[0] + _unit(words[0]) * (a.area[1] - a.area[0]))
    low, high = np.log(a.aspect)
    aspect = np.exp(low + _unit(words[1]) * (high - low))
    w, h = np.rint(np.sqrt(area * aspect)).astype(np.int64), np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    # An integer position: word * choices / 2**32 rounds down to each choice with the same probability, to 1 in 2**16.
    y, x = words[2] * (height - h + 1) >> 32, words[3] * (width - w + 1) >> 32
    first = fits.argmax(-1)[..., None]
    tried = np.stack([np.take_along_axis(v, first, -1)[..., 0] for v in (y, x, h, w)], -1)

    # No attempt fits (very long images): the largest central crop whose aspect is allowed.
    height, width = sizes[:, 0], sizes[:, 1]
    h = np.minimum(height, np.rint(width / a.aspect[0])).astype(np.int64)
    w = np.minimum(width, np.rint(height * a.aspect[1])).astype(np.int64)
    h, w = np.maximum(h, 1), np.maximum(w, 1)
    central = np.stack([(height - h) // 2, (width - w) // 2, h, w], -1)[:, None]
    return np.where(fits.any(-1)[..., None], tried, central).astype(np.int32)
