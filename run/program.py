"""What the programs of this project share around their work: how they end."""

import atexit
import errno
import gc
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import distributed

from pipeline import TooManyBadFiles, memory

from . import quiet
from .progress import TooManySkipped
from .ranks import Ranks
from .signals import SIGNALS, STOPPED, interrupted

DISK = errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG
GOES_ON = "the same command goes on from the last checkpoint, or begins anew if there is none"


@contextmanager
def opening(program: str) -> Iterator[None]:
    """What is wrong with the command, the data or the output folder (ValueError, OSError) is said in one line and ends
    the program with exit code 2, before any work is done."""
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # of each machine: it may be wrong on one of them alone
            print(f"{program}: {error}", file=sys.stderr)
        Ranks.leave()
        sys.exit(2)


def out_of_memory(error: Exception) -> bool:
    """Whether that is what an error says; torch has a class for a GPU's memory, and none for that of a CPU."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or (isinstance(error, RuntimeError) and memory.lacking(str(error)))


def _fill() -> None:
    """Opens those of the descriptors 0 to 2 that whoever started the program has closed. Else the next files get these
    numbers, and what a library prints is written into them: a decoder's lines were among the features of embed.py."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _printed() -> bool:
    """Whether an empty line can be printed; if not, all that is printed goes nowhere, so that the exit code is ours."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _lost(error) -> None:
    """A ``sys.unraisablehook``, which is told of an ``error`` that a signal has raised where nothing can be raised."""
    if error.exc_type is KeyboardInterrupt:  # in a destructor, such as DALI's: raised again when that is over
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    # A thread whose start a signal broke off, as torch does where a worker dies: main has heard of it already.
    elif not isinstance(getattr(error.object, "__self__", None), threading.Thread):
        sys.__unraisablehook__(error)


def run(
    program: str, main: Callable[[list[str]], None], *, goes_on: str = GOES_ON, smaller: str = "--batch-size"
) -> None:
    """Calls ``main`` with the arguments of the command line. What ends it is said in one line, with an exit code other
    than 0. ``goes_on``: how to go on, as that line says; ``smaller``: the options to lower where memory is lacking."""
    _fill()
    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, interrupted)
    told, sys.unraisablehook = sys.unraisablehook, _lost
    atexit.register(gc.freeze)  # at its end Python would look through all modules for what to free: 1.8 s, now 0.2
    try:
        with quiet.decoder():
            main(sys.argv[1:])
    except TooManyBadFiles as error:
        sys.exit(f"{program}: {error}. Repair the data or raise --max-bad")
    except TooManySkipped as error:
        sys.exit(f"{program}: {error}. Lower --lr, or look at these images")
    except OSError as error:  # of the output folder: a bad image does not raise one
        where = ""
        if error.errno in (*DISK, errno.EPIPE) and not error.filename:
            where = " in the output folder" if _printed() else " on standard output"
        sys.exit(f"{program}: {error}{where}; what was saved before is intact, and {goes_on}")
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            said = textwrap.shorten("".join(str(error).strip().splitlines()[:1]), 160, placeholder=" ...")
            said = f" ({said})" if said else ""  # Python's own says nothing
            sys.exit(f"{program}: out of memory{said}; a smaller {smaller} takes less, and {goes_on}")
        if str(error).startswith("DataLoader worker"):  # which has no class of its own either
            said = str(error).splitlines()[0].rstrip(" .")
            sys.exit(f"{program}: {said}, perhaps for want of memory; fewer --workers take less, and {goes_on}")
        # Python's words, and those of the system, with which DALI's end; neither has a class.
        if str(error).rstrip().endswith(("can't start new thread", os.strerror(errno.EAGAIN))):
            expected = "a higher limit of processes and threads (ulimit -u, pids.max of a container) or fewer threads"
            sys.exit(f"{program}: no other thread can be started; expected {expected}; {goes_on}")
        # torch has no class of its own for what the end of another rank does to a collective of gloo.
        if not (isinstance(error, distributed.DistError) or "/gloo/" in str(error)):
            raise
        said = str(error).splitlines()[0].split("] ", 1)[-1]
        sys.exit(f"{program}: most likely another rank has ended ({said:.80}); {goes_on}")
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be gone
            print(f"{program}: interrupted; {goes_on}", file=sys.stderr)
        sys.exit(STOPPED)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = told
        for number in (*SIGNALS, signal.SIGALRM):  # no traceback out of an exit handler; a checkpoint is never torn
            signal.signal(number, signal.SIG_DFL)
