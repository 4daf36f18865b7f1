"""The files below a folder with their sizes and times of change, by one system call a file and no loop of Python's.

``os.stat`` builds an object of a dozen numbers for each file, and a loop handles it: 7 us a file, of which the kernel
takes 2. Here ``map`` calls ``fstatat``, or ``statx``, which writes into an array.
"""

import bisect
import collections
import contextlib
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


def _layout(length, **fields):
    """The type of a struct of so many bytes with fields of (type, offset)."""
    kinds, places = zip(*fields.values(), strict=True)
    return np.dtype({"names": list(fields), "formats": kinds, "offsets": places, "itemsize": length})


_LIBRARY = ctypes.CDLL(None)  # C's
_TIMES = {"size": ("i8", 48), "seconds": ("i8", 88), "nanoseconds": ("i8", 96)}
# Struct stat, of x86-64 and of most others; struct statx, which is the same on every processor.
_STAT_X86, _STAT = _layout(144, mode=("u4", 24), **_TIMES), _layout(144, mode=("u4", 16), **_TIMES)
_STATX = _layout(256, mode=("u2", 28), size=("i8", 40), seconds=("i8", 112), nanoseconds=("u4", 120))
_MASK = 0x241  # of statx: type, time of change, size
_RUN = b"checkpoints", b"config.json", b"metrics.jsonl"  # what the folder of a run holds; its curves are no image
# Folders that a file system, a NAS (for its thumbnails and its bin) or an archiver makes, within class folders too.
_SYSTEM = b"$RECYCLE.BIN", b"#recycle", b"@eaDir", b"System Volume Information", b"__MACOSX", b"lost+found"
_AT_ONCE = 1024  # files, after which it is seen whether threads pay


@dataclasses.dataclass
class Found:
    """n visible files, sorted by path."""

    names: bytes  # the paths, "/" between folders, each followed by a NUL
    stamps: np.ndarray  # int64 [n,2] bytes, time of change in ns
    unreadable: dict[str, str]  # path -> why it cannot be listed


def walk(root: str, wanted: Callable[[str], bool]) -> Found:
    """All visible files below ``root``, except in folders of runs and of the system; links are followed. A broken link
    counts as unreadable if its path is ``wanted``.

    OSError if root itself cannot be listed, or something below it for a reason that may pass. Where looking at folders,
    or at pieces of large ones, mostly waits, as on network file systems, threads do it.
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
    names, stamps, rest = [], [], folders[b""][::-1]
    while rest:  # the last is the next
        joined, times, below = rest.pop()
        names.append(joined)
        stamps.append(times)
        rest += folders.get(below, ())[::-1]
    return Found(b"".join(names), np.concatenate(stamps), unreadable)


def statuses(folder: int, names: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The type of each file as of ``stat.S_IFMT``, [n], 0 where the call fails; its bytes and time of change in ns,
    int64 [n,2]. Names are absolute or relative to the open ``folder``."""
    call, firsts = _call(), range(0, len(names), _AT_ONCE)
    answers = concurrently(lambda first: call.ask(folder, names[first : first + _AT_ONCE]), firsts)
    if not answers:
        return np.zeros(0, np.uint16), np.zeros((0, 2), np.int64)
    kinds, stamps = zip(*answers, strict=True)
    return np.concatenate(kinds), np.concatenate(stamps)


class _Call(threading.local):
    """A function of the C library that writes the status of a file to memory; AttributeError where there is none.

    ``status``: the type of what it writes. ``arguments``: what makes, from the places to write to, the arguments that
    follow the name of the file.
    """

    def __init__(self, name, status, arguments):
        # Without argtypes, which would take .4 us a call.
        self.function, self.found = getattr(_LIBRARY, name), np.zeros(_AT_ONCE, status)
        memory = (ctypes.c_char * self.found.nbytes).from_buffer(self.found)
        # Pointers made for each file would take .1 us.
        places = [ctypes.byref(memory, at) for at in range(0, self.found.nbytes, status.itemsize)]
        self.arguments = arguments(places)

    def ask(self, folder, names):
        """``statuses`` of ``_AT_ONCE`` files at most."""
        found, stamps = self.found[: len(names)], np.empty((len(names), 2), np.int64)
        found["mode"] = 0
        collections.deque(map(self.function, itertools.repeat(folder), names, *self.arguments), 0)
        stamps[:, 0] = found["size"]
        np.multiply(found["seconds"], 1_000_000_000, out=stamps[:, 1])
        stamps[:, 1] += found["nanoseconds"]
        return found["mode"] & 0xF000, stamps


_CALLS = (
    ("fstatat", _STAT_X86, lambda places: (places, itertools.repeat(0))),
    ("fstatat", _STAT, lambda places: (places, itertools.repeat(0))),
    ("statx", _STATX, lambda places: (itertools.repeat(0), itertools.repeat(_MASK), places)),
)


@functools.cache
def _call():
    """The first of ``_CALLS`` that says of a folder and of a file what ``os.stat`` says; if none does, the last."""
    *others, last = _CALLS
    for call in others:
        with contextlib.suppress(AttributeError, OSError):
            names = [b"/", os.fsencode(__file__)]
            kinds, stamps = (call := _Call(*call)).ask(-1, names)  # absolute names: from no folder
            known = [os.stat(name) for name in names]
            same = kinds.tolist() == [stat.S_IFMT(one.st_mode) for one in known]
            if same and stamps.tolist() == [[one.st_size, one.st_mtime_ns] for one in known]:
                return call
    return _Call(*last)


def _folder(top, folder, above, wanted):
    """What lies in one folder: (its ancestors and itself, parts, names of the folders in it with a "/", {path: reason}
    of what is unreadable). A part is a run of files without a folder between them: their paths in one piece, their
    stamps, and the path of the folder that comes next, None at the end.

    The OSError where it cannot be listed; None for the folder of a run, and where a link leads into a folder that
    contains the link.
    """
    path = os.path.join(top, folder)

    def there(name):
        i = bisect.bisect_left(names, name)
        return names[i : i + 1] == [name]

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
        for name in filter(there, _SYSTEM):
            names.remove(name)
        if folder and all(map(there, _RUN)):
            return None
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
        parts.append((joined, stamps[begin:end], None if name is None else folder + name))
        begin = end
    return above | {here}, parts, inner, bad
