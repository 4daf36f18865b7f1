"""Checkpoints that are either complete or not there.

``checkpoints/step-00001500.pt`` holds, in torch's ``weights_only`` format, everything that the next step depends on:

    network, key_network    state dicts of the modules (key_network: with a momentum encoder only; ``detector`` in their
                            place is that of detection)
    optimizer, clip         state dicts; in pretraining their tensors are as long as all parameters together
                            (``model/flat.py``) and not sharded, whatever the ranks that saved them
    ema                     of fine-tuning: the mean weights
    origin                  where the encoder that the run began with comes from and what it is (of detection: what
                            the detector is), as JSON
    report                  running means of the log since its last line, and the count of skipped steps
    step                    optimizer steps taken
    bad                     {sample: reason} of the images found bad so far
    run                     the config, the data's fingerprint and the versions, as JSON

There is no random state and no position of a loader: both follow from the step. Each tensor's bytes carry a CRC-32.
Sharded networks (FSDP2) are saved whole, in the same form, so any number of ranks goes on from them. (The format of
torch.distributed.checkpoint keeps its metadata as a pickle, which is not read from users' files here.)
"""

import contextlib
import errno
import json
import os
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from model.export import weights
from pipeline.cache import replacing
from pipeline.headers import MAY_PASS

UNREAD = MAY_PASS | {errno.EACCES, errno.EPERM, errno.ENOENT}  # errors that say nothing of what a file holds


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that a crash at any moment leaves the old or the new one, whole."""
    with replacing(path, shared=False) as partial:
        partial.write_bytes(data)


def write_weights(module: nn.Module, path: Path, description: dict[str, Any]) -> Path:
    """Writes the state dict of a module as safetensors, whole or not at all, and its description as JSON beside it."""
    write_atomically(path, weights(module))
    write_atomically(path.with_suffix(".json"), (json.dumps(description, indent=2) + "\n").encode())
    return path


def save(folder: Path, step: int, state: dict[str, Any], *, last: int, every: int) -> Path:
    """Saves ``state`` as the checkpoint of ``step``, and then removes older ones.

    The newest ``last`` stay, counting this one, and those whose step is a multiple of ``every`` (0: none of them). Any
    of a later step stay too: they are damaged, as a run goes on from the newest that is whole. OSError where the disk
    does not take it; then nothing has changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    for torn in folder.glob("step-*.pt.partial"):  # left by a process that was killed
        with contextlib.suppress(OSError):
            torn.unlink()
    with replacing(path, shared=False) as partial, partial.open("wb") as file:
        try:
            torch.save(state, file)
        except (OSError, RuntimeError) as error:  # torch's writer covers up an OSError when it closes
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from None
    for old in [old for old in _all(folder) if step_of(old) <= step][:-last]:
        if not every or step_of(old) % every:
            old.unlink()
    return path


