"""Small memsets of a recorded step as kernels.

cuBLAS sets a counter of 4 bytes to 0 before each product whose tiles it hands out one by one, torch some before a sum
in two parts. In a graph such a node took an H200 6.5 us, .9 of them its own and the others gaps around it, where a
kernel behind a kernel has gaps of .4 (``step_vit_s.trace.json.gz``): 142 a step, of which 51 have nothing beside them.

A node's place in the graph stays as it was. Names and layouts are those of cuda.h, CUDA 12.3 and later.
"""

import ctypes
import functools

import torch
import triton
import triton.language as tl

MEMSET = 2  # type of a node
LARGEST = 128  # bytes
WARPS = 1


@triton.jit(do_not_specialize=("size",), do_not_specialize_on_alignment=("at",))
def _zero_kernel(at, size, LARGEST: tl.constexpr):
    i = tl.arange(0, LARGEST)
    tl.store(at + i, tl.zeros([LARGEST], tl.uint8), mask=i < size)


class Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: rows of ``width`` elements."""

    _fields_ = (
        ("at", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint), ("element", ctypes.c_uint),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("parameters", ctypes.POINTER(ctypes.c_void_p)), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


def _do(library, name: str, *arguments) -> None:
    if status := getattr(library, name)(*arguments):
        raise RuntimeError(f"{name}: status {status} of CUDA")


def _listed(library, name: str, of: ctypes.c_void_p, edges: bool = False) -> tuple:
    """The nodes that a function lists, asked first for their number; and what it says of each edge, 8 bytes."""
    count, between = ctypes.c_size_t(), (None,) * edges
    _do(library, name, of, None, *between, ctypes.byref(count))
    nodes, said = (ctypes.c_void_p * count.value)(), (ctypes.c_uint64 * count.value)()
    if count.value:
        _do(library, name, of, nodes, *((said,) if edges else ()), ctypes.byref(count))
    return nodes, said


def to_kernels(library, graph: int, function: int) -> int:
    """Puts launches of ``function``, the zero kernel's, in the place of a graph's small memsets of 0; how many."""
    replaced, whole = 0, ctypes.c_void_p(graph)
    for node in map(ctypes.c_void_p, _listed(library, "cuGraphGetNodes", whole)[0]):
        kind, memset = ctypes.c_int(), Memset()
        _do(library, "cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value != MEMSET:
            continue
        _do(library, "cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
        size = memset.width * memset.element
        if memset.value or memset.height != 1 or size > LARGEST:
            continue
        before, _ = _listed(library, "cuGraphNodeGetDependencies_v2", node, edges=True)
        behind, how = _listed(library, "cuGraphNodeGetDependentNodes_v2", node, edges=True)
        # Behind its own parameters, up to two pointers to memory of Triton's that it has no use for.
        values = ctypes.c_uint64(memset.at), ctypes.c_int(size), ctypes.c_uint64(), ctypes.c_uint64()
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        launch, new = Kernel(function, (1, 1, 1), (32 * WARPS, 1, 1), 0, pointers), ctypes.c_void_p()
        _do(
            library, "cuGraphAddKernelNode_v2", ctypes.byref(new), whole, before, ctypes.c_size_t(len(before)),
            ctypes.byref(launch),
        )  # fmt: skip
        if len(behind):
            ends = (ctypes.c_void_p * len(behind))(*[new.value] * len(behind))
            _do(library, "cuGraphAddDependencies_v2", whole, ends, behind, how, ctypes.c_size_t(len(behind)))
        _do(library, "cuGraphDestroyNode", node)
        replaced += 1
    return replaced


@functools.cache
def _function(device: torch.device) -> int:
    return _zero_kernel[(1,)](torch.empty(1, dtype=torch.uint8, device=device), 1, LARGEST, num_warps=WARPS).function


class Graph(torch.cuda.CUDAGraph):
    """Torch's, whose nodes are changed once they are recorded: to be made by ``graph``."""

    def capture_end(self) -> None:
        super().capture_end()
        device = torch.device("cuda", torch.cuda.current_device())
        to_kernels(ctypes.CDLL("libcuda.so.1"), self.raw_cuda_graph(), _function(device))
        self.instantiate()


def graph() -> Graph:
    _function(torch.device("cuda", torch.cuda.current_device()))  # compiled before something is recorded
    return Graph(keep_graph=True)  # which torch reads in __init__ too: a default of __new__ is not enough
