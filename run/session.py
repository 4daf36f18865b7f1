"""Opening a run: what is wrong with its output folder, or with the share of its files that are bad, is found here."""

import contextlib
import dataclasses
import fcntl
import importlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import timm
import torch

from pipeline.headers import counted, printable
from pipeline.loader import bad_limit

from . import checkpoint
from .command import flat
from .ranks import Ranks
from .recipes import RunConfig

KEPT = "run.index"  # in the folder index: the data that the run was begun with
INFLIGHT = "inflight"  # the folder of records of what is being decoded
CHANGED, GONE = "not the file that it was", "not there any more"
OURS = (  # beside config.json
    "checkpoints", "metrics.jsonl", "rejected.jsonl", "skipped.json", "start.safetensors", "start.json",
    "encoder", "model", "model_ema", "detections.json", "detector.safetensors", "detector.json",
)  # fmt: skip
_locks: dict[Path, int] = {}  # descriptors of files that are locked as long as this process lives


class Data(Protocol):
    """What a run is about, as a session knows it: numbered files, some of which may turn out to be bad."""

    root: Path
    paths: Sequence[str]  # as they are named to the user
    classes: Sequence[str]
    rejected: Mapping[str, str]  # {path: reason} of files that have no number
    fingerprint: str  # equal where the numbers mean the same
    reader: str  # the package that decodes the files

    def __len__(self) -> int: ...

    def keep(self, path: Path, *, anew: bool) -> None:
        """Leaves in a file what ``differing`` needs; one that can be read already stays as it is, unless ``anew``."""

    def differing(self, path: Path, images: int) -> str:
        """What to say of a run that was begun with other data, of so many ``images``: how these differ from what
        ``keep`` has left in the file, and what to do."""


@dataclasses.dataclass
class Opened:
    """What was found in an output folder."""

    state: dict[str, Any] | None  # of the newest checkpoint that is whole
    damaged: list[str]  # a line on each newer one


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


def check_batch(config: RunConfig, data: Data, ranks: Ranks) -> None:
    """ValueError, with what would fit, if there are fewer images than one batch has."""
    if len(data) >= config.batch_size:
        return
    several = range(len(data) // ranks.count * ranks.count, 0, -ranks.count)
    fits = next((images for images in several if _takes(config, images)), 0)
    smaller = f", or --batch-size {fits} and, in proportion, --lr {config.lr * fits / config.batch_size:.2g}"
    raise ValueError(
        f"{counted(len(data), 'image')} in {data.root}: less than one batch of {config.batch_size:,}; expected "
        f"more of them{smaller if fits else ''}"
    )


def _takes(config, batch):
    """Whether a config takes batches of so many images: to contrast, or to mix, takes more than one."""
    with contextlib.suppress(ValueError):
        return bool(dataclasses.replace(config, batch_size=batch))
    return False


def check_folder(config: RunConfig) -> None:
    """ValueError where ``output`` cannot be a folder that this user writes to. Nothing is made."""
    output = config.output.absolute()
    there = next(path for path in (output, *output.parents) if path.exists())
    if not there.is_dir():
        what = "is a file" if there == output else f"is below {there}, which is a file"
        raise ValueError(f"--output {config.output} {what}; expected a folder")
    for folder in (there, output / "checkpoints"):  # the latter as another user may have left it
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"--output {config.output}: {folder} cannot be written to; expected a folder that can")


def open_output(config: RunConfig, index: Data, ranks: Ranks) -> Opened:
    """Makes the output folder, or finds a run in it, to go on with. A dry run only looks.

    ValueError if the folder holds a run of another config or other data, or any run under ``resume="never"``.
    """

    def open_it() -> tuple[Path | None, list[str]]:
        check_folder(config)
        described = describe(config, index)
        path = config.output / "config.json"
        new = not path.exists()
        if new and (there := [name for name in OURS if _is_there(config.output / name)]):
            raise ValueError(
                f"--output {config.output} holds {there[0]} but no config.json, so it is not known which run that is; "
                "expected another folder, or its removal"
            )
        if not config.dry_run:
            try:
                (config.output / "checkpoints").mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"--output {config.output} cannot be made ({error.strerror}); expected a folder that can be "
                    "written to"
                ) from None
            lock(config.output)
        if not new:
            _check_same_run(path, described, config, index)
        if not config.dry_run:
            index.keep(config.output / "index" / KEPT, anew=new)
            checkpoint.write_atomically(path, (json.dumps(described, indent=2) + "\n").encode())
        return checkpoint.newest(config.output / "checkpoints")

    newest, damaged = ranks.on_first(open_it)
    state = checkpoint.load(newest) if newest else None
    if state is not None and (other := _other_run(describe(config, index), _run_of(newest, state), config)):
        raise ValueError(f"{newest} is of another run ({other}), copied there; expected its removal")
    return Opened(state, damaged)


