"""Batches for training and evaluation, from an index through the DALI graph; bad files are replaced or skipped."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import formats, graph, headers, inflight, memory, objects, stream, waiting
from pipeline.headers import counted, printable
from pipeline.held import Held
from pipeline.index import Index

_BAD_FLOOR = 20  # so many bad files are allowed however few there are
_LOOKS = 3  # a file with an unclear error is bad if it fails so often while others can be read
_OTHERS = 9  # files of one store that are tried then, with that one


def bad_limit(files: int, share: float) -> int:
    """How many of ``files`` may be bad before a run stops: a ``share`` or the floor, but never all of them."""
    return min(max(_BAD_FLOOR, int(share * files)), files - 1) if share else 0


@dataclasses.dataclass
class Batch:
    """One rank's part of a global batch, B images, all on the device."""

    # uint8 [B,H,W,3] each; DALI's own memory. On a GPU queue all that reads them on the current stream before you ask
    # for the next batch: see pipeline/held.py.
    views: tuple[torch.Tensor, ...]
    boxes: torch.Tensor  # int32 [B,views,4] (y, x, h, w), pixels of the upright source image as it was indexed
    flips: torch.Tensor  # bool [B,views]
    sample: torch.Tensor  # int64 [B] position in the index; of the replacement where a file is bad
    label: torch.Tensor  # int64 [B], -1 = none


class TooManyBadFiles(ValueError):
    """More of the images cannot be used than a run may leave out."""


def refuse_too_many(bad, index, share):
    """TooManyBadFiles where more of the files of ``index`` than ``share`` are ``bad``, {sample: reason}."""
    limit = bad_limit(len(index), share)
    if len(bad) > limit:
        named = "; ".join(f"{printable(index.paths[s])}: {why}" for s, why in itertools.islice(bad.items(), 5))
        found = f"{len(bad):,} of {len(index):,} images in {index.root}"
        raise TooManyBadFiles(f"{found} cannot be used, at most {limit:,} may: {named}")


