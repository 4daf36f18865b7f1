"""The index of a data set: every image's label and upright size, read once from the headers."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipeline import headers, sources
from pipeline.headers import printable
from pipeline.headers import read_headers as _read_headers

__all__ = ["Index", "printable", "read_headers"]

_PARALLEL = 50_000  # images from which a process pool pays for its start
_VERSION = "index 3"


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """n images below ``root``: of a folder by path, of a list in its order, of shards by shard and key."""

    root: Path
    paths: list[str]  # relative to root, "/" between folders; shard!member in a shard; a list's own, also s3:// URIs
    labels: np.ndarray  # int64 [n], position in classes; -1 = none
    sizes: np.ndarray  # int32 [n,2] height and width, pixels, after the EXIF rotation
    classes: tuple[str, ...]  # the sorted names of the class folders or labels; () where there are none
    rejected: dict[str, str]  # path -> why it is not in the index
    shards: tuple[str, ...] = ()  # the tar files, relative to root; () where every image is a file of its own
    places: np.ndarray | None = None  # int64 [n,3] position in shards, offset, bytes; None likewise
    reader: ClassVar[str] = "nvidia.dali"  # the package that decodes the images

    def __len__(self):
        return len(self.paths)

    def file(self, i: int) -> str:
        """Absolute path of image i, or its URI; in a shard, where nothing can open it, no more than a name."""
        path = self.paths[i]
        return path if path.startswith(("s3://", "/")) else f"{self.root}/{path}"  # a join takes 1.4 us more

    def place(self, i: int) -> tuple[str, int, int]:
        """Where the bytes of image i are: the path of a file or a URI, offset, and their number, -1 for all."""
        if not self.shards:
            return self.file(i), 0, -1
        shard, offset, length = self.places[i].tolist()
        return os.path.join(self.root, self.shards[shard]), offset, length

    def without(self, bad: dict[int, str]) -> "Index":
        """This index, with the samples ``bad``, {sample: reason}, among the rejected; those behind them move up."""
        if not bad:
            return self
        kept = [i for i in range(len(self)) if i not in bad]
        rejected = self.rejected | {self.paths[i]: reason for i, reason in bad.items()}
        places = None if self.places is None else self.places[kept]
        paths = [self.paths[i] for i in kept]
        arrays = {"labels": self.labels[kept], "sizes": self.sizes[kept], "places": places}
        return dataclasses.replace(self, paths=paths, rejected=rejected, **arrays)

    def unlabelled(self) -> dict[int, str]:
        """{sample: reason} of the images without a class."""
        reason = "has no class" + (" (.cls, or label or cls of .json; no other member is read)" if self.shards else "")
        return dict.fromkeys(np.flatnonzero(self.labels < 0).tolist(), reason)

    def left_out(self, bad: dict[int, str]) -> dict[str, str]:
        """{file: reason} of all that an evaluation by classes leaves out where the samples ``bad``, {sample: reason},
        cannot be used."""
        named = {f"{self.root}/{path}": reason for path, reason in self.rejected.items()}
        named |= {self.file(i): reason for i, reason in self.unlabelled().items()}
        return named | {self.file(i): reason for i, reason in bad.items()}

    def labels_among(self, classes: Sequence[str]) -> np.ndarray:
        """int64: for each class its position in other ``classes``, which have all of these names."""
        position = {name: number for number, name in enumerate(classes)}
        return np.array([position[name] for name in self.classes], np.int64)

    def open(self) -> sources.ShardReader | None:
        """What reads the images out of shards; None where every image is a file of its own."""
        return sources.ShardReader(self.root, self.shards, self.places) if self.shards else None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of paths, labels and sizes: whether two indices number the same images the same way."""
        digest = hashlib.sha256(_joined(self.paths))
        digest.update(self.labels.astype("<i8").tobytes())
        digest.update(self.sizes.astype("<i4").tobytes())
        return digest.hexdigest()

    def keep(self, path: Path, *, anew: bool = True) -> None:
        """Write the index to a file, for ``kept``; unless ``anew``, only where no index is that can be read."""
        if anew or self.kept(path, self.root) is None:
            _save(path, "", self)

    @staticmethod
    def kept(path: Path, root: Path) -> "Index | None":
        """The index that ``keep`` wrote, with its images below ``root``; None if there is none."""
        return _load(path, "", root)

    def changes(self, now: "Index") -> dict[str, list[str]]:
        """What is different in a later index: paths that are "gone", that are "new", and that are "changed" (class,
        size, or place in a shard)."""
        mine, theirs = self._described(), now._described()
        return {
            "gone": [path for path in mine if path not in theirs],
            "new": [path for path in theirs if path not in mine],
            "changed": [path for path, what in mine.items() if path in theirs and theirs[path] != what],
        }

    def differing(self, path: Path, images: int) -> str:
        """What to say where a run was begun with other data, so many images, than these: what is different to the index
        that was kept in the file, and what is expected."""
        kept = self.kept(path, self.root)
        what = f"{images:,} images there, {len(self):,} now"
        if kept is None:
            way = f"(--resume changed needs {path.name} in its folder {path.parent.name}, which is missing or damaged)"
        else:
            named = {kind: paths for kind, paths in kept.changes(self).items() if paths}
            parts = (f"{len(paths):,} {kind} ({printable(paths[0])})" for kind, paths in named.items())
            what = ", ".join([what, *parts])
            way = "or --resume changed to go on without what is gone, changed or new"
        return f"other images ({what}); expected the same --data, another --output, {way}"

    def _described(self):
        names = [*self.classes, None]  # label -1 is the last
        places = self.places[:, 1:].tolist() if self.shards else [None] * len(self)
        rows = zip(self.paths, self.labels.tolist(), self.sizes.tolist(), places, strict=True)
        return {path: (names[label], size, place) for path, label, size, place in rows}

    @classmethod
    def scan(cls, root, cache: Path | None = None) -> "Index":
        """Index what ``root`` names:

        - a folder of class folders (nesting inside a class is allowed) or a flat folder of images. Images that lie
          beside class folders get label -1. Hidden files and folders are passed over, links followed; the content
          decides what is an image, and a file that only its suffix calls one is listed in ``rejected``;
        - a folder of tar shards, one .tar, or a pattern such as ``shard-{000..123}.tar``: see ``sources.Shards``;
        - a list (.txt .tsv .lst .list), one path and label a line: see ``sources.TextList``.

        ``cache`` names a file that keeps the result until a name, size or time of change below root differs.
        Raises OSError if root cannot be listed, ValueError if it holds no usable image.
        """
        source = sources.find(root)
        signature = f"{_VERSION} {hashlib.sha256(json.dumps(source.state).encode()).hexdigest()}"
        cache = Path(cache).expanduser() if cache else None
        index = _load(cache, signature, source.root) if cache else None
        if index is None:
            index = _build(source)
            if cache:
                _save(cache, signature, index)
        if not index.paths:
            listed = ""
            for path, reason in list(index.rejected.items())[:1]:
                listed = f" ({len(index.rejected)} files rejected, first: {printable(path)}: {reason})"
            expected = "expected JPEG, PNG, BMP, WebP or TIFF files, flat or in class folders, in tar shards or a list"
            raise ValueError(f"no usable image in {Path(root).expanduser().absolute()}{listed}; {expected}")
        return index


