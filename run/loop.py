"""The loop of a run: step after step, from where it was to its end, in every way in which that can come.

A program takes the optimizer steps itself; what stands around them is the same for all programs, and stands here:

    with running(config, ranks, loader, training, opened, about=..., rates=...) as loop:
        for batch in loop.steps():
            loop.took(*training.step(batch, ...), rate)
"""

import datetime
import itertools
import json
import math
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeline import TooManyBadFiles
from pipeline.headers import counted
from pipeline.shown import shown
from pipeline.waiting import Stopped

from . import checkpoint, curves
from .program import opening, out_of_memory
from .progress import SHOWN, Report, TooManySkipped
from .ranks import Ranks
from .recipes import RunConfig
from .recorded import WARM_UP
from .session import CHANGED, GONE, Data, Opened, describe, summarise_rejected, write_rejected
from .signals import STOPPED, StopRequest

AHEAD = 2  # batches that a loader has ready


class Loads(Protocol):
    """Numbered batches of one rank."""

    index: Data
    bad: dict[int, str]  # {number: reason} of the files that were found bad so far
    batches_per_epoch: int

    def batches(self, first: int, last: int) -> Iterator[Any]:
        """Batch number first, ..., last - 1."""

    def samples(self, number: int) -> Sequence[int]:
        """The files of a batch."""


class Trains(Protocol):
    """What a run changes, step by step."""

    FIGURES: Sequence[str]  # names of what a step returns

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """A copy of all that a step changes. For all ranks; those that do not ``keep`` it need none."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what ``state_dict`` has returned."""


def planned(config: RunConfig, loader: Loads, groups: int = 1) -> int:
    """Optimizer steps of the whole schedule, ``groups`` for each batch."""
    return max(1, round(config.epochs * loader.batches_per_epoch)) * groups


def _put_back(training: Trains, report: Report, bad: dict[int, str], state: dict[str, Any], config: RunConfig) -> None:
    """Puts the ``state`` of a checkpoint back; ValueError if it has other parts than the training has."""
    try:
        training.load_state_dict(state)
        report.load_state_dict(state["report"])
        # Which files are not what they were is found anew each time: they may be back.
        bad.update({sample: reason for sample, reason in state["bad"].items() if reason not in (CHANGED, GONE)})
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # torch raises any of these
        if out_of_memory(error):
            raise
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.120}"
        raise ValueError(
            f"the checkpoints of {config.output} do not fit this version of the program ({said}); "
            "go on with the version that wrote them, or choose another --output"
        ) from error


