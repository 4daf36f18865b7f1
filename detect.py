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

from model.export import write_weights
from run import checkpoint, program
from run.progress import Report, TooManySkipped
from run.ranks import Ranks
from run.session import named, open_output, restore, save, summarise_rejected, write_rejected, write_skipped
from run.signals import STOPPED, StopRequest
from transfer.detection.batches import CocoLoader
from transfer.detection.precision import evaluate, table
from transfer.detection.training import (
    FIGURES,
    RECIPES,
    DetectionConfig,
    DetectorTraining,
    learning_rate,
    new_detector,
    open_data,
)


def main(arguments: list[str]) -> None:
    # Everything that can be wrong with the command, the data or the output folder is found before any work is done.
    try:
        config = parse(arguments)
        ranks = Ranks.join(config.device)
        data, bad, evaluation = open_data(config, ranks)
        loader = CocoLoader(
            data, size=config.image_size, scale=config.scale, batch_size=config.batch_size, seed=config.seed,
            device=ranks.device, workers=processes(config, ranks), rank=ranks.rank, ranks=ranks.count,
            max_bad=config.max_bad,
        )  # fmt: skip
        loader.bad.update(bad)
        detector, description = new_detector(config, len(data.categories))
        state, damaged = open_output(config, data, ranks)
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"detect.py: {error}", file=sys.stderr)
        Ranks.leave()
        sys.exit(2)

    steps_per_epoch = loader.batches_per_epoch
    planned = max(1, round(config.epochs * steps_per_epoch))
    steps = min(planned, config.max_steps or planned)
    start = state["step"] if state else 0

    training = DetectorTraining(config, detector, ranks, planned)
    report = Report(
        config.output, ranks, figures=FIGURES, rates={"images_per_second": config.batch_size},
        every=config.log_every, start=start, total=steps, steps_per_epoch=steps_per_epoch,
    )  # fmt: skip
    if state:
        restore(state, loader, training, report)
        del state
    saver = checkpoint.Saver(config.output / "checkpoints", last=config.keep_last, every=config.keep_every)
    if ranks.first:
        write_rejected(config.output, data, loader.bad)

    with report, StopRequest(ranks) as stop:
        for line in damaged:
            report.say(f"{line}; the run goes on from the one before")
        report.say(
            f"encoder {config.encoder}, {config.image_size} px; {len(data):,} images, {len(data.classes)} categories, "
            f"batch {config.batch_size} on {ranks.count} x {ranks.device.type}; "
            + (f"steps {start + 1} to {steps}" if start < steps else f"all {start} steps are done")
            + (f"; {data.unusable:,} objects without area are left out" if data.unusable else "")
        )
        step, stopped = start, False
        try:
            for images, targets in report.waiting_for(loader.batches(start, steps)):
                figures, finite = training.step(images, targets, step)
                rate = learning_rate(config, step, planned)
                step += 1
                report.step(step, figures, finite, rate)
                stopped = stop.agreed(step) and step < steps
                if step % config.checkpoint_every == 0 or step == steps or stopped:
                    save(saver, config, loader, ranks, step, training, report)
                if stopped:
                    break
        except TooManySkipped as error:
            skipped = write_skipped(config, loader, ranks, step)
            raise TooManySkipped(f"{error}; {skipped} names the images") from None
        finally:  # also where there are too many
            if ranks.first:
                write_rejected(config.output, data, loader.bad)
        saver.wait()
        report.say(summarise_rejected(data, loader.bad, config.output))
        stopped = stopped or stop.agreed(0)
    if stopped:
        ranks.leave()
        report.say(f"stopped on request after step {step}, which is saved; the same command goes on from there")
        sys.exit(STOPPED)
    if ranks.first:
        weights = config.output / "detector.safetensors"
        report.say(f"detector: {write_weights(detector, weights, description | {'classes': data.classes})}")
    if evaluation is None:
        report.say("no --eval-annotations: no average precision")
    else:
        score(config, detector, evaluation, report, step)
    ranks.leave()


def score(config: DetectionConfig, detector, evaluation, report: Report, step: int) -> None:
    """Average precision, said and recorded; all detections go to ``detections.json``."""
    report.say(f"looking for objects in {len(evaluation):,} images, for the average precision")
    figures, results, unread = evaluate(
        detector, evaluation, size=config.image_size, workers=processes(config, report.ranks), ranks=report.ranks
    )
    if unread:
        reasons = ((evaluation.paths[position], reason) for position, reason in unread.items())
        report.say(f"{len(unread):,} images cannot be read, nothing is found in them: {named(reasons)}")
    if report.ranks.first:
        checkpoint.write_atomically(config.output / "detections.json", json.dumps(results).encode())
        known = {name: figure for name, figure in figures.items() if figure is not None}
        report.record({"step": step, "eval_images": len(evaluation), "eval_unread": len(unread), **known})
        report.say(f"average precision on {len(evaluation):,} images, in percent:\n{table(figures)}")


def processes(config: DetectionConfig, ranks: Ranks) -> int:
    """Those of a rank; more than its share of the cores would only be in each other's way."""
    return min(config.workers, ranks.default_threads())


def parse(arguments: list[str]) -> DetectionConfig:
    """The config of a command line."""
    return program.parse("detect.py", RECIPES, arguments)


if __name__ == "__main__":
    program.run("detect.py", main)
