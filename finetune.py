"""Fine-tunes an encoder on labelled images, or trains one from scratch in the same way, and measures its accuracy.

python finetune.py --encoder RUN --recipe cifar --data TRAIN --eval-data VAL --output OUT
python finetune.py --encoder none --recipe cifar --data TRAIN --eval-data VAL --output OUT
torchrun --nproc-per-node 8 finetune.py --encoder RUN --recipe imagenet --data TRAIN --eval-data VAL --output OUT
"""

import json
import os
import sys

from model.export import export_encoder
from pipeline import Index, Loader
from run import program
from run.checkpoint import Saver
from run.images import open_data
from run.progress import Report, TooManySkipped
from run.ranks import Ranks
from run.recipes import learning_rate
from run.session import named, open_output, restore, save, summarise_rejected, write_rejected, write_skipped
from run.signals import STOPPED, StopRequest
from transfer.finetuning import FIGURES, Tuning, evaluate, new_model
from transfer.probe import PROBES
from transfer.recipes import TUNE_RECIPES, TuneConfig


def main(arguments: list[str]) -> None:
    # Everything that can be wrong with the command, the data or the output folder is found before any work is done.
    try:
        config = parse(arguments)
        ranks = Ranks.join(config.device)
        index, bad, evaluation = open_data(config, ranks, labelled=True)
        if config.probe is not None:
            probe(config, ranks, index, evaluation)
            return
        vit, description = new_model(config, len(index.classes))
        threads = config.threads or ranks.default_threads()
        loader = Loader(
            index, config.augmentation, image_size=square(vit), batch_size=config.batch_size, seed=config.seed,
            device=ranks.device, threads=threads, rank=ranks.rank, ranks=ranks.count, max_bad=config.max_bad,
        )  # fmt: skip
        if (config.mixup or config.cutmix) and config.batch_size // ranks.count % 2:
            raise ValueError(
                f"--batch-size {config.batch_size}: expected an even number of images for each of the ranks"
            )
        loader.bad.update(bad)
        state, damaged = open_output(config, index, ranks)
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"finetune.py: {error}", file=sys.stderr)
        Ranks.leave()
        sys.exit(2)

    steps_per_epoch = loader.batches_per_epoch
    steps = max(1, round(config.epochs * steps_per_epoch))
    steps = min(steps, config.max_steps or steps)
    start = state["step"] if state else 0

    if state:
        description = json.loads(state["origin"])  # the encoder may have gone on meanwhile
    tuning = Tuning(config, vit, description, ranks)
    rates = {"images_per_second": config.batch_size}
    report = Report(
        config.output, ranks, figures=FIGURES, rates=rates, every=config.log_every, start=start, total=steps,
        steps_per_epoch=steps_per_epoch,
    )  # fmt: skip
    if state:
        restore(state, loader, tuning, report)
        del state
    saver = Saver(config.output / "checkpoints", last=config.keep_last, every=config.keep_every)
    if ranks.first:
        write_rejected(config.output, index, loader.bad)

    with report, StopRequest(ranks) as stop:
        for line in damaged:
            report.say(f"{line}; the run goes on from the one before")
        report.say(
            f"{description['model']} {described(description)}, {square(vit)} px, {len(index.classes)} classes; "
            f"{len(index):,} images, batch {config.batch_size} on {ranks.count} x {ranks.device.type}, {threads} input "
            f"threads each; " + (f"steps {start + 1} to {steps}" if start < steps else f"all {start} steps are done")
        )
        step, stopped = start, False
        try:
            for batch in report.waiting_for(loader.batches(start, steps)):
                epoch = step / steps_per_epoch  # passes over the images, as the schedule counts
                figures, finite = tuning.step(batch.views[0], batch.label, step, epoch)
                step += 1
                report.step(step, figures, finite, learning_rate(config, epoch))
                if step % (config.eval_every * steps_per_epoch) == 0 and step < steps:
                    score(tuning, evaluation, index.classes, report, step, threads)
                stopped = stop.agreed(step) and step < steps
                if step % config.checkpoint_every == 0 or step == steps or stopped:
                    save(saver, config, loader, ranks, step, tuning, report)
                if stopped:
                    break
        except TooManySkipped as error:
            skipped = write_skipped(config, loader, ranks, step)
            raise TooManySkipped(f"{error}; {skipped} names the images") from None
        finally:  # also where there are too many
            if ranks.first:
                write_rejected(config.output, index, loader.bad)
        saver.wait()
        report.say(summarise_rejected(index, loader.bad, config.output))
        scores = {} if stopped else score(tuning, evaluation, index.classes, report, step, threads, last=True)
    ranks.leave()
    if stopped:
        report.say(f"stopped on request after step {step}, which is saved; the same command goes on from there")
        sys.exit(STOPPED)
    if ranks.first:
        export(config, tuning, index, scores, report, step)


