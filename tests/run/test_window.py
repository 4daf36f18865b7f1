"""The window of batches: every group of every image in one step, whatever the number of ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline import Batch
from run.window import Window, dealt

R, B, K = 3, 8, 5


class Training:
    """Patches and their numbers tell which image, view and group they are of."""

    device, config = torch.device("cpu"), SimpleNamespace(seed=7)

    def sample(self, batch, epoch):
        view, image, group, patch = torch.meshgrid(*map(torch.arange, (2, len(batch.sample), R, K)), indexing="ij")
        return (((batch.sample[image] * 2 + view) * R + group) * K + patch + 10000 * epoch).int()

    def gather(self, views, chosen):
        numbers = chosen.permute(2, 0, 1, 3)
        return numbers[..., None].float().repeat(1, 1, 1, 1, 6), numbers.contiguous()


def batches(count, ranks=1, rank=0):
    """Batch b holds the images 100 b, ..., 100 b + B - 1, of which this rank has its part."""
    share = slice(rank * B // ranks, (rank + 1) * B // ranks)
    for number in range(count):
        sample = torch.arange(100 * number, 100 * number + B)[share]
        yield Batch((), None, None, sample, None)


def steps(count, *, redeal, size=4, ranks=1, rank=0, epoch=1, number=40):
    """{(place, group): the images of a step}, having checked that all of it belongs together."""
    window, found = Window(Training(), size=size, redeal=redeal, rank=rank), {}
    for first in (0, number):  # the second time, nothing is left of the first
        window.fill(batches(count, ranks, rank), epoch, first)
    for group in range(R):
        for place in range(count):
            patches, chosen = window.deal(place, group)
            assert patches.shape == (2, B // ranks, K, 6) and chosen.shape == (2, B // ranks, K)
            assert patches.is_contiguous() and chosen.dtype == torch.int32
            assert torch.equal(patches[..., 3], chosen.float())
            image, view, of, patch = np.unravel_index((chosen - 10000 * epoch).numpy(), (1000, 2, R, K))
            assert (of == group).all() and (patch == np.arange(K)).all() and (view == [[[0]], [[1]]]).all()
            assert (image == image[:1, :, :1]).all()
            found[place, group] = image[0, :, 0]
    return found


@pytest.mark.parametrize("count", [1, 3, 4])
def test_every_group_of_every_image_is_in_one_step(count):
    plain, dealt_anew = steps(count, redeal=False), steps(count, redeal=True)
    assert all((images == 100 * place + np.arange(B)).all() for (place, _), images in plain.items())
    for group in range(R):
        images = np.stack([dealt_anew[place, group] for place in range(count)])
        assert (images % 100 == np.arange(B)).all()  # each stays in its place, and so on its rank
        assert (np.sort(images, axis=0) == np.sort([plain[place, 0] for place in range(count)], axis=0)).all()
    if count > 1:
        orders = {tuple(np.concatenate([dealt_anew[place, group] for place in range(count)])) for group in range(R)}
        assert len(orders) == R
        for other in ({"number": 44}, {"epoch": 2}):
            again = steps(count, redeal=True, **other)
            assert any((again[step] != images).any() for step, images in dealt_anew.items())


def test_ranks_deal_as_one_process_does():
    whole, parts = steps(3, redeal=True), [steps(3, redeal=True, ranks=2, rank=rank) for rank in range(2)]
    for step, images in whole.items():
        assert (np.concatenate([part[step] for part in parts]) == images).all()


def test_any_batch_is_as_likely_at_any_place():
    counts = np.zeros((4, 4))
    for number in range(0, 400, 4):
        source = dealt(1, 0, number, 2, batches=4, places=range(64))
        for place in range(4):
            counts[place] += np.bincount(source[place], minlength=4)
    assert abs(counts / 6400 - 0.25).max() < 5 * (0.25 * 0.75 / 6400) ** 0.5


def test_no_step_of_a_window_waits_for_a_gpu(monkeypatch):
    """A plain copy to it would, until all that is queued there is done. (None is needed: copies are noted only.)"""
    copied = []
    monkeypatch.setattr(Training, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: copied.append("pinned") or self)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, non_blocking=False: copied.append((device.type, non_blocking)) or self
    )
    made = steps(2, redeal=True)
    assert copied == len(made) * ["pinned", ("cuda", True)]
