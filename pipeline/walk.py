"""The files below a folder with their sizes and times of change: a system call for each, and no Python for any.

Python's own ``os.stat`` builds an object of a dozen numbers for each file, and a loop handles it: 7 us a file where
the kernel's part is 2. Here ``statx`` writes into an array, called by ``map``.
"""

import bisect
import ctypes
import dataclasses
import functools
import itertools
import os
import stat
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.headers import MAY_PASS
from pipeline.latency import concurrently

_STATUS = np.dtype(
    {
        "names": ["mode", "inode", "size", "seconds", "nanoseconds", "major", "minor"],
        "formats": ["u2", "u8", "i8", "i8", "u4", "u4", "u4"],
        "offsets": [28, 32, 40, 112, 120, 136, 140],
        "itemsize": 256,
    }
)  # struct statx, which is the same on every processor
_MASK = 0x343  # type, mode, time of change, inode, size
_AT_ONCE = 1024  # files, after which it is seen whether threads pay


@dataclasses.dataclass
class Found:
    """n visible files, sorted by path."""

    names: bytes  # the paths, "/" between folders, each followed by a NUL
    stamps: np.ndarray  # int64 [n,2] bytes, time of change in ns
    unreadable: dict[str, str]  # path -> why it cannot be listed


def walk(root: str, wanted: Callable[[str], bool]) -> Found:
    """All visible files below ``root``; links are followed. A broken one is unreadable if its path is ``wanted``.

    OSError if root itself cannot be listed, or something below it for a reason that may pass. Folders, and pieces of
    large ones, are looked at by threads where that mostly waits, as on network file systems: the time of a round trip
    counts, not the processor's.
    """
    top, folders, unreadable = os.fsencode(root), {}, {}
    level = [(b"", frozenset())]
    while level:
        listed = concurrently(lambda one: _folder(top, *one, wanted), level)
        if isinstance(listed[0], OSError) and level[0][0] == b"":
            raise listed[0]
        below = []
        for (folder, _), result in zip(level, listed, strict=True):
            if isinstance(result, OSError):
                if result.errno in MAY_PASS:
                    raise result
                unreadable[os.fsdecode(folder)] = result.strerror
            elif result is not None:
                here, names, stamps, inner, bad = result
                folders[folder] = names, stamps, inner
                unreadable |= bad
                below += [(folder + name, here) for name in inner]
        level = below
    names, stamps = [], []
    _ordered(folders, b"", names, stamps)
    stamps = np.concatenate(stamps) if stamps else np.zeros((0, 2), np.int64)
    return Found(b"".join(names), stamps, unreadable)


def statuses(folder: int, names: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """What there is to know of each file, named from the open ``folder`` on or absolute: bool [n], whether it could be
    asked; and a structured [n] with fields mode, inode, size, seconds, nanoseconds (of change), major, minor."""
    call = _statx()

    def ask(first):
        piece = names[first : first + _AT_ONCE]
        begin = found.ctypes.data + 256 * first
        places = range(begin, begin + 256 * len(piece), 256)
        how = itertools.repeat(0), itertools.repeat(_MASK)
        return np.fromiter(map(call, itertools.repeat(folder), piece, *how, places), np.int32, len(piece)) == 0

    found = np.zeros(len(names), _STATUS)
    answers = concurrently(ask, range(0, len(names), _AT_ONCE))
    return np.concatenate(answers) if answers else np.zeros(0, bool), found


def stamps(found: np.ndarray) -> np.ndarray:
    """int64 [n,2] bytes and time of change in ns, of what ``statuses`` returns."""
    return np.stack([found["size"], found["seconds"] * 1_000_000_000 + found["nanoseconds"]], 1)


@functools.cache
def _statx():
    call = ctypes.CDLL(None).statx
    call.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
    return call


def _folder(top, folder, above, wanted):
    """What lies in one folder: (its ancestors and itself, names, stamps, names of folders with a "/", {path: reason});
    the OSError where it cannot be listed, None where a link leads into a folder that contains it."""
    path = os.path.join(top, folder)
    try:
        status = os.stat(path)
        here = status.st_dev, status.st_ino
        if here in above:
            return None
        names = os.listdir(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return error
    try:
        names.sort()
        del names[bisect.bisect_left(names, b".") : bisect.bisect_left(names, b"/")]  # hidden
        there, found = statuses(descriptor, names)
    finally:
        os.close(descriptor)
    kind = np.where(there, found["mode"] & 0xF000, 0)
    files, inner, bad = kind == stat.S_IFREG, [names[i] + b"/" for i in np.flatnonzero(kind == stat.S_IFDIR)], {}
    for i in np.flatnonzero(~there):
        name = os.fsdecode(folder + names[i])
        try:
            os.stat(os.path.join(path, names[i]))
        except OSError as error:
            if error.errno in MAY_PASS:
                return error
            if not os.path.islink(os.path.join(path, names[i])) or not isinstance(error, FileNotFoundError):
                bad[name] = error.strerror
            elif wanted(name):
                bad[name] = "broken link"
    if not files.all():
        names, found = list(itertools.compress(names, files)), found[files]
    return above | {here}, names, stamps(found), inner, bad


def _ordered(folders, folder, names, times):
    """Adds the names and stamps of a folder and of all below it in the order of their paths."""
    mine, stamped, inner = folders.pop(folder)
    begin = 0
    for name in [*sorted(inner), None]:
        end = len(mine) if name is None else bisect.bisect_left(mine, name)
        if begin < end:
            names.append(b"".join([folder, (b"\0" + folder).join(mine[begin:end]), b"\0"]))
            times.append(stamped[begin:end])
        if name is not None and folder + name in folders:
            _ordered(folders, folder + name, names, times)
        begin = end
