import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import photo

from model import create_encoder
from pipeline import Index, waiting
from run.ranks import Ranks
from transfer import knn


def test_accuracy_is_the_weighted_vote():
    """Against the sum written out per query, in float64; also with more queries than are asked at a time."""
    generator = torch.Generator().manual_seed(0)
    bank, queries = (F.normalize(torch.randn(n, 6, generator=generator), dim=1) for n in (40, 1100))
    bank_labels, labels = (torch.randint(3, (n,), generator=generator) for n in (40, 1100))
    right = 0
    for query, label in zip(queries.double(), labels, strict=True):
        similarity = bank.double() @ query
        nearest = similarity.argsort(descending=True)[:5]
        votes = [sum(math.exp(similarity[n] / 0.07) for n in nearest if bank_labels[n] == c) for c in range(3)]
        right += int(np.argmax(votes)) == label
    assert knn.accuracy(bank, bank_labels, queries, labels, k=5) == pytest.approx(100 * right / 1100)
    assert knn.accuracy(bank, bank_labels, bank, bank_labels, k=1) == 100


def test_features_are_those_of_timm_on_the_whole_image(tmp_path):
    for number in range(5):
        photo(number, 32, 32).save(tmp_path / f"{number}.png")
    vit = create_encoder("vit_tiny_patch16_224", sincos=True, frozen_patch_embed=False, seed=0, img_size=32, patch_size=8, depth=2, num_classes=0).eval()  # fmt: skip # noqa: E501
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    (rows,), labels = knn.features([vit], Index.scan(tmp_path), np.arange(5), mean=mean, std=std, device=torch.device("cpu"), threads=1)  # fmt: skip # noqa: E501
    pixels = torch.stack([torch.from_numpy(np.array(photo(number, 32, 32))) for number in range(5)]).permute(0, 3, 1, 2)
    normalised = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(rows, F.normalize(vit(normalised), dim=1), rtol=1e-3, atol=1e-4)
    assert labels.tolist() == [-1] * 5


def test_subset_is_spread_over_the_labelled_images():
    index = Index(None, [""] * 100, np.repeat([-1, 0, 1, 2, 3], 20), np.zeros((100, 2)), ("a", "b", "c", "d"), {})
    chosen = knn.subset(index, 8)
    assert len(set(chosen)) == 8 and sorted(index.labels[chosen]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert knn.subset(index, 1000).tolist() == list(range(20, 100))


def test_a_stretch_is_whole_batches_that_follow_on_each_other():
    for images, ranks in ((0, 2), (1, 3), (64, 2), (145, 2), (1000, 7)):
        parts = [knn.stretch(images, Ranks(rank, ranks, ranks, torch.device("cpu"))) for rank in range(ranks)]
        assert np.array_equal(np.concatenate(parts), np.arange(images))
        assert not any(part[0] % knn._BATCH for part in parts if len(part))


class InThreads:
    """Ranks as threads of one process: what each gives is there for all."""

    def __init__(self, rank, count, slots, barrier):
        self.rank, self.count, self.slots, self.barrier = rank, count, slots, barrier

    def gather(self, value):
        self.slots[self.rank] = value
        self.barrier.wait(60)
        values = list(self.slots)
        self.barrier.wait(60)
        return values

    def meet(self):
        self.gather(None)

    def all(self, tensor):
        return self.gather(tensor.clone())

    def sum(self, tensor):
        return sum(self.all(tensor))

    def broadcast(self, tensor, source):
        return tensor.copy_(self.all(tensor)[source])


def on_threads(count, work):
    """What ``work(ranks)`` returns, or the error that it raises, on each of so many ranks."""
    slots, barrier = [None] * count, threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(work, InThreads(rank, count, slots, barrier)) for rank in range(count)]
        return [one.exception() or one.result() for one in running]


@pytest.fixture
def labelled(tmp_path):
    """40 images of three classes, two of which are the same picture with other labels, and one that is none."""
    for number in range(40):
        (tmp_path / "abc"[number % 3]).mkdir(exist_ok=True)
        photo(max(number, 1), 16, 16).save(tmp_path / "abc"[number % 3] / f"{number:02}.png")
    index = Index.scan(tmp_path)
    (tmp_path / "a" / "03.png").write_bytes(b"")
    return index


def test_any_number_of_ranks_finds_the_same(labelled, monkeypatch):
    """Figures to the last bit, and bad files, with more ranks than batches too."""
    monkeypatch.setattr(knn, "_BATCH", 4)
    monkeypatch.setattr(knn, "_QUERIES", 3)
    monkeypatch.setattr(knn, "_BYTES", 4 * 3 * 30)
    vit = create_encoder("vit_tiny_patch16_224", sincos=True, frozen_patch_embed=False, seed=0, img_size=16, patch_size=8, depth=1, num_classes=0)  # fmt: skip # noqa: E501
    how = {"bank": 40, "queries": 11, "mean": (0.5,) * 3, "std": (0.2,) * 3}
    how |= {"device": torch.device("cpu"), "threads": 1}

    def scores(ranks):
        return knn.compare({"it": vit}, labelled, labelled, known_bad={7: "why"}, ranks=ranks, **how)

    alone = knn.compare({"it": vit}, labelled, labelled, known_bad={7: "why"}, **how)
    assert alone["knn_bank"] == 38 and len(alone["knn_bad"]) == 2
    for found in (*on_threads(3, scores), *on_threads(12, scores)):
        assert found == alone

    nearest = knn._nearest
    monkeypatch.setattr(
        knn, "_nearest", lambda bank, *more: {13: nearest, 14: nearest}.get(len(bank), full)(bank, *more)
    )
    for error in on_threads(3, scores):
        assert isinstance(error, ValueError) and "out of memory, with 1" in str(error)
    embed = knn.embed
    monkeypatch.setattr(
        knn, "embed", lambda e, i, samples, **how: full() if 0 in samples else embed(e, i, samples, **how)
    )
    for error in on_threads(3, scores):
        assert isinstance(error, ValueError) and "not enough memory for features of 40" in str(error)

    monkeypatch.setattr(knn, "embed", embed)
    threads = []  # of which the first to look is asked to stop
    monkeypatch.setattr(
        waiting, "asked_to_stop", lambda: threads.append(threading.get_ident()) or threads[0] == threads[-1]
    )
    assert all(isinstance(error, waiting.Stopped) for error in on_threads(3, scores))


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")
