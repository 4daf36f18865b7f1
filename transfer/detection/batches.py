"""What a detector is fed from data in COCO's format: images with their targets, in training in numbered batches.

torchvision is imported where it is used: it is of the extra ``coco``.
"""

import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeline.loader import bad_limit, refuse_too_many
from run.session import leave_locks

from .coco import CocoData


class TrainingImages(Dataset):
    """Images to train on with their targets, scaled, cropped and flipped at random, each time in another way.

    The longer side becomes ``size`` pixels times a number from ``scale``, uniformly drawn; of what then exceeds
    ``size`` a random part is kept (large-scale jitter, Ghiasi et al. 2021, arXiv 2012.07177). An item is asked for by
    (epoch, position), of which with the seed it is a function.
    """

    def __init__(self, data: CocoData, *, size: int, scale: tuple[float, float], seed: int, limit: int):
        self.data, self.size, self.scale, self.seed, self.limit = data, size, scale, seed % 2**64, limit

    def __getitem__(self, at: tuple[int, int]) -> tuple[Tensor | None, dict[str, Tensor], dict[int, str]]:
        """uint8 [3,h,w], neither side above ``size``; "boxes" float32 [n,4] (x, y, x, y) in its pixels, "labels" int64
        [n], "masks" uint8 [n,h,w]; and {position: reason} of images that could not be read, in whose place the next
        came: with more than ``limit`` of them there is no image."""
        epoch, position = at
        bad: dict[int, str] = {}
        while len(bad) <= self.limit:
            try:
                image = self.data.read(position)
            except (OSError, ValueError) as error:
                bad[position] = str(error)
                position = (position + 1) % len(self.data)
                continue
            labels, masks = self.data.masks(position)
            image, masks = self._jittered(image, masks, np.random.default_rng([self.seed, 1, epoch, position]))
            return image, _target(labels, masks), bad
        return None, {}, bad

    def _jittered(self, image: Tensor, masks: Tensor, rng) -> tuple[Tensor, Tensor]:
        from torchvision.transforms.v2 import InterpolationMode
        from torchvision.transforms.v2.functional import resized_crop

        sides = np.array(image.shape[1:])
        factor = self.size / sides.max() * rng.uniform(*self.scale)
        kept = np.clip(np.round(self.size / factor), 1, sides).astype(int)  # source pixels
        corner = [int(n) for n in rng.integers(0, sides - kept + 1)]
        part = *corner, *map(int, kept)
        new = [int(n) for n in np.clip(np.round(kept * factor), 1, self.size)]
        image = resized_crop(image, *part, new, antialias=True)
        if len(masks):
            masks = resized_crop(masks, *part, new, InterpolationMode.NEAREST_EXACT)
        else:
            masks = masks.new_zeros(0, *new)
        if rng.random() < 0.5:
            image, masks = image.flip(2), masks.flip(2)
        return image, masks


class EvaluationImages(Dataset):
    """Whole images as an evaluation feeds them to a detector, their longer side ``size`` pixels."""

    def __init__(self, data: CocoData, *, size: int):
        self.data, self.size = data, size

    def __getitem__(self, position: int) -> tuple[int, Tensor | None, str]:
        """The position; uint8 [3,h,w], or None with the reason for which the image cannot be read."""
        from torchvision.transforms.v2.functional import resize

        try:
            image = self.data.read(position)
        except (OSError, ValueError) as error:
            return position, None, str(error)
        sides = np.array(image.shape[1:])
        new = np.clip(np.round(self.size / sides.max() * sides), 1, self.size)
        return position, resize(image, [int(n) for n in new], antialias=True), ""


class CocoLoader:
    """Numbered batches to train on, with the interface of ``Loader``; ``batch_size`` counts the images of all ranks.

    Batch b belongs to epoch b // batches_per_epoch; the order of an epoch is a function of (seed, epoch), and what is
    left over of it is dropped. ``workers`` processes read ahead; 0 reads in this one. ``bad``: {position: reason} of
    the images found unusable so far, in whose places the next come. ValueError for sizes that do not divide;
    TooManyBadFiles, while iterating, when more than ``max_bad`` of the images are bad.
    """

    def __init__(
        self, data: CocoData, *, size: int, scale: tuple[float, float], batch_size: int, seed: int,
        device: torch.device, workers: int, rank: int = 0, ranks: int = 1, max_bad: float = 0.05,
    ):  # fmt: skip
        if batch_size % ranks or batch_size > len(data):
            raise ValueError(
                f"--batch-size {batch_size}: expected a multiple of the ranks, {ranks}, and at most "
                f"the images, {len(data):,}"
            )
        self.index, self.seed, self.device, self.workers = data, seed % 2**64, device, workers
        self.batches_per_epoch = len(data) // batch_size
        self.bad: dict[int, str] = {}
        self._max_bad, limit = max_bad, bad_limit(len(data), max_bad)
        self._images = TrainingImages(data, size=size, scale=scale, seed=seed, limit=limit)
        self._batch, self._part = batch_size, slice(rank, batch_size, ranks)
        self._order = None, None  # epoch, its order

    def batches(self, first: int, last: int) -> Iterator[tuple[list[Tensor], list[dict[str, Tensor]]]]:
        """Images and targets, as ``TrainingImages`` has them but on the device, of batch first, ..., last - 1."""
        asked = ([(number // self.batches_per_epoch, s) for s in self.samples(number)] for number in range(first, last))
        read = DataLoader(
            self._images, batch_sampler=asked, num_workers=self.workers, worker_init_fn=apart, collate_fn=list,
            pin_memory=self.device.type == "cuda",
        )  # fmt: skip
        for batch in read:
            for *_, bad in batch:
                self._found(bad)
            images = [image.to(self.device, non_blocking=True) for image, _, _ in batch]
            targets = [{k: t.to(self.device, non_blocking=True) for k, t in target.items()} for _, target, _ in batch]
            yield images, targets

    def samples(self, number: int) -> list[int]:
        """The positions of batch ``number`` on this rank, as far as the bad ones are known."""
        self._found({})  # the caller may have added what other ranks found
        epoch, place = divmod(number, self.batches_per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, 2, epoch]).permutation(len(self.index))
        whole = self._order[1][place * self._batch : (place + 1) * self._batch]
        return [self._good(position) for position in whole[self._part].tolist()]

    def _good(self, position: int) -> int:
        while position in self.bad:
            position = (position + 1) % len(self.index)
        return position

    def _found(self, bad: dict[int, str]) -> None:
        self.bad.update(bad)
        refuse_too_many(self.bad, self.index, self._max_bad)


def apart(worker: int) -> None:
    """``worker_init_fn`` of a ``DataLoader``. The worker leaves the program's group of processes, so that a signal from
    a terminal or a scheduler reaches the program alone: it ends its workers itself, and would end at once if one died.
    And the worker lets go of the output folder's lock, which it would hold for a while after a program that is killed.
    """
    os.setsid()
    leave_locks()


def _target(labels: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """The target of what is left of the objects; boxes are those of the masks, which a crop may have cut."""
    from torchvision.ops import masks_to_boxes

    seen = masks.flatten(1).any(1).bool()
    labels, masks = labels[seen], masks[seen].contiguous()
    boxes = masks_to_boxes(masks) + torch.tensor([0.0, 0.0, 1.0, 1.0])  # it takes the last pixel for the edge
    return {"boxes": boxes, "labels": labels, "masks": masks}
