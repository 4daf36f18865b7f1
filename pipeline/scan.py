"""Reading the headers of many files: in pieces, by several processes where that pays, each piece kept as it is done."""

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import formats, headers, waiting
from pipeline.cache import Results
from pipeline.headers import printable
from pipeline.latency import Threads

_PARALLEL = 50_000  # images from which a process pool pays for its start
_PIECE = 4096  # images that are read, and kept, at a time


def read(
    root: str, paths: Sequence[str], stamps: np.ndarray | None, images: int, kept: Results | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Any]:  # fmt: skip
    """Yields what ``headers.read_headers`` returns for each file; by several processes where that pays.

    ``images``: about how many the files hold. ``kept``: results of earlier scans, taken for pieces of the same paths
    and ``stamps``, int64 [n,2]; new ones are put there. What cannot be read for a reason that may pass is waited for;
    OSError where that takes too long. ``progress`` is told how many files of all are done.
    """
    size = max(1, _PIECE * len(paths) // max(1, images))
    workers = min(len(os.sched_getaffinity(0)), -(-len(paths) // size)) if images >= _PARALLEL else 1

    def results(first):
        piece, key = paths[first : first + size], ""
        if kept is not None:
            key = _key(piece, stamps[first : first + size])
            if (found := kept.get(key)) is not None:
                return "", found
        return key, work(root, piece)

    firsts, outage = range(0, len(paths), size), waiting.Outage()
    with contextlib.ExitStack() as stack:
        if workers > 1:
            work, pool = stack.enter_context(_workers()), Threads(workers)
            stack.callback(pool.shutdown, cancel_futures=True)
            parts = pool.map(results, firsts)
        else:
            work, parts = headers.read_headers, map(results, firsts)
        for first, (key, found) in zip(firsts, parts, strict=True):
            while again := [i for i, result in enumerate(found) if headers.unread(result)]:
                outage.wait(printable(paths[first + again[0]]), headers.unread(found[again[0]]))
                fresh = headers.read_headers(root, [paths[first + i] for i in again])
                for i, result in zip(again, fresh, strict=True):
                    found[i] = result
            outage.over()
            if key and not any(map(headers.refused, found)):
                kept.put(key, found)
            yield from found
            if progress:
                progress(min(first + size, len(paths)), len(paths))


@functools.cache
def version() -> bytes:
    """A digest of the code that reads headers: what it found is not what other code would find."""
    code = (Path(module.__file__).read_bytes() for module in (formats, headers))
    return hashlib.sha256(b"".join(code)).digest()


def _key(piece, stamps):
    digest = hashlib.blake2b(version() + "\0".join(piece).encode("utf-8", "surrogateescape"), digest_size=16)
    digest.update(stamps.tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _workers():
    """``headers.read_headers`` by processes, one for each thread that calls it."""
    started, mine = [], threading.local()

    # A file as a program: no fork (the caller may hold threads and a CUDA context), and, unlike multiprocessing, no
    # second import of the caller's main module.
    def work(root, piece):
        if not hasattr(mine, "process"):
            command = [sys.executable, headers.__file__, root]
            mine.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            started.append(mine.process)
        process = mine.process
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(piece).encode() + b"\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise subprocess.CalledProcessError(process.wait(), process.args)
        return json.loads(answer)

    try:
        yield work
    finally:
        for process in started:
            process.kill()
            process.communicate()
