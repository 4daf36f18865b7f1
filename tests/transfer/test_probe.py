"""The probes against what they say of themselves: which classifier, chosen how, and what share it gets right."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline import Index
from transfer import knn, probe


def test_linear_fit_is_the_minimum_of_what_it_says(monkeypatch):
    """Also with rows that come in pieces, the last one smaller, and from another start."""
    monkeypatch.setattr(probe, "CHUNK", 64)
    torch.manual_seed(0)
    rows, labels = torch.randn(200, 6).double(), torch.randint(0, 3, (200,))

    def objective(weights):
        scores = rows @ weights[:, :-1].T + weights[:, -1]
        return F.cross_entropy(scores, labels) + 0.05 / 2 * weights[:, :-1].square().sum()

    for start in (None, torch.randn(3, 7).double()):
        found = probe.fit(rows, labels, 3, 0.05, start)
        least = objective(found)
        assert torch.autograd.functional.jacobian(objective, found).abs().max() < 1e-5
        assert all(least <= objective(found + 0.01 * torch.randn(3, 7)) for _ in range(20))


@pytest.mark.parametrize("classes", [3, 5, 8])
def test_accuracy_is_the_share_among_the_first(monkeypatch, classes):
    monkeypatch.setattr(probe, "CHUNK", 7)
    generator = torch.Generator().manual_seed(0)
    weights, rows = torch.randn(classes, 5, generator=generator), torch.randn(30, 4, generator=generator)
    labels = torch.randint(classes, (30,), generator=generator)
    scores = rows.double() @ weights[:, :4].double().T + weights[:, 4].double()
    better = (scores > scores.gather(1, labels[:, None])).sum(1)
    expected = [100 * (better < n).double().mean().item() for n in (1, 5)]
    assert probe.accuracy(weights, rows, labels) == pytest.approx(expected)
    assert 0 < expected[0] < expected[1] and (expected[1] == 100) == (classes <= 5)


def an_index(root, labels, classes, rejected=()):
    names = [f"{n}.jpg" for n in range(len(labels))]
    return Index(root, names, np.array(labels), np.zeros((len(labels), 2)), classes, dict.fromkeys(rejected, "broken"))


@pytest.fixture
def setting(monkeypatch):
    """A function that makes two indices whose images have these features; those that are left out have none."""

    def make(rows, labels, asked, truth, classes, bad=()):
        training, evaluation = (
            an_index("train", labels, classes), an_index("eval", len(classes) - 1 - truth, classes[::-1], ["c.jpg"])
        )  # fmt: skip

        def embed(encoders, index, samples, *, bad, mean, progress=None):
            assert encoders == ["vit"] and mean == 5
            known = {id(training): rows, id(evaluation): asked}[id(index)]
            if progress:
                progress(len(samples), len(samples))
            bad |= {s: "cut" for s in samples.tolist() if s in gone}
            samples = [s for s in samples.tolist() if s not in gone]
            with torch.inference_mode():
                labels = torch.tensor(index.labels[samples])
                return [torch.tensor(known[samples]).float()], labels, torch.tensor(samples)

        gone = set(bad)
        monkeypatch.setattr(knn, "embed", embed)
        return training, evaluation

    return make


def clouds(rng, n, classes, noise):
    """Features of very different sizes, of which the two smallest tell the class."""
    labels, scale = rng.integers(0, classes, n), 10.0 ** np.arange(-4, 8)
    rows = rng.normal(size=(n, 12))
    rows[:, :2] += np.stack([np.cos(labels), np.sin(labels)], 1) / noise
    return (rows + 1) * scale, labels


def ridge(rows, labels, classes, penalty, start=None):
    """A classifier in place of ``fit`` that is exact and quick; its penalties of 1 and more are too much."""
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1).double()
    weighed = rows.T @ rows + 3e3 * penalty * torch.eye(rows.shape[1])
    return torch.linalg.solve(weighed, rows.T @ F.one_hot(labels, classes).double()).T.float()


@pytest.mark.parametrize("classes, noise, images", [(3, 0.8, 0), (6, 0.3, 0), (7, 0.4, 50), (5, 0.4, 90), (2, 0.05, 0)])
def test_linear_probe_is_the_best_penalty_on_standardised_features(setting, monkeypatch, classes, noise, images):
    """Chosen on every tenth image, the stronger of equals; then fitted to all; each from where the last ended."""
    rng = np.random.default_rng(classes + images)
    (rows, labels), (asked, truth) = (clouds(rng, n, classes, noise) for n in (121, 60))
    training, evaluation = setting(rows, labels, asked, truth, tuple("abcdefg"[:classes]), bad=[0])
    starts, ends = [], []
    monkeypatch.setattr(probe, "fit", lambda *how: starts.append(how[4]) or ends.append(ridge(*how)) or ends[-1])
    told = []
    found = probe.linear_probe(
        "vit", training, evaluation, images=images, mean=5, progress=lambda *how: told.append(how)
    )
    first, both = images or 121, (images or 121) + min(images or 60, 60)
    assert told[:2] == [(first, both), (both, both)] and [done for done, *_ in told[2:]] == list(range(7))
    assert starts[0] is None and all(one is other for one, other in zip(starts[1:], ends[:-1], strict=True))

    spaced = [np.linspace(0, n - 1, min(images or n, n)).round().astype(int)[1:] for n in (121, 60)]
    mean, deviation = rows[spaced[0]].mean(0), rows[spaced[0]].std(0, ddof=1)
    kept, queries = (
        torch.tensor((part[s] - mean) / deviation).float() for part, s in zip((rows, asked), spaced, strict=True)
    )
    known, answers = torch.tensor(labels[spaced[0]]), torch.tensor(truth[spaced[1]])
    held = torch.arange(len(kept)) % probe.HELD_OUT == 0
    scores = {
        penalty: probe.accuracy(ridge(kept[~held], known[~held], classes, penalty), kept[held], known[held])[0]
        for penalty in probe.PENALTIES
    }
    best = max(penalty for penalty, score in scores.items() if score == max(scores.values()))
    assert found["penalty"] == best and list(probe.PENALTIES) == sorted(probe.PENALTIES, reverse=True)
    top1, top5 = probe.accuracy(ridge(kept, known, classes, best), queries, answers)
    assert found["top1"] == pytest.approx(top1) and top1 > 120 / classes
    assert ("top5" in found) == (classes > 5) and found.get("top5", top5) == pytest.approx(top5)
    assert (found["train_images"], found["eval_images"]) == (len(kept), len(queries))
    assert found["left_out"] == {"train/0.jpg": "cut", "eval/0.jpg": "cut", "eval/c.jpg": "broken"}


@pytest.mark.parametrize("n", [1, 10, 11])
def test_so_few_images_that_none_can_be_spared(setting, monkeypatch, n):
    labels = np.arange(n) % 2
    rows = np.stack([labels * 2.0 - 1, np.arange(n) % 3 * 1.0], 1)
    training, evaluation = setting(rows, labels, rows, labels, ("a", "b"))
    calls, fit = [], probe.fit
    monkeypatch.setattr(probe, "fit", lambda *how: calls.append(how) or fit(*how))
    found = probe.linear_probe("vit", training, evaluation, images=0, mean=5)
    assert found["penalty"] == probe.PENALTIES[0] and found["top1"] == 100
    assert len(calls) == (1 if n < 11 else 1 + len(probe.PENALTIES))


def test_knn_probe_asks_so_many_images(setting):
    rng = np.random.default_rng(0)
    (rows, labels), (asked, truth) = (clouds(rng, n, 3, 0.1) for n in (90, 40))
    training, evaluation = setting(rows / 1e8, labels, asked / 1e8, truth, ("a", "b", "c"), bad=[0])
    for images, counts in ((0, (89, 39)), (30, (29, 29))):
        told = []
        found = probe.knn_probe(
            "vit", training, evaluation, images=images, mean=5, progress=lambda *how, told=told: told.append(how)
        )
        assert told == ([(90, 130), (130, 130)] if not images else [(30, 60), (60, 60)])
        assert (found["train_images"], found["eval_images"]) == counts
        assert found["left_out"] == {"train/0.jpg": "cut", "eval/0.jpg": "cut", "eval/c.jpg": "broken"}
        bank = [s for s in knn.subset(training, images or 90) if s]
        queries = [s for s in knn.subset(evaluation, images or 40) if s]
        some = [torch.tensor(part).float() for part in (rows[bank] / 1e8, asked[queries] / 1e8)]
        answers = [torch.tensor(part) for part in (labels[bank], truth[queries])]
        assert found["top1"] == knn.accuracy(some[0], answers[0], some[1], answers[1])
