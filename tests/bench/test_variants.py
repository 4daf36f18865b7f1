"""What no GPU has shown to pay yet is right all the same: each variant against the step that it changes."""

import dataclasses
import functools
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL as RUN
from conftest import metrics, run_program
from torch import nn

from bench import step
from bench.compile import _nvidia
from bench.step import Synthetic
from bench.variants import blocks, columns, compiled, mlp, one, turns
from bench.variants.changes import BY_NAME, VARIANTS, apply, compatible
from bench.variants.turns import SMALL, course
from run.recipes import RECIPES
from run.training import Training
from tests.kernels.interpreter import interpret, with_constant
from tests.run.test_recorded import on_paper, recording, steps  # noqa: F401
from tests.run.test_training import CONFIG as TRAINING

CPU = torch.device("cpu")
CONFIG = dataclasses.replace(RECIPES["imagenet-vit-s"], precision="float32", **SMALL)
TILE = mlp.Tile(16, 32, 16, 2, 4, 2, 1)


RANDOM = torch.Generator().manual_seed(0)
FEW = columns.__name__, "PROGRAMS", 2  # so that each has more than one round to make


def random(*shape):
    return torch.randn(*shape, generator=RANDOM)


def kernel_cases():
    """(launcher, its arguments, what it should give by the reference in float64), at odd sizes."""
    for rows, width in ((37, 40), (3, 96)):
        x = 3 + 2 * random(rows, width)
        mean, rstd = x.double().mean(1, keepdim=True), x.double().var(1, correction=0, keepdim=True).add(1e-6).rsqrt()
        args = random(rows, width), random(rows, width), x, mean.float(), rstd.float(), random(width)
        exact = [*map(torch.Tensor.double, args[:3]), mean, rstd, args[5].double()]
        yield (*FEW, columns.launch_norm, *args), columns._refer_norm(*exact)
    for launch, refer, *args in (
        (columns.launch_gelu, columns._refer_gelu, random(45, 300), 2 * random(45, 300)),
        (columns.launch_attention, columns._refer_attention, 2 * random(3, 17, 96), random(3, 17, 32), 2),
        (one.launch, one._refer, random(3, 1, 32), random(3, 17, 64), 2),
        (one.launch_backward, one._refer_backward, random(3, 1, 32), random(3, 17, 64), random(3, 1, 32), 2),
        (mlp.launch_up, mlp._refer_up, random(37, 20), random(72, 20), random(72)),
        (mlp.launch_down_backward, mlp._refer_down_backward, random(37, 20), random(20, 72), random(37, 72)),
    ):
        more = (TILE,) if launch.__module__.endswith("mlp") else ()
        wide = [x.double() if isinstance(x, torch.Tensor) else x for x in args]
        yield (*FEW, launch, *args, *more), refer(*wide)


def test_interpreted_kernels_equal_float64(tmp_path):
    calls, wanted = zip(*kernel_cases(), strict=True)
    found = interpret([(with_constant, call, {}) for call in calls], tmp_path)
    for got, want, call in zip(found, wanted, calls, strict=True):
        for mine, exact in zip(got, want, strict=True):
            torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5, msg=lambda m, x=call[3]: f"{x}: {m}")


def test_short_gelu_is_as_near_as_torchs():
    """To float64, the derivative too."""
    x = torch.linspace(-12, 12, 100_001, dtype=torch.float64, requires_grad=True)
    short = x.detach().float().requires_grad_()
    exact, near = nn.functional.gelu(x), blocks.ShortGelu()(short)
    torch.testing.assert_close(near.double(), exact, rtol=0, atol=1e-6)
    exact.sum().backward()
    near.sum().backward()
    torch.testing.assert_close(short.grad.double(), x.grad, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["norm", "gelu", "attention", "one", *mlp.TILES], ids=str)
