"""The optimizer step of train.py on synthetic crops: pairs/s against the plain form and the roofline, memory, profile.

A pair is one optimizer sample: both views of one image. Modes, measured in turns within one process:

- ``plain``: the plain form (``bench/plain.py``), in float32;
- ``float32``: train.py's step in float32, not compiled;
- ``eager``: in bfloat16 on a GPU and on processors with AMX, not compiled, as train.py does it on a CPU;
- ``compiled``: the same with the networks through torch.compile;
- ``graph``: the same recorded as CUDA graphs, as train.py does it on a GPU.

A turn is a few loaded batches, each ``groups`` steps, sampling included; loading and logging are not in it. A mode's
advantage over ``plain`` is the quotient of their times within a turn, so that what slows the machine down slows both.
Processor time is that of all threads; where other jobs hold the cores, it says more than the clock. ``card``: clock and
power of a GPU meanwhile, of all modes.

MFU is the work of ``bench/roofline.py`` (matrix products, forward, backward and keys) per second over the best product
measured in the same process in the type of the mode; the roofline, described there, also counts traffic. ``kept`` are
the bytes that autograd saves for the backward pass, each storage once and parameters not at all, beside the formula.
"""

import argparse
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map

from bench import environment, roofline
from bench.findings import PATH_BATCH, PATH_RECIPE, bar, finding, number, percent, plot
from bench.kernels import batch_of_boxes
from bench.plain import Plain
from bench.timing import NO_KERNEL, copy_bandwidth, matrix_product, summary
from pipeline import Batch
from run.recipes import RECIPES, Config
from run.training import Training

SMALL = {"depth": 1, "head_hidden": 64}  # what ``--smoke`` changes in a recipe
MODES = "plain", "float32", "eager", "compiled", "graph"
TOP = 40  # rows of the profile, of which SHOWN are printed
SHOWN = 15


def trainer(config: Config, device: torch.device, mode: str) -> Training | Plain:
    if mode == "plain":
        return Plain(config, device)
    if mode == "float32":
        config = dataclasses.replace(config, precision="float32")
    config = dataclasses.replace(config, cuda_graph=mode == "graph")
    return Training(config, device, compiled=mode in ("compiled", "graph"))


class Synthetic:
    """A trainer with a batch of random crops. ``batch()`` makes it into ``config.groups`` optimizer steps."""

    def __init__(self, config: Config, device: torch.device, *, mode: str):
        self.training, self.steps = trainer(config, device, mode), 0
        shape = config.batch_size, config.image_size, config.image_size, 3
        crops = tuple(torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(2))
        boxes, flips, sample = batch_of_boxes(config.batch_size, device)
        self.loaded = Batch(crops, boxes, flips, sample, label=torch.full_like(sample, -1))

    def batch(self) -> None:
        chosen = self.training.sample(self.loaded, epoch=self.steps)
        for given in zip(*self.training.gather(self.loaded.views, chosen), strict=True):
            self.training.step(*given, epoch=self.steps * 1e-4)
            self.steps += 1

    def kept(self) -> int:
        """Bytes that autograd saves for the backward pass of a step."""
        training = self.training
        patches, numbers = training.gather(self.loaded.views, training.sample(self.loaded, epoch=0))
        given = tree_map(torch.clone, (patches[0], numbers[0]))  # without the other groups
        take = functools.partial(training.step, epoch=0) if isinstance(training, Plain) else training.take
        return saved_bytes(
            lambda: take(*given),
            [*training.network.parameters(), *training.query.parameters()],
        )


