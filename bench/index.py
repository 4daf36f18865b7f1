"""What it takes to know the images: the scan, a start from the cache, memory of a rank, an epoch's order, changes.

``--files`` real files (one JPEG under many names, by hard links) beside torchvision's ImageFolder on the same, and
``--images`` in an index without files behind it. Processor time, of children too; wall time is beside it. Each figure
comes from a process of its own.
"""

import multiprocessing
import os
import pickle
import re
import resource
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from bench import environment
from bench.findings import finding
from bench.pipeline import generate
from pipeline import Index
from pipeline.stream import epoch_order

CLASS = 1300  # files of a class
LINKS = 30_000  # names of a file; ext4 takes 65,000


def main(arguments: list[str]) -> int:
    parser = environment.parser("index", "Scan, start, memory, order and changes of an index.")
    parser.add_argument("--files", type=int, nargs="*", default=[200_000], help="numbers of real files")
    parser.add_argument("--images", type=int, nargs="*", default=[1_280_000, 14_000_000], help="without files")
    parser.add_argument("--folder", type=Path, help="where the files are made, and kept")
    options = parser.parse_args(arguments)
    files, images = ([500], [5_000]) if options.smoke else (options.files, options.images)
    rows = []
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for count in files:
            root = link(Path(options.folder or scratch) / f"{count}-files", count)
            cache = Path(scratch) / f"cache-{count}"
            results = {name: alone(work, root, cache) for name, work in REAL.items()}
            rows += [{"what": name, "images": count} | result for name, result in results.items()]
        for count in images:
            kept = Path(scratch) / f"{count}.index"
            results = {name: alone(work, kept, count) for name, work in SYNTHETIC.items()}
            rows += [{"what": name, "images": count} | result for name, result in results.items()]
            kept.unlink()
    result = {"rows": rows}
    environment.save(options, result | conclusions(result))
    environment.print_table([{name: row.get(name) for name in COLUMNS} for row in rows])
    return 0


COLUMNS = ("what", "images", "processor_seconds", "us_an_image", "wall_seconds", "private_mib", "bytes_an_image")


def conclusions(d: dict) -> dict:
    found = []
    for row in d["rows"]:
        said = f"{row['processor_seconds']:.3g} s of processor time, {row['us_an_image']:.2f} us an image"
        if "private_mib" in row:
            said += f"; {row['private_mib']:,.0f} MiB private to the process"
        if "bytes_an_image" in row:
            said += f"; {row['bytes_an_image']:.1f} bytes an image"
        found.append(finding(f"{row['what']}, {row['images']:,} images", said))
    return {"findings": found}


def alone(work, *arguments) -> dict:
    """What ``work`` returns in a new process, which it is alone in."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def timed(images: int, work) -> tuple:
    """The result of ``work``; its time; and by how much the memory grew that is this process's alone."""
    before, wall, times = private_mib(), time.perf_counter(), os.times()
    result = work()
    wall, spent = time.perf_counter() - wall, sum(os.times()[:4]) - sum(times[:4])
    private = private_mib() - before
    return result, {
        "processor_seconds": spent, "us_an_image": spent / images * 1e6, "wall_seconds": wall, "private_mib": private,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def private_mib() -> float:
    return int(re.search(r"Anonymous: +(\d+)", Path("/proc/self/smaps_rollup").read_text())[1]) / 1024


def link(root: Path, count: int) -> Path:
    """A folder of so many JPEGs in class folders; made, unless it is there."""
    if not root.exists():
        part = root.with_name(root.name + ".part")
        shutil.rmtree(part, ignore_errors=True)  # of a process that was stopped
        for number in range(count):
            source = part.with_name(f"{root.name}-{number // LINKS}.jpg")
            if number % LINKS == 0:
                generate(source, number, 375, 500)
            name = f"n{number // CLASS:08}"
            if number % CLASS == 0:
                (part / name).mkdir(parents=True)
            os.link(source, part / name / f"{name}_{number % CLASS * 17:05}.JPEG")
        part.rename(root)
    return root


# ---- Real files


def scan(root, cache):
    index, figures = timed(int(root.name.split("-")[0]), lambda: Index.scan(root, cache))
    stored = [cache] if cache.is_file() else [path for path in cache.iterdir() if path.is_file()]
    return figures | {"bytes_an_image": sum(path.stat().st_size for path in stored) / len(index)}


def start(root, cache):
    return timed(int(root.name.split("-")[0]), lambda: Index.scan(root, cache))[1]


def image_folder(root, cache):
    from torchvision.datasets import ImageFolder

    return timed(int(root.name.split("-")[0]), lambda: ImageFolder(root))[1]


REAL = {"first scan": scan, "start from the cache": start, "torchvision's ImageFolder": image_folder}


# ---- No files


def made(count: int) -> Index:
    """An index of names as ImageNet's."""
    paths = [f"n{i // CLASS:08}/n{i // CLASS:08}_{i % CLASS * 17:05}.JPEG" for i in range(count)]
    labels, sizes = np.arange(count) // CLASS, np.full((count, 2), (375, 500), np.int32)
    return Index(Path("/data"), paths, labels, sizes, tuple(f"n{i:08}" for i in range(labels[-1] + 1)), {})


def keep(path, count):
    index = made(count)
    figures = timed(count, lambda: index.keep(path))[1]
    return figures | {"bytes_an_image": path.stat().st_size / count}


def begin(path, count):
    """From the file to the bytes of a name, and the fingerprint that a run is known by."""

    def work():
        index = Index.kept(path, Path("/data"))
        return index, index.fingerprint, index.file(count // 2)

    return timed(count, work)[1]


def order(path, count):
    return timed(count, lambda: epoch_order(count, 0, 0))[1]


def changes(path, count):
    now, then = (Index.kept(path, Path("/data")) for _ in range(2))
    return timed(count, lambda: then.changes(now))[1]


def to_ranks(path, count):
    index = Index.kept(path, Path("/data"))
    sent, figures = timed(count, lambda: pickle.dumps(index))
    return figures | {"bytes_an_image": len(sent) / count}


SYNTHETIC = {
    "write": keep, "open": begin, "order of an epoch": order, "changes": changes, "sent to a rank": to_ranks,
}  # fmt: skip