def test_kernels_in_half_precision(kernels):
    """Distance to the float64 result of the same inputs, relative, at most 1.5 times that of torch's own operations in
    bfloat16; twice the same bits."""
    rows, width, hidden, wide = 2 * 37 * 50 + 3, 384, 1536, random(1536, 384)
    x, dy = 2 * random(rows, width), random(rows, width)
    mean, rstd = x.mean(1, keepdim=True), (x.var(1, correction=0, keepdim=True) + 1e-6).rsqrt()
    if isinstance(kernels, mlp.Tile):
        if reason := mlp.missing(torch.device("cuda")):
            pytest.skip(reason)
        up, down = (functools.partial(f, tile=kernels) for f in (mlp.launch_up, mlp.launch_down_backward))
        cases = [
            (up, mlp._refer_up, x, wide / width**0.5, random(hidden)),
            (down, mlp._refer_down_backward, dy, wide.T / width**0.5, random(rows, hidden)),
        ]
    elif kernels == "norm":
        cases = [(columns.launch_norm, columns._refer_norm, dy, random(rows, width), x, mean, rstd, random(width))]
    elif kernels == "gelu":
        cases = [(columns.launch_gelu, columns._refer_gelu, random(rows, hidden), random(rows, hidden))]
    elif kernels == "one":
        query, others = random(37, 1, width), random(37, 50, 2 * width)
        cases = [
            (one.launch, one._refer, query, others, 6),
            (one.launch_backward, one._refer_backward, query, others, random(37, 1, width), 6),
        ]
    else:
        size = 37, 50, width
        qkv = random(*size[:2], 3 * width)
        cases = [(columns.launch_attention, columns._refer_attention, qkv, random(*size), 6)]
    for launch, refer, *args in cases:
        half = [x.cuda().bfloat16() if isinstance(x, torch.Tensor) else x for x in args]
        if launch is columns.launch_norm:  # statistics and gamma are float32
            half[3:] = [x.cuda() for x in args[3:]]
        exact = refer(*(x.double() if isinstance(x, torch.Tensor) else x for x in half))
        found, again = launch(*half), launch(*half)
        for mine, twice, theirs, want in zip(found, again, refer(*half), exact, strict=True):
            distance, allowed = ((x.double() - want).norm() / want.norm() for x in (mine, theirs))
            assert distance <= 1.5 * allowed + 2**-10, (launch, distance, allowed)
            assert torch.equal(mine, twice), launch


def test_variants_take_the_steps_of_the_base(tmp_path, capsys):
    """Losses, gradients and keys within the stated tolerances; what needs a GPU is not run, and says so."""
    path = tmp_path / "variants.json"
    assert step.main(["--smoke", "--variants", "--json", str(path)]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    together = rows["together"]
    assert set(rows) == {*BY_NAME, "together"}
    for row in rows.values():
        missing = row["name"] in ("autotune", "compiled-loss")
        assert ("not_run" in row) == missing and row.get("within") == (None if missing else True), row
    assert "key-gelu" in together["applied"] and "fp8-keys" not in together["applied"]
    places = [BY_NAME[name].place or name for name in together["applied"]]
    assert len(places) == len(set(places)) == len({variant.place or variant.name for variant in VARIANTS}) - 2
    texts = [row["result"] for row in json.loads(path.read_text())["findings"]]
    assert sum(text.startswith("not run: needs an NVIDIA GPU") for text in texts) == 2
    assert step.main(["--smoke", "--variants", "key-gelu", "gelu"]) == 2
    assert "--variants gelu: expected some of autotune, " in capsys.readouterr().err


def test_what_takes_the_gpu_with_it_leaves_the_others_to_a_new_process(tmp_path, monkeypatch):
    """Which knows what came of those before, and says all."""
    path, begun = tmp_path / "variants.json", turns.apply
    arguments = ["--smoke", "--variants", "key-gelu", "both-views", "--json", str(path)]

    def broken(names, training):
        if "key-gelu" in names:
            raise RuntimeError("an illegal memory access\nand more")
        begun(names, training)

    def replaced(*command):
        raise SystemExit(command)

    monkeypatch.setattr(turns, "apply", broken)
    monkeypatch.setattr(turns.os, "execv", replaced)
    monkeypatch.setattr(turns, "lost", lambda device: True)
    with pytest.raises(SystemExit) as ended:
        step.main(arguments)
    assert ended.value.code == (sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:]])
    assert step.main(arguments) == 1 and turns.GO_ON not in os.environ
    failed, other, together = json.loads(path.read_text())["rows"]
    assert failed["failed"] == "RuntimeError: an illegal memory access"
    assert other["within"] and together["applied"] == ["both-views"]


