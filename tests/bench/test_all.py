"""All measurements in sequence: none behind tests that fail, and none stopped by another."""

import json
import re
import time
from pathlib import Path

from conftest import ROOT

from bench import __main__ as bench
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
        if name == "fine":  # here, as a program would import torch anew
            return bench.main(command[3:])
        return stream(instead.get(name, command), 1.5 if name == "long" else limit, say)

    monkeypatch.setattr(everything, "stream", shortened)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which --smoke sets
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # that of hypothesis takes seconds
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


def test_no_speed_in_a_stage_whose_tests_fail(tmp_path, monkeypatch, capsys):
    """Of what stands behind them; what was not run or cut off is no success, the first in a smoke run no failure."""
    parts = (
        everything.Part("machine", "machine", 60), everything.Part("gpu_tests", "gpu_tests", 60),
        everything.Part("step", "step --trace TRACE", 60), everything.Part("host", "host", 60, behind="others"),
    )  # fmt: skip
    monkeypatch.setitem(everything.STAGES, 1, parts)
    monkeypatch.setattr(everything, "graphics_card", lambda: "card")
    limits, code, failures = {}, {"gpu_tests": 1}, 0

    def stream(command, limit, say):
        limits[command[3]] = limit
        result = {
            "subject": command[3],
            "machine": {"device": "card"},
            "findings": [{"what": command[3], "result": "seen"}],
        }
        more = {"not_run": "2 tests", "failed": failures} if command[3] == "gpu_tests" else {}
        Path(command[-1]).write_text(json.dumps(result | more))
        if command[3] == "step":
            assert command[4:6] == ["--trace", str(tmp_path / "step.trace.json.gz")]
        return code.get(command[3], 0)

    monkeypatch.setattr(everything, "stream", stream)

    def states(*more):
        failed = everything.main(["--stage", "1", "--out", str(tmp_path), *more])
        return failed, dict(re.findall(r"^(\w+) +\d+ s  (.*)$", capsys.readouterr().out, re.MULTILINE))

    def said(part):
        return json.loads((tmp_path / f"{part}.json").read_text())

    failed, ended = states()
    assert (failed, ended["gpu_tests"], ended["host"]) == (2, "failed, exit code 1", "ok")
    assert ended["step"] == "not measured: its tests failed" and "step" not in limits and limits["machine"] == 60
    assert said("step")["tests"] == "failed" and said("host")["tests"] == "none"
    code = {"gpu_tests": 124, "host": 124}
    failed, ended = states("--limit", "30")
    assert (failed, ended["gpu_tests"], ended["step"], ended["host"]) == (2, "out of time", "ok", "out of time")
    assert said("step")["tests"] == "not run" and limits["machine"] <= 30
    (_, _, table), *_ = tables.by_machine([result for result in read(tmp_path) if result.subject == "host"])
    assert table[1][1] == "seen; out of time"
    failures = 1
    assert states()[1]["step"] == "not measured: its tests failed"
    code.clear()
    failed, ended = states()
    assert (failed, ended["gpu_tests"], ended["step"]) == (1, "not run: 2 tests", "ok")
    assert said("step")["tests"] == "not run" and "ended" not in said("host")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert states("--smoke")[0] == 0


def test_what_has_to_be_killed_is_out_of_time(tmp_path, monkeypatch):
    """Not failed, as tests that fail are, behind which no speed is measured; what is killed before is."""
    monkeypatch.setattr(everything, "GRACE", 0.2)
    deaf = everything.stream(["sh", "-c", "trap '' TERM; sleep 60 & wait; wait"], 1, print)
    killed = everything.stream(["sh", "-c", "kill -KILL $$"], 60, print)
    assert [everything.ended(code, tmp_path / "none") for code in (deaf, killed)] == [
        "out of time",
        "failed, exit code -9",
    ]


def test_nothing_of_a_part_outlives_it(tmp_path):
    """What it has started would take time from the next one; what left its group and holds its output stops nobody."""
    script = f"sleep 60 & echo $! > {tmp_path}/pid"
    said = []
    assert everything.stream(["sh", "-c", f"echo a line; {script}; sleep 60"], 1, said.append) in (124, 137)
    assert said == ["a line"]
    start = time.monotonic()
    assert everything.stream(["sh", "-c", f"setsid sleep 40 & {script}; exit 3"], 60, print) == 3
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < start + 30:
        time.sleep(0.05)
    assert time.monotonic() < start + 30


def test_every_part_names_tests_that_exist():
    for part in (*everything.PARTS, *(part for stage in everything.STAGES.values() for part in stage)):
        for test in (*part.tests, *re.findall(r"\S+/test_\w+\.py|test_\w+\.py", part.arguments)):
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / "tests" / file).read_text(), test
    said = re.findall(r"^#   \d  (.+?)(?=^#   \d|^#$)", (ROOT / "bench/device.sh").read_text(), re.M | re.S)
    for text, stage in zip(said, everything.STAGES.values(), strict=True):
        expected = sum(int(re.search(rf"\b{part.name} (\d+)", text)[1]) for part in stage)
        assert expected <= everything.STAGE_LIMIT and text.endswith(f" {expected} s\n")
        assert sum(part.seconds for part in stage) < 2 * everything.STAGE_LIMIT  # they seldom need their limits
        assert len({part.name for part in stage}) == len(stage) <= 6  # with a trace and a log 8 files
