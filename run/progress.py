"""What a run says of itself: a live bar on a terminal, plain lines elsewhere, ``metrics.jsonl`` in either case."""

import datetime
import json
import math
import time
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from .checkpoint import write_atomically
from .ranks import Ranks
from .recipes import Config

IN_A_ROW = 5  # steps without a finite gradient, after which a run has no hope


class TooManySkipped(RuntimeError):
    """Step after step gives gradients that are not finite."""


class Report:
    """Means over the steps since the last log line, and where they go. Only rank 0 prints and writes.

    The sums stay on the device until they are printed, so that a step waits for nothing.
    """

    def __init__(self, config: Config, ranks: Ranks, *, start: int, total: int, steps_per_epoch: int):
        """``start``, ``total``: optimizer steps already taken, and at the end."""
        self.path = config.output / "metrics.jsonl"
        self.ranks = ranks
        self.every = config.log_every
        self.batch = config.batch_size
        self.groups = config.groups
        self.total = total
        self.steps_per_epoch = steps_per_epoch
        self.sums = torch.zeros(3, device=ranks.device)  # loss, similarity, steps with a finite gradient
        self.skipped = torch.zeros(3, device=ranks.device)  # in all, in a row, most in a row since the last line
        self.count = 0
        self.waited = 0.0  # seconds since the last line
        self.since = time.perf_counter()
        if ranks.first:
            self._forget_after(start)
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
        """The batches as they come, the time that they are waited for on the record."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def step(
        self, step: int, loss: torch.Tensor, similarity: torch.Tensor, finite: torch.Tensor, learning_rate: float
    ) -> None:
        """After optimizer step number ``step`` (the first is 1); ``loss``, ``similarity``, ``finite``: scalars of this
        rank. TooManySkipped after ``IN_A_ROW`` steps in a row whose gradients were not finite, at the next line."""
        self.sums += torch.where(finite, torch.stack([loss, similarity, torch.ones_like(loss)]), 0.0)
        total, row, most = self.skipped
        row = (row + 1) * ~finite
        self.skipped = torch.stack([total + ~finite, row, torch.maximum(most, row)])
        self.count += 1
        if self.ranks.first:
            self.bar.update(self.task, completed=step, epoch=step / self.steps_per_epoch)
        if step % self.every and step != self.total:
            return
        loss, similarity, _ = (self.ranks.mean(self.sums) / self.sums[2]).tolist()
        skipped, _, most = (int(number) for number in self.skipped.tolist())
        now = time.perf_counter()
        seconds = now - self.since
        pairs = self.count * self.batch / seconds
        record = {
            "step": step,
            "epoch": round(step / self.steps_per_epoch, 4),
            "loss": loss,
            "similarity": similarity,
            "learning_rate": learning_rate,
            "images_per_second": round(pairs / self.groups, 2),  # decoded ones: each makes a pair of views per group
            "pairs_per_second": round(pairs, 2),
            "data_wait": round(self.waited / seconds, 4),
            "skipped": skipped,
        }
        self.sums.zero_()
        self.skipped[2] = 0
        self.count, self.waited, self.since = 0, 0.0, now
        if self.ranks.first:
            self.record(record)
            self._show(record)
        if most >= IN_A_ROW:
            raise TooManySkipped(f"{most} steps in a row until step {step} had no finite gradient")

    def record(self, record: dict) -> None:
        """Appends one line to ``metrics.jsonl``."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(finite) + "\n")

    def say(self, text: str) -> None:
        """A line for the reader, above the bar."""
        if text and self.ranks.first:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def state_dict(self) -> dict:
        sums = self.ranks.mean(self.sums.clone())
        return {"sums": sums.cpu(), "skipped": self.skipped.cpu(), "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.sums.copy_(state["sums"])
        self.skipped.copy_(state["skipped"])
        self.count = state["count"]

    def _show(self, record: dict) -> None:
        figures = (
            f"loss {record['loss']:.4f}  similarity {record['similarity']:.3f}  "
            f"{record['images_per_second']:,.0f} images/s  {record['pairs_per_second']:,.0f} pairs/s  "
            f"waiting for data {record['data_wait']:.1%}"
            + (f"  {record['skipped']:,} steps skipped" if record["skipped"] else "")
        )
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
            # Lines without a loss are those of the evaluation at the end, which is done anew.
            if isinstance(record, dict) and "loss" in record and record.get("step", math.inf) <= step:
                kept.append(line + "\n")
        write_atomically(self.path, "".join(kept).encode())
