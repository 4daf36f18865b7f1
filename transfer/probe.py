"""Probes: what a frozen encoder is worth, by a linear classifier on its features or by their nearest neighbours."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from pipeline import Index

from . import knn

PENALTIES = tuple(10.0**exponent for exponent in range(0, -7, -1))  # of the linear probe, strongest first
HELD_OUT = 10  # one of so many training images chooses among them
CHUNK = 65_536  # rows at a time: with 1,000 classes a quarter of a GiB


def knn_probe(vit: VisionTransformer, index: Index, evaluation: Index, *, images: int, **how) -> dict[str, Any]:
    """k-NN accuracy in percent, as ``transfer.knn`` has it: "top1", "train_images", "eval_images", and "left_out",
    {file: reason}.

    ``images``: at most so many of each index, evenly spaced; 0: all. ``how``: further arguments of ``knn.compare``.
    """
    scores = knn.compare(
        {"probe": vit}, index, evaluation, bank=images or len(index), queries=images or len(evaluation), **how
    )
    return {
        "top1": scores["knn_probe"],
        "train_images": scores["knn_bank"],
        "eval_images": scores["knn_queries"],
        "left_out": scores["knn_bad"],
    }


def linear_probe(
    vit: VisionTransformer, index: Index, evaluation: Index, *, images: int,
    progress: Callable[..., None] | None = None, **how,
) -> dict[str, Any]:  # fmt: skip
    """Accuracy of a linear classifier of the features, in percent: as ``knn_probe``, with "penalty" and, for more than
    five classes, "top5". ``progress``: as ``pipeline.shown`` has it.

    Features of the training images as they are, without augmentation, each standardised as by the BatchNorm without
    parameters that MAE probes with (arXiv 2111.06377, appendix A.1). The penalty is that of ``PENALTIES`` that does
    best on every ``HELD_OUT``-th training image; with it the classifier is fitted to all of them.
    """
    bad: dict[int, str] = {}
    bad_queries: dict[int, str] = {}
    samples, queries = (knn.subset(part, images or len(part)) for part in (index, evaluation))
    done = [knn.further(progress, before, len(samples) + len(queries)) for before in (0, len(samples))]
    (rows,), labels = knn.features([vit], index, samples, bad=bad, progress=done[0], **how)
    (asked,), truth = knn.features([vit], evaluation, queries, bad=bad_queries, progress=done[1], **how)
    truth = torch.from_numpy(evaluation.labels_among(index.classes)).to(truth.device)[truth]
    classes = len(index.classes)
    top1, top5, penalty = linear(rows, labels, asked, truth, classes, progress)
    left_out = {index.file(i): reason for i, reason in bad.items()} | evaluation.left_out(bad_queries)
    scores = {"top1": top1} | ({"top5": top5} if classes > 5 else {})
    return scores | {"train_images": len(rows), "eval_images": len(asked), "penalty": penalty, "left_out": left_out}


def linear(
    rows: Tensor, labels: Tensor, asked: Tensor, truth: Tensor, classes: int,
    progress: Callable[..., None] | None = None,
) -> tuple[float, float, float]:  # fmt: skip
    """Top-1 and top-5 accuracy in percent, and the penalty, of the linear probe: of features [n, D] for training with
    labels int64 [n], on others ``asked`` [m, D] with the ``truth`` [m]."""
    labels = labels.clone()  # they were made in inference mode, and autograd would not take them
    deviation, mean = torch.std_mean(rows, dim=0, correction=min(1, len(rows) - 1))  # of one row: 0
    rows, asked = ((part - mean) / (deviation + 1e-6) for part in (rows, asked))
    held = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    held[::HELD_OUT] = True
    best, penalty, weights = -1.0, PENALTIES[0], None
    if len(rows) > HELD_OUT:
        for number, candidate in enumerate(PENALTIES):  # each from where the last has ended
            if progress:
                progress(number, len(PENALTIES) + 1, "fitting the classifier")
            weights = fit(rows[~held], labels[~held], classes, candidate, weights)
            if (right := accuracy(weights, rows[held], labels[held])[0]) > best:
                best, penalty = right, candidate
    return *accuracy(fit(rows, labels, classes, penalty, weights), asked, truth), penalty


def fit(rows: Tensor, labels: Tensor, classes: int, penalty: float, start: Tensor | None = None) -> Tensor:
    """Multinomial logistic regression by L-BFGS: the weights [classes, D + 1], the last column being the bias, that
    minimise the mean cross entropy plus ``penalty`` / 2 times the sum of the squared weights."""
    weights = rows.new_zeros(classes, rows.shape[1] + 1) if start is None else start.clone()
    weights.requires_grad_(True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        total = penalty / 2 * weights[:, :-1].square().sum()
        total.backward()
        for part, truth in zip(rows.split(CHUNK), labels.split(CHUNK), strict=True):
            loss = F.cross_entropy(_scores(weights, part), truth, reduction="sum") / len(rows)
            loss.backward()
            total = total.detach() + loss.detach()
        return total

    optimizer.step(objective)
    return weights.detach()


def accuracy(weights: Tensor, rows: Tensor, labels: Tensor) -> tuple[float, float]:
    """Top-1 and top-5 accuracy in percent."""
    right = torch.zeros(2, dtype=torch.int64, device=rows.device)
    for part, truth in zip(rows.split(CHUNK), labels.split(CHUNK), strict=True):
        hits = _scores(weights, part).topk(min(5, len(weights)), dim=1).indices == truth[:, None]
        right += torch.stack([hits[:, 0].sum(), hits.any(1).sum()])
    top1, top5 = right.tolist()
    return 100 * top1 / len(rows), 100 * top5 / len(rows)


def _scores(weights: Tensor, rows: Tensor) -> Tensor:
    return rows @ weights[:, :-1].T + weights[:, -1]


PROBES = {"knn": knn_probe, "linear": linear_probe}
