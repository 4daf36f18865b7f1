"""What an index is made from: a folder of images, a text list, tar shards, Parquet files, or a bucket.

A source has

- ``root``, the folder that its paths are relative to;
- ``state()``: pieces of bytes, which differ whenever its images may;
- ``order``: the key by which its classes are sorted;
- ``rows(read)``, ``read`` being ``scan.read``: yields (path, name of the class or None, [height, width] or the reason
  why it is left out, place or None) of every image, good or bad. Only an image in a shard has a place: the number of
  the shard in the source's ``shards``, offset, bytes.
"""

import functools
import glob
import itertools
import json
import os
import re
import stat
from pathlib import Path

import numpy as np

from pipeline import objects
from pipeline.headers import MISSING, UNPACK, checked, counted, named_as_image, printable
from pipeline.paths import URI, Paths, expanded
from pipeline.shards import Shards, Unpacked, natural, stated
from pipeline.walk import Found, statuses, walk

_LISTS = (".txt", ".tsv", ".lst", ".list")
_ARCHIVES = ".zip", ".rar", ".7z"
# Originals that an export as an image may lie beside: those of cameras, and Photoshop's.
_ORIGINALS = re.compile(r".*\.(arw|cr[23w]|dng|nef|nrw|orf|pef|psd|raf|rw2|srw)", re.IGNORECASE | re.DOTALL)
_PACKED = re.compile(r".*\.(tar\.\w+|tgz|tbz2?|txz|tzst)", re.IGNORECASE | re.DOTALL)
# Found in names with a NUL behind each, if one of them may be a Parquet file or a tar, compressed or not.
_NO_IMAGES = re.compile(rb"\.(parquet\0|tar|tgz\0|tbz|txz\0|tzst\0)", re.IGNORECASE)
_KINDS = ".tar", ".parquet"
# In a name: the part of a data set that a file belongs to.
_SPLIT = re.compile(r"(?<![^/._-])(train|validation|valid|val|dev|test)(?![^/._-])", re.IGNORECASE)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_WANTED = (
    "expected a folder of images, or of class folders with images, or tar shards, Parquet files, a list "
    f"({' '.join(_LISTS)}), or a bucket"
)
_LINES = "path<TAB>label in each line, or the path of an image alone; no header, no commas"
_HUB = "hf download --repo-type dataset {} --local-dir FOLDER"
_REMOTE = "expected them on a local disk, or images that are objects of their own"
_LATER = -1  # in place of a time: the file has not been looked at yet


def find(root, folder=None, progress=None):
    """The source that ``root`` names, DATA or, for the labels of Parquet files, DATA#COLUMN; ValueError or OSError in
    one line if there is none. ``Unpacked`` takes ``folder``, that of the indices, and ``progress``."""
    data, column = root, ""
    remote = URI.match(str(root))
    if "#" in str(root)[1:] and not (remote and remote[1].lower() == "s3") and not root.exists():
        data, _, column = str(root).rpartition("#")
    unpacked = functools.partial(Unpacked, folder=folder, progress=progress, label=column)
    try:
        source = _find(Path(data), unpacked)
    except PermissionError as error:
        if remote:
            raise
        what = printable(os.path.abspath(os.fsdecode(error.filename or data)))
        raise PermissionError(f"{what}: {error.strerror}; expected what this user has permission for") from None
    if data is not root and not (column and isinstance(source, Unpacked)):
        raise ValueError(f"{root} is not there; expected, around a #, Parquet files and the column of their labels")
    return source


