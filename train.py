"""Pretrains a Vision Transformer by Asymmetric Patch Sampling: a folder of images in, a timm encoder out.

python train.py --recipe imagenet-vit-s --data FOLDER --output RUN
torchrun --nproc-per-node 8 train.py --recipe imagenet-vit-s --data FOLDER --output RUN
"""

import dataclasses
import signal

if __name__ == "__main__":  # before what takes time: until ``program.run`` takes over, Ctrl-C ends it without a word
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from run import command
from run.recipes import RECIPES, Config, learning_rate


def parse(arguments: list[str]) -> Config:
    """The config of a command line. Beside an encoder, what it decides is left open where no option does."""

    def read(recipes: dict[str, Config]) -> Config:
        return command.parse("train.py", recipes, arguments, own_data=lambda config: config.data is not None)

    config = read(RECIPES)
    if config.encoder == "none":
        return config
    opened = {"encoder": config.encoder, **Config.OPEN}
    return read({name: dataclasses.replace(recipe, **opened) for name, recipe in RECIPES.items()})


if __name__ == "__main__":  # what follows takes seconds to import
    command.answer("train.py", parse, "nvidia.dali")

from model.export import export_model, with_error
from pipeline import Index
from pipeline.headers import counted
from pipeline.waiting import Stopped
from run import program
from run.images import open_data, open_loader, record
from run.loop import Loop, running
from run.ranks import Ranks
from run.session import named, open_output
from run.training import Training, encoder_arguments, new_encoder, plan_patches, product_rate
from run.window import Window
from transfer import knn, start


def main(arguments: list[str]) -> None:
    with program.opening("train.py"):
        config, encoder, origin = parse(arguments), None, None
        if config.encoder != "none":
            config, encoder, origin = start.begin(config)
        _, grid, keep = plan_patches(config)
        ranks = Ranks.join(config.device)
        index, bad, evaluation = open_data(config, ranks)
        loader = open_loader(config, ranks, index, bad, image_size=config.image_size)
        if (images := config.batch_size // ranks.count) % config.accumulate:
            raise ValueError(f"--accumulate {config.accumulate}: expected a divisor of the {images} images of a rank")
        opened = open_output(config, index, ranks)
        if encoder is not None and not config.dry_run:
            start.keep(config, encoder, origin, ranks)

    training = Training(config, ranks.device, ranks=ranks.count, encoder=encoder, origin=origin)
    rates = {"images_per_second": config.batch_size / config.groups, "pairs_per_second": config.batch_size}
    if ranks.device.type == "cuda":
        peak = ranks.count * product_rate(ranks.device, half=training.half)
        rates["mfu"] = training.flop_per_pair * config.batch_size / peak
    about = (
        f"recipe {config.recipe}: {config.model}{f' of {config.encoder}' if origin else ''}, {config.image_size} px, "
        f"{keep} of {grid[0]} x {grid[1]} patches per view, {counted(config.groups, 'group')}; "
        f"{counted(len(index), 'image')} of {config.data or 'the generated dataset (no --data)'}, batch "
        f"{config.batch_size} on {ranks.count} x {ranks.device.type} in {'bfloat16' if training.half else 'float32'}, "
        f"{counted(ranks.threads(config.threads), 'input thread')} each{loader.decoder}"
    )
    size = min(config.window, loader.batches_per_epoch)  # an epoch has no larger one
    window = Window(training, size=size, redeal=config.redeal, rank=ranks.rank)
    how = {"about": about, "rates": rates, "groups": config.groups, "window": size}
    with running(config, ranks, loader, training, opened, **how) as loop:
        for number, batches, turns in loop.windows():
            window.fill(batches, loop.step // loop.steps_per_epoch, number)
            for place, group in turns:  # the groups of an image share no patch of its first view
                patches, chosen = window.deal(place, group)
                rate = learning_rate(config, loop.epoch)
                figures, finite = training.step(patches, chosen, loop.epoch)
                loop.took(figures, finite, rate)
                if evaluation and loop.due(config.knn_every):
                    with loop.report.aside():
                        score(config, {"trained": training.encoder()}, index, evaluation, loop)

    finish(config, training, index, evaluation, loop)
    ranks.leave()


def score(config: Config, encoders: dict, index: Index, evaluation: Index, loop: Loop) -> dict:
    """k-NN accuracy of encoders, said and recorded: {"knn_bank", "knn_queries", "knn_NAME" in percent}, or nothing. For
    all ranks, which share the work."""
    device = loop.ranks.device
    largest = min(knn.LARGEST_BANK, max(len(index), 4 * len(evaluation)))
    bank = config.knn_images or (2_000 if device.type == "cpu" else largest)
    try:
        with loop.shown("k-NN accuracy", "embedding images") as progress:
            scores = knn.compare(
                encoders, index, evaluation, bank=bank, queries=max(1, bank // 4), mean=config.mean, std=config.std,
                device=device, threads=loop.ranks.threads(config.threads), known_bad=loop.loader.bad, ranks=loop.ranks,
                record=record(config, loop.ranks, "evaluation"), progress=progress,
            )  # fmt: skip
    except Stopped:  # between two steps; the run ends after saving
        loop.say(f"no k-NN accuracy of step {loop.step}: asked to stop")
        return {}
    except (ValueError, OSError) as error:  # a training does not end for that
        loop.say(f"no k-NN accuracy: {error}")
        return {}
    if bad := scores.pop("knn_bad"):
        loop.say(f"left out {counted(len(bad), 'image')} of the k-NN accuracy: {named(bad.items())}")
    loop.record(scores)
    figures = ", ".join(f"{with_error(scores[f'knn_{name}'], scores['knn_queries'])} {name}" for name in encoders)
    loop.say(
        f"k-NN accuracy on {scores['knn_queries']:,} of {len(evaluation):,} images, {scores['knn_bank']:,} as "
        f"the bank: {figures}"
    )
    return scores


def finish(config: Config, training: Training, index: Index, evaluation: Index | None, loop: Loop) -> None:
    """Exports the encoder, then measures it and adds what it is worth; all ranks measure."""
    encoder, origin = training.encoder(), training.origin
    history = {"method": "APS", "recipe": config.recipe, "steps": loop.step, "images": len(index)}
    history |= {"encoder": origin["training"]} if origin else {}
    arguments = origin["arguments"] if origin else encoder_arguments(config)

    def export(scores: dict) -> None:
        if loop.ranks.first:
            path = export_model(
                encoder, config.output / "encoder", name=config.model, arguments=arguments,
                mean=config.mean, std=config.std, training=history | scores, options=dataclasses.asdict(config),
            )  # fmt: skip
            loop.say("" if scores else f"encoder: {path}")

    export({})  # first: whatever happens while it is measured costs no encoder
    if evaluation is not None:
        before = {"start": start.first(config)} if origin else {"untrained": new_encoder(config)}
        both = {"trained": encoder} | {name: vit.to(loop.ranks.device) for name, vit in before.items()}
        if scores := score(config, both, index, evaluation, loop):
            export(scores)
    loop.draw()


if __name__ == "__main__":
    program.run("train.py", main, smaller="--batch-size or --window")