class Loader:
    """Endless, numbered batches of two augmented views (one with labels); ``batch_size`` counts those of all ranks.

    Batch b belongs to epoch b // batches_per_epoch; an incomplete last batch of an epoch is dropped. What a batch holds
    depends on its number, the seed, the index and the augmentation only. ``bad``: {sample: reason} of those that cannot
    be used, as far as they are known. A file that cannot be read for a reason that may pass is not one of them but is
    waited for. ``record``: a file that names the samples in flight as long as there are any. Raises ValueError for
    sizes that do not divide and, while iterating, TooManyBadFiles when more than ``max_bad`` of the index is bad, and
    OSError when a file cannot be read for too long.
    """

    def __init__(
        self,
        index: Index,
        augmentation: stream.Augments,
        *,
        image_size: int,
        batch_size: int,
        seed: int,
        device: torch.device,
        threads: int,
        rank: int = 0,
        ranks: int = 1,
        max_bad: float = 0.05,
        record: Path | None = None,
    ):
        if batch_size < 1 or batch_size % ranks:
            raise ValueError(f"--batch-size {batch_size}: expected a positive multiple of the ranks, {ranks}")
        if len(index) < batch_size:
            raise ValueError(
                f"{counted(len(index), 'image')} in {index.root}: expected at least one batch of {batch_size}, or a "
                "smaller --batch-size"
            )
        self.index, self.augmentation, self.seed = index, augmentation, seed
        self.device, self.max_bad, self.record = torch.device(device), max_bad, record
        self.batches_per_epoch = len(index) // batch_size
        self.bad: dict[int, str] = {}
        self._batch_size, self._per_rank, self._rank = batch_size, batch_size // ranks, rank
        self._views = augmentation.views()
        self._graph = {"image_size": image_size, "batch_size": self._per_rank, "threads": threads}
        self._orders = {}  # by epoch, the order or what will be it: a Future

    @property
    def decoder(self) -> str:
        """What decodes, for the screen behind the number of threads; "" on a CPU."""
        if self.device.type != "cuda":
            return ""
        by = "engines" if graph.engines(_number(self.device)) else "cores: it has no engine"
        return f", JPEGs decoded by the GPU's {by}"

    def batches(self, first: int, last: int):
        """Yield Batch number first, ..., last - 1. Close the iterator (or drop it) to stop early."""
        plan = functools.partial(self._plan, last=(last - 1) // self.batches_per_epoch)
        decoded = _decoded(
            self.index, plan, range(first, last), self._views, self._graph, self.device, self._found, self.record
        )
        for plan, views in decoded:
            arrays = plan.drawn.boxes, plan.drawn.flips, plan.sample, self.index.labels[plan.sample]
            yield Batch(views, *(on_device(array, self.device) for array in arrays))

    def samples(self, number: int) -> np.ndarray:
        """The samples of batch ``number`` on this rank, int64 [B], by the bad files that are known so far."""
        return self._plan(number, last=0).sample

    def _plan(self, number, last):
        """Which samples batch ``number`` holds on this rank, and what is done to them; ``last``: the last epoch."""
        self._found({})  # the caller may have added what other ranks found
        epoch, position = divmod(number, self.batches_per_epoch)
        start = position * self._batch_size + self._rank * self._per_rank
        planned = self._order(epoch, last)[start : start + self._per_rank]
        sample = np.array([self._good(s, epoch) for s in planned.tolist()], np.int64)
        sizes = self.index.sizes[sample]
        drawn = self.augmentation.draw(sizes, sample, self.seed, epoch)
        return _Plan(sample, tuple(graph.feeds(self._views, sizes, drawn)), drawn)

    def _order(self, epoch, last):
        """The order of an epoch. Unless that is the last one, a thread computes the order of the next meanwhile."""
        self._orders = {e: order for e, order in self._orders.items() if e in (epoch, epoch + 1)}
        for e in (epoch, min(epoch + 1, max(epoch, last))):
            if e not in self._orders:
                pool = concurrent.futures.ThreadPoolExecutor(1)  # one each: its thread ends with it
                self._orders[e] = pool.submit(stream.epoch_order, len(self.index), self.seed, e)
                pool.shutdown(wait=False)
        return self._orders[epoch].result()

    def _good(self, sample, epoch):
        """The sample itself or, as long as that is known to be bad, its next replacement."""
        candidate, attempt = sample, 0
        while candidate in self.bad:
            candidate = stream.replacement(sample, attempt, len(self.index), self.seed, epoch)
            attempt += 1
        return candidate

    def _found(self, bad):
        """Note bad samples {sample: reason}; TooManyBadFiles when there are."""
        self.bad.update(bad)
        refuse_too_many(self.bad, self.index, self.max_bad)


def evaluation_batches(
    index: Index, samples: np.ndarray, *, image_size: int, batch_size: int, device, threads: int,
    bad: dict[int, str] | None = None, record: Path | None = None,
):  # fmt: skip
    """Yield (images uint8 [b,S,S,3], sample int64 [b], label int64 [b]) on the device, every sample once and in order.

    The shorter side is resized to 8/7 of S and the centre cut out; for an S below 64, where the images are small too,
    the whole image is resized to S x S. The last batch may be smaller; files that do not decode are left out and noted
    in ``bad`` {sample: reason}. Files that cannot be read for now are waited for, and ``record`` is kept, as by
    ``Loader``. Where the process is asked to stop, Stopped is raised between two batches.
    """
    samples, device = np.asarray(samples, np.int64), torch.device(device)
    bad = {} if bad is None else bad

    def plan(number):
        sample = samples[number * batch_size : (number + 1) * batch_size]
        sample = np.array([s for s in sample.tolist() if s not in bad], np.int64)
        sizes = index.sizes[sample].astype(np.float64)
        side = sizes.min(1, keepdims=True) * 7 / 8 if image_size >= 64 else sizes
        margin = (0.5 - side / sizes / 2).astype(np.float32)
        return _Plan(sample, (index.sizes[sample], margin, 1 - margin))

    settings = {"image_size": image_size, "batch_size": batch_size, "threads": threads}
    numbers = range(-(-len(samples) // batch_size))
    decoded = _decoded(index, plan, numbers, (graph.View(),), settings, device, bad.update, record)
    for planned, (images,) in decoded:
        waiting.pause(0)
        yield images, on_device(planned.sample, device), on_device(index.labels[planned.sample], device)
    if device.type == "cuda":  # DALI keeps what it has had; training has the rest
        from nvidia.dali import backend

        backend.ReleaseUnusedMemory()


@dataclasses.dataclass
class _Plan:
    sample: np.ndarray  # int64 [B]
    feeds: tuple  # the arrays for the graph, see graph.feeds
    drawn: Any = None  # as its augmentation draws: boxes, flips


def _decoded(index, plan, numbers, views, settings, device, found, record):
    """Run the plans of a range of numbers through the graph: yield (plan, uint8 tensors [B,H,W,3] on the device).

    Of a batch that fails each file is tried: ``found`` is called with {sample: reason} of those that do not decode, and
    a new pipeline (4 ms on the CPU) goes on with that batch, which is planned again, as are those in flight behind it.
    OSError where files cannot be read for too long. ``record``: None or a file for ``inflight.Record``. A batch of many
    pixels goes through the graph in parts.
    """
    gpu = device.type == "cuda"
    device_id = _number(device) if gpu else None
    retried, outage = False, waiting.Outage()
    most = memory.most_pixels(device)  # once: later a GPU's memory is in use, also by what parts take
    recorded = inflight.Record(record, index.fingerprint) if record else contextlib.nullcontext()
    held = Held(lambda: torch.cuda.current_stream(device).record_event()) if gpu else contextlib.nullcontext()
    with index.open() or contextlib.nullcontext() as reader, recorded, held:
        while True:
            planned, done = collections.deque(), []  # what is in flight: (number, plan, part); parts of a batch
            note = recorded.note if record else None
            source = _source(_parts(index, reader, plan, numbers, most), planned, note)
            pipeline = graph.pipeline(source, views, device_id=device_id, files=reader is None, **settings)
            while True:
                try:
                    outputs = pipeline.run(torch.cuda.current_stream(device) if gpu else None)
                except StopIteration:
                    return
                except RuntimeError as error:
                    if not planned:  # DALI itself failed, before it took any
                        raise
                    number, failed, part = planned[0]
                    bad = _probe(index, reader, failed.sample[part], device_id, outage)
                    if not bad and retried:
                        if reader is None and "io.file.read" not in str(error):
                            said = f"batch {number} fails, but each of its images decodes alone: {error}"
                            raise RuntimeError(said) from error
                        outage.wait(f"batch {number}", "each of its images can be read alone")
                    found(bad)
                    numbers, retried = range(number, numbers.stop), not bad
                    if memory.lacking(str(error)):
                        most = memory.most_pixels(device)
                    break
                _, whole, part = planned.popleft()
                done.append([torch.from_dlpack(output.as_tensor()) for output in outputs])
                if part.stop < len(whole.sample):
                    continue
                retried = False
                outage.over()
                tensors = tuple(v[0] if len(v) == 1 else torch.cat(v) for v in zip(*done, strict=True))
                try:
                    yield whole, tensors
                finally:
                    if gpu:
                        held.until_read(done)
                done = []


def _number(device):
    """Which GPU it is."""
    return torch.cuda.current_device() if device.index is None else device.index


def _source(parts, planned, note):
    """What feeds the graph. What it yields is noted in ``planned``; ``note``, if any, is called with the samples."""
    for number, current, part, files in parts:
        planned.append((number, current, part))
        if note:
            note(current.sample[part])
        yield files(), *(array[part] for array in current.feeds)


def _parts(index, reader, plan, numbers, most):
    """Plans the numbers one after the other, and yields (number, plan, part, a function that returns the files as the
    graph takes them) for each part of a plan, of at most ``most`` pixels; empty plans have none. A reader begins the
    next part beforehand, and more until it is busy or a third of the pixels are ahead."""
    ahead, most = collections.deque(), most // 3 if reader else most  # a file is seldom larger than its image
    for number in numbers:
        current = plan(number)
        sizes = index.sizes[current.sample]
        for part in memory.parts(sizes, most, len(current.sample)):
            sample = current.sample[part].tolist()
            if not reader:
                yield number, current, part, functools.partial(graph.names, [index.file(s) for s in sample])
                continue
            load = max(len(sample) / reader.threads, sizes[part].astype(np.int64).prod(1).sum() / most)
            ahead.append((load, (number, current, part, reader.begin(sample))))
            while sum(load for load, _ in itertools.islice(ahead, 1, None)) >= 1:
                yield ahead.popleft()[1]
    for _, begun in ahead:
        yield begun


def _probe(index, reader, sample, device_id, outage):
    """{sample: reason} of the images that do not decode or are not there; those that cannot be read are waited for.
    MemoryError where there is not enough memory to decode one."""
    read = reader.read if reader else lambda s: graph.read(index.file(s))
    again = reader.again if reader else read

    def images(samples, read):
        return (functools.partial(_checked, functools.partial(read, s), index.sizes[s].tolist()) for s in samples)

    bad, looks, todo = {}, 0, sample.tolist()
    while todo:
        unclear = {}
        with contextlib.closing(graph.probe(images(todo, again), device_id)) as results:
            for place, (s, result) in enumerate(zip(todo, results, strict=True)):
                if isinstance(result, OSError):
                    gone = result.errno == errno.ENOENT
                    sure = unclear or bad or (gone and index.paths[s].startswith(objects.SCHEME))  # a store is there
                    alone = result.errno in graph.UNCLEAR and (
                        sure or None in graph.probe(images(_others(index, s), read), device_id)
                    )
                    if not alone:
                        outage.wait(printable(index.paths[s]), result.strerror)
                        looks, todo = 0, [*unclear, *todo[place:]]
                        break
                    (bad if gone else unclear)[s] = result.strerror
                elif result and memory.lacking(result):  # which is not the file's fault
                    raise MemoryError(f"{printable(index.paths[s])} {result}")
                elif result:
                    bad[s] = result
            else:
                looks, todo = looks + 1, list(unclear)
                if looks == _LOOKS:
                    return bad | unclear
                if unclear:
                    waiting.pause(waiting.PAUSES[0])
    return bad


def _checked(read, size):
    """What ``read`` returns; ValueError with the reason where an index would not admit it, or not with this size."""
    content = read()
    found = headers.upright(formats.Held(content.tobytes()))
    if found != size:
        now, then = ("x".join(map(str, sides)) for sides in (found, size))
        raise ValueError(f"not the image that was indexed: {now} pixels; {then} in the index")
    return content


def _others(index, sample):
    """A few samples from all over the index that come from the same bucket, or all from disks, as this one."""
    path = index.paths[sample]
    if path.startswith(objects.SCHEME):
        same = index.paths.beginning(objects.bucket_of(path))
    else:
        same = np.setdiff1d(np.arange(len(index)), index.paths.beginning(objects.SCHEME), assume_unique=True)
    start = np.searchsorted(same, sample)
    return {same[(start + k * len(same) // _OTHERS) % len(same)].item() for k in range(1, _OTHERS)} - {sample}


def on_device(array, device):
    """A numpy array as a tensor on the device; the copy to a GPU overlaps with what runs there."""
    # In one piece: what has gaps torch copies first, into memory that is not pinned.
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
