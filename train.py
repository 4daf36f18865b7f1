"""Pretrains a Vision Transformer by Asymmetric Patch Sampling: a folder of images in, a timm encoder out.

python train.py --recipe imagenet-vit-s --data FOLDER --output RUN
torchrun --nproc-per-node 8 train.py --recipe imagenet-vit-s --data FOLDER --output RUN
"""

import os
import sys

from model.export import export_encoder
from pipeline import Index, Loader
from run import program
from run.checkpoint import Saver
from run.images import open_data
from run.progress import Report, TooManySkipped
from run.ranks import Ranks
from run.recipes import RECIPES, Config, learning_rate
from run.session import (
    named,
    open_output,
    restore,
    save,
    summarise_rejected,
    write_rejected,
    write_skipped,
)
from run.signals import STOPPED, StopRequest
from run.training import FIGURES, Training, encoder_arguments, new_encoder, plan_patches, product_rate
from transfer import knn


def main(arguments: list[str]) -> None:
    # Everything that can be wrong with the command, the data or the output folder is found before any work is done.
    try:
        config = parse(arguments)
        _, grid, keep = plan_patches(config)
        ranks = Ranks.join(config.device)
        index, bad, evaluation = open_data(config, ranks)
        threads = config.threads or ranks.default_threads()
        loader = Loader(
            index, config.augmentation, image_size=config.image_size, batch_size=config.batch_size, seed=config.seed,
            device=ranks.device, threads=threads, rank=ranks.rank, ranks=ranks.count, max_bad=config.max_bad,
        )  # fmt: skip
        loader.bad.update(bad)
        state, damaged = open_output(config, index, ranks)
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train.py: {error}", file=sys.stderr)
        Ranks.leave()
        sys.exit(2)

    groups = config.groups
    steps_per_epoch = loader.batches_per_epoch * groups
    steps = max(1, round(config.epochs * loader.batches_per_epoch)) * groups
    steps = min(steps, config.max_steps or steps)

    training = Training(config, ranks.device, ranks=ranks.count)
    start = state["step"] if state else 0
    rates = {"images_per_second": config.batch_size / groups, "pairs_per_second": config.batch_size}
    if ranks.device.type == "cuda":
        peak = ranks.count * product_rate(ranks.device, half=training.half)
        rates["mfu"] = training.flop_per_pair * config.batch_size / peak
    report = Report(
        config.output, ranks, figures=FIGURES, rates=rates, every=config.log_every, start=start, total=steps,
        steps_per_epoch=steps_per_epoch,
    )  # fmt: skip
    if state:
        restore(state, loader, training, report)
        del state
    saver = Saver(config.output / "checkpoints", last=config.keep_last, every=config.keep_every)
    knn_every = config.knn_every * steps_per_epoch  # steps
    if ranks.first:
        write_rejected(config.output, index, loader.bad)

    with report, StopRequest(ranks) as stop:
        for line in damaged:
            report.say(f"{line}; the run goes on from the one before")
        report.say(
            f"{config.model}, {config.image_size} px, {keep} of {grid[0]} x {grid[1]} patches per view, "
            f"{groups} groups; {len(index):,} images, batch {config.batch_size} on {ranks.count} x "
            f"{ranks.device.type}, {threads} input threads each; "
            + (f"steps {start + 1} to {steps}" if start < steps else f"all {start} steps are done")
        )
        step, stopped = start, False
        try:
            for batch in report.waiting_for(loader.batches(start // groups, -(-steps // groups))):
                chosen = training.sample(batch, step // steps_per_epoch)  # [2, B, R, K]
                # The patches that one group leaves over are the views of the next. A run may have stopped between two.
                for group in range(step % groups, min(groups, steps - step // groups * groups)):
                    epoch = step / steps_per_epoch  # passes over the images, as the schedules count
                    figures, finite = training.step(batch.views, chosen[:, :, group], epoch)
                    step += 1
                    report.step(step, figures, finite, learning_rate(config, epoch))
                    if evaluation and knn_every and step // knn_every > (step - 1) // knn_every and step < steps:
                        encoder = training.encoder()
                        if ranks.first:
                            with report.aside():
                                score(config, {"trained": encoder}, index, evaluation, report, step, threads)
                    stopped = stop.agreed(step) and step < steps
                    if step % config.checkpoint_every == 0 or step == steps or stopped:
                        save(saver, config, loader, ranks, step, training, report)
                    if stopped:
                        break
                if stopped:
                    break
        except TooManySkipped as error:
            skipped = write_skipped(config, loader, ranks, step, groups=groups)
            raise TooManySkipped(f"{error}; {skipped} names the images") from None
        finally:  # also where there are too many
            if ranks.first:
                write_rejected(config.output, index, loader.bad)
        saver.wait()
        report.say(summarise_rejected(index, loader.bad, config.output))
        stopped = stopped or stop.agreed(0)
    encoder = training.encoder()
    ranks.leave()
    if stopped:
        report.say(f"stopped on request after step {step}, which is saved; the same command goes on from there")
        sys.exit(STOPPED)
    if ranks.first:
        finish(config, encoder, index, evaluation, report, step, threads)


def parse(arguments: list[str]) -> Config:
    """The config of a command line."""
    return program.parse("train.py", RECIPES, arguments)


def score(
    config: Config, encoders: dict, index: Index, evaluation: Index, report: Report, step: int, threads: int
) -> dict:
    """k-NN accuracy of encoders, said and recorded: {"knn_bank", "knn_queries", "knn_NAME" in percent}, or nothing."""
    device = report.ranks.device
    bank = config.knn_images or (2_000 if device.type == "cpu" else max(len(index), 4 * len(evaluation)))
    try:
        scores = knn.compare(
            encoders, index, evaluation, bank=bank, queries=max(1, bank // 4),
            mean=config.mean, std=config.std, device=device, threads=threads,
        )  # fmt: skip
    except ValueError as error:  # a whole training does not end without its encoder for that
        report.say(f"no k-NN accuracy: {error}")
        return {}
    if bad := scores.pop("knn_bad"):
        report.say(f"left out {len(bad):,} images of the k-NN accuracy: {named(bad.items())}")
    report.record({"step": step, "epoch": round(step / report.steps_per_epoch, 4), **scores})
    figures = ", ".join(f"{scores[f'knn_{name}']:.1f} % {name}" for name in encoders)
    report.say(
        f"k-NN accuracy on {scores['knn_queries']:,} of {len(evaluation):,} images, {scores['knn_bank']:,} as "
        f"the bank: {figures}"
    )
    return scores


def finish(
    config: Config, encoder, index: Index, evaluation: Index | None, report: Report, step: int, threads: int
) -> None:
    """Measures and exports the encoder, on rank 0."""
    training = {"method": "APS", "recipe": config.recipe, "steps": step, "images": len(index)}
    if evaluation is not None:
        both = {"trained": encoder, "untrained": new_encoder(config).to(report.ranks.device)}
        training |= score(config, both, index, evaluation, report, step, threads)
    path = export_encoder(
        encoder, config.output, name=config.model, arguments=encoder_arguments(config),
        mean=config.mean, std=config.std, training=training,
    )  # fmt: skip
    report.say(f"encoder: {path}")


if __name__ == "__main__":
    program.run("train.py", main)
