"""All results as one page, plots, the picture of the data path, and README's tables of results.

Writes to the folder of ``--results``: report.html, one self-contained page; plots/, a PNG of each figure; and path.svg.
README's tables between markers are made from the same files, so that no figure in them is typed by hand; ``--check``
writes nothing and exits with 1 where README or path.svg is not what the files say.
"""

import argparse
import html
import re
import sys
from pathlib import Path

from bench.environment import ROOT
from bench.report import findings, path, plots
from bench.report.results import Result, by_folder, hardware, number, read, short

RESULTS = ROOT / "bench/results"
README = ROOT / "README.md"
LEFT_OUT = {"subject", "machine", "profile", "metrics", "command", "note"}  # of the tables
LONG = 20  # rows from which on a table is folded
PERCENTILES = "p20", "p50", "p80"
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --paper: #fff; --tint: #f6f8fa }
@media (prefers-color-scheme: dark) { :root { --ink: #f0f6fc; --soft: #9198a1; --line: #3d444d; --paper: #0d1117;
  --tint: #151b23 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  padding: 1.5rem; max-width: 68rem }
h1 { margin: 0 } h2 { border-bottom: 1px solid var(--line); margin-top: 2.5rem } h3 { margin: 2rem 0 .2rem }
p.soft, .soft { color: var(--soft) } code { background: var(--tint); padding: .1em .3em; border-radius: 4px }
.scroll { overflow-x: auto; margin: .6rem 0 } table { border-collapse: collapse; font-size: 13px }
th, td { border: 1px solid var(--line); padding: .25rem .55rem; text-align: left; vertical-align: top }
th { background: var(--tint) } .data td { white-space: nowrap }
td.n { text-align: right; font-variant-numeric: tabular-nums }
svg { max-width: 100%; height: auto } summary { cursor: pointer } a { color: inherit }
.flag { border: 1px solid; border-radius: 4px; padding: 0 .4em; font-size: 12px }
"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files [bench/results]")
    parser.add_argument("--output", type=Path, help="the page [report.html in that folder]; plots/ goes beside it")
    parser.add_argument("--check", action="store_true", help="is README current? writes nothing")
    options = parser.parse_args(arguments)
    try:
        results = read(options.results)
        if not results:
            raise ValueError(f"{options.results} holds no results; expected files of python -m bench SUBJECT --json")
        written = {README: section(README.read_text(), results), options.results / "path.svg": path.draw(results)}
        if options.results.resolve() != RESULTS:  # README is about the results that are kept
            del written[README]
        stale = [file for file, text in written.items() if text and (not file.exists() or file.read_text() != text)]
        if options.check:
            for file in stale:
                print(f"bench report: {file.name} is not what the results say; python -m bench report", file=sys.stderr)
            return int(bool(stale))
        output = options.output or options.results / "report.html"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page(results, written[options.results / "path.svg"], output.parent / "plots"))
    except ImportError as error:
        print(f"bench report: {error}; expected what pip install '.[bench]' brings", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"bench report: {error}", file=sys.stderr)
        return 2
    for file in stale:
        file.write_text(written[file])
    print("\n".join(map(str, [output, *stale])))
    return 0


def section(readme: str, results: list[Result]) -> str:
    """README with its tables between the markers made anew."""
    for name, table in findings.README.items():
        opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
        if not readme.count(opening) == readme.count(closing) == 1 or readme.index(opening) > readme.index(closing):
            raise ValueError(f"README.md: expected {opening} and below it {closing}, each once")
        before, rest = readme.split(opening)
        readme = f"{before}{opening}\n\n{table(results)}\n{closing}{rest.split(closing)[1]}"
    return readme


def page(results: list[Result], picture: str | None, folder: Path) -> str:
    """The page; its plots go to ``folder`` too."""
    drawn = {}
    for plot in plots.plots(results):
        svg = plots.draw(plot, folder / f"{plot.name}.png")
        drawn.setdefault(plot.source.path, []).append(f"<h4>{_text(plot.title)}</h4>\n{svg}")
    parts = ["<h1>APS: benchmarks</h1>", f'<p class="soft">{len(results)} result files; python -m bench report</p>']
    folders = by_folder(results)
    links = [
        f'<li><a href="#{_text(f.name)}">{_text(f.name)}</a>: {_text(hardware(r))}</li>' for f, r in folders.items()
    ]
    parts += ["<ul>", *links, "</ul>", "<h2>In short</h2>", _markdown(findings.headline(results)), picture or ""]
    parts += ["<h2>Several GPUs, on paper</h2>", _markdown(findings.scaling(results))]
    parts += ["<h2>Every figure in a line</h2>", _markdown(findings.markdown(results, folded=False))]
    for name, found in folders.items():
        parts += [f'<h2 id="{_text(name.name)}">{_text(name.name)}</h2>', f"<p>{_text(hardware(found))}</p>"]
        for result in found:
            parts += [*_head(result), *drawn.get(result.path, ()), *map(_table, tables(result.data))]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>APS: benchmarks</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _head(result: Result) -> list[str]:
    """What, how, of which code, and what to think of it."""
    flags = []
    if result.small:
        flags.append("smoke run: its figures say nothing")
    if result.data.get("scale") == "small":
        flags.append("small sizes")
    if isinstance(result.data.get("skipped"), str):
        flags.append(f"skipped: {result.data['skipped']}")
    if isinstance(result.data.get("tests"), str):
        flags.append(f"tests: {result.data['tests']}")
    marks = " ".join(f'<span class="flag">{_text(flag)}</span>' for flag in flags)
    command = _code(result.command)
    lines = [f"<h3>{_text(result.subject)} <small>{_text(result.path.name)}</small> {marks}</h3>"]
    threads = result.machine.get("torch_threads", "?")
    lines.append(f'<p class="soft">{command}; commit {_text(result.commit)}; torch threads: {threads}</p>')
    if "note" in result.data:
        lines.append(f"<p>{_text(result.data['note'])}</p>")
    return lines


