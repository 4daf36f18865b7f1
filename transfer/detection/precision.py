"""Average precision of a detector, as pycocotools has it; imported where it is used."""

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from run.ranks import Ranks

from .batches import EvaluationImages, apart
from .coco import CocoData
from .detector import detect

BATCH = 8  # images at a time in an evaluation, of whose detections all masks are held at full size
FIGURES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
RECALLS = ("AR1", "AR10", "AR100", "AR_small", "AR_medium", "AR_large")


def evaluate(
    detector: nn.Module, data: CocoData, *, size: int, workers: int, ranks: Ranks,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, float | None], list[dict[str, Any]], dict[int, str]]:  # fmt: skip
    """The figures of ``average_precision`` (on rank 0, nothing elsewhere), the detections in COCO's format of results,
    and {position: reason} of images that cannot be read, in which nothing is found. Each counts once over all ranks;
    ``size``: pixels of the longer side as the detector sees it. ``progress`` is told how many images of all are done on
    this rank. For all ranks."""
    device, mine, done = ranks.device, range(ranks.rank, len(data), ranks.count), 0
    loader = DataLoader(
        EvaluationImages(data, size=size), batch_size=BATCH, sampler=mine,
        num_workers=workers, worker_init_fn=apart, collate_fn=list, pin_memory=device.type == "cuda",
    )  # fmt: skip
    categories, results, bad = list(data.categories), [], {}
    detector.eval()
    for batch in loader:
        bad |= {position: reason for position, image, reason in batch if image is None}
        read = [(data.images[position], image.to(device)) for position, image, _ in batch if image is not None]
        if read:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                found = detect(detector, [image for _, image in read], [about[2:] for about, _ in read])
            for (about, _), one in zip(read, found, strict=True):
                results += as_results(one, about[0], categories)
        done += len(batch)
        if progress:
            progress(done, len(mine))
    parts = ranks.gather((results, bad))
    results = [one for part, _ in parts for one in part]
    bad = {position: reason for _, part in parts for position, reason in part.items()}
    return average_precision(data, results) if ranks.first else {}, results, bad


def as_results(found: dict[str, Tensor], image: int, categories: list[int]) -> list[dict[str, Any]]:
    """The detections of an image in COCO's format of results, masks as compressed run lengths."""
    from pycocotools import mask as rle

    boxes = found["boxes"].cpu().double()
    boxes[:, 2:] -= boxes[:, :2]
    masks = rle.encode(np.asfortranarray(found["masks"].permute(1, 2, 0).cpu().numpy().astype(np.uint8)))
    scores, labels = found["scores"].tolist(), found["labels"].tolist()
    return [
        {
            "image_id": image, "category_id": categories[label - 1], "bbox": box, "score": score,
            "segmentation": runs | {"counts": runs["counts"].decode()},
        }
        for label, box, score, runs in zip(labels, boxes.tolist(), scores, masks, strict=True)
    ]  # fmt: skip


def average_precision(data: CocoData, results: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """pycocotools' twelve figures of boxes and as many of masks, in percent, by names such as "box_AP50"; None where
    there is no object of that kind."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    images = [{"id": number, "height": height, "width": width} for number, _, height, width in data.images]
    categories = [{"id": number, "name": name} for number, name in data.categories.items()]
    figures: dict[str, float | None] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # it tells of each of its steps
        truth = COCO()
        truth.dataset = {"images": images, "categories": categories, "annotations": data.truth()}
        truth.createIndex()
        for kind, geometry in (("box", "bbox"), ("mask", "segm")):
            found = COCO()
            if results:
                # Without the box the sizes of objects are those of their masks, as they should be for these.
                left_out = {"box": "segmentation", "mask": "bbox"}[kind]
                found = truth.loadRes([{k: v for k, v in one.items() if k != left_out} for one in results])
            judge = COCOeval(truth, found, geometry)
            judge.evaluate()
            judge.accumulate()
            judge.summarize()
            stats = [None if stat < 0 else 100 * float(stat) for stat in judge.stats]
            figures |= {f"{kind}_{name}": stat for name, stat in zip(FIGURES + RECALLS, stats, strict=True)}
    return figures


def table(figures: dict[str, float | None]) -> str:
    """The average precisions of ``average_precision``, in percent."""
    rows = [["", *(name.replace("_", " ") for name in FIGURES)]]
    for kind in ("box", "mask"):
        values = [figures[f"{kind}_{name}"] for name in FIGURES]
        rows.append([kind, *("-" if value is None else f"{value:.1f}" for value in values)])
    return "\n".join(row[0].ljust(4) + "".join(cell.rjust(11) for cell in row[1:]) for row in rows)
