"""Loss, accuracy and speed of one or several runs in one picture; of a run that still goes on, what there is so far."""

import argparse
import os
import sys
from pathlib import Path

from run.curves import draw, read


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench curves", description=__doc__)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="output folder of a run")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="the picture [%(default)s]")
    options = parser.parse_args(arguments)
    folders = list(dict.fromkeys(Path(os.path.abspath(run)) for run in options.runs))
    try:
        runs = dict(zip(labels(folders), map(read, folders), strict=True))
        draw(runs, options.output)
    except (ValueError, OSError) as error:
        print(f"bench curves: {error}", file=sys.stderr)
        return 2
    print(options.output)
    return 0


def labels(folders: list[Path]) -> list[str]:
    """The folders' names, with as many parents in front as tell them apart; ``folders``: absolute, each once."""
    depths = [1] * len(folders)
    while True:
        names = [str(Path(*folder.parts[-depth:])) for folder, depth in zip(folders, depths, strict=True)]
        if len(set(names)) == len(names):
            return names
        depths = [depth + (names.count(name) > 1) for name, depth in zip(names, depths, strict=True)]