def parse(arguments: list[str]) -> TuneConfig:
    """The config of a command line."""
    config = program.parse("finetune.py", TUNE_RECIPES, arguments)
    if config.data is not None and config.eval_data is None:
        raise ValueError("--eval-data is missing; expected labelled images to measure the accuracy on, beside --data")
    return config


def probe(config: TuneConfig, ranks: Ranks, index: Index, evaluation: Index) -> None:
    """Measures the frozen encoder, says so in a line and adds it to ``probes.jsonl``."""
    if ranks.count > 1:
        raise ValueError(f"--probe {config.probe} on {ranks.count} ranks; expected one process")
    vit, description = new_model(config, 0)
    scores = PROBES[config.probe](
        vit.to(ranks.device), index, evaluation, images=config.probe_images, mean=description["mean"],
        std=description["std"], device=ranks.device, threads=config.threads or ranks.default_threads(),
    )  # fmt: skip
    left_out = scores.pop("left_out")
    figures = ", ".join(f"{name} {scores[name]:.2f} %" for name in ("top1", "top5") if name in scores)
    print(
        f"{config.probe} probe of {description['model']} {described(description)}: {figures} of "
        f"{scores['eval_images']:,} images, after {scores['train_images']:,} for training"
        + (f"; left out {len(left_out):,}: {named(left_out.items())}" if left_out else "")
    )
    record = {"probe": config.probe, "encoder": config.encoder, "training": description["training"], **scores}
    with (config.output / "probes.jsonl").open("a") as file:
        file.write(json.dumps(record | {"left_out": len(left_out)}) + "\n")


def square(vit) -> int:
    """Side of the images of a model; ValueError where they are not square."""
    height, width = vit.patch_embed.img_size
    if height != width:
        raise ValueError(f"--encoder takes images of {height} x {width} pixels; expected square ones: set --image-size")
    return height


def described(description: dict) -> str:
    """Where the weights come from, for the screen."""
    known = description["training"]
    parts = [str(known.get(name)) for name in ("method", "recipe") if known.get(name)]
    parts += [f"{known['steps']:,} steps"] if "steps" in known else []
    return "from scratch" if parts == ["none"] else f"({', '.join(parts) or 'of a checkpoint'})"


def score(tuning: Tuning, evaluation: Index, classes, report: Report, step: int, threads: int, last=False) -> dict:
    """Accuracy on all evaluation images, said and recorded."""
    with report.aside():
        scores, bad = evaluate(tuning, evaluation, classes, threads=threads)
    epoch = step / report.steps_per_epoch
    left_out = {f"{evaluation.root}/{path}": reason for path, reason in evaluation.rejected.items()}
    left_out |= {evaluation.file(sample): reason for sample, reason in bad.items()}
    figures = ", ".join(f"{name} {value:.2f} %" for name, value in scores.items() if name.startswith("top"))
    if report.ranks.first:
        report.record({"step": step, "epoch": round(epoch, 4), **scores, "left_out": len(left_out)})
    report.say(f"epoch {epoch:.4g}: {figures} of {scores['eval_images']:,} evaluation images")
    if left_out and last:
        report.say(f"left out {len(left_out):,} evaluation images: {named(left_out.items())}")
    return scores


def export(config: TuneConfig, tuning: Tuning, index: Index, scores: dict, report: Report, step: int) -> None:
    """Writes the model with its classifier: ``model.safetensors``, and that of the mean weights, each with its JSON."""
    description = tuning.description
    history = {"encoder": description["training"], "recipe": config.recipe, "steps": step, "images": len(index)}
    for name, network in tuning.networks().items():
        path = export_encoder(
            network, config.output, name=description["model"], arguments=description["arguments"],
            mean=description["mean"], std=description["std"], training=history | scores,
            stem=f"model_{name}" if name else "model", classes=index.classes,
        )  # fmt: skip
        report.say(f"model{f' ({name})' if name else ''}: {path}")


if __name__ == "__main__":
    program.run("finetune.py", main)
