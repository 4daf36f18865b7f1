"""Holds memory that another library would take back before the device has read it.

DALI takes the memory of an output back, in the order of its own stream, as soon as nothing refers to it. Kernels that
are still to read it, in the order of another, are not waited for: they would find later images there, and no error.
"""

import collections
from collections.abc import Callable
from typing import Any

_MOST = 2  # see also memory.py, which counts them


class Held:
    """Holds memory past its last use, in a ``with`` block, at whose end all of it has been read.

    ``record()`` returns an event behind all that is queued now, with ``query`` and ``synchronize`` as torch.cuda.Event.
    """

    def __init__(self, record: Callable[[], Any]):
        self._record = record
        self._waiting = collections.deque()  # (event, memory), the oldest first

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *_) -> None:
        self._let_go(0)

    def until_read(self, memory: Any) -> None:
        """Keeps ``memory``, whose last use has been queued, until that use is over. At most ``_MOST`` are kept:
        one more waits for the oldest, so that the caller runs no further ahead of the device."""
        self._waiting.append((self._record(), memory))
        self._let_go(_MOST)

    def _let_go(self, most: int) -> None:
        while self._waiting and (len(self._waiting) > most or self._waiting[0][0].query()):
            self._waiting[0][0].synchronize()
            self._waiting.popleft()
