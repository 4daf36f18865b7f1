"""k-nearest-neighbour accuracy of frozen encoders: what they are worth without any training on top.

The work is divided among the W ranks of a run: each embeds every W-th batch of the bank and of the queries, and keeps
its part of the bank. Queries go to all ranks in pieces, and come back with the nearest of each rank's part.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import gather_patches
from model import encode
from pipeline import Index, evaluation_batches
from pipeline.headers import printable
from pipeline.waiting import Stopped
from run.program import out_of_memory
from run.ranks import Ranks

LARGEST_BANK = 1_300_000  # images, unless more are asked for: all of ImageNet-1k, of which ViT-S makes 2 GB
_BATCH = 64  # images
_WIDE = 2**30  # bytes of the largest tensor within an encoder; of it and its like there are about four at a time
_BYTES = 2**28  # of similarities at a time, and of votes
_QUERIES = 1024  # at a time, at most
_ALONE = Ranks(0, 1, 1, torch.device("cpu"))
_SPARE = 8  # neighbours found beyond k in float32, of which the nearest k in float64 are taken


def subset(index: Index, size: int) -> np.ndarray:
    """``size`` labelled samples (or all, if there are fewer), evenly spaced over the index and so over the classes."""
    labelled = np.flatnonzero(index.labels >= 0)
    return labelled[np.linspace(0, len(labelled) - 1, min(size, len(labelled))).round().astype(np.int64)]


def features(
    encoders: Sequence, index: Index, samples: np.ndarray, *, bad: dict[int, str] | None = None, **how
) -> tuple[list[Tensor], Tensor]:
    """The features and labels of ``embed``; ValueError if none of the images can be decoded."""
    bad = {} if bad is None else bad
    found, labels, _ = embed(encoders, index, samples, bad=bad, **how)
    if not len(labels):
        first = "".join(f": {printable(index.file(i))}: {reason}" for i, reason in itertools.islice(bad.items(), 1))
        raise ValueError(f"no image in {index.root} decodes, of {len(samples):,}{first}")
    return found, labels


@torch.inference_mode()
def embed(
    encoders: Sequence, index: Index, samples: np.ndarray, *, device, **how
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Normalised features of whole images, one float32 [n, D] per encoder, their labels and their numbers in the index,
    int64 [n], on the device. ``how``: as of ``batches``."""
    # In one piece from the start: small results kept between large temporaries fragment the heap, by a gigabyte.
    found = [torch.empty(len(samples), encoder.num_features, device=device) for encoder in encoders]
    labels, numbers = (torch.empty(len(samples), dtype=torch.int64, device=device) for _ in range(2))
    count = 0
    for features, label, sample in batches(encoders, index, samples, device=device, **how):
        here = slice(count, count + len(label))
        for rows, part in zip(found, features, strict=True):
            rows[here] = F.normalize(part, dim=1)
        labels[here], numbers[here] = label, sample
        count += len(label)
    return [rows[:count] for rows in found], labels[:count], numbers[:count]


