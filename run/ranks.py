"""The processes of a run: one alone, or the ranks that torchrun starts."""

import contextlib
import datetime
import itertools
import os
import re
import shutil
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported once there is a group, it would hold it for ever, and with it gloo's threads

from pipeline.headers import counted

from .recorded import release

# How long a collective may wait for a rank. The longest waits known: for a batch that cannot be read (480 s, see
# pipeline.waiting), and for a checkpoint that a slow disk takes. What takes longer waits elsewhere: ``Ranks.meet``.
_LIMIT = datetime.timedelta(minutes=30)
_DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST = {"12": 525, "13": 580}  # driver for a CUDA (docs.nvidia.com/deploy/cuda-compatibility, minor versions)
_PAUSES = 0.01, 1  # seconds: the first pause between two looks at the store, which doubles up to the last


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    count: int
    local_count: int  # on this machine
    device: torch.device
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @classmethod
    def join(cls, device: str) -> "Ranks":
        """Meets the other ranks (if torchrun started any) over NCCL on GPUs, gloo on CPUs.

        ``device``: auto, cpu or cuda. Raises ValueError where no GPU is to be had for cuda; for auto it is said where a
        machine has one that torch cannot use.
        """
        rank, count, local_rank, local_count = _places()
        gpus, why = _gpus() if device != "cpu" else (0, "")
        if device == "cuda" and gpus == 0:
            raise ValueError(f"--device cuda: {why or 'torch sees no GPU here'}; expected one, or --device cpu")
        if device != "cpu" and gpus:
            if local_count > gpus:
                raise ValueError(
                    f"{local_count} ranks on a machine with {counted(gpus, 'GPU')}; expected at most one rank per GPU"
                )
            place = torch.device("cuda", local_rank)
            torch.cuda.set_device(place)
        else:
            place = torch.device("cpu")
            if why and rank == 0:
                print(f"on the CPU, not on a GPU: {why}", flush=True)
        if count > 1:
            how: dict[str, Any] = {"timeout": _LIMIT} | ({"device_id": place} if place.type == "cuda" else {})
            if count == local_count:
                # torchrun's store outlives a restart, and with it the addresses of the dead (pytorch issue 135712).
                attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
                store, *_ = next(dist.rendezvous("env://"))
                how |= {"store": dist.PrefixStore(attempt, store), "rank": rank, "world_size": count}
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo", **how)
        return cls(rank, count, local_count, place)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def on_first(self, work: Callable[[], Any]) -> Any:
        """The result of ``work``, done by rank 0 while the others wait, however long; its ValueError or OSError is
        raised on all."""
        if self.count == 1:
            return work()
        store, key = self._store()
        if self.first:
            try:
                outcome = work(), None
            except (ValueError, OSError) as error:
                outcome = None, error
            store.set(key, b"")
        else:
            self._wait(lambda: store.check([key]))
            outcome = None
        said = [outcome]
        dist.broadcast_object_list(said, src=0)  # a store takes 8 MiB at most
        result, error = said[0]
        if error is not None:
            raise error
        return result

    def meet(self) -> None:
        """Waits for the other ranks, however long it takes: a collective would give up (``_LIMIT``)."""
        if self.count > 1:
            store, key = self._store()
            store.add(key, 1)
            self._wait(lambda: store.add(key, 0) == self.count)

    def _store(self):
        """The store of the process group, a key in it that no other call has used or will use."""
        number = next(self._numbers)
        if number == 0:  # a store may outlive its ranks, and what they left in it
            name = [uuid.uuid4().hex]
            dist.broadcast_object_list(name, src=0)
            object.__setattr__(self, "_name", name[0])
        return dist.distributed_c10d._get_default_store(), f"{self._name} {number}"

    @staticmethod
    def _wait(over: Callable[[], bool]) -> None:
        pause, longest = _PAUSES
        while not over():
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks, in place."""
        return self.sum(tensor).div_(self.count)

    def gather(self, value: Any) -> list[Any]:
        """The objects of all ranks, on all of them."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of one rank on all of them, in place."""
        if self.count > 1:
            dist.broadcast(tensor, source)
        return tensor

    def all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, of one shape, on all of them."""
        if self.count == 1:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(tensors, tensor)
        return tensors

    @staticmethod
    def leave() -> None:
        """Parts from the other ranks; each goes on alone."""
        if dist.is_initialized():
            release()
            dist.destroy_process_group()

    def threads(self, asked: int = 0) -> int:
        """How many threads this rank takes: as many as are ``asked`` for, or for 0 its share of this machine's cores.
        With a GPU two of them stay free, for the threads that launch kernels, and more than 8 threads only get in each
        other's way, as the GPU decodes (H100: 15,350 images/s by 6 threads, 14,840 by 16)."""
        share = len(os.sched_getaffinity(0)) // self.local_count
        return asked or max(1, min(8, share - 2) if self.device.type == "cuda" else share)


def _places() -> tuple[int, ...]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them. Wrong ones end the process with a line:
    all ranks would wait for one that does not exist. Any rank says it, as only one may have them wrong."""
    names = ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")
    given = {name: os.environ.get(name, default) for name, default in names}
    with contextlib.suppress(ValueError):
        rank, count, local_rank, local_count = map(int, given.values())
        if 0 <= rank < count and local_rank >= 0 and local_count > 0:
            return rank, count, local_rank, local_count
    said = " ".join(f"{name}={value}" for name, value in given.items())
    print(f"{said}: expected numbers, RANK below WORLD_SIZE, as torchrun sets them, or none of these", file=sys.stderr)
    sys.exit(2)


def _gpus() -> tuple[int, str]:
    """How many GPUs torch can use and, if none although a driver is here and nothing hides them, why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of several lines
        # The count alone is NVML's, which an old driver answers as well.
        if torch.cuda.is_available():
            return torch.cuda.device_count(), ""
        there = _DRIVER.exists() or shutil.which("nvidia-smi")
        if not there or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return 0, ""
        cuda = torch.version.cuda
        if cuda is None:
            return 0, f"torch {torch.__version__} is built without CUDA"
        driver = re.search(r"\b(\d{3,})\.\d+\S*", _DRIVER.read_text()) if _DRIVER.exists() else None
        oldest = _OLDEST.get(cuda.partition(".")[0], 0)
        if driver and int(driver[1]) < oldest:
            needs = f"CUDA {cuda}, for which torch is built, needs driver {oldest} or newer"
            return 0, f"{needs}, and this is {driver[0]}; docs/install.md names the packages for older ones"
        try:
            torch.cuda.init()
        except RuntimeError as error:
            return 0, f"NVIDIA's driver is here, but torch says: {str(error).splitlines()[0].partition('. ')[0]}"
        return 0, "NVIDIA's driver is here, but torch sees no GPU"
