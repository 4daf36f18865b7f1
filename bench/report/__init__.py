"""All results as one page, plots, the picture of the data path, and the tables of results in README and docs/.

Writes to the folder of ``--results``: report.html, one self-contained page; plots/, a PNG of each figure; and path.svg.
The tables between markers in ``PLACES`` are made from the same files, so that no figure in them is typed by hand;
``--check`` writes nothing and exits with 1 where one of them or path.svg is not what the files say. What a measurement
has to say stands in its file (``bench/findings.py``); here it is only laid out.
"""

import argparse
import sys
from pathlib import Path

from bench.environment import ROOT
from bench.report import page, path, tables
from bench.report.results import read

RESULTS = ROOT / "bench/results"
PLACES = {
    "headline": "README.md",
    "recipes": "README.md",
    "scaling": "docs/scaling.md",
    "results": "docs/results.md",
}  # of tables


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files [bench/results]")
    parser.add_argument("--output", type=Path, help="the page [report.html in that folder]; plots/ goes beside it")
    parser.add_argument("--check", action="store_true", help="are the tables current? writes nothing")
    options = parser.parse_args(arguments)
    options.results = options.results.resolve()  # tables name the folders of results as they lie in the repository
    try:
        results = read(options.results)
        if not results:
            raise ValueError(f"{options.results} holds no results; expected files of python -m bench SUBJECT --json")
        picture = path.draw(results)
        written = {options.results / "path.svg": picture} if picture else {}
        if options.results == RESULTS:  # the tables are of the results that are kept
            for name, text in tables.blocks(results).items():
                file = ROOT / PLACES[name]
                written[file] = tables.placed(written.get(file) or file.read_text(), name, text, PLACES[name])
        stale = [file for file, text in written.items() if not file.exists() or file.read_text() != text]
        if options.check:
            for file in stale:
                print(f"bench report: {file.name} is not what the results say; python -m bench report", file=sys.stderr)
            return int(bool(stale))
        output = options.output or options.results / "report.html"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page.page(results, picture or "", output.parent / "plots"))
    except (ValueError, OSError) as error:
        print(f"bench report: {error}", file=sys.stderr)
        return 2
    for file in stale:
        file.write_text(written[file])
    print("\n".join(map(str, [output, *stale])))
    return 0
