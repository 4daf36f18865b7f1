"""Checkpoints that are either complete or not there.

``checkpoints/step-00001500.pt`` holds, in torch's ``weights_only`` format, everything that the next step depends on:
weights, optimizer and clip state, the step, the running means of the log, the config and the versions. There is no
random state and no position of a loader: both follow from the step.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

KEPT = 3  # the newest ones; older ones are removed after a new one is complete


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that a crash at any moment leaves the old or the new one, whole."""
    with _replacing(path) as partial:
        partial.write_bytes(data)


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Saves ``state`` as the checkpoint of ``step`` and removes all but the newest few."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    with _replacing(path) as partial:
        torch.save(state, partial)
    for old in _all(folder)[:-KEPT]:
        old.unlink()
    return path


def newest(folder: Path) -> Path | None:
    """The checkpoint of the highest step."""
    return max(_all(folder), default=None)


def load(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, on the CPU. Only tensors and plain values are unpickled; ValueError if it is torn."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever zip, pickle or torch find wrong with it
        what = f"{path} is no readable checkpoint ({type(error).__name__})"
        raise ValueError(f"{what}; remove it to continue from the one before") from error


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A partial file beside ``path`` that takes its name, safely on disk, when the block ends without an error."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        _sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)  # the rename itself


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
