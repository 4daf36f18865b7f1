"""What lies between the products of a block, pass by pass: as the compiler makes it, and in the forms of the step.

Shapes are those of ``bench/roofline.py``, in bfloat16 on a GPU. ``share_of_copy``: of the rate of a copy, counting what
has to be read and written once, in numbers:

- ``norm``: s = stream + branch and y = norm(s), 4; backward with the gradients of gamma, beta and of the bias of the
  product that wrote the branch, 4;
- ``gelu``: 2; backward with the gradient of its product's bias, 3;
- ``class attention``: of the class token, 2 a token and dimension; backward 4.

How: ``compiled`` by Inductor (on a CPU: as torch has it); ``short``: GELU in fewer instructions, compiled
(``model/faster.py``); ``kernel``: ours, in several tiles, of the norm the first as a step has it, of GELU as a variant
(with sums of columns by parts of the rows, which are still to be added). What cannot run on a device is a row without
times that says why; so is what fails, with exit code 1.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import environment
from bench.findings import bar, finding, number, percent, plot, without_figures
from bench.products import NO_GPU
from bench.roofline import Sizes
from bench.timing import copy_bandwidth, measure_each
from bench.variants import columns
from kernels import attention_of_one, class_token, residual_norm
from kernels.reference import wide
from model.faster import ShortGelu
from run.recipes import RECIPES

SECONDS = 0.3  # of all ways of a pass


def both(function: Callable, *inputs: Tensor) -> tuple[Callable, Callable]:
    """A function compiled: calls of its forward and of its backward pass, to all inputs."""
    for tensor in inputs:
        tensor.requires_grad_()
    on_gpu = inputs[0].device.type == "cuda"
    call = torch.compile(function, dynamic=False, fullgraph=True) if on_gpu else function

    @functools.cache
    def done():
        out = call(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        return out, [torch.randn_like(tensor) for tensor in out]

    def backward():
        out, gradients = done()
        return torch.autograd.grad(out, inputs, gradients, retain_graph=True)

    return functools.partial(call, *inputs), backward


def add_norm(stream, branch, bias, gamma, beta):
    total = stream + (branch + bias)
    return total, F.layer_norm(wide(total), total.shape[-1:], gamma, beta, 1e-6).to(total.dtype)


def passes(images: int, tokens: int, width: int, hidden: int, heads: int, device, dtype) -> Iterator[tuple]:
    """(pass, numbers that have to move, {how: call}) of so many images a view."""

    def random(*shape, kind=dtype):
        return torch.randn(*shape, dtype=kind, device=device)

    rows, full = 2 * images * tokens, torch.promote_types(dtype, torch.float32)
    stream, branch, gamma, beta = random(rows, width), random(rows, width), *random(2, width, kind=full)
    forward, backward = both(add_norm, stream, branch, random(width), gamma, beta)
    yield "norm", 4 * rows * width, {"compiled": forward}
    given = [x.detach() for x in (branch, stream, stream)]
    given += [wide(given[1]).mean(1, keepdim=True), torch.ones(rows, 1, dtype=full, device=device)]
    given.append(gamma.detach())
    kernels = {f"kernel, {of}": functools.partial(residual_norm._launch, *given, of) for of in residual_norm.TILES}
    yield "norm, backward", 4 * rows * width, {"compiled": backward, **kernels}
    del stream, branch, given, kernels

    x, bias = random(rows, hidden), random(hidden)
    forward, backward = both(lambda x, bias: F.gelu(x + bias), x, bias)
    short, short_backward = both(lambda x, bias: ShortGelu()(x + bias), x, bias)
    yield "gelu", 2 * rows * hidden, {"compiled": forward, "short": short}
    given = torch.randn_like(x), x.detach()
    kernels = {f"kernel, {of}": functools.partial(columns.launch, *given, of) for of in columns.TILES}
    yield "gelu, backward", 3 * rows * hidden, {"compiled": backward, "short": short_backward, **kernels}
    del x, given, kernels

    if not class_token.takes(tokens, width // heads):
        return
    query, others = random(2 * images, 1, width), random(2 * images, tokens, 2 * width)
    forward, backward = both(functools.partial(attention_of_one, heads=heads), query, others)
    given = query.detach(), others.detach()
    kernel = functools.partial(class_token._launch, *given, heads)
    yield "class attention", 2 * rows * width, {"compiled": forward, "kernel": kernel}
    kernel = functools.partial(class_token._launch_backward, *given, torch.randn_like(given[0]), heads)
    yield "class attention, backward", 4 * rows * width, {"compiled": backward, "kernel": kernel}


def conclusions(d: dict) -> dict:
    """Of each pass the compiler's time, and the kernels' as times of it; all as bars."""
    found, panels = [], {}
    for what in dict.fromkeys(row["pass"] for row in d["rows"]):
        ways = [row for row in d["rows"] if row["pass"] == what]
        said = [
            f"{row['how']} {number(row['p50_us'])} us, {percent(row['share_of_copy'])}"
            if "p50_us" in row
            else f"{row['how']}: {without_figures(row)}"
            for row in ways
        ]
        of = f"{d['recipe']}, batch {d['batch_size']}, {d['dtype']}"
        found.append(finding(f"pass {what}, {of}, share of the copy rate", *said))
        panels[what] = [
            bar(row["how"], *(row[f"{p}_us"] for p in ("p50", "p20", "p80")), ours=row["how"] == "compiled")
            for row in ways
            if "p50_us" in row
        ]
    return {"findings": found, "plots": [plot("Between the products", "us (p20 to p80)", panels)]}


def main(arguments: list[str]) -> int:
    options = environment.parser("passes", "What lies between the products of a block, pass by pass.")
    options.add_argument("--recipe", choices=RECIPES, default="imagenet-vit-s")
    options.add_argument("--batch-size", type=int, default=512, help="images per step")
    options = options.parse_args(arguments)
    device, config = environment.device(), RECIPES[options.recipe]
    images, seconds = (2, 0.01) if options.smoke else (options.batch_size, SECONDS)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = Sizes.of(config)
    copy = copy_bandwidth(device, 0.1 if options.smoke else 1)["p50"]
    result = {
        "recipe": options.recipe, "batch_size": images, "dtype": str(dtype).removeprefix("torch."),
        "copy_bytes_per_second": copy, "rows": [],
    }  # fmt: skip
    shape = images, sizes.tokens, sizes.width, sizes.hidden, sizes.heads
    for what, numbers, ways in passes(*shape, device, dtype):
        if device.type != "cuda":
            ways = {how: NO_GPU if how.startswith("kernel") else call for how, call in ways.items()}
        for how, time in measure_each(ways, device, seconds=seconds).items():
            row = {"pass": what, "how": how, "bytes": numbers * dtype.itemsize}
            if "p50" in time:
                row |= {f"{p}_us": time[p] * 1e6 for p in ("p20", "p50", "p80")}
                time = {"share_of_copy": row["bytes"] / time["p50"] / copy}
            result["rows"].append(row | time)
        environment.save(options, result | conclusions(result))
    shown = "pass", "how", "p20_us", "p50_us", "p80_us", "share_of_copy"
    environment.print_table([
        {column: row.get(column) for column in shown} | {"why none": without_figures(row)} for row in result["rows"]
    ])  # fmt: skip
    return int(any("failed" in row for row in result["rows"]))
