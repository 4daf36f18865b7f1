"""Opening a run's images: what there is to train on, and to measure accuracy on."""

import contextlib
import dataclasses
import os
import time
from pathlib import Path

from pipeline import Index, Loader, inflight, known, memory, objects, trial
from pipeline import cache as caches
from pipeline.headers import counted
from pipeline.toy import make_toy

from .ranks import Ranks
from .recipes import ImagesConfig
from .session import CHANGED, GONE, INFLIGHT, KEPT, check_batch, check_folder, check_share, lock, named

# The generated dataset: drawn once, then shared by all runs of a checkout.
TOY = Path(__file__).resolve().parent.parent / "runs" / "toy-data"


def open_data(
    config: ImagesConfig, ranks: Ranks, *, labelled: bool = False
) -> tuple[Index, dict[int, str], Index | None]:
    """Index of the training images, its samples that are known to be bad, and, where given, the index of the evaluation
    images; the same on all ranks. ValueError if more than ``max_bad`` of the files are no images.

    ``labelled``: training needs the classes, so they have to be the same in both, by name, and an image without one is
    a bad one. Where a run before this one has ended without a word, first the files that it was decoding are tried.
    """

    def scan() -> tuple[Index, dict[int, str], Index | None]:
        check_folder(config)
        training, evaluation = config.data, config.eval_data
        if training is None:
            training, evaluation = make_toy(TOY)
        output = os.path.realpath(config.output)  # Path.resolve ends in a traceback where a link leads to itself
        for option, folder in (("--data", training), ("--eval-data", evaluation)):
            if folder is not None and folder.is_dir() and os.path.realpath(folder) == output:
                raise ValueError(f"--output {config.output} is the folder of {option}; expected one of its own")
        cache = caches.place(config.index_cache, None if config.dry_run else config.output / "index")
        index, bad = _scan(config, ranks, "train", training, cache), {}
        going_on = config.resume == "changed" and (config.output / "config.json").exists()
        kept = Index.kept(config.output / "index" / KEPT, index.root) if going_on else None
        if kept is not None:
            gone, changed = kept.lost(index)
            index, bad = kept, dict.fromkeys(gone, GONE) | dict.fromkeys(changed, CHANGED)
        bad |= _known(config, ranks, index)
        if not index.classes and (labelled or evaluation is not None):
            raise ValueError(
                f"--data {training} has no labels; expected images in class folders, a labelled list, .cls or .json in "
                "shards, or a column label of integers or text in Parquet files"
                f"{'' if labelled else ', or no --eval-data'}"
            )
        if labelled:
            bad = index.unlabelled() | bad
        check_share(config, f"--data {training}", index, bad)
        if evaluation is None:
            return index, bad, None
        tests = _scan(config, ranks, "eval", evaluation, cache)
        tests = tests.without(_known(config, ranks, tests))
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


def _scan(config: ImagesConfig, ranks: Ranks, what: str, data: Path, cache: Path | None) -> Index:
    shared = None if config.dry_run else config.output / "index" / f"{what}.index"
    return scanned(data, ranks, cache=cache, trust=config.trust_index, shared=shared)


def scanned(data: Path, ranks: Ranks, *, cache: Path | None, trust: bool, shared: Path | None) -> Index:
    """``Index.scan`` of ``data``, for rank 0 to hand on. Where there are ranks on other machines the index is left in
    ``shared``, a file that all of them see; without such a file it is one whose arrays are sent to them."""
    index = Index.scan(data, cache=cache, trust=trust)
    if ranks.count > ranks.local_count:
        if shared is None:
            return dataclasses.replace(index, stored=None)
        if cache != shared.parent:
            index.keep(shared)
            index = Index.kept(shared, index.root) or index
    return index


def record(config: ImagesConfig, ranks: Ranks, reader: str) -> Path:
    """Where one of the readers of this rank keeps its record of what is in flight."""
    return config.output / INFLIGHT / f"{reader}-{ranks.rank}"


def _known(config: ImagesConfig, ranks: Ranks, index: Index) -> dict[int, str]:
    """The samples that are known to be bad, and why. Where a run before this one has left a record of what it was
    decoding, which an orderly end removes, these samples are tried first; those that end the decoder are said in a line
    and remembered."""
    file = config.output / "index" / known.FILE
    records = list((config.output / INFLIGHT).glob("*"))
    found = {path: inflight.suspects(path, index.fingerprint, len(index)) for path in records}
    found = {path: batches for path, batches in found.items() if batches is not None}
    with contextlib.suppress(ValueError):  # in use by another process: opening the folder says so
        if found:
            lock(config.output)
            killers = _killers(config, ranks, index, [batch for part in found.values() for batch in part])
            if config.dry_run:
                return known.read(file, index) | killers
            known.add(file, index, killers)
            for path in found:
                path.unlink()
    return known.read(file, index)


def _killers(config: ImagesConfig, ranks: Ranks, index: Index, batches: list[list[int]]) -> dict[int, str]:
    """Which of the samples that were in flight end a decoder, and how; said in a line."""
    place = {index.place(sample): sample for batch in batches for sample in batch}
    if not place:
        return {}
    how = {"batch": max([1, *map(len, batches)]), "threads": ranks.threads(config.threads)}
    how["device_id"] = ranks.device.index if ranks.device.type == "cuda" else None
    try:
        by = trial.killers([[index.place(sample) for sample in batch] for batch in batches], **how)
    except RuntimeError as error:
        print(f"the run before has ended without a word; what it was decoding was not tried: {error}", flush=True)
        return {}
    bad = {place[where]: reason for where, reason in by.items()}
    these = f"these are left out: {named((index.paths[s], why) for s, why in bad.items())}"
    tried = f"of {counted(len(place), 'image')} that it was decoding"
    print(f"the run before has ended without a word; {tried}, {these if bad else 'none ends a decoder'}", flush=True)
    return bad


def remote_rate(index: Index) -> str:
    """What reading from an object store takes, in a line for the screen; "" where none is read from."""
    remote, seconds = index.paths.beginning(objects.SCHEME), []
    with contextlib.suppress(OSError):  # what cannot be read is waited for later
        for i in objects.some(remote):
            start = time.perf_counter()
            objects.get(index.paths[i])
            seconds.append(time.perf_counter() - start)
    if not seconds:
        return ""
    each, many = min(seconds), objects.AT_A_TIME
    return (
        f"an image of the store takes {1000 * each:.0f} ms, so {many} requests at a time bring at most "
        f"{many / each:,.0f} images/s on each rank"
    )


def open_loader(config: ImagesConfig, ranks: Ranks, index: Index, bad: dict[int, str], *, image_size: int) -> Loader:
    """This rank's batches of what ``open_data`` has returned; ValueError for sizes that do not divide, or too little
    memory."""
    check_batch(config, index, ranks)
    if ranks.first and (said := remote_rate(index)):
        print(said, flush=True)
    loader = Loader(
        index, config.augmentation, image_size=image_size, batch_size=config.batch_size, seed=config.seed,
        device=ranks.device, threads=ranks.threads(config.threads), rank=ranks.rank, ranks=ranks.count,
        max_bad=config.max_bad, record=None if config.dry_run else record(config, ranks, "train"),
    )  # fmt: skip
    loader.bad.update(bad)
    how = {"batch": config.batch_size // ranks.count, "image_size": image_size, "device": ranks.device}
    said = ranks.on_first(lambda: memory.plan(index, views=len(config.augmentation.views()), **how))
    if said and ranks.first:
        print(said, flush=True)
    return loader
