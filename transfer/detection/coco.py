"""Detection data in COCO's format (https://cocodataset.org/#format-data): what there is.

The annotations are checked as a whole when they are read, so that a file which is not what it should be is refused in
one line before any work, and never reaches the C code of pycocotools, which a number that is not finite brings down.
pycocotools is imported where it is used: it is of the extra ``coco``.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline import pictures, scan
from pipeline.headers import opened

# In a file_name: what no name of a file can hold, and what would be read as something else than an image.
_NO_IMAGE = re.compile(r"\0|[\ud800-\udc7f\udd00-\udfff]|^s3://|\.tar$", re.IGNORECASE)
MAX_PIXELS = 178_956_970  # of an image: where Pillow suspects an attack


class CocoData:
    """The images of an annotation file, and what is in them; as an ``Index`` it has ``root``, ``paths`` (the files, in
    the order of the annotations, below ``root``), ``classes``, ``rejected`` (none) and ``fingerprint`` (of the file).

    ``categories``: {id: name}, in the order of the ids; the label of a category is its place in it, from 1. ``images``:
    (id, file, height, width) in the order of the file. ``unusable``: objects that cannot be trained on, because their
    box or all of their polygons have no area, or none within the image; the evaluation has them as they are.
    ``usable``: those that can, crowds not among them.
    """

    rejected: Mapping[str, str] = MappingProxyType({})
    reader = "torchvision"

    def __init__(self, annotations: Path, images: Path):
        """ValueError or OSError where the file is not in COCO's format."""
        self.annotations, self.root = annotations, images
        whole, self.fingerprint = _read(annotations)
        self.categories = {
            number: _typed(category, "name", str, f"{annotations}: category {number}")
            for number, category in sorted(_by_id(whole, "categories", annotations).items())
        }
        if len(set(self.categories.values())) < len(self.categories) or not self.categories:
            raise ValueError(f"{annotations} has no categories, or two of one name; expected one name for each")
        self.classes = tuple(self.categories.values())
        self.labels = {number: label for label, number in enumerate(self.categories, 1)}
        found = _by_id(whole, "images", annotations)
        self.images = [_image(number, image, annotations) for number, image in found.items()]
        if not self.images:
            raise ValueError(f"{annotations} has no images; expected one or more")
        self.paths = [name for _, name, _, _ in self.images]
        self.usable = self.unusable = 0
        position = {number: place for place, (number, *_) in enumerate(self.images)}
        per_image: list[list[dict]] = [[] for _ in self.images]
        for number, annotation in _by_id(whole, "annotations", annotations).items():
            what = f"{annotations}: annotation {number}"
            image = _typed(annotation, "image_id", int, what)
            if image not in position:
                raise ValueError(f"{what} is of image {image}; expected the id of one of the images")
            if _typed(annotation, "category_id", int, what) not in self.labels:
                raise ValueError(f"{what} is of category {annotation['category_id']}; expected one of the categories")
            height, width = self.images[position[image]][2:]
            one = _object(annotation, height, width, what)
            per_image[position[image]].append(one)
            usable = _usable(one, height, width)
            self.unusable += not usable
            self.usable += usable and not one["iscrowd"]
        # One block of bytes, because workers share it: of Python objects each would soon have a copy of its own.
        packed = [json.dumps(objects).encode() for objects in per_image]
        self._ends = np.cumsum([len(part) for part in packed])
        self._packed = np.frombuffer(b"".join(packed), np.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def keep(self, path: Path, *, anew: bool) -> None:
        """Nothing: annotations that have changed are other ones."""

    def differing(self, path: Path, images: int) -> str:
        """What to say where a run was begun with other annotations than these."""
        return f"other annotations than {self.annotations}; expected the same --train-annotations or another --output"

    def check(self) -> dict[int, str]:
        """{position: reason} of the images that are missing, or whose headers say that they are no image or of another
        size than annotated, by the rules of ``Index``. A file in the page cache takes 0.03 to 0.1 ms on one core."""
        found = zip(scan.read(self.root, self.paths, None, len(self)), self.images, strict=True)
        checked = {place: _wrong(size, *about[2:]) for place, (size, about) in enumerate(found)}
        return {place: reason for place, reason in checked.items() if reason}

    def objects(self, position: int) -> list[dict[str, Any]]:
        """The checked annotations of an image, crowds among them."""
        start = self._ends[position - 1] if position else 0
        return json.loads(self._packed[start : self._ends[position]].tobytes())

    def truth(self) -> list[dict[str, Any]]:
        """All annotations, as pycocotools needs them for an evaluation."""
        from pycocotools import mask as rle

        found: list[dict[str, Any]] = []
        for position, (number, _, height, width) in enumerate(self.images):
            for one in self.objects(position):
                runs = _runs(one["segmentation"], height, width)
                known = {"id": len(found) + 1, "image_id": number, "segmentation": runs}  # an id of 0 would never count
                found.append({"area": float(rle.area(runs))} | one | known)
        return found

    def read(self, position: int) -> Tensor:
        """The upright image, uint8 [3,H,W]; ValueError or OSError where it cannot be read or has another size."""
        _, name, height, width = self.images[position]
        try:
            with open(self.root / name, "rb", opener=opened) as file:
                data = file.read()
        except OSError as error:
            raise OSError(error.strerror or str(error)) from None
        image = pictures.read(data)
        if reason := _wrong(list(image.shape[:2]), height, width):
            raise ValueError(reason)
        return torch.from_numpy(image.copy()).permute(2, 0, 1)

    def masks(self, position: int) -> tuple[Tensor, Tensor]:
        """Labels, int64 [n], and masks, uint8 [n,H,W], of the n objects of an image that can be trained on."""
        from pycocotools import mask as rle

        _, _, height, width = self.images[position]
        objects = [one for one in self.objects(position) if not one["iscrowd"] and _usable(one, height, width)]
        labels = torch.tensor([self.labels[one["category_id"]] for one in objects], dtype=torch.int64)
        if not objects:
            return labels, torch.zeros(0, height, width, dtype=torch.uint8)
        runs = [_runs(one["segmentation"], height, width) for one in objects]
        return labels, torch.from_numpy(rle.decode(runs)).permute(2, 0, 1)


# ---- Checks


def _read(path: Path) -> tuple[dict[str, Any], str]:
    try:
        data = path.read_bytes()
        whole = json.loads(data)
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}); expected annotations in COCO's format") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); expected annotations in COCO's format") from None
    if not isinstance(whole, dict):
        raise ValueError(f"{path} holds a {type(whole).__name__}; expected images, annotations and categories")
    return whole, hashlib.sha256(data).hexdigest()


