"""What reads encoded images by itself, where DALI does not: out of tar files, and from object stores."""

import contextlib
import errno
import functools
import os
from collections.abc import Callable

import numpy as np

from pipeline import graph, objects, waiting
from pipeline.latency import Threads

_OPEN = 256  # shards kept open; many systems allow a process 1,024 files


class Reader:
    """Reads the files of images, ``threads`` at a time; so many images are worth reading ahead. The end of ``with``
    closes it, without waiting for a store that hangs."""

    threads: int

    def __init__(self):
        self._pool, self._closed = Threads(self.threads), False
        self._had = {}  # {sample: file} for ``again``

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closed = True
        self._pool.shutdown(cancel_futures=True)

    def read(self, sample: int) -> np.ndarray:
        """The file of an image, uint8 [bytes]; OSError where it cannot be read whole."""
        raise NotImplementedError

    def again(self, sample: int) -> np.ndarray:
        """The same; from memory, where ``begin`` has read the file but could not read others of its batch."""
        file = self._had.get(sample)
        return self.read(sample) if file is None else file

    def begin(self, samples: list[int]) -> Callable[[], list[np.ndarray]]:
        """Begins to read the files of ``samples``; the function that is returned waits for them, as ``waiting.result``
        does, and returns them. A file that cannot be read becomes one byte, which will not decode; the others are then
        kept until they are asked for again."""
        lacking = np.zeros(1, np.uint8)
        files = [lacking] * len(samples)

        def read(first):
            for i in range(first, len(samples), self.threads):
                with contextlib.suppress(OSError):
                    if self._closed:
                        return
                    files[i] = self.again(samples[i])
                    self._had.pop(samples[i], None)

        begun = [self._pool.submit(read, first) for first in range(min(self.threads, len(samples)))]

        def wait():
            for part in begun:
                waiting.result(part)
            if any(file is lacking for file in files):
                self._had |= {i: file for i, file in zip(samples, files, strict=True) if file is not lacking}
            return files

        return wait


class ObjectReader(Reader):
    """Images that are objects of a store, or files of their own. ``place``: as of ``Index``; ValueError where nothing
    that reads from a store is installed."""

    # 110 kB from a store that answers after 30 ms: 241 images/s by 8, 915 by 32, 3,088 by 128, 5,158 by 256 (bench
    # objects).
    threads = objects.AT_A_TIME

    def __init__(self, place):
        objects.ready()
        super().__init__()
        self._place = place

    def read(self, sample):
        return graph.read(*self._place(sample))


class _Descriptor(int):
    """A file descriptor that is closed when nothing in any thread refers to it any more."""

    def __del__(self):
        os.close(self)


class ShardReader(Reader):
    """Images out of ``shards``, tar files below ``root``. ``places``: as of ``Index``."""

    # 110 kB at random from a virtual disk, nothing in memory: 4,100/s by one, 8,200 by 4, 10,600 by 8, 9,100 by 16. In
    # memory 18,600 by one, 17,000 by 8.
    threads = 8

    def __init__(self, root, shards, places):
        def open_shard(number):
            return _Descriptor(os.open(os.path.join(root, shards[number]), os.O_RDONLY | os.O_CLOEXEC))

        super().__init__()
        self._places, self._open = places, functools.lru_cache(_OPEN)(open_shard)

    def __exit__(self, *_):
        super().__exit__()
        self._open.cache_clear()

    def read(self, sample):
        shard, offset, length = self._places[sample].tolist()
        try:
            data = os.pread(self._open(shard), length, offset)
        except OSError:
            self._open.cache_clear()  # it may be the descriptor that is stale
            raise
        if len(data) < length:
            raise OSError(errno.ENODATA, "the shard ends before the image does")
        return np.frombuffer(data, np.uint8)
