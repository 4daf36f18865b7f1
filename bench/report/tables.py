"""The tables of README and docs/, put there by ``bench report``: the rows that measurements keep in their results."""

from collections.abc import Iterable
from itertools import pairwise

from bench.environment import ROOT
from bench.findings import number
from bench.report.results import Result, by_folder, hardware, short

ORDER = (  # of subjects in a table; those that are not here come last
    "machine", "gpu_tests", "step variants", "step", "input", "pipeline", "train", "kernel variants", "kernels",
    "DALI on CPU and GPU", "compile", "soak", "learning", "demo", "baselines",
)  # fmt: skip
Table = list[list[str]]  # cells by rows, the first of heads; `code` between backticks


def findings(results: list[Result]) -> list[tuple[dict, Result]]:
    """Rows and where they stand, in the order of tables: of each device and measurement the newest."""
    newest = {}
    for result in results:
        for row in result.data["findings"] if result.scale != "smoke" else ():
            newest.setdefault((result.machine["device"], row["what"]), (row, result))
    places = {result.path: place for place, found in enumerate(by_folder(results).values()) for result in found}
    order = {subject: place for place, subject in enumerate(ORDER)}
    return sorted(newest.values(), key=lambda of: (places[of[1].path], order.get(of[1].subject, len(order))))


def shown(row: dict) -> str:
    """The result of a row as text, without what else there is to say."""
    result = row["result"]
    return result if isinstance(result, str) else f"{number(result)} {row['unit']}"


def headline(results: list[Result]) -> Table:
    """The rows that say that a reader meets them first."""
    rows = {}
    for row, result in findings(results):
        if "headline" in row:
            device = result.machine["device"]
            rows.setdefault((device, row["headline"]), [row["what"], shown(row), device])
    return [["what", "measured or counted", "on"], *rows.values()]


def own_table(results: list[Result], name: str) -> Table:
    """The newest table of that name that a result brings along, by ``bench scaling``: what several GPUs should give
    ("table"), and what each recipe takes on one ("recipes")."""
    found = (result.data[name] for result in results if result.scale != "smoke" and name in result.data)
    return next(found, [["not predicted: no result of `python -m bench scaling`"]])


def by_machine(results: list[Result]) -> Iterable[tuple[str, str, Table]]:
    """(hardware, name of the folder, all rows of it); each names its file and the commit measured."""
    rows = findings(results)
    for folder in by_folder(results):
        found = [(row, result) for row, result in rows if result.path.parent == folder]
        if not found:
            continue
        sources = [result for _, result in found]
        commands = [sources[0].command]
        commands += ["as above" if b is a else b.command for a, b in pairwise(sources)]
        table = [["what", "result", "command", "file", "commit"]]
        for (row, result), command in zip(found, commands, strict=True):
            more = [row.get("more"), result.data.get("ended")]  # the latter of a result that is not whole
            text = "; ".join([shown(row), *filter(None, more)])
            commit = short(row["commit"]) if "commit" in row else result.commit
            table.append([row["what"], text, command, f"`{result.path.name}`", commit])
        date = f" {sources[0].date}," if sources[0].date else ""
        small = " small sizes," * any(result.scale == "small" for result in sources)
        name = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder.name
        yield f"{hardware(sources)};{date}{small}", f"{name}/", table


def markdown(table: Table) -> str:
    lines = [" | ".join(row) for row in table]
    return "\n".join(["| " + lines[0] + " |", "|---" * len(table[0]) + "|", *(f"| {line} |" for line in lines[1:])])


def blocks(results: list[Result]) -> dict[str, str]:
    """{name of its markers: all that stands between them}."""
    folded = (
        f"<details><summary>{title} {len(table) - 1} figures in <code>{name}</code></summary>\n\n{markdown(table)}\n\n"
        "</details>"
        for title, name, table in by_machine(results)
    )
    return {
        "headline": markdown(headline(results)), "recipes": markdown(own_table(results, "recipes")),
        "scaling": markdown(own_table(results, "table")), "results": "\n\n".join(folded),
    }  # fmt: skip


def placed(page: str, name: str, text: str, file: str) -> str:
    """The page of that file with the text between the markers of that name; ValueError where these are missing."""
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    if not page.count(opening) == page.count(closing) == 1 or page.index(opening) > page.index(closing):
        raise ValueError(f"{file}: expected {opening} and below it {closing}, each once")
    before, rest = page.split(opening)
    return f"{before}{opening}\n\n{text}\n\n{closing}{rest.split(closing)[1]}"
