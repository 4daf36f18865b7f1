"""The dataset used when no data is given: drawn objects whose shape and texture tell the class, written once as JPEG.

An image holds a dozen objects of its one class, scattered over a soft background. Position, size, tilt, colours and
light differ from object to object, so the only things two crops of an image reliably share are the silhouette and the
texture: what contrastive learning keeps is the class. Colours and places are drawn alike for all classes, so a colour
histogram or an untrained network sees little of it. Evidence lies all over the image because a view shows the encoder
a quarter of the patches of a random crop.

Two choices were measured to matter (SimCLR on a quarter of the patches, batch 128, 20-NN). Strong colours on a coloured
backdrop are learnt in place of the class: 18 % untrained, 26 % after 200 steps. Pale ones: 28 and 44 % after 150, with
objects turned by any angle. Tilted only a little, as here: 25 and 62 % after 150.
"""

import fcntl
import functools
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.shown import shown

_VERSION = 1  # raise it when the drawing changes: datasets of another version are drawn anew
_MANIFEST = "toy.json"
_LATTICE = [(np.cos(a), np.sin(a)) for a in (0.0, 2 * np.pi / 3, 4 * np.pi / 3)]


def _folded(u, v, sides):
    """The plane folded onto one slice of a shape with ``sides`` equal corners: along its axis, across it."""
    radius, slice_ = np.hypot(u, v), 2 * np.pi / sides
    angle = np.abs((np.arctan2(v, u) + slice_ / 2) % slice_ - slice_ / 2)
    return radius * np.cos(angle), radius * np.sin(angle)


def _heart(u, v):
    lobes = np.hypot(np.abs(u) - 0.42, v - 0.3) - 0.5
    return np.minimum(lobes, np.maximum(np.abs(u) * 0.8 - v * 0.6 - 0.656, v - 0.1))


def _star(u, v):
    along, across = _folded(u, v, 5)
    return along * 0.6 + across * 0.8 - 0.6


# Coordinates in radians, one period of the pattern being 2 pi -> height, ink where it is positive.
_TEXTURES = {
    "striped": lambda x, y: np.sin(x),
    "checked": lambda x, y: 2 * np.sin(x) * np.sin(y),
    "dotted": lambda x, y: sum(np.cos(a * x + b * y) for a, b in _LATTICE) - 0.2,
    "wavy": lambda x, y: np.sin(x + 2 * np.sin(y)),
    "gridded": lambda x, y: 2 * np.maximum(np.cos(x), np.cos(y)) - 1.2,
    "rippled": lambda x, y: np.sin(np.hypot(x, y)),
    "spoked": lambda x, y: 1.5 * np.sin(9 * np.arctan2(y, x)),
    "swirled": lambda x, y: np.sin(np.hypot(x, y) + 4 * np.arctan2(y, x)),
    "bricked": lambda x, y: 2 * np.maximum(np.cos(2 * y), np.cos(x + np.pi * np.floor(y / np.pi))) - 1.2,
    "tiled": lambda x, y: 2 * sum(np.sin(a * x + b * y) for a, b in _LATTICE),
}
# Coordinates in units of the object's radius, shape [n, side, side] -> about the signed distance to the outline,
# negative inside. ``_unit`` brings all of them to the same area.
_SILHOUETTES = {
    "disc": lambda u, v: np.hypot(u, v) - 1,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) - 0.75,
    "triangle": lambda u, v: _folded(u, v, 3)[0] - 0.55,
    "heart": _heart,
    "cross": lambda u, v: np.maximum(np.minimum(np.abs(u), np.abs(v)) - 0.32, np.maximum(np.abs(u), np.abs(v)) - 0.95),
    "flower": lambda u, v: np.hypot(u, v) - 0.8 - 0.22 * np.cos(6 * np.arctan2(v, u)),
    "ring": lambda u, v: np.abs(np.hypot(u, v) - 0.7) - 0.3,
    "star": _star,
    "hexagon": lambda u, v: _folded(u, v, 6)[0] - 0.85,
    "crescent": lambda u, v: np.maximum(np.hypot(u, v) - 1, 0.75 - np.hypot(u - 0.6, v)),
}
_PAIRS = zip(_TEXTURES.items(), _SILHOUETTES.items(), strict=True)  # a class each, in this order
CLASSES = {f"{textured}-{shape}": (texture, silhouette) for (textured, texture), (shape, silhouette) in _PAIRS}