def origin(config: RunConfig) -> dict[str, Any] | None:
    """What the run in the output folder has kept of the encoder that it began with, which may have changed since or be
    gone; None where no checkpoint of this program says it."""
    newest, _ = checkpoint.newest(config.output / "checkpoints")
    state = checkpoint.load(newest) if newest else {}
    if "origin" not in state or _run_of(newest, state).get("program") != config.PROGRAM:
        return None
    return json.loads(state["origin"])


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


def leave_locks() -> None:
    """Closes the locks that a forked process has from its parent, which it may outlive by seconds."""
    while _locks:
        os.close(_locks.popitem()[1])


def write_rejected(output: Path, index: Data, bad: dict[int, str]) -> None:
    """``rejected.jsonl``: one line for each file that is not trained on, with the reason."""
    rejected = sorted(_reasons(index, bad))
    lines = (json.dumps({"path": path, "reason": reason}) + "\n" for path, reason in rejected)
    checkpoint.write_atomically(output / "rejected.jsonl", "".join(lines).encode())


def _reasons(index: Data, bad: dict[int, str]) -> list[tuple[str, str]]:
    """(path, reason) of every file that is left out."""
    return list(index.rejected.items()) + [(index.paths[sample], reason) for sample, reason in bad.items()]


def summarise_rejected(index: Data, bad: dict[int, str], output: Path | None) -> str:
    """One line for the screen, or nothing where nothing was left out; ``output``: where ``rejected.jsonl`` is, if it
    is."""
    reasons = _reasons(index, bad)
    if not reasons:
        return ""
    files = len(index) + len(index.rejected)
    where = f" ({output / 'rejected.jsonl'})" if output else ""
    return f"left out {len(reasons):,} of {files:,} files{where}: {named(reasons)}"


def named(reasons: Iterable[tuple[str, str]]) -> str:
    """The first of the files that are left out, with the reasons, for the screen."""
    shown = [f"{printable(path)}: {reason}" for path, reason in reasons]
    return "; ".join(shown[:10] + ([f"and {len(shown) - 10:,} more"] if len(shown) > 10 else []))


def describe(config: RunConfig, index: Data) -> dict[str, Any]:
    """The content of ``config.json``."""
    reader = index.reader  # only the one that is needed is imported
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


def _run_of(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its run; ValueError where it is another file's content."""
    try:
        run = json.loads(state["run"])
        if state["step"] == checkpoint.step_of(path) and run["config"].keys() and run["data"].keys():
            return run
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        pass
    raise ValueError(f"{path} does not hold what a run saves after that step; expected its removal")


def _changed(now: dict[str, Any], there: dict[str, Any], config: RunConfig) -> str:
    """The options that are not the same and may not differ, with both values."""
    now, there = flat(now), flat(there)
    return "; ".join(
        f"{name} {there.get(name)} there and {value} now"
        for name, value in now.items()
        if name not in config.FREE_ON_RESUME and there.get(name) != value
    )


def _other_run(now: dict[str, Any], there: dict[str, Any], config: RunConfig) -> str:
    """How a run described as ``there``, in a checkpoint, differs from the one described ``now``; "" if it does not."""
    if there.get("program", config.PROGRAM) != config.PROGRAM:
        return f"of {there['program']}"
    changed = _changed(now["config"], there["config"], config)
    return changed or ("other data" if there["data"] != now["data"] else "")


def _check_same_run(path: Path, now: dict[str, Any], config: RunConfig, index: Data) -> None:
    output = config.output
    try:
        stored = json.loads(path.read_text())
        there, data = dict(stored["config"]), dict(stored["data"])
        images = int(data["images"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
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
    if changed := _changed(now["config"], there, config):
        raise ValueError(f"{output} holds another run ({changed}); expected the same options or another --output")
    if data != now["data"]:
        raise ValueError(f"{output} holds a run on {index.differing(output / 'index' / KEPT, images)}")
