"""``pytest -m gpu`` with its outcome as JSON. Only files with such tests are collected: others need more packages."""

import argparse

import pytest

from bench import environment
from bench.findings import finding


class Outcomes:
    """A pytest plugin that notes what became of every test, in the file as it goes."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.result = options, {"passed": 0, "failed": 0, "skipped": 0, "tests": []}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self._note(report, report.duration)

    def pytest_collectreport(self, report):
        if report.failed:
            self._note(report, 0.0)

    def _note(self, report, seconds):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        outcome = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(seconds, 2)}
        self.result["tests"].append(outcome | {"reason": reason[-500:].replace(f"{environment.ROOT}/", "")})
        self.result[report.outcome] += 1
        environment.save(self.options, self.result | conclusions(self.result))


def conclusions(d: dict) -> dict:
    counts = ", ".join(f"{d[name]} {name}" for name in ("passed", "failed", "skipped") if d[name])
    return {"findings": [finding("tests marked `gpu`", counts)]}


def main(arguments: list[str]) -> int:
    options = environment.parser("gpu_tests", "The tests marked gpu.").parse_args(arguments)
    files = [path for path in (environment.ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    command = ["-m", "gpu", "--continue-on-collection-errors", "-p", "no:cacheprovider", *map(str, sorted(files))]
    return int(pytest.main(command, plugins=[Outcomes(options)]))
