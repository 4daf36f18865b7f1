"""Decodes every image of a data set once, and says what there is: what is bad, and sizes, formats, classes, duplicates.

python -m pipeline.check DATA --output RUN --json report.json

DATA is what ``--data`` of the programs takes. Decoding is done on the CPU by processes, one a core, which may die of a
file. With ``--output`` the run in that folder, which need not have begun, leaves out what does not decode. Exit code: 0
if all is well, 1 if there are bad files, 2 if nothing could be checked.
"""

import argparse
import collections
import itertools
import json
import os
import sys
import threading

import numpy as np

from pipeline import cache, known, memory, trial
from pipeline.headers import counted, printable
from pipeline.index import Index
from pipeline.latency import Threads
from pipeline.paths import argument
from pipeline.shown import Screen, shown

_FILES, _PIXELS = 16, 40_000_000  # of a batch, at most: 120 MB of pixels in each process, or one image
_QUANTILES = {"min": 0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "max": 1}
_SHOWN = 10


def main(arguments: list[str]) -> int:
    """Checks the data that a command line names; the exit code."""
    about, _, more = (__doc__ or "").partition("\n\n")  # python -OO has none
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("pipeline.check", description=about, epilog=more, formatter_class=how)
    parser.add_argument(
        "data", type=argument, help="images: a folder, a list of paths and labels, tar shards, Parquet files, a bucket"
    )
    parser.add_argument("--output", type=argument, metavar="RUN", help="output folder of the run that is to know of it")
    parser.add_argument("--index-cache", type=argument, metavar="FOLDER", help="as of train.py")
    parser.add_argument("--json", type=argument, metavar="FILE", help="write the report to a file, all of it")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="default: one for each core")
    options = parser.parse_args(arguments)
    processes = options.processes or len(os.sched_getaffinity(0))
    try:
        if options.processes < 0:
            raise ValueError(f"--processes {options.processes}: expected 1 or more")
        if options.json and not os.access(options.json.absolute().parent, os.W_OK):  # it is written behind all else
            raise ValueError(f"--json {options.json}: expected a file in a folder that can be written to")
        if options.output:
            (options.output / "index").mkdir(parents=True, exist_ok=True)
        folder = cache.place(options.index_cache, options.output / "index" if options.output else None)
        index = Index.scan(options.data, folder)
        found = check(index, processes, str(options.data))
        report = describe(index, found, str(options.data))
        if options.output:
            known.add(options.output / "index" / known.FILE, index, found.bad)
        Screen().print(as_text(report), highlight=False, markup=False, soft_wrap=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"pipeline.check: {error}", file=sys.stderr)
        return 2
    return 1 if report["bad"] else 0


class Found:
    """What was found in n images."""

    def __init__(self, images: int):
        self.bad: dict[int, str] = {}  # what does not decode
        self.unread: dict[int, str] = {}  # what could not be read this time
        self.formats = collections.Counter()
        self.digests = np.zeros((images, 16), np.uint8)  # of the bytes of each file; 0 where there are none


def check(index: Index, processes: int, data: str) -> Found:
    """Decodes all images of ``data`` by ``processes``; RuntimeError where these do not work."""
    found, here, decoders = Found(len(index)), threading.local(), []

    def read(samples):
        if not hasattr(here, "decoder"):
            here.decoder = trial.Decoder(batch=_FILES)
            decoders.append(here.decoder)
        files = [index.place(i) for i in samples]
        try:
            return samples, here.decoder.decode(files), {}
        except trial.Died as died:
            by = trial.killers([files], batch=_FILES)
            bad = {i: by[file] for i, file in zip(samples, files, strict=True) if file in by}
            if not bad:
                first = printable(index.paths[samples[0]])
                return [], [], dict.fromkeys(samples, f"{died}, with others ({first} and following)")
            others, answers, more = read([i for i in samples if i not in bad])
            return others, answers, bad | more

    pool = Threads(processes)
    try:
        with shown(data, "decoding") as progress:
            done = 0
            batches = (list(range(p.start, p.stop)) for p in memory.parts(index.sizes, _PIXELS, _FILES))
            parts = iter(lambda: list(itertools.islice(batches, 256 * processes)), [])  # not all of them at once
            for samples, answers, bad in itertools.chain.from_iterable(pool.map(read, part) for part in parts):
                found.bad.update(bad)
                for i, (reason, size, digest, kind, _) in zip(samples, answers, strict=True):
                    if digest is None:
                        found.unread[i] = reason
                        continue
                    found.formats[kind] += 1
                    found.digests[i] = np.frombuffer(bytes.fromhex(digest), np.uint8)
                    expected = index.sizes[i].tolist()
                    if not reason and size != expected:
                        reason = f"decodes as {size[0]}x{size[1]}; its header says {expected[0]}x{expected[1]}"
                    if reason:
                        found.bad[i] = reason
                done += len(samples) + len(bad)
                progress(done, len(index))
    finally:
        pool.shutdown(cancel_futures=True)
        for decoder in decoders:
            decoder.close()
    return found


