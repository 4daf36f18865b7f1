"""The optimizer step of train.py on synthetic crops: pairs/s, share of the peak, memory, and where the time goes.

A pair is one optimizer sample: both views of one image. Work is counted by ``torch.utils.flop_counter`` over one eager
step: matrix products and attention, forward, backward and keys, 2 FLOP per multiply-add; element-wise operations, the
optimizer and the sampling count nothing. MFU is that work per second over the best matrix product measured in the same
process (bfloat16 on a GPU, float32 on a CPU). A step's time is that of a few loaded batches, sampling included, over
the number of steps; loading and logging are not in it. Modes: ``compiled``, the networks through torch.compile, as
train.py does on a GPU; and ``eager``.
"""

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from bench import environment
from bench.kernels import batch_of_boxes
from bench.timing import matrix_product, summary
from pipeline import Batch
from run.recipes import RECIPES, Config
from run.training import Training

SMALL = {"depth": 1, "head_hidden": 64}  # what ``--smoke`` changes in a recipe
MODES = "compiled", "eager"
WINDOW = 4  # loaded batches from one look at the clock, which waits for the device, to the next
TOP = 40  # rows of the profile, of which SHOWN are printed
SHOWN = 15


class Synthetic:
    """train.py's Training with a batch of random crops. ``batch()`` makes it into ``config.groups`` optimizer steps."""

    def __init__(self, config: Config, device: torch.device, *, mode: str):
        self.training, self.steps = Training(config, device, compiled=mode == "compiled"), 0
        shape = config.batch_size, config.image_size, config.image_size, 3
        crops = tuple(torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(2))
        boxes, flips, sample = batch_of_boxes(config.batch_size, device)
        self.loaded = Batch(crops, boxes, flips, sample, label=torch.full_like(sample, -1))

    def batch(self) -> None:
        chosen = self.training.sample(self.loaded, epoch=self.steps)
        for group in range(chosen.shape[2]):
            self.training.step(self.loaded.views, chosen[:, :, group], epoch=self.steps * 1e-4)
            self.steps += 1


@register_flop_formula(torch.ops.aps.attention)
def attention_flop(qkv, heads, out_shape=None, **_) -> int:
    """Two products over all pairs of tokens, as torch counts its own attention."""
    b, tokens, width = qkv
    return 4 * b * tokens**2 * width // 3


@register_flop_formula(torch.ops.aps.attention_backward)
def attention_backward_flop(qkv, gradient, heads, out_shape=None, **_) -> int:
    """Five products, the first one of them again."""
    return attention_flop(qkv, heads) * 5 // 2


def count_flop(synthetic: Synthetic, groups: int) -> int:
    """FLOP of one optimizer step."""
    with FlopCounterMode(display=False) as counter:
        synthetic.batch()
    return counter.get_total_flops() // groups


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(synthetic: Synthetic, config: Config, device: torch.device, *, windows: int) -> dict:
    """Seconds of an optimizer step, from the wall clock around each of so many ``WINDOW``s."""
    seconds = []
    for _ in range(windows):
        wait(device)
        start = time.perf_counter()
        for _ in range(WINDOW):
            synthetic.batch()
        wait(device)
        seconds.append((time.perf_counter() - start) / (WINDOW * config.groups))
    return summary(seconds)


