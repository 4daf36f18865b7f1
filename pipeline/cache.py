"""Indices on disk: a file of arrays that every process maps, and a folder of them that all runs on the same data share.

The folder holds ``SIGNATURE.index``, never overwritten, because a run may have it mapped; of each root that was scanned
``ROOT.json`` with the signature that it had last; and while one is scanned ``ROOT.part``, the results so far.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import struct
import sys
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

_MAGIC = b"APS index 5\n"
_ALIGNED = 64  # bytes
_UNUSED = 30 * 86400  # seconds after which an index that no run has begun with is removed


def write(path: Path, about: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, and ``about``, which JSON can hold, to a file: whole or not at all."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    layout = {name: [array.dtype.str, array.shape, zlib.crc32(array.data)] for name, array in arrays.items()}
    text = json.dumps(about | {"arrays": layout}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, shared=True) as part, open(part, "wb") as file:
        file.write(_MAGIC + struct.pack("<QI", len(text), zlib.crc32(text)) + text)
        for array in arrays.values():
            file.write(bytes(-file.tell() % _ALIGNED))
            file.write(array.data)


@contextlib.contextmanager
def replacing(path: Path, *, shared: bool) -> Iterator[Path]:
    """A file beside ``path``, to be written in the block. At an orderly end of the block it is safely on the disk and
    takes the place of ``path``; otherwise it is removed.

    In a ``shared`` folder no other process on any machine uses the same name for it; numbers of processes would not do,
    as those in containers are alike. Elsewhere the name is always the same, so that what a killed process has left is
    written over.
    """
    part = path.with_name(path.name + (f".{uuid.uuid4().hex}.part" if shared else ".partial"))
    try:
        yield part
        sync(part)
        os.replace(part, path)
    except OSError as error:
        if error.errno and not error.filename:  # a write that fails names none
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)  # os.replace leaves it where both are links to one file
    sync(path.parent)  # the rename itself


def sync(path: Path) -> None:
    """Returns when what was written to a file or folder is on the disk; OSError where it does not get there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """(about, arrays) that ``write`` wrote, the arrays as read-only pages of the file; None where the file is absent,
    damaged or something else."""
    try:
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            length, checksum = struct.unpack("<QI", file.read(12))
            text = file.read(length)
            if zlib.crc32(text) != checksum:
                return None
            about = json.loads(text)
            at, size = file.tell(), os.fstat(file.fileno()).st_size
            pages = np.memmap(file, np.uint8, "r").view(np.ndarray)
        arrays = {}
        for name, (kind, shape, checksum) in about.pop("arrays").items():
            at += -at % _ALIGNED
            dtype, begin = np.dtype(kind), at
            at += dtype.itemsize * int(np.prod(shape))
            if zlib.crc32(pages[begin:at].data) != checksum:
                return None
            arrays[name] = pages[begin:at].view(dtype).reshape(shape)
        return (about, arrays) if at == size else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def place(asked: Path | None, otherwise: Path | None) -> Path | None:
    """The folder for indices: the one ``asked`` for, or by default ~/.cache/aps. Where that cannot be written to,
    ``otherwise``, with a line on stderr."""
    folder = asked or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "aps")
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        why = "not writable"
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
    print(
        f"--index-cache {folder}: {why}; what the scan finds is kept {f'in {otherwise}' if otherwise else 'nowhere'}",
        file=sys.stderr,
    )
    return otherwise


@contextlib.contextmanager
def having_room(folder: Path | None) -> Iterator[None]:
    """Makes a full disk, or a quota that is used up, in the block an OSError that names this folder of indices."""
    try:
        yield
    except OSError as error:
        if folder is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(f"--index-cache {folder}: {error.strerror}; expected room there, or another folder") from None


def locked(file: IO, busy: str) -> bool:
    """Locks an open file until it is closed, and waits for a process that has locked it, which a line on stderr says is
    ``busy``. False on a file system without locks."""
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{busy} in another process; waiting for its end", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


class Cache:
    """What a folder of indices holds of one root."""

    def __init__(self, folder: Path, root: str):
        self.folder, self._root = Path(folder).absolute(), root
        self._name = self.folder / hashlib.sha256(os.fsencode(os.path.abspath(root))).hexdigest()[:32]

    def file(self, signature: str) -> Path:
        """The path of the index with this signature, which from now on counts as in use."""
        path = self.folder / f"{signature[:32]}.index"
        with contextlib.suppress(OSError):  # the time of access: runs have links to the file, which stay as they are
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return path

    def last(self) -> tuple[str, str] | None:
        """The signature that the root had when it was scanned last, and the folder that its paths are relative to."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(self._name.with_suffix(".json").read_text())
            return said["signature"], said["root"]
        return None

    def note(self, signature: str, root: Path) -> None:
        """Notes what ``last`` is to say, and removes what nothing has been done with for a month."""
        if self.last() != (signature, str(root)):
            with replacing(self._name.with_suffix(".json"), shared=True) as part:
                part.write_text(json.dumps({"signature": signature, "root": str(root)}))
        for path in (*self.folder.glob("*.index"), *self.folder.glob("*.part")):
            with contextlib.suppress(OSError):
                if max(path.stat().st_atime, path.stat().st_mtime) < time.time() - _UNUSED:
                    path.unlink()

    @contextlib.contextmanager
    def scanning(self) -> Iterator["Results"]:
        """The results of a scan so far, while no other process scans the same root; removed at an orderly end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._name.with_suffix(".part")
        with open(path, "a+b") as file:
            locked(file, f"{self._root}: its headers are read")
            yield Results(file)
            path.unlink(missing_ok=True)


class Results:
    """Results of pieces of a scan by key, in an open file."""

    def __init__(self, file):
        self._file, self._at, whole = file, {}, 0
        file.seek(0)
        for line in file:
            if line.endswith(b"]\n"):
                self._at[line[2:34]] = whole, len(line)
            whole += len(line)
        if whole and not line.endswith(b"\n"):
            file.write(b"\n")  # torn

    def get(self, key: str) -> list[Any] | None:
        at = self._at.get(key.encode())
        if at is None:
            return None
        with contextlib.suppress(ValueError):  # damaged: a crash leaves zeros, processes without locks mix their lines
            return json.loads(os.pread(self._file.fileno(), at[1], at[0]))[1]
        return None

    def put(self, key: str, results: list[Any]) -> None:
        self._file.write(json.dumps([key, results]).encode() + b"\n")
        self._file.flush()
