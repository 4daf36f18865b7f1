"""What an index is made from: a folder of images, a text list, or tar shards.

A source has a ``root``, which its paths are relative to; a ``state()``, pieces of bytes that differ whenever its images
may; the order of its classes as a sort key; and ``rows(read)``, which yields for every image, good or bad, its path,
the name of its class or None, [height, width] or the reason why it is left out, and its place or None. ``read(root,
paths, stamps, images)`` is ``scan.read``. Images that are no files
of their own have a place: three integers, the first the number of the shard in ``shards``, for the reader that
``Index.open`` returns. Another container, say Parquet, is one more such class, its reader, and a line in ``find``.
"""

import concurrent.futures
import contextlib
import errno
import functools
import json
import os
import re
import stat
from pathlib import Path

import numpy as np

from pipeline.headers import MAY_PASS, UNPACK, checked, named_as_image, printable
from pipeline.paths import Paths
from pipeline.walk import statuses, walk

_LISTS = (".txt", ".tsv", ".lst", ".list")
_PACKED = re.compile(r".*\.(tar\.\w+|tgz|tbz2?|txz|tzst)", re.IGNORECASE | re.DOTALL)
_PACKED_ENDS = b".tar", b".tgz\0", b".tbz", b".txz\0", b".tzst\0"  # of some name, where one may be a tar, packed or not
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_WANTED = "expected a folder of images, or of class folders with images, or tar shards, or a list"
_SCHEME = re.compile("([a-zA-Z][a-zA-Z0-9+.-]+):/+")  # a Path has lost one slash
_HUB = "hf download --repo-type dataset {} --local-dir FOLDER"
_REMOTE_TAR = "tar shards are not read from S3; expected the shards on a local disk, or a list of single images on S3"
_LATER = -1  # in the place of a time: of a file that was not asked yet
_OPEN = 256  # shards kept open; many systems allow a process 1,024 files
# Threads that read. 110 kB at random from a virtual disk, nothing in memory: 4,100/s by one, 8,200 by 4, 10,600 by 8,
# 9,100 by 16. In memory 18,600 by one, 17,000 by 8.
_READERS = 8


def find(root):
    """The source that ``root`` names; ValueError or OSError in one line if there is none."""
    given, root = str(root), Path(root).expanduser()
    name = root.name.lower()
    if not root.exists():
        if scheme := _SCHEME.match(given):
            raise ValueError(_remote(scheme[1].lower(), given[scheme.end() :]))
        if _RANGE.search(given):
            return _pattern(str(root))
        kind = "file" if name.endswith((".tar", *_LISTS)) else "folder"
        hint = f"; a data set is not found by its name: {_HUB.format(given)} fetches it" if _is_name(given) else ""
        raise FileNotFoundError(f"no {kind} {root.resolve()}: {_WANTED}{hint}")
    if root.is_dir():
        return _folder(root.resolve())
    if _PACKED.fullmatch(name):
        raise ValueError(f"{root} is compressed: {UNPACK}")
    if root.is_file() and name.endswith(".tar"):
        return Shards(root.parent.resolve(), [_stated(root.parent, root.name)])
    if root.is_file() and name.endswith(_LISTS):
        return TextList(root)
    raise NotADirectoryError(f"{root.resolve()} is a file: {_WANTED} ({' '.join(_LISTS)})")


def _remote(scheme, place):
    """What to say of data that lie elsewhere."""
    uri = printable(f"{scheme}://{place}")
    if scheme == "s3" and place.lower().endswith(".tar"):
        return f"{uri}: {_REMOTE_TAR}"
    if scheme == "s3":
        return (
            f"{uri}: nothing here can list or open a bucket; expected local data (aws s3 cp --recursive {uri} FOLDER), "
            "or a list whose lines are uri<TAB>label<TAB>height<TAB>width"
        )
    hub = re.fullmatch(r"(?:huggingface\.co/)?datasets/([\w.-]+/[\w.-]+)(?:@.*|/.*)?", place)
    if scheme == "hf" or hub:
        how = f": {_HUB.format(hub[1] if hub else 'OWNER/NAME')} fetches it"
    else:
        how = f": gcloud storage cp -r {uri} FOLDER fetches it" if scheme == "gs" else ""
    return f"{uri}: {scheme}:// is not read; {_WANTED}, on a disk{how}"


def _is_name(given):
    """Whether that may be the name of a data set, as OWNER/NAME on Hugging Face's hub or one word."""
    owner = re.fullmatch(r"(?:([\w-][\w.-]*)/)?[\w-]+", given)
    return bool(owner) and not (owner[1] and os.path.isdir(owner[1]))


def natural(name):
    """Sort key of class names: numbers by value, before all others."""
    return (0, int(name), name) if re.fullmatch(r"-?[0-9]{1,18}", name) else (1, 0, name)


# ---- A folder


