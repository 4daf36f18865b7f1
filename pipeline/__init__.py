"""The data path: which images there are (sources, headers, index), what happens to each (stream), the DALI graph that
does it (graph), batches (loader), what a decoder dies of (inflight, trial, known), and all of it beforehand (check)."""

from importlib import import_module

_HOMES = {
    "Augmentation": "stream", "Batch": "loader", "Index": "index", "Loader": "loader", "TooManyBadFiles": "loader",
    "evaluation_batches": "loader",
}  # fmt: skip
__all__ = list(_HOMES)


def __getattr__(name):  # imported where it is used: a command line, which needs stream, is answered without torch
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
