import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import photo

from model import create_encoder
from pipeline import Index
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
