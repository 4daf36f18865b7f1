"""Of cuBLASLt's proposals only one with torch's bits is taken: by an imitation of the library, and on a GPU."""

import ctypes
import functools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels import cublaslt

# Algorithms of the imitation. The first five, as quick as the last one, are refused, write nothing, write not all,
# round one number otherwise, and add up in another order.
REFUSED, EMPTY, PART, ROUNDED, TURNED, SLOW, QUICK = range(7)
WORKSPACE = {TURNED: 4, QUICK: 8}
SHAPES = 7, 20, 12  # rows, inputs, outputs
RANDOM = torch.Generator().manual_seed(0)


def operands(what, rows, inputs, outputs, **how):
    x, weight, gradient = ((rows, inputs), (outputs, inputs), (rows, outputs))
    shapes = {"input": (gradient, weight), "weight": (gradient, x)}.get(what, (x, weight, (outputs,)))
    return [torch.randn(shape, generator=RANDOM).to(**how) for shape in shapes]


def added(what, first, second, *bias, turned=False):
    """A product, of which one term is added after the other, so that its bits do not depend on how the operands lie."""
    first, second = (x.movedim(dim, 1) for x, dim in zip((first, second), cublaslt.SUMMED[what], strict=True))
    out = torch.zeros(len(first), len(second), dtype=first.dtype)
    for number in range(first.shape[1])[:: -1 if turned else 1]:
        out += first[:, number, None] * second[:, number]
    out = out + bias[0] if bias else out
    return F.gelu(out, approximate="tanh") if what == "gelu" else out


class Library:
    """cuBLASLt on a CPU, in float32, as far as it is needed, with these algorithms."""

    def __init__(self, *algorithms):
        self.algorithms, self.made, self.asked, self.ran = algorithms, [], [], []

    def __getattr__(self, name):
        return functools.partial(self._create if name.endswith("Create") else self._set, name)

    def _create(self, name, made, *values):
        self.made.append({"values": [getattr(value, "value", value) for value in values]})
        made._obj.value = len(self.made)

    def _set(self, name, of, attribute, value, size):
        assert name.endswith("SetAttribute") and size.value == ctypes.sizeof(value._obj)
        self.made[of.value - 1][attribute] = value._obj.value

    def cublasLtMatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, most, found, count):
        of, asked = self.made[operation.value - 1], self.made[preference.value - 1]
        assert (cublaslt.BIAS in of) == (of[cublaslt.EPILOGUE] != 1)
        assert [asked[attribute] for attribute in cublaslt.ALIGNMENTS] == 4 * [cublaslt.ALIGNMENT]
        limit = asked[cublaslt.MAX_WORKSPACE]
        self.asked.append((limit, most))
        there = [number for number in self.algorithms if WORKSPACE.get(number, 0) <= limit]
        for place, number in enumerate(there):
            found[place].algorithm[0], found[place].workspace = number, WORKSPACE.get(number, 0)
        count._obj.value = len(there)

    def cublasLtMatmul(self, handle, operation, one, a, of_a, b, of_b, zero, c, of_c, d, of_d, algorithm, *more):
        (workspace, size, _), of, number = more, self.made[operation.value - 1], algorithm._obj[0]
        assert size.value == WORKSPACE.get(number, 0) and bool(workspace.value) == bool(size.value)
        self.ran.append(number)
        if number in (REFUSED, EMPTY):
            return 15 * (number == REFUSED)
        time.sleep(0.005 * (number == SLOW))
        # Column by column: a tensor of torch is the transposed.
        second, first, out = (self._tensor(*pair) for pair in ((a, of_a), (b, of_b), (d, of_d)))
        bias = [self._numbers(of[cublaslt.BIAS], out.shape[1])] if of[cublaslt.EPILOGUE] != 1 else []
        what = {4: "forward", 36: "gelu"}.get(of[cublaslt.EPILOGUE])
        what = what or ("weight" if of[cublaslt.TRANSPOSED_B] else "input")
        turned = of[cublaslt.TRANSPOSED_A], of[cublaslt.TRANSPOSED_B]
        assert turned == {"input": (0, 0), "weight": (0, 1)}.get(what, (1, 0))
        right = added(what, first, second, *bias, turned=number == TURNED)
        rows = len(right) - (number == PART)
        out[:rows] = right[:rows]
        out.view(torch.int32)[-1, -1] += number == ROUNDED

    def _tensor(self, pointer, layout):
        kind, rows, columns, stride = self.made[layout.value - 1]["values"]
        assert kind == cublaslt.KINDS[torch.float32] and stride == rows
        return self._numbers(pointer.value, rows * columns).view(columns, rows)

    def _numbers(self, address, number):
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_float * number).from_address(address)))


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return end.time - self.time


