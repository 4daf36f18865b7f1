"""What every kernel compiles to, for GPUs that need not be present: registers, spills, shared memory, instructions.

Numbers are those of the ImageNet recipes (14 x 14 patches of 16 px, 49 kept, 4 groups, bfloat16), and static: an
instruction in a loop counts once. Loads and stores are those of global memory. For NVIDIA everything is read from the
machine code (SASS) with the tools inside the triton package, for AMD from the assembly that LLVM writes.
"""

import re
import struct
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from bench import environment
from bench.findings import finding
from kernels.compiled import compile_for

CAPABILITIES = 80, 90, 100, 120
AMD = GPUTarget("hip", "gfx942", 64)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

# First match decides. Constants are "moves", also where the assembler makes them with an arithmetic unit.
SASS = (
    ("load", r"LDG"), ("store", r"STG"), ("spill", r"LDL|STL"), ("shuffle", r"SHFL"), ("shared", r"LDS|STS|ATOMS"),
    ("barrier", r"BAR\b"), ("", r"NOP"), ("matrix", r"[HIQ]G?MMA|UTC\w*MMA"),
    ("branch", r"BRA|BRX|JMP|CALL|RET|EXIT|BSSY|BSYNC|BREAK|WARPSYNC"),
    ("convert", r"[FI]2[FI]"), ("move", r"U?MOV|IMAD\.U?MOV|HFMA2|C?S2R|S2UR|R2UR|U?LDC"),
    ("float", r"[FDH](ADD|MUL|FMA|SET|SETP|SEL|MNMX|CHK)|MUFU|HADD2|HMUL2"), ("integer", r"."),
)  # fmt: skip
AMDGCN = (
    ("load", r"(global|buffer|flat)_load"), ("store", r"(global|buffer|flat)_store"), ("spill", r"scratch_"),
    ("shuffle", r"ds_(b?permute|swizzle)|v_mov_b32_dpp|v_readlane|v_readfirstlane"), ("shared", r"ds_"),
    ("barrier", r"s_barrier"), ("matrix", r"v_mfma"), ("", r"s_(nop|waitcnt|code_end|sethalt)"),
    ("branch", r"s_c?branch|s_endpgm|s_setpc"),
    ("convert", r"v_cvt"), ("move", r"[sv]_mov|s_load"), ("float", r"v_\w*_b?f(16|32|64)"), ("integer", r"."),
)  # fmt: skip
KINDS = "shuffle", "shared", "barrier", "matrix", "float", "convert", "integer", "move", "branch"
AMD_BITS = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}


def compiled_rows():
    """Yield a row {target, kernel, registers, ...} for every kernel and target; bits of loads and stores as a dict."""
    for capability in CAPABILITIES:
        made = list(compile_for(capability))
        for (name, kernel), row in zip(made, _nvidia([kernel for _, kernel in made]), strict=True):
            yield {"target": f"sm_{capability}", "kernel": name} | row
            if capability == CAPABILITIES[0]:
                amd = triton.compile(kernel.src, AMD, {"num_warps": kernel.metadata.num_warps})
                yield {"target": AMD.arch, "kernel": name} | _amd(amd)


def _nvidia(kernels) -> list[dict]:
    """A row of each; all are for one target. One call disassembles them all: the tool takes half a second to begin."""
    codes = [_machine_code(kernel.asm["cubin"]) for kernel in kernels]
    target = re.search(r"^\.target sm_(\w+)", kernels[0].asm["ptx"], re.MULTILINE)[1]
    sass = _said_of(b"".join(codes), "nvdisasm", "--binary", f"SM{target}")
    said = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)", sass, re.MULTILINE)
    rows, start = [], 0
    for kernel, length in zip(kernels, map(len, codes), strict=True):
        usage = _said_of(kernel.asm["cubin"], "cuobjdump", "-res-usage")
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        code = [word for place, word in said if start <= int(place, 16) < start + length]
        start += length
        rows.append({
            "registers": used["REG"], "spilled_bytes": used["STACK"] + used["LOCAL"],
            "shared_bytes": kernel.metadata.shared, **_mix(code, SASS, _sass_bits),
        })  # fmt: skip
    return rows


def _machine_code(cubin: bytes) -> bytes:
    """Of an ELF file the sections that are executed."""
    (start,), (size, count) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 58)
    headers = [struct.unpack_from("<8xQ8xQQ", cubin, start + number * size) for number in range(count)]
    return b"".join(cubin[offset : offset + length] for flags, offset, length in headers if flags & 4)


def _said_of(content: bytes, tool: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return subprocess.run([TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def _amd(kernel) -> dict:
    text = kernel.asm["amdgcn"]
    used = {key: int(value) for key, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    code = re.findall(r"^\s+((?:s|v|ds|global|buffer|flat|scratch)_\w+)", text, re.MULTILINE)
    # Vector registers spill to private memory, scalar ones (4 bytes each) into lanes of vector registers.
    spilled = used["private_segment_fixed_size"] + 4 * used["sgpr_spill_count"]
    return {
        "registers": used["vgpr_count"],
        "spilled_bytes": spilled,
        "shared_bytes": kernel.metadata.shared,
    } | _mix(code, AMDGCN, _amd_bits)


def _amd_bits(code: str) -> int:
    return AMD_BITS[re.search(r"(byte|short|dword(?:x\d)?)", code)[1]]


def _sass_bits(code: str) -> int:
    width = re.search(r"\.[US]?(8|16|64|96|128)\b", code)
    return int(width[1]) if width else 32


def _mix(code: list[str], rules, bits) -> dict:
    """How many instructions of each kind; loads and stores by their bits per lane."""
    kinds = [next(kind for kind, pattern in rules if re.match(pattern, x)) for x in code]
    count = Counter(kinds)
    by_width = {
        f"{kind}_bits": dict(sorted(Counter(bits(x) for x, k in zip(code, kinds, strict=True) if k == kind).items()))
        for kind in ("load", "store")
    }
    spills = {"spill_instructions": count["spill"]}
    return spills | by_width | {kind: count[kind] for kind in KINDS} | {"total": len(code) - count[""]}


def conclusions(d: dict) -> dict:
    rows = d["rows"]
    targets = sorted({row["target"] for row in rows}, key=lambda name: (name[:2] != "sm", len(name), name))
    spilled = sum(row["spilled_bytes"] > 0 or row["spill_instructions"] > 0 for row in rows)
    stores = {int(bits) for row in rows if row["kernel"] == "gather_patches" for bits in row["store_bits"]}
    programs = f"{len(rows)} programs, {spilled or 'none'} of which spill{'s' if spilled == 1 else ''}"
    stored = f"the gather stores {' or '.join(str(bits // 8) for bits in sorted(stores))} bytes at a time"
    return {"findings": [finding(f"every kernel compiled for {', '.join(targets)}", programs, stored)]}


def main(arguments: list[str]) -> int:
    options = environment.parser("compile", "Compile every kernel; no GPU is needed.").parse_args(arguments)
    result = {"rows": sorted(compiled_rows(), key=lambda row: row["kernel"])}
    environment.save(options, result | conclusions(result))
    shown = [dict(row) for row in result["rows"]]
    for row in shown:
        del row["spill_instructions"]
        for key in ("load_bits", "store_bits"):
            row[key] = " ".join(f"{count}x{width}" for width, count in row[key].items())
    environment.print_table(shown)
    return 0
