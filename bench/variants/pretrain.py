"""train.py with variants of the step: ``python -m bench.variants.pretrain NAME[,NAME] OPTIONS-OF-TRAIN.PY``.

For those that are not exact (``changes.Variant``): whether their numbers do is said by the accuracy of a run, as
``bench/learning.sh`` has it for its arms of the same names.
"""

import sys

import train
from bench.variants.changes import BY_NAME, apply
from run import program
from run.training import Training


def main(arguments: list[str]) -> None:
    names = arguments[0].split(",") if arguments else []
    if not names or set(names) - set(BY_NAME):
        sys.exit(f"bench.variants.pretrain: got {','.join(names)!r}, expected some of {', '.join(BY_NAME)}")

    class Changed(Training):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            for name in names:
                if why := BY_NAME[name].missing(self):
                    sys.exit(f"bench.variants.pretrain {name}: {why}")
            apply(names, self)

    train.Training = Changed
    train.main(arguments[1:])


if __name__ == "__main__":
    program.run("bench.variants.pretrain", main)