def _by_id(whole: dict[str, Any], key: str, path: Path) -> dict[int, dict[str, Any]]:
    entries = whole.get(key)
    if not isinstance(entries, list):
        raise ValueError(f"{path} has no list of {key}; expected images, annotations and categories")
    found: dict[int, dict[str, Any]] = {}
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: {key}[{place}] is {entry!r:.50}; expected an object")
        number = entry.get("id")
        if type(number) is not int or number in found:
            why = f"as {number!r:.50}" if type(number) is not int else "twice"
            raise ValueError(f"{path}: {key}[{place}] has its id {why}; expected an integer of its own")
        found[number] = entry
    return found


def _typed(entry: dict[str, Any], key: str, kind: type, what: str) -> Any:
    if type(entry.get(key)) is not kind:
        raise ValueError(f"{what} has {key} {entry.get(key)!r}; expected {kind.__name__}")
    return entry[key]


def _image(number: int, image: dict[str, Any], path: Path) -> tuple[int, str, int, int]:
    what = f"{path}: image {number}"
    name, height, width = (_typed(image, *part, what) for part in (("file_name", str), ("height", int), ("width", int)))
    if _NO_IMAGE.search(name):
        raise ValueError(f"{what} has file_name {name!r}; expected the path of an image")
    if min(height, width) < 1 or height * width > MAX_PIXELS:
        raise ValueError(f"{what} has {width} x {height} pixels; expected 1 to {MAX_PIXELS:,}")
    return number, name, height, width


