"""The command line: read, and answered where it is wrong, before anything is imported that takes seconds."""

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import json
import os
import shutil
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pipeline.paths import expanded

from . import __version__

Options = TypeVar("Options")


def answer(program: str, parse: Callable[[list[str]], Any], *packages: str) -> None:
    """Ends the process where the command line asks for help or is wrong, or where torch, timm or other large packages
    cannot be loaded (under a limit of memory, for one). To be called before the imports that take seconds, the first of
    which is here."""
    try:
        if not os.path.exists(folder := os.readlink("/proc/self/cwd")):  # without it torch does not load
            raise OSError(f"called in {folder}, which is not there; expected a folder that is: cd FOLDER")
        parse(sys.argv[1:])
        try:
            tempfile.gettempdir()  # torch and timm ask for it as they are loaded
        except FileNotFoundError as error:
            raise OSError(f"{error.strerror}; expected one with room to write in: TMPDIR=FOLDER") from None
        for package in ("torch", "triton", "timm", *packages):
            try:
                importlib.import_module(package)
            except (ImportError, OSError, MemoryError, SystemError) as error:
                why = str(error) or type(error).__name__
                raise OSError(f"{package} does not load ({why}); expected it installed, and enough memory") from None
    except (ValueError, OSError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)


def parse(
    program: str, recipes: dict[str, Options] | Options, arguments: list[str], *,
    own_data: Callable[[Options], bool] | None = None,
) -> Options:  # fmt: skip
    """The config of a command line.

    An option is taken from the command line, or else from the file of ``--config``, or else from the recipe that one of
    them names, "toy" if none does. (A program without recipes gives its config as ``recipes``.) ValueError or OSError
    for what is wrong in any of these; ValueError too where ``own_data`` is true of the config and no recipe was named,
    as "toy", which is for the generated data, is seldom meant then."""
    import tyro

    for before, word in zip([program, *arguments], arguments, strict=False):
        if not word or (word.startswith("--") and word.endswith("=")):  # of a variable that is not set: Path("") is "."
            raise ValueError(f"{word or before}: nothing stands behind it; expected a value")
    for at, word in enumerate(arguments):  # tyro would name them all: a shell makes thousands of a pattern
        behind = arguments[at + 1 : at + 5]
        if word.startswith("--") and len(behind) == 4 and not any(other.startswith("--") for other in behind):
            raise ValueError(f"{word}: too many values; expected one, or a folder, or a pattern in quotes: '*'")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--recipe", "--config"):
        first.add_argument(option, nargs="?")
    named, _ = first.parse_known_args(arguments)
    if "--version" in arguments:
        print(f"aps-pretrain {__version__}")
        sys.exit()
    default = recipes["toy"] if isinstance(recipes, dict) else recipes
    given = _read(expanded(Path(named.config)), default.PROGRAM) if named.config else {}
    chosen = {}
    if isinstance(recipes, dict):
        recipe = named.recipe or given.get("recipe", "toy")
        if recipe not in list(recipes):  # of a file it may be anything
            raise ValueError(f"--recipe {recipe}: expected one of {', '.join(recipes)}")
        default, chosen = recipes[recipe], {"recipe": recipe}
    if given:
        default = _with(default, given | chosen, f"--config {named.config}")
    if shutil.get_terminal_size().columns < 10:  # in one column tyro's help comes to no end
        os.environ["COLUMNS"] = "10"
    found = tyro.cli(
        tyro.conf.OmitArgPrefixes[_grouped(default)], prog=program, args=arguments,
        description=inspect.getdoc(type(default)),
    )  # fmt: skip
    values = {name: value for group in vars(found).values() for name, value in vars(group).items()}
    own = {field.name for field in dataclasses.fields(_Own)}
    config = _with(default, {name: value for name, value in values.items() if name not in own}, program)
    if own_data and own_data(config) and not named.recipe and "recipe" not in given:
        raise ValueError(f"--recipe is missing; expected, for data of your own, one of {', '.join(recipes)}")
    return config


@dataclasses.dataclass(frozen=True)
class _Own:
    config: Path | None = None
    """A file of options: config.json of a run, or TOML. Those on the command line go before it."""
    version: bool = False
    """Print the version and end."""


