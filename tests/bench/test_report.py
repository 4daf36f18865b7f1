"""README says what the result files say; what may be compared and reported, and what may not."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import ROOT

from bench import all as everything
from bench import compare, report
from bench.report import findings, path
from bench.report.results import read
from bench.timing import summary

CPU = ROOT / "bench/results/cpu-2026-11-28"
MACHINE = {"device": "card", "commit": "c" * 40, "versions": {"torch": "2.14"}}


def test_readme_and_picture_are_current():
    """If this fails: python -m bench report. All that the headline is to say is there."""
    assert report.main(["--check"]) == 0
    assert findings.headline(read(ROOT / "bench/results")).count("\n") == 2 + len(findings.HEADLINES)


def test_a_changed_result_shows(tmp_path, monkeypatch):
    """Another figure in a result file, or another one in README, makes the check fail; the report then repairs it."""
    readme = shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    results = shutil.copytree(ROOT / "bench/results", tmp_path / "results", ignore=shutil.ignore_patterns("plots"))
    monkeypatch.setattr(report, "README", readme)
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(report, "page", lambda *_: "")
    monkeypatch.setattr(findings, "ROOT", tmp_path.parent)
    check = ["--results", str(results), "--check"]
    assert report.main(check[:2]) == 0 and report.main(check) == 0
    readme.write_text(readme.read_text().replace("<!-- /headline -->", "typed by hand\n<!-- /headline -->"))
    assert report.main(check) == 1
    assert report.main(check[:2]) == 0 and report.main(check) == 0
    file = next(results.glob("*/kernel_variants.json"))
    file.write_text(file.read_text().replace("5.7631", "5.9631"))
    assert report.main(check) == 1
    readme.write_text("# APS\n")
    assert report.main(check) == 2


def test_page_is_one_file(tmp_path):
    pytest.importorskip("matplotlib")
    for number, subject in enumerate(("baselines", "soak", "unheard of")):  # of any shape, named as HTML is not
        rows = [
            {"name": "<b>&", "ms": {"p20": 1.0, "p50": 2.0, "p80": 3.0, "runs": 4}, "more": [1, None]},
            {"other": {}},
        ]
        data = {"subject": subject, "machine": MACHINE, "scale": "smoke", "rows": rows, "deep": {"a": {"b": {"c": 1}}}}
        (tmp_path / f"{number}.json").write_text(json.dumps(data))
    shutil.copy(CPU / "pipeline.json", tmp_path)
    assert report.main(["--results", str(tmp_path), "--output", str(tmp_path / "new/page.html")]) == 0
    text = (tmp_path / "new/page.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)""", text), "a request"
    assert "&lt;b&gt;&amp;" in text and "2 (1 to 3)" in text and text.count("smoke run: its figures say nothing") == 3
    assert text.count("<svg") == len(list((tmp_path / "new/plots").glob("*.png"))) == 2
    (tmp_path / "bad.json").write_text("{")
    assert report.main(["--results", str(tmp_path)]) == 2


def test_path_counts_bytes_by_shape():
    """Two views of 512 crops of 224 px; 49 of 196 patches of 16 px, as bfloat16."""
    found = path.measured(read(ROOT / "bench/results"))
    sizes = path.sizes(found)
    assert sizes["crops"] == 2 * 512 * 224 * 224 * 3 and sizes["patches"] == 2 * 512 * 49 * 768 * 2
    assert sizes["numbers"] == 2 * 512 * 196 * 4
    assert 0 < found.gather < found.step and found.input > 0


def result(seconds, **more):
    data = {"subject": "step", "machine": MACHINE, "recipe": "toy", "eager": {"step_seconds": summary(list(seconds))}}
    return data | more


def compared(tmp_path, a, b, *options):
    for name, data in (("a", a), ("b", b)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), *options])