@functools.cache
def _unit(silhouette) -> float:
    """The radius at which a silhouette covers pi square units, so that no class shows more ink than another."""
    v, u = np.mgrid[-1.5:1.5:300j, -1.5:1.5:300j]
    return float(np.sqrt(np.pi / (9 * (silhouette(u, v) < 0).mean())))


def _palette(rng, n):
    """n colours [n, 3] in 0..1, from pale to strong. Hues are dealt, not drawn: each picture has them all, so that
    a palette does not give away which picture a crop is from, which contrast would learn in place of shapes."""
    hue, strength = (rng.permutation(n)[:, None] + rng.random()) / n, rng.uniform(0.15, 0.6, (n, 1))
    return 1 - strength * np.clip(np.abs((hue * 6 + np.array([0, 4, 2])) % 6 - 3) - 1, 0, 1)


def backdrop(width: int, height: int, rng) -> np.ndarray:
    """A soft background, float32 [H,W,3] in 0..1."""
    picture = Image.fromarray((_palette(rng, 12) * 60 + 80).astype(np.uint8).reshape(3, 4, 3))
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255


def objects(texture, silhouette, centre, radii: tuple[float, float], reach: int, rng):
    """n objects of one texture and silhouette around ``centre`` [n,2] (y, x), with radii (those of the disc of the same
    area) from a range, in pixels. No silhouette reaches further from its centre than ``reach``: 1.56 radii or more.

    Returns the corners int [n,2] (y, x) of squares of 2 * reach pixels a side, the paint in them [n,side,side,3] in
    0..1, and how far the object covers each pixel, [n,side,side,1] in 0..1.
    """
    n = len(centre)
    radius, period = rng.uniform(*radii, (n, 1, 1)), rng.uniform(9.5, 12.5, (n, 1, 1))
    turn = rng.uniform(-0.4, 0.4, (n, 1, 1))  # radians
    light, dark = _palette(rng, n) * rng.uniform(0.7, 1, (n, 1)), _palette(rng, n) * rng.uniform(0.1, 0.45, (n, 1))
    swap = rng.permutation(n)[:, None] % 2 == 0
    ink, ground = (np.where(first, light, dark).astype(np.float32)[:, None, None] for first in (swap, ~swap))

    origin = np.floor(centre).astype(int) - reach
    pixel = (np.arange(2 * reach) + 0.5 + (origin - centre)[..., None]).astype(np.float32)
    dy, dx = pixel[:, 0, :, None], pixel[:, 1, None, :]
    cos, sin, scale = (f.astype(np.float32) for f in (np.cos(turn), np.sin(turn), 2 * np.pi / period))
    along, across = dx * cos + dy * sin, dy * cos - dx * sin
    radius = (radius * _unit(silhouette)).astype(np.float32)
    outline = silhouette(along / radius, across / radius) * radius
    inked = np.clip(0.5 + 1.5 * texture(along * scale, across * scale), 0, 1)[..., None]
    paint = (ground + (ink - ground) * inked) * np.clip(-outline / 2, 0, 1)[..., None]  # darker towards the outline
    return origin, paint, np.clip(0.5 - outline, 0, 1)[..., None]


def paste(canvas: np.ndarray, origin, paint, cover) -> np.ndarray:
    """``canvas`` [H,W,channels] with ``objects`` over it, the last uppermost."""
    side = cover.shape[1]
    canvas = np.pad(canvas, ((side, side), (side, side), (0, 0)))
    for i, (y, x) in enumerate(origin + side):
        here = canvas[y : y + side, x : x + side]
        here += cover[i] * (paint[i] - here)
    return canvas[side:-side, side:-side]


