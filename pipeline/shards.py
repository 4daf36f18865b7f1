"""Images in tar files: those of a data set, or those that Parquet files are unpacked into."""

import json
import os
import re
import stat
from pathlib import Path

import numpy as np

from pipeline import cache as caches
from pipeline import parquet
from pipeline.headers import MAY_PASS


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
        states = np.array([(-1, -1) if time is None else (size, time) for _, size, time in self.found], np.int64)
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
