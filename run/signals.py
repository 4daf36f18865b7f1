"""SIGTERM and SIGINT: finish the step, save, end with ``STOPPED``; a second one ends the process at once."""

import signal
import time

import torch
import torch.distributed as dist

from pipeline import waiting

from .ranks import Ranks

STOPPED = 75  # exit code of a run that was asked to stop and has saved (EX_TEMPFAIL of sysexits.h: try again later)
GPU_EVERY = 10  # steps between two agreements of several GPUs


class StopRequest:
    """Whether this run has been asked to stop, on any rank; signals are listened to in a ``with`` block."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.asked = 0.0  # when, by the monotonic clock
        self.before = None  # of several GPUs: the last agreement, on its way to the CPU, and the event of its arrival

    def __enter__(self) -> "StopRequest":
        waiting.asked_to_stop = lambda: self.asked > 0
        self.handlers = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        waiting.asked_to_stop = bool
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _ask(self, number, frame) -> None:
        # torchrun hands on at once what a terminal has sent to all its processes already: that is no second request.
        if self.asked and time.monotonic() - self.asked > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = self.asked or time.monotonic()

    def agreed(self, step: int | None = None) -> bool:
        """The same answer on all ranks, which ask after every step; for none, as it is now.

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