class Folder:
    """Images in class folders, or in a flat folder."""

    order = None  # as text

    def __init__(self, root, found):
        self.root, self.found = root, found

    def state(self):
        return self.found.names, self.found.stamps, json.dumps(self.found.unreadable).encode()

    def rows(self, read):
        paths = Paths.joined(self.found.names)
        results = read(self.root, paths, self.found.stamps, len(paths))
        for path, result in zip(paths, results, strict=True):
            if isinstance(result, list) or named_as_image(path):  # nothing else claims to be an image
                yield path, self._label(path), result, None
        for path, reason in self.found.unreadable.items():
            yield path, self._label(path), reason, None

    def _label(self, path):
        return path.split("/", 1)[0] if "/" in path else None


def _folder(root):
    """A folder as images or, if that is what it holds, as shards."""
    found = walk(str(root), named_as_image)
    names = found.names.lower()
    if b".t" not in names or not any(
        end in names for end in _PACKED_ENDS
    ):  # the first alone: half the time of all five
        return Folder(root, found)
    paths = list(Paths.joined(found.names))
    tars = [i for i, path in enumerate(paths) if path.lower().endswith(".tar")]
    packed = [path for path in paths if _PACKED.fullmatch(path)]
    images = sum(map(named_as_image, paths))
    if tars and images:
        raise ValueError(
            f"{root} holds {len(tars)} tar files and {images} images outside of them; expected one or the other: "
            "move either to another folder"
        )
    if packed and not images:
        raise ValueError(f"{root} holds {len(packed)} compressed files, first: {printable(packed[0])}; {UNPACK}")
    shards = [[paths[i], *found.stamps[i].tolist()] for i in tars]
    return Shards(root, shards, found.unreadable) if tars else Folder(root, found)


# ---- A text list


class TextList:
    """One image a line, in the order of the lines: a path relative to the folder of the list, or absolute.

    A label may follow: the text after the last tab or, in a line without one, after the last space, unless only with
    that text the line is named as an image (``my photo.jpg``). Blank lines are passed over, and those that start with #
    unless a file is called so. An ``s3://`` URI is left to DALI's own reader; as nothing here can read its
    header, its line is uri<TAB>label<TAB>height<TAB>width. Tested with a stand-in on this machine, not with a bucket.
    """

    order = staticmethod(natural)

    def __init__(self, path):
        self.root = path.parent.resolve()
        text = path.read_text("utf-8-sig", "surrogateescape")
        lines = enumerate(text.split("\n"), 1)
        self.lines = []  # of [path, label, bytes, mtime in ns] or, as read, [path, label, result, None]
        for number, line in lines:
            comment = line.lstrip().startswith("#")
            try:
                parsed = self._parse(line.rstrip("\r")) if line.strip() else None
            except ValueError as error:
                if comment:
                    continue
                raise ValueError(f"{path} line {number}: {error}") from None
            if parsed and comment and parsed[3] is not None:
                parsed = _stated(self.root, *parsed[:2])
            if parsed and not (comment and parsed[3] is None):
                self.lines.append(parsed)
        self._look([line for line in self.lines if line[3] == _LATER])

    def _look(self, lines):
        """Fills in what lines lack: bytes and time of their files."""
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            kinds, stamps = statuses(folder, [os.fsencode(line[0]) for line in lines])
        finally:
            os.close(folder)
        for line, kind, stamp in zip(lines, kinds.tolist(), stamps.tolist(), strict=True):
            line[2:] = stamp if kind == stat.S_IFREG else _stated(self.root, *line[:2])[2:]

    def state(self):
        return (json.dumps(self.lines).encode(),)

    def _parse(self, line):
        if "\0" in line:
            raise ValueError("a NUL character; expected text in UTF-8")
        path, *columns = (column.strip() for column in line.split("\t"))
        if "://" in path and re.match("[a-zA-Z][a-zA-Z0-9+.-]*://", path):
            if not path.startswith("s3://"):
                raise ValueError(f"got {printable(path)}; expected a path, or an s3:// URI")
            if len(columns) != 3 or not all(re.fullmatch("[0-9]{1,9}", side) for side in columns[1:]):
                raise ValueError(
                    f"got {printable(line)!r}; expected uri<TAB>label<TAB>height<TAB>width, because nothing here can "
                    "read the header of an s3 file"
                )
            if path.lower().endswith(".tar"):
                raise ValueError(f"{printable(path)}: {_REMOTE_TAR}")
            size = checked(int(columns[1]), int(columns[2]))
            if isinstance(size, str):
                raise ValueError(size)
            return [path, columns[0] or None, size, None]
        path, _, label = line.rpartition("\t") if columns else line.strip().rpartition(" ")
        if not columns and named_as_image(label) and not named_as_image(path.strip()):
            path, label = line, ""
        path, label = path.strip(), label.strip()
        if not path:
            raise ValueError(f"no path before the label {printable(label)!r}; expected path<TAB>label")
        if path.lower().endswith(".tar"):
            raise ValueError(f"{printable(path)} is a tar; expected images (tars come as folder, file or pattern)")
        return [path, label or None, None, _LATER]

    def rows(self, read):
        files = [line for line in self.lines if line[3] is not None]
        states = np.array([line[2:] for line in files], np.int64).reshape(-1, 2)
        results = iter(read(self.root, [path for path, *_ in files], states, len(files)))
        for path, label, size, time in self.lines:
            yield path, label, size if time is None else next(results), None


