"""compute-sanitizer on every kernel, at small sizes: reads and writes beside the memory, and races of the sampler.

torch's allocator is turned off for it: within its large pieces nothing is beside the memory. An error is a failure; a
tool that is missing, or refuses the device, leaves its row "not run", with what it says.
"""

import re
import shutil
import time

from bench import environment
from bench.findings import finding
from bench.once import NAMES, looked_at

TOOL = "compute-sanitizer"
RUNS = ("memcheck", NAMES, 110), ("racecheck", ("sample_views",), 50)  # seconds at most


def check(kind: str, kernels: tuple[str, ...], limit: int) -> dict:
    """One row: {"tool", "kernels", "seconds", and "errors" or "not_run"}."""
    row = {"tool": kind, "kernels": list(kernels)}
    if shutil.which(TOOL) is None:
        return row | {"not_run": f"{TOOL} is not installed"}
    tool = [TOOL, "--tool", kind, "--target-processes", "application-only"]  # not the compilers that Triton starts
    start = time.monotonic()
    said, code = looked_at(tool, ["--small", "--kernels", *kernels], limit, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    print(said[-4000:])
    return row | {"seconds": round(time.monotonic() - start, 1)} | outcome(said, code, kernels)


def outcome(said: str, code: int, kernels: tuple[str, ...]) -> dict:
    """{"errors": n} of a run that got to its end, else {"not_run": why}."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", said)
    reached = [name for name in kernels if re.search(rf"^{name}$", said, re.MULTILINE)]
    errors = int(summary[1] or summary[2]) if summary else 0
    if errors and reached:  # an error may be what ends the program
        return {"errors": errors}
    done = f"after {len(reached)} of {len(kernels)}"
    if code in (124, 137):
        return {"not_run": f"out of time {done}"}
    if summary is None or len(reached) < len(kernels) or code:
        last = [line for line in said.splitlines() if line.strip()][-1:] or ["it says nothing"]
        return {"not_run": f"ended with exit code {code} {done}: {last[0]}"}
    return {"errors": errors}


def conclusions(d: dict) -> dict:
    found = []
    for row in d["rows"]:
        text = f"not run: {row['not_run']}" if "not_run" in row else f"{row['errors']} errors"
        found.append(finding(f"{row['tool']}, small sizes", text, ", ".join(row["kernels"])))
    return {"findings": found}


def main(arguments: list[str]) -> int:
    options = environment.parser("sanitizer", "compute-sanitizer on every kernel.").parse_args(arguments)
    on_gpu, result = environment.device().type == "cuda", {"rows": []}
    for kind, kernels, limit in RUNS:
        without = {"tool": kind, "kernels": list(kernels), "not_run": "needs an NVIDIA GPU"}
        result["rows"].append(check(kind, kernels, limit) if on_gpu else without)
        environment.save(options, result | conclusions(result))
    missing = [row["not_run"] for row in result["rows"] if "not_run" in row]
    if missing:
        result["not_run"] = missing[0]
        environment.save(options, result | conclusions(result))
    return int(any(row.get("errors") for row in result["rows"]))
