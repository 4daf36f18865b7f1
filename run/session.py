"""Opening and keeping a run: its data, its output folder, its checkpoints; what is wrong with them is found here."""

import dataclasses
import fcntl
import importlib
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from kernels.reference import MAX_PATCHES
from model import create_encoder, patch_grid, timm_arguments
from pipeline import Index, Loader
from pipeline.coco import CocoData
from pipeline.detection import CocoLoader
from pipeline.index import printable
from pipeline.loader import bad_limit
from pipeline.toy import make_toy

from . import checkpoint
from .ranks import Ranks
from .recipes import Config, ImagesConfig, RunConfig

# The embedded dataset: generated once, then shared by all runs of a checkout.
TOY = Path(__file__).resolve().parent.parent / "runs" / "toy-data"
Data = Index | CocoData
KEPT = "run.npz"  # in the folder index: the index that the run was begun with
CHANGED = "not the file that it was"
OURS = (  # beside config.json
    "checkpoints", "metrics.jsonl", "rejected.jsonl", "skipped.json", "encoder.safetensors", "encoder.json",
    "model.safetensors", "model.json", "detections.json", "detector.safetensors", "detector.json",
)  # fmt: skip
_locks: dict[Path, int] = {}  # descriptors of files that are locked as long as this process lives


def encoder_arguments(config: Config) -> dict[str, int]:
    """What ``timm.create_model`` takes beside the name."""
    return timm_arguments(image_size=config.image_size, patch_size=config.patch_size, depth=config.depth)


def new_encoder(config: Config) -> VisionTransformer:
    """The untrained encoder of a config, always the same."""
    return create_encoder(
        config.model, sincos=config.position_embedding == "sincos", frozen_patch_embed=config.frozen_patch_embed,
        seed=config.seed, **encoder_arguments(config),
    )  # fmt: skip


def plan_patches(config: Config) -> tuple[int, tuple[int, int], int]:
    """Patch side P in pixels, grid (Gh, Gw), and number K of patches kept per view; ValueError if they do not fit."""
    patch, grid = patch_grid(config.model, **encoder_arguments(config))
    patches = grid[0] * grid[1]
    keep = int(config.keep_ratio * patches + 1e-9)  # floor, but 0.29 * 100 is 28.999...
    if keep < 1:
        raise ValueError(
            f"--keep-ratio {config.keep_ratio} keeps none of {patches} patches; expected {1 / patches:.4g} or more"
        )
    if config.groups * keep > patches:
        raise ValueError(
            f"--groups {config.groups} --keep-ratio {config.keep_ratio}: {config.groups} disjoint groups of {keep} "
            f"patches do not fit into {patches}; expected at most {patches // keep} groups"
        )
    if patches > MAX_PATCHES:
        raise ValueError(
            f"{patches} patches ({grid[0]} x {grid[1]}) per crop; expected at most {MAX_PATCHES}: larger patches"
        )
    return patch, grid, keep


def open_data(
    config: ImagesConfig, ranks: Ranks, *, labelled: bool = False
) -> tuple[Index, dict[int, str], Index | None]:
    """Index of the training images, its samples that are known to be bad, and, where given, the index of the evaluation
    images; the same on all ranks. ValueError if more than ``max_bad`` of the files are no images.

    ``labelled``: training needs the classes, so they have to be the same in both, by name, and an image without one is
    a bad one.
    """

    def scan() -> tuple[Index, dict[int, str], Index | None]:
        _check_folder(config)
        training, evaluation = config.data, config.eval_data
        if training is None:
            training, evaluation = make_toy(TOY)
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


def check_share(config: RunConfig, data: str, index: Data, bad: dict[int, str]) -> None:
    """ValueError if more than ``max_bad`` of the files are bad; ``data`` is the option that names them, as given."""
    reasons = _reasons(index, bad)
    files = len(index) + len(index.rejected)
    limit = bad_limit(files, config.max_bad)
    if len(reasons) > limit:
        raise ValueError(
            f"{data}: {len(reasons):,} of {files:,} files cannot be used, at most {limit:,} may (--max-bad "
            f"{config.max_bad}); expected other data or a larger --max-bad. The first: {named(reasons[:5])}"
        )