def describe(index: Index, found: Found, data: str) -> dict:
    """The report on ``data``, as it is written."""
    bad = index.rejected | {index.paths[i]: reason for i, reason in sorted((found.bad | found.unread).items())}
    counts = np.bincount(index.labels[index.labels >= 0], minlength=len(index.classes)).tolist()
    sides = {"height": index.sizes[:, 0], "width": index.sizes[:, 1], "pixels": index.sizes.astype(np.int64).prod(1)}
    sizes = {side: {name: int(np.quantile(of, q)) for name, q in _QUANTILES.items()} for side, of in sides.items()}
    groups = _duplicates(found.digests)
    mixed = sum(len(set(index.labels[group].tolist())) > 1 for group in groups)
    return {
        "data": data,
        "files": len(index) + len(index.rejected),
        "good": len(index) - len(found.bad | found.unread),
        "bad": len(bad),
        "reasons": dict(collections.Counter(bad.values()).most_common()),
        "formats": dict(found.formats.most_common()),
        "sizes": sizes,
        "classes": dict(zip(index.classes, counts, strict=True)),
        "unlabelled": int((index.labels < 0).sum()),
        "duplicates": {
            "groups": len(groups),
            "copies": sum(len(group) - 1 for group in groups),
            "groups_of_several_classes": mixed,
            "largest": [[index.paths[i] for i in group] for group in groups[:100]],
        },
        "bad_files": bad,
    }


def _duplicates(digests):
    """Lists of samples that have the same bytes, the largest first."""
    there = np.flatnonzero(digests.any(1))
    names = np.ascontiguousarray(digests[there]).view("V16").ravel()
    order = np.argsort(names, kind="stable")
    starts = np.flatnonzero(np.r_[True, names[order][1:] != names[order][:-1]]) if len(order) else []
    groups = [part.tolist() for part in np.split(there[order], starts[1:]) if len(part) > 1]
    return sorted(groups, key=lambda group: (-len(group), group))


def as_text(report: dict) -> str:
    """The report for the screen."""
    classes, duplicates = report["classes"], report["duplicates"]
    good = f"{report['good']:,} of {report['files']:,} files are good, {report['bad']:,} bad"
    lines = [f"{printable(report['data'])}: {good}"]
    lines += [f"  {count:,}  {reason}" for reason, count in itertools.islice(report["reasons"].items(), _SHOWN)]
    first = itertools.islice(report["bad_files"].items(), _SHOWN)
    lines += [f"bad: {printable(path)}: {reason}" for path, reason in first]
    lines += ["formats: " + ", ".join(f"{count:,} {kind}" for kind, count in report["formats"].items())]
    for side, of in report["sizes"].items():
        lines += [f"{side}: " + ", ".join(f"{name} {value:,}" for name, value in of.items())]
    if classes:
        (most, many), (least, few) = (pick(classes.items(), key=lambda item: item[1]) for pick in (max, min))
        ends = f"from {counted(few, 'image')} ({printable(least)}) to {many:,} ({printable(most)})"
        lines += [f"classes: {len(classes):,}, {ends}"]
    if report["unlabelled"]:
        lines += [f"without a class: {report['unlabelled']:,}"]
    lines += [
        f"duplicates: {counted(duplicates['groups'], 'image')} with {duplicates['copies']:,} more of the same bytes; "
        f"{duplicates['groups_of_several_classes']:,} of them in several classes"
    ]
    lines += [f"  {len(group):,}  {', '.join(map(printable, group[:3]))}" for group in duplicates["largest"][:_SHOWN]]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
