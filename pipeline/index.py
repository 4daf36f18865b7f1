"""The index of a data set: every image's label and upright size, read once from the headers."""

import dataclasses
import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline import cache as caches
from pipeline import headers, objects, sources, waiting
from pipeline.headers import counted, printable
from pipeline.paths import Paths, expanded, matched
from pipeline.readers import ObjectReader, Reader, ShardReader
from pipeline.scan import read, version
from pipeline.shown import shown

_VERSION = "index 4"  # of the file
_PIECE = 2**16  # images that are Python objects at a time, while an index is made


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """n images below ``root``: of a folder by path, of a list in its order, of shards by shard and key.

    What there is of each image is in arrays, which are pages of the file that the index was read from, if it was: all
    processes of a machine share them. Pickled, such an index is no more than the name of that file.
    """

    root: Path
    # Kept as Paths. Relative to root, with "/" between folders; shard!member in a shard; as a list has them, which may
    # be absolute or s3:// URIs.
    paths: Sequence[str]
    labels: np.ndarray  # int64 [n], position in classes; -1 = none
    sizes: np.ndarray  # int32 [n,2] height and width, pixels, after the EXIF rotation
    classes: tuple[str, ...]  # the sorted names of the class folders or labels; () where there are none
    rejected: dict[str, str]  # path -> why it is not in the index
    # The tar files, relative to root, or absolute where they were unpacked; () where every image is a file of its own.
    shards: tuple[str, ...] = ()
    places: np.ndarray | None = None  # integers [n,3] position in shards, offset, bytes; None without shards
    stored: Path | None = None  # the file whose pages the arrays are
    reader: ClassVar[str] = "nvidia.dali"  # the package that decodes the images

    def __post_init__(self):
        if not isinstance(self.paths, Paths):
            object.__setattr__(self, "paths", Paths.of(self.paths))

    def __len__(self):
        return len(self.paths)

    def __reduce_ex__(self, protocol):
        return (_opened, (self.stored, self.root)) if self.stored else super().__reduce_ex__(protocol)

    def file(self, i: int) -> str:
        """Absolute path of image i, or its URI. Of one in a shard it is a name only, which nothing can open."""
        return self._whole(self.paths[i])

    def _whole(self, path):
        return path if path.startswith(headers.WHOLE) else f"{self.root}/{path}"  # a join takes 1.4 us more

    def place(self, i: int) -> tuple[str, int, int]:
        """Where the bytes of image i are: the path of a file or a URI, offset, and their number, -1 for all."""
        if not self.shards:
            return self.file(i), 0, -1
        shard, offset, length = self.places[i].tolist()
        return os.path.join(self.root, self.shards[shard]), offset, length

    def without(self, bad: dict[int, str]) -> "Index":
        """This index with the samples ``bad``, {sample: reason}, among the rejected; those that follow move up."""
        if not bad:
            return self
        kept = np.delete(np.arange(len(self)), list(bad))
        rejected = self.rejected | {self.paths[i]: reason for i, reason in bad.items()}
        places = None if self.places is None else self.places[kept]
        arrays = {"labels": self.labels[kept], "sizes": self.sizes[kept], "places": places, "stored": None}
        return dataclasses.replace(self, paths=self.paths.take(kept), rejected=rejected, **arrays)

    def unlabelled(self) -> dict[int, str]:
        """{sample: reason} of the images without a class."""
        hint = " (.cls, or label or cls of .json; no other member is read)"
        reason = "has no class" + (hint if self.shards and not self._unpacked else "")
        return dict.fromkeys(np.flatnonzero(self.labels < 0).tolist(), reason)

    def left_out(self, bad: dict[int, str]) -> dict[str, str]:
        """{file: reason} of all that an evaluation by classes leaves out: the rejected, the unlabelled, and the samples
        ``bad``, {sample: reason}."""
        named = {self._whole(path): reason for path, reason in self.rejected.items()}
        named |= {self.file(i): reason for i, reason in self.unlabelled().items()}
        return named | {self.file(i): reason for i, reason in bad.items()}

    def labels_among(self, classes: Sequence[str]) -> np.ndarray:
        """int64: for each class its position in other ``classes``, which have all of these names."""
        position = {name: number for number, name in enumerate(classes)}
        return np.array([position[name] for name in self.classes], np.int64)

    @property
    def _unpacked(self):
        """Whether the shards are no files of the user's."""
        return bool(self.shards) and self.shards[0].startswith("/")

    def open(self) -> Reader | None:
        """What reads the images out of shards or from an object store; None where every image is a file of its own.
        OSError where the tars of Parquet files are gone, ValueError where what reads from a store is not installed."""
        if self._unpacked and not all(map(os.path.exists, self.shards)):
            raise OSError(
                f"{os.path.dirname(self.shards[0])} lacks what the Parquet files of {self.root} were unpacked into; "
                "expected a start without --trust-index, or on several nodes --index-cache FOLDER that all of them see"
            )
        if self.shards:
            return ShardReader(self.root, self.shards, self.places)
        return ObjectReader(self.place) if len(self.paths.beginning(objects.SCHEME)) else None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of paths, labels and sizes: whether two indices number the same images the same way."""
        digest = hashlib.sha256(self.paths.blob[:-1])
        digest.update(self.labels.astype("<i8", copy=False).tobytes())
        digest.update(self.sizes.astype("<i4", copy=False).tobytes())
        return digest.hexdigest()

    def keep(self, path: Path, *, anew: bool = True) -> None:
        """Write the index to a file, for ``kept``. Without ``anew`` an index that is there and can be read stays."""
        if not anew and self.kept(path, self.root) is not None:
            return
        if self.stored is None:
            _save(path, self)
        elif self.stored != Path(path).absolute():
            path.parent.mkdir(parents=True, exist_ok=True)
            with caches.replacing(path, shared=True) as part:
                try:
                    os.link(self.stored, part)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(self.stored, part)

    @staticmethod
    def kept(path: Path, root: Path) -> "Index | None":
        """The index that ``keep`` wrote, with its images below ``root``; None if there is none."""
        stored = caches.read(path)
        try:
            about, arrays = stored
            if about.pop("version") != _VERSION:
                return None
            fingerprint, classes, shards = about["fingerprint"], tuple(about["classes"]), tuple(about["shards"])
            paths = Paths(arrays["names"], arrays["starts"])
            which = paths, arrays["labels"], arrays["sizes"], classes, about["rejected"], shards, arrays.get("places")
            index = Index(expanded(Path(root)), *which, Path(path).absolute())
        except (KeyError, TypeError, ValueError):
            return None
        vars(index)["fingerprint"] = fingerprint
        return index

    def changes(self, now: "Index") -> dict[str, Sequence[str]]:
        """What differs in a later index: the paths that are "gone", "new" and "changed" (class, size, or place in a
        shard)."""
        gone, changed, new = self._compared(now)
        return {"gone": self.paths.take(gone), "new": now.paths.take(new), "changed": self.paths.take(changed)}

    def lost(self, now: "Index") -> tuple[list[int], list[int]]:
        """The samples that are gone in a later index, and those that have changed."""
        gone, changed, _ = self._compared(now)
        return gone.tolist(), changed.tolist()

    def _compared(self, now):
        """The samples that are gone, those that have changed, and those of the later index that are new."""
        there = matched(self.paths, now.paths)
        mine = np.flatnonzero(there >= 0)
        theirs, new = there[mine], np.ones(len(now), bool)
        new[theirs] = False
        position = {name: number for number, name in enumerate(self.classes)}
        labels = np.array([*(position.get(name, -2) for name in now.classes), -1])  # label -1 is the last
        differ = self.labels[mine] != labels[now.labels[theirs]]
        differ |= (self.sizes[mine] != now.sizes[theirs]).any(1)
        if self.shards and now.shards:
            differ |= (self.places[mine, 1:] != now.places[theirs, 1:]).any(1)
        elif self.shards or now.shards:
            differ[:] = True
        return np.flatnonzero(there < 0), mine[differ], np.flatnonzero(new)

    def differing(self, path: Path, images: int) -> str:
        """What to say where a run was begun with other data, ``images`` in number: what differs from its index, kept in
        the file ``path``, and what to do."""
        kept = self.kept(path, self.root)
        what = f"{counted(images, 'image')} there, {len(self):,} now"
        if kept is None:
            way = f"(--resume changed needs {path.name} in its folder {path.parent.name}, which is missing or damaged)"
        else:
            named = {kind: paths for kind, paths in kept.changes(self).items() if paths}
            parts = (f"{len(paths):,} {kind} ({printable(paths[0])})" for kind, paths in named.items())
            what = ", ".join([what, *parts])
            way = "or --resume changed to go on without what is gone, changed or new"
        return f"other images ({what}); expected the same --data, another --output, {way}"

    @classmethod
    def scan(
        cls, root, cache: Path | None = None, *, trust: bool = False,
        progress: Callable[..., None] | None = None,
    ) -> "Index":  # fmt: skip
        """Index what ``root`` names:

        - a folder of class folders (nesting inside a class is allowed) or a flat folder of images. Images that lie
          beside class folders get label -1. Links are followed. Hidden files and folders, and the folders of runs and
          of the system (as ``lost+found``), are passed over. The content decides what is an image, and a file that only
          its suffix calls one is listed in ``rejected``;
        - a folder of tar shards, one .tar, or a pattern such as ``shard-{000..123}.tar``: see ``shards.Shards``;
        - the same of Parquet files, which are unpacked into ``cache`` (default: the user's), and behind a # the column
          of their labels, where it is not clear: see ``parquet``;
        - a list (.txt .tsv .lst .list), one path and label a line: see ``sources.TextList``;
        - ``s3://BUCKET/FOLDER``, objects as the files of a folder.

        ``cache`` names a folder that keeps the result, while the scan goes on too. It is taken as long as no name, size
        or time of change below root differs, nor the text of a list; ``trust`` takes it without a look.
        ``progress`` is told how many files of all are read and, with "unpacking", how many rows; by default it is
        ``shown``.
        What cannot be read for a reason that may pass is waited for, and ends the scan where that is too long.
        Raises OSError if root cannot be listed, ValueError if it holds no usable image.
        """
        if progress is None:
            with shown(str(root), "reading headers") as progress, caches.having_room(cache):
                return cls.scan(root, cache, trust=trust, progress=progress)
        root, cache = expanded(Path(root)), expanded(Path(cache)) if cache else None
        known = caches.Cache(cache, str(root)) if cache else None
        if trust and known and (last := known.last()) and (index := cls.kept(known.file(last[0]), Path(last[1]))):
            if len(remote := index.paths.beginning(objects.SCHEME)):
                objects.ready([index.paths[i] for i in objects.some(remote)])
            return _readable(index)
        source = waiting.patiently(lambda: sources.find(root, cache, progress), str(root))
        if known is None:
            index = _build(source, None, progress)
        else:
            signature = _signature(source)
            last = index = cls.kept(known.file(signature), source.root)
            if last is None or _more_to_read(last):
                with known.scanning() as results:
                    index = cls.kept(known.file(signature), source.root)  # another process may have scanned meanwhile
                    if index is None or (last and index.rejected == last.rejected):
                        index = _build(source, results, progress)
                        if len(index):
                            index.keep(known.file(signature))
                            index = cls.kept(known.file(signature), source.root) or index
            known.note(signature, source.root)
        if not len(index):
            listed = ""
            for path, reason in list(index.rejected.items())[:1]:
                listed = f" ({counted(len(index.rejected), 'file')} rejected, first: {printable(path)}: {reason})"
            if isinstance(source, sources.Folder) and not listed and len(source.found.stamps):
                files = Paths.joined(source.found.names)
                listed = f" ({counted(len(files), 'file')}, none an image, first: {printable(files[0])})"
            where = "flat or in class folders, in tar shards, Parquet files, a list or a bucket"
            if isinstance(source, sources.TextList):
                where = f"by paths that are absolute or begin in {source.root}"
            expected = f"expected JPEG, PNG, BMP, WebP, TIFF or PNM files, {where}"
            raise ValueError(f"no usable image in {root.absolute() if root.exists() else root}{listed}; {expected}")
        return _readable(index)


def _readable(index):
    """The index; ValueError where the locale turns a name into other bytes, so that its file would not be found."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and index.paths.blob.max() > 127:
        name = next(path for path in index.paths if not path.isascii())
        raise ValueError(
            f"{index.root} holds {name.encode('unicode_escape').decode()}; expected plain ASCII where the locale has "
            f"names in {encoding}, or a locale of UTF-8, or the variable PYTHONUTF8=1"
        )
    return index


def _more_to_read(index):
    """Whether a file can be read now that could not when the index was made."""
    then = [path for path, reason in index.rejected.items() if headers.refused(reason)]
    return bool(then) and not all(map(headers.refused, headers.read_headers(index.root, then)))


def _opened(path, root):
    index = Index.kept(path, root)
    if index is None:
        raise OSError(f"{path}, an index that another process could read, cannot be read here; expected the same files")
    return index


def _signature(source):
    """What identifies the files of a source."""
    digest = hashlib.sha256(_VERSION.encode())
    for part in (version(), *source.state()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _build(source, kept, progress):
    """The index of a source. Its classes include those of rejected images: damage must not renumber them."""
    number, rejected, parts, names = {None: -1}, {}, [], []
    rows: list[Any] = []

    def pack():
        if rows:
            labels, sizes, places = zip(*rows, strict=True)
            packed = "\0".join([*names, ""]).encode("utf-8", "surrogateescape")
            places = np.array(places if places[0] else [], np.int64).reshape(-1, 3)
            parts.append((packed, np.array(labels, np.int64), np.array(sizes, np.int32), places))
            rows.clear(), names.clear()

    for path, name, result, place in source.rows(functools.partial(read, kept=kept, progress=progress)):
        label = number.setdefault(name, len(number) - 1)
        if isinstance(result, list):
            names.append(path)
            rows.append((label, result, place))
            if len(rows) == _PIECE:
                pack()
        else:
            rejected[path] = result
    pack()
    classes = tuple(sorted(number.keys() - {None}, key=source.order))
    position = {name: i for i, name in enumerate(classes)}
    order = np.array([*(position[name] for name in number if name is not None), -1])  # label -1 is the last
    shards = tuple(getattr(source, "shards", ()))
    blobs, labels, sizes, places = zip(*parts, strict=True) if parts else ([], [], [], [])
    labels = order[np.concatenate([*labels, np.zeros(0, np.int64)])]
    sizes = np.concatenate([*sizes, np.zeros((0, 2), np.int32)])
    places = np.concatenate([*places, np.zeros((0, 3), np.int64)]) if shards else None
    if shards and places.max(initial=0) < 2**32:
        places = places.astype(np.uint32)
    paths = Paths.joined(b"".join(blobs))
    return Index(source.root, paths, labels, sizes, classes, dict(sorted(rejected.items())), shards, places)


def _save(path, index):
    about = {name: getattr(index, name) for name in ("rejected", "classes", "shards", "fingerprint")}
    arrays = {"names": index.paths.blob, "starts": index.paths.starts, "labels": index.labels, "sizes": index.sizes}
    caches.write(path, about | {"version": _VERSION}, arrays | ({"places": index.places} if index.shards else {}))
