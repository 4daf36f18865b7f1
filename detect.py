"""Trains Mask R-CNN on a pretrained encoder, on data in COCO's format, and measures its box and mask average precision.

python detect.py --recipe coco --encoder RUN --output RUN-COCO
    --train-annotations COCO/annotations/instances_train2017.json --train-images COCO/train2017
    --eval-annotations COCO/annotations/instances_val2017.json --eval-images COCO/val2017
torchrun --nproc-per-node 8 detect.py ...      (--batch-size counts the images of all ranks)

Without data it trains on generated scenes, on a CPU in minutes. COCO itself has not been run: that the recipe ``coco``
reaches what ViTDet (arXiv 2203.16527) reports of other encoders is not known. Needs pip install -e '.[coco]'.
"""

import json
import signal

if __name__ == "__main__":  # before what takes time: until ``program.run`` takes over, Ctrl-C ends it without a word
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from run import command
from transfer.detection.recipes import RECIPES, DetectionConfig, learning_rate


def parse(arguments: list[str]) -> DetectionConfig:
    """The config of a command line."""
    return command.parse("detect.py", RECIPES, arguments, own_data=lambda config: config.train_annotations is not None)


if __name__ == "__main__":  # what follows takes seconds to import
    command.answer("detect.py", parse)

from pipeline.headers import counted
from run import checkpoint, program
from run.loop import Loop, planned, running
from run.ranks import Ranks
from run.recipes import check
from run.session import check_batch, named, open_output, origin
from transfer.detection.batches import CocoLoader
from transfer.detection.precision import evaluate, table
from transfer.detection.training import DetectorTraining, new_detector, open_data


def main(arguments: list[str]) -> None:
    with program.opening("detect.py"):
        config = parse(arguments)
        ranks = Ranks.join(config.device)
        data, bad, evaluation = open_data(config, ranks)
        check_batch(config, data, ranks)
        loader = CocoLoader(
            data, size=config.image_size, scale=config.scale, batch_size=config.batch_size, seed=config.seed,
            device=ranks.device, workers=processes(config, ranks), rank=ranks.rank, ranks=ranks.count,
            max_bad=config.max_bad,
        )  # fmt: skip
        loader.bad.update(bad)
        begun = ranks.on_first(lambda: origin(config)) if config.encoder != "none" else None
        detector, description = new_detector(config, len(data.categories), begun)
        steps = planned(config, loader)
        expected = f"less than the {counted(steps, 'step')} of --epochs {config.epochs:g}"
        check(config.warmup_steps < steps, config, "warmup_steps", expected)
        opened = open_output(config, data, ranks)

    training = DetectorTraining(config, detector, description, ranks, steps)
    about = (
        f"recipe {config.recipe}: encoder {config.encoder}, {config.image_size} px; {counted(len(data), 'image')} of "
        f"{config.train_annotations or 'the generated scenes (no --train-annotations)'}, "
        f"{counted(len(data.classes), 'class')}, batch {config.batch_size} on {ranks.count} x {ranks.device.type} in "
        f"{'bfloat16' if ranks.device.type == 'cuda' else 'float32'}"
        + (f"; left out {counted(data.unusable, 'object')} without area" if data.unusable else "")
    )
    rates = {"images_per_second": config.batch_size}
    with running(config, ranks, loader, training, opened, about=about, rates=rates) as loop:
        for images, targets in loop.steps():
            rate = learning_rate(config, loop.step, steps)
            figures, finite = training.step(images, targets, loop.step)
            loop.took(figures, finite, rate)

    if ranks.first:
        weights = config.output / "detector.safetensors"
        loop.say(f"detector: {checkpoint.write_weights(detector, weights, description | {'classes': data.classes})}")
    if evaluation is None:
        loop.say("no --eval-annotations: no average precision")
    else:
        score(config, detector, evaluation, loop)
    loop.draw()
    ranks.leave()


def score(config: DetectionConfig, detector, evaluation, loop: Loop) -> None:
    """Average precision, said and recorded; all detections go to ``detections.json``. For all ranks."""
    loop.say(f"looking for objects in {counted(len(evaluation), 'image')}, for the average precision")
    with loop.shown("average precision", "looking for objects") as progress:
        figures, results, unread = evaluate(
            detector, evaluation, size=config.image_size, workers=processes(config, loop.ranks), ranks=loop.ranks,
            progress=progress,
        )  # fmt: skip
    if unread:
        reasons = ((evaluation.paths[position], reason) for position, reason in unread.items())
        loop.say(f"{counted(len(unread), 'image')} cannot be read, so nothing is found there: {named(reasons)}")
    if loop.ranks.first:
        checkpoint.write_atomically(config.output / "detections.json", json.dumps(results).encode())
        known = {name: figure for name, figure in figures.items() if figure is not None}
        loop.record({"eval_images": len(evaluation), "eval_unread": len(unread), **known})
        loop.say(f"average precision on {counted(len(evaluation), 'image')}, in percent:\n{table(figures)}")


def processes(config: DetectionConfig, ranks: Ranks) -> int:
    """Those of a rank; more than its share of the cores would only be in each other's way."""
    return min(config.workers, ranks.threads())


if __name__ == "__main__":
    program.run("detect.py", main)