def _find(root, unpacked):
    given = str(root)
    name = root.name.lower()
    if not root.exists():
        if scheme := URI.match(given):
            if scheme[1].lower() == "s3":
                return _bucket(root, objects.SCHEME + given[scheme.end() :])
            raise ValueError(_remote(scheme[1].lower(), given[scheme.end() :]))
        if _RANGE.search(given) or "*" in given:
            where, names = _pattern(given)
            found = [stated(where, name) for name in names]
            return Shards(where, found) if _kind(names[0]) == ".tar" else unpacked(where, found)
        kind = "file" if name.endswith((*_KINDS, *_LISTS)) else "folder"
        hint = f"; a data set is not found by its name: {_HUB.format(given)} fetches it" if _is_name(given) else ""
        raise FileNotFoundError(f"no {kind} {printable(os.path.abspath(root))}: {_WANTED}{hint}")
    if root.is_dir():
        return _folder(root.resolve(), unpacked)
    if _PACKED.fullmatch(name):
        raise ValueError(f"{root} is compressed: {UNPACK}")
    if root.is_file() and name.endswith(_KINDS):
        where, found = root.parent.resolve(), [stated(root.parent, root.name)]
        return Shards(where, found) if _kind(name) == ".tar" else unpacked(where, found)
    if root.is_file() and name.endswith(_LISTS):
        return TextList(root)
    archive = ": unpack it first" if name.endswith(_ARCHIVES) else ""
    raise NotADirectoryError(f"{printable(os.path.abspath(root))} is a file: {_WANTED}{archive}")


def _remote(scheme, place):
    """What to say of data that lie elsewhere."""
    if scheme == "file":
        return f"file:///{printable(place)} is a URI; expected the path alone: /{printable(place)}"
    uri = printable(f"{scheme}://{place}")
    hub = re.fullmatch(r"(?:huggingface\.co/)?datasets/([\w.-]+/[\w.-]+)(?:@.*|/.*)?", place)
    if scheme == "hf" or hub:
        how = f": {_HUB.format(hub[1] if hub else 'OWNER/NAME')} fetches it"
    else:
        how = f": gcloud storage cp -r {uri} FOLDER fetches it" if scheme == "gs" else ": fetch it first"
    return f"{uri}: {scheme}:// is not read; {_WANTED}, on a disk{how}"


def _is_name(given):
    """Whether that may be the name of a data set, as OWNER/NAME on Hugging Face's hub or one word."""
    owner = re.fullmatch(r"(?:([\w-][\w.-]*)/)?[\w-]+", given)
    return bool(owner) and not (owner[1] and os.path.isdir(owner[1]))


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
        archives, originals, images = [], [], 0
        for path, result in zip(paths, results, strict=True):
            images += isinstance(result, list)
            if isinstance(result, list) or named_as_image(path):  # nothing else claims to be an image
                yield path, self._label(path), result, None
            elif path.lower().endswith(_ARCHIVES):
                archives.append(path)
            elif _ORIGINALS.fullmatch(path):
                originals.append(path)
        for path in () if images else archives:
            yield path, None, "an archive: unpack it first", None
        if originals:  # once for all: mostly each has its image beside it, and nothing is wrong
            which = f"one of {counted(len(originals), 'file')} of camera raw or Photoshop, which are not read"
            yield originals[0], None, f"{which}: export them as JPEG, PNG or TIFF, unless that is done", None
        for path, reason in self.found.unreadable.items():
            yield path, self._label(path), reason, None

    def _label(self, path):
        return path.split("/", 1)[0] if "/" in path else None


class Bucket(Folder):
    """The same for the objects of a bucket, or of a folder in one. Paths are URIs, which begin with ``prefix``."""

    def __init__(self, root, found, prefix):
        super().__init__(root, found)
        self.prefix = prefix

    def rows(self, read):
        for path, label, result, place in super().rows(read):
            if result == MISSING:
                result += ", though it is listed (a key that begins or ends with / has to be renamed)"
            yield path, label, result, place

    def _label(self, path):
        return super()._label(path.removeprefix(self.prefix))


def _bucket(root, uri):
    objects.ready()
    kind = _kind(uri) if _kind(uri) in _KINDS else os.path.splitext(uri)[1] if uri.endswith(_LISTS) else None
    there = sorted(objects.listed(uri)) if kind is None else []
    tars = [key for key, *_ in there if _kind(key) in _KINDS]
    if kind or tars:
        kind = kind or _kind(tars[0])
        raise ValueError(f"{printable(uri)}: {kind} files are not read from S3; {_REMOTE}")
    if not there:
        raise ValueError(
            f"{printable(uri)}: nothing is there; expected s3://BUCKET, or s3://BUCKET/FOLDER, with images"
        )
    visible = [
        one for one in there if (one[1] or named_as_image(one[0])) and not re.search(r"(^|/)\.", one[0])
    ]  # what is empty may stand for a folder
    names = "".join(f"{objects.bucket_of(uri)}{key}\0" for key, *_ in visible).encode("utf-8", "surrogateescape")
    stamps = np.array([stamp for _, *stamp in visible], np.int64).reshape(-1, 2)
    return Bucket(expanded(root), Found(names, stamps, {}), uri.rstrip("/") + "/")


