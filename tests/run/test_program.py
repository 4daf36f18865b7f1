"""How a program ends, in one line."""

import dataclasses
import errno
from typing import Literal

import pytest

from pipeline import TooManyBadFiles
from run import program
from run.progress import TooManySkipped
from run.signals import STOPPED

ENDS = [
    (TooManyBadFiles("21 of 50 images cannot be used"), "a.py: 21 of 50 images cannot be used; see rejected.jsonl."),
    (TooManySkipped("5 steps in a row"), "a.py: 5 steps in a row. Lower --lr"),
    (OSError(errno.ENOSPC, "No space left"), "a.py: [Errno 28] No space left in the output folder; what was saved"),
    (OSError(errno.ENOSPC, "No space left", "x.pt"), "a.py: [Errno 28] No space left: 'x.pt'; what was saved before"),
    (OSError(errno.ENOENT, "None there"), "a.py: [Errno 2] None there; what was saved before is intact"),
    (RuntimeError("[/gloo/pair.cc] Closed [::1] x\ny"), "a.py: most likely another rank has ended (Closed [::1] x); "),
]


@pytest.mark.parametrize(("error", "said"), ENDS, ids=lambda value: type(value).__name__)
def test_what_ends_a_program_is_one_line(monkeypatch, error, said):
    monkeypatch.setattr("sys.argv", ["a.py", "x"])

    def main(arguments):
        assert arguments == ["x"]
        raise error

    with pytest.raises(SystemExit) as end:
        program.run("a.py", main)
    assert end.value.code.startswith(said) and "\n" not in end.value.code


def test_other_errors_are_not_hidden_and_wrong_input_is_said_by_one_rank(monkeypatch, capsys):
    def broken(_):
        raise RuntimeError("a bug")

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="a bug"):
        program.run("a.py", broken)
    with pytest.raises(SystemExit) as end:
        program.run("a.py", interrupted)
    assert end.value.code == STOPPED and capsys.readouterr().err.startswith("a.py: interrupted; the same command")
    for rank, said in (("0", "a.py: wrong\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end, program.opening("a.py"):
            raise ValueError("wrong")
        assert end.value.code == 2 and capsys.readouterr().err == said


def test_the_recipe_of_a_command_line_gives_the_defaults(capsys):
    """Wherever it stands; a shortened option is not taken for it, and help is that of the recipe."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        recipe: Literal["toy", "large"] = "toy"
        rate: float = 1.0

    recipes = {"toy": Options(), "large": Options("large", 5.0)}
    for words, expected in (
        ((), Options()), (("--rate", "2"), Options("toy", 2.0)), (("--recipe", "large"), Options("large", 5.0)),
        (("--rate", "2", "--recipe=large"), Options("large", 2.0)),
    ):  # fmt: skip
        assert program.parse("a.py", recipes, list(words)) == expected
    for words in (("--rate", ""), ("--rate=",), ("", "--rate", "2")):  # "$RATE", where it is not set
        with pytest.raises(ValueError, match=r"^(--rate=?|a\.py): nothing stands behind it"):
            program.parse("a.py", recipes, list(words))
    for words in (("--rec", "large"), ("--recipe", "none")):
        with pytest.raises(SystemExit):
            program.parse("a.py", recipes, list(words))
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        program.parse("a.py", recipes, ["--recipe", "large", "--help"])
    assert not end.value.code and "5.0" in capsys.readouterr().out
