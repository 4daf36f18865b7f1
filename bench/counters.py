"""What Nsight Compute counts of each kernel at the sizes of ViT-S/16: bytes of DRAM, sectors, microseconds.

The clocks stay as they are (``--clock-control none``), so times are those of a card that is not warm.
"""

import csv
import shutil
import tempfile
from pathlib import Path

from bench import environment
from bench.findings import finding, number
from bench.once import NAMES, looked_at

METRICS = {
    "dram_bytes_read": "dram__bytes_read.sum",
    "dram_bytes_written": "dram__bytes_write.sum",
    "l2_sectors_read": "lts__t_sectors_op_read.sum",
    "l2_sectors_written": "lts__t_sectors_op_write.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "ns": "gpu__time_duration.sum",
}
# Ours, whose names are all like this, and torch's backward passes that are compared; a part of a name suffices.
KERNELS = r"regex:^_[a-z_]+_kernel|layer_norm|GammaBeta|GeluBackward"
LIMIT = 80  # seconds


def counted(text: str) -> list[dict]:
    """Rows {"kernel", of ``METRICS`` what was counted} of Nsight Compute's raw page as CSV, in base units."""
    lines = text.splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        return []
    names, _, *rows = csv.reader(lines[starts[0] :])  # the second has the units
    found = []
    for row in (row for row in rows if len(row) == len(names)):  # not what the tool says behind them
        of = dict(zip(names, row, strict=True))
        values = {name: of.get(metric, "").replace(",", "") for name, metric in METRICS.items()}
        found.append({"kernel": of["Kernel Name"]} | {name: float(v) for name, v in values.items() if v})
    return found


def profile(tool: str, small: bool) -> dict:
    """{"rows"} or {"not_run"}."""
    if shutil.which(tool) is None:
        return {"rows": [], "not_run": f"{tool} is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        command = [tool, "--clock-control", "none", "--kernel-name", KERNELS]
        command += ["--kernel-name-base", "demangled", "--print-kernel-base", "demangled"]
        command += ["--metrics", ",".join(METRICS.values()), "--csv", "--page", "raw", "--print-units", "base"]
        printed, code = looked_at([*command, "--log-file", str(log)], ["--small"] * small, LIMIT)
        said = log.read_text(errors="replace") if log.exists() else ""
    rows = counted(said)
    if code in (124, 137):
        return {"rows": rows, "not_run": f"out of time after {LIMIT} s"}
    if code or not rows:
        errors = [line for line in said.splitlines() if "ERROR" in line] + printed.strip().splitlines()[-1:]
        return {"rows": rows, "not_run": f"exit code {code}: {(errors or ['no kernel was counted'])[0]}"}
    return {"rows": rows}


def conclusions(d: dict) -> dict:
    found = [finding("counters of kernels", f"not run: {d['not_run']}")] if "not_run" in d else []
    for row in d["rows"]:
        moved = row.get("dram_bytes_read", 0) + row.get("dram_bytes_written", 0)
        text = f"{number(moved / 1e6)} MB of DRAM, {number(row.get('ns', 0) / 1e3)} us"
        per = row.get("load_sectors", 0) / max(1, row.get("load_requests", 0))
        found.append(finding(f"counters, {row['kernel'][:60]}", text, f"{number(per)} sectors a load"))
    return {"findings": found}


def main(arguments: list[str]) -> int:
    options = environment.parser("counters", "What Nsight Compute counts of each kernel.").parse_args(arguments)
    on_gpu = environment.device().type == "cuda"
    result = {"kernels": list(NAMES)}
    result |= profile("ncu", options.smoke) if on_gpu else {"rows": [], "not_run": "needs an NVIDIA GPU"}
    environment.save(options, result | conclusions(result))
    if result["rows"]:
        rows = ({"kernel": row["kernel"][:40]} | {name: row.get(name) for name in METRICS} for row in result["rows"])
        environment.print_table(list(rows))
    return 0