def _folder(root, unpacked):
    """A folder as images or, if that is what it holds, as shards or Parquet files."""
    found = walk(str(root), lambda path: named_as_image(path) or _kind(path) in _KINDS)
    if not _NO_IMAGES.search(found.names):
        return Folder(root, found)
    paths = list(Paths.joined(found.names))
    there = {kind: [i for i, path in enumerate(paths) if _kind(path) == kind] for kind in _KINDS}
    images = sum(map(named_as_image, paths))
    counts = {
        "tar files": len(there[".tar"]),
        "Parquet files": len(there[".parquet"]),
        "images outside of them": images,
    }
    counts = [f"{what} ({count:,})" for what, count in counts.items() if count]
    if any(there.values()) and len(counts) > 1:
        path = paths[(there[".tar"] or there[".parquet"])[0]]
        pattern = printable(f"{root}/{os.path.join(os.path.dirname(path), '*' + os.path.splitext(path)[1])}")
        raise ValueError(
            f"{root} holds {' and '.join(counts)}; expected one or the other: by a pattern such as '{pattern}', or in "
            "a folder of its own"
        )
    packed = [path for path in paths if _PACKED.fullmatch(path)]
    if packed and not images and not there[".parquet"]:
        what = counted(len(packed), "compressed file")
        raise ValueError(f"{root} holds {what}, first: {printable(packed[0])}; {UNPACK}")
    shards, tables = ([[paths[i], *found.stamps[i].tolist()] for i in numbers] for numbers in there.values())
    if tables:
        splits = {split[1].lower(): (path, split.end()) for path, *_ in tables for split in _SPLIT.finditer(path)}
        if len(splits) > 1:
            path, end = splits.get("train") or next(iter(splits.values()))
            pattern = printable(f"{root}/{path[:end]}{'/' * (path[end] == '/')}*.parquet")
            raise ValueError(
                f"{root} holds Parquet files of {' and '.join(sorted(splits))}; expected one of these parts of a data "
                f"set, by a pattern such as '{pattern}'"
            )
        return unpacked(root, tables, found.unreadable)
    return Shards(root, shards, found.unreadable) if shards else Folder(root, found)


# ---- A text list


