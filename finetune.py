"""Fine-tunes an encoder on labelled images, or trains one from scratch in the same way, and measures its accuracy.

python finetune.py --encoder RUN --recipe cifar --data TRAIN --eval-data VAL --output OUT
python finetune.py --encoder none --recipe cifar --data TRAIN --eval-data VAL --output OUT
torchrun --nproc-per-node 8 finetune.py --encoder RUN --recipe imagenet --data TRAIN --eval-data VAL --output OUT
"""

import contextlib
import json
import os
import signal
from dataclasses import asdict

if __name__ == "__main__":  # before what takes time: until ``program.run`` takes over, Ctrl-C ends it without a word
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from run import command
from transfer.recipes import TUNE_RECIPES, TuneConfig


def parse(arguments: list[str]) -> TuneConfig:
    """The config of a command line."""
    config = command.parse(
        "finetune.py", TUNE_RECIPES, arguments, own_data=lambda config: config.data is not None and config.probe is None
    )
    if config.data is not None and config.eval_data is None:
        raise ValueError("--eval-data is missing; expected labelled images to measure the accuracy on, beside --data")
    return config


if __name__ == "__main__":  # what follows takes seconds to import
    command.answer("finetune.py", parse, "nvidia.dali")

from model.export import export_model, with_error
from pipeline import Index
from pipeline.headers import counted
from pipeline.shown import shown
from pipeline.waiting import Stopped
from run import program
from run.images import open_data, open_loader, record
from run.loop import Loop, running
from run.ranks import Ranks
from run.recipes import learning_rate
from run.session import lock, named, open_output, origin
from transfer.finetuning import Tuning, evaluate, new_model
from transfer.pretrained import square
from transfer.probe import PROBES


def main(arguments: list[str]) -> None:
    with program.opening("finetune.py"):
        config = parse(arguments)
        ranks = Ranks.join(config.device)
        if config.probe is not None and ranks.count > 1:
            raise ValueError(f"--probe {config.probe} on {ranks.count} ranks; expected one process")
        index, bad, evaluation = open_data(config, ranks, labelled=True)
        if config.probe is not None:
            probe(config, ranks, index, evaluation)
            return
        begun = ranks.on_first(lambda: origin(config)) if config.encoder != "none" else None
        vit, description = new_model(config, len(index.classes), begun)
        loader = open_loader(config, ranks, index, bad, image_size=square(vit))
        if (config.mixup or config.cutmix) and config.batch_size // ranks.count % 2:
            raise ValueError(
                f"--batch-size {config.batch_size}: expected an even number of images for each of the ranks"
            )
        opened = open_output(config, index, ranks)

    tuning = Tuning(config, vit, description, ranks)
    about = (
        f"recipe {config.recipe}: {description['model']} {described(description)}, {square(vit)} px, "
        f"{counted(len(index.classes), 'class')}; {counted(len(index), 'image')} of "
        f"{config.data or 'the generated dataset (no --data)'}, batch "
        f"{config.batch_size} on {ranks.count} x {ranks.device.type} in {'bfloat16' if tuning.half else 'float32'}, "
        f"{counted(ranks.threads(config.threads), 'input thread')} each{loader.decoder}"
    )
    rates = {"images_per_second": config.batch_size}
    with running(config, ranks, loader, tuning, opened, about=about, rates=rates) as loop:
        for batch in loop.steps():
            rate = learning_rate(config, loop.epoch)
            figures, finite = tuning.step(batch.views[0], batch.label, loop.step, loop.epoch)
            loop.took(figures, finite, rate)
            if loop.due(config.eval_every):
                with loop.report.aside():
                    score(config, tuning, evaluation, index.classes, loop)

    scores = score(config, tuning, evaluation, index.classes, loop, last=True)
    ranks.leave()
    if ranks.first:
        export(config, tuning, index, scores, loop)
    loop.draw()