@pytest.fixture
def imitated(monkeypatch):
    """A function that makes a library of some algorithms the one there is; torch's own product is slow."""
    stream = SimpleNamespace(cuda_stream=None)
    for name, value in {
        "Event": Event, "synchronize": lambda: None, "_sleep": lambda cycles: None, "current_stream": lambda: stream,
        "current_blas_handle": lambda: 1,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)

    def own(what, *operands):
        time.sleep(0.005)
        return added(what, *operands)

    def of(*algorithms):
        library = Library(*algorithms)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(cublaslt, "_library", lambda: library)
        monkeypatch.setattr(cublaslt, "_product", functools.cache(cublaslt.Product))
        monkeypatch.setattr(cublaslt, "TURNS", (1, 3))
        monkeypatch.setattr(cublaslt, "OWN", {what: functools.partial(own, what) for what in cublaslt.OWN})
        return library

    return of


@pytest.mark.parametrize("what", cublaslt.OWN)
def test_the_fastest_with_torchs_bits_is_taken(imitated, what):
    """And none that is faster without; if none has them, torch's. Chosen once, with random numbers of its own."""
    wrong, state = (REFUSED, EMPTY, PART, ROUNDED, TURNED), torch.get_rng_state()
    tensors = operands(what, *SHAPES)
    for right, chosen in (((SLOW, QUICK), QUICK), ((SLOW,), None), ((), None)):
        library = imitated(*wrong, *right)
        for _ in range(2):
            product = cublaslt.product(what, *SHAPES, tensors[0])
            assert torch.equal(product(*tensors), added(what, *tensors))
            assert chosen is None or library.ran[-1] == chosen
        assert library.asked == list(cublaslt.PROPOSED.items())
        assert (product.tried, product.same_bits) == (len(wrong + right), len(right))
        if chosen is not None:
            assert product.chosen[1] == WORKSPACE[chosen]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("what", ["forward", "gelu", "input"])
def test_torchs_product_is_not_taken_where_its_bits_depend_on_how_weights_lie(what, imitated, monkeypatch):
    """Unless none other has those that it has for operands by themselves: another process might take another."""
    tensors = operands(what, *SHAPES)
    for algorithms, chosen in (((TURNED, SLOW), SLOW), ((TURNED,), None)):
        library = imitated(*algorithms)
        quick = {what: lambda *given: added(what, *given, turned=given[1].storage_offset() > 0)}
        monkeypatch.setattr(cublaslt, "OWN", quick)
        product = cublaslt.product(what, *SHAPES, tensors[0])
        assert torch.equal(product(*tensors), added(what, *tensors))
        assert (product.chosen is None) == (chosen is None) and chosen in (None, library.ran[-1])


def test_torchs_product_where_there_is_no_library(imitated, monkeypatch):
    """Of this CUDA; it is not an error, and neither is too little memory to try."""
    tensors = operands("input", *SHAPES)

    def none(*_):
        raise OSError("libcublasLt.so.13: cannot open shared object file")

    for cuda, broken in (("12.8", "_handle"), (None, "_handle"), ("13.0", "_library")):
        library = imitated(QUICK)
        with monkeypatch.context() as patch:
            patch.setattr(torch.version, "cuda", cuda)
            patch.setattr(cublaslt, broken, none)
            product = cublaslt.product("input", *SHAPES, tensors[0])
        assert product.chosen is None and not library.asked
        assert torch.equal(product(*tensors), added("input", *tensors))
    imitated(QUICK)

    def full(*_, **how):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "randn", full)
    assert cublaslt.product("input", *SHAPES, tensors[0]).chosen is None


@pytest.mark.parametrize("terms", [192, 193])
@pytest.mark.parametrize("what", cublaslt.OWN)
def test_another_order_of_sums_is_seen(what, terms, monkeypatch):
    """In a third of the results and more, in bfloat16, where normal operands show it in one of ten thousand."""
    sizes = {"input": (48, 64, terms), "weight": (terms, 48, 64)}.get(what, (48, terms, 64))
    monkeypatch.setattr(torch.version, "cuda", None)
    product, seen = cublaslt.Product(what, *sizes, torch.bfloat16, torch.device("cpu")), []
    for cancelling in (False, True):
        drawn = product._drawn(torch.Generator().manual_seed(0), torch.bfloat16, cancelling)
        drawn = [tensor.float() for tensor in drawn]
        one, other = (added(what, *drawn, turned=turned).bfloat16() for turned in (False, True))
        seen.append((one != other).float().mean())
    assert seen[0] < 0.01 and seen[1] > 0.3, seen


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [128, 6400])
@pytest.mark.parametrize("inputs, outputs", [(384, 1152), (384, 384), (384, 1536), (1536, 384)], ids=str)
def test_bits_of_torchs_products_on_a_gpu(rows, inputs, outputs):
    """As they are called and in a recorded graph, for other numbers than those of the choice."""
    how = {"device": "cuda", "dtype": torch.bfloat16}
    for what, own in cublaslt.OWN.items():
        given = operands(what, rows, inputs, outputs, **how)
        product = cublaslt.product(what, rows, inputs, outputs, given[0])
        assert torch.equal(product(*given).view(torch.int16), own(*given).view(torch.int16)), what
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = product(*given)
        for tensor in given:
            tensor.copy_(torch.randn(tensor.shape, generator=RANDOM))
        graph.replay()
        assert torch.equal(result.view(torch.int16), own(*given).view(torch.int16)), what