def _read(file: Path, program: str) -> dict[str, Any]:
    """{option: value} of a file: TOML, or JSON as ``config.json`` of a run; tables within it are taken apart."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        content = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
        written_by, content = content.get("program", program), dict(content.get("config", content))
    except OSError as error:
        raise ValueError(f"--config {file}: {error.strerror}; expected a file of options") from None
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"--config {file}: {error}; expected a .toml file of options, or JSON as config.json of a run"
        ) from None
    if written_by != program:
        raise ValueError(f"--config {file} is of {written_by}; expected options of {program}")
    return {name.replace("-", "_"): value for name, value in flat(content).items()}


def flat(options: dict[str, Any]) -> dict[str, Any]:
    """Options with those of the tables, or dataclasses, within them among the others."""
    parts = [value if isinstance(value, dict) else {name: value} for name, value in options.items()]
    return {name: value for part in parts for name, value in part.items()}


def _with(default: Options, values: dict[str, Any], source: str) -> Options:
    """A config in which options, also those of dataclasses within it, have other values; ValueError, which begins with
    the ``source``, for names that it does not have and for values of another type."""
    changes, left = {}, dict(values)
    for field in dataclasses.fields(default):
        value, kind = getattr(default, field.name), get_type_hints(type(default))[field.name]
        if dataclasses.is_dataclass(value):
            own = {inner.name for inner in dataclasses.fields(value)}
            changes[field.name] = _with(value, {name: left.pop(name) for name in own & left.keys()}, source)
        elif field.name in left:
            changes[field.name] = _as(kind, left.pop(field.name), f"{source}: {field.name}")
    if left:
        raise ValueError(f"{source}: no option {', '.join(left)} in {type(default).PROGRAM}; see --help")
    return dataclasses.replace(default, **changes)


def _as(kind: Any, value: Any, what: str) -> Any:
    """A value of JSON or TOML as one of the type ``kind``; ValueError, which begins with ``what``, if it is none."""
    if value == "":  # as on a command line
        raise ValueError(f"{what} = '': nothing stands behind it; expected a value")
    choices = [kind, *(choice for choice in get_args(kind) if get_origin(kind) not in (tuple, Literal))]
    for choice in choices:
        if choice is Path and isinstance(value, str | Path):
            return Path(value)
        if get_origin(choice) is Literal and value in get_args(choice):
            return value
        if get_origin(choice) is tuple and isinstance(value, list | tuple) and len(value) == len(get_args(choice)):
            return tuple(_as(inner, part, what) for inner, part in zip(get_args(choice), value, strict=True))
        if choice is float and type(value) in (int, float):
            return float(value)
        if isinstance(choice, type) and type(value) is choice:
            return value
    expected = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")
    raise ValueError(f"{what} = {value!r}; expected {expected}")


def _grouped(default: Options) -> type:
    """A dataclass for tyro: the options in groups, ``GROUPS`` of the config {title: names}, those of the dataclasses
    within it in groups of their own, and then ``_Own``."""
    import tyro

    kind = type(default)
    groups = {title: (default, names) for title, names in kind.GROUPS.items()}
    for field in dataclasses.fields(default):
        if dataclasses.is_dataclass(value := getattr(default, field.name)):
            groups[field.name] = value, [inner.name for inner in dataclasses.fields(value)]
    own = _Own()
    groups["command line"] = own, ("config", "version")
    made = []
    for title, (config, names) in groups.items():
        hints, says = get_type_hints(type(config)), documented(type(config))
        fields = []
        for name in names:
            how, value, inner = {"help": says[name]}, getattr(config, name), get_args(hints[name])
            if type(None) in inner:  # what None means, the text says
                parts = get_args(inner[0]) or inner[:1]
                choices = get_origin(inner[0]) is Literal
                how["metavar"] = f"{{{','.join(parts)}}}" if choices else " ".join(p.__name__.upper() for p in parts)
            if value is None:
                how["help_behavior_hint"] = ""
            fields.append((name, Annotated[hints[name], tyro.conf.arg(**how)], value))
        if config is own:  # one does not ask for no version
            fields = [(name, tyro.conf.FlagCreatePairsOff[kind], value) for name, kind, value in fields]
        group = dataclasses.make_dataclass(title.replace(" ", "_"), fields, namespace={"__doc__": " "})
        made.append((title.replace(" ", "_"), group, dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass("Options", made)


@functools.cache  # it is asked for each group of options
def documented(kind: type) -> dict[str, str]:
    """{field: what its dataclass says of it, in a string below or in a comment beside it}."""
    found = {}
    for cls in reversed(kind.__mro__[:-1]):
        lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
        body = ast.parse("\n".join(lines)).body[0].body
        for field, text in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    found[field.target.id] = " ".join(text.value.value.split())
                else:
                    found[field.target.id] = lines[field.end_lineno - 1][field.end_col_offset :].partition("# ")[2]
    return found
