"""The README against the code: its commands are understood, its files are there. What they do, other tests run."""

import re
import shlex

import pytest
from conftest import ROOT

import detect
import finetune
import train
from bench.__main__ import SUBJECTS
from model import export

README = (ROOT / "README.md").read_text()
PROGRAMS = {"train.py": train.parse, "finetune.py": finetune.parse, "detect.py": detect.parse}


def commands():
    """The lines of the blocks in bash, continued ones joined, without comments; and those in backquotes."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.S)).replace("\\\n", " ")
    inline = re.findall(r"`((?:OMP_NUM_THREADS=1 )?(?:\.venv/bin/)?(?:python|torchrun|make) [^`]+)`", README)
    for line in [*blocks.splitlines(), *inline]:
        words = shlex.split(line.replace("[", "").replace("]", "").replace("...", ""), comments=True)
        if any(word.endswith(("python", "torchrun", "make")) for word in words):
            yield pytest.param(words, id=" ".join(words)[:90])


@pytest.mark.parametrize("words", list(commands()))
def test_commands_are_understood(words):
    program = next((word for word in words if word in PROGRAMS), None)
    if program is not None:
        arguments = [word for word in words[words.index(program) + 1 :] if word not in ("--help", "&")]
        PROGRAMS[program](arguments)
    elif "bench" in words:
        assert set(words[words.index("bench") + 1 :][:1]) <= SUBJECTS.keys()
    elif "make" in words:
        assert re.search(rf"^{words[-1]}:", (ROOT / "Makefile").read_text(), re.M)
    elif "model.export" in words:
        assert callable(export.main)
    elif "pipeline.preview" in words:
        assert (ROOT / "pipeline" / "preview.py").exists()
    else:
        assert "venv" in words or "torchrun" in words[0], words


def test_the_file_map_is_complete():
    """Every module of the folders of the product has its name in the map, and every name there is a file."""
    table = README.split("## Files")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+\.py)`", table))
    folders = ("pipeline", "kernels", "model", "run")
    there = {path.name for folder in folders for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    there |= {path.name for path in ROOT.glob("*.py")}
    missing = there - named
    assert not missing
    assert named <= there | {path.name for path in (ROOT / "tests").iterdir()} | {
        p.name for p in (ROOT / "bench").iterdir()
    }
