"""The index of a folder of images: every file's label and upright size, read once from the headers."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np

_SUFFIXES = re.compile(
    r"\.(jpg|jpeg|jpe|jfif|png|bmp|webp|tif|tiff|ppm|pgm|pbm|pnm|jp2|j2k|gif|avif|heic|heif)", re.IGNORECASE
)
# Pillow's names of what the decoder reads. It reads JPEG 2000 as well, but a damaged one ends the process (segmentation
# fault in 2 of 7 runs over 600 files with random errors); the others survived 4,200 such files.
_FORMATS = {"JPEG", "MPO", "PNG", "BMP", "WEBP", "TIFF", "PPM"}
_MAX_SIDE, _MAX_PIXELS = 65535, 178_000_000
_PARALLEL = 50_000  # files from which a process pool pays for its start
_VERSION = "index 1"


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """n images below ``root``, sorted by path."""

    root: Path
    paths: list[str]  # relative to root, "/" between folders
    labels: np.ndarray  # int64 [n], position in classes; -1 = none
    sizes: np.ndarray  # int32 [n,2] height and width, pixels, after the EXIF rotation
    classes: tuple[str, ...]  # the sorted names of the class folders; () for a flat folder
    rejected: dict[str, str]  # path -> why it is not in the index

    def __len__(self):
        return len(self.paths)

    def file(self, i: int) -> str:
        """Absolute path of image i."""
        return f"{self.root}/{self.paths[i]}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of paths, labels and sizes: whether two indices number the same images the same way."""
        digest = hashlib.sha256(_joined(self.paths))
        digest.update(self.labels.astype("<i8").tobytes())
        digest.update(self.sizes.astype("<i4").tobytes())
        return digest.hexdigest()

    @classmethod
    def scan(cls, root, cache: Path | None = None) -> "Index":
        """Index a folder of class folders (nesting inside a class is allowed) or a flat folder of images.

        Images that lie beside class folders get label -1. Hidden files and folders are passed over, links followed; the
        content decides what is an image, and a file that only its suffix calls one is listed in ``rejected``.
        ``cache`` names a file that keeps the result until a name, size or time of change below root differs.
        Raises OSError if root cannot be listed, ValueError if it holds no usable image.
        """
        root = Path(root).expanduser().resolve()
        if not root.exists():
            raise FileNotFoundError(f"no folder {root}: expected a folder of images, or of class folders with images")
        if not root.is_dir():
            raise NotADirectoryError(f"{root} is a file: expected a folder of images, or of class folders with images")
        found, unreadable = _walk(root)
        signature = f"{_VERSION} {hashlib.sha256(json.dumps(found).encode()).hexdigest()}"
        cache = Path(cache).expanduser() if cache else None
        known = _load(cache, signature) if cache else None
        if known is None:
            known = _headers(root, [path for path, *_ in found])
            if cache:
                _save(cache, signature, *known)
        paths, sizes, rejected = known
        rejected = dict(sorted((unreadable | rejected).items()))
        if not paths:
            first = next(iter(rejected.items()), None)
            listed = f" ({len(rejected)} files rejected, first: {printable(first[0])}: {first[1]})" if first else ""
            expected = "expected JPEG, PNG, BMP, WebP or TIFF files, flat or in class folders"
            raise ValueError(f"no usable image in {root}{listed}; {expected}")
        folders = [path.split("/", 1)[0] if "/" in path else None for path in paths]
        classes = tuple(sorted({f for f in folders if f} | {path.split("/", 1)[0] for path in rejected if "/" in path}))
        number = {name: i for i, name in enumerate(classes)}
        labels = np.array([number.get(f, -1) for f in folders], np.int64)
        return cls(root, paths, labels, sizes, classes, rejected)


