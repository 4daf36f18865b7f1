"""README, docs/ and the page say what the result files say, and these what follows from their figures."""

import json
import re
import shutil
from importlib import import_module

import pytest
from conftest import ROOT

from bench import report
from bench.__main__ import SUBJECTS
from bench.findings import bar, finding, plot
from bench.report import page, path, tables
from bench.report.results import read

RESULTS = ROOT / "bench/results"
MACHINE = {"device": "card", "driver": "1", "commit": "c" * 40, "versions": {"torch": "2.14"}}


def write(file, *rows, **more):
    file.parent.mkdir(exist_ok=True)
    data = {"subject": "any", "command": "make any", "machine": MACHINE, "findings": [finding(*row) for row in rows]}
    file.write_text(json.dumps(data | more))


def test_readme_and_picture_are_current():
    """If this fails: python -m bench report."""
    assert report.main(["--check"]) == 0


def test_what_a_result_says_follows_from_its_figures():
    """All rows and plots of the kept results but those measured by hand: no figure in them is typed."""
    subjects = set()
    for result in read(RESULTS):
        if result.subject in SUBJECTS:
            said = json.loads(json.dumps(import_module(f"bench.{result.subject}").conclusions(result.data)))
            assert said == {key: result.data[key] for key in said}, result.path.name
            subjects.add(result.subject)
    no_results = {"attention", "all", "report", "compare", "curves", "once"}
    not_kept_yet = {"collectives", "counters", "kinds", "passes", "products", "sanitizer"}
    assert subjects == set(SUBJECTS) - no_results - not_kept_yet


def test_a_changed_result_shows(tmp_path, monkeypatch, capsys):
    """Another row in a result file, or another one in a table, makes the check fail; the report then repairs it."""
    readme = shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    results = shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("plots"))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(page, "page", lambda *_: "")
    monkeypatch.setattr(tables, "ROOT", tmp_path.parent)
    check = ["--results", str(results), "--check"]
    assert report.main(check[:2]) == 0 and report.main(check) == 0
    for place, name in ((readme, "headline"), (docs / "scaling.md", "scaling"), (docs / "results.md", "results")):
        place.write_text(place.read_text().replace(f"<!-- /{name} -->", f"typed by hand\n<!-- /{name} -->"))
    assert report.main(check) == 1
    said = capsys.readouterr().err
    assert all(f": {name} is not what" in said for name in ("README.md", "scaling.md", "results.md")), said
    assert report.main(check[:2]) == 0 and report.main(check) == 0
    changes = (
        ("*/kernel_variants.json", "57.6 us", "59.6 us", "README.md"),
        ("*H200*/kernels.json", "3.2232", "3.4232", "path.svg"),
    )
    for pattern, old, new, stale in changes:
        file = next(results.glob(pattern))
        text = file.read_text()
        file.write_text(text.replace(old, new))
        assert report.main(check) == 1, stale
        file.write_text(text)
    readme.write_text("# APS\n")
    assert report.main(check) == 2


def test_of_a_measurement_the_newest_row_stands(tmp_path):
    """In files of three dates; a smoke run says nothing. A number has its unit, a row may have a commit of its own."""
    old, new, smoke = (tmp_path / f"card-2026-01-0{day}" / "any.json" for day in (1, 2, 3))
    write(old, ("speed", "slow"), ("size", "large"))
    rows = finding("speed", 12345.6, "so so", unit="m/s", headline="first"), finding("colour", "red", commit="d" * 40)
    write(new, findings=rows)
    write(smoke, ("speed", "none"), scale="smoke", table=[["of no use"]])
    results = read(tmp_path)
    assert tables.headline(results)[1:] == [["speed", "12,350 m/s", "card"]]
    found = {name: table[1:] for _, name, table in tables.by_machine(results)}
    assert found == {
        f"{new.parent.name}/": [
            ["speed", "12,350 m/s; so so", "`make any`", "`any.json`", "c" * 7],
            ["colour", "red", "as above", "`any.json`", "d" * 7],
        ],
        f"{old.parent.name}/": [["size", "large", "`make any`", "`any.json`", "c" * 7]],
    }  # fmt: skip
    assert "not predicted" in tables.own_table(results, "table")[0][0]
    write(old, table=[["GPUs", "8"], ["speed", "1"]], by_hand=True)
    assert tables.own_table(read(tmp_path), "table")[1] == ["speed", "1"]
    assert read(tmp_path)[-1].command == "by hand; now `make any`"


