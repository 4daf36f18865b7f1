"""The images that were found bad by other means than by training on them: a file beside the index of a run.

``index/bad.jsonl`` has a line {"path", "reason", "state"} for each. The state, size and time of change of the file
that it lies in, tells whether it is still the same; repaired or replaced it is as good as any other.
"""

import contextlib
import json
import os
from pathlib import Path

from pipeline.cache import replacing
from pipeline.index import Index

FILE = "bad.jsonl"


def read(path: Path, index: Index) -> dict[int, str]:
    """{sample: reason} of the images of an index that are on the list, and are what they were."""
    lines = {path: (reason, state) for path, reason, state in _lines(path)}
    found = index.paths.positions(lines).items()
    return {i: lines[path][0] for i, path in found if lines[path][1] == _state(index, i)}


def add(path: Path, index: Index, bad: dict[int, str]) -> None:
    """Puts samples, {sample: reason}, on the list."""
    lines = {line[0]: line for line in _lines(path)}
    lines |= {index.paths[i]: (index.paths[i], reason, _state(index, i)) for i, reason in bad.items()}
    text = (json.dumps(dict(zip(("path", "reason", "state"), line, strict=True))) + "\n" for line in lines.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, shared=True) as part:
        part.write_text("".join(text))


def _lines(path):
    """(path, reason, state) of each line that is whole."""
    lines = []
    with contextlib.suppress(OSError):
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                lines.append((line["path"], line["reason"], line["state"]))
    return lines


def _state(index, i):
    """[bytes, time of change in ns] of the file that holds an image; None of one that cannot be asked."""
    try:
        status = os.stat(index.place(i)[0])
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]
