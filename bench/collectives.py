"""What the optimizer step exchanges, on the one card that is here.

``alone``: the flat gradient of ViT-S reduced by NCCL among one rank (gloo on a CPU), and the same from a CUDA graph:
that it can be captured, and what it costs where nothing is sent. ``two``: steps of two gloo ranks that share the card
against those of one process on the same images, in float32: losses within rounding.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import run.ranks  # before there is a group: it says why  # noqa: F401
from bench import environment
from bench.findings import finding, number, without_figures
from bench.timing import measure
from run.recipes import RECIPES
from run.training import Training

NUMBERS = 35_000_000  # about as many as a ViT-S with its heads has
STEPS = 3  # roundings grow: 1e-6 after these, 1e-4 after one more (CPU); gradients that are not exchanged are 8e-3 off
TOLERANCE = 1e-3  # of the losses, relative; the sums of the ranks come in another order


def alone(device: torch.device, numbers: int, seconds: float) -> list[dict]:
    """A row for each way and type: {"how", "dtype", "us", "not_run" or "failed"}."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for dtype in torch.float32, torch.bfloat16:
        try:
            rows += _reduced(device, dtype, numbers, seconds)
        except RuntimeError as error:  # NCCL's too: the group is left as it is then, and two ranks do without
            why = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
            return [*rows, {"how": "all_reduce", "failed": why} | _about(dtype, numbers)]
    dist.destroy_process_group()  # for which NCCL waits until no graph holds it
    return rows


def _about(dtype: torch.dtype, numbers: int) -> dict:
    return {"dtype": str(dtype).removeprefix("torch."), "numbers": numbers}


def _reduced(device: torch.device, dtype: torch.dtype, numbers: int, seconds: float) -> list[dict]:
    on_gpu = device.type == "cuda"
    values = torch.randn(numbers, device=device).to(dtype)
    before = values.clone()
    calls = {"all_reduce": lambda: dist.all_reduce(values)}
    dist.all_reduce(values)
    if on_gpu:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
            dist.all_reduce(values)
        calls["all_reduce in a CUDA graph"] = graph.replay
    rows = [{"how": how, "us": time["p50"] * 1e6} for how, time in measure(calls, device, seconds=seconds).items()]
    if not on_gpu:
        rows.append({"how": "all_reduce in a CUDA graph", "not_run": "needs an NVIDIA GPU"})
    if not torch.equal(values, before):
        raise RuntimeError(f"a sum over one rank in {dtype} is not what went in")
    return [row | _about(dtype, numbers) for row in rows]


def losses(small: bool, device: torch.device, rank: int = 0, ranks: int = 1) -> list[float]:
    """Of the first steps of this rank, on its part of the images. A CUDA graph takes NCCL's collectives, not gloo's."""
    config = dataclasses.replace(
        RECIPES["imagenet-vit-s"], precision="float32", batch_size=8 if small else 64, depth=1 if small else 4,
        image_size=64 if small else 224, head_hidden=64 if small else 1024, lr=1e-4, warmup_epochs=0.0,
        cuda_graph=False,
    )  # fmt: skip
    training = Training(config, device, ranks=ranks, compiled=False)
    generator, b, side = torch.Generator().manual_seed(0), config.batch_size, config.image_size
    crops = [torch.randint(0, 256, (b, side, side, 3), generator=generator).byte() for _ in range(2)]
    patches = training.grid[0] * training.grid[1]
    order = torch.rand(2, b, STEPS, patches, generator=generator).argsort(-1)[..., : training.keep].int()
    mine = slice(rank * b // ranks, (rank + 1) * b // ranks)
    chosen = order[:, mine].to(device)
    groups = zip(*training.gather(tuple(crop[mine].to(device) for crop in crops), chosen), strict=True)
    return [training.step(*given, 0.5)[0][0].item() for given in groups]


def two(small: bool, device: torch.device) -> dict:
    """{"losses" of one process and of two ranks, "difference", "within"}, or {"failed"}."""
    whole = losses(small, device)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "bench", "collectives", "--worker", folder, *["--smoke"] * small]
        done = subprocess.run(command, cwd=environment.ROOT, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            return {"failed": (errors or done.stderr.splitlines()[-1:])[0]}
        parts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    mean = [sum(pair) / 2 for pair in zip(*parts, strict=True)]
    difference = max(abs(a - b) / b for a, b in zip(mean, whole, strict=True))
    within = difference <= TOLERANCE
    return {"one": whole, "two": mean, "difference": difference, "tolerance": TOLERANCE, "within": within}


def conclusions(d: dict) -> dict:
    found = []
    for row in d["alone"]:
        text = without_figures(row) or f"{number(row['us'])} us"
        found.append(finding(f"{row['how']}, one rank, {row['numbers']:,} numbers in {row['dtype']}", text))
    if "two" in d:
        of = d["two"]
        text = of.get("failed") or f"losses differ by {of['difference']:.1e} at most (tolerance {of['tolerance']:.0e})"
        found.append(finding("two gloo ranks on one device against one process", text))
    return {"findings": found}


def main(arguments: list[str]) -> int:
    parser = environment.parser("collectives", "What the optimizer step exchanges.")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options, device = parser.parse_args(arguments), environment.device()
    if options.worker is not None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        found = losses(options.smoke, device, rank, 2)
        (options.worker / f"{rank}.json").write_text(json.dumps(found))
        dist.destroy_process_group()
        return 0
    result = {"alone": alone(device, 10_000 if options.smoke else NUMBERS, 0.05 if options.smoke else 1)}
    environment.save(options, result | conclusions(result))
    result["two"] = two(options.smoke, device)
    environment.save(options, result | conclusions(result))
    print(json.dumps(result, indent=1))
    return int(not result["two"].get("within", False) or any("failed" in row for row in result["alone"]))
