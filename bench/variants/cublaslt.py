"""Products by cuBLASLt with epilogues (what is done at their end) that torch does not offer; GELU in its tanh form.

    up:        h = x W^T + b    a = GELU(h)                       one product writes both
    down:      dh = (dy W) * GELU'(h)    db = columns of dh       one product reads h, writes dh
    weights:   dW = dy^T x    db = columns of dy                  one product

Beside the products, 4 bytes a number of h forward and 4 backward in half precision, where GELU apart moves 6 and 6 and
each db another 2. x [M,K], W [N,K] (``down``: [K,N]), dy [M,K] (``weights``: [M,N]), a, h and dh [M,N]; db as they are.

Of the algorithms that the library proposes for a shape the fastest is taken, found at its first call. Constants are
those of cublasLt.h, CUDA 13.
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
TRANSPOSED_A, TRANSPOSED_B, EPILOGUE, BIAS, AUX, AUX_LD = 3, 4, 7, 8, 11, 12  # of an operation
GELU_AUX_BIAS, DGELU_BGRAD, BGRADB = 164, 208, 512  # epilogues
MAX_WORKSPACE = 1  # of a preference
OPERATION = "cublasLtMatmulDesc"
WORKSPACE = 32 << 20
PROPOSED, SECONDS = 8, 0.02  # algorithms, and what they are tried for in all


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


class _Product:
    """D = op(A) op(B) with an epilogue, [rows,columns] from ``depth`` products each. Matrices lie column by column, so
    that a tensor of torch is its transposed."""

    def __init__(self, rows: int, columns: int, depth: int, transposed: tuple[bool, bool], epilogue: int, kind: int):
        self.operation = _made(OPERATION, COMPUTE_32F, KINDS[torch.float32])
        for attribute, value in zip((TRANSPOSED_A, TRANSPOSED_B, EPILOGUE), (*transposed, epilogue), strict=True):
            _set(OPERATION, self.operation, attribute, ctypes.c_int32(value))
        shapes = [(rows, depth), (depth, columns), (rows, columns)]
        shapes[:2] = (shape[::-1] if turned else shape for shape, turned in zip(shapes, transposed, strict=False))
        self.layouts = [
            _made("cublasLtMatrixLayout", kind, ctypes.c_uint64(r), ctypes.c_uint64(c), ctypes.c_int64(r))
            for r, c in shapes
        ]
        if epilogue != BGRADB:
            _set(OPERATION, self.operation, AUX_LD, ctypes.c_int64(rows))
        self.algorithm = None

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor, aux: Tensor | None = None) -> None:
        _set(OPERATION, self.operation, BIAS, _pointer(bias))
        if aux is not None:
            _set(OPERATION, self.operation, AUX, _pointer(aux))
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=out.device)
        run = functools.partial(self._run, a, b, out, workspace)
        self.algorithm = self.algorithm or self._fastest(run, out.device)
        run(self.algorithm)

    def _run(self, a, b, out, workspace, algorithm) -> None:
        one, zero, (of_a, of_b, of_out) = ctypes.c_float(1), ctypes.c_float(0), self.layouts
        _do(
            "cublasLtMatmul", _handle(), self.operation, ctypes.byref(one), _pointer(a), of_a, _pointer(b), of_b,
            ctypes.byref(zero), _pointer(out), of_out, _pointer(out), of_out, ctypes.byref(algorithm),
            _pointer(workspace), ctypes.c_size_t(WORKSPACE), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def _fastest(self, run, device: torch.device):
        found = {}
        for number, algorithm in enumerate(self._proposals()):
            with contextlib.suppress(RuntimeError):
                run(algorithm)
                found[number] = algorithm
        if not found:
            raise RuntimeError("cuBLASLt has no algorithm for this product and what is to be done at its end")
        calls = {number: functools.partial(run, algorithm) for number, algorithm in found.items()}
        times = measure(calls, device, seconds=SECONDS)
        return found[min(times, key=lambda number: times[number]["p50"])]

    def _proposals(self) -> list:
        preference, limit = _made("cublasLtMatmulPreference"), ctypes.c_uint64(WORKSPACE)
        _set("cublasLtMatmulPreference", preference, MAX_WORKSPACE, limit)
        found, count, (of_a, of_b, of_out) = (_Proposal * PROPOSED)(), ctypes.c_int(), self.layouts
        _do(
            "cublasLtMatmulAlgoGetHeuristic", _handle(), self.operation, of_a, of_b, of_out, of_out, preference,
            PROPOSED, found, ctypes.byref(count),
        )  # fmt: skip
        return [proposal.algorithm for proposal in found[: count.value] if not proposal.status]


def _handle() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


_product = functools.cache(_Product)


def _refer_up(x, weight, bias):
    h = F.linear(x, weight, bias.to(x.dtype))
    return F.gelu(h, approximate="tanh"), h


def _refer_down(gradient, weight, h):
    dh = torch.ops.aten.gelu_backward(gradient @ weight, h, approximate="tanh")
    return dh, dh.sum(0)


def _refer_weights(gradient, x):
    return gradient.t() @ x, gradient.sum(0)


@torch.library.custom_op("aps_bench::lt_up", mutates_args=(), device_types="cpu")
def up(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GELU of x W^T + b, and x W^T + b: [M,N] each from x [M,K], W [N,K], b [N]."""
    return _refer_up(x, weight, bias)


@torch.library.custom_op("aps_bench::lt_down", mutates_args=(), device_types="cpu")
def down(gradient: Tensor, weight: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """(dy W) * GELU'(h) [M,N] and the sums of its columns [N], from dy [M,K], W [K,N], h [M,N]."""
    return _refer_down(gradient, weight, h)


@torch.library.custom_op("aps_bench::lt_weights", mutates_args=(), device_types="cpu")
def weights(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """dy^T x [N,K] and the sums of the columns of dy [N], from dy [M,N], x [M,K]."""
    return _refer_weights(gradient, x)


@up.register_kernel("cuda")
def _(x, weight, bias):
    (m, k), n = x.shape, len(weight)
    a, h = (x.new_empty(m, n) for _ in range(2))
    product = _product(n, m, k, (True, False), GELU_AUX_BIAS, KINDS[x.dtype])
    product(weight.contiguous(), x.contiguous(), a, bias.to(x.dtype), h)
    return a, h


@down.register_kernel("cuda")
def _(gradient, weight, h):
    (m, k), n = gradient.shape, weight.shape[1]
    dh, db = torch.empty_like(h), h.new_empty(n)
    product = _product(n, m, k, (False, False), DGELU_BGRAD, KINDS[h.dtype])
    product(weight.contiguous(), gradient.contiguous(), dh, db, h)
    return dh, db


@weights.register_kernel("cuda")
def _(gradient, x):
    (m, n), k = gradient.shape, x.shape[1]
    dw, db = x.new_empty(n, k), x.new_empty(n)
    _product(k, n, m, (False, True), BGRADB, KINDS[x.dtype])(x.contiguous(), gradient.contiguous(), dw, db)
    return dw, db


@up.register_fake
def _(x, weight, bias):
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))


@down.register_fake
def _(gradient, weight, h):
    return torch.empty_like(h), h.new_empty(h.shape[1])


@weights.register_fake
def _(gradient, x):
    return x.new_empty(gradient.shape[1], x.shape[1]), x.new_empty(gradient.shape[1])