def _check_folder(config: RunConfig) -> None:
    output = config.output.absolute()
    there = next(path for path in (output, *output.parents) if path.exists())
    if not there.is_dir():
        what = "is a file" if there == output else f"is below {there}, which is a file"
        raise ValueError(f"--output {config.output} {what}; expected a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output {config.output}: {there} cannot be written to; expected a folder that can")


def open_output(config: RunConfig, index: Data, ranks: Ranks) -> tuple[dict[str, Any] | None, list[str]]:
    """Makes the output folder, or finds a run in it: the state to go on from, or None; and what to tell the user.

    ValueError if the folder holds a run of another config or other data, or any run under ``resume="never"``.
    """

    def open_it() -> tuple[Path | None, list[str]]:
        _check_folder(config)
        described = _describe(config, index)
        path = config.output / "config.json"
        new = not path.exists()
        if new and (there := [name for name in OURS if _is_there(config.output / name)]):
            raise ValueError(
                f"--output {config.output} holds {there[0]} but no config.json, so it is not known which run that is; "
                "expected another folder, or its removal"
            )
        try:
            (config.output / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--output {config.output} cannot be made ({error.strerror}); expected a folder that can be written to"
            ) from None
        lock(config.output)
        if not new:
            _check_same_run(path, described, config, index)
        kept = config.output / "index" / KEPT
        if isinstance(index, Index) and (new or Index.kept(kept, index.root) is None):
            index.keep(kept)
        checkpoint.write_atomically(path, (json.dumps(described, indent=2) + "\n").encode())
        return checkpoint.newest(config.output / "checkpoints")

    newest, damaged = ranks.on_first(open_it)
    return checkpoint.load(newest) if newest else None, damaged


