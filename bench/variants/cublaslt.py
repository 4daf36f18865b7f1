"""The products of a linear layer by cuBLASLt, by the algorithm measured as the fastest.

    linear:          y = x W^T + b, or GELU of it, in its tanh form
    linear_input:    dx = dy W
    linear_weight:   dW = dy^T x

x [M,K], W [N,K] (``linear_input``: [K,N]), dy [M,K] (``linear_weight``: [M,N]), b [N].

torch takes the algorithm that the library proposes first for a shape. Here many of its proposals are timed at the first
call, which must not be recorded as a graph, and the fastest is kept. The library is asked twice: for algorithms that
may have a workspace, and for those without. One that hands out tiles by a counter has it in the first 4 bytes, and
zeroes them before each call by a launch of its own; sums by parts (split K) lie behind. Which one is the fastest may
differ between processes, and with it the order of sums and the last bits of a result.

Constants are those of cublasLt.h, CUDA 13.
"""

import contextlib
import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.timing import measure

KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
COMPUTE_32F = 68
TRANSPOSED_A, TRANSPOSED_B, EPILOGUE, BIAS = 3, 4, 7, 8  # of an operation
PLAIN, ADD_BIAS, GELU_BIAS = 1, 4, 36  # epilogues: what is done at the end of a product
MAX_WORKSPACE = 1  # of a preference
OPERATION = "cublasLtMatmulDesc"
WORKSPACE = 32 << 20
PROPOSED = {WORKSPACE: 32, 0: 16}  # algorithms to ask for, by the bytes of workspace that they may have
LIMITS = tuple(PROPOSED)
FINALISTS, SECONDS = 6, 0.1  # how many are timed again, and for how long in all
CALLS = 4  # timed as one, back to back: what runs between two products, and what waits, counts too


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("status", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")  # which torch has loaded


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


class Product:
    """D = op(A) op(B) with an epilogue, [rows,columns] from ``depth`` products each. Matrices lie column by column, so
    that a tensor of torch is its transposed. ``limits``: keys of ``PROPOSED``.

    Once it has been called, ``chosen`` is the algorithm and the bytes of its workspace, of ``tried`` ones.
    """

    def __init__(self, rows, columns, depth, transposed, epilogue, kind, limits):
        self.operation = _made(OPERATION, COMPUTE_32F, KINDS[torch.float32])
        for attribute, value in zip((TRANSPOSED_A, TRANSPOSED_B, EPILOGUE), (*transposed, epilogue), strict=True):
            _set(OPERATION, self.operation, attribute, ctypes.c_int32(value))
        shapes = [(rows, depth), (depth, columns), (rows, columns)]
        shapes[:2] = (shape[::-1] if turned else shape for shape, turned in zip(shapes, transposed, strict=False))
        self.layouts = [
            _made("cublasLtMatrixLayout", kind, ctypes.c_uint64(r), ctypes.c_uint64(c), ctypes.c_int64(r))
            for r, c in shapes
        ]
        self.limits, self.chosen, self.tried = limits, None, 0

    def __call__(self, *tensors: Tensor) -> None:
        """Of A, B, D, and the bias if there is one."""
        self.chosen = self.chosen or self._fastest(tensors)
        self._run(self.chosen, *tensors)

    def _point(self, bias: Tensor | None = None) -> None:
        if bias is not None:
            _set(OPERATION, self.operation, BIAS, _pointer(bias))

    def _run(self, chosen, a, b, out, bias=None) -> None:
        self._point(bias)
        (algorithm, size), one, zero = chosen, ctypes.c_float(1), ctypes.c_float(0)
        workspace, (of_a, of_b, of_out) = torch.empty(size, dtype=torch.uint8, device=out.device), self.layouts
        _do(
            "cublasLtMatmul", _handle(), self.operation, ctypes.byref(one), _pointer(a), of_a, _pointer(b), of_b,
            ctypes.byref(zero), _pointer(out), of_out, _pointer(out), of_out, ctypes.byref(algorithm),
            _pointer(workspace), ctypes.c_size_t(size), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def _fastest(self, tensors: tuple[Tensor, ...]) -> tuple:
        """All are timed, in turns, then the best of them again, longer."""
        sets, found = _sets(tensors), []
        self._point(*tensors[3:])  # without which nothing is proposed
        for chosen in self._proposals():
            with contextlib.suppress(RuntimeError):  # some do not run
                self._run(chosen, *tensors)
                found.append(chosen)
        if not found:
            raise RuntimeError("cuBLASLt has no algorithm for this product and what is to be done at its end")
        self.tried = len(found)

        def times(some: list[int], **how) -> dict[int, float]:
            calls = {number: functools.partial(self._run_in_turns, found[number], sets) for number in some}
            return {number: row["p50"] for number, row in measure(calls, tensors[0].device, **how).items()}

        first = times(range(len(found)), seconds=0)
        again = times(sorted(first, key=first.get)[:FINALISTS], seconds=SECONDS)
        return found[min(again, key=again.get)]

    def _run_in_turns(self, chosen, sets) -> None:
        for number in range(CALLS):
            self._run(chosen, *sets[number % len(sets)])

    def _proposals(self) -> list[tuple]:
        """(algorithm, bytes of its workspace), the library's first ones first, none twice."""
        proposals = {}
        for limit in self.limits:
            preference, (of_a, of_b, of_out) = _made("cublasLtMatmulPreference"), self.layouts
            _set("cublasLtMatmulPreference", preference, MAX_WORKSPACE, ctypes.c_uint64(limit))
            found, count = (_Proposal * PROPOSED[limit])(), ctypes.c_int()
            _do(
                "cublasLtMatmulAlgoGetHeuristic", _handle(), self.operation, of_a, of_b, of_out, of_out, preference,
                len(found), found, ctypes.byref(count),
            )  # fmt: skip
            for row in found[: count.value]:
                if not row.status:
                    proposals.setdefault(bytes(row.algorithm), (row.algorithm, row.workspace))
        return list(proposals.values())


def _sets(tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """The tensors of a call, and as many copies as it takes for none to be in the L2 cache when its turn comes again:
    in a step other kernels have run since. (Of small ones not all.)"""
    cache = torch.cuda.get_device_properties(tensors[0].device).L2_cache_size
    more = min(CALLS - 1, 2 * cache // sum(tensor.nbytes for tensor in tensors))
    return [tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in range(more))]


def _handle() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


_product = functools.cache(Product)


def plain(
    what: str, first: Tensor, second: Tensor, bias: Tensor | None = None, *, gelu: bool = False,
    limits: tuple[int, ...] = LIMITS,
) -> functools.partial:  # fmt: skip
    """A product of a linear layer as a call, its result ready in ``args[2]``: ``forward`` of x, W and b, ``input`` of
    dy and W, ``weight`` of dy and x, as above."""
    m, n = len(first), second.shape[1]
    if what == "forward":
        sizes, transposed = (len(second), m, n), (True, False)
    elif what == "input":
        sizes, transposed = (n, m, len(second)), (False, False)
    else:
        sizes, transposed = (n, first.shape[1], m), (False, True)
    epilogue = PLAIN if bias is None else GELU_BIAS if gelu else ADD_BIAS
    product = _product(*sizes, transposed, epilogue, KINDS[first.dtype], limits)
    more = () if bias is None else (bias.to(first.dtype),)
    return functools.partial(product, second.contiguous(), first.contiguous(), first.new_empty(sizes[1::-1]), *more)


def _plain(*args, **how) -> Tensor:
    call = plain(*args, **how)
    call()
    return call.args[2]


def _refer_linear(x, weight, bias, gelu=False):
    y = F.linear(x, weight, bias.to(x.dtype))
    return F.gelu(y, approximate="tanh") if gelu else y


@torch.library.custom_op("aps_bench::lt_linear", mutates_args=(), device_types="cpu")
def linear(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool = False) -> Tensor:
    """x W^T + b, or GELU of it: [M,N] from x [M,K], W [N,K], b [N]."""
    return _refer_linear(x, weight, bias, gelu)


@torch.library.custom_op("aps_bench::lt_linear_input", mutates_args=(), device_types="cpu")
def linear_input(gradient: Tensor, weight: Tensor) -> Tensor:
    """dy W [M,N] from dy [M,K], W [K,N]."""
    return gradient @ weight


@torch.library.custom_op("aps_bench::lt_linear_weight", mutates_args=(), device_types="cpu")
def linear_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """dy^T x [N,K] from dy [M,N], x [M,K]."""
    return gradient.t() @ x


@linear.register_kernel("cuda")
def _(x, weight, bias, gelu=False):
    return _plain("forward", x, weight, bias, gelu=gelu)


@linear_input.register_kernel("cuda")
def _(gradient, weight):
    return _plain("input", gradient, weight)


@linear_weight.register_kernel("cuda")
def _(gradient, x):
    return _plain("weight", gradient, x)


@linear.register_fake
def _(x, weight, bias, gelu=False):
    return x.new_empty(len(x), len(weight))


@linear_input.register_fake
def _(gradient, weight):
    return gradient.new_empty(len(gradient), weight.shape[1])


@linear_weight.register_fake
def _(gradient, x):
    return x.new_empty(gradient.shape[1], x.shape[1])