def where_time_goes(run: Callable, device: torch.device) -> dict:
    """The ``TOP`` kernels (on a CPU: operations) of ``run`` by their own time, and the share of sampling and gathering.

    On a GPU shares are of the kernels' total time; ``idle_share`` is the part of the wall clock without a kernel.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiler:
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        elapsed = time.perf_counter() - start
    where = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [e for e in profiler.key_averages() if e.device_type == where and not (on_gpu and e.is_user_annotation)]
    own = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total) for e in events}  # microseconds
    calls = {e.key: e.count for e in events}
    total = sum(own.values())
    ours = ("_sample_kernel", "_gather_kernel") if on_gpu else ("aps::sample_views", "aps::gather_patches")
    if not on_gpu:  # the reference runs operations of its own inside
        own |= {e.key: e.cpu_time_total for e in events if e.key in ours}
    top = sorted(own, key=own.get, reverse=True)[:TOP]
    return {
        "sampling_and_gathering_share": sum(own.get(name, 0) for name in ours) / total,
        "idle_share": 1 - total / (elapsed * 1e6) if on_gpu else None,
        "top": [
            {"name": name[:100], "calls": calls[name], "us": round(own[name], 1), "share": own[name] / total}
            for name in top
        ],
    }


def measure_step(config: Config, device: torch.device, *, mode: str, windows: int, warm_up: int) -> dict:
    on_gpu = device.type == "cuda"
    synthetic = Synthetic(config, device, mode=mode)
    if on_gpu:
        gc.collect()  # what is left of the mode before
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    for _ in range(warm_up):
        synthetic.batch()
    wait(device)
    result = {"warm_up_seconds": time.perf_counter() - start}  # compiling included
    result["step_seconds"] = time_steps(synthetic, config, device, windows=windows)
    result["pairs_per_second"] = config.batch_size / result["step_seconds"]["p50"]
    result["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return result | {"profile": where_time_goes(synthetic.batch, device)}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = environment.parser("step", "The optimizer step on synthetic crops.")
    parser.add_argument("--recipe", choices=RECIPES, default="imagenet-vit-s")
    parser.add_argument("--batch-size", type=int, default=512, help="images per step")
    parser.add_argument("--windows", type=int, default=8, help=f"timed ones, of {WINDOW} loaded batches each")
    parser.add_argument("--modes", choices=MODES, nargs="+", help="default: all of them on a GPU, eager on a CPU")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options, device = parse(arguments), environment.device()
    config = dataclasses.replace(RECIPES[options.recipe], batch_size=options.batch_size)
    windows, warm_up = options.windows, 3
    if options.smoke:
        config, windows, warm_up = dataclasses.replace(config, batch_size=2, **SMALL), 2, 1
    modes = options.modes or (MODES if device.type == "cuda" else ("eager",))
    flop = count_flop(Synthetic(config, device, mode="eager"), config.groups)
    result = {
        "recipe": config.recipe, "model": config.model, "batch_size": config.batch_size, "groups": config.groups,
        "flop_per_pair": flop / config.batch_size,
    }  # fmt: skip
    if options.smoke:
        result |= SMALL
    print(f"{config.recipe}, batch {config.batch_size}: {flop / config.batch_size / 1e9:.2f} GFLOP per pair")
    for mode in modes:
        result[mode] = measure_step(config, device, mode=mode, windows=windows, warm_up=warm_up)
        environment.save(options.json, "step", result)
        show(mode, result[mode])
    peak = matrix_product(device, 0.1 if options.smoke else 1)  # on a GPU as warm as it was
    result |= {"peak_flop_per_second": peak["best"], "dtype": peak["dtype"]}
    print()
    for mode in modes:
        result[mode]["mfu"] = result[mode]["pairs_per_second"] * result["flop_per_pair"] / peak["best"]
        print(f"{mode}: MFU {result[mode]['mfu']:.1%} of {peak['best'] / 1e12:,.2f} TFLOP/s ({peak['dtype']})")
    environment.save(options.json, "step", result)
    return 0


def show(mode: str, result: dict) -> None:
    seconds, memory, profiled = result["step_seconds"], result["peak_memory_bytes"], result["profile"]
    print(
        f"\n{mode}: {result['pairs_per_second']:,.1f} pairs/s, "
        f"step {seconds['p50'] * 1e3:.2f} ms ({seconds['p20'] * 1e3:.2f} to {seconds['p80'] * 1e3:.2f}), peak memory "
        f"{'-' if memory is None else f'{memory / 2**30:.2f} GiB'}, warm-up {result['warm_up_seconds']:.1f} s; "
        f"sampling and gathering {profiled['sampling_and_gathering_share']:.2%} of the time"
    )
    environment.print_table(profiled["top"][:SHOWN])
