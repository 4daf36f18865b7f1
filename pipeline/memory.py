"""How much of a batch is decoded at a time, so that large images do not fill the memory.

The decoder makes whole images, 3 bytes a pixel, of all that it is given at a time. Beside them are its own buffers and
the files. Measured with DALI 2.4 on a CPU, batches of 8 images of 12 megapixels on 2 threads, bytes a pixel at most:
JPEG 4.2, turned 5.1, progressive 5.8, WebP 5, PNG 6.7 to 7.1, uncompressed TIFF and BMP 9.4 and 10.9, PNG of 16 bits
12.4. It does not let go of them between batches.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from pipeline.headers import counted

_MOST = 1 << 29  # pixels: 1.6 GB decoded; 22 images of 24 megapixels, enough for all threads to have something to do
_COMMON, _WORST = 7, 13  # bytes a pixel, of compressed images of 8 bits and of any; see above
# Batches of views that exist at a time: one ahead, one in use and, on a GPU, two that are still read (``held.py``).
_BATCHES = 4
# Bytes that the operations of a view hold besides, for each of its pixels: on a GPU colours are in float32. Measured as
# above, with the augmentation of ImageNet, by operators of a CPU and of a GPU; without colour and blur it is 1.
_OPERATIONS = 20
_WORTH_SAYING = 1e9  # bytes
_ROOT = Path("/")

# For each version of control groups: folder; files of the limit and of what is used; what of that can be reclaimed.
_GROUPS = {
    "0::": ("", "memory.max", "memory.current", "inactive_file "),
    ":memory:": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
}


def free(device: torch.device) -> int:
    """Bytes that this process can have: its share of the machine's, or of its control groups', and of the GPU's."""
    found = [int(_after(_ROOT / "proc/meminfo", "MemAvailable:")) * 1024, *_left_by_groups()]
    found = [max(0, min(found)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))]  # ranks of torchrun share a machine
    if device.type == "cuda":
        found += [torch.cuda.mem_get_info(device)[0]]
    return min(found)


def lacking(said: str) -> bool:
    """Whether an error says, in torch's words or in DALI's, that there was not enough memory, of a GPU or other."""
    return any(words in said.lower() for words in ("out of memory", "can't allocate", "allocation failed", "bad_alloc"))


def _left_by_groups():
    """Bytes that each of the control groups around this process leaves it."""
    for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
        for mark, (mount, limit, used, cache) in _GROUPS.items():
            _, found, path = line.partition(mark)
            group = _ROOT / "sys/fs/cgroup" / mount / path.lstrip("/")
            for folder in (group, *group.parents) if found else ():
                with contextlib.suppress(OSError, ValueError):  # no group, or one without a limit: "max"
                    left = int((folder / limit).read_text()) - int((folder / used).read_text())
                    yield left + int(_after(folder / "memory.stat", cache))


def _after(file, name):
    """The word that follows a name at the beginning of a line."""
    return next(line[len(name) :].split()[0] for line in file.read_text().splitlines() if line.startswith(name))


def most_pixels(device: torch.device) -> int:
    """Pixels that are decoded at a time, whatever kind of file they come from."""
    return min(_MOST, free(device) // _WORST)


def parts(sizes: np.ndarray, pixels: int, images: int) -> Iterator[slice]:
    """Cuts images of ``sizes`` [n,2] into runs of at most ``pixels`` and ``images``; of one image, if that has more."""
    first = total = 0
    for i, size in enumerate(sizes.astype(np.int64).prod(1).tolist()):
        if i > first and (total + size > pixels or i - first == images):
            yield slice(first, i)
            first, total = i, 0
        total += size
    if len(sizes):
        yield slice(first, len(sizes))


def plan(index, *, batch: int, image_size: int, views: int, device: torch.device) -> str:
    """A line for the screen on the memory that batches of ``index`` take, "" where it is little; ValueError where there
    is not enough. ``batch``: images of this process."""
    pixels, left = index.sizes.astype(np.int64).prod(1), free(device)
    largest, most = int(pixels.argmax()), most_pixels(device)
    crops = (3 * _BATCHES + _OPERATIONS) * batch * views * image_size**2
    if crops + _COMMON * pixels[largest] > left:
        raise ValueError(
            f"not enough memory: {left / 1e9:.2g} GB for each process, and it takes {crops / 1e9:.2g} GB for crops of "
            f"{counted(batch, 'image')} and {_COMMON * pixels[largest] / 1e9:.2g} GB to decode "
            f"{index.paths[largest]!r}; expected a smaller --batch-size, fewer ranks on a machine, or smaller images"
        )
    worst = int(np.partition(pixels, len(pixels) - batch)[len(pixels) - batch :].sum())
    if 3 * worst < _WORTH_SAYING:
        return ""
    mean = 3 * batch * pixels.mean()
    said = f"to decode {counted(batch, 'image')}: {3 * worst / 1e9:.1f} GB at most, {mean / 1e9:.1f} on the mean"
    return said + (f", in parts of at most {3 * most / 1e9:.1f} GB, or one image" if worst > most else "")