class Loop:
    """Where a run is, and what is done after each of its steps."""

    def __init__(
        self, config: RunConfig, ranks: Ranks, loader: Loads, training: Trains, opened: Opened, *,
        rates: dict[str, float], groups: int, window: int,
    ):  # fmt: skip
        self.config, self.ranks, self.loader, self.training = config, ranks, loader, training
        self.groups, self.window = groups, window
        self.steps_per_epoch = loader.batches_per_epoch * groups
        self.total = min(planned(config, loader, groups), config.max_steps or sys.maxsize)
        state, opened.state = opened.state, None  # let go of here: it may be larger than the networks
        self.step = state["step"] if state else 0  # optimizer steps taken
        self.stopped = False  # on request, before the end
        self.told: set[int] = set()  # the bad files that all ranks know of
        self.report = Report(
            None if config.dry_run else config.output, ranks, figures=training.FIGURES, rates=rates,
            every=config.log_every, start=self.step, total=self.total, steps_per_epoch=self.steps_per_epoch,
        )  # fmt: skip
        if state:
            with opening(config.PROGRAM):
                _put_back(training, self.report, loader.bad, state, config)
        self.saver = checkpoint.Saver(config.output / "checkpoints", last=config.keep_last, every=config.keep_every)
        self.say = self.report.say
        self.stop = StopRequest(ranks, self.say)

    @property
    def epoch(self) -> float:
        """Passes over the files so far, fractions included, as schedules count."""
        return self.step / self.steps_per_epoch

    def windows(self) -> Iterator[tuple[int, Iterator[Any], Iterator[tuple[int, int]]]]:
        """For each window that is left: the number of its first batch; its batches, as they are loaded; and the steps
        that are still to be taken on them, as (place of the batch in the window, group), after each of which the caller
        tells ``took``. A run that goes on may begin in the middle of a window."""
        first, (last, size, _) = self._window(self.step)[0], self._window(self.total - 1)
        # Whole windows, also where the run ends within one: a step may take images of any batch of its window.
        loaded = self.report.waiting_for(self.loader.batches(first, max(first, last + size)))
        while self.step < self.total and not self.stopped:
            number, size, _ = self._window(self.step)
            yield number, itertools.islice(loaded, size), self._turns()

    def steps(self) -> Iterator[Any]:
        """The batch of each step, where a batch has one group and a window one batch."""
        for _, (batch,), turns in self.windows():
            for _ in turns:
                yield batch

    def _window(self, step: int) -> tuple[int, int, int]:
        """The window that step number ``step`` (the first is 0) falls into: the number of its first batch, how many
        batches it has, and how many of its steps come before this one. No window reaches into the next epoch, so no
        image is in one twice."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within // (self.window * self.groups) * self.window
        size = min(self.window, self.loader.batches_per_epoch - start)
        return epoch * self.loader.batches_per_epoch + start, size, within - start * self.groups

    def _turns(self) -> Iterator[tuple[int, int]]:
        _, size, taken = self._window(self.step)
        for turn in range(taken, min(size * self.groups, taken + self.total - self.step)):
            yield turn % size, turn // size
            self.stopped = self.asked_to_stop() and self.step < self.total
            if self.step % self.config.checkpoint_every == 0 or self.step == self.total or self.stopped:
                self.save()
            if self.stopped:
                return

    def asked_to_stop(self) -> bool:
        """The same answer on all ranks, which ask after every step."""
        return self.stop.agreed(self.step)

    def took(self, figures: Sequence[Tensor], finite: Tensor, learning_rate: float) -> None:
        """Is called after each optimizer step, with its results (see ``Report.step``)."""
        self.step += 1
        self.report.step(self.step, figures, finite, learning_rate)

    def due(self, epochs: float) -> bool:
        """Whether what is done every so many epochs (0: never) is to be done after this step, which is not the last."""
        every = epochs * self.steps_per_epoch
        return bool(every) and self.step // every > (self.step - 1) // every and self.step < self.total

    def shown(self, what: str, doing: str) -> AbstractContextManager[Callable[..., None] | None]:
        """As ``pipeline.shown.shown`` on rank 0; on the others None, and nothing is shown."""
        return shown(what, doing) if self.ranks.first else nullcontext()

    def record(self, figures: dict[str, Any]) -> None:
        """Adds figures of the run as it is now to ``metrics.jsonl``, on rank 0."""
        if self.ranks.first:
            self.report.record({"step": self.step, "epoch": round(self.epoch, 4), **figures})

    def draw(self) -> None:
        """Leaves the curves of the run as a picture, on rank 0."""
        if self.ranks.first:
            self.say(curves.leave(self.config.output))

    def save(self) -> None:
        """Saves everything that the next step depends on. Called by all ranks; rank 0 writes, in the background."""
        bad = self.loader.bad
        for found in self.ranks.gather({sample: bad[sample] for sample in bad.keys() - self.told}):
            bad.update(found)  # what one rank found costs no other rank time
        self.told.update(bad)
        state = self.training.state_dict(keep=self.ranks.first) | {"report": self.report.state_dict()}
        if self.ranks.first:
            run = json.dumps(describe(self.config, self.loader.index))
            self.saver.save(self.step, state | {"step": self.step, "bad": dict(bad), "run": run})
        self.write_rejected()

    def write_rejected(self) -> None:
        if self.ranks.first:
            write_rejected(self.config.output, self.loader.index, self.loader.bad)

    def write_skipped(self) -> Path:
        """Writes ``skipped.json``: the seed, and the files of all batches in the windows of the steps since the last
        log line, each batch with the number of its first step (the first is 1). For all ranks."""
        first = self._window(max(0, self.step - self.config.log_every))[0]
        last, size, _ = self._window(self.step - 1)
        paths = self.loader.index.paths
        mine = {number: [paths[s] for s in self.loader.samples(number)] for number in range(first, last + size)}
        parts = self.ranks.gather(mine)
        batches = []
        for number in mine:
            start = self._window(number * self.groups)[0]
            images = [path for part in parts for path in part[number]]
            step = start * self.groups + number - start + 1
            batches.append({"batch": number, "first_step": step, "images": images})
        file = self.config.output / "skipped.json"
        if self.ranks.first:
            content = {"seed": self.config.seed, "batches": batches}
            checkpoint.write_atomically(file, json.dumps(content, indent=1).encode())
        return file


class DryLoop(Loop):
    """A few steps of a run from where it is, which are measured. Nothing is written."""

    def __init__(self, *what, **how):
        super().__init__(*what, **how)
        self.start, turns, windows = self.step, self.groups * self.window, 1
        if self.ranks.device.type == "cuda":  # those that compile and record steps, and those loaded ahead meanwhile
            windows = -(-(WARM_UP + self.groups) // turns) + AHEAD
        self.warm = min(self.step + windows * turns, max(self.step, self.total - 1))
        self.end = min(self.warm + max(2 * turns, 4), self.total)
        self.seconds = self.waited = 0.0

    def asked_to_stop(self) -> bool:
        return self.step >= self.end  # rather than by a smaller ``total``: batches are loaded ahead as in a whole run

    def took(self, figures: Sequence[Tensor], finite: Tensor, learning_rate: float) -> None:
        super().took(figures, finite, learning_rate)
        if self.step == self.warm or self.step == self.end:
            self.seconds, self.waited = self.report.mark()

    def due(self, epochs: float) -> bool:
        return False

    def save(self) -> None:
        pass

    def tell(self, opened: Opened) -> None:
        """Says what the run would do, and what time, memory and disk it would take by these steps. For all ranks."""
        config, device, last = self.config, self.ranks.device, self.total
        bad = {sample: why for found in self.ranks.gather(dict(self.loader.bad)) for sample, why in found.items()}
        if device.type == "cuda":
            most, of = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
            what = f"allocated by torch, of {of / 1e9:.1f} GB of the GPU; the decoder's come on top"
        else:
            most, what = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "in the resident set"
        most = max(self.ranks.gather(most))
        state = self.training.state_dict(keep=self.ranks.first)
        parts = [leaf.untyped_storage() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        size = sum({part._cdata: part.nbytes() for part in parts}.values())

        left_out = summarise_rejected(self.loader.index, bad, None) or "nothing is left out"
        self.say(f"images: {len(self.loader.index) - len(bad):,}; {left_out}")
        for line in opened.damaged:
            self.say(f"{line}; the run would go on from the one before")
        if (config.output / "config.json").exists():
            self.say(f"there is a run in {config.output}, which would go on from step {self.start:,}")
        if self.start == last:
            self.say(f"step {last:,} was the last, none is to come")
            return
        epochs = [step / self.steps_per_epoch for step in (self.start, last)]
        self.say(
            f"to come: steps {self.start + 1:,} to {last:,}, epoch {epochs[0]:.2f} to {epochs[1]:.2f} of "
            f"{config.epochs:g}, {counted(self.steps_per_epoch, 'step')} each"
        )
        steps = self.end - self.warm
        each, rest = self.seconds / steps, last - self.start
        rates = ", ".join(SHOWN[name](amount / each) for name, amount in self.report.rates.items())
        self.say(
            f"time: an estimate of {datetime.timedelta(seconds=math.ceil(rest * each))}, from {each:.3g} s a step, "
            f"waiting for data {self.waited / self.seconds:.1%} ({rates}); measured over {counted(steps, 'step')} "
            f"behind {self.warm - self.start} to warm up. Evaluation on the way and at the end comes on top"
        )
        self.say(f"memory: at most {most / 1e9:.2f} GB a rank {what}")
        there = next(path for path in (config.output.absolute(), *config.output.absolute().parents) if path.exists())
        self.say(
            f"disk: {size / 1e6:,.1f} MB a checkpoint, of which the newest {config.keep_last} are kept; "
            f"{shutil.disk_usage(there).free / 1e9:,.1f} GB are free"
        )


@contextmanager
def running(
    config: RunConfig, ranks: Ranks, loader: Loads, training: Trains, opened: Opened, *, about: str,
    rates: dict[str, float], groups: int = 1, window: int = 1,
) -> Iterator[Loop]:  # fmt: skip
    """A run: its steps are taken in the block of ``with``, and after the block all are taken and saved.

    ``opened``: what ``open_output`` has returned; its state is put into ``training``. ``about``: the first line that is
    printed. ``rates``: see ``Report``. ``groups``: optimizer steps for each batch. ``window``: batches whose groups are
    taken in turn. Asked to stop, the run finishes a step, saves, and ends the process with ``STOPPED``. A dry run ends
    the process after the block. TooManySkipped: see ``Report.step``.
    """
    how = {"rates": rates, "groups": groups, "window": window}
    if config.dry_run:
        loop = DryLoop(config, ranks, loader, training, opened, **how)
        loop.say(f"dry run: nothing is written to {config.output}\n{about}")
        yield loop
        loop.tell(opened)
        ranks.leave()
        sys.exit()
    loop = Loop(config, ranks, loader, training, opened, **how)
    loop.write_rejected()
    with loop.report, loop.stop:
        ranks.gather(None)  # all ranks listen for signals before the first line says that the run has begun
        for line in opened.damaged:
            loop.say(f"{line}; the run goes on from the one before")
        left = f"steps {loop.step + 1} to {loop.total}" if loop.step < loop.total else f"step {loop.step} was the last"
        loop.say(f"{about}; {left}")
        try:
            yield loop
        except Stopped:  # between two steps, waiting for files
            if ranks.count > 1:  # the others wait for this rank
                raise
            loop.stopped = True
            loop.save()
        except TooManyBadFiles as error:
            if not ranks.first:  # whose files are not in the list of the first one yet
                raise
            raise TooManyBadFiles(f"{error}; {config.output / 'rejected.jsonl'} names all of them") from None
        except TooManySkipped as error:
            raise TooManySkipped(f"{error}; {loop.write_skipped()} names the images") from None
        finally:  # also where too many are bad
            loop.write_rejected()
        loop.saver.wait()
        loop.say(summarise_rejected(loader.index, loader.bad, config.output))
        stopped = loop.stopped or loop.stop.agreed()
    if stopped:
        ranks.leave()
        loop.say(f"stopped on request after step {loop.step}, which is saved; the same command goes on from there")
        sys.exit(STOPPED)
