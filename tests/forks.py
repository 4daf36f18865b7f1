"""Programs and their ranks in forks of a process that has imported torch and DALI once, and done what ``warm`` does: a
start costs a tenth of a second there and nine seconds of processor time anew."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["train", "finetune", "detect", "embed", "tyro", "nvidia.dali.fn", "matplotlib.figure", "pytest", "tests.warm"]
)


def run(words: list[str], environments: list[dict], folders: list[Path], limit: float) -> subprocess.CompletedProcess:
    """``python`` with these words in one process, or as several ranks, in the folder and with the variables of each.

    Of several the first that fails ends the others, and what they say is together, as with torchrun, which also keeps
    their store. Raises TimeoutExpired after ``limit`` seconds.
    """
    if (ranks := len(folders)) > 1:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environments = [
            given | shared | {"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank, given in enumerate(environments)
        ]
    with tempfile.TemporaryDirectory() as said:
        forks = [start(words, *where, Path(said)) for where in zip(environments, folders, strict=True)]
        end = time.monotonic() + limit
        while running := [fork for fork in forks if fork.exitcode is None]:
            connection.wait([fork.sentinel for fork in running], max(0, end - time.monotonic()))
            late = time.monotonic() > end
            if late or any(fork.exitcode for fork in forks):
                for fork in running:
                    fork.kill()
            if late:
                raise subprocess.TimeoutExpired(words, limit)
        code = next((fork.exitcode for fork in forks if fork.exitcode), 0)
        return subprocess.CompletedProcess(words, code, *((Path(said) / name).read_text() for name in ("out", "err")))


def start(words: list[str], environment: dict, folder: Path, said: Path) -> multiprocessing.Process:
    """The same in the background. What it says is in the files ``out`` and ``err`` of the folder ``said``."""
    fork = _CONTEXT.Process(target=_fork, args=(words, environment, folder, said))
    fork.start()
    return fork


def _fork(words, environment, folder, said):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if "DRAWN" not in environment:  # curves take longer than the rest of most runs
        from run.loop import Loop

        Loop.draw = lambda self: None
    sys.argv = words[1:] if words[0] in ("-c", "-m") else words
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
