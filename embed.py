"""Writes the features that an encoder gives to all images of a folder, with their paths and classes.

python embed.py --encoder RUN --data FOLDER --output features.npy
torchrun --nproc-per-node 8 embed.py --encoder RUN --data FOLDER --output features.parquet
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

if __name__ == "__main__":  # before what takes time: until ``program.run`` takes over, Ctrl-C ends it without a word
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from run import command
from run.recipes import check, expanded


@dataclass(frozen=True)
class EmbedConfig:
    """Write the features that an encoder gives to all images of a folder, with their paths and classes."""

    encoder: Path | None = None
    """Whose features: a run, a folder in timm's hub layout (as its encoder/), or a checkpoint with the keys of timm
    (and --model)."""
    data: Path | None = None
    """Images: a folder (in class folders or flat), a list of paths, tar shards, Parquet files, or s3://BUCKET/FOLDER.
    They need no labels."""
    output: Path = Path("features.npy")
    """File to write: .npy, float32 of a row an image, beside a .jsonl with the path and class of each row; or
    .parquet, with columns path, class and features."""
    model: str | None = None
    """A plain Vision Transformer of timm by its name: of a checkpoint that does not say."""
    image_size: int = 0
    """Pixels a side of what the encoder gets; 0 takes its own."""
    index_cache: Path | None = None
    """As of train.py: the folder that keeps what scans found."""
    trust_index: bool = False
    """As of train.py: take what the last scan found without looking at the files."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one, where products are in bfloat16."""
    threads: int = 0
    """Threads of the input path per rank; 0 divides the cores among the ranks of this machine."""

    PROGRAM: ClassVar[str] = "embed.py"
    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "data": ("data", "output", "index_cache", "trust_index"),
        "model": ("encoder", "model", "image_size"),
        "hardware": ("device", "threads"),
    }

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Path):
                object.__setattr__(self, name, expanded(value))
        suffix = self.output.suffix
        check(suffix in (".npy", ".parquet"), self, "output", "a name that ends in .npy or .parquet")
        check("://" not in str(self.output), self, "output", "a file on a disk")
        if suffix == ".parquet" and find_spec("pyarrow") is None:
            raise ValueError(f"--output {self.output}: pyarrow is not installed; expected it ('.[parquet]'), or a .npy")
        check(self.image_size >= 0, self, "image_size", "0 or more")
        check(0 <= self.threads <= 1024, self, "threads", "0 to 1024")

    def files(self) -> dict[str, Path]:
        """What is written."""
        found = {"features": self.output, "rejected": self.output.with_suffix(".rejected.jsonl")}
        return found | ({"names": self.output.with_suffix(".jsonl")} if self.output.suffix == ".npy" else {})


def parse(arguments: list[str]) -> EmbedConfig:
    """The config of a command line."""
    config = command.parse("embed.py", EmbedConfig(), arguments)
    for option, expected in (("encoder", "a run, or another encoder"), ("data", "a folder of images, or a list")):
        if getattr(config, option) is None:
            raise ValueError(f"--{option} is missing; expected {expected}")
    return config


if __name__ == "__main__":  # what follows takes seconds to import
    command.answer("embed.py", parse, "nvidia.dali")

import numpy as np

from pipeline import Index
from pipeline import cache as caches
from pipeline.headers import counted
from pipeline.shown import shown
from run import program
from run.images import scanned
from run.ranks import Ranks
from run.session import lock, named
from transfer import knn
from transfer.pretrained import load_encoder, square

ROWS = 16_384  # in memory at a time, when the parts of the ranks are put together


def main(arguments: list[str]) -> None:
    with program.opening("embed.py"):
        config = parse(arguments)
        ranks = Ranks.join(config.device)
        vit, description = load_encoder(config.encoder, model=config.model, image_size=config.image_size or None)
        square(vit)
        parts = config.output.with_name(f"{config.output.name}.parts")  # a folder
        index = ranks.on_first(lambda: open_data(config, parts, ranks))
    try:
        if ranks.first:
            print(
                f"{description['model']}, {vit.num_features} features an image; {counted(len(index), 'image')} of "
                f"{config.data} on {ranks.count} x {ranks.device.type}, "
                f"{counted(ranks.threads(config.threads), 'input thread')} each",
                flush=True,
            )
        bad = embed(config, vit.to(ranks.device), description, index, parts, ranks)
        ranks.leave()
        if ranks.first:
            finish(config, index, bad, pieces(parts, ranks.count, vit.num_features), vit.num_features)
    finally:
        if ranks.first:
            shutil.rmtree(parts, ignore_errors=True)


