"""``pytest -m gpu`` with its outcome as JSON. Only files with such tests are collected: others need more packages.

A test that is skipped, for want of a package or of the GPU, has not been run: "not_run" says how many, and why.
"""

import argparse
from importlib.util import find_spec

from bench import environment
from bench.findings import finding
from bench.pipeline import skip


class Outcomes:
    """A pytest plugin that notes what became of every test, in the file as it goes."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.result = options, {"passed": 0, "failed": 0, "skipped": 0, "tests": []}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self._note(report, report.duration)

    def pytest_collectreport(self, report):
        if report.outcome != "passed":  # a whole file may be skipped
            self._note(report, 0.0)

    def _note(self, report, seconds):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        outcome = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(seconds, 2)}
        self.result["tests"].append(outcome | {"reason": reason[-500:].replace(f"{environment.ROOT}/", "")})
        self.result[report.outcome] += 1
        if report.outcome == "skipped":
            self.result["not_run"] = f"{self.result['skipped']} tests ({reason.removeprefix('Skipped: ')})"
        environment.save(self.options, self.result | conclusions(self.result))


def conclusions(d: dict) -> dict:
    names = {"passed": "passed", "failed": "failed", "skipped": "not run"}
    counts = ", ".join(f"{d[key]} {name}" for key, name in names.items() if d[key])
    return {"findings": [finding("tests marked `gpu`", counts)]}


def main(arguments: list[str]) -> int:
    options = environment.parser("gpu_tests", "The tests marked gpu.")
    options.add_argument("--files", nargs="+", help="below tests/, in this order [all that have such tests]")
    options.add_argument("--workers", type=int, default=1, help="processes, with pytest-xdist: most of it is compiling")
    options = options.parse_args(arguments)
    if find_spec("pytest") is None:
        return skip(options, "pytest is not installed")
    import pytest

    tests = environment.ROOT / "tests"
    files = [tests / file for file in options.files or ()]
    files = files or sorted(path for path in tests.rglob("test_*.py") if "mark.gpu" in path.read_text())
    command = ["-m", "gpu", "--continue-on-collection-errors", "-p", "no:cacheprovider", *map(str, files)]
    if options.workers > 1 and environment.device().type == "cuda" and find_spec("xdist"):
        # One test at a time: by default the first two, which compile the most, would be one process's.
        command += ["-n", str(options.workers), "--dist", "loadgroup"]
    return int(pytest.main(command, plugins=[Outcomes(options)]))
