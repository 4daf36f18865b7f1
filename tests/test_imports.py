import ast
from pathlib import Path

import pytest
from conftest import ROOT, run_program

# Which of the packages a package may import beside itself. The programs may import all of them but bench.
ARROWS = {
    "kernels": set(),
    "pipeline": {"kernels"},
    "model": {"kernels"},
    "run": {"kernels", "pipeline", "model"},
    "transfer": {"kernels", "pipeline", "model", "run"},
    "bench": {"kernels", "pipeline", "model", "run", "transfer"},
}
PROGRAMS = {"train", "finetune", "detect", "embed"}


def imported(path: Path) -> set[str]:
    """The names of top level that a file imports, inside functions too, and by ``importlib`` as a constant."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= len(path.relative_to(ROOT).parts) - 1, f"{path} imports from above its package"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            names |= {part.value for part in node.args if isinstance(part, ast.Constant)}
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", [*ARROWS, "programs"])
def test_imports_point_one_way(package):
    files = [ROOT / f"{name}.py" for name in PROGRAMS] if package == "programs" else (ROOT / package).rglob("*.py")
    allowed = ARROWS["bench"] if package == "programs" else {package, *ARROWS[package]}
    ours = {*ARROWS, *PROGRAMS, "tests", "conftest"}
    wrong = {str(file.relative_to(ROOT)): names for file in files if (names := (imported(file) & ours) - allowed)}
    assert not wrong


def test_importing_does_nothing():
    """No CUDA context, no warning, no thread, no argument parser, no change of torch's random state or the environment;
    kernels come without the rest, and the input path without DALI."""
    code = """
import os, sys, threading, torch, warnings
before, state = dict(os.environ), torch.random.get_rng_state()
from kernels import *
import kernels
assert kernels.sampling._tables == {}
assert not {"pipeline", "model", "run", "train"} & set(sys.modules)
import pipeline
assert "nvidia.dali" not in sys.modules and threading.active_count() == 1
assert dict(os.environ) == before
warnings.simplefilter("default")  # of timm's and others' own imports only what is of use to a user
warnings.simplefilter("error", UserWarning)
for kind in DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning:
    warnings.simplefilter("ignore", kind)
import train, finetune, detect, embed, run.preview, transfer.detection.scenes, transfer.probe
assert torch.equal(state, torch.random.get_rng_state())
assert not torch.cuda.is_initialized() and threading.active_count() == 1
assert not {"tyro", "pycocotools"} & set(sys.modules)
"""
    done = run_program("-W", "error", "-c", code, fresh=True)
    assert done.stdout == done.stderr == ""
