"""Many small requests to what may answer late, as a network file system: one after the other, or by threads."""

import concurrent.futures
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

_THREADS = 32
_WAITED = 0.02  # seconds that a part of the work has waited for something, from which threads pay


def concurrently(work: Callable, parts: Sequence) -> list[Any]:
    """``work`` of each part; by threads, from the first on that mostly waits, and not for its turn on a loaded machine.
    In memory, threads that take turns at the interpreter's lock cost more than they save."""
    results = []
    for number, part in enumerate(parts):
        wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD)
        results.append(work(part))
        wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_THREAD)
        own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        gave_way, had_to = after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw
        if wall > own + _WAITED and wall > 4 * own and gave_way > had_to:
            with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
                return results + list(pool.map(work, parts[number + 1 :]))
    return results
