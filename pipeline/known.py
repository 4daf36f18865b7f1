"""The images that a run knows to be bad before it reads them: a file beside its index.

``index/bad.jsonl`` has a line {"path", "reason", "state"} for each. The state is size and time of change of the file or
object that holds the image: once that has changed, the line no longer counts.
"""

import contextlib
import json
import os
from pathlib import Path

from pipeline import objects
from pipeline.cache import replacing
from pipeline.index import Index
from pipeline.latency import concurrently

FILE = "bad.jsonl"


def read(path: Path, index: Index) -> dict[int, str]:
    """{sample: reason} of the images of an index that are on the list and have not changed since."""
    lines = {path: (reason, state) for path, reason, state in _lines(path)}
    found = index.paths.positions(lines)
    states = _states(index, found)
    return {i: lines[path][0] for (i, path), now in zip(found.items(), states, strict=True) if lines[path][1] == now}


def add(path: Path, index: Index, bad: dict[int, str]) -> None:
    """Puts samples, {sample: reason}, on the list."""
    lines = {line[0]: line for line in _lines(path)}
    for i, now in zip(bad, _states(index, bad), strict=True):
        lines[index.paths[i]] = index.paths[i], bad[i], now
    text = (json.dumps(dict(zip(("path", "reason", "state"), line, strict=True))) + "\n" for line in lines.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, shared=True) as part:
        part.write_text("".join(text))


def _lines(path):
    """(path, reason, state) of each line that is whole."""
    lines = []
    with contextlib.suppress(OSError):
        for text in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                line = json.loads(text)
                if isinstance(line["path"], str) and isinstance(line["reason"], str):
                    lines.append((line["path"], line["reason"], line["state"]))
    return lines


def _states(index, samples):
    """[bytes, time of change in ns] of the file or object that holds each image; None where it cannot be asked for."""

    def state(i):
        place = index.place(i)[0]
        with contextlib.suppress(OSError):
            if place.startswith(objects.SCHEME):
                return objects.state(place)
            status = os.stat(place)
            return [status.st_size, status.st_mtime_ns]

    return concurrently(state, list(samples))