def _build(source):
    """The index of a source. Its classes include those of rejected images: damage must not renumber them."""
    paths, names, sizes, places, rejected, classes = [], [], [], [], {}, set()
    for path, name, result, place in source.rows(read_headers):
        classes.add(name)
        if isinstance(result, list):
            paths.append(path)
            names.append(name)
            sizes.append(result)
            places.append(place)
        else:
            rejected[path] = result
    classes = tuple(sorted(classes - {None}, key=source.order))
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number.get(name, -1) for name in names], np.int64)
    shards = tuple(getattr(source, "shards", ()))
    places = np.array(places, np.int64).reshape(-1, 3) if shards else None
    sizes = np.array(sizes, np.int32).reshape(-1, 2)
    return Index(source.root, paths, labels, sizes, classes, dict(sorted(rejected.items())), shards, places)


def _joined(paths):
    return "\0".join(paths).encode("utf-8", "surrogateescape")


def read_headers(root, paths, images):
    """``headers.read_headers`` of files that hold about so many images, by several processes where that pays."""
    workers = min(len(os.sched_getaffinity(0)), len(paths)) if images >= _PARALLEL else 1
    if workers <= 1:
        return _read_headers(root, paths)

    # A file as a program: no fork (the caller may hold threads and a CUDA context), and, unlike multiprocessing, no
    # second import of the caller's main module.
    def run(part):
        command = [sys.executable, headers.__file__, root]
        done = subprocess.run(command, input=json.dumps(part).encode(), stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout)

    step = -(-len(paths) // workers)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        parts = pool.map(run, [paths[i : i + step] for i in range(0, len(paths), step)])
        return [result for part in parts for result in part]


def _save(cache, signature, index):
    """Write the cache, whole or not at all."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    part = cache.with_name(f"{cache.name}.{os.getpid()}.part")
    text = {name: getattr(index, name) for name in ("rejected", "classes", "shards")} | {"signature": signature}
    arrays = {name: getattr(index, name) for name in ("labels", "sizes", "places") if getattr(index, name) is not None}
    with open(part, "wb") as file:
        blobs = (np.frombuffer(b, np.uint8) for b in (_joined(index.paths), json.dumps(text).encode()))
        np.savez(file, paths=next(blobs), text=next(blobs), **arrays)
    os.replace(part, cache)


def _load(cache, signature, root):
    """What ``_save`` wrote under this signature, or None."""
    try:
        with np.load(cache, allow_pickle=False) as stored:
            text = json.loads(stored["text"].tobytes())
            if text["signature"] != signature:
                return None
            paths = stored["paths"].tobytes().decode("utf-8", "surrogateescape")
            paths = paths.split("\0") if paths else []
            classes, shards = tuple(text["classes"]), tuple(text["shards"])
            places = stored["places"] if shards else None
            return Index(root, paths, stored["labels"], stored["sizes"], classes, text["rejected"], shards, places)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None  # absent, damaged or not ours: scan again