def draw(texture, silhouette, rng) -> Image.Image:
    """One picture: objects of one texture and silhouette, everything else from ``rng``."""
    width, height = (int(n) for n in rng.integers(88, 113, 2))
    canvas = backdrop(width, height, rng)

    # A jittered grid at a random offset: no part of the picture is without evidence, and no place is told from another.
    pitch, reach = 34, 36  # pixels
    cells = rng.permutation(np.stack(np.mgrid[0 : height // pitch + 2, 0 : width // pitch + 2], -1).reshape(-1, 2))
    centre = (cells + rng.uniform(-0.25, 0.25, cells.shape) - rng.random(2)) * pitch
    centre = centre[((centre > -reach) & (centre < np.array([height, width]) + reach)).all(1)]
    picture = paste(canvas, *objects(texture, silhouette, centre, (17, 23), reach, rng))
    return Image.fromarray((picture * 255).astype(np.uint8))


def _write(path: Path, seed: int, split: int, label: int, number: int) -> None:
    """Write one image, which is a function of (seed, split, class, number)."""
    draw(*list(CLASSES.values())[label], np.random.default_rng([seed, split, label, number])).save(path, optimize=True)


def make_toy(root: Path, *, train: int = 4000, test: int = 1000, seed: int = 0) -> tuple[Path, Path]:
    """Folders of training and test images below ``root``, one folder per class; drawn if they are not there yet.

    ``train`` and ``test`` count images over all classes.
    """
    root = Path(root)
    if min(train, test) < len(CLASSES) or train % len(CLASSES) or test % len(CLASSES):
        raise ValueError(f"train={train}, test={test}: both must be positive multiples of {len(CLASSES)}, the classes")

    def write(folder: Path) -> None:
        jobs = []
        for split, (name, count) in enumerate((("train", train), ("test", test))):
            for label, of in enumerate(CLASSES):
                (folder / name / of).mkdir(parents=True)
                images = range(count // len(CLASSES))
                jobs += [(folder / name / of / f"{number:04d}.jpg", seed, split, label, number) for number in images]
        # Threads suffice: numpy and the JPEG encoder hold no interpreter lock over arrays of this size.
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            with shown("the generated dataset", "drawing images") as progress:
                for done, _ in enumerate(pool.map(lambda job: _write(*job), jobs), 1):
                    progress(done, len(jobs))
        finally:
            pool.shutdown(cancel_futures=True)  # so that Ctrl-C ends it

    write_once(root, {"version": _VERSION, "train": train, "test": test, "seed": seed}, write)
    return root / "train", root / "test"


def write_once(root: Path, manifest: dict, write: Callable[[Path], None]) -> None:
    """Has ``write`` fill a folder that becomes ``root``, unless that holds a set of the same ``manifest`` already.

    The set appears under its name only when complete, so a killed run leaves nothing to mistake for one, and processes
    calling at once wait for the first. FileExistsError where ``root`` is something else.
    """
    manifest = json.dumps(manifest)
    root.parent.mkdir(parents=True, exist_ok=True)
    with open(root.with_name(f".{root.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system, whichever way this process ends
        if (root / _MANIFEST).exists() and (root / _MANIFEST).read_text() == manifest:
            return
        if root.exists() and not (root / _MANIFEST).exists():
            raise FileExistsError(f"{root} exists and is not a toy dataset: remove it or choose another folder")

        unfinished, outdated = root.with_name(f".{root.name}.new"), root.with_name(f".{root.name}.old")
        for folder in (unfinished, outdated):
            shutil.rmtree(folder, ignore_errors=True)
        write(unfinished)
        (unfinished / _MANIFEST).write_text(manifest)
        if root.exists():
            root.rename(outdated)
        unfinished.rename(root)
        shutil.rmtree(outdated, ignore_errors=True)
