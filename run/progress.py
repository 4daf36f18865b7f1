"""What a run says of itself: lines, on a terminal above a bar; ``metrics.jsonl`` and, where installed, TensorBoard."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text
from torch import Tensor

from pipeline.headers import counted
from pipeline.shown import Screen, paints

from .checkpoint import write_atomically
from .ranks import Ranks

IN_A_ROW = 5  # steps without a finite gradient, after which a run has no hope
# How figures look on the screen; of the last ones only those for which there is room. Others are in metrics.jsonl only.
SHOWN = {
    "loss": "loss {:.4f}".format,
    "feature_std": "spread {:.3f}".format,
    "images_per_second": lambda rate: f"{rate:,.{0 if rate >= 10 else 2}f} images/s",
    "left": lambda s: f"{s // 3600:.0f}:{s // 60 % 60:02.0f}:{s // 1 % 60:02.0f} left",
    "skipped": lambda steps: f"{counted(steps, 'step')} skipped" if steps else "",
    "similarity": "similarity {:.3f}".format,
    "data_wait": "waiting for data {:.1%}".format,
    "mfu": "MFU {:.1%}".format,
    "pairs_per_second": lambda rate: f"{rate:,.{0 if rate >= 10 else 2}f} pairs/s",
}


class TooManySkipped(RuntimeError):
    """Step after step gives gradients that are not finite."""


class Fitting:
    """As many words, from the first on, as a line has room for."""

    def __init__(self, words: Sequence[str]):
        self.words = words

    def __rich_console__(self, console, options) -> Iterator[Text]:
        fitting = 0
        while fitting < len(self.words) and cell_len("  ".join(self.words[: fitting + 1])) <= options.max_width:
            fitting += 1
        yield Text("  ".join(self.words[:fitting]))

    def __rich_measure__(self, console, options) -> Measurement:
        return Measurement(0, options.max_width)


class FiguresColumn(ProgressColumn):
    """The figures of the last line, with the time that is left as it is now."""

    def render(self, task: Task) -> Fitting:
        return Fitting(words(task.fields["record"], task.time_remaining) or [task.description])


def words(record: dict, left: float | None) -> list[str]:
    """The figures of a record, and the seconds that are left, as they are ``SHOWN``."""
    figures = record if left is None else record | {"left": left}
    return [word for name, form in SHOWN.items() if name in figures and (word := form(figures[name]))]


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
        is given. ``rates``: {name: how much of it one step is}, for figures per second. ``every``: steps between log
        lines. ``start``, ``total``: optimizer steps already taken, and at the end."""
        self.path = output and output / "metrics.jsonl"
        self.ranks = ranks
        self.figures, self.rates = tuple(figures), rates
        self.every = every
        self.total = total
        self.steps_per_epoch = steps_per_epoch
        self.sums = torch.zeros(len(figures) + 1, device=ranks.device)  # the last: steps with a finite gradient
        self.skipped = torch.zeros(3, device=ranks.device)  # in all, in a row, most in a row since the last line
        self.count = 0  # steps of this process since the last line, for its speed
        self.waits = []  # since the last line: moments before and after each, see ``_now``
        self.since = time.perf_counter()
        self.fresh = True  # this process has taken no step
        if ranks.first:
            if output:
                kept = self._forget_after(start)
                last = min(start, total - 1)  # the evaluation at the end is done anew
                self.tensorboard = _tensorboard(output / "tensorboard", last)
                for record in kept:
                    if record["step"] > last:  # TensorBoard has forgotten it
                        self._add(record)
            console = Screen()
            self.bar = Progress(
                TextColumn("epoch {task.fields[epoch]:.2f}"), BarColumn(8), FiguresColumn(Column(ratio=1)),
                console=console, disable=not paints(console), redirect_stderr=paints(Console(stderr=True)),
                expand=True, transient=True, speed_estimate_period=600,
            )  # fmt: skip
            epoch = start / steps_per_epoch
            self.task = self.bar.add_task("the first step", total=total, completed=start, epoch=epoch, record={})

    def __enter__(self) -> "Report":
        if self.ranks.first:
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.ranks.first:
            self.bar.stop()

    def waiting_for(self, batches: Iterator) -> Iterator:
        """The batches as they come; how long each is waited for is noted.

        On a GPU that is the time in which the GPU has nothing to do, not this thread's: as long as steps are queued, to
        wait here costs nothing.
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
        """Seconds that batches were waited for since the last line; the device has to have done all that was queued."""
        if self.ranks.device.type != "cuda":
            return sum(end - start for start, end in self.waits)
        return sum(start.elapsed_time(end) for start, end in self.waits) / 1000

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done within counts neither as training nor as waiting, and may show a bar of its own."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        if self.ranks.first:
            self.bar.stop()
        yield
        if self.ranks.first:
            self.bar.start()
        self.since += time.perf_counter() - start

    def step(self, step: int, values: Sequence[Tensor], finite: Tensor, learning_rate: float) -> None:
        """Is told of each optimizer step, number ``step`` (the first is 1). ``values``, in the order of ``figures``,
        and ``finite`` are scalars of this rank. TooManySkipped, at the next line, after ``IN_A_ROW`` steps in a row
        whose gradients were not finite. So that there is something to see, the first step of a process gets a line of
        its own on the screen (in ``metrics.jsonl`` only the first of the run); it counts in the next line too."""
        self.sums += torch.where(finite, torch.stack([*values, torch.ones_like(values[0])]), 0.0)
        total, row, most = self.skipped
        row = (row + 1) * ~finite
        self.skipped = torch.stack([total + ~finite, row, torch.maximum(most, row)])
        self.count += 1
        if self.ranks.first:
            self.bar.update(self.task, completed=step, epoch=step / self.steps_per_epoch)
        if self.path is None:
            return
        fresh, self.fresh = self.fresh, False
        if step % self.every and step != self.total:
            if fresh:
                self._first(step, values, learning_rate)
            return
        means = (self.ranks.mean(self.sums) / self.sums[-1]).tolist()
        skipped, _, most = (int(number) for number in self.skipped.tolist())
        now = time.perf_counter()
        seconds = now - self.since
        record = self._record(step, means, learning_rate)
        record |= {name: float(f"{self.count * amount / seconds:.5g}") for name, amount in self.rates.items()}
        record |= {"data_wait": round(self._waited() / seconds, 4), "skipped": skipped}
        self.sums.zero_()
        self.skipped[2].zero_()  # by a kernel: a number that is copied there would be waited for
        self.count, self.waits, self.since = 0, [], now
        if self.ranks.first:
            self.record(record)
            self._show(record)
        if most >= IN_A_ROW:
            raise TooManySkipped(f"{most} steps in a row until step {step} had no finite gradient")

    def _first(self, step: int, values: Sequence[Tensor], learning_rate: float) -> None:
        """Tells of one step, whose speed says nothing of the others."""
        record = self._record(step, self.ranks.mean(torch.stack([*values])).tolist(), learning_rate)
        record["skipped"] = int(self.skipped[0])
        if self.ranks.first:
            if step == 1:
                self.record(record)
            self._show(record)

    def _record(self, step: int, means: Sequence[float], learning_rate: float) -> dict:
        record = {"step": step, "epoch": round(step / self.steps_per_epoch, 4)}
        return record | dict(zip(self.figures, means, strict=False)) | {"learning_rate": learning_rate}

    def record(self, record: dict) -> None:
        """Appends one line, of a step, to ``metrics.jsonl``."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(finite) + "\n")
        self._add(record)

    def _add(self, record: dict) -> None:
        """What a line says, in TensorBoard, in groups: train, speed, evaluation."""
        if self.tensorboard is None:
            return
        for name, value in record.items():
            group = "speed" if name in (*self.rates, "data_wait") else "train" if "loss" in record else "evaluation"
            if name != "step" and (name != "epoch" or group == "train"):
                tag = {"feature_std": "spread"}.get(name, name)
                self.tensorboard.add_scalar(f"{group}/{tag}", math.nan if value is None else value, record["step"])
        self.tensorboard.flush()

    def say(self, text: str) -> None:
        """A line for the reader, above the bar."""
        if text and self.ranks.first:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def state_dict(self) -> dict:
        """What the next line depends on, with the sums of each rank: [ranks, figures + 1]. For all ranks."""
        return {"sums": torch.stack(self.ranks.all(self.sums)), "skipped": self.skipped.clone()}

    def load_state_dict(self, state: dict) -> None:
        """Each rank gets its own sums again, or, where there were more or fewer, their mean."""
        sums = torch.atleast_2d(state["sums"])  # in older checkpoints the mean alone
        self.sums.copy_(sums[self.ranks.rank] if len(sums) == self.ranks.count else sums.mean(0))
        self.skipped.copy_(state["skipped"])

    def _show(self, record: dict) -> None:
        self.bar.update(self.task, record=record)
        at = [f"epoch {record['epoch']:.2f}", f"step {record['step']}/{self.total}"]
        said = at + words(record, self.bar.tasks[0].time_remaining)
        self.say("  ".join(said)) if self.bar.disable else self.bar.console.print(Fitting(said))

    def _forget_after(self, step: int) -> list[dict]:
        """The records of what was logged. Drops lines of steps that will be taken again, and what a crash left torn."""
        if not self.path.exists():
            return []
        kept = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                continue
            last = step if "loss" in record else min(step, self.total - 1)  # the evaluation at the end is done anew
            if record["step"] <= last:
                kept.append((line + "\n", record))
        write_atomically(self.path, "".join(line for line, _ in kept).encode())
        return [record for _, record in kept]


def _tensorboard(folder: Path, last: int):
    """TensorBoard's writer, which has it forget all behind the ``last`` step; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=last + 1)
