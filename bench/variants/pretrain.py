"""train.py with variants of the step: ``python -m bench.variants.pretrain NAME[,NAME] OPTIONS-OF-TRAIN.PY``.

For those that are not exact (``changes.Variant``): whether their numbers do is said by the accuracy of a run, as
``bench/learning.sh`` has it for its arms of the same names.
"""

import runpy
import sys
from pathlib import Path

from bench.variants.changes import BY_NAME, apply
from run import training


def main(arguments: list[str]) -> None:
    names = arguments[0].split(",") if arguments else []
    if not names or set(names) - set(BY_NAME):
        sys.exit(f"bench.variants.pretrain: got {','.join(names)!r}, expected some of {', '.join(BY_NAME)}")

    class Changed(training.Training):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            for name in names:
                if why := BY_NAME[name].missing(self):
                    sys.exit(f"bench.variants.pretrain {name}: {why}")
            apply(names, self)

    training.Training = Changed  # which train.py takes from there
    program = Path(__file__).resolve().parents[2] / "train.py"
    sys.argv = [str(program), *arguments[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