@torch.inference_mode()
def batches(
    encoders: Sequence, index: Index, samples: np.ndarray, *, mean, std, device, threads: int, bad=None, record=None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:  # fmt: skip
    """Features of whole images as the encoders give them, batch by batch: one float32 [b, D] per encoder, labels and
    numbers in the index, int64 [b], on the device.

    Each image is decoded once for all encoders; those that cannot be decoded are left out and noted in ``bad`` {sample:
    reason}. ``record``: as of ``pipeline.evaluation_batches``. ``progress`` is told how many images of all are done.
    """
    height, width = encoders[0].patch_embed.grid_size
    training = [encoder.training for encoder in encoders]
    patch = encoders[0].patch_embed.patch_size[0]
    count = 0
    for encoder in encoders:
        encoder.eval()
    widest = max(4 * max(encoder.embed_dim for encoder in encoders), 3 * patch**2)
    size = _BATCH  # fewer of large images, but always a divisor: by whole batches the ranks divide the work
    while size > 1 and 4 * size * height * width * widest > _WIDE:
        size //= 2
    decoded = evaluation_batches(
        index, samples, image_size=height * patch, batch_size=size, device=device, threads=threads, bad=bad,
        record=record,
    )  # fmt: skip
    half = device.type == "cuda"
    try:
        for images, sample, label in decoded:
            everything = torch.arange(height * width, dtype=torch.int32, device=device).expand(len(images), -1)
            dtype = torch.bfloat16 if half else torch.float32
            patches = gather_patches(images, everything, patch=patch, mean=mean, std=std, dtype=dtype)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                features = [encode(encoder, patches, everything).float() for encoder in encoders]
            count += len(label)
            if progress:
                progress(count, len(samples))
            yield features, label, sample
    finally:
        for encoder, mode in zip(encoders, training, strict=True):
            encoder.train(mode)


@torch.inference_mode()
def accuracy(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, labels: Tensor, *, k: int = 20,
    numbers: Tensor | None = None, ranks: Ranks | None = None,
) -> float:  # fmt: skip
    """Share of queries whose weighted vote among the k nearest rows of the bank is right, in percent.

    Cosine similarity (rows are normalised), a neighbour's weight being exp(similarity / 0.07), as in Wu et al. 2018
    (arXiv 1805.01978). ``bank`` [n, D], ``queries`` [m, D]: those of this rank. Of equally near neighbours those with
    the smaller ``numbers``, int64 [n], are taken, so that the result is that of one rank. OutOfMemoryError on all ranks
    where one of them lacks memory.
    """
    ranks = ranks or _ALONE
    numbers = torch.arange(len(bank), device=bank.device) if numbers is None else numbers
    own_classes = 1 + max((int(part.max()) for part in (bank_labels, labels) if len(part)), default=0)
    sizes = ranks.all(torch.tensor([len(bank), len(queries), own_classes], device=bank.device))
    neighbours, asked, classes = torch.stack(sizes).T.tolist()
    k, classes = min(k, sum(neighbours)), max(classes)
    step = max(1, min(_QUERIES, _BYTES // (8 * classes)))
    right = 0
    for source, count in enumerate(asked):
        for first in range(0, count, step):
            rows = torch.empty(min(step, count - first), bank.shape[1], device=bank.device)
            truth = torch.empty(len(rows), dtype=torch.int64, device=bank.device)
            if source == ranks.rank:
                rows, truth = queries[first : first + step].contiguous(), labels[first : first + step].contiguous()
            ranks.broadcast(rows, source)
            ranks.broadcast(truth, source)
            near = _unless_out_of_memory(lambda rows=rows: _nearest(bank, bank_labels, numbers, rows, k + _SPARE))
            if near is None:  # which the other ranks have to hear of
                near = torch.full((3, len(rows), k + _SPARE), -2, dtype=torch.int64, device=bank.device)
            similarity, label, number = torch.cat(ranks.all(near), 2)
            if (number == -2).any():
                raise torch.OutOfMemoryError(f"out of memory, with {len(bank):,} images in the bank of a rank")
            similarity = similarity.view(torch.float64)
            order = number.argsort(1)  # and from there by similarity, as the sort below is stable
            order = order.gather(1, similarity.gather(1, order).argsort(dim=1, descending=True, stable=True))[:, :k]
            weights = (similarity.gather(1, order) / 0.07).exp()
            votes = torch.zeros(len(rows), classes, dtype=torch.float64, device=rows.device)
            votes.scatter_add_(1, label.gather(1, order), weights)
            right += int((votes.argmax(1) == truth).sum())
    return 100 * right / sum(asked)


def _nearest(bank, labels, numbers, rows, count):
    """For each of ``rows`` [m, D] its nearest ``count`` images of the ``bank`` [n, D], in no particular order: int64
    [3, m, count], the similarity (a float64, by its bits), the label and the number of each. A bank of fewer images is
    filled up with a similarity of -inf and the largest number."""
    near = rows.new_zeros(3, len(rows), count, dtype=torch.int64)
    near[0] = torch.full_like(near[0], -torch.inf, dtype=torch.float64).view(torch.int64)
    near[2] = torch.iinfo(torch.int64).max
    best, place = rows.new_empty(len(rows), 0), near.new_empty(len(rows), 0)
    step = max(count, _BYTES // (4 * len(rows)))
    for first in range(0, len(bank), step):
        similarity, found = (rows @ bank[first : first + step].T).topk(min(count, len(bank) - first), dim=1)
        best, place = torch.cat([best, similarity], 1), torch.cat([place, found + first], 1)
        best, kept = best.topk(min(count, best.shape[1]), dim=1)
        place = place.gather(1, kept)
    # Products of float32 depend on the shape of the matrices, and with it on the number of ranks. These do not.
    exact = torch.stack([(rows.double() * bank[at].double()).sum(1) for at in place.T], 1) if place.numel() else best
    found = exact.double().view(torch.int64), labels[place], numbers[place]
    near[:, :, : place.shape[1]] = torch.stack(found)
    return near


def _unless_out_of_memory(work: Callable[[], Any]) -> Any:
    """The result of ``work``, or None where there is not enough memory for it."""
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            return None
        raise


def compare(
    encoders: dict[str, nn.Module], index: Index, evaluation: Index, *, bank: int, queries: int,
    known_bad: Mapping[int, str] = MappingProxyType({}), ranks: Ranks | None = None,
    progress: Callable[[int, int], None] | None = None, **how,
) -> dict:  # fmt: skip
    """k-NN accuracy of several encoders on the same images; for all ranks, on which it is the same.

    ``queries`` images of ``evaluation`` are asked against ``bank`` images of ``index``, of which ``known_bad``,
    {sample: reason}, are known not to decode. ``how``: the further arguments of ``embed``. Classes are matched by
    their names. Images that do not decode are left out: "knn_bad" names them, and all files that the index of the
    evaluation has rejected. ``progress``: of this rank, as of ``embed``. On all ranks ValueError where no image decodes
    or one of the ranks has not enough memory, OSError where it cannot read, Stopped where it is asked to stop.
    """
    ranks = ranks or _ALONE
    chosen, asked = subset(index, bank), subset(evaluation, queries)
    known_bad = _merged(ranks.gather(dict(known_bad)))
    bad, bad_queries, failed, parts = {i: known_bad[i] for i in chosen.tolist() if i in known_bad}, {}, None, None

    def work():
        networks, (first, second) = list(encoders.values()), (_share(part, ranks) for part in (chosen, asked))
        done = [further(progress, before, len(first) + len(second)) for before in (0, len(first))]
        mine = embed(networks, index, first, bad=bad, progress=done[0], **how)
        return mine, embed(networks, evaluation, second, bad=bad_queries, progress=done[1], **how)

    try:
        parts = _unless_out_of_memory(work)
        failed = None if parts else ValueError(f"not enough memory for features of {len(chosen):,} images")
    except (ValueError, OSError, Stopped) as error:
        failed = error
    ranks.meet()
    for error in ranks.gather(failed):
        if error is not None:
            raise error
    (known, known_labels, numbers), (candidates, labels, _) = parts
    counts = ranks.sum(torch.tensor([len(known_labels), len(labels)], device=labels.device)).tolist()
    for count, of, where in zip(counts, (chosen, asked), (index, evaluation), strict=True):
        if not count:
            raise ValueError(f"no image in {where.root} decodes, of {len(of):,}")
    translated = torch.from_numpy(evaluation.labels_among(index.classes)).to(labels.device)[labels]
    scores = dict(zip(("knn_bank", "knn_queries"), counts, strict=True))
    for name, rows, queried in zip(encoders, known, candidates, strict=True):
        try:
            scores[f"knn_{name}"] = accuracy(rows, known_labels, queried, translated, numbers=numbers, ranks=ranks)
        except torch.OutOfMemoryError as error:
            raise ValueError(str(error)) from None
    bad, bad_queries = _merged(ranks.gather(bad)), _merged(ranks.gather(bad_queries))
    scores["knn_bad"] = {index.file(i): reason for i, reason in bad.items()} | evaluation.left_out(bad_queries)
    return scores


def further(progress: Callable[[int, int], None] | None, before: int, total: int) -> Callable[[int, int], None] | None:
    """``progress`` for a part of the work, so many images after its beginning."""
    return progress and (lambda done, _: progress(before + done, total))


def _share(samples, ranks):
    """This rank's part of ``samples``: of W ranks every W-th batch. A batch is the same for any number of ranks."""
    firsts = range(ranks.rank * _BATCH, len(samples), ranks.count * _BATCH)
    return np.concatenate([samples[:0], *(samples[first : first + _BATCH] for first in firsts)])


def stretch(images: int, ranks: Ranks) -> np.ndarray:
    """This rank's part of so many ``images``: consecutive ones, in whole batches, which are those of one rank alone."""
    batches = -(-images // _BATCH)
    first, last = (min(images, batches * rank // ranks.count * _BATCH) for rank in (ranks.rank, ranks.rank + 1))
    return np.arange(first, last)


def _merged(parts):
    return {key: value for part in parts for key, value in part.items()}