@pytest.mark.parametrize("text, missing", [
    ("{", "is no JSON"), ("[]", '"subject"'), ('{"subject": "step", "machine": {}}', 'has no "findings"'),
])  # fmt: skip
def test_a_file_that_says_nothing_is_refused(text, missing, tmp_path, capsys):
    (tmp_path / "bad.json").write_text(text)
    assert report.main(["--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "bad.json" in error and missing in error and error.count("\n") == 1


def test_page_is_one_file(tmp_path):
    pytest.importorskip("matplotlib")
    for number in range(3):  # of any shape, named as HTML is not
        rows = [
            {"name": "<b>&", "ms": {"p20": 1.0, "p50": 2.0, "p80": 3.0, "runs": 4}, "more": [1, None]},
            {"other": {}},
        ]
        drawn = [plot("not drawn", "s", {"": [1.0]})]
        data = {"scale": "smoke", "rows": rows, "deep": {"a": {"b": {"c": 1}}}, "plots": drawn}
        write(tmp_path / f"{number}.json", **data)
    bars = [bar("<i>", 2.0, 1.0, 3.0), bar("other", 300.0, ours=False)]
    drawn = [
        plot("Bars & values", "s", {"a": bars, "none": [], "b": [1.0, 2.0]}),
        plot("More", "", {"": bars}, name="second"),
    ]
    write(tmp_path / "full.json", ("a <row>", "of `code`"), plots=drawn)
    assert report.main(["--results", str(tmp_path), "--output", str(tmp_path / "new/page.html")]) == 0
    text = (tmp_path / "new/page.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)""", text), "a request"
    assert "&lt;b&gt;&amp;" in text and "2 (1 to 3)" in text and text.count("smoke run: its figures say nothing") == 3
    assert "<td>a &lt;row&gt;</td><td>of <code>code</code></td>" in text and "Bars &amp; values" in text
    pictures = sorted(file.name for file in (tmp_path / "new/plots").glob("*.png"))
    assert text.count("<svg") == 2 and pictures == [f"{tmp_path.name}-full{end}.png" for end in ("-second", "")]


def test_path_counts_bytes_by_shape():
    """Two views of 512 crops of 224 px; 49 of 196 patches of 16 px, as bfloat16."""
    found = path.measured(read(RESULTS))
    sizes = path.sizes(found["input"][0])
    assert sizes["crops"] == 2 * 512 * 224 * 224 * 3 and sizes["patches"] == 2 * 512 * 49 * 768 * 2
    assert sizes["numbers"] == 2 * 512 * 196 * 4
    seconds = {stage: of["seconds"] for stage, (of, _) in found.items()}
    assert 0 < seconds["gather"] < seconds["step"] and seconds["input"] > 0


def test_path_takes_the_quickest_of_the_newest_of_one_gpu(tmp_path):
    """Of no other card and no CPU, however quick; without a stage there is no picture."""
    said = {stage: {"seconds": 2.0} for stage in path.STAGES[:4]}
    for folder, seconds, machine in (
        ("old-2026-01-01", 1.0, {}), ("new-2026-01-02", 3.0, {}), ("cpu-2026-01-03", 0.1, {"driver": None}),
        ("another-2026-01-02", 0.1, {"device": "another"}),
    ):  # fmt: skip
        more = {"path": said | {"step": {"seconds": seconds}}, "machine": MACHINE | machine}
        write(tmp_path / folder / "a.json", **more)
    write(tmp_path / "new-2026-01-02" / "b.json", path={"step": {"seconds": 2.5}})
    found = path.measured(read(tmp_path))
    assert found["step"][0] == {"seconds": 2.5} and found["step"][1].path.name == "b.json"
    write(
        tmp_path / "newest-2026-01-04" / "a.json", path={"step": said["step"]}, machine=MACHINE | {"device": "newest"}
    )
    assert path.measured(read(tmp_path)) == found, "of the newest all of whose stages are there"
    for file in tmp_path.glob("*/a.json"):
        file.unlink()
    assert path.measured(read(tmp_path)) is None is path.draw(read(tmp_path))
