"""What the host does on a GPU, without one: on an imitation of CUDA (``imitation.c``) whose kernels compute nothing."""

import collections
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import run_program

LISTED = """
import ctypes, dataclasses, sys, torch
from kernels import cublaslt
from pipeline import Batch
from run.recipes import RECIPES
from run.recorded import Recorded
from run.training import Training

cuda, device = ctypes.CDLL("libcuda.so.1"), torch.device("cuda")
say, cublaslt._library = cuda.say, lambda: cuda
torch.exp2 = torch.exp  # the other is compiled when it is called, by a library that is not imitated
"""
STEPS = """
small = {"model": "vit_tiny_patch16_224", "image_size": 64, "depth": 2, "head_hidden": 64, "groups": 2, "batch_size": 8}
training = Training(dataclasses.replace(RECIPES["imagenet-vit-s"], **small), device, compiled=False)
views = tuple(torch.zeros(8, 64, 64, 3, dtype=torch.uint8, device=device) for _ in range(2))
boxes = torch.tensor([0, 0, 64, 64], dtype=torch.int32, device=device).expand(8, 2, 4)
numbers = torch.arange(8, device=device)
batch = Batch(views, boxes, torch.zeros(8, 2, dtype=torch.bool, device=device), numbers, numbers)
for epoch in range(4):
    say(b"batch")
    for given in zip(*training.gather(batch.views, training.sample(batch, epoch)), strict=True):
        training.step(*given, epoch)
    cublaslt.OWN.clear()  # none of the products is torch's: of 7 layers three each, and GELU of two
    assert cublaslt._product.cache_info().currsize == 3 * 7 + 2
say(b"end")
assert len(training.recorded.graphs) == 2 and not training.recorded.failed
"""
FAILING = """
cleaned = []
recorded = Recorded(lambda x: (x + x.sum().item(),), clean=lambda: cleaned.append(True))
x = torch.zeros(3, device=device)
for _ in range(8):
    assert recorded(x)[0].tolist() == [0, 0, 0]
assert recorded.failed and cleaned == [True]
before, large = torch.cuda.memory_reserved(), torch.zeros(1 << 26, device=device)
assert torch.cuda.memory_reserved() > before
del large
torch.cuda.empty_cache()  # of no avail while torch takes a recording to be going on
assert torch.cuda.memory_reserved() <= before
"""
CHANGED = """
from bench.variants import memsets
recorded = Recorded(lambda x: (x + 1,), clean=None)
recorded.kind = memsets.graph
for _ in range(8):
    recorded(x)
assert len(recorded.graphs) == 1 and not recorded.failed
"""


@pytest.fixture(scope="module")
def on_imitation(tmp_path_factory):
    """What is printed on stderr, and what the imitation lists, of the code above on it."""
    compiler, folder = shutil.which("cc") or shutil.which("gcc"), tmp_path_factory.mktemp("imitation")
    if compiler is None or not (torch.version.cuda or "").startswith("13."):
        pytest.skip("needs a C compiler, and torch for CUDA 13")
    library, listed = folder / "libcuda.so.1", folder / "listed"
    source = Path(__file__).with_name("imitation.c")
    subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    paths = {"LD_PRELOAD": library, "LD_LIBRARY_PATH": folder, "IMITATION": listed, "TRITON_CACHE_DIR": folder}
    code = LISTED + STEPS + FAILING + CHANGED
    done = run_program("-c", code, fresh=True, **{name: str(path) for name, path in paths.items()})
    return done.stderr, listed.read_text().splitlines()


def test_steps_are_recorded_and_wait_only_for_those_before(on_imitation):
    _, listed = on_imitation
    batches = [listed[slice(*ends)] for ends in pairwise([*at(listed, "batch"), *at(listed, "end")])]
    recording, recorded = batches[2:]
    for part in map(slice, at(recording, "begins"), at(recording, "ends")):
        calls = collections.Counter(recording[part])
        assert not {"waits", "allocates pinned", "copies pageable"} & set(calls), calls  # its own memory comes anew
        ours = {name: count for name, count in calls.items() if name.startswith("_")}
        # Queries and keys of the first block, and of the second, for the class token alone.
        assert ours.pop("_attention_kernel") == ours.pop("_class_attention_kernel") == 2
        once = "attention_backward", "class_attention_backward", "norm_backward", "sum"
        once += "squares", "norms", "shared", "update"
        assert ours == {f"_{name}_kernel": 1 for name in once}
    calls = collections.Counter(recorded)
    assert calls.pop("waits") == calls["graph"] == 2 and calls["_sample_kernel"] == calls["_gather_kernel"] == 1
    assert set(calls) == {"batch", "graph", "_sample_kernel", "_gather_kernel", "kernel", "copies"}, calls


def test_what_cannot_be_recorded_goes_on_without(on_imitation):
    said, _ = on_imitation
    assert said.count("steps go on without a CUDA graph, which could not be recorded") == 1, said


def at(listed, what):
    return [place for place, line in enumerate(listed) if line == what]
