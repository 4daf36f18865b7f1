"""Every kernel once, for tools that look at each launch: ``bench sanitizer`` and ``bench counters`` run this."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import kernels
from bench import environment
from bench.all import GRACE, by_timeout
from bench.kernels import GROUPS, MEAN, POWER, SIZES, SMOKE_SIZES, STD, batch_of_boxes
from run.recipes import RECIPES
from run.training import Training

NAMES = (
    "sample_views", "patch_overlap", "gather_patches", "attention", "class_attention", "add_norm", "update",
    "layer_norm", "gelu",
)  # fmt: skip
HEADS = 6


def calls(device: torch.device, *, small: bool) -> dict[str, Callable]:
    """By ``NAMES``, at the sizes of ViT-S/16 at batch 512, or ``small``; "layer_norm" and "gelu" are torch's backward
    passes. In bfloat16 on a GPU."""
    size = (SMOKE_SIZES if small else SIZES)[0]
    config = RECIPES["imagenet-vit-s"]
    if small:
        config = dataclasses.replace(RECIPES["toy"], depth=1, head_hidden=32, ema=0.9, clip="vector")
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    boxes, flips, sample = batch_of_boxes(size.batch, device)
    shape = {"grid": size.grid, "keep": size.keep, "groups": GROUPS, "power": POWER, "seed": 0, "epoch": 0}
    side, tokens, width = size.side * size.patch, 2 * size.batch * (size.keep + 1), 64 * HEADS

    def random(*shape, **more):
        return torch.randn(shape, device=device, dtype=half, **more)

    def drawn():
        return kernels.sample_views(boxes, flips, sample, **shape)

    def overlap():
        kernels.patch_overlap(boxes, flips, drawn()[0], grid=size.grid)

    def gather():
        crops = [torch.randint(0, 256, (size.batch, side, side, 3), dtype=torch.uint8, device=device) for _ in range(2)]
        kernels.gather_patches(crops, torch.stack(drawn()), patch=size.patch, mean=MEAN, std=STD, dtype=half)

    def attention():
        qkv = random(2 * size.batch, size.keep + 1, 3 * width, requires_grad=True)
        out = kernels.attention(qkv, heads=HEADS)
        out.backward(random(*out.shape))

    def class_attention():
        query, others = random(2 * size.batch, 1, width), random(2 * size.batch, size.keep + 1, 2 * width)
        out = kernels.class_attention(query.requires_grad_(), others, random(2 * width), heads=HEADS)
        out.backward(random(*out.shape))

    def add_norm():
        rows, (gamma, beta) = (random(tokens, width, requires_grad=True), random(tokens, width)), random(2, width)
        out = kernels.add_norm(*rows, gamma, beta, eps=1e-6, bias=random(width))
        torch.autograd.backward(out, [random(tokens, width) for _ in out])

    def update():
        training = Training(config, device, compiled=False)
        training.flat.gradient.normal_()
        training.optimizer.set_rates(1e-3, 0.99)
        training.optimizer.step()

    def backward(function, numbers):
        x = random(tokens, numbers, requires_grad=True)
        function(x).backward(random(tokens, numbers))

    norm = torch.nn.LayerNorm(width, device=device, dtype=half)
    found = (
        drawn, overlap, gather, attention, class_attention, add_norm, update, lambda: backward(norm, width),
        lambda: backward(F.gelu, 4 * width),
    )  # fmt: skip
    return dict(zip(NAMES, found, strict=True))


def looked_at(tool: list[str], words: list[str], limit: int, **variables: str) -> tuple[str, int]:
    """What a tool and this program with ``words`` say, and the exit code: 124 or 137 after ``limit`` seconds."""
    began = time.monotonic()
    command = ["timeout", f"--kill-after={GRACE}", str(limit), *tool, sys.executable, "-m", "bench", "once", *words]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=environment.ROOT, env=os.environ | variables, **how) as process:
        try:
            said = process.communicate()[0]
            return said, by_timeout(process.returncode, time.monotonic() - began, limit)
        except BaseException:
            process.terminate()  # the tool must not outlive us; timeout hands it on
            raise


def main(arguments: list[str]) -> int:
    options = environment.parser("once", "Every kernel once.")
    options.add_argument("--kernels", choices=NAMES, nargs="+", default=list(NAMES))
    options.add_argument("--small", action="store_true", help="at small sizes")
    options = options.parse_args(arguments)
    device = environment.device()
    found = calls(device, small=options.small or options.smoke)
    for name in options.kernels:
        found[name]()  # compiles; what a tool looks at comes twice then
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(name, flush=True)
    return 0
