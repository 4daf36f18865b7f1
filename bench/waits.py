"""What train.py waits for on a GPU where it waits for data: the same run in several ways, and what a trace shows.

Of the decoder's kernels it is known that they run on streams of their own. Why they may come late all the same, what
train.py does about it, and the way of each here that is with it or without:

- more streams than hardware queues, 8 by default: what comes behind a step in the same queue waits for that step. So
  train.py asks for 32 (without them, and in queues of the default length, it waited 16 % of the time);
- a full buffer of commands: whoever launches a graph then waits, and may keep other threads from launching. So train.py
  asks for queues four times as long, of which a second process does without (they have been reported to end in a
  deadlock on a Jetson, llama.cpp pull request 19230), and is two steps ahead of the GPU at most; "any number of steps
  ahead" does not wait;
- the default stream, for which some calls of other libraries wait: "a stream of its own", also one of high priority,
  which has other queues than the decoder's (kernels in a graph keep the priority that they were recorded with);
- the thread by which DALI waits for all of the device whenever a tensor of its memory that went by DLPack is freed:
  "no DLPack".

Ways are taken one after the other within a run, with a line of the log for each, and once more as it is behind the
profiler, which may leave something behind. The images are listed ``REPEATED`` times, so that starts of epochs are few.
On a CPU there is no other way, and no kernel to be traced.
"""

import collections
import contextlib
import functools
import itertools
import json
import math
import os
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from bench import environment
from bench.findings import failure, finding, number, percent, without_figures
from bench.index import alone
from bench.pipeline import folder_of_images, options_of, read_by_dali, skip
from bench.step import wait
from bench.timing import NO_KERNEL
from bench.train import SMALL, missing
from run import DRIVEN, training
from run.recipes import RECIPES

SHORT = {"CUDA_SCALE_LAUNCH_QUEUES": "1x"}  # the driver's own
REPEATED = 4
TRACED = 16  # steps
GAP = 200  # microseconds without a kernel of the training: a wait. Between two steps there are tens.
LONGEST = 12  # waits that are kept one by one


def main(arguments: list[str]) -> int:
    parser = options_of("waits", "What train.py waits for where it waits for data.")
    parser.add_argument("--batches", type=int, default=12, help="of each way")
    options = parser.parse_args(arguments)
    if reason := missing():
        return skip(options, reason)
    recipe, batch, batches, more = options.recipe, options.batch_size, options.batches, []
    if options.smoke:
        recipe, batch, batches, more = "toy", 8, 2, SMALL
    result = {"recipe": recipe, "batch_size": batch, "batches": batches, "runs": []}
    with folder_of_images(options.images, 4 * batch) as (images, index), tempfile.TemporaryDirectory() as folder:
        if read_by_dali(index):
            (listed := Path(folder) / "images.txt").write_text(
                "".join(f"{index.file(i)}\n" for _ in range(REPEATED) for i in range(len(index)))
            )
            images = listed
        steps = batches * RECIPES[recipe].groups
        command = ["--recipe", recipe, "--data", str(images), "--batch-size", str(batch), *more]
        environment.describe()  # asks the driver, for which a limit leaves no time
        for driven in (DRIVEN, DRIVEN | SHORT) if environment.device().type == "cuda" else ({},):
            os.environ |= driven
            queues, length = (driven.get(name) for name in DRIVEN)
            row = {"queues": int(queues) if queues else None, "length": length}
            result["runs"].append({**row, **alone(run, command, steps)})
            environment.save(options, result | conclusions(result))
    for row in conclusions(result)["findings"]:
        print("; ".join([f"{row['what']}: {row['result']}", *filter(None, [row.get("more")])]))
    return 0


def conclusions(d: dict) -> dict:
    """By number of queues the share of the time that each way waits, and what ran in the waits of a trace."""
    of, found = f"{d['recipe']}, batch {d['batch_size']}", []
    for row in d["runs"]:
        longer = "" if row.get("length") == SHORT["CUDA_SCALE_LAUNCH_QUEUES"] else " longer"
        queues, trace = f"{row['queues']}{longer} queues" if row["queues"] else "default queues", row["trace"]
        ways = [
            f"{way['way']} {percent(way['data_wait'])}, {number(way['pairs_per_second'])} pairs/s"
            for way in row["ways"]
        ]
        ways += [without_figures(row)] * ("failed" in row)
        found.append(finding(f"train.py waiting for data, {of}, {queues}", *ways))
        said = [without_figures(trace)]
        if "waits_ms" in trace:
            late, all_of = (sum(stream[ms] for stream in trace["streams"]) for ms in ("ms_in_waits", "ms"))
            full = trace["overheads"].get("Command Buffer Full", {"ms": 0.0})
            said = [
                f"{number(trace['waits_ms'])} of {number(trace['ms'])} ms",
                f"{number(late)} of {number(all_of)} ms of other streams lie in them",
                f"full buffer of commands: {number(full['ms'])} ms",
            ]
        if trace:
            found.append(finding(f"waits of a trace of train.py, {of}, {queues}", *said))
    return {"findings": found}


