"""Opening a run's images: what there is to train on, and to measure accuracy on."""

from pathlib import Path

import numpy as np

from pipeline import Index, Loader
from pipeline.toy import make_toy

from .ranks import Ranks
from .recipes import ImagesConfig
from .session import CHANGED, KEPT, check_folder, check_share

# The embedded dataset: generated once, then shared by all runs of a checkout.
TOY = Path(__file__).resolve().parent.parent / "runs" / "toy-data"


def open_data(
    config: ImagesConfig, ranks: Ranks, *, labelled: bool = False
) -> tuple[Index, dict[int, str], Index | None]:
    """Index of the training images, its samples that are known to be bad, and, where given, the index of the evaluation
    images; the same on all ranks. ValueError if more than ``max_bad`` of the files are no images.

    ``labelled``: training needs the classes, so they have to be the same in both, by name, and an image without one is
    a bad one.
    """

    def scan() -> tuple[Index, dict[int, str], Index | None]:
        check_folder(config)
        training, evaluation = config.data, config.eval_data
        if training is None:
            training, evaluation = make_toy(TOY)
        for option, folder in (("--data", training), ("--eval-data", evaluation)):
            if folder is not None and folder.is_dir() and folder.resolve() == config.output.resolve():
                raise ValueError(f"--output {config.output} is the folder of {option}; expected one of its own")
        cache = config.output / "index"
        index, bad = Index.scan(training, cache=cache / "train.npz"), {}
        going_on = config.resume == "changed" and (config.output / "config.json").exists()
        kept = Index.kept(cache / KEPT, index.root) if going_on else None
        if kept is not None:
            changes = kept.changes(index)
            lost = set(changes["gone"] + changes["changed"])
            bad = {i: CHANGED for i, path in enumerate(kept.paths) if path in lost}
            index = kept
        if labelled:
            if not index.classes:
                raise ValueError(
                    f"--data {training} has no labels; expected images in class folders, or a labelled list"
                )
            bad |= {int(i): "has no label" for i in np.flatnonzero(index.labels < 0) if i not in bad}
        check_share(config, f"--data {training}", index, bad)
        if evaluation is None:
            return index, bad, None
        tests = Index.scan(evaluation, cache=cache / "eval.npz")
        unknown = sorted(set(tests.classes) - set(index.classes))
        if unknown or not tests.classes:
            got = f"classes that are not in {training}: {', '.join(unknown[:5])}" if unknown else "no labels"
            raise ValueError(f"--eval-data {evaluation} has {got}; expected images labelled with the classes there")
        missing = sorted(set(index.classes) - set(tests.classes))
        if labelled and missing:
            raise ValueError(
                f"--eval-data {evaluation} lacks {len(missing)} of the {len(index.classes)} classes of {training}: "
                f"{', '.join(missing[:5])}; expected all of them, by the same names"
            )
        return index, bad, tests

    return ranks.on_first(scan)


def open_loader(config: ImagesConfig, ranks: Ranks, index: Index, bad: dict[int, str], *, image_size: int) -> Loader:
    """This rank's batches of what ``open_data`` has returned; ValueError for sizes that do not divide."""
    loader = Loader(
        index, config.augmentation, image_size=image_size, batch_size=config.batch_size, seed=config.seed,
        device=ranks.device, threads=ranks.threads(config.threads), rank=ranks.rank, ranks=ranks.count,
        max_bad=config.max_bad,
    )  # fmt: skip
    loader.bad.update(bad)
    return loader
