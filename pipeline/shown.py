"""How far long work is: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

_SAID = 30  # seconds between two lines


class Screen(Console):
    """Rich's console, which raises BrokenPipeError, as ``print`` does, where rich ends the process without a word."""

    def on_broken_pipe(self) -> None:
        raise  # what it was called for


def paints(console: Console) -> bool:
    """Whether a bar can be repainted there. Under FORCE_COLOR rich alone would take a file for a terminal."""
    return console.is_interactive and console.file.isatty()


@contextmanager
def shown(what: str, doing: str) -> Iterator[Callable[..., None]]:
    """A function to be told how much of all is done, and what from now on, if no longer ``doing``. Shown on stderr."""
    console, said = Console(stderr=True), time.monotonic()
    what_column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = TextColumn("{task.description}", markup=False, table_column=what_column), BarColumn(20)
    columns += TextColumn("{task.completed:,}/{task.total:,}"), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not paints(console), transient=True, expand=True) as bar:
        task = bar.add_task("", total=1, visible=False)

        def progress(done: int, total: int, doing: str = doing) -> None:
            nonlocal said
            bar.update(task, description=f"{what}: {doing}", completed=done, total=total, visible=True)
            if bar.disable and time.monotonic() > said + _SAID:
                said = time.monotonic()
                print(f"{what}: {doing}, {done:,} of {total:,}", file=sys.stderr, flush=True)

        yield progress
