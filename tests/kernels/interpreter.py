"""Runs kernels in Triton's interpreter: in a process of its own, because the switch is read when they are imported, and
there in a fork for each set of calls, as the imports take seconds; that of torch._dynamo an operator's first call would
do, in each fork anew."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import torch

SCRIPT = """
import math, os, sys, torch, torch._dynamo, kernels
from tests.kernels.interpreter import call
empty, margins = torch.empty, []

def poisoned(*shape, dtype, device):
    poison = float("nan") if dtype.is_floating_point else -(2**31)
    memory = empty(math.prod(shape) + 64, dtype=dtype, device=device).fill_(poison)
    margins.append((memory[-64:], memory[-64:].clone()))
    return memory[:-64].view(shape)

def run(calls, results):
    calls = torch.load(calls, weights_only=False)
    torch.empty = poisoned
    found = [call(kernels, *c) for c in calls]
    torch.empty = empty
    for margin, before in margins:
        torch.testing.assert_close(margin, before, rtol=0, atol=0, equal_nan=True)
    torch.save([tuple(map(torch.clone, r)) if isinstance(r, tuple) else r.clone() for r in found], results)

for line in sys.stdin:
    if not (fork := os.fork()):
        os.dup2(2, 1)
        run(*line.rstrip("\\n").split("\\t"))
        sys.exit()
    print(os.wait()[1], flush=True)
"""


def call(module, what, args, kwargs):
    return (what if callable(what) else resolve_name(f"{module.__name__}.{what}"))(*args, **kwargs)


@functools.cache
def server():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command, pipe = [sys.executable, "-c", SCRIPT], subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdin=pipe, stdout=pipe, text=True)


def interpret(calls, folder):
    """Results of ``calls``, (function or its name in ``kernels``, args, kwargs) each.

    Outputs, and 64 elements beyond them, are poisoned.
    """
    paths = [str(folder / name) for name in ("calls.pt", "results.pt")]
    torch.save(calls, paths[0])
    print(*paths, sep="\t", file=server().stdin, flush=True)
    assert server().stdout.readline() == "0\n", "the process above, which interprets, has ended"
    return torch.load(paths[1], weights_only=False)
