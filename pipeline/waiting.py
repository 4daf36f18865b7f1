"""Waiting for files that cannot be reached now: said, with longer and longer pauses, within a limit."""

import concurrent.futures
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from pipeline.headers import MAY_PASS, printable

# Seconds that one batch, or a scan, may wait. For a batch the other ranks wait in a collective, which has its own limit
# (run.ranks): this rank has to say why before that is over.
_PATIENCE = 480
PAUSES = 1, 30  # seconds: the first pause between two attempts, which doubles up to the last
_LATE = 0.2  # seconds until a request to stop is noticed
_SOON = 5  # seconds that such a request waits for what is being read, as a store that works brings a batch in less

asked_to_stop: Callable[[], bool] = bool  # says whether the process is to end soon; what listens to signals sets it


class Stopped(KeyboardInterrupt):
    """Nobody waits any longer: the process was asked to stop."""


def pause(seconds: float) -> None:
    """Sleeps; ``Stopped`` at once where the process is asked to stop."""
    end = time.monotonic() + seconds
    while not asked_to_stop():
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _LATE))
    raise Stopped


def result(future: concurrent.futures.Future) -> Any:
    """The result of a future; ``Stopped`` where the process is asked to stop and it does not come soon."""
    end = time.monotonic() + _SOON
    while not future.done() and not concurrent.futures.wait([future], _LATE).done:
        if asked_to_stop() and time.monotonic() > end:
            raise Stopped
    return future.result()


class Outage:
    """A time in which files cannot be read. Its beginning and its end are said on stderr."""

    def __init__(self):
        self.what = None

    def wait(self, what: str, why: str) -> None:
        """Wait a while, longer each time; OSError where that has been long enough."""
        now = time.monotonic()
        if self.what is None:
            self.what, self.since, self.next = what, now, PAUSES[0]
            self._say(f"{what} cannot be read ({why}); trying again for at most {_PATIENCE / 60:.2g} minutes")
        left = self.since + _PATIENCE - now
        if left <= 0:
            # Without an errno, by which programs know a full disk.
            raise OSError(f"{what} cannot be read ({why}), nor could it for {_PATIENCE / 60:.2g} minutes")
        pause(min(self.next, left))
        self.next = min(2 * self.next, PAUSES[1])

    def over(self) -> None:
        """All could be read."""
        if self.what is not None:
            self._say(f"{self.what} can be read again, after {time.monotonic() - self.since:.0f} s")
            self.what = None

    @staticmethod
    def _say(line):
        print(line, file=sys.stderr, flush=True)


def patiently(work: Callable[[], Any], what: str) -> Any:
    """The result of ``work``, which is repeated while it raises OSError for a reason that may pass; OSError where that
    takes too long. What cannot be read is ``what``, unless the error names a file."""
    outage = Outage()
    while True:
        try:
            result = work()
        except OSError as error:
            if error.errno not in MAY_PASS:
                raise
            outage.wait(printable(os.fsdecode(error.filename or what)), error.strerror)
        else:
            outage.over()
            return result