def _stated(root, path, *label):
    """[path, *label, bytes, mtime in ns] of a file, or [path, *label, reason, None]."""
    try:
        status = os.stat(os.path.join(root, path))
    except OSError as error:
        if error.errno in MAY_PASS:
            raise
        return [path, *label, error.strerror, None]
    if not stat.S_ISREG(status.st_mode):
        return [path, *label, "not a regular file", None]
    return [path, *label, status.st_size, status.st_mtime_ns]


# ---- Tar shards


class Shards:
    """Tar files as WebDataset writes them.

    Members that share a key, the name up to the first dot of its last part, are a sample. Its image is the member with
    an image extension; its label, if it has one, the text in ``.cls`` or the value of "label" or "cls" in ``.json``.
    Samples are sorted by key, within shards sorted by name. Training reads them in random order: from a network file
    system that is slow, so copy the shards to a local disk.
    """

    order = staticmethod(natural)

    def __init__(self, root, found, unreadable=None):
        self.root, self.found, self.unreadable = root, found, unreadable or {}
        self.shards = [path for path, *_ in found]

    def state(self):
        return (json.dumps(["tar", self.found, self.unreadable]).encode(),)

    def rows(self, read):
        states = np.array([(size, time) if time else (-1, -1) for _, size, time in self.found], np.int64)
        images = int(states[:, 0].clip(0).sum()) // 20_000  # as if small ones
        for number, rows in enumerate(read(self.root, self.shards, states, images)):
            for member, label, result, *place in rows:
                name = self.shards[number] + (f"!{member}" if member else "")
                yield name, label, result, (number, *place)
        for path, reason in self.unreadable.items():
            yield path, None, reason, None


def _pattern(pattern):
    """Shards named by numbers in braces: a-{000..123}.tar."""
    paths = [pattern]
    while brace := _RANGE.search(paths[0]):
        first, last = brace.groups()
        if not 0 <= int(last) - int(first) < 100_000:
            raise ValueError(f"{pattern}: {brace[0]} does not count up, or beyond 100,000; expected {{FIRST..LAST}}")
        numbers = [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)]
        paths = [path.replace(brace[0], number, 1) for path in paths for number in numbers]
    folder = os.path.dirname(pattern[: _RANGE.search(pattern).start()])
    names = sorted(path[len(folder) :].lstrip("/") for path in paths)
    root = Path(folder).resolve()
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{pattern}: {len(missing)} of {len(names)} files are missing, first: {missing[0]}; expected all of them"
        )
    if not names[0].lower().endswith(".tar"):
        raise ValueError(f"{pattern}: {UNPACK if _PACKED.fullmatch(names[0]) else 'expected a pattern of .tar files'}")
    return Shards(root, [_stated(root, name) for name in names])


class _Descriptor(int):
    """A file descriptor that is closed when the last one who uses it, in whatever thread, lets go of it."""

    def __del__(self):
        os.close(self)


class ShardReader:
    """Encoded images out of shards by offset; ``with`` closes it."""

    def __init__(self, root, shards, places):
        def open_shard(number):
            return _Descriptor(os.open(os.path.join(root, shards[number]), os.O_RDONLY | os.O_CLOEXEC))

        self._places, self._open = places, functools.lru_cache(_OPEN)(open_shard)
        self._pool = concurrent.futures.ThreadPoolExecutor(_READERS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown()
        self._open.cache_clear()

    def read(self, sample: int) -> np.ndarray:
        """The file of an image, uint8 [bytes]; OSError where it cannot be read whole."""
        shard, offset, length = self._places[sample].tolist()
        try:
            data = os.pread(self._open(shard), length, offset)
        except OSError:
            self._open.cache_clear()  # it may be the descriptor that is stale
            raise
        if len(data) < length:
            raise OSError(errno.ENODATA, "the shard ends before the image does")
        return np.frombuffer(data, np.uint8)

    def batch(self, samples: list[int]) -> list[np.ndarray]:
        """The files of several; what cannot be read becomes one byte, which will not decode."""
        files = [np.zeros(1, np.uint8)] * len(samples)

        def read(first):
            for i in range(first, len(samples), _READERS):
                with contextlib.suppress(OSError):
                    files[i] = self.read(samples[i])

        list(self._pool.map(read, range(_READERS)))
        return files
