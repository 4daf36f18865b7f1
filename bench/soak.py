"""Thousands of batches through ``pipeline.Loader``: memory must stay flat, and a bad file must cost time only once.

Small generated images with some damaged ones among them, many epochs, every operation of the ImageNet recipe at 32 px.
Exit code 1 if the resident set grows by more than 16 MiB after the first tenth of the batches, if a damaged file is
not found, or if a file is probed after the first epoch.
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import environment
from bench.findings import finding, plot
from bench.pipeline import generate, skip, without_dali
from pipeline import Index, Loader, graph
from run.recipes import RECIPES

GROWTH = 16  # MiB allowed


def main(arguments: list[str]) -> int:
    parser = environment.parser("soak", "Memory and bad files over many batches.")
    parser.add_argument("--batches", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=64, help="images")
    options = parser.parse_args(arguments)
    if reason := without_dali():
        return skip(options, reason)
    batch, batches = (32, 80) if options.smoke else (options.batch_size, options.batches)
    count, damaged = 16 * batch, 5
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        list(pool.map(lambda number: generate(Path(folder) / f"{number:05}.jpg", number, 48, 64), range(count)))
        index = Index.scan(Path(folder))
        for number in range(damaged):  # after the scan, which would leave them out
            path = Path(index.file(number * count // damaged))
            path.write_bytes(path.read_bytes()[: 200 * number])
        loader = Loader(
            index, RECIPES["imagenet-vit-s"].augmentation, image_size=32, batch_size=batch, seed=0,
            device=environment.device(), threads=len(os.sched_getaffinity(0)),
        )  # fmt: skip
        result = run(loader, batches) | {"batches": batches, "batch_size": batch, "images": count, "damaged": damaged}
    tenths = result["resident_mib"]
    result["grown_mib"] = tenths[-1] - tenths[1]
    said = conclusions(result)
    environment.save(options, result | said)
    environment.print_table([{"tenths of the batches": i, "resident MiB": mib} for i, mib in enumerate(tenths)])
    print("\n".join(": ".join(row.values()) for row in said["findings"]))
    flat = result["grown_mib"] <= GROWTH
    return 0 if flat and result["found"] == damaged and not result["probes_later"] else 1


def conclusions(d: dict) -> dict:
    what = f"{d['batches']:,} batches of {d['batch_size']} in {d['epochs']} epochs"
    memory = f"the resident set grows by {d['grown_mib']:.1f} MiB after the first tenth"
    bad = f"{d['found']} of {d['damaged']} damaged files found"
    probes = f"{d['probes_in_first_epoch']} batches probed in the first epoch, {d['probes_later']} later"
    panels = {f"{d['batches']:,} batches": d["resident_mib"]}
    plots = [plot("Resident set over tenths of the batches", "MiB", panels)]
    return {"findings": [finding(what, memory, bad, probes)], "plots": plots}


def run(loader: Loader, batches: int) -> dict:
    """Consume the batches; memory at every tenth, and how many batches of which epoch had to be probed."""
    probed, now, probe = [], [0], graph.probe

    def noted(*arguments):
        probed.append(now[0])
        return probe(*arguments)

    graph.probe = noted
    try:
        resident, seconds, last = [resident_mib()], [], time.perf_counter()
        for number, batch in enumerate(loader.batches(0, batches)):
            batch.views[1][-1, -1, -1].tolist()  # waits for the device
            seconds.append(time.perf_counter() - last)
            last, now[0] = time.perf_counter(), number + 1
            if (number + 1) * 10 // batches > number * 10 // batches:
                resident.append(resident_mib())
    finally:
        graph.probe = probe
    epoch = loader.batches_per_epoch
    return {
        "epochs": -(-batches // epoch), "resident_mib": resident, "found": len(loader.bad),
        "probes_in_first_epoch": sum(number < epoch for number in probed),
        "probes_later": sum(number >= epoch for number in probed),
        "first_epoch_seconds": sum(seconds[:epoch]), "last_epoch_seconds": sum(seconds[-epoch:]),
    }  # fmt: skip


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