def copied(**parts: Any) -> dict[str, Any]:
    """The state dicts of the parts that are not None, with copies of their tensors.

    A GPU's tensors are copied on the GPU, in the order of its work, so that nobody waits. The copies may take half of
    its free memory, as the decoder may need more of it too; those for which that is not enough go to the CPU and are
    waited for. Tensors that share a storage (``model/flat.py``) are copied together."""
    room: dict[torch.device, int] = {}  # bytes

    def cloned(whole: Tensor) -> Tensor:
        if whole.is_cuda:
            room.setdefault(whole.device, torch.cuda.mem_get_info(whole.device)[0] // 2)
            room[whole.device] -= len(whole)
            if room[whole.device] < 0:
                return whole.cpu()
        return whole.clone()

    return _by_storage({name: part.state_dict() for name, part in parts.items() if part is not None}, cloned)


def on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with its tensors on the CPU. What is on a GPU comes on a stream of its own, beside the training."""
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def fetched(whole: Tensor) -> Tensor:
        if not whole.is_cuda:
            return whole
        if whole.device not in streams:
            streams[whole.device] = torch.cuda.Stream(whole.device)
            streams[whole.device].wait_stream(torch.cuda.current_stream(whole.device))
        with torch.cuda.stream(streams[whole.device]):
            return torch.empty_like(whole, device="cpu", pin_memory=True).copy_(whole, non_blocking=True)

    found = _by_storage(state, fetched)
    for stream in streams.values():
        stream.synchronize()
    return found


def _by_storage(state: dict[str, Any], copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """``state`` with its tensors in other storages: ``copy`` gets each of their storages once, as uint8 [bytes], and
    returns such a tensor, in whose storage they then lie."""
    storages: dict[int, torch.UntypedStorage] = {}

    def moved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[storage._cdata] = copy(whole).untyped_storage()
        there = storages[storage._cdata]
        empty = torch.empty(0, dtype=tensor.dtype, device=there.device)
        return empty.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())

    return tree_map_only(Tensor, moved, state)


class Saver:
    """Saves checkpoints beside the training, one after the other. An OSError of one is raised by the next ``save``, or
    by ``wait``."""

    def __init__(self, folder: Path, *, last: int, every: int):
        self.folder, self.how = folder, {"last": last, "every": every}
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """``save`` of this module; nobody may change ``state``, whose tensors may be on a GPU, any more."""
        self.wait()
        self.pending = self.thread.submit(lambda: save(self.folder, step, on_cpu(state), **self.how))

    def wait(self) -> None:
        """Until the last one is on the disk."""
        if self.pending is not None:
            self.pending, pending = None, self.pending
            pending.result()


def step_of(path: Path) -> int:
    """The optimizer steps that were taken before a checkpoint, from its name."""
    return int(path.stem.removeprefix("step-"))


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The whole checkpoint of the highest step, and a line on each newer one that is damaged.

    ValueError if there are checkpoints, all of them damaged; OSError for one that cannot be read, which may be whole.
    """
    damaged = []
    for path in reversed(_all(folder)):
        try:
            reason = _damage(path)
        except OSError:
            if path in _all(folder):
                raise
            return newest(folder)  # of a run that goes on, which has removed it and saved another
        if reason is None:
            return path, damaged
        damaged.append(f"{path} is damaged ({reason})")
    if damaged:
        raise ValueError(f"{'; '.join(damaged)}; no other is left: remove {folder} to begin again")
    return None, []


def load(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, on the CPU. Only tensors and plain values are unpickled; ValueError if it is torn,
    OSError if it cannot be read."""
    try:
        return _read(path)
    except Exception as error:  # whatever zip, pickle or torch find wrong with it
        _check_read(path, error)
        what = f"{path} is no readable checkpoint ({type(error).__name__})"
        raise ValueError(f"{what}; remove it to continue from the one before") from error


def _read(path: Path) -> dict[str, Any]:
    # Mapped: several ranks of a machine share the pages, and a sharded one takes only its part. Opened here, as torch
    # takes no name that is not UTF-8, and maps no file without one.
    with path.open("rb") as file:
        return torch.load(f"/proc/self/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True)


def _check_read(path: Path, error: Exception) -> None:
    """OSError where the ``error`` of reading a checkpoint says nothing of what it holds."""
    short = os.strerror(errno.ENOMEM)  # torch has it in a RuntimeError
    memory = isinstance(error, MemoryError) or short in str(error)
    if memory or (isinstance(error, OSError) and error.errno in UNREAD):
        what = f"{path} cannot be read ({short if memory else error.strerror})"
        raise OSError(f"{what}; expected that it can, or its removal to continue from the one before") from None


def _damage(path: Path) -> str | None:
    """What is wrong with the bytes of a checkpoint (torch itself does not compare its checksums), or None."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if not broken:
            _read(path)  # zipfile leaves headers aside that torch reads
    except Exception as error:  # zipfile raises nearly anything on damaged headers
        _check_read(path, error)
        return "".join(str(error).splitlines()[:1]) or type(error).__name__
    return f"checksum of {broken}" if broken else None


def _all(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first, without what a user has put beside them by another name."""
    return sorted((path for path in folder.glob("step-*.pt") if path.stem[5:].isdecimal()), key=step_of)
