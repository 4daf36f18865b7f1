"""The optimizer step of train.py on synthetic crops: pairs/s, share of the peak, memory, and where the time goes.

A pair is one optimizer sample: both views of one image. Work is counted by ``torch.utils.flop_counter`` over one eager
step: matrix products and attention, forward, backward and keys, 2 FLOP per multiply-add; element-wise operations, the
optimizer and the sampling count nothing. MFU is that work per second over the best matrix product measured in the same
process (bfloat16 on a GPU, float32 on a CPU). A step's time is a loaded batch's, sampling of all its groups included,
over the number of groups; loading and logging are not in it. Modes: ``eager``; ``blocks``, with torch.compile on each
transformer block; ``compiled``, with torch.compile on the whole of both networks, which takes a minute and more.
"""

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from bench import environment
from bench.kernels import batch_of_boxes
from bench.timing import matrix_product, summary
from kernels import gather_patches, sample_views
from model import AdaptiveClip, QueryNetwork, clip_units, contrastive_loss, update_momentum
from run.recipes import RECIPES, Config, learning_rate, momentum_coefficient
from run.session import new_encoder, plan_patches

SMALL = {"depth": 1, "head_hidden": 64}  # what ``--smoke`` changes in a recipe
MODES = "eager", "blocks", "compiled"
TOP = 15  # rows of the profile


class Training:
    """What train.py holds on one GPU. ``batch()`` makes one loaded batch into ``config.groups`` optimizer steps."""

    def __init__(self, config: Config, device: torch.device, *, mode: str):
        self.config, self.device, self.step = config, device, 0
        self.patch, self.grid, self.keep = plan_patches(config)
        self.network = QueryNetwork(
            new_encoder(config), hidden=config.head_hidden, out=config.head_out, seed=config.seed,
            projector_layers=config.projector_layers, predictor_layers=config.predictor_layers,
        ).to(device)  # fmt: skip
        self.key_network = self.network.key_network() if config.ema is not None else None
        learning = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            learning, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=device.type == "cuda"
        )
        self.clip = AdaptiveClip(
            clip_units(self.network), momentum=config.clip_momentum, alpha=config.clip_alpha, variant=config.clip
        )
        self.query, self.key = self.network, self.key_network
        if mode == "blocks":
            for network in filter(None, (self.network, self.key_network)):
                for block in network.encoder.blocks:
                    block.compile(dynamic=False)
        elif mode == "compiled":
            self.query = torch.compile(self.network, dynamic=False)
            self.key = self.key_network and torch.compile(self.key_network, dynamic=False)
        shape = config.batch_size, config.image_size, config.image_size, 3
        self.crops = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(2)]
        self.boxes = batch_of_boxes(config.batch_size, device)

    def batch(self) -> None:
        config = self.config
        first, second = sample_views(
            *self.boxes, grid=self.grid, keep=self.keep, groups=config.groups, power=config.power, seed=config.seed,
            epoch=self.step,
        )  # fmt: skip
        for group in range(config.groups):
            self.optimize(torch.stack([first[:, group], second[:, group]]))

    def optimize(self, chosen: torch.Tensor) -> None:
        """The body of the loop in train.py; ``chosen``: int32 [2,B,K]."""
        config, on_gpu = self.config, self.device.type == "cuda"
        half = torch.bfloat16 if on_gpu else torch.float32
        progress = self.step * 1e-4  # passes over the images
        self.optimizer.param_groups[0]["lr"] = learning_rate(config, progress)
        patches = torch.stack([
            gather_patches(crops, view, patch=self.patch, mean=config.mean, std=config.std, dtype=half)
            for crops, view in zip(self.crops, chosen, strict=True)
        ])  # fmt: skip
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            queries, projections = self.query(patches, chosen)
            with torch.no_grad():
                keys = self.key(patches, chosen) if self.key is not None else projections
            loss, _ = contrastive_loss(queries, keys, config.temperature)
        loss.backward()
        if config.clip != "off":
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.key_network is not None:
            update_momentum(self.key_network, self.network, momentum_coefficient(config, progress))
        self.step += 1


