"""Many small requests to what may answer late, as a network file system: one after the other, or by threads."""

import concurrent.futures
import contextlib
import queue
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

_THREADS = 32
_WAITED = 0.02  # seconds that a part of the work has waited for something, from which threads pay


class Threads(concurrent.futures.Executor):
    """``most`` threads, or as many as there are tasks. Unlike with a ThreadPoolExecutor, neither ``shutdown`` nor the
    end of the process waits for them: a store that hangs answers no request for half a minute."""

    def __init__(self, most: int):
        self._most, self._started, self._tasks = most, 0, queue.SimpleQueue()

    def submit(self, work: Callable, /, *arguments, **how) -> concurrent.futures.Future:
        future = concurrent.futures.Future()
        self._tasks.put((future, lambda: work(*arguments, **how)))
        if self._started < self._most:
            self._started += 1
            threading.Thread(target=self._work, daemon=True).start()
        return future

    def _work(self):
        while task := self._tasks.get():
            future, work = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del task, future, work  # and what they hold, until the next one comes

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Ends the threads once they have done, or ``cancel_futures`` has cancelled, what was submitted."""
        with contextlib.suppress(queue.Empty):
            while cancel_futures:
                self._tasks.get_nowait()[0].cancel()
        for _ in range(self._started):
            self._tasks.put(None)


def concurrently(work: Callable, parts: Sequence) -> list[Any]:
    """[``work(part)`` for each part], one after the other. Once a part has mostly waited, though not for its turn on a
    loaded machine, threads do the rest. Where nothing waits they would cost more than they save: only one runs Python.
    """
    results = []
    for number, part in enumerate(parts):
        wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD)
        results.append(work(part))
        wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_THREAD)
        own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        gave_way, had_to = after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw
        if wall > own + _WAITED and wall > 4 * own and gave_way > had_to:
            with Threads(_THREADS) as pool:
                return results + list(pool.map(work, parts[number + 1 :]))
    return results