def tables(data: dict) -> list[tuple[str, list[dict]]]:
    """Any result as tables (title, rows): single figures, lists of rows, and what has the same keys side by side."""
    single, found, alike = {}, [], {}
    for name, value in data.items():
        if name in LEFT_OUT:
            continue
        if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
            if all(isinstance(v, dict) for row in value.values() for v in row.values()):  # two levels of names
                rows = [{"": key, " ": k} | _flat(v) for key, row in value.items() for k, v in row.items()]
            else:
                rows = [{"": key} | _flat(row) for key, row in value.items()]
            found.append((name, rows))
        elif isinstance(value, dict) and not value.keys() >= set(PERCENTILES):
            alike.setdefault(frozenset(value), []).append({"": name} | _flat(value))
        elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            found.append((name, [_flat(row) for row in value]))
        else:
            single |= _flat({name: value})
    same = [(rows[0].pop("") if len(rows) == 1 else "", rows) for rows in alike.values()]
    return [*([("", [single])] if single else []), *same, *found]


def _flat(row: dict) -> dict:
    """Percentiles as one cell, other dicts as columns of their own, lists as text."""
    cells = {}
    for name, value in row.items():
        if name in LEFT_OUT:
            continue
        if isinstance(value, dict) and value.keys() >= set(PERCENTILES):
            low, middle, high = (number(value[p]) for p in PERCENTILES)
            cells[f"{name}: p50 (p20 to p80)"] = f"{middle} ({low} to {high})"
            cells |= {f"{name}: {key}": v for key, v in value.items() if key not in PERCENTILES}
        elif isinstance(value, dict):
            cells |= {f"{name}: {key}": v for key, v in _flat(value).items()}
        elif isinstance(value, list):
            cells[name] = ", ".join(_cell(v) for v in value)
        else:
            cells[name] = value
    return cells


def _cell(value) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_cell(v)}" for key, v in value.items())
    if isinstance(value, list):
        return "[" + ", ".join(map(_cell, value)) + "]"
    return "-" if value is None else short(str(value))


def _table(table: tuple[str, list[dict]]) -> str:
    title, rows = table
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if len(rows) == 1 and len(columns) > 4:  # one row: better as a column
        rows, columns = [{"figure": key, "value": rows[0][key]} for key in columns], ["figure", "value"]
    lines = ["<tr>" + "".join(f"<th>{_text(column)}</th>" for column in columns) + "</tr>"]
    for row in rows:
        cells = ((row.get(column, ""), isinstance(row.get(column), (int, float))) for column in columns)
        numbers = (f"<td{' class=n' * numeric}>{_text(_cell(value))}</td>" for value, numeric in cells)
        lines.append(f"<tr>{''.join(numbers)}</tr>")
    text = '<div class="scroll"><table class="data">' + "\n".join(lines) + "</table></div>"
    if len(rows) > LONG:
        return f"<details><summary>{_text(title)}, {len(rows)} rows</summary>{text}</details>"
    return (f"<h4>{_text(title)}</h4>" if title else "") + text


def _markdown(text: str) -> str:
    """Of the tables that ``findings.markdown`` writes, and only those."""
    lines = []
    for line in text.splitlines():
        if line.startswith("|---"):
            continue
        if line.startswith("| "):
            if not lines or not lines[-1].startswith("<tr>"):
                lines.append('<div class="scroll"><table>')
            tag = "th" if lines[-1].startswith("<div") else "td"
            cells = (f"<{tag}>{_code(cell)}</{tag}>" for cell in line[2:-2].split(" | "))
            lines.append(f"<tr>{''.join(cells)}</tr>")
        else:
            if lines and lines[-1].startswith("<tr>"):
                lines.append("</table></div>")
            lines.append(f"<p>{_code(line)}</p>" if line else "")
    return "\n".join([*lines, "</table></div>"] if lines and lines[-1].startswith("<tr>") else lines)


def _text(text: str) -> str:
    return html.escape(str(text))


def _code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))