def _is_there(path: Path) -> bool:
    """Whether a run has left something there; an empty folder is nothing."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def lock(output: Path) -> None:
    """Keeps other processes from running into the same folder; ValueError where one does already."""
    if output not in _locks:
        file = os.open(output / "lock", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ValueError(f"--output {output} is in use by another process; expected another folder") from None
        _locks[output] = file


def save(
    saver: checkpoint.Saver, config: RunConfig, loader: Loader | CocoLoader, ranks: Ranks, step: int, training, report
) -> None:
    """Saves everything that step ``step`` + 1 depends on. Called by all ranks; rank 0 writes, in the background."""
    for bad in ranks.gather(loader.bad):
        loader.bad.update(bad)  # what one rank found costs no other rank time
    state = training.state_dict(keep=ranks.first) | {"report": report.state_dict()}
    if ranks.first:
        state |= {"step": step, "bad": dict(loader.bad), "run": json.dumps(_describe(config, loader.index))}
        saver.save(step, state)
        write_rejected(config.output, loader.index, loader.bad)


def restore(state: dict[str, Any], loader: Loader | CocoLoader, training, report) -> None:
    """Puts a saved state back."""
    training.load_state_dict(state)
    report.load_state_dict(state["report"])
    # Which files are not what they were is found anew each time: they may be back.
    loader.bad.update({sample: reason for sample, reason in state["bad"].items() if reason != CHANGED})


def write_skipped(config: RunConfig, loader: Loader | CocoLoader, ranks: Ranks, step: int, *, groups: int = 1) -> Path:
    """``skipped.json``: the seed, and the images of the batches from the last log line to ``step``. For all ranks.
    ``groups``: steps that each batch is good for."""
    first, last = max(0, step - config.log_every) // groups, (step - 1) // groups
    paths = loader.index.paths
    mine = {number: [paths[s] for s in loader.samples(number)] for number in range(first, last + 1)}
    parts = ranks.gather(mine)
    batches = [
        {
            "batch": number,
            "first_step": number * groups + 1,
            "images": [path for part in parts for path in part[number]],
        }
        for number in parts[0]
    ]
    path = config.output / "skipped.json"
    if ranks.first:
        checkpoint.write_atomically(path, json.dumps({"seed": config.seed, "batches": batches}, indent=1).encode())
    return path


def write_rejected(output: Path, index: Data, bad: dict[int, str]) -> None:
    """``rejected.jsonl``: one line for each file that is not trained on, with the reason."""
    rejected = sorted(_reasons(index, bad))
    lines = (json.dumps({"path": path, "reason": reason}) + "\n" for path, reason in rejected)
    checkpoint.write_atomically(output / "rejected.jsonl", "".join(lines).encode())


def _reasons(index: Data, bad: dict[int, str]) -> list[tuple[str, str]]:
    """(path, reason) of every file that is left out."""
    return list(index.rejected.items()) + [(index.paths[sample], reason) for sample, reason in bad.items()]


def summarise_rejected(index: Data, bad: dict[int, str], output: Path) -> str:
    """One line for the screen, or nothing where nothing was left out."""
    reasons = _reasons(index, bad)
    if not reasons:
        return ""
    files = len(index) + len(index.rejected)
    return f"left out {len(reasons):,} of {files:,} files ({output / 'rejected.jsonl'}): {named(reasons)}"


def named(reasons: Iterable[tuple[str, str]]) -> str:
    """The first of the files that are left out, with the reasons, for the screen."""
    shown = [f"{printable(path)}: {reason}" for path, reason in reasons]
    return "; ".join(shown[:10] + ([f"and {len(shown) - 10:,} more"] if len(shown) > 10 else []))


def _describe(config: RunConfig, index: Data) -> dict[str, Any]:
    """The content of ``config.json``."""
    reader = "nvidia.dali" if isinstance(index, Index) else "torchvision"  # only the one that is needed is imported
    return {
        "program": config.PROGRAM,
        "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        "data": {"images": len(index), "classes": len(index.classes), "fingerprint": index.fingerprint},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": timm.__version__,
            reader.rpartition(".")[2]: importlib.import_module(reader).__version__,
        },
    }


def _check_same_run(path: Path, now: dict[str, Any], config: RunConfig, index: Data) -> None:
    output = config.output
    try:
        stored = json.loads(path.read_text())
        there, data = dict(stored["config"]), dict(stored["data"])
        images = int(data["images"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not the config of a run; expected another --output, or the removal of the whole folder"
        ) from None
    program = stored.get("program", config.PROGRAM)
    if program != config.PROGRAM:
        raise ValueError(f"{output} holds a run of {program}; expected another --output for {config.PROGRAM}")
    if config.resume == "never":
        raise ValueError(
            f"--resume never: {output} holds a run; expected another --output, or --resume auto to continue it"
        )
    changed = [
        f"{name} {there.get(name)} there and {value} now"
        for name, value in now["config"].items()
        if name not in config.FREE_ON_RESUME and there.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{output} holds another run ({'; '.join(changed)}); expected the same options or another --output"
        )
    if data != now["data"]:
        if isinstance(index, CocoData):
            raise ValueError(
                f"{output} holds a run on other annotations than {index.annotations}; expected the same "
                "--train-annotations or another --output"
            )
        kept = Index.kept(output / "index" / KEPT, index.root)
        what = f"{images:,} images there, {now['data']['images']:,} now"
        if kept is not None:
            named = {kind: paths for kind, paths in kept.changes(index).items() if paths}
            parts = (f"{len(paths):,} {kind} ({printable(paths[0])})" for kind, paths in named.items())
            what = ", ".join([what, *parts])
        way = "or --resume changed to go on without what is gone, changed or new"
        if kept is None:
            way = f"(--resume changed needs {KEPT} in its folder index, which is missing or damaged)"
        raise ValueError(
            f"{output} holds a run on other images ({what}); expected the same --data, another --output, {way}"
        )