def open_data(config: EmbedConfig, parts: Path, ranks: Ranks) -> Index:
    """The index of the images, after a look at whether the result can be written; ValueError for what is wrong."""
    for path in config.files().values():
        if path.exists():
            raise ValueError(
                f"--output {config.output}: {path} is there already; expected another name, or its removal"
            )
    try:
        parts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output {config.output} cannot be written ({error.strerror}); expected a file in a folder that can"
        ) from None
    lock(parts)
    try:
        cache = caches.place(config.index_cache, parts)
        return scanned(config.data, ranks, cache=cache, trust=config.trust_index, shared=parts / "all.index")
    except BaseException:
        shutil.rmtree(parts)
        raise


def embed(config: EmbedConfig, vit, description: dict, index: Index, parts: Path, ranks: Ranks) -> dict[int, str]:
    """Each rank writes its rows. {sample: reason} of the images that do not decode, those of all ranks on each."""
    bad: dict[int, str] = {}
    mine = knn.stretch(len(index), ranks)
    how = {"mean": description["mean"], "std": description["std"], "device": ranks.device}
    how["threads"] = ranks.threads(config.threads)
    of = f"{config.data}" + (f" (of {ranks.count} ranks, the first)" if ranks.count > 1 else "")
    with (parts / f"{ranks.rank}.rows").open("wb") as file, shown(of, "embedding images") as progress:
        how["progress"] = progress if ranks.first else None
        for (rows,), _, _ in knn.batches([vit], index, mine, bad=bad, **how):
            file.write(rows.cpu().numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())  # another machine reads it
    ranks.meet()
    for found in ranks.gather(bad):
        bad |= found
    return bad


def pieces(parts: Path, ranks: int, width: int) -> Iterator[np.ndarray]:
    """Yields the rows of all ranks in the order of the index, float32 [m, D], m at most ``ROWS``."""
    for rank in range(ranks):
        with (parts / f"{rank}.rows").open("rb") as file:
            while len(rows := np.fromfile(file, np.float32, ROWS * width)):
                yield rows.reshape(-1, width)


def finish(config: EmbedConfig, index: Index, bad: dict[int, str], rows: Iterator[np.ndarray], width: int) -> None:
    """Writes all files whole, or none, and says what was left out. ``rows``: of the images that are not ``bad``."""
    rejected = [*index.rejected.items(), *((index.paths[i], bad[i]) for i in sorted(bad))]
    kept = np.ones(len(index), bool)
    kept[list(bad)] = False
    samples, files = np.flatnonzero(kept), config.files()
    if not len(samples):
        sys.exit(f"embed.py: no image of {config.data} decodes: {named(rejected)}")
    classes = (*index.classes, "")  # label -1 is the last
    names = ((index.paths[i], classes[index.labels[i]]) for i in samples)
    with contextlib.ExitStack() as stack:  # the features get their name last
        partial = {name: stack.enter_context(caches.replacing(path, shared=False)) for name, path in files.items()}
        write_lines(partial["rejected"], ({"path": path, "reason": reason} for path, reason in rejected))
        if "names" in files:
            write_lines(partial["names"], ({"path": path, "class": name} for path, name in names))
            write_npy(partial["features"], rows, (len(samples), width))
        else:
            write_parquet(partial["features"], rows, names, width)
        for path in partial.values():  # before the first gets its name: a disk may be found full only here
            caches.sync(path)
    beside = f"; paths and classes of its rows: {files['names']}" if "names" in files else ""
    print(f"features of {counted(len(samples), 'image')}, float32 [{len(samples)}, {width}]: {config.output}{beside}")
    if rejected:
        count = len(index) + len(index.rejected)
        print(f"left out {len(rejected):,} of {count:,} files ({files['rejected']}): {named(rejected)}")


def write_lines(path: Path, lines: Iterable[dict]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_npy(path: Path, rows: Iterator[np.ndarray], shape: tuple[int, int]) -> None:
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for piece in rows:
            file.write(piece.data)


def write_parquet(path: Path, rows: Iterator[np.ndarray], names: Iterator[tuple[str, str]], width: int) -> None:
    """Columns path, class and features, a list of ``width`` float32; a row group for each piece of ``rows``."""
    import pyarrow
    from pyarrow import parquet

    vector = pyarrow.list_(pyarrow.float32(), width)
    schema = pyarrow.schema({"path": pyarrow.string(), "class": pyarrow.string(), "features": vector}.items())
    with parquet.ParquetWriter(path, schema) as writer:
        for piece in rows:
            texts = [[as_utf8(text) for text in row] for row in itertools.islice(names, len(piece))]
            features = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(piece.ravel()), width)
            columns = [pyarrow.array(column, pyarrow.string()) for column in zip(*texts, strict=True)]
            writer.write_batch(pyarrow.record_batch([*columns, features], schema=schema))


def as_utf8(text: str) -> str:
    """The name of a file with escapes for bytes that are not UTF-8, which Parquet does not take."""
    return text.encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    program.run("embed.py", main, goes_on="the same command begins anew", smaller="--image-size")