def test_a_run_of_train_with_variants(photos, tmp_path):
    how = *RUN, "--data", photos, "--max-steps", "4", "--ema", "0.9", "--output"
    run_program("train.py", *how, tmp_path / "without")
    run_program("-m", "bench.variants.pretrain", "short-gelu,key-gelu", *how, tmp_path / "with")
    without, other = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("without", "with"))
    assert other != without and other == pytest.approx(without, rel=0.1)
    done = run_program("-m", "bench.variants.pretrain", "key-gelu", *how[:-3], "--output", tmp_path / "no", check=1)
    assert done.stderr.strip() == "bench.variants.pretrain key-gelu: there is no momentum network"


def test_compiled_as_one_graph():
    """On a GPU all is compiled, fullgraph; a second step compiles nothing. Of two for one place, a block each."""
    updated = []
    for in_graph in (False, True):
        torch.manual_seed(0)
        training = (synthetic := Synthetic(dataclasses.replace(CONFIG, depth=2), CPU, mode="eager")).training
        last = training.query.encoder.blocks[1:]
        if in_graph:
            how = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
            training.query, training.key = (torch.compile(x, **how) for x in (training.query, training.key))
        there = [v.name for v in VARIANTS if not v.missing(training)]
        apply(compatible(["fused-mlp", *there]), training)
        blocks.sum_in_gelu(SimpleNamespace(blocks=last))
        course(synthetic)
        with torch._dynamo.config.patch(error_on_recompile=True):
            synthetic.batch()
        updated.append(training.flat.values)
    torch.testing.assert_close(*updated, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("on_paper")
def test_recorded_steps_are_the_steps():
    """Bit for bit, all together, as CUDA graphs would repeat them: scales that follow."""
    found = []
    for how in (Training, recording):
        training = how(dataclasses.replace(TRAINING, depth=2), CPU)
        missing = {v.name for v in VARIANTS if v.missing(training)}
        apply(compatible(["fp8-keys", "fused-mlp", *(name for name in BY_NAME if name not in missing)]), training)
        found.append(steps(training, 3))
    assert len(training.recorded.graphs) == 4 and not training.recorded.failed
    assert torch.equal(*found)


def test_fp8_numbers():
    """A half of the last place of three bits off, at most; cut off where they grew by more than the margin."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-1, 1, 4096)
    scale = blocks.scales(x.abs().max())
    small = blocks.quantised(x, scale)
    normal = x.abs() > scale * 2**-6
    assert normal.sum() > 4000 and ((small.float() * scale - x).abs()[normal] <= 2**-4 * x.abs()[normal]).all()
    grown = blocks.quantised(3 * x, scale)
    torch.testing.assert_close(grown.float().abs().max() * scale, blocks.MARGIN * x.abs().max())


def test_fp8_scales_follow_the_numbers():
    """Those of weights as they are, those of inputs as they were, each layer's its own."""
    layers, x = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3))), random(5, 24)
    rescale = blocks.fp8(SimpleNamespace(blocks=layers), torch.float32)
    first, second, last = layers
    with torch.no_grad():
        for factor in (1, 3):
            rescale()
            inputs = factor * x, first(factor * x)
            second(inputs[1])
            second.weight *= 2
            rescale()
            for layer, given in zip((first, second), inputs, strict=True):
                wanted = [blocks.scales(numbers.abs().max()) for numbers in (given, layer.weight)]
                torch.testing.assert_close(torch.stack(layer.scales), torch.stack(wanted))
    assert type(last) is nn.Linear


def test_norm_on_an_h100():
    """Four programs share a multiprocessor, 16 bytes a load. (``bench compile`` has a table of all kernels.)"""
    name, kernel = next(compiled.compile_for(90))
    row = _nvidia(kernel)
    assert name == "norm_backward" and row["spilled_bytes"] == row["spill_instructions"] == 0, row
    assert row["registers"] <= 128 and max(row["load_bits"]) == max(row["store_bits"]) == 128, row
    assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"])  # sums in one order
