"""How a program ends, in one line."""

import errno
import os
import signal
import time

import pytest
import torch
from conftest import run_program
from torch.distributed import DistNetworkError

from pipeline import TooManyBadFiles
from pipeline.shown import Screen
from run import program
from run.progress import TooManySkipped
from run.signals import STOPPED

FULL = f"out of memory (DefaultCPUAllocator: can't allocate memory{19 * ' 12345'}"  # no number is cut in two
ENDS = [
    (TooManyBadFiles("21 of 50 images cannot be used"), "a.py: 21 of 50 images cannot be used. Repair the data or"),
    (TooManySkipped("5 steps in a row"), "a.py: 5 steps in a row. Lower --lr"),
    (OSError(errno.ENOSPC, "No space left"), "a.py: [Errno 28] No space left in the output folder; what was saved"),
    (OSError(errno.ENOSPC, "No space left", "x.pt"), "a.py: [Errno 28] No space left: 'x.pt'; what was saved before"),
    (MemoryError(), "a.py: out of memory; a smaller --batch-size"),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "a.py: DataLoader worker (pid 7)"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried\nx"), "a.py: out of memory (CUDA out of memory. Tried); a sm"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory " + 30 * "12345 "), f"a.py: {FULL} ...); a smaller"),
    (RuntimeError("batch 7 fails: Can't allocate 9 bytes on device 0."), "a.py: out of memory (batch 7 fails: Can't"),
    (RuntimeError("can't start new thread"), "a.py: no other thread can be started; expected a higher limit of"),
    (RuntimeError(f"DALI\n\n: {os.strerror(errno.EAGAIN)}"), "a.py: no other thread can be started; expected a higher"),
    (OSError(errno.ENOENT, "None there"), "a.py: [Errno 2] None there; what was saved before is intact"),
    (DistNetworkError("Failed to recv, got 0 bytes\nC++"), "a.py: most likely another rank has ended (Failed to recv"),
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


def test_what_is_wrong_with_standard_output_is_not_taken_for_the_output_folder(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    for file, said in (("/dev/full", "[Errno 28] No space left on device"), (writing, "[Errno 32] Broken pipe")):
        with open(file, "w") as closed, pytest.raises(SystemExit) as end:
            monkeypatch.setattr("sys.stdout", closed)
            program.run("a.py", lambda _: Screen().print("text"))
        assert end.value.code.startswith(f"a.py: {said} on standard output; what was saved")


def test_no_file_gets_the_number_of_a_standard_stream_that_is_closed():
    code = "import os, subprocess, sys; from run import program; os.close(2); sys.stderr = None; "
    code += "program.run('a.py', lambda _: subprocess.run(['readlink', '/proc/self/fd/2']))"
    assert run_program("-c", code).stdout == "/dev/null\n"


def test_other_errors_are_not_hidden_and_wrong_input_is_said_once_on_each_machine(monkeypatch, capsys):
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
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end, program.opening("a.py"):
            raise ValueError("wrong")
        assert end.value.code == 2 and capsys.readouterr().err == said


def test_a_signal_that_comes_in_a_destructor_ends_the_program_too(monkeypatch, capsys):
    """As in that of DALI's pipelines, out of which nothing can be raised."""

    class Pipeline:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as end:
        program.run("a.py", lambda _: [Pipeline() and None, time.sleep(20)])
    said = capsys.readouterr().err
    assert end.value.code == STOPPED and said.startswith("a.py: interrupted") and said.count("\n") == 1
