import subprocess
import sys
from pathlib import Path

import pytest
import triton

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
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_spills(capability, tmp_path):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for name, kernel in compile_for(capability):
        cubin = tmp_path / f"{name}.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        assert "STACK:0 " in usage and "LOCAL:0 " in usage, f"{name} spills: {usage}"
        if name == "gather_patches":  # 16-byte stores, nothing exchanged between threads, no contracted rounding
            ptx = kernel.asm["ptx"]
            assert ptx.count("st.global.v4.b32") == ptx.count("st.global") > 0
            assert kernel.metadata.shared == 0
            assert "fma" not in ptx
