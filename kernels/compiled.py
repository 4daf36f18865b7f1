"""Compile the kernels for a GPU that need not be present, for benchmarks and tests that read registers and spills."""

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import gather, overlap, sampling

_TYPES = dict.fromkeys(("boxes", "first", "second", "index"), "*i32")
_TYPES |= dict.fromkeys(("sample", "seed", "epoch", "table"), "*i64")
_TYPES |= dict.fromkeys(("flips", "crops0", "crops1"), "*u8")
_TYPES |= dict.fromkeys(("power", "patches", "stride_v", "stride_b", "stride_k"), "i32")


def compile_for(capability, *, grid=(14, 14), keep=49, groups=4, patch=16, dtype="bf16"):
    """Yield (name, compiled kernel) of the three operations for an NVIDIA GPU of ``capability`` (80, 90, 100, ...).

    The result is Triton's: ``.asm`` holds "ptx" and "cubin", ``.metadata`` the shared memory. ``dtype`` of the gathered
    patches is Triton's name of it.
    """
    cover = overlap.tile(grid, keep, groups)
    for name, kernel, sizes, out in (
        ("sample_views", sampling._sample_kernel, cover | {"SORT": True}, None),
        ("patch_overlap", overlap._overlap_kernel, cover, "*fp32"),
        ("gather_patches", gather._gather_kernel, gather.tile(grid, keep, patch, 8), f"*{dtype}"),
    ):
        options = {"num_warps": sizes.pop("num_warps")}
        types = {x: "constexpr" if x in sizes else _TYPES.get(x, "fp32") for x in kernel.arg_names}
        if out:
            types["out"] = out
        aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(types.values()) if x.startswith("*")}
        yield name, compile(ASTSource(kernel, types, sizes, aligned), GPUTarget("cuda", capability, 32), options)
