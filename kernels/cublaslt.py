"""The products of a linear layer on a GPU, by the fastest algorithm of cuBLASLt that gives the bits of torch's product.

    forward:  y = x W^T + b                     gelu:    GELU of it, in its tanh form
    input:    dx = dy W                         weight:  dW = dy^T x

x [r,i], W [o,i], b [o], dy [r,o], all of one type. torch takes the algorithm that the library proposes first. Here its
proposals are run when a shape comes for the first time, which must not be within the recording of a graph: those that
fail, or whose result differs from torch's in any bit, are dropped, and the fastest is kept, unless torch's own is.
Which one that is may differ between processes; the bits of a run do not. torch's choice depends on how operands lie:
where its bits do too, its own product is taken only if no other has them. Without the library of this CUDA, or without
memory to try, it is torch's own.

Algorithms may add up in other orders: along tiles, by parts (split K), by whatever a processor takes next. Of normal
numbers one result in 10^4 to 10^5 shows that in bfloat16, few in a small product; so they are compared a second time on
operands whose terms cancel in pairs, in random places: results are then nothing but what rounding leaves of the sums,
and half of them and more differ. What is not seen: an algorithm that takes another order depending on the numbers, or
only now and then. None is known to.

The library is asked twice, for algorithms with and without a workspace: one that hands out tiles by a counter has it
there, and zeroes it before each call by a launch of its own.

On an H200 the fastest of all proposals took 1.4 of 27.8 ms off a step (``bench/LOG.md``); those with torch's bits alone
were not measured. Constants are those of cublasLt.h, CUDA 13.
"""

import contextlib
import ctypes
import functools
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

