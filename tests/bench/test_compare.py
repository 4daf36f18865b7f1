"""What is slower is found, and what must not be compared is refused; two commits are measured in turns."""

import json

import numpy as np
import pytest
from conftest import ROOT

from bench import all as everything
from bench import compare
from bench.timing import summary

MACHINE = {"device": "card", "commit": "c" * 40, "versions": {"torch": "2.14"}}


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
    stores = [  # rows that only a number tells apart, and one that is not ours
        result(times, rows=[{"reader": reader, "at a time": n, "images/s": rate} for reader, n, rate in rows])
        for first, last in ((100, 100), (90, 100), (100, 90))
        for rows in [[("this reader", 8, first), ("this reader", 32, 100), ("DALI's client", 8, last)]]
    ]
    assert compared(tmp_path, stores[0], stores[1]) == 1 and compared(tmp_path, stores[0], stores[2]) == 0


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


def test_a_commit_is_held_to_the_tests_that_it_has(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # that of hypothesis takes seconds
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
