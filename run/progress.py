"""What a run says of itself: a live bar on a terminal, plain lines elsewhere, ``metrics.jsonl`` in either case."""

import datetime
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor

from .checkpoint import write_atomically
from .ranks import Ranks

IN_A_ROW = 5  # steps without a finite gradient, after which a run has no hope
SHOWN = {  # how the figures of a line look on the screen; the others are in metrics.jsonl only
    "loss": "loss {:.4f}".format,
    "similarity": "similarity {:.3f}".format,
    "feature_std": "spread {:.3f}".format,
    "images_per_second": lambda rate: f"{rate:,.{0 if rate >= 10 else 2}f} images/s",
    "pairs_per_second": lambda rate: f"{rate:,.{0 if rate >= 10 else 2}f} pairs/s",
    "mfu": "MFU {:.1%}".format,
    "data_wait": "waiting for data {:.1%}".format,
}


class TooManySkipped(RuntimeError):
    """Step after step gives gradients that are not finite."""


class Report:
    """Means over the steps since the last log line, and where they go. Only rank 0 prints and writes.

    The sums stay on the device until they are printed, so that a step waits for nothing. With TensorBoard installed,
    all that goes to ``metrics.jsonl`` goes there too.
    """

    def __init__(
        self, output: Path | None, ranks: Ranks, *, figures: Sequence[str], rates: dict[str, float], every: int,
        start: int, total: int, steps_per_epoch: int,
    ):  # fmt: skip
        """``output``: None where nothing is to be written, nor shown step by step. ``figures``: names of what ``step``
        is given. ``rates``: what one step adds to what is counted by the second.
        ``every``: steps between log lines. ``start``, ``total``: optimizer steps already taken, and at the end."""
        self.path = output and output / "metrics.jsonl"
        self.ranks = ranks
        self.figures, self.rates = tuple(figures), rates
        self.every = every
        self.total = total
        self.steps_per_epoch = steps_per_epoch
        self.sums = torch.zeros(len(figures) + 1, device=ranks.device)  # the last: steps with a finite gradient
        self.skipped = torch.zeros(3, device=ranks.device)  # in all, in a row, most in a row since the last line
        self.count = 0
        self.waits = []  # since the last line: moments before and after each, see ``_now``
        self.since = time.perf_counter()
        if ranks.first:
            if output:
                self._forget_after(start)
                self.tensorboard = _tensorboard(output / "tensorboard", start)
            console = Console()
            self.bar = Progress(
                TextColumn("epoch {task.fields[epoch]:.2f}"), BarColumn(16), MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
                console=console, disable=not console.is_terminal, redirect_stderr=False, expand=True,
            )  # fmt: skip
            epoch = start / steps_per_epoch
            self.task = self.bar.add_task("", total=total, completed=start, epoch=epoch, figures="")

    def __enter__(self) -> "Report":
        if self.ranks.first:
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.ranks.first:
            self.bar.stop()

    def waiting_for(self, batches: Iterator) -> Iterator:
        """The batches as they come, the time that they are waited for on the record.

        On a GPU the time that it has nothing to do, not that of this thread: as long as steps are queued, whoever waits
        here costs nothing.
        """
        while True:
            start = self._now()
            batch = next(batches, None)
            self.waits.append((start, self._now()))
            if batch is None:
                return
            yield batch

    def _now(self):
        """This moment: seconds, or on a GPU an event that it reaches when all that is queued by now is done."""
        if self.ranks.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> tuple[float, float]:
        """Seconds since the last mark or line, and those of them in which batches were waited for."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        past = now - self.since, self._waited()
        self.since, self.waits = now, []
        return past

    def _waited(self) -> float:
        """Seconds since the last line; the device has to have done all that was queued."""
        if self.ranks.device.type != "cuda":
            return sum(end - start for start, end in self.waits)
        return sum(start.elapsed_time(end) for start, end in self.waits) / 1000

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done within counts neither as training nor as waiting."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def step(self, step: int, values: Sequence[Tensor], finite: Tensor, learning_rate: float) -> None:
        """After optimizer step number ``step`` (the first is 1). ``values``, in the order of ``figures``, and
        ``finite`` are scalars of this rank. TooManySkipped after ``IN_A_ROW`` steps in a row whose gradients were not
        finite, at the next line."""
        self.sums += torch.where(finite, torch.stack([*values, torch.ones_like(values[0])]), 0.0)
        total, row, most = self.skipped
        row = (row + 1) * ~finite
        self.skipped = torch.stack([total + ~finite, row, torch.maximum(most, row)])
        self.count += 1
        if self.ranks.first:
            self.bar.update(self.task, completed=step, epoch=step / self.steps_per_epoch)
        if self.path is None or (step % self.every and step != self.total):
            return
        means = (self.ranks.mean(self.sums) / self.sums[-1]).tolist()
        skipped, _, most = (int(number) for number in self.skipped.tolist())
        now = time.perf_counter()
        seconds = now - self.since
        record = {"step": step, "epoch": round(step / self.steps_per_epoch, 4)}
        record |= dict(zip(self.figures, means, strict=False)) | {"learning_rate": learning_rate}
        record |= {name: float(f"{self.count * amount / seconds:.5g}") for name, amount in self.rates.items()}
        record |= {"data_wait": round(self._waited() / seconds, 4), "skipped": skipped}
        self.sums.zero_()
        self.skipped[2] = 0
        self.count, self.waits, self.since = 0, [], now
        if self.ranks.first:
            self.record(record)
            self._show(record)
        if most >= IN_A_ROW:
            raise TooManySkipped(f"{most} steps in a row until step {step} had no finite gradient")

    def record(self, record: dict) -> None:
        """Appends one line, of a step, to ``metrics.jsonl``."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(finite) + "\n")
        if self.tensorboard is not None:
            for name, value in record.items():
                if name != "step":
                    self.tensorboard.add_scalar(name, value, record["step"])
            self.tensorboard.flush()

    def say(self, text: str) -> None:
        """A line for the reader, above the bar."""
        if text and self.ranks.first:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def state_dict(self) -> dict:
        sums = self.ranks.mean(self.sums.clone())
        return {"sums": sums, "skipped": self.skipped.clone(), "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.sums.copy_(state["sums"])
        self.skipped.copy_(state["skipped"])
        self.count = state["count"]

    def _show(self, record: dict) -> None:
        figures = [form(record[name]) for name, form in SHOWN.items() if name in record]
        if record["skipped"]:
            figures.append(f"{record['skipped']:,} steps skipped")
        figures = "  ".join(figures)
        self.bar.update(self.task, figures=figures)
        if self.bar.disable:
            left = self.bar.tasks[0].time_remaining
            eta = "-" if left is None else datetime.timedelta(seconds=round(left))
            self.say(f"epoch {record['epoch']:.2f}  step {record['step']}/{self.total}  {figures}  eta {eta}")

    def _forget_after(self, step: int) -> None:
        """Drops lines of steps that will be taken again, and what a crash left unfinished."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if not isinstance(record, dict):
                continue
            last = step if "loss" in record else min(step, self.total - 1)  # the evaluation at the end is done anew
            if record.get("step", math.inf) <= last:
                kept.append(line + "\n")
        write_atomically(self.path, "".join(kept).encode())


def _tensorboard(folder: Path, start: int):
    """TensorBoard's writer of what comes after step ``start``, or None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=start + 1)
