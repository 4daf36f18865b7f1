import pytest
from conftest import ROOT, run_program

IMPORTS_OF = {
    "kernels": (),
    "pipeline": ("kernels",),
    "model": ("kernels", "pipeline"),
    "run": ("kernels", "pipeline", "model"),
}


def test_importing_does_nothing():
    """No CUDA context, no warning, no thread, no argument parser, no change of torch's random state."""
    code = (
        "import sys, threading, torch; state = torch.random.get_rng_state();"
        "import kernels, pipeline, model, run.session, run.knn, run.pretrained, run.progress, train;"
        "import pipeline.coco, pipeline.scenes, model.detector, run.coco, run.detection, detect;"
        "assert torch.equal(state, torch.random.get_rng_state());"
        "assert not torch.cuda.is_initialized() and threading.active_count() == 1;"
        "assert not {'tyro', 'pycocotools'} & set(sys.modules)"
    )
    done = run_program("-W", "error::UserWarning", "-c", code)
    assert done.stdout == done.stderr == ""


@pytest.mark.parametrize("package", IMPORTS_OF)
def test_imports_point_one_way(package):
    lines = [
        line.split()[1].split(".")[0]
        for path in (ROOT / package).glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith(("import ", "from ")) and not line.startswith("from .")
    ]
    ours = {name for name in lines if name in {*IMPORTS_OF, "train", "detect", "bench", "tests"}}
    assert ours <= {package, *IMPORTS_OF[package]}