def run(command: list[str], steps: int) -> dict:
    """Of train.py in this process: {"ways": what the log says of each, after ``steps`` in which all warms up, "trace",
    and "failed" where it did not come to its end}."""
    from run.loop import Loop

    main = runpy.run_path(str(environment.ROOT / "train.py"), run_name="train")["main"]
    trace, on_gpu = {}, environment.device().type == "cuda"
    ways = {"as it is": contextlib.nullcontext, **(WAYS if on_gpu else {}), "traced": functools.partial(traced, trace)}
    if on_gpu:  # the last may end the run: memory that torch does not take
        ways |= {"as it is again": contextlib.nullcontext, "no DLPack": no_dlpack}
    took, left, total, failed = Loop.took, iter(ways.values()), steps * (1 + len(ways)), {}

    def then(loop, *results):
        took(loop, *results)
        if loop.step % steps == 0:
            way.close()
            wait(environment.device())
            if loop.step < total:
                way.enter_context(next(left)())

    most = ["--max-steps", str(total), "--epochs", str(total), "--log-every", str(steps)]
    with tempfile.TemporaryDirectory() as output, contextlib.ExitStack() as way, patch.object(Loop, "took", then):
        try:
            main([*command, *most, "--output", output])
        except Exception as error:  # what was measured by then is kept
            failed = {"failed": failure(error)}
        logged = Path(output) / "metrics.jsonl"  # which is not there if no step came to its end
        lines = map(json.loads, logged.read_text().splitlines() if logged.exists() else ())
        lines = [line for line in lines if "data_wait" in line][1:]
    return {"ways": [
        {"way": name, "data_wait": line["data_wait"], "pairs_per_second": line["pairs_per_second"]}
        for name, line in zip(ways, lines, strict=False)
    ], "trace": trace, **failed}  # fmt: skip


# The ways: within each block, the steps go so


@contextlib.contextmanager
def own_stream(priority: int) -> Iterator[None]:
    torch.cuda.set_stream(torch.cuda.Stream(priority=priority))
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())


def no_dlpack():
    return patch.object(torch, "from_dlpack", functools.partial(torch.as_tensor, device="cuda"))


WAYS = {
    "a stream of its own": functools.partial(own_stream, 0), "one of high priority": functools.partial(own_stream, -1),
    "any number of steps ahead": functools.partial(patch.object, training, "AHEAD", math.inf),
}  # fmt: skip


@contextlib.contextmanager
def traced(found: dict) -> Iterator[None]:
    """Puts into ``found`` what the first steps show."""
    from run.training import Training

    step, taken = Training.step, itertools.count(1)
    kind = ProfilerActivity.CUDA if environment.device().type == "cuda" else ProfilerActivity.CPU
    with contextlib.ExitStack() as stack:
        profiler = stack.enter_context(profile(activities=[kind]))

        def counted(*arguments):
            figures = step(*arguments)
            if next(taken) == TRACED:
                wait(environment.device())
                stack.close()
            return figures

        with patch.object(Training, "step", counted):
            yield
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(file := Path(folder) / "trace.json"))
        found |= seen(json.loads(file.read_text())["traceEvents"])


def seen(events: list[dict]) -> dict:
    """Of a trace, in ms: the waits of the stream with the most kernels, which is the training's, with what ran in them;
    the other streams; the calls that took longest, by thread, of which the first is the training's; and ``overheads``,
    times in which the driver or the profiler kept a call waiting."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    on_device = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    if not on_device:
        return {"not_run": NO_KERNEL}
    time = collections.Counter()
    for event in on_device:
        time[event["args"]["stream"]] += event["dur"]
    training = max(time, key=time.get)
    ours = [e for e in on_device if e["args"]["stream"] == training]
    others = [e for e in on_device if e["args"]["stream"] != training]
    waits, streams = [], {}
    for before, after in itertools.pairwise(ours):
        if after["ts"] - before["ts"] - before["dur"] > GAP:
            waits.append((before["ts"] + before["dur"], after["ts"], before["name"], after["name"]))
    meanwhile = [collections.Counter() for _ in waits]
    for event in others:
        stream = event["args"]["stream"]
        row = streams.setdefault(stream, {"stream": stream, "launches": 0, "ms": 0.0, "ms_in_waits": 0.0})
        row["launches"] += 1
        row["ms"] += event["dur"] / 1000
        for (start, end, *_), ran in zip(waits, meanwhile, strict=True):
            both = min(end, event["ts"] + event["dur"]) - max(start, event["ts"])
            if both > 0:
                row["ms_in_waits"] += both / 1000
                ran[f"{stream}: {event['name'][:60]}"] += both / 1000
    rows = [
        {"ms": (end - start) / 1000, "behind": before[:60], "before": after[:60], "meanwhile": dict(ran.most_common(5))}
        for (start, end, before, after), ran in zip(waits, meanwhile, strict=True)
    ]
    calls, overheads = {}, {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            by = "training" if event["tid"] == event["pid"] else str(event["tid"])
            _add(calls.setdefault((by, event["name"]), {"thread": by, "name": event["name"]}), event)
        elif event.get("cat") == "overhead":
            _add(overheads.setdefault(event["name"], {}), event)
    return {
        "ms": (max(e["ts"] + e["dur"] for e in ours) - ours[0]["ts"]) / 1000,
        "waits_ms": sum(row["ms"] for row in rows),
        "waits": sorted(rows, key=lambda row: -row["ms"])[:LONGEST],
        "streams": sorted(streams.values(), key=lambda row: -row["ms"]),
        "calls": sorted(calls.values(), key=lambda row: -row["ms"])[:25],
        "overheads": overheads,
    }


def _add(row: dict, event: dict) -> None:
    row["calls"] = row.get("calls", 0) + 1
    row["ms"] = row.get("ms", 0.0) + event["dur"] / 1000
    row["longest_ms"] = max(row.get("longest_ms", 0.0), event["dur"] / 1000)
