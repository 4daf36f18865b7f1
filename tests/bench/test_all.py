"""All measurements in sequence: none behind tests that fail, and none stopped by another."""

import json
import re

from conftest import ROOT

from bench import all as everything
from bench.report import tables
from bench.report.results import read


def test_no_speed_behind_failing_tests_and_on_after_failures(tmp_path, monkeypatch, capsys):
    """One part whose tests fail, one that fails, one that takes too long, one that is fine."""
    (tmp_path / "test_good.py").write_text("def test(): pass\n")
    (tmp_path / "test_bad.py").write_text("def test(): assert False\n")
    good, bad = (str(tmp_path / f"test_{name}.py") for name in ("good", "bad"))
    parts = [everything.Part(name, "machine", 60, tests=tests) for name, tests in
             (("refused", (bad,)), ("broken", ()), ("long", ()), ("fine", (good,)))]  # fmt: skip
    monkeypatch.setattr(everything, "PARTS", parts)
    stream, instead = everything.stream, {"broken": ["false"], "long": ["sleep", "60"]}

    def shortened(command, limit, say):
        name = command[-1].removesuffix(".json").split("/")[-1]
        return stream(instead.get(name, command), 1.5 if name == "long" else limit, say)

    monkeypatch.setattr(everything, "stream", shortened)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which --smoke sets
    assert everything.main(["--smoke", "--out", str(tmp_path)]) == 3
    out = capsys.readouterr().out
    ended = dict(re.findall(r"^(\w+) +\d+ s  (.*)$", out, re.MULTILINE))
    assert ended == {
        "refused": "not measured: its tests failed", "broken": "failed, exit code 1",
        "long": "out of time", "fine": "ok",
    }  # fmt: skip
    refused, fine = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("refused", "fine"))
    assert refused["tests"] == "failed" and set(refused) == {
        "subject",
        "command",
        "machine",
        "tests",
        "test_files",
        "findings",
    }
    assert fine["tests"] == "passed" and fine["scale"] == "smoke" and "flop_per_second" in fine
    assert [row["what"] for row, _ in tables.findings(read(tmp_path))] == ["machine (refused)"]


def test_every_part_names_tests_that_exist():
    for part in everything.PARTS:
        for test in part.tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / "tests" / file).read_text(), test
