"""A window of loaded batches, whose groups of patches are trained on in turn.

Consecutive steps on the groups of one batch are steps on the same images. With a window, the first groups of all its
batches come first, then the second ones. ``redeal``: each step then takes, for each of its images, one of the batches
at random, so that no two steps see the same images together. What a place of the global batch gets depends on the seed,
the number of the step's window and that place alone: not on the number of ranks, nor on where a run was resumed.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from kernels.philox import Purpose, philox, stream_key
from pipeline import Batch
from pipeline.loader import on_device

from .training import Training


class Window:
    """``size`` batches of a rank, as patches; where that is 1, the batch as it is gathered."""

    def __init__(self, training: Training, *, size: int, redeal: bool, rank: int = 0):
        self.training, self.size, self.redeal, self.rank = training, size, redeal, rank
        self.filled: list[Tensor] = []  # patches [size,R,2,B,K,3*P*P] and numbers [size,R,2,B,K]
        self.given: list[Tensor] = []  # of more than one batch: what a step takes, at the same address for each

    def fill(self, batches: Iterable[Batch], epoch: int, number: int) -> None:
        """Takes the batches of a window, the first of which has this ``number``. Each is gathered before the next one
        is asked for."""
        self.epoch, self.number = epoch, number
        for place, batch in enumerate(batches):
            gathered = self.training.gather(batch.views, self.training.sample(batch, epoch))
            if self.size == 1:
                self.filled = [part[None] for part in gathered]
                continue
            if not self.filled:
                self.filled = [part.new_empty(self.size, *part.shape) for part in gathered]
                self.given = [part[0].clone() for part in gathered]
            for whole, part in zip(self.filled, gathered, strict=True):
                whole[place] = part
            self.count = place + 1

    def deal(self, place: int, group: int) -> tuple[Tensor, Tensor]:
        """Patches [2,B,K,3*P*P] and their numbers int32 [2,B,K] of a step: a group of the batch at a place."""
        if self.size == 1:
            return self.filled[0][0, group], self.filled[1][0, group]
        groups, views, images = self.filled[0].shape[1:4]
        source = np.full(images, place)
        if self.redeal:
            places = range(self.rank * images, (self.rank + 1) * images)
            how = {"batches": self.count, "places": places}
            source = dealt(self.training.config.seed, self.epoch, self.number, group, **how)[place]
        rows = ((source * groups + group) * views + np.arange(views)[:, None]) * images + np.arange(images)  # [2,B]
        rows = on_device(rows.flatten(), self.training.device)
        for whole, part in zip(self.filled, self.given, strict=True):
            torch.index_select(whole.flatten(0, 3), 0, rows, out=part.flatten(0, 1))
        return self.given[0], self.given[1]


def dealt(seed: int, epoch: int, number: int, group: int, *, batches: int, places: range) -> np.ndarray:
    """Which of so many ``batches`` each step on a group takes each of its images from: int64 [batches,B]. A column, of
    one place in the global batch, is a permutation drawn for that place."""
    counter = np.array(places), np.arange(batches)[:, None], number, group
    return np.argsort(philox(counter, stream_key(seed, epoch, Purpose.WINDOW))[0], axis=0, kind="stable")