def test_comparison_finds_what_is_slower(tmp_path, capsys):
    times = np.random.default_rng(0).lognormal(0, 0.05, 40)
    assert compared(tmp_path, result(times), result(times)) == 0
    assert compared(tmp_path, result(times), result(1.1 * times)) == 1
    assert compared(tmp_path, result(times), result(1.1 * times), "--threshold", "1.2") == 0
    assert compared(tmp_path, result(1.1 * times), result(times)) == 0
    assert "faster" in capsys.readouterr().out
    noisy = np.random.default_rng(0).lognormal(0, 1.0, 6)  # the same ratio says nothing here
    assert compared(tmp_path, result(noisy), result(1.1 * noisy)) == 0
    assert "not sure" in capsys.readouterr().out
    rates = [
        result(times, rates=[{"provider": "loader", "images/s": rate, "times this loader's CPU": x}])
        for rate, x in ((90, 1), (100, 1), (90, 2), (100, 2))
    ]
    assert compared(tmp_path, rates[1], rates[0]) == 1 and compared(tmp_path, rates[0], rates[1]) == 0
    assert compared(tmp_path, rates[3], rates[2]) == 0  # a control


def test_intervals_hold_what_they_say():
    """Of 400 pairs of equal laws about 95 % contain 1; three standard errors are 3.3 %, the model is not exact."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        a, b = (dict(compare.figures({"seconds": summary(list(rng.lognormal(0, 0.1, 30)))})) for _ in range(2))
        low, high = compare.judged(a["seconds"], b["seconds"], 1.0)["95 % interval"].split(" to ")
        inside += float(low) <= 1 <= float(high)
    assert 0.91 < inside / 400 < 0.985


@pytest.mark.parametrize("changes, message", [
    ({"subject": "kernels"}, "subjects step and kernels"), ({"machine": MACHINE | {"device": "other"}}, "same card"),
    ({"tests": "failed"}, "correctness tests"), ({"recipe": "imagenet-vit-s"}, "recipe toy and imagenet-vit-s"),
    ({"scale": "smoke"}, "scale full and smoke"), ({"eager": {}}, "no time and no rate in common"),
])  # fmt: skip
def test_comparison_refuses(changes, message, tmp_path, capsys):
    times = [1.0, 1.1, 1.2]
    assert compared(tmp_path, result(times), result(times, **changes)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


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
    assert refused["tests"] == "failed" and set(refused) == {"subject", "machine", "tests", "test_files"}
    assert fine["tests"] == "passed" and fine["scale"] == "smoke" and "flop_per_second" in fine
    assert [row.what for row in findings.findings(read(tmp_path))] == ["machine (refused)"]


def test_every_part_names_tests_that_exist():
    for part in everything.PARTS:
        for test in part.tests:
            assert part.name == "baselines" or (ROOT / "tests" / test.split("::")[0]).exists(), test


def test_a_commit_is_held_to_the_tests_that_it_has(tmp_path, monkeypatch, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    for names, passes in ((("good",), True), (("good", "new"), True), (("new",), True), (("good", "bad"), False)):
        tests = ("test_gone.py", *(f"test_x.py::test_{name}" for name in names))
        monkeypatch.setattr(compare, "PARTS", [everything.Part("kernels", "kernels --fast", 60, tests=tests)])
        assert compare.tests_pass(tmp_path, "kernels") == passes, names
    assert compare.tests_pass(tmp_path, "step") and "assert False" in capsys.readouterr().err


def test_commits_are_measured_in_turns(monkeypatch, capsys):
    """The same commit twice; a name that is no commit; a part whose tests fail. Its worktrees are gone afterwards."""
    calls = []

    def run(tree, subject):
        calls.append((tree.name, (tree / "train.py").exists()))
        return result([0.9, 1.0, 1.1])

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "PARTS", [])
    assert compare.main(["HEAD", "HEAD", "--turns", "3"]) == 0
    assert calls == [("a", True), ("b", True)] * 3
    assert compare.main(["HEAD", "no-such-commit"]) == 2
    assert "no-such-commit is no file" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(compare, "tests_pass", lambda tree, subject: False)
    assert compare.main(["HEAD", "HEAD"]) == 2 and len(calls) == 6
    assert "correctness tests of kernels fail at HEAD" in capsys.readouterr().err.splitlines()[-1]
    assert "/tmp" not in compare.git("worktree", "list").stdout.replace(str(ROOT), "")
