"""The products of a block, shape by shape: with each library, with GELU inside and behind, in bfloat16 and in fp8.

Shapes are those of ``bench/roofline.py``: [r,i] times [i,o] with r the tokens of both views of a batch. Three products
have the same FLOPs: ``forward``, ``input`` (its gradient, [r,o] times [o,i]) and ``weight`` ([o,r] times [r,i]).

How:

- ``default``: torch's product, by cuBLAS, but forward, which has the bias, by cuBLASLt. ``no bias``: forward without.
  ``cublaslt``: the other two passes where that library is preferred.
- ``fastest``: as a step has it on an H100 or H200 (``kernels/cublaslt.py``): the fastest of cuBLASLt's proposals that
  give torch's bits, or torch's; ``tried``: how many were asked; ``same_bits``: how many of these give them;
  ``workspace_bytes``: of the chosen one, None for torch's.
- of the layer before GELU: ``then GELU``: forward and GELU, one after the other; ``GELU inside``: cuBLASLt's epilogue
  (tanh form, nothing kept for a backward pass); ``GELU inside, fastest``: as above.
- of the layer behind GELU: ``then derivative``: the gradient of the input and the derivative of GELU, one after the
  other, from its input.
- ``fp8``: forward of e4m3 numbers with a scale a tensor each; making them is not in it.

What cannot run on a device is a row without times that says why; so is what fails, with exit code 1. Weights and
inputs are random numbers.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import environment
from bench.findings import bar, finding, number, plot, without_figures
from bench.roofline import Sizes
from bench.timing import matrix_product, measure_each
from kernels.cublaslt import Product, product
from run.recipes import RECIPES

MODELS = "imagenet-vit-s", "imagenet-vit-b"
NO_GPU = "needs an NVIDIA GPU"


def by_cublaslt(call: Callable) -> Callable:
    """``call`` with cuBLASLt preferred for products while it runs."""

    def preferred():
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            return call()
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return preferred


def without_fp8(device: torch.device) -> str:
    """Why there is no fast product of fp8 numbers here; "" where there is one."""
    if device.type != "cuda":
        return NO_GPU
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= (8, 9) else f"needs compute capability 8.9, this card has {capability}"


def alternatives(name: str, x: Tensor, weight: Tensor, bias: Tensor) -> dict[tuple[str, str], Callable | str]:
    """{(pass, how): call, or why it cannot run} of a layer by its name in a block; x [r,i], weight [o,i], bias [o]."""
    on_gpu = x.device.type == "cuda"
    device, out = x.device, torch.randn(len(x), len(weight), dtype=x.dtype, device=x.device)
    plain = {
        "forward": lambda: F.linear(x, weight, bias),
        "input": lambda: out @ weight,
        "weight": lambda: out.t() @ x,
    }
    calls: dict[tuple[str, str], Callable | str] = {}
    for what, call in plain.items():
        calls[what, "default"] = call
        if what != "forward":
            calls[what, "cublaslt"] = by_cublaslt(call) if on_gpu else NO_GPU

    def fastest(what: str, *operands: Tensor) -> Callable | str:
        return functools.partial(product(what, *x.shape, len(weight), x), *operands) if on_gpu else NO_GPU

    for what, operands in {"forward": (x, weight, bias), "input": (out, weight), "weight": (out, x)}.items():
        calls[what, "fastest"] = fastest(what, *operands)
    calls["forward", "no bias"] = lambda: x @ weight.t()
    if name == "fc1":
        calls["forward", "then GELU"] = lambda: F.gelu(F.linear(x, weight, bias))
        inside = lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True)  # noqa: E731
        calls["forward", "GELU inside"] = inside if on_gpu else NO_GPU
        calls["forward", "GELU inside, fastest"] = fastest("gelu", x, weight, bias)
    if name == "fc2":
        before = torch.randn_like(x)
        calls["input", "then derivative"] = lambda: torch.ops.aten.gelu_backward(out @ weight, before)
    calls["forward", "fp8"] = without_fp8(device) or _fp8(x, weight, bias)
    return calls


def _fp8(x: Tensor, weight: Tensor, bias: Tensor) -> Callable:
    small, smaller = (t.to(torch.float8_e4m3fn) for t in (x, weight))
    one = torch.ones((), device=x.device)
    more = {"scale_a": one, "scale_b": one, "bias": bias, "out_dtype": x.dtype, "use_fast_accum": True}
    return lambda: torch._scaled_mm(small, smaller.t(), **more)


def rows_of(recipe: str, batch: int, device: torch.device, seconds: float) -> Iterator[dict]:
    """A row for each product of a block and each way to it, layer by layer."""
    sizes = Sizes.of(dataclasses.replace(RECIPES[recipe], batch_size=batch))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = 2 * sizes.images * sizes.tokens
    for name, i, o in sizes.blocks:
        x, weight, bias = (torch.randn(shape, dtype=dtype, device=device) for shape in ((rows, i), (o, i), (o,)))
        calls = alternatives(name, x, weight, bias)
        times = measure_each(calls, device, seconds=seconds)
        for (what, how), call in calls.items():
            row = {"recipe": recipe, "layer": name, "shape": f"{rows} x {i} x {o}", "pass": what, "how": how}
            time = times[what, how]
            if isinstance(fastest := getattr(call, "func", None), Product):
                row |= {"tried": fastest.tried, "same_bits": fastest.same_bits}
                row |= {"workspace_bytes": fastest.chosen and fastest.chosen[1]}
            if "p50" in time:
                row |= {f"{p}_us": time[p] * 1e6 for p in ("p20", "p50", "p80")}
                row |= {"flop_per_second": 2 * rows * i * o / time["p50"]}
            yield row if "p50" in time else row | time


def conclusions(d: dict) -> dict:
    """Of each layer and pass the rate by default, and of the others those that differ, as times of it; all as bars."""
    found, panels = [], {}
    measured = [row for row in d["rows"] if "flop_per_second" in row]
    for recipe, layer, what in dict.fromkeys((row["recipe"], row["layer"], row["pass"]) for row in measured):
        of = {"recipe": recipe, "layer": layer, "pass": what}
        ways = {row["how"]: row for row in measured if of.items() <= row.items()}
        (how, first), *others = ways.items()  # the first by default, unless that failed
        rate = f"{number(first['flop_per_second'] / 1e12)} TFLOP/s, {number(first['p50_us'])} us"
        rate += f" ({how})" * (how != "default")
        others = (
            f"{how} {number(row['p50_us'])} us"
            + (f" ({row['same_bits']} of {row['tried']} have torch's bits)" if "tried" in row else "")
            for how, row in others
        )
        found.append(finding(f"product {layer}, {what}, {recipe} ({first['shape']}, {d['dtype']})", rate, *others))
    for row in measured:
        rates = (row["flop_per_second"] * row["p50_us"] / row[f"{p}_us"] / 1e12 for p in ("p50", "p80", "p20"))
        label = f"{row['layer']} {row['pass']}: {row['how']}"
        panels.setdefault(row["recipe"], []).append(bar(label, *rates, ours=row["how"] == "default"))
    missing = dict.fromkeys(f"{row['how']}: {said}" for row in d["rows"] if (said := without_figures(row)))
    if missing:
        found.append(finding("products without figures", *missing))
    return {"findings": found, "plots": [plot("Products of a block", "TFLOP/s (p20 to p80)", panels)]}


def main(arguments: list[str]) -> int:
    options = environment.parser("products", "The products of a block, shape by shape.")
    options.add_argument("--recipe", choices=MODELS, nargs="+", default=list(MODELS))
    options.add_argument("--batch-size", type=int, default=512, help="images per step")
    options = options.parse_args(arguments)
    device, batch, seconds = environment.device(), options.batch_size, 0.5
    if options.smoke:
        batch, seconds = 2, 0.01
    best = matrix_product(device, 0.1 if options.smoke else 1)
    result = {"batch_size": batch, "dtype": best["dtype"], "best_flop_per_second": best["best"], "rows": []}
    for recipe in options.recipe:
        for _, rows in itertools.groupby(rows_of(recipe, batch, device, seconds), lambda row: row["layer"]):
            result["rows"] += rows
            environment.save(options, result | conclusions(result))
    columns = ("recipe", "layer", "shape", "pass", "how", "tried", "same_bits", "p20_us", "p50_us", "p80_us")
    environment.print_table([
        {column: row.get(column) for column in columns}
        | {"TFLOP/s": row.get("flop_per_second", 0) / 1e12 or None, "why none": without_figures(row)}
        for row in result["rows"]
    ])  # fmt: skip
    return int(any("failed" in row for row in result["rows"]))
