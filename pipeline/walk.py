"""The files below a folder with their sizes and times of change: a system call for each, and no Python for any.

Python's own ``os.stat`` builds an object of a dozen numbers for each file, and a loop handles it: 7 us a file where
the kernel's part is 2. Here ``statx`` writes into an array, called by ``map``.
"""

import bisect
import collections
import ctypes
import dataclasses
import functools
import itertools
import os
import stat
import threading
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.headers import MAY_PASS
from pipeline.latency import concurrently

_STATUS = np.dtype(
    {
        "names": ["mode", "size", "seconds", "nanoseconds"],
        "formats": ["u2", "i8", "i8", "u4"],
        "offsets": [28, 40, 112, 120],
        "itemsize": 256,
    }
)  # struct statx, which is the same on every processor
_MASK = 0x241  # type, time of change, size
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
                here, folders[folder], inner, bad = result
                unreadable |= bad
                below += [(folder + name, here) for name in inner]
        level = below
    names, stamps = [], []
    _ordered(folders, b"", names, stamps)
    stamps = np.concatenate(stamps) if stamps else np.zeros((0, 2), np.int64)
    return Found(b"".join(names), stamps, unreadable)


def statuses(folder: int, names: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Of each file, named from the open ``folder`` on or absolute: [n], its type as ``stat.S_IFMT`` has it, 0 where it
    could not be asked; int64 [n,2], bytes and time of change in ns."""
    call = _statx()

    def ask(first):
        piece = names[first : first + _AT_ONCE]
        found, places = _memory.found[: len(piece)], _memory.places
        found["mode"] = 0
        how = itertools.repeat(0), itertools.repeat(_MASK)
        collections.deque(map(call, itertools.repeat(folder), piece, *how, places), 0)
        times = found["seconds"] * 1_000_000_000 + found["nanoseconds"]
        return found["mode"] & 0xF000, np.stack([found["size"], times], 1)

    answers = concurrently(ask, range(0, len(names), _AT_ONCE))
    if not answers:
        return np.zeros(0, np.uint16), np.zeros((0, 2), np.int64)
    kinds, stamps = zip(*answers, strict=True)
    return np.concatenate(kinds), np.concatenate(stamps)


class _Memory(threading.local):
    """Room for what is said of so many files, and pointers into it: made for each file they would take .1 us."""

    def __init__(self):
        self.found = np.zeros(_AT_ONCE, _STATUS)
        memory = (ctypes.c_char * self.found.nbytes).from_buffer(self.found)
        self.places = [ctypes.byref(memory, at) for at in range(0, self.found.nbytes, self.found.itemsize)]


_memory = _Memory()


@functools.cache
def _statx():
    return ctypes.CDLL(None).statx  # what each argument is goes without saying: argtypes would take .4 us a call


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
        kinds, stamps = statuses(descriptor, names)
    finally:
        os.close(descriptor)
    bad = {}
    for i in np.flatnonzero(kinds == 0):
        name = os.fsdecode(folder + names[i])
        try:
            status = os.stat(os.path.join(path, names[i]))
        except OSError as error:
            if error.errno in MAY_PASS:
                return error
            if not os.path.islink(os.path.join(path, names[i])) or not isinstance(error, FileNotFoundError):
                bad[name] = error.strerror
            elif wanted(name):
                bad[name] = "broken link"
        else:
            kinds[i], stamps[i] = stat.S_IFMT(status.st_mode), (status.st_size, status.st_mtime_ns)
    inner, files = [names[i] + b"/" for i in np.flatnonzero(kinds == stat.S_IFDIR)], kinds == stat.S_IFREG
    if not files.all():
        names, stamps = list(itertools.compress(names, files)), stamps[files]
    parts, begin = [], 0
    for name in [*sorted(inner), None]:
        end = len(names) if name is None else bisect.bisect_left(names, name)
        joined = b"".join([folder, (b"\0" + folder).join(names[begin:end]), b"\0"]) if begin < end else b""
        parts.append((joined, stamps[begin:end], name))
        begin = end
    return above | {here}, parts, inner, bad


def _ordered(folders, folder, names, times):
    """Adds the names and stamps of a folder and of all below it in the order of their paths."""
    for joined, stamps, name in folders.pop(folder):
        names.append(joined)
        times.append(stamps)
        if name is not None and folder + name in folders:
            _ordered(folders, folder + name, names, times)
