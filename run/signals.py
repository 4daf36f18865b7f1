"""SIGTERM, SIGINT and SIGHUP: finish the step, save, end with ``STOPPED``; a second one ends the process at once."""

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipeline import waiting

from .ranks import Ranks

STOPPED = 75  # exit code of a run that was asked to stop and has saved (EX_TEMPFAIL of sysexits.h: try again later)
SIGNALS = signal.SIGTERM, signal.SIGINT
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup a run goes on without its terminal
    SIGNALS += (signal.SIGHUP,)
GPU_EVERY = 10  # steps between two agreements of several GPUs
_END = bytes(1)  # no signal has this number


def _leave_terminal() -> None:
    """Leads all output that went to the terminal nowhere: it is gone, and to write there would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    own = sys.stderr.fileno() if sys.stderr else 2  # a copy, see ``quiet``
    for output in (1, 2, own):
        if stat.S_ISCHR(os.fstat(output).st_mode):
            os.dup2(nowhere, output)
    os.close(nowhere)


def interrupted(number: int, frame) -> None:
    """A handler: as Ctrl-C, where no step is to be finished."""
    if number == signal.SIGHUP:
        _leave_terminal()
    signal.default_int_handler(number, frame)


class StopRequest:
    """Whether this run has been asked to stop, on any rank; signals are listened to in a ``with`` block.

    A thread listens: a handler of Python's would have to wait for the operation that the main thread is in, which may
    be the backward pass of a large batch.
    """

    def __init__(self, ranks: Ranks, say: Callable[[str], None]):
        """``say``: prints a line."""
        self.ranks, self.say = ranks, say
        self.asked = 0.0  # when, by the monotonic clock
        self.before = None  # of several GPUs: the last agreement, on its way to the CPU, and the event of its arrival

    def __enter__(self) -> "StopRequest":
        waiting.asked_to_stop = lambda: self.asked > 0
        self.heard, self.told = os.pipe()  # Python writes the numbers of signals there as they come
        os.set_blocking(self.told, False)
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        self.wakeup = signal.set_wakeup_fd(self.told)
        self.handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        waiting.asked_to_stop = bool
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup)
        os.write(self.told, _END)  # to close it would not do: processes that were forked meanwhile have it open too
        self.listener.join()
        os.close(self.told)
        os.close(self.heard)

    def _note(self, *_) -> None:
        self.asked = self.asked or time.monotonic()

    def _listen(self) -> None:
        said = False
        while (number := os.read(self.heard, 1)) != _END:
            if number[0] not in SIGNALS:
                continue
            if not said:
                self._note()
                if number[0] == signal.SIGHUP:
                    _leave_terminal()
                self.say("asked to stop: this step is finished and saved first; asked again, the run ends without that")
                said = True
            # torchrun hands on at once what a terminal has sent to all its processes already: that is no second one.
            elif time.monotonic() - self.asked > 1:
                if os.isatty(1):
                    os.write(1, b"\n\x1b[?25h")  # a bar has hidden the cursor
                os._exit(128 + number[0])

    def agreed(self, step: int | None = None) -> bool:
        """The same answer on all ranks, which ask after every step; without a ``step``: what holds now.

        Several GPUs agree every ``GPU_EVERY`` steps, and look at what they agreed on the time before: by then it has
        long been there, and nobody waits for the steps that are queued.
        """
        if self.ranks.count == 1:
            return self.asked > 0
        on_gpu = self.ranks.device.type == "cuda"
        if on_gpu and step is not None and step % GPU_EVERY:
            return False
        asked = torch.full((), float(self.asked > 0), device=self.ranks.device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        if not on_gpu or step is None:
            return bool(asked)
        before, self.before = self.before, (asked.to("cpu", non_blocking=True), torch.cuda.Event())
        self.before[1].record()
        if before is None:
            return False
        answer, there = before
        there.synchronize()
        return bool(answer)