def printable(path: str) -> str:
    """A file name for the screen: line breaks, control characters and undecodable bytes as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in path)


def _joined(paths):
    return "\0".join(paths).encode("utf-8", "surrogateescape")


def _walk(root):
    """All visible files below root, sorted [path, bytes, mtime in ns], and {path: reason} of what cannot be listed."""
    found, unreadable = [], {}
    pending = [("", frozenset())]
    while pending:
        folder, above = pending.pop()
        try:
            status = os.stat(root / folder)
            here = status.st_dev, status.st_ino
            if here in above:  # a link to a folder that contains it
                continue
            with os.scandir(root / folder) as entries:
                entries = [entry for entry in entries if not entry.name.startswith(".")]
        except OSError as error:
            if not folder:
                raise
            unreadable[folder] = error.strerror
            continue
        for entry in entries:
            path = folder + entry.name
            try:
                if entry.is_dir():
                    pending.append((path + "/", above | {here}))
                elif entry.is_file():
                    status = entry.stat()
                    found.append([path, status.st_size, status.st_mtime_ns])
                elif entry.is_symlink() and _named_as_image(path):
                    unreadable[path] = "broken link"
            except OSError as error:
                unreadable[path] = error.strerror
    return sorted(found), unreadable


def _named_as_image(path):
    return bool(_SUFFIXES.fullmatch(os.path.splitext(path)[1]))


def _headers(root, paths):
    """Read all headers: (paths, sizes int32 [n,2], {path: reason})."""
    workers = len(os.sched_getaffinity(0)) if len(paths) >= _PARALLEL else 1
    if workers == 1:
        results = _read_headers(root, paths)
    else:
        # This file as a program: no fork (the caller may hold threads and a CUDA context), and, unlike
        # multiprocessing, no second import of the caller's main module.
        def run(part):
            command = [sys.executable, __file__, root]
            done = subprocess.run(command, input=json.dumps(part).encode(), stdout=subprocess.PIPE, check=True)
            return json.loads(done.stdout)

        step = -(-len(paths) // workers)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            parts = pool.map(run, [paths[i : i + step] for i in range(0, len(paths), step)])
            results = [result for part in parts for result in part]
    sizes = [result for result in results if isinstance(result, list)]
    usable = [path for path, result in zip(paths, results, strict=True) if isinstance(result, list)]
    rejected = {path: result for path, result in zip(paths, results, strict=True) if isinstance(result, str)}
    return usable, np.array(sizes, np.int32).reshape(-1, 2), rejected


def _read_headers(root, paths):
    """For each file [height, width], or why it is rejected, or None where nothing claims that it is an image."""
    with warnings.catch_warnings():  # Pillow warns of large images and of odd EXIF blocks
        warnings.simplefilter("ignore")
        results = [_read_header(os.path.join(root, path)) for path in paths]
    return [r if isinstance(r, list) or _named_as_image(p) else None for p, r in zip(paths, results, strict=True)]


def _read_header(path):
    """[height, width] of the upright image in a file, or the reason why there is none."""
    from PIL import Image

    try:
        with open(path, "rb") as file:
            if not file.read(1):
                return "empty file"
            file.seek(0)
            with Image.open(file) as image:
                if image.format not in _FORMATS:
                    return f"format {image.format} is not supported by the decoder"
                width, height = image.size
                if image.format == "TIFF":  # newer versions of Pillow rotate the size of a TIFF themselves
                    width, height, orientation = (image.tag_v2.get(tag) for tag in (256, 257, 274))
                else:  # without the test getexif() would read a PNG to its end
                    orientation = image.getexif().get(274) if "exif" in image.info else 1
                if orientation in (5, 6, 7, 8):
                    width, height = height, width
    except Image.UnidentifiedImageError:
        return "not an image"
    except Image.DecompressionBombError:
        return f"more than {_MAX_PIXELS} pixels"
    except OSError as error:
        return error.strerror or "damaged header"
    except (
        Exception
    ) as error:  # Pillow's parsers raise nearly anything on damaged files: struct.error, SyntaxError, ...
        return f"damaged header ({type(error).__name__})"
    if min(height, width) < 1 or max(height, width) > _MAX_SIDE or height * width > _MAX_PIXELS:
        return f"size {height}x{width}: expected sides of 1 to {_MAX_SIDE} and at most {_MAX_PIXELS} pixels"
    return [height, width]


def _save(cache, signature, paths, sizes, rejected):
    """Write the cache, whole or not at all."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    part = cache.with_name(f"{cache.name}.{os.getpid()}.part")
    text = {"signature": signature, "rejected": rejected}
    with open(part, "wb") as file:
        blobs = (np.frombuffer(b, np.uint8) for b in (_joined(paths), json.dumps(text).encode()))
        np.savez(file, paths=next(blobs), sizes=sizes, text=next(blobs))
    os.replace(part, cache)


def _load(cache, signature):
    """What ``_save`` wrote under this signature, or None."""
    try:
        with np.load(cache, allow_pickle=False) as stored:
            text = json.loads(stored["text"].tobytes())
            if text["signature"] != signature:
                return None
            paths = stored["paths"].tobytes().decode("utf-8", "surrogateescape")
            return paths.split("\0") if paths else [], stored["sizes"], text["rejected"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None  # absent, damaged or not ours: scan again


if __name__ == "__main__":
    json.dump(_read_headers(sys.argv[1], json.load(sys.stdin)), sys.stdout)
