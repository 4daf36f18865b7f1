"""The variants' kernels compiled for a GPU that need not be present, as ``kernels/compiled.py`` compiles the others."""

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.variants import columns, mlp, one
from kernels import short_attention

PROCESSORS = 132  # an H100's


def compile_for(capability, *, width=384, hidden=1536, heads=6, tokens=50):
    """Yield (name, compiled kernel) for an NVIDIA GPU of ``capability`` (80, 90, 100, ...), in bfloat16."""
    half, wide = "*bf16", "*fp32"
    backward = {"gradient": half, "out": half, "partial": wide}
    stretches = {"mean": wide, "rstd": wide, "gamma": wide, "passing": half, "x": half}
    scales = {"qkv": half, "scale": "fp32", "unscale": "fp32"}
    sizes = short_attention.tile(tokens, width, heads)
    ones = dict.fromkeys(("query", "others", "out", "gradient", "dquery", "dothers"), half) | scales
    jobs = [
        ("norm_backward", columns._norm_backward_kernel, columns.norm_tile(width)[0], backward | stretches),
        ("gelu_backward", columns._gelu_backward_kernel, columns.gelu_tile(hidden)[0], backward | {"x": half}),
        ("attention_backward", columns._attention_backward_kernel, sizes, backward | scales),
        ("one", one._one_kernel, sizes, ones),
        ("one_backward", one._one_backward_kernel, sizes, ones),
        ("sum", columns._sum_kernel, columns.SUM, {"partial": wide, "wide": wide, "out": half}),
    ]
    for tile in mlp.TILES if 90 <= capability < 120 else ():  # the shared memory of those cards, and their bulk copies
        name, sizes = f"{tile.BM}x{tile.BN}x{tile.num_stages}", mlp.sizes(tile, PROCESSORS)
        rows, part = _blocks(tile.BM, tile.BK), _blocks(tile.BM, tile.BN // tile.PARTS)
        types = {"x": rows, "weight": _blocks(tile.BN, tile.BK), "bias": half, "a": part, "slope": part}
        jobs.append((f"up {name}", mlp._up_kernel, sizes, types))
        types = {"gradient": rows, "weight": _blocks(tile.BK, tile.BN), "slope": part, "dh": part, "partial": wide}
        jobs.append((f"down_backward {name}", mlp._down_backward_kernel, sizes, types))
    for name, kernel, sizes, types in jobs:
        options = {key: sizes[key] for key in ("num_warps", "num_stages") if key in sizes}
        constants = {key: value for key, value in sizes.items() if key not in options}
        types = {x: "constexpr" if x in constants else types.get(x, "i32") for x in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(types.values()) if x.startswith("*")}
        yield name, compile(ASTSource(kernel, types, constants, aligned), GPUTarget("cuda", capability, 32), options)


def _blocks(*shape):
    return f"tensordesc<bf16{list(shape)}>"