def saved_bytes(call: Callable, parameters: Iterable[Tensor]) -> int:
    """Bytes that autograd saves for a backward pass in ``call``: each storage once, those of ``parameters`` not."""
    left_out = {parameter.untyped_storage()._cdata for parameter in parameters}  # an address, also of fake tensors
    found = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in left_out:
            found[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(found.values())


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(config: Config, device: torch.device, mode: str, batches: int) -> tuple[Synthetic, dict]:
    """A trainer that has run, the seconds that took, and on a GPU the most memory that it held."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)  # by the modes before
    start = time.perf_counter()
    synthetic = Synthetic(config, device, mode=mode)
    for _ in range(batches):
        synthetic.batch()
    wait(device)
    return synthetic, {
        "precision": "bfloat16" if synthetic.training.half else "float32",
        "graphs": len(recorded.graphs) if (recorded := getattr(synthetic.training, "recorded", None)) else 0,
        "warm_up_seconds": time.perf_counter() - start,  # compiling included
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) - before if on_gpu else None,
    }


def time_in_turns(modes: dict[str, Synthetic], config: Config, device: torch.device, turns: int) -> dict[str, dict]:
    """Of each mode the seconds of an optimizer step by the clock and of the processor, and both against ``plain``."""
    batches = 4 if device.type == "cuda" else 1  # a look at the clock waits for the device: not too often
    clocks = time.perf_counter, time.process_time
    seconds = {mode: ([], []) for mode in modes}
    for _ in range(turns):
        for mode, synthetic in modes.items():
            wait(device)
            start = [clock() for clock in clocks]
            for _ in range(batches):
                synthetic.batch()
            wait(device)
            for found, clock, then in zip(seconds[mode], clocks, start, strict=True):
                found.append((clock() - then) / (batches * config.groups))
    result = {}
    for mode, found in seconds.items():
        result[mode] = {"step_seconds": summary(found[0]), "processor_seconds": summary(found[1])}
        if "plain" in modes:
            for name, plain, ours in zip(
                ("times_plain", "times_plain_processor"), seconds["plain"], found, strict=True
            ):
                result[mode][name] = summary([a / b for a, b in zip(plain, ours, strict=True)])
    return result


def where_time_goes(run: Callable, device: torch.device, seconds: float, trace: Path | None = None) -> dict:
    """The ``TOP`` kernels (on a CPU: operations) of ``run`` by their own time, and the share of sampling and gathering.

    On a GPU shares are of the kernels' total time; ``idle_share`` is the part without a kernel of the ``seconds`` that
    ``run`` takes where no profiler slows its launches down. ``trace``: a file for the whole, for Perfetto. Where the
    profiler may not look at the GPU, as in some containers, {"not_run": why}.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiler:
        wait(device)
        run()
        wait(device)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    where = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [e for e in profiler.key_averages() if e.device_type == where and not (on_gpu and e.is_user_annotation)]
    own = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total) for e in events}  # microseconds
    calls = {e.key: e.count for e in events}
    total = sum(own.values())
    if not total:
        return {"not_run": NO_KERNEL}
    ours = ("_sample_kernel", "_gather_kernel") if on_gpu else ("aps::sample_views", "aps::gather_patches")
    if not on_gpu:  # the reference runs operations of its own inside
        own |= {e.key: e.cpu_time_total for e in events if e.key in ours}
    top = sorted(own, key=own.get, reverse=True)[:TOP]
    return {
        "sampling_and_gathering_share": sum(own.get(name, 0) for name in ours) / total,
        "idle_share": 1 - total / (seconds * 1e6) if on_gpu else None,
        "top": [
            {"name": name[:100], "calls": calls[name], "us": round(own[name], 1), "share": own[name] / total}
            for name in top
        ],
    }


def against_ceilings(found: dict, config: Config, ceilings: dict) -> dict:
    """MFU and roofline of a mode that has been timed."""
    element = 2 if found["precision"] == "bfloat16" else 4
    operations = roofline.operations(config, element)
    peak, bandwidth = ceilings["peak_flop_per_second"][found["precision"]], ceilings["copy_bytes_per_second"]
    rate = config.batch_size / found["step_seconds"]["p50"]
    limit = config.batch_size / roofline.seconds(operations, peak=peak, bandwidth=bandwidth)
    work = sum(operation.flop for operation in operations) / config.batch_size
    return {
        "pairs_per_second": rate, "mfu": rate * work / peak,
        "roofline_pairs_per_second": limit, "roofline_share": rate / limit,
        "kept_bytes_by_formula": roofline.kept(config, element),
    }  # fmt: skip


