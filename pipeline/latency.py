"""Many small requests to what may answer late, as a network file system: one after the other, or by threads."""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

_THREADS = 32
_WAITED = 0.02  # seconds that a part of the work has waited for something, from which threads pay


def concurrently(work: Callable, parts: Sequence) -> list[Any]:
    """``work`` of each part; by threads, from the first on that mostly waits. In memory, threads that take turns at the
    interpreter's lock cost more than they save."""
    results = []
    for number, part in enumerate(parts):
        wall, own = time.perf_counter(), time.thread_time()
        results.append(work(part))
        wall, own = time.perf_counter() - wall, time.thread_time() - own
        if wall > own + _WAITED and wall > 4 * own:
            with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
                return results + list(pool.map(work, parts[number + 1 :]))
    return results
