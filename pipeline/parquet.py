"""Images in Parquet files, as Hugging Face's ``datasets`` writes them, unpacked once into tar shards.

No image of a Parquet file can be read by itself: it lies in a page of several, mostly compressed, and pyarrow reads
groups of hundreds of rows. An epoch in random order would read, and decode, a group for each image; ``datasets``
therefore makes Arrow files of its own, as large, in a cache. Here each Parquet file becomes a tar in the folder of
indices, the same bytes with a header before each, and all that reads shards at random reads these.

The images are the column ``image`` or, without one, the only one that holds bytes: binary, or a struct with a binary
``bytes``. The label is the column that is asked for or ``label``, else ``cls``, else the only ClassLabel of
``datasets``, whose names stand in the schema: text, or an integer, which is a number of these names where there are
any. Others have no label.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.cache import locked, replacing
from pipeline.headers import MAY_PASS, counted, printable
from pipeline.waiting import patiently

_ROWS = 64  # decoded at a time
_BUFFER = 1 << 20  # bytes of a column read at a time: a group of rows may be larger than memory
_AROUND = 4 * 512  # bytes, at most, that an image takes more in a tar: header and padding, and those of its label
_VERSION = b"1"  # of what is made of a file


def unpack(
    root: Path, found: Sequence[Sequence[Any]], folder: Path, progress: Callable[[int, int, str], None] | None = None,
    label: str = "",
) -> tuple[dict[str, str], dict[str, str]]:  # fmt: skip
    """Unpacks the Parquet files ``found`` below ``root``, [name, bytes, mtime in ns] or [name, reason, None] each, into
    ``folder``: {name: path of its tar}, and {name: reason} of those that cannot be read.

    Row i becomes ``{i:08}.jpg``, whatever its format, with its class in ``.cls``, from the column ``label`` if one is
    named. A tar that is there already, of a file with the same size and time of change, is taken. Rows that cannot be
    read for a reason that may pass are waited for. ``progress`` is told how many rows of all are unpacked.
    ValueError in one line where pyarrow, a column of images, that of labels, or room on the disk is missing; OSError
    where a file cannot be opened for a reason that may pass, or nothing can be written.
    """
    tars, bad = {}, {name: reason for name, reason, time in found if time is None}
    for name, size, time in found:
        if name not in bad:
            path = hashlib.sha256(os.fsencode(root / name) + os.fsencode(label and f"#{label}")).hexdigest()[:24]
            stamp = hashlib.sha256(_VERSION + f" {size} {time}".encode()).hexdigest()[:8]
            tars[name] = folder / f"{path}-{stamp}.tar"
    with _alone(folder, not all(tar.exists() for tar in tars.values())) as alone:
        todo = {}
        for name, tar in tars.items():
            if not tar.exists():
                try:
                    todo[name] = _Table(root / name, label)
                except _Unreadable as error:
                    bad[name] = str(error)
        made = {}  # all that is there
        if todo:
            _announce(root, folder, todo)
            for old in (*folder.glob("*.tar"), *folder.glob("*.part")):
                made.setdefault(old.name.partition("-")[0], []).append(old)
        rows, done = sum(table.rows for table in todo.values()), 0
        for name, table in todo.items():

            def write(name=name, table=table, done=done):
                _write(tars[name], table, lambda more: progress and progress(done + more, rows, "unpacking"))

            try:
                patiently(write, str(table.path))
            except _Unreadable as error:
                bad[name] = str(error)
            done += table.rows
            if alone:  # what was made of an earlier file of this name, or was not finished
                for old in made.get(tars[name].name.partition("-")[0], ()):
                    old.unlink(missing_ok=True)
    return {name: str(tar) for name, tar in tars.items() if name not in bad}, bad


@contextlib.contextmanager
def _alone(folder, wanted):
    """In the block no other process unpacks into the folder, if that is ``wanted`` and the file system has locks; gives
    whether it is so."""
    if not wanted:
        yield False
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "wb") as file:
        yield locked(file, f"{folder}: Parquet files are unpacked")


def _announce(root, folder, tables):
    """Says what unpacking takes; ValueError where that is not there."""
    need = sum(table.bytes + _AROUND * table.rows for table in tables.values())
    free = shutil.disk_usage(folder).free
    said = f"the images of {counted(len(tables), 'Parquet file')}, once, as tars of {need / 1e9:.3g} GB"
    if need > free:
        raise ValueError(
            f"{root}: training unpacks {said}, into {folder}, where {free / 1e9:.3g} GB are free; expected more room, "
            "or --index-cache FOLDER on another disk"
        )
    print(f"{root}: unpacking {said}, into {folder}", file=sys.stderr, flush=True)


def _write(path, table, progress):
    """Writes the tar of a table, whole or not at all."""
    with replacing(path, shared=True) as part, tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as tar:
        for row, (image, label) in enumerate(table.read()):
            for suffix, content in (("jpg", image or b""), ("cls", label)):
                if content is not None:
                    member = tarfile.TarInfo(f"{row:08}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
            if (row + 1) % _ROWS == 0 or row + 1 == table.rows:
                progress(row + 1)


class _Unreadable(Exception):
    """Why a file is left out."""


class _Table:
    """The columns of images and labels of a Parquet file; ValueError where it is not clear which these are."""

    def __init__(self, path: Path, label: str):
        self.path = path
        with self._file() as file:
            schema, about = file.schema_arrow, file.metadata
            self.image = _choose(path, schema, "image", _of_bytes(schema), "the images")
            features = _features((schema.metadata or {}).get(b"huggingface", b""))
            named = [name for name in schema.names if isinstance(features.get(name, {}).get("names"), list)]
            fitting = [field.name for field in schema if _is_label(field.type)]
            if label and label not in fitting:
                raise ValueError(
                    f"{path}: no column {printable(label)} of integers or text, which labels are; expected one of "
                    f"{', '.join(map(printable, fitting)) or 'none, as it has no such column'}"
                )
            label = label or next((name for name in ("label", "cls") if name in schema.names), None)
            self.label = label or (_choose(path, schema, "label", named, "the labels") if named else None)
            self.label = self.label if self.label in fitting else None
            for name in (self.image, self.label):
                if schema.names.count(name) > 1:
                    raise ValueError(f"{path}: two columns are named {printable(name)}; expected one")
            self.names = features[self.label]["names"] if self.label in named else None
            self.rows = about.num_rows
            chunks = (
                about.row_group(g).column(c) for g in range(about.num_row_groups) for c in range(about.num_columns)
            )
            mine = (c for c in chunks if (c.path_in_schema + ".").startswith(self.image + "."))
            self.bytes = sum(chunk.total_uncompressed_size for chunk in mine)

    @contextlib.contextmanager
    def _file(self):
        """The file, opened by pyarrow; _Unreadable where it, or the block, cannot read it, OSError if that may pass."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise ValueError(
                f"{self.path}: Parquet is read by pyarrow, which is not installed; expected it: "
                "pip install -e '.[parquet]'"
            ) from None
        try:
            with open(self.path, "rb") as file:
                yield pyarrow.parquet.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False)
        except (OSError, pyarrow.ArrowException) as error:
            number = getattr(error, "errno", None)  # none of pyarrow's own
            if number in MAY_PASS:
                raise OSError(number, os.strerror(number), str(self.path)) from None
            said = os.strerror(number) if number else str(error).strip().splitlines()[0].rstrip(".")
            raise _Unreadable(said if number else f"damaged or truncated, or no Parquet file ({said})") from None
        except UnicodeDecodeError:
            raise _Unreadable("text that is not UTF-8") from None

    def read(self):
        """Yields (bytes or None, class in bytes or None) of each row."""
        with self._file() as file:
            kind = file.schema_arrow.field(self.image).type
            inner = kind.get_field_index("bytes") if hasattr(kind, "get_field_index") else None
            columns = [self.image if inner is None else f"{self.image}.bytes", *([self.label] if self.label else [])]
            batches, row = file.iter_batches(batch_size=_ROWS, columns=columns, use_threads=False), 0
            for batch in batches:
                images = batch.column(self.image)
                images = images if inner is None else images.flatten()[0]
                labels = batch.column(self.label).to_pylist() if self.label else [None] * len(batch)
                for image, label in zip(images, labels, strict=True):
                    yield image.as_py(), self._class(label, row)
                    row += 1

    def _class(self, value, row):
        if value is None or (value == -1 and self.names):  # as datasets has it
            return None
        if self.names and isinstance(value, int):
            if not 0 <= value < len(self.names):
                raise ValueError(
                    f"{self.path}: {self.label} {value} in row {row}; expected -1 to {len(self.names) - 1}, as its "
                    "schema names so many classes"
                )
            value = self.names[value]
        return str(value).encode("utf-8", "surrogateescape")