def probe(config: TuneConfig, ranks: Ranks, index: Index, evaluation: Index) -> None:
    """Measures the frozen encoder, says so in a line and adds it to ``probes.jsonl``."""
    vit, description = new_model(config, 0)
    square(vit)
    config.output.mkdir(parents=True, exist_ok=True)  # where that fails, before the measurement and not after it
    with contextlib.suppress(ValueError):  # so that no other probe takes this one for a dead one, by its record
        lock(config.output)
    with shown(f"{config.probe} probe", "embedding images") as progress:
        scores = PROBES[config.probe](
            vit.to(ranks.device), index, evaluation, images=config.probe_images, mean=description["mean"],
            std=description["std"], device=ranks.device, threads=ranks.threads(config.threads),
            record=record(config, ranks, f"probe-{os.getpid()}"), progress=progress,
        )  # fmt: skip
    left_out = scores.pop("left_out")
    figures = ", ".join(
        f"{name} {with_error(scores[name], scores['eval_images'], 2)}" for name in ("top1", "top5") if name in scores
    )
    print(
        f"{config.probe} probe of {description['model']} {described(description)}: {figures} of "
        f"{counted(scores['eval_images'], 'image')}, after {scores['train_images']:,} for training"
        + ("" if config.data else ", all of the generated dataset (no --data)")
        + (f"; left out {len(left_out):,}: {named(left_out.items())}" if left_out else "")
    )
    line = {"probe": config.probe, "encoder": config.encoder, "training": description["training"], **scores}
    path = config.output / "probes.jsonl"
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a full disk
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(line | {"left_out": len(left_out)}) + "\n")


def described(description: dict) -> str:
    """Where the weights come from, for the screen."""
    known = description["training"]
    parts = [str(known.get(name)) for name in ("method", "recipe") if known.get(name)]
    parts += [counted(known["steps"], "step")] if "steps" in known else []
    return "from scratch" if parts == ["none"] else f"({', '.join(parts) or 'of a checkpoint'})"


def score(config: TuneConfig, tuning: Tuning, evaluation: Index, classes, loop: Loop, *, last: bool = False) -> dict:
    """Accuracy on all evaluation images, said and recorded. For all ranks."""
    try:
        with loop.shown("accuracy", "evaluation images") as progress:
            scores, bad = evaluate(
                tuning, evaluation, classes, threads=loop.ranks.threads(config.threads),
                record=record(config, loop.ranks, "evaluation"), progress=progress,
            )  # fmt: skip
    except Stopped:  # between two steps; the run ends after saving
        loop.say(f"no accuracy of step {loop.step}: asked to stop")
        return {}
    left_out = evaluation.left_out(bad)
    tops = {name: value for name, value in scores.items() if name.startswith("top")}
    figures = ", ".join(f"{name} {with_error(value, scores['eval_images'], 2)}" for name, value in tops.items())
    loop.record({**scores, "left_out": len(left_out)})
    loop.say(f"epoch {loop.epoch:.4g}: {figures} of {counted(scores['eval_images'], 'evaluation image')}")
    if left_out and last:
        loop.say(f"left out {counted(len(left_out), 'evaluation image')}: {named(left_out.items())}")
    return scores


def export(config: TuneConfig, tuning: Tuning, index: Index, scores: dict, loop: Loop) -> None:
    """Writes the model with its classifier as ``model``, and that of the mean weights as ``model_ema``."""
    description = tuning.description
    history = {"encoder": description["training"], "recipe": config.recipe, "steps": loop.step, "images": len(index)}
    for name, network in tuning.networks().items():
        ending = f"_{name}" if name else ""
        own = {key: scores[key + ending] for key in ("top1", "top5") if key in scores}
        path = export_model(
            network, config.output / f"model{ending}", name=description["model"], arguments=description["arguments"],
            mean=description["mean"], std=description["std"], classes=index.classes, options=asdict(config),
            training=history | own | {"eval_images": scores["eval_images"]},
        )  # fmt: skip
        loop.say(f"model{f' ({name})' if name else ''}: {path}")


if __name__ == "__main__":
    program.run("finetune.py", main)