def count_flop(training: Training) -> int:
    """FLOP of one optimizer step."""
    with FlopCounterMode(display=False) as counter:
        training.batch()
    return counter.get_total_flops() // training.config.groups


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(training: Training, *, batches: int) -> dict:
    """Seconds of an optimizer step, from the wall clock around each of so many loaded batches."""
    seconds = []
    for _ in range(batches):
        wait(training.device)
        start = time.perf_counter()
        training.batch()
        wait(training.device)
        seconds.append((time.perf_counter() - start) / training.config.groups)
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


def measure_step(config: Config, device: torch.device, *, mode: str, batches: int, warm_up: int) -> dict:
    on_gpu = device.type == "cuda"
    training = Training(config, device, mode=mode)
    if on_gpu:
        gc.collect()  # what is left of the mode before
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    for _ in range(warm_up):
        training.batch()
    wait(device)
    result = {"warm_up_seconds": time.perf_counter() - start}  # compiling included
    result["step_seconds"] = time_steps(training, batches=batches)
    result["pairs_per_second"] = config.batch_size / result["step_seconds"]["p50"]
    result["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return result | {"profile": where_time_goes(training.batch, device)}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = environment.parser("step", "The optimizer step on synthetic crops.")
    parser.add_argument("--recipe", choices=RECIPES, default="imagenet-vit-s")
    parser.add_argument("--batch-size", type=int, default=512, help="images per step")
    parser.add_argument("--batches", type=int, default=20, help="loaded batches that are timed; 4 steps each")
    parser.add_argument("--modes", choices=MODES, nargs="+", help="default: all of them on a GPU, eager on a CPU")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options, device = parse(arguments), environment.device()
    config = dataclasses.replace(RECIPES[options.recipe], batch_size=options.batch_size)
    batches, warm_up = options.batches, 3
    if options.smoke:
        config, batches, warm_up = dataclasses.replace(config, batch_size=2, **SMALL), 2, 1
    modes = options.modes or (MODES if device.type == "cuda" else MODES[:1])
    peak = matrix_product(device, 0.1 if options.smoke else 1)
    flop = count_flop(Training(config, device, mode="eager"))
    result = {
        "recipe": config.recipe, "model": config.model, "batch_size": config.batch_size, "groups": config.groups,
        "flop_per_pair": flop / config.batch_size, "peak_flop_per_second": peak["best"], "dtype": peak["dtype"],
    }  # fmt: skip
    if options.smoke:
        result |= SMALL
    print(f"{config.recipe}, batch {config.batch_size}: {flop / config.batch_size / 1e9:.2f} GFLOP per pair")
    for mode in modes:
        result[mode] = measure_step(config, device, mode=mode, batches=batches, warm_up=warm_up)
        result[mode]["mfu"] = result[mode]["pairs_per_second"] * result["flop_per_pair"] / peak["best"]
        environment.save(options.json, "step", result)
        show(mode, result[mode])
    return 0


def show(mode: str, result: dict) -> None:
    seconds, memory, profiled = result["step_seconds"], result["peak_memory_bytes"], result["profile"]
    print(
        f"\n{mode}: {result['pairs_per_second']:,.1f} pairs/s, MFU {result['mfu']:.1%}, "
        f"step {seconds['p50'] * 1e3:.2f} ms ({seconds['p20'] * 1e3:.2f} to {seconds['p80'] * 1e3:.2f}), peak memory "
        f"{'-' if memory is None else f'{memory / 2**30:.2f} GiB'}, warm-up {result['warm_up_seconds']:.1f} s; "
        f"sampling and gathering {profiled['sampling_and_gathering_share']:.2%} of the time"
    )
    environment.print_table(profiled["top"])
