"""What no GPU has shown to pay yet is right all the same: each variant against the step that it changes."""

import ctypes
import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL as RUN
from conftest import metrics, run_program
from torch import nn

from bench import step
from bench.step import Synthetic
from bench.variants import blocks, columns, memsets, turns
from bench.variants.changes import BY_NAME, VARIANTS, apply, compatible
from bench.variants.turns import SMALL, course
from kernels.residual_norm import Tile
from model import faster
from run.recipes import RECIPES
from run.training import Training
from tests.kernels.interpreter import interpret
from tests.run.test_recorded import on_paper, recording, steps  # noqa: F401
from tests.run.test_training import CONFIG as TRAINING

CPU = torch.device("cpu")
CONFIG = dataclasses.replace(RECIPES["imagenet-vit-s"], precision="float32", **SMALL)


RANDOM = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=RANDOM)


def test_variants_take_the_steps_of_the_base(tmp_path, capsys):
    """Losses, gradients and keys within the stated tolerances; what needs a GPU is not run, and says so."""
    path = tmp_path / "variants.json"
    assert step.main(["--smoke", "--variants", "--json", str(path)]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    together = rows["together"]
    assert set(rows) == {*BY_NAME, "together"}
    for row in rows.values():
        missing = row["name"] in ("kernel-memsets", "compiled-loss")
        assert ("not_run" in row) == missing and row.get("within") == (None if missing else True), row
    assert "key-gelu" in together["applied"] and "fp8-keys" not in together["applied"]
    places = [BY_NAME[name].place or name for name in together["applied"]]
    assert len(places) == len(set(places)) == len({variant.place or variant.name for variant in VARIANTS}) - 2
    texts = [row["result"] for row in json.loads(path.read_text())["findings"]]
    assert sum(text.startswith("not run: needs an NVIDIA GPU") for text in texts) == 2
    assert step.main(["--smoke", "--variants", "key-gelu", "gelu"]) == 2
    assert "--variants gelu: expected some of both-views, " in capsys.readouterr().err


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
    run_program("-m", "bench.variants.pretrain", "both-views,key-gelu", *how, tmp_path / "with")
    without, other = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("without", "with"))
    assert other != without and other == pytest.approx(without, rel=0.1)
    done = run_program("-m", "bench.variants.pretrain", "key-gelu", *how[:-3], "--output", tmp_path / "no", check=1)
    assert done.stderr.strip() == "bench.variants.pretrain key-gelu: there is no momentum network"


def test_compiled_as_one_graph():
    """On a GPU all is compiled, fullgraph; a second step compiles nothing."""
    updated = []
    for in_graph in (False, True):
        torch.manual_seed(0)
        training = (synthetic := Synthetic(dataclasses.replace(CONFIG, depth=2), CPU, mode="eager")).training
        faster.put_in(training.query, None)
        if in_graph:
            how = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
            training.query, training.key = (torch.compile(x, **how) for x in (training.query, training.key))
        apply(compatible([v.name for v in VARIANTS if not v.missing(training)]), training)
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
        apply(compatible(["fp8-keys", *(name for name in BY_NAME if name not in missing)]), training)
        found.append(steps(training, 3))
    assert len(training.recorded.graphs) == 4 and not training.recorded.failed
    assert torch.equal(*found)


@pytest.mark.parametrize("of", [columns.TILES[0], Tile(2048, 4, 3, 4)], ids=str)
def test_columns_of_gelus_gradient(of, tmp_path):
    """Of rows and columns that fill no tile, in one round of a program and in several; torch's in float64."""
    x, gradient, bias = random(3, 13, 200), random(3, 13, 200), random(200).double().requires_grad_()
    ((out, parts),) = interpret([(columns.launch, (gradient, x, of), {})], tmp_path)
    inputs = x.double().requires_grad_(), bias
    wanted = torch.autograd.grad(nn.functional.gelu(inputs[0] + bias - bias.detach()), inputs, gradient.double())
    assert len(parts) == columns.shares(39, 200, of)[0] == (5 if of == columns.TILES[0] else 2)
    torch.testing.assert_close((out.double(), parts.sum(0).double()), wanted, rtol=1e-5, atol=1e-5)


class Library:
    """What ``memsets`` calls of CUDA, on a graph of {node: what it is} and {(from, to): data of the edge}."""

    def __init__(self, nodes, edges):
        self.nodes, self.edges = nodes, edges

    def listed(self, found, nodes, count, data=None):
        for place, (node, of) in enumerate(found if nodes else ()):
            nodes[place] = node
            if data:
                data[place] = of
        count._obj.value = len(found)

    def cuGraphGetNodes(self, _, nodes, count):
        self.listed([(node, 0) for node in self.nodes], nodes, count)

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = 2 * isinstance(self.nodes[node.value], memsets.Memset)

    def cuGraphMemsetNodeGetParams(self, node, found):
        ctypes.pointer(found._obj)[0] = self.nodes[node.value]

    def cuGraphNodeGetDependencies_v2(self, node, nodes, data, count):
        self.listed([(a, of) for (a, b), of in self.edges.items() if b == node.value], nodes, count, data)

    def cuGraphNodeGetDependentNodes_v2(self, node, nodes, data, count):
        self.listed([(b, of) for (a, b), of in self.edges.items() if a == node.value], nodes, count, data)

    def cuGraphAddKernelNode_v2(self, new, _, before, count, launch):
        new._obj.value = max(self.nodes) + 1
        given = [ctypes.cast(launch._obj.parameters[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in (0, 2, 3)]
        size = ctypes.cast(launch._obj.parameters[1], ctypes.POINTER(ctypes.c_int))[0]
        self.nodes[new._obj.value] = launch._obj.function, *launch._obj.grid, *launch._obj.block, size, *given
        self.edges |= {(node, new._obj.value): 0 for node in before[: count.value]}

    def cuGraphAddDependencies_v2(self, _, begin, end, data, count):
        self.edges |= dict(zip(zip(begin[: count.value], end, strict=True), data, strict=True))

    def cuGraphDestroyNode(self, node):
        del self.nodes[node.value]
        self.edges = {edge: data for edge, data in self.edges.items() if node.value not in edge}


def test_memsets_become_kernels():
    """In their place, those of a few bytes of 0; what the edges behind them carry is kept."""
    large, of_ones, two_rows = (memsets.Memset(8, 0, *of) for of in ((0, 1, 129, 1), (1, 1, 4, 1), (0, 1, 4, 2)))
    small, first = memsets.Memset(4096, 0, 0, 4, 3, 1), memsets.Memset(64, 0, 0, 1, 128, 1)
    nodes = {1: "kernel", 2: small, 3: "kernel", 4: large, 5: of_ones, 6: two_rows, 7: first, 8: "kernel"}
    edges = {(1, 2): 0, (8, 2): 0, (2, 3): 5, (2, 4): 0, (4, 5): 0, (5, 6): 0, (7, 1): 0}
    library = Library(dict(nodes), dict(edges))
    assert memsets.to_kernels(library, 99, 77) == 2
    new = {2: 9, 7: 10}
    assert library.edges == {(new.get(a, a), new.get(b, b)): data for (a, b), data in edges.items()}
    assert library.nodes == {n: of for n, of in nodes.items() if n not in new} | {
        9: (77, 1, 1, 1, 32, 1, 1, 12, 4096, 0, 0), 10: (77, 1, 1, 1, 32, 1, 1, 128, 64, 0, 0)
    }  # fmt: skip


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
