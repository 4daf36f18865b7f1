"""Trains Mask R-CNN on a pretrained encoder, on data in COCO's format, and measures its box and mask average precision.

python detect.py --recipe coco --encoder RUN --output RUN-COCO
    --train-annotations COCO/annotations/instances_train2017.json --train-images COCO/train2017
    --eval-annotations COCO/annotations/instances_val2017.json --eval-images COCO/val2017
torchrun --nproc-per-node 8 detect.py ...      (--batch-size counts the images of all ranks)

Without data it trains on generated scenes, on a CPU in minutes. COCO itself has not been run: that the recipe ``coco``
reaches what ViTDet (arXiv 2203.16527) reports of other encoders is not known. Needs pip install -e '.[coco]'.
"""

import json
import os
import sys

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pipeline import TooManyBadFiles
from pipeline.coco import Batches, TrainingImages, apart
from pipeline.loader import bad_limit
from run import checkpoint, program
from run.coco import evaluate, table
from run.detection import (
    LOSSES,
    MAX_BAD,
    RECIPES,
    DetectionConfig,
    describe,
    learning_rate,
    new_detector,
    new_optimizer,
    open_data,
    open_output,
)
from run.progress import Report
from run.ranks import Ranks
from run.signals import STOPPED, StopRequest


def main(arguments: list[str]) -> None:
    try:
        train(arguments)
    except TooManyBadFiles as error:  # of a worker it comes with the way that it took
        sys.exit(f"detect.py: {str(error).splitlines()[-1]}")


def train(arguments: list[str]) -> None:
    # Everything that can be wrong with the command, the data or the output folder is found before any work is done.
    try:
        config = parse(arguments)
        ranks = Ranks.join(config.device)
        if config.batch_size % ranks.count:
            raise ValueError(f"--batch-size {config.batch_size}: expected a multiple of the {ranks.count} ranks")
        data, evaluation = open_data(config)
        detector = new_detector(config, len(data.categories)).to(ranks.device)
        state, damaged = open_output(config, data, ranks)
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"detect.py: {error}", file=sys.stderr)
        Ranks.leave()
        sys.exit(2)

    device = ranks.device
    on_gpu = device.type == "cuda"
    steps_per_epoch = len(data) // config.batch_size
    planned = max(1, round(config.epochs * steps_per_epoch))
    steps = min(planned, config.max_steps or planned)
    start = state["step"] if state else 0

    optimizer = new_optimizer(config, detector)
    report = Report(
        config.output, ranks, figures=("loss", *LOSSES), rates={"images_per_second": config.batch_size},
        every=config.log_every, start=start, total=steps, steps_per_epoch=steps_per_epoch,
    )  # fmt: skip
    parts = {"detector": detector, "optimizer": optimizer, "report": report}
    bad: dict[str, str] = {}  # {file: reason}
    if state:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        bad = state["bad"]
        del state
    network = DistributedDataParallel(detector) if ranks.count > 1 else detector
    loader = DataLoader(
        TrainingImages(data, size=config.image_size, scale=config.scale, seed=config.seed),
        batch_sampler=Batches(
            len(data), config.batch_size, config.seed, start=start, end=steps, rank=ranks.rank, ranks=ranks.count
        ),
        num_workers=config.workers, worker_init_fn=apart, collate_fn=list, pin_memory=on_gpu,
    )  # fmt: skip

    for line in damaged:
        report.say(f"{line}; the run goes on from the one before")
    report.say(
        f"encoder {config.encoder}, {config.image_size} px; {len(data):,} images, {len(data.categories)} categories, "
        f"batch {config.batch_size} on {ranks.count} x {device.type}; "
        + (f"steps {start + 1} to {steps}" if start < steps else f"all {start} steps are done")
        + (f"; {data.unusable:,} objects without area are left out" if data.unusable else "")
    )
    network.train()
    stopped, step = False, start
    with report, StopRequest(ranks) as stop:
        for batch in report.waiting_for(iter(loader)):
            images = [image.to(device, non_blocking=True).float() / 255 for image, _, _ in batch]
            targets = [{k: t.to(device, non_blocking=True) for k, t in target.items()} for _, target, _ in batch]
            for *_, unread in batch:
                bad |= unread
            if len(bad) > (limit := bad_limit(len(data), MAX_BAD)):
                raise TooManyBadFiles(f"{len(bad):,} images cannot be read, at most {limit:,} may: {_named(bad)}")

            rate = learning_rate(config, step, planned)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_scale"]
            torch.manual_seed(_seed(config.seed, step, ranks.rank))  # of the samples of regions, and of drop path
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                losses: dict[str, Tensor] = network(images, targets)
            loss = sum(losses.values())
            loss.backward()
            finite = torch.nn.utils.clip_grad_norm_(detector.parameters(), config.clip).isfinite()
            if finite:  # the same on all ranks, which have the same gradient
                optimizer.step()
            optimizer.zero_grad()
            step += 1
            report.step(step, [value.detach() for value in (loss, *map(losses.get, LOSSES))], finite, rate)

            stopped = stop.agreed(step) and step < steps
            if step % config.checkpoint_every == 0 or step == steps or stopped:
                for found in ranks.gather(bad):
                    bad |= found
                state = {name: part.state_dict() for name, part in parts.items()}  # that of the report asks all ranks
                if ranks.first:
                    state |= {"step": step, "bad": bad, "run": json.dumps(describe(config, data))}
                    checkpoint.save(config.output / "checkpoints", step, state)
            if stopped:
                break
    if bad:
        report.say(f"{len(bad):,} images cannot be read, others stood in for them: {_named(bad)}")
    if stopped:
        ranks.leave()
        report.say(f"stopped on request after step {step}, which is saved; the same command goes on from there")
        sys.exit(STOPPED)
    if evaluation is not None:
        figures, results, unread = evaluate(
            detector, evaluation, size=config.image_size, workers=config.workers, ranks=ranks
        )
        if unread:
            report.say(f"{len(unread):,} images cannot be read, nothing is found in them: {_named(unread)}")
        if ranks.first:
            checkpoint.write_atomically(config.output / "detections.json", json.dumps(results).encode())
            known = {name: figure for name, figure in figures.items() if figure is not None}
            report.record({"step": step, "eval_images": len(evaluation), "eval_unread": len(unread), **known})
            report.say(f"average precision on {len(evaluation):,} images, in percent:\n{table(figures)}")
    else:
        report.say("no --eval-annotations: no average precision")
    ranks.leave()


def parse(arguments: list[str]) -> DetectionConfig:
    """The config of a command line."""
    return program.parse("detect.py", RECIPES, arguments)


def _seed(*numbers: int) -> int:
    """One number of several, so that no two steps share it."""
    return int(np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(1, np.uint64)[0])


def _named(bad: dict[str, str]) -> str:
    return "; ".join(list(bad.values())[:10])


if __name__ == "__main__":
    program.run("detect.py", main)