def _of_bytes(schema):
    """The columns that hold bytes."""
    import pyarrow

    is_bytes = pyarrow.types.is_binary, pyarrow.types.is_large_binary, pyarrow.types.is_fixed_size_binary
    found = []
    for field in schema:
        kind = field.type
        if pyarrow.types.is_struct(kind):
            kind = kind.field("bytes").type if kind.get_field_index("bytes") >= 0 else kind
        if any(test(kind) for test in is_bytes):
            found.append(field.name)
    return found


def _choose(path, schema, wanted, candidates, what):
    """The column for a purpose."""
    if wanted in candidates or len(candidates) == 1:
        return wanted if wanted in candidates else candidates[0]
    if candidates:
        named = ", ".join(map(printable, candidates))
        how = f", or DATA#{printable(candidates[0])} in place of DATA" if wanted == "label" else ""
        raise ValueError(
            f"{path}: {len(candidates)} columns may be {what} ({named}); expected one, or one named {wanted}{how}"
        )
    there = ", ".join(f"{printable(field.name)} ({field.type})" for field in schema)
    raise ValueError(f"{path}: no column of bytes, which images are; got {there[:300] or 'none'}")


def _is_label(kind):
    """Whether a column of this type holds integers, truth values or text."""
    import pyarrow

    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    return text or pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind)


@functools.lru_cache(1)  # files of one data set share the names of its classes
def _features(said):
    """{column: what ``datasets`` says of it}."""
    try:
        features = json.loads(said)["info"]["features"]
        return {name: about for name, about in features.items() if isinstance(about, dict)}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