def conclusions(d: dict) -> dict:
    """A row and a bar for each mode; that of train.py on this device, with an ImageNet recipe, is a headline."""
    if "rows" in d:  # what ``--variants`` has measured
        from bench.variants import turns

        return turns.conclusions(d)
    found, bars, recipe = [], [], d["recipe"]
    for mode in (mode for mode in MODES if mode in d):
        of, seconds = d[mode], d[mode]["step_seconds"]
        text = f"{number(of['pairs_per_second'])} pairs/s, {number(seconds['p50'] * 1e3)} ms"
        if mode != "plain" and "times_plain" in of:
            text += f", {number(of['times_plain']['p50'])} times the plain form"
        more = [f"{percent(of['mfu'])} of the best matrix product, {percent(of['roofline_share'])} of the roofline"]
        if mode == "graph" and not of["graphs"]:
            more.append("which could not be recorded")
        if of["peak_memory_bytes"]:
            more.append(f"{number(of['peak_memory_bytes'] / 2**30)} GiB of memory at most")
        if card := d.get("card"):
            held = f", held down by that {percent(card['held_down'])} of the time"
            more.append(
                f"{number(card['clock_mhz'])} MHz, {number(card['watts'])} of {number(card['watts_limit'])} W{held}"
            )
        what = f"optimizer step, {recipe}, batch {d['batch_size']}, synthetic crops, {mode} ({of['precision']})"
        best = "graph" if of["peak_memory_bytes"] else "eager"  # on a GPU, on a CPU
        headline = f"step, {recipe}" if mode == best and recipe.startswith("imagenet") else ""
        found.append(finding(what, text, *more, headline=headline))
        rates = (d["batch_size"] / seconds[p] for p in ("p50", "p80", "p20"))
        bars.append(bar(mode, *rates, ours=mode != "plain"))
    panels = {f"{recipe}, batch {d['batch_size']}": bars}
    result = {"findings": found, "plots": [plot("Optimizer step", "pairs/s (p20 to p80)", panels)]}
    if "graph" in d and (recipe, d["batch_size"]) == (PATH_RECIPE, PATH_BATCH):
        result["path"] = {"step": {"seconds": d["graph"]["step_seconds"]["p50"]}}
    return result


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = environment.parser("step", "The optimizer step on synthetic crops.")
    parser.add_argument("--recipe", choices=RECIPES, default="imagenet-vit-s")
    parser.add_argument("--batch-size", type=int, default=512, help="images per step")
    parser.add_argument("--turns", type=int, default=8, help="timed ones of each mode")
    parser.add_argument(
        "--modes", choices=MODES, nargs="+", help="default: graph, compiled and eager on a GPU, others on a CPU"
    )
    parser.add_argument("--variants", nargs="*", metavar="NAME", help="instead: bench/variants, all or these")
    parser.add_argument("--trace", type=Path, help="file for the first mode's profile in whole, .json or .json.gz")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options, device = parse(arguments), environment.device()
    config = dataclasses.replace(RECIPES[options.recipe], batch_size=options.batch_size)
    if options.variants is not None:
        from bench.variants import turns  # which takes from here

        return turns.main(options, config, device)
    turns, batches = options.turns, 3 if device.type == "cuda" else 1
    names = options.modes or (MODES[:1:-1] if device.type == "cuda" else MODES[:-1])
    result = {"recipe": config.recipe, "model": config.model, "groups": config.groups}
    if options.smoke:  # a compiler for C++ takes longer than all the rest
        config, turns, names = dataclasses.replace(config, batch_size=2, **SMALL), 2, _quick(names)
        result |= SMALL
    work = sum(operation.flop for operation in roofline.operations(config, 4)) / config.batch_size
    result |= {"batch_size": config.batch_size, "flop_per_pair": work}
    print(f"{config.recipe}, batch {config.batch_size}: {work / 1e9:.2f} GFLOP per pair")

    modes = {}
    for mode in names:
        modes[mode], result[mode] = warm_up(config, device, mode, batches)
    with environment.watched() as card:
        times = time_in_turns(modes, config, device, turns)
    for mode in modes:
        result[mode] |= times[mode]
    result |= {"card": card} if card else {}
    environment.save(options, result | {"findings": []})  # whatever becomes of what they are compared with
    seconds = 0.1 if options.smoke else 1  # ceilings: on a GPU as warm as it was
    precisions = {result[mode]["precision"] for mode in modes}
    ceilings = {
        "peak_flop_per_second": {name: matrix_product(device, seconds, name)["best"] for name in sorted(precisions)},
        "copy_bytes_per_second": copy_bandwidth(device, seconds)["p50"],
    }
    result |= ceilings
    for mode, synthetic in modes.items():
        result[mode] |= against_ceilings(result[mode], config, ceilings) | {"kept_bytes": synthetic.kept()}
    result |= conclusions(result)
    environment.save(options, result)
    for mode, synthetic in modes.items():
        seconds = result[mode]["step_seconds"]["p50"] * config.groups
        result[mode]["profile"] = where_time_goes(
            synthetic.batch, device, seconds, options.trace if mode == names[0] else None
        )
        show_profile(mode, result[mode]["profile"])
    environment.save(options, result)
    show(result, modes)
    return 0


def _quick(names: Iterable[str]) -> list[str]:
    """Without those that are compiled."""
    return [name for name in names if name not in ("compiled", "graph")] or ["eager"]


def show_profile(mode: str, profiled: dict) -> None:
    if "not_run" in profiled:
        print(f"\n{mode}: no profile: {profiled['not_run']}")
        return
    print(f"\n{mode}: sampling and gathering {profiled['sampling_and_gathering_share']:.2%} of the time")
    environment.print_table(profiled["top"][:SHOWN])


def show(result: dict, modes) -> None:
    """All modes side by side."""
    rows, memory = [], []
    for mode in modes:
        found = result[mode]
        seconds, times, processor = (found.get(x) for x in ("step_seconds", "times_plain", "times_plain_processor"))
        rows.append(
            {"mode": mode, "type": found["precision"], "pairs/s": found["pairs_per_second"]}
            | {f"ms {name}": seconds[name] * 1e3 for name in ("p20", "p50", "p80")}
            | ({f"x plain {name}": times[name] for name in ("p20", "p50", "p80")} if times else {})
            | ({"by processor time": processor["p50"]} if processor else {})
            | {"MFU": found["mfu"], "roofline": found["roofline_pairs_per_second"], "share": found["roofline_share"]}
        )
        peak = found["peak_memory_bytes"]
        memory.append(
            {"mode": mode, "kept MiB": found["kept_bytes"] / 2**20}
            | {"by formula": found["kept_bytes_by_formula"] / 2**20}
            | {"peak GiB": "-" if peak is None else f"{peak / 2**30:.2f}", "warm-up s": found["warm_up_seconds"]}
        )
    peaks = (f"{peak / 1e12:,.2f} TFLOP/s in {name}" for name, peak in result["peak_flop_per_second"].items())
    print(
        f"\nceilings: {', '.join(peaks)}, copies {result['copy_bytes_per_second'] / 1e9:,.1f} GB/s; roofline: pairs/s"
    )
    environment.print_table(rows)
    print()
    environment.print_table(memory)
