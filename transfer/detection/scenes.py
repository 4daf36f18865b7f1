"""The detection dataset used when no data is given: scenes of drawn objects, in COCO's format with their masks.

The objects are those of ``toy.py``, of four of its classes, and lie as little as possible over each other: what is
hidden of one is missing in its mask. Every eighth scene is empty.
"""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.toy import CLASSES, backdrop, objects, paste, write_once

_VERSION = 1  # raise it when the drawing changes: datasets of another version are drawn anew
KINDS = ("striped-disc", "checked-square", "swirled-star", "tiled-crescent")
_PITCH, _RADII, _REACH = 56, (16, 26), 41  # pixels


def draw_scene(number: int, rng) -> tuple[Image.Image, list[tuple[int, np.ndarray]]]:
    """A picture, and of each object in it the position of its class in KINDS and its mask, bool [H,W]."""
    width, height = (int(n) for n in rng.integers(112, 145, 2))
    canvas = backdrop(width, height, rng)
    cells = rng.permutation(np.stack(np.mgrid[0:2, 0:2], -1).reshape(-1, 2))
    count = 0 if number % 8 == 7 else int(rng.integers(1, 5))
    found: list[tuple[int, np.ndarray]] = []
    for cell in cells[:count]:
        room = np.array([height, width]) - 2 * _PITCH
        centre = (cell + 0.5) * _PITCH + rng.uniform(0, 1, 2) * room
        kind = int(rng.integers(len(KINDS)))
        origin, paint, cover = objects(*CLASSES[KINDS[kind]], centre[None], _RADII, _REACH, rng)
        canvas = paste(canvas, origin, paint, cover)
        mask = paste(np.zeros((height, width, 1), np.float32), origin, np.ones_like(cover), cover)[..., 0] > 0.5
        found = [(other, hidden & ~mask) for other, hidden in found] + [(kind, mask)]
    return Image.fromarray((canvas * 255).astype(np.uint8)), found


def make_scenes(root: Path, *, train: int = 800, evaluation: int = 200, seed: int = 0) -> dict[str, tuple[Path, Path]]:
    """Annotations and image folder of "train" and "eval" below ``root``; drawn if they are not there yet.

    ``train`` and ``evaluation`` count images; each is a function of (seed, split, number).
    """
    root = Path(root)

    def write(folder: Path) -> None:
        for split, (name, count) in enumerate((("train", train), ("eval", evaluation))):
            (folder / name).mkdir(parents=True)
            images, annotations = [], []
            for number in range(count):
                picture, found = draw_scene(number, np.random.default_rng([seed, split, number]))
                file = f"{number:05d}.jpg"
                picture.save(folder / name / file, quality=90)
                images.append({"id": number, "file_name": file, "width": picture.width, "height": picture.height})
                for kind, mask in found:
                    ys, xs = np.nonzero(mask)
                    box = [xs.min(), ys.min(), xs.max() + 1 - xs.min(), ys.max() + 1 - ys.min()]
                    annotations.append({
                        "id": len(annotations) + 1, "image_id": number, "category_id": kind + 1, "iscrowd": 0,
                        "bbox": [int(n) for n in box], "area": len(ys), "segmentation": _rle(mask),
                    })  # fmt: skip
            categories = [{"id": kind + 1, "name": name} for kind, name in enumerate(KINDS)]
            whole = {"images": images, "annotations": annotations, "categories": categories}
            (folder / f"{name}.json").write_text(json.dumps(whole))

    write_once(root, {"scenes": _VERSION, "train": train, "eval": evaluation, "seed": seed}, write)
    return {name: (root / f"{name}.json", root / name) for name in ("train", "eval")}


def _rle(mask: np.ndarray) -> dict:
    """A mask [H,W] as COCO's uncompressed run lengths: down the columns, those of zeros first."""
    flat = mask.T.ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff(np.concatenate([[0] if flat[0] else [], [0], edges, [flat.size]]))
    return {"size": list(mask.shape), "counts": [int(n) for n in runs]}
