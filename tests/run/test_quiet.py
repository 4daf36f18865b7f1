"""Lines of the decoder are left out of stderr, and no other line is, not even the last one of a process that dies."""

import signal
import subprocess
import sys

import pytest
from conftest import ROOT

CODE = r"""
import os, signal, subprocess, sys
from run import quiet
print("before", file=sys.stderr)
with quiet.decoder():
    for part in (b"\x1b[0;31m[ERR", b"OR] \x1b[0m[libjpeg_turbo_decoder] Could not decode", b" jpeg\n"):
        os.write(2, part)
    os.write(2, b"\x1b[1;33m[WARNING] \x1b[0m[nvimgcodec] slow\n[ERROR] of a library\n\x1b[0;31mred\x1b[0m\n")
    os.write(2, b"\x1b[0;31m\x1b[0;31m[ERROR] \x1b[0m[libjpeg_turbo_decoder] No\n[ERROR] \x1b[0;31m\x1b[0m[lib] x\n")
    os.write(2, b"Corrupt JPEG data: premature end of data segment\nUnsupported marker type 0xaa\nlibpng error: bad\n")
    os.write(2, b"Input file read error\nBogus DQT index 9\nTIFFFillStrip: Read error\n: Using code not yet in table\n")
    print("of Python", file=sys.stderr)
    subprocess.run(["sh", "-c", "echo of a child >&2"])
    END
print("behind", file=sys.stderr)
os.write(2, b"\x1b[0;31m[ERROR] \x1b[0m[nvimgcodec] behind\n")
"""
OTHERS = {"[ERROR] of a library", "\x1b[0;31mred\x1b[0m", "of Python", "of a child", "before"}


@pytest.mark.parametrize(
    ("end", "code", "more"),
    [
        ("pass", 0, {"behind", "\x1b[0;31m[ERROR] \x1b[0m[nvimgcodec] behind"}),
        ("os.write(2, b'last word'); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, {"last word"}),
        ("sys.exit('said at the end')", 1, {"said at the end"}),
    ],
)
def test_only_lines_of_the_decoder_are_left_out(end, code, more):
    command = [sys.executable, "-c", CODE.replace("END", end)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and done.stdout == ""
    assert set(done.stderr.splitlines()) == OTHERS | more and done.stderr.startswith("before")