MAJOR = "13."  # of CUDA
KINDS = {torch.float32: 0, torch.bfloat16: 14}
COMPUTE_32F = 68
OPERATION, PREFERENCE = "cublasLtMatmulDesc", "cublasLtMatmulPreference"
TRANSPOSED_A, TRANSPOSED_B, EPILOGUE, BIAS = 3, 4, 7, 8  # of an operation
EPILOGUES = {"forward": 4, "gelu": 36}  # what is done at the end of a product; of the others nothing: 1
MAX_WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)  # of a preference
ALIGNMENT = 16  # bytes, of all operands; the library's default is 256
LEAST = 128  # bytes, of what weights and biases lie at multiples of (``model/flat.py``)
PROPOSED = {32 << 20: 32, 0: 16}  # algorithms to ask for, by the bytes of workspace that they may have
CALLS, TURNS, FINALISTS = 3, (3, 9), 6  # calls timed as one; turns of all, and of the best of these
AHEAD = 40_000  # clock cycles that the GPU is kept waiting for each call that is queued: 23 us
OWN = {  # torch's
    "forward": F.linear,
    "gelu": lambda x, weight, bias: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
    "input": torch.mm,
    "weight": lambda gradient, x: gradient.t() @ x,
}
SUMMED = {"forward": (1, 1), "gelu": (1, 1), "input": (1, 0), "weight": (0, 0)}  # dimensions of both operands


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("status", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(f"libcublasLt.so.{MAJOR[:-1]}")  # which torch has loaded


def _handle() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


def _do(name: str, *arguments) -> None:
    if status := getattr(_library(), name)(*arguments):
        raise RuntimeError(f"{name}: status {status} of cuBLAS")


def _made(name: str, *arguments) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _do(f"{name}Create", ctypes.byref(made), *arguments)
    return made


def _set(kind: str, of: ctypes.c_void_p, attribute: int, value) -> None:
    _do(f"{kind}SetAttribute", of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


class Product:
    """One of the products above, ``what``, for a shape: called with its operands, it returns a new tensor.

    ``chosen``: the algorithm and the bytes of its workspace, or None for torch's own product. ``tried``: how many
    proposals were run; ``same_bits``: how many of them gave torch's bits.
    """

    def __init__(self, what: str, rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device):
        self.what, self.chosen, self.tried, self.same_bits = what, None, 0, 0
        x, weight, gradient = (rows, inputs), (outputs, inputs), (rows, outputs)
        self.shapes = {"input": (gradient, weight), "weight": (gradient, x)}.get(what, (x, weight))
        self.out = tuple(shape[1 - summed] for shape, summed in zip(self.shapes, SUMMED[what], strict=True))
        if (torch.version.cuda or "").startswith(MAJOR):
            with contextlib.suppress(OSError, RuntimeError):  # no library, no memory
                self._describe(KINDS[dtype])
                self.chosen = self._choose(dtype, device)

    def __call__(self, *operands: Tensor) -> Tensor:
        return self._call(self.chosen, *operands)

    def _call(self, chosen, *operands: Tensor) -> Tensor:
        if chosen is None:
            return OWN[self.what](*operands)
        out = operands[0].new_empty(self.out)
        self._run(chosen, out, *(operand.contiguous() for operand in operands))
        return out

    def _describe(self, kind: int) -> None:
        """Describes the product to the library. There matrices lie column by column: a tensor of torch is taken for its
        transpose, and so the second operand comes first."""
        self.operation = _made(OPERATION, COMPUTE_32F, KINDS[torch.float32])
        first, second = SUMMED[self.what]
        values = {TRANSPOSED_A: second == 1, TRANSPOSED_B: first == 0, EPILOGUE: EPILOGUES.get(self.what, 1)}
        for attribute, value in values.items():
            _set(OPERATION, self.operation, attribute, ctypes.c_int32(value))
        self.layouts = [
            _made("cublasLtMatrixLayout", kind, ctypes.c_uint64(n), ctypes.c_uint64(m), ctypes.c_int64(n))
            for m, n in (*self.shapes[::-1], self.out)
        ]

    def _point(self, bias: Tensor | None = None) -> None:
        if bias is not None:
            _set(OPERATION, self.operation, BIAS, _pointer(bias))

    def _run(self, chosen, out: Tensor, first: Tensor, second: Tensor, *bias: Tensor) -> None:
        self._point(*bias)
        (algorithm, size), one, zero = chosen, ctypes.c_float(1), ctypes.c_float(0)
        workspace, (of_a, of_b, of_out) = out.new_empty(size, dtype=torch.uint8), self.layouts
        _do(
            "cublasLtMatmul", _handle(), self.operation, ctypes.byref(one), _pointer(second), of_a, _pointer(first),
            of_b, ctypes.byref(zero), _pointer(out), of_out, _pointer(out), of_out, ctypes.byref(algorithm),
            _pointer(workspace), ctypes.c_size_t(size), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def _choose(self, dtype: torch.dtype, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)  # its own: that of the run is left as it was
        found, alike = None, True
        for cancelling in (False, True):
            operands = self._drawn(generator, dtype, cancelling)
            if found is None:
                self._point(*operands[2:])  # without which nothing is proposed
                found = self._proposals()
                self.tried = len(found)
            wanted = OWN[self.what](*operands)
            alike &= torch.equal(_bits(wanted), _bits(OWN[self.what](*self._as_parameters(operands))))
            found = [chosen for chosen in found if self._gives(chosen, wanted, operands)]
        self.same_bits = len(found)
        del wanted
        found += [None] * (alike or not found)
        for turns, kept in zip(TURNS, (FINALISTS, 1), strict=True):
            times = self._times(found, operands, turns)
            found = [found[number] for number in sorted(range(len(found)), key=times.__getitem__)[:kept]]
        return found[0]

    def _drawn(self, generator: torch.Generator, dtype: torch.dtype, cancelling: bool) -> list[Tensor]:
        """Operands of normal numbers; ``cancelling``: the terms of each sum are in pairs, one the other's negative."""
        shapes = [*self.shapes, *[self.out[1:]] * (self.what in EPILOGUES)]
        operands = [torch.randn(s, generator=generator, dtype=dtype, device=generator.device) for s in shapes]
        if cancelling:
            terms = self.shapes[0][SUMMED[self.what][0]]
            order = torch.rand(terms, generator=generator, device=generator.device).argsort()
            one, other, left = order[: terms // 2], order[terms // 2 : terms // 2 * 2], order[terms // 2 * 2 :]
            for operand, dim, sign in zip(operands, SUMMED[self.what], (1, -1), strict=False):
                operand.index_copy_(dim, other, sign * operand.index_select(dim, one)).index_fill_(dim, left, 0)
            for bias in operands[2:]:
                bias *= 2.0**-20  # about what is left of the sums
        return operands

    def _as_parameters(self, operands: list[Tensor]) -> list[Tensor]:
        """``operands`` with copies of weight and bias at addresses such as those of a network may have."""
        if self.what == "weight":
            return operands
        skipped = LEAST // operands[0].itemsize
        places = [operand.new_empty(skipped + operand.numel())[skipped:].view_as(operand) for operand in operands[1:]]
        return [operands[0], *(place.copy_(operand) for place, operand in zip(places, operands[1:], strict=True))]

    def _gives(self, chosen, wanted: Tensor, operands: list[Tensor]) -> bool:
        out = torch.full_like(wanted, torch.nan)
        with contextlib.suppress(RuntimeError):  # some do not run
            self._run(chosen, out, *operands)
        return not (_bits(out) != _bits(wanted)).any()

    def _times(self, found: list, operands: list[Tensor], turns: int) -> list[float]:
        """Median milliseconds of ``CALLS`` calls of each, in turns, all queued before the first of a turn begins."""
        events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(turns)] for _ in found]
        for turn in range(turns):
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD * CALLS * len(found))
            for chosen, pairs in zip(found, events, strict=True):
                pairs[turn][0].record()
                for _ in range(CALLS):
                    self._call(chosen, *operands)
                pairs[turn][1].record()
        torch.cuda.synchronize()
        return [statistics.median(start.elapsed_time(end) for start, end in pairs) for pairs in events]

    def _proposals(self) -> list[tuple]:
        """(algorithm, bytes of its workspace), the library's first ones first, none twice."""
        proposals = {}
        for limit, most in PROPOSED.items():
            preference, (of_a, of_b, of_out) = _made(PREFERENCE), self.layouts
            _set(PREFERENCE, preference, MAX_WORKSPACE, ctypes.c_uint64(limit))
            for attribute in ALIGNMENTS:
                _set(PREFERENCE, preference, attribute, ctypes.c_uint32(ALIGNMENT))
            found, count = (_Proposal * most)(), ctypes.c_int()
            _do(
                "cublasLtMatmulAlgoGetHeuristic", _handle(), self.operation, of_a, of_b, of_out, of_out, preference,
                most, found, ctypes.byref(count),
            )  # fmt: skip
            for row in found[: count.value]:
                if not row.status:
                    proposals.setdefault(bytes(row.algorithm), (row.algorithm, row.workspace))
        return list(proposals.values())


_product = functools.cache(Product)


def product(what: str, rows: int, inputs: int, outputs: int, like: Tensor) -> Product:
    """The ``Product`` of these sizes, of the type of ``like`` and on its device; made and chosen at the first call."""
    return _product(what, rows, inputs, outputs, like.dtype, like.device)


# The compiler is free in how operands lie (``_call`` puts them in order): else it writes those that it computes anew
# for each product that reads them, and the gradient of GELU once more in float32 for the bias.
HOW = {"mutates_args": (), "device_types": "cpu", "tags": (torch.Tag.flexible_layout,)}


@torch.library.custom_op("aps::linear", **HOW)
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b: [r,o]."""
    return OWN["forward"](x, weight, bias)


@torch.library.custom_op("aps::linear_input", **HOW)
def linear_input(gradient: Tensor, weight: Tensor) -> Tensor:
    """dy W: [r,i]."""
    return OWN["input"](gradient, weight)


@torch.library.custom_op("aps::linear_weight", **HOW)
def linear_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """dy^T x: [o,i]."""
    return OWN["weight"](gradient, x)


@linear.register_kernel("cuda")
def _(x, weight, bias):
    sizes = *x.shape, len(weight), x
    for what in ("input", "weight"):  # chosen now, as there is less memory once all activations are kept
        product(what, *sizes)
    return product("forward", *sizes)(x, weight, bias)


@linear_input.register_kernel("cuda")
def _(gradient, weight):
    return product("input", len(gradient), *weight.shape[::-1], gradient)(gradient, weight)


@linear_weight.register_kernel("cuda")
def _(gradient, x):
    return product("weight", *x.shape, gradient.shape[1], x)(gradient, x)


@linear.register_fake
def _(x, weight, bias):
    return x.new_empty(len(x), len(weight))


@linear_input.register_fake
def _(gradient, weight):
    return gradient.new_empty(len(gradient), weight.shape[1])


@linear_weight.register_fake
def _(gradient, x):
    return x.new_empty(gradient.shape[1], x.shape[1])