class TextList:
    """One image a line, in the order of the lines: a path relative to the folder of the list, or absolute.

    A label may follow: the text after the last tab or, in a line without a tab, after the last space. ``my photo.jpg``
    has none: the line ends as the name of an image, what comes before the space does not. Blank lines are passed over,
    and those that start with #, unless a file has that name.

    A path may be the ``s3://`` URI of an object. Of uri<TAB>label<TAB>height<TAB>width the size is believed, and the
    store not asked. What changes in the store but not in the list is not noticed.
    """

    order = staticmethod(natural)

    def __init__(self, path):
        self.root = path.parent.resolve()
        text = path.read_text("utf-8-sig", "surrogateescape")
        self.lines = []  # [path, label, bytes, mtime in ns], or with a size or a reason [path, label, result, None]
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            comment = line.lstrip().startswith("#")
            try:
                parsed = self._parse(line.rstrip("\r"))
            except ValueError as error:
                if comment:
                    continue
                raise ValueError(f"{path} line {number}: {error}") from None
            if comment:  # unless a file has that name
                parsed = stated(self.root, *parsed[:2])
                if parsed[3] is None:
                    continue
            self.lines.append(parsed)
        if remote := [path for path, *_ in self.lines if path.startswith(objects.SCHEME)]:
            objects.ready(remote)
        self._look([line for line in self.lines if line[3] == _LATER])
        if not self.lines:
            raise ValueError(f"{path} names no image; expected {_LINES}")
        name, label, found, _ = self.lines[0]
        others = itertools.islice(self.lines, 1, None)
        if label and isinstance(found, str) and not named_as_image(name) and label not in (line[1] for line in others):
            said = f"no file {printable(name)!r} at the top, of a label {printable(label)!r} that no other line has"
            raise ValueError(f"{path}: {said}; expected {_LINES}")

    def _look(self, lines):
        """Fills in what lines lack: bytes and time of their files."""
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            kinds, stamps = statuses(folder, [os.fsencode(line[0]) for line in lines])
        finally:
            os.close(folder)
        for line, kind, stamp in zip(lines, kinds.tolist(), stamps.tolist(), strict=True):
            line[2:] = stamp if kind == stat.S_IFREG else stated(self.root, *line[:2])[2:]

    def state(self):
        return (json.dumps(self.lines).encode(),)

    def _parse(self, line):
        if "\0" in line:
            raise ValueError("a NUL character; expected text in UTF-8")
        path, *columns = (column.strip() for column in line.split("\t"))
        remote = "://" in path and re.match("[a-zA-Z][a-zA-Z0-9+.-]*://", path)
        if remote and not path.startswith(objects.SCHEME):
            raise ValueError(f"got {printable(path)}; expected a path, or an s3:// URI")
        if remote and path.lower().endswith(".tar"):
            raise ValueError(f"{printable(path)}: .tar files are not read from S3; {_REMOTE}")
        if remote and len(columns) > 1:
            if len(columns) != 3 or not all(re.fullmatch("[0-9]{1,9}", side) for side in columns[1:]):
                raise ValueError(
                    f"got {printable(line)!r}; expected uri, uri<TAB>label or uri<TAB>label<TAB>height<TAB>width"
                )
            size = checked(int(columns[1]), int(columns[2]))
            if isinstance(size, str):
                raise ValueError(size)
            objects.parsed(path)
            return [path, columns[0] or None, size, None]
        path, _, label = line.rpartition("\t") if columns else line.strip().rpartition(" ")
        if not columns and named_as_image(label) and not named_as_image(path.strip()):
            path, label = line, ""
        if remote and not path:
            path, label = label, ""
        path, label = path.strip(), label.strip()
        if not path:
            raise ValueError(f"no path before the label {printable(label)!r}; expected {_LINES}")
        if path.lower().endswith(".tar"):
            raise ValueError(f"{printable(path)} is a tar; expected images (tars come as folder, file or pattern)")
        if remote:
            objects.parsed(path)
            return [path, label or None, 0, 0]
        return [path, label or None, None, _LATER]

    def rows(self, read):
        files = [line for line in self.lines if line[3] is not None]
        states = np.array([line[2:] for line in files], np.int64).reshape(-1, 2)
        results = iter(read(self.root, [path for path, *_ in files], states, len(files)))
        for path, label, size, time in self.lines:
            yield path, label, size if time is None else next(results), None


# ---- Shards and Parquet files by pattern


def _kind(name):
    return os.path.splitext(name)[1].lower()


def _pattern(pattern):
    """(folder, names in it) of shards or Parquet files that numbers in braces name, a-{000..123}.tar, or a *."""
    paths = [pattern]
    while brace := _RANGE.search(paths[0]):
        first, last = brace.groups()
        if not 0 <= int(last) - int(first) < 100_000:
            raise ValueError(f"{pattern}: {brace[0]} does not count up, or beyond 100,000; expected {{FIRST..LAST}}")
        numbers = [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)]
        paths = [path.replace(brace[0], number, 1) for path in paths for number in numbers]
    if "*" in pattern:
        every = (glob.glob(re.sub(r"([?[])", r"[\1]", path)) or [path] for path in paths)
        paths = list(itertools.chain.from_iterable(every))
    folder = os.path.dirname(re.split(r"\{\d|\*", pattern)[0])
    names = sorted(path[len(folder) :].lstrip("/") for path in paths)
    root = Path(os.path.realpath(folder))  # where a link leads to itself Path.resolve ends in a traceback
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{pattern}: {len(missing)} of {len(names)} files are missing, first: {missing[0]}; expected all of them"
        )
    if _kind(names[0]) not in _KINDS or len(set(map(_kind, names))) > 1:
        why = "expected a pattern of .tar, or of .parquet, files; of images, their folder or a list"
        raise ValueError(f"{pattern}: {UNPACK if _PACKED.fullmatch(names[0]) else why}")
    return root, names
