"""Compile the kernels for a GPU that need not be present, for benchmarks and tests that read registers and spills."""

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import class_token, gather, overlap, residual_norm, sampling, short_attention, update

_TYPES = dict.fromkeys(("boxes", "first", "second", "index"), "*i32")
_TYPES |= dict.fromkeys(("sample", "seed", "epoch", "table", "starts", "ends"), "*i64")
_TYPES |= dict.fromkeys(("flips", "crops0", "crops1", "finite"), "*u8")
_TYPES |= dict.fromkeys(("factor", "shift", "views", "images", "blocks", "units", "of_keys"), "i32")
_TYPES |= dict.fromkeys(("stride_v", "stride_b", "stride_r", "stride_k"), "i32")
_FLAT = "flat0", "flat1", "squares", "norms", "step", "average", "shared", "values", "gradient", "keys", "out"
_FLAT = dict.fromkeys((*_FLAT, "first", "second"), "*fp32") | {"bounds": "*i32", "unit": "*i64", "rates": "*fp64"}
_HALVES = "gradient", "passing", "x", "query", "others", "dquery", "dothers", "qkv", "out", "bias"
_RULE = update.Rule(beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1, clip_momentum=0.4, alpha=1.05)


def compile_for(capability, *, grid=(14, 14), keep=49, groups=4, patch=16, dtype="bf16", width=384, rule=_RULE):
    """Yield (name, compiled kernel) of every operation for an NVIDIA GPU of ``capability`` (80, 90, 100, ...).

    The result is Triton's: ``.asm`` holds "ptx" and "cubin", ``.metadata`` the shared memory. ``dtype`` is Triton's
    name for the type of the gathered patches, of attention, of norms and of the copies that an update makes. Attention
    is over a class token and ``keep`` patches, with heads of 64; ``width`` is that of all heads together, and of norms.
    The update follows ``rule``, and has all that one may have.
    """
    half = f"*{dtype}"
    halves = dict.fromkeys(_HALVES, half)
    cover = overlap.tile(grid, keep, groups)
    attention = short_attention.tile(keep + 1, width, width // 64)
    sums = dict.fromkeys(("mean", "rstd", "gamma", "partial", "norm"), "*fp32") | {"rows": "i32", "each": "i32"}
    sums |= {"programs": "i32", "D": "i32"}
    for_shared, for_update = update.sizes(rule, 16, update.VECTOR.value, keys=True, copies=True)
    for name, kernel, sizes, types in (
        ("sample_views", sampling._sample_kernel, cover | {"SORT": True}, {}),
        ("patch_overlap", overlap._overlap_kernel, dict(cover), {"out": "*fp32"}),
        ("gather_patches", gather._gather_kernel, gather.tile(grid, groups, keep, patch, 8), {"out": half}),
        ("attention", short_attention._attention_kernel, dict(attention), halves),
        ("attention_backward", short_attention._attention_backward_kernel, dict(attention), halves),
        ("unit_squares", update._squares_kernel, {"BLOCK": update.BLOCK, "num_warps": update.WARPS}, _FLAT),
        ("unit_norms", update._norms_kernel, {"CHUNK": update.CHUNK, "num_warps": update.WARPS}, _FLAT),
        ("update_shared", update._shared_kernel, for_shared, _FLAT),
        ("update", update._update_kernel, for_update, _FLAT | {"copies": half, "key_copies": half}),
        ("class_attention", class_token._class_attention_kernel, dict(attention), halves),
        ("class_attention_backward", class_token._class_attention_backward_kernel, dict(attention), halves),
        ("norm_backward", residual_norm._norm_backward_kernel, residual_norm.tile(width), halves | sums),
        ("norm_sums", residual_norm._sum_kernel, dict(residual_norm.SUM), halves | sums),
    ):  # fmt: skip
        options = {"num_warps": sizes.pop("num_warps")}
        types = {x: "constexpr" if x in sizes else (_TYPES | types).get(x, "fp32") for x in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(types.values()) if x.startswith("*")}
        yield name, compile(ASTSource(kernel, types, sizes, aligned), GPUTarget("cuda", capability, 32), options)
