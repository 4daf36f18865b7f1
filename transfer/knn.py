"""k-nearest-neighbour accuracy of frozen encoders: what they are worth without any training on top."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import gather_patches
from model import encode
from pipeline import Index, evaluation_batches


def subset(index: Index, size: int) -> np.ndarray:
    """``size`` labelled samples (or all, if there are fewer), evenly spaced over the index and so over the classes."""
    labelled = np.flatnonzero(index.labels >= 0)
    return labelled[np.linspace(0, len(labelled) - 1, min(size, len(labelled))).round().astype(np.int64)]


@torch.inference_mode()
def features(
    encoders: Sequence, index: Index, samples: np.ndarray, *, mean, std, device, threads: int, bad=None, record=None
):
    """Normalised features of whole images, one float32 [n, D] per encoder, and their labels int64 [n], on the device.

    Each image is decoded once for all encoders; those that cannot be decoded are left out and noted in ``bad`` {sample:
    reason}, ValueError if none can. ``record``: as of ``pipeline.evaluation_batches``.
    """
    height, width = encoders[0].patch_embed.grid_size
    training = [encoder.training for encoder in encoders]
    patch = encoders[0].patch_embed.patch_size[0]
    # In one piece from the start: small results kept between large temporaries fragment the heap, by a gigabyte.
    found = [torch.empty(len(samples), encoder.num_features, device=device) for encoder in encoders]
    labels = torch.empty(len(samples), dtype=torch.int64, device=device)
    count = 0
    for encoder in encoders:
        encoder.eval()
    batches = evaluation_batches(
        index, samples, image_size=height * patch, batch_size=64, device=device, threads=threads, bad=bad, record=record
    )
    half = device.type == "cuda"
    for images, _, label in batches:
        everything = torch.arange(height * width, dtype=torch.int32, device=device).expand(len(images), -1)
        dtype = torch.bfloat16 if half else torch.float32
        patches = gather_patches(images, everything, patch=patch, mean=mean, std=std, dtype=dtype)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            for encoder, rows in zip(encoders, found, strict=True):
                rows[count : count + len(label)] = F.normalize(encode(encoder, patches, everything).float(), dim=1)
        labels[count : count + len(label)] = label
        count += len(label)
    for encoder, mode in zip(encoders, training, strict=True):
        encoder.train(mode)
    if not count:
        raise ValueError(f"none of {len(samples)} images in {index.root} decodes")
    return [rows[:count] for rows in found], labels[:count]


def accuracy(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, labels: Tensor, *, k: int = 20, temperature: float = 0.07
) -> float:
    """Share of queries whose weighted vote among the k nearest rows of the bank is right, in percent.

    Cosine similarity (rows are normalised), a neighbour's weight being exp(similarity / temperature), as in Wu et al.
    2018 (arXiv 1805.01978). ``bank`` [n, D], ``queries`` [m, D].
    """
    classes = int(max(bank_labels.max(), labels.max())) + 1
    right = 0
    for rows, truth in zip(queries.split(1024), labels.split(1024), strict=True):
        similarity, nearest = (rows @ bank.T).topk(min(k, len(bank)), dim=1)
        votes = torch.zeros(len(rows), classes, device=rows.device)
        votes.scatter_add_(1, bank_labels[nearest], (similarity / temperature).exp())
        right += int((votes.argmax(1) == truth).sum())
    return 100 * right / len(labels)


def compare(
    encoders: dict[str, nn.Module], index: Index, evaluation: Index, *, bank: int, queries: int,
    known_bad: Mapping[int, str] = MappingProxyType({}), **how,
) -> dict:  # fmt: skip
    """k-NN accuracy of several encoders on the same images.

    ``queries`` images of ``evaluation`` are asked against ``bank`` images of ``index``, of which ``known_bad``,
    {sample: reason}, are known not to decode. ``how``: the further
    arguments of ``features``. Classes are matched by their names. Images that do not decode are left out: "knn_bad"
    names them, and all files that the index of the evaluation has rejected.
    """
    networks, bad_queries, chosen = list(encoders.values()), {}, subset(index, bank)
    bad = {i: known_bad[i] for i in chosen.tolist() if i in known_bad}
    known, known_labels = features(networks, index, chosen, bad=bad, **how)
    asked, labels = features(networks, evaluation, subset(evaluation, queries), bad=bad_queries, **how)
    translated = torch.from_numpy(evaluation.labels_among(index.classes)).to(labels.device)
    scores = {"knn_bank": len(known_labels), "knn_queries": len(labels)}
    for name, rows, candidates in zip(encoders, known, asked, strict=True):
        scores[f"knn_{name}"] = accuracy(rows, known_labels, candidates, translated[labels])
    scores["knn_bad"] = {index.file(i): reason for i, reason in bad.items()} | evaluation.left_out(bad_queries)
    return scores
