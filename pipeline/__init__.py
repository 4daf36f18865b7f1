"""The data path: which images there are (sources, headers, index), what happens to each (stream), the DALI graph that
does it (graph), batches (loader), what a decoder dies of (inflight, trial, known), and all of it beforehand (check)."""

from pipeline.index import Index
from pipeline.loader import Batch, Loader, TooManyBadFiles, evaluation_batches
from pipeline.stream import Augmentation

__all__ = ["Augmentation", "Batch", "Index", "Loader", "TooManyBadFiles", "evaluation_batches"]
