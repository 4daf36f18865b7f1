"""All results as one self-contained page: what they say, their plots, and every figure in tables."""

import html
import re
from pathlib import Path

from bench.findings import number
from bench.report import plots, tables
from bench.report.results import Result, by_folder, hardware, short

LEFT_OUT = {  # of the tables
    "subject", "machine", "profile", "metrics", "command", "by_hand", "note", "findings", "plots", "path", "table"
}  # fmt: skip
LONG = 20  # rows from which on a table is folded
PERCENTILES = "p20", "p50", "p80"
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>APS: benchmarks</title>
<meta name="viewport" content="width=device-width">
<style>
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
</style></head>
<body>"""


def page(results: list[Result], picture: str, folder: Path) -> str:
    """The page; its plots go to ``folder`` too."""
    folders = by_folder(results)
    parts = ["<h1>APS: benchmarks</h1>", f'<p class="soft">{len(results)} result files; python -m bench report</p>']
    links = [(_text(name.name), _text(hardware(found))) for name, found in folders.items()]
    parts += ["<ul>", *(f'<li><a href="#{name}">{name}</a>: {what}</li>' for name, what in links), "</ul>"]
    parts += ["<h2>In short</h2>", _table(tables.headline(results)), picture]
    for title, name in ("Recipes on one GPU, on paper", "recipes"), ("Several GPUs, on paper", "table"):
        parts += [f"<h2>{title}</h2>", _table(tables.own_table(results, name))]
    parts.append("<h2>Every figure in a line</h2>")
    for title, name, table in tables.by_machine(results):
        parts += [f"<p>{_text(title)} in <code>{_text(name)}</code>:</p>", _table(table)]
    for name, found in folders.items():
        parts += [f'<h2 id="{_text(name.name)}">{_text(name.name)}</h2>', f"<p>{_text(hardware(found))}</p>"]
        for result in found:
            parts += [*_head(result), *_plots(result, folder)]
            parts += [_figures(title, rows) for title, rows in figures(result.data)]
    return "\n".join([HEAD, *parts, "</body></html>\n"])


def _head(result: Result) -> list[str]:
    """What, how, of which code, and what to think of it."""
    flags = {"smoke": ["smoke run: its figures say nothing"], "small": ["small sizes"]}.get(result.scale, [])
    for key in ("ended", "not_run", "tests"):  # of pytest's outcomes a list
        value = result.data.get(key)
        flags += [f"{key}: {value}"] if isinstance(value, str) else []
    marks = " ".join(f'<span class="flag">{_text(flag)}</span>' for flag in flags)
    how = f"{result.command}; commit {result.commit}; torch threads: {result.machine.get('torch_threads', '?')}"
    title = f"<h3>{_text(result.subject)} <small>{_text(result.path.name)}</small> {marks}</h3>"
    note = [f"<p>{_text(result.data['note'])}</p>"] if "note" in result.data else []
    return [title, f'<p class="soft">{_code(how)}</p>', *note]


def _plots(result: Result, folder: Path):
    for plot in result.data.get("plots", ()) if result.scale != "smoke" else ():
        name = "-".join([result.path.parent.name, result.path.stem, *([plot["name"]] if "name" in plot else [])])
        if plot["panels"]:  # unless all failed
            yield f"<h4>{_text(plot['title'])}</h4>\n{plots.draw(plot, folder / f'{name}.png')}"


def figures(data: dict) -> list[tuple[str, list[dict]]]:
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
    if isinstance(value, list):
        return "[" + ", ".join(map(_cell, value)) + "]"
    return "-" if value is None else short(str(value))


def _figures(title: str, rows: list[dict]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    if len(rows) == 1 and len(columns) > 4:  # one row: better as a column
        cells = [["figure", "value"], *rows[0].items()]
    table = _table(cells, "data")
    if len(cells) > LONG + 1:
        return f"<details><summary>{_text(title)}, {len(cells) - 1} rows</summary>{table}</details>"
    return (f"<h4>{_text(title)}</h4>" if title else "") + table


def _table(rows: list, style: str = "") -> str:
    """Of cells by rows, the first of heads; numbers to the right."""
    lines = []
    for row in rows:
        tag = "td" if lines else "th"
        cells = (f"<{tag}{' class=n' * isinstance(x, (int, float))}>{_code(_cell(x))}</{tag}>" for x in row)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table class="{style}">' + "\n".join(lines) + "</table></div>"


def _text(text: str) -> str:
    return html.escape(str(text))


def _code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))
