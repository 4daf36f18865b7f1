"""Images in tar files: those of a data set, or those that Parquet files are unpacked into; and what reads them."""

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

from pipeline import cache as caches
from pipeline import parquet
from pipeline.headers import MAY_PASS

_OPEN = 256  # shards kept open; many systems allow a process 1,024 files
# Threads that read. 110 kB at random from a virtual disk, nothing in memory: 4,100/s by one, 8,200 by 4, 10,600 by 8,
# 9,100 by 16. In memory 18,600 by one, 17,000 by 8.
_READERS = 8


def natural(name):
    """Sort key of class names: numbers by value, before all others."""
    return (0, int(name), name) if re.fullmatch(r"-?[0-9]{1,18}", name) else (1, 0, name)


def stated(root, path, *label):
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
        states = states.reshape(-1, 2)
        images = int(states[:, 0].clip(0).sum()) // 20_000  # as if small ones
        for number, rows in enumerate(read(self.root, self.shards, states, images)):
            for member, label, result, *place in rows:
                name = self.shards[number] + (f"!{member}" if member else "")
                yield name, label, result, (number, *place)
        for path, reason in self.unreadable.items():
            yield path, None, reason, None


class Unpacked(Shards):
    """Parquet files by the tars that they are unpacked into, see ``parquet``. An image is called FILE/ROW."""

    def __init__(self, root, found, unreadable=None, *, folder, progress, label):
        folder = folder or caches.place(None, None)
        if folder is None:
            raise ValueError(f"{root}: Parquet files are unpacked into the folder of indices; expected one to write to")
        tars, bad = parquet.unpack(root, found, Path(folder).absolute() / "parquet", progress, label)
        super().__init__(root, [stated(root, tar) for tar in tars.values()], (unreadable or {}) | bad)
        self.tables = list(tars)

    def state(self):
        return (json.dumps(self.tables).encode(), *super().state())

    def rows(self, read):
        for path, label, result, place in super().rows(read):
            if place is not None:
                row = path[len(self.shards[place[0]]) + 1 :].partition(".")[0]
                path = self.tables[place[0]] + (f"/{int(row)}" if row else "")
            yield path, label, "no bytes (a path alone is not followed)" if result == "empty file" else result, place


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
