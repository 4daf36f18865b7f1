import subprocess
import sys
from pathlib import Path

import pytest

from kernels.compiled import compile_for


def test_import_touches_no_gpu_and_warns_of_nothing():
    code = (
        "import os, sys; before = dict(os.environ)\n"
        "import torch, kernels\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert kernels.sampling._tables == {}\n"
        "assert dict(os.environ) == before\n"
        "assert not {'pipeline', 'model', 'run', 'train'} & set(sys.modules)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_compiler_contracts_the_normalisation(capability):
    """A subtraction and a multiplication, each rounded: what makes the result the same on every device."""
    ptx = dict(compile_for(capability))["gather_patches"].asm["ptx"]
    assert "fma" not in ptx
    assert "ld.global.b64" in ptx and "st.global.v4.b32" in ptx  # whole words in, 16 bytes a channel out