def _object(annotation: dict[str, Any], height: int, width: int, what: str) -> dict[str, Any]:
    """What is used of an annotation, checked."""
    box, crowd, shape = annotation.get("bbox"), annotation.get("iscrowd", 0), annotation.get("segmentation")
    if _finite(box) is None or len(box) != 4:
        raise ValueError(f"{what} has bbox {box!r}; expected [x, y, width, height]")
    if crowd not in (0, 1):
        raise ValueError(f"{what} has iscrowd {crowd!r}; expected 0 or 1")
    if isinstance(shape, dict):
        _check_runs(shape, height, width, what)
    elif isinstance(shape, list):
        shape = [_polygon(polygon, max(height, width), what) for polygon in shape]
        shape = [polygon for polygon in shape if len(polygon) >= 6]  # three points
    else:
        raise ValueError(f"{what} has segmentation {shape!r}; expected polygons or run lengths: masks are trained on")
    checked = {"category_id": annotation["category_id"], "bbox": box, "iscrowd": int(crowd), "segmentation": shape}
    area = annotation.get("area")
    if area is not None and _finite([area]) is None:
        raise ValueError(f"{what} has area {area!r}; expected a number of pixels")
    return checked if area is None else checked | {"area": area}


def _finite(numbers: Any) -> np.ndarray | None:
    """A list of finite numbers as an array; None for anything else."""
    if not isinstance(numbers, list) or not all(type(number) in (int, float) for number in numbers):
        return None
    try:
        array = np.array(numbers, np.float64)
    except OverflowError:
        return None
    return array if np.isfinite(array).all() else None


def _polygon(polygon: Any, side: int, what: str) -> list[float]:
    points = _finite(polygon)
    if points is None or len(points) % 2:
        raise ValueError(f"{what} has a polygon that is no list of x, y, x, y, ...")
    if len(points) and (points.min() < -side or points.max() > 2 * side):
        raise ValueError(f"{what} has a polygon from {points.min():g} to {points.max():g}, far beyond its image")
    return polygon


def _check_runs(shape: dict[str, Any], height: int, width: int, what: str) -> None:
    counts = shape.get("counts")
    if shape.get("size") != [height, width]:
        raise ValueError(f"{what} has run lengths of size {shape.get('size')!r}; expected [{height}, {width}]")
    runs = list(_unpacked(counts)) if isinstance(counts, str) else counts
    right = isinstance(runs, list) and all(type(run) is int and run >= 0 for run in runs)
    if not right or sum(runs) != height * width:
        raise ValueError(f"{what} has run lengths that do not make up its {height} x {width} pixels")


def _unpacked(counts: str) -> Iterator[int]:
    """The run lengths in pycocotools' compressed form: five bits a character, the least first, after 48 is subtracted;
    32 says that there are more to the number, the highest bit of the last gives its sign. From the fourth on they are
    differences to the last but one. Ends with -1 at what it cannot be."""
    runs: list[int] = []
    number = bits = 0
    for character in counts:
        code = ord(character) - 48
        if not 0 <= code < 64 or bits > 30:
            yield -1
            return
        number |= (code & 31) << bits
        bits += 5
        if code < 32:
            number -= (code & 16) << bits - 4
            runs.append(number + (runs[-2] if len(runs) > 2 else 0))
            yield runs[-1]
            number = bits = 0
    if bits:
        yield -1


def _wrong(found: list[int] | str, height: int, width: int) -> str:
    """What is wrong with an image that should have this height and width; "" if nothing. ``found``: those that it has,
    or why it is no image."""
    if isinstance(found, str):
        return found
    if found == [height, width]:
        return ""
    return f"is {found[1]} pixels wide and {found[0]} high, not {width} and {height} as annotated"


def _usable(one: dict[str, Any], height: int, width: int) -> bool:
    """Whether an object has an area, of which box and polygons say that some lies within the image."""
    x, y, w, h = one["bbox"]
    shape = one["segmentation"]

    def within(left, right, top, bottom):
        return left < width and right > 0 and top < height and bottom > 0

    if min(w, h) <= 0 or not shape or not within(x, x + w, y, y + h):
        return False
    polygons = shape if isinstance(shape, list) else []  # run lengths are of the image
    return not polygons or any(within(min(p[::2]), max(p[::2]), min(p[1::2]), max(p[1::2])) for p in polygons)


def _runs(shape: list | dict, height: int, width: int) -> dict:
    """The mask of an object in pycocotools' compressed form."""
    from pycocotools import mask as rle

    if isinstance(shape, list) and shape:
        return rle.merge(rle.frPyObjects(shape, height, width))
    shape = shape or {"size": [height, width], "counts": [height * width]}
    return rle.frPyObjects(shape, height, width) if isinstance(shape["counts"], list) else shape
