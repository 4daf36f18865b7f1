"""File names: with the home folder put in, and many of them in one array, which may be pages of a file."""

import re
from argparse import ArgumentTypeError
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

URI = re.compile("([a-zA-Z][a-zA-Z0-9+.-]+):/+")  # its beginning; in a Path one slash is left of two
_PIECE = 4096  # names that are Python objects at a time


class _Uri(type(Path())):
    def __str__(self):
        return URI.sub(r"\1://", super().__str__(), count=1)


def expanded(path: Path) -> Path:
    """A path with the home folder in place of "~"; ValueError where there is none. A URI is still one when printed."""
    try:
        return _Uri(path) if URI.match(str(path)) else path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}; expected the name of a user behind ~, or a whole path") from None


def argument(text: str) -> Path:
    """A path of a command line, for argparse: ``expanded``."""
    if not text:  # of a variable that is not set
        raise ArgumentTypeError("expected a name, got nothing")
    try:
        return expanded(Path(text))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


class Paths(Sequence[str]):
    """n names, each followed by a NUL in ``blob``, uint8 [bytes]; name i begins at ``starts[i]``, unsigned [n+1].

    To its users a sequence of str, which equals a list of the same names.
    """

    def __init__(self, blob: np.ndarray, starts: np.ndarray):
        self.blob, self.starts = blob, starts

    @classmethod
    def of(cls, names: Iterable[str]) -> "Paths":
        """ValueError for a name with a NUL."""
        names = [name.encode("utf-8", "surrogateescape") for name in names]
        paths = cls.joined(b"".join(name + b"\0" for name in names))
        if len(paths) != len(names):
            raise ValueError("a NUL in a name")
        return paths

    @classmethod
    def joined(cls, blob: bytes) -> "Paths":
        """Of names with a NUL behind each."""
        blob = np.frombuffer(blob, np.uint8)
        ends = np.flatnonzero(blob == 0)
        starts = np.zeros(len(ends) + 1, np.uint32 if len(blob) < 2**32 else np.uint64)
        starts[1:] = ends + 1
        return cls(blob, starts)

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, i):
        if isinstance(i, slice):
            first, last, step = i.indices(len(self))
            if step == 1 and first < last:
                return self._text(first, last)
            return [self[j] for j in range(first, last, step)]
        i = range(len(self))[i]  # negative ones, and IndexError
        return self._bytes(i, i + 1).decode("utf-8", "surrogateescape")

    def __iter__(self):
        for first in range(0, len(self), _PIECE):
            yield from self._text(first, min(first + _PIECE, len(self)))

    def __eq__(self, other):
        if isinstance(other, Paths):
            return len(self) == len(other) and np.array_equal(self.blob, other.blob)
        if not isinstance(other, (list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None

    def __repr__(self):
        return f"Paths({self[:3]}{'...' if len(self) > 3 else ''}, {len(self):,} names)"

    def __reduce__(self):
        return Paths.joined, (self.blob.tobytes(),)

    def _bytes(self, first, last):
        """Names first, ..., last - 1 (at least one), with a NUL between them."""
        begin, end = self.starts[[first, last]].tolist()
        return self.blob[begin : end - 1].tobytes()

    def _text(self, first, last):
        return self._bytes(first, last).decode("utf-8", "surrogateescape").split("\0")

    def beginning(self, prefix: str) -> np.ndarray:
        """int64 [m]: the numbers of the names that begin with ``prefix``."""
        found = self.starts[:-1].astype(np.int64)
        which = np.arange(len(found))
        for byte in prefix.encode():  # a name that is shorter ends with a NUL, which no name holds
            same = self.blob[found] == byte
            found, which = found[same] + 1, which[same]
        return which

    def take(self, which: np.ndarray) -> "Paths":
        """The names of these numbers, int64 [m], in their order."""
        begin, end = (self.starts[which + i].astype(np.int64) for i in (0, 1))
        starts = np.zeros(len(which) + 1, np.uint64)
        np.cumsum(end - begin, out=starts[1:])
        blob = np.empty(int(starts[-1]), np.uint8)
        for first in range(0, len(which), _PIECE):  # of all at once the places would take 13 times the names
            here = slice(first, first + _PIECE)
            at, stop = int(starts[first]), int(starts[min(here.stop, len(which))])
            shift = begin[here] - starts[:-1][here].astype(np.int64)
            blob[at:stop] = self.blob[np.arange(at, stop) + np.repeat(shift, (end - begin)[here])]
        return Paths(blob, starts)

    def hashes(self) -> np.ndarray:
        """int64 [n]: equal for equal names, within this process."""
        found = np.empty(len(self), np.int64)
        for first in range(0, len(self), _PIECE):
            piece = self._bytes(first, min(first + _PIECE, len(self))).split(b"\0")
            found[first : first + len(piece)] = np.fromiter(map(hash, piece), np.int64, len(piece))
        return found

    def positions(self, wanted: Collection[str]) -> dict[int, str]:
        """{number: name} of all names that are ``wanted``."""
        asked = np.array([hash(name.encode("utf-8", "surrogateescape")) for name in wanted], np.int64)
        found = np.flatnonzero(np.isin(self.hashes(), asked)).tolist() if len(asked) else []
        named = {i: self[i] for i in found}
        return {i: name for i, name in named.items() if name in wanted}


def matched(mine: Paths, theirs: Paths) -> np.ndarray:
    """int64 [n]: for each of my names the number of the same one among theirs, -1 for none. Of equal names the k-th of
    mine goes with the k-th of theirs."""
    a, b = (paths.hashes() for paths in (mine, theirs))
    if np.array_equal(a, b):
        return np.arange(len(a))
    (a, mine), (b, theirs) = map(_sorted, (a, b))
    found = np.full(len(a), -1)
    if len(b):
        place = np.searchsorted(b, a).clip(max=len(b) - 1)  # ten times as fast because ``a`` is sorted too
        found[mine] = np.where(b[place] == a, theirs[place], -1)
    return found


def _sorted(hashes):
    """Hashes in order, each made unique by how many equal ones came before it; and the numbers that they had."""
    order = np.argsort(hashes)
    ordered = hashes[order]
    again = np.r_[False, ordered[1:] == ordered[:-1]]
    if again.any():
        order = np.argsort(hashes, kind="stable")
        position = np.arange(len(ordered))
        first = np.maximum.accumulate(np.where(again, 0, position))
        ordered = ordered + (position - first) * 0x5851F42D4C957F2D
        resorted = np.argsort(ordered)
        return ordered[resorted], order[resorted]
    return ordered, order
