"""Keeps the decoder's own lines out of stderr: the program itself names every file that it leaves out.

nvImageCodec writes a coloured line for each attempt at a damaged file, by ``std::cerr``, from threads of its own (whose
lines may be mixed), libjpeg, libpng and libtiff plain ones; there is no switch for that, and DALI passes none on. So
file descriptor 2 becomes a pipe to a small process that hands on all other lines, also those that a dying process
leaves in it. Python's own stderr goes where it went.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FILTER = r"""
import re, sys
its = re.compile(
    rb"\x1b\[[\d;]*m.*\[(WARNING|ERROR)\] |\[(WARNING|ERROR)\] .*\x1b\[[\d;]*m"
    rb"|\[\w+_decoder\] |Could not decode \w+ code"
    rb"|^(libpng (warning|error): |_?(TIFF|ZIP|LZW|PackBits|ZSTD)\w*: |: Using code not yet in table)"
    rb"|^(Corrupt JPEG data: |Unsupported (marker type|JPEG )|Premature end of |Input file read error|Bogus |DCT )"
    rb"|^(Invalid (component ID|SOS parameters|JPEG |progressive )|(Huffman|Quantization) table 0x|Missing Huffman )"
    rb"|^(Inconsistent progression|Warning: unknown JFIF|Unknown Adobe|Too many color|Didn't expect more|Sampling fact)"
)
for line in sys.stdin.buffer:
    if not its.search(line):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
"""


@contextmanager
def decoder() -> Iterator[None]:
    """Within it, the decoder's own lines go nowhere."""
    if sys.stderr is None:  # closed by whoever started the program
        yield
        return
    sys.stderr.flush()
    before, python = os.dup(2), sys.stderr
    # In a session of its own: Ctrl-C is meant for those whose lines it reads, and it ends when the last of them has.
    reader = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _FILTER], stdin=subprocess.PIPE, stdout=before, stderr=before,
        start_new_session=True,
    )  # fmt: skip
    os.dup2(reader.stdin.fileno(), 2)
    reader.stdin.close()
    with open(os.dup(before), "w", buffering=1, encoding=python.encoding, errors="backslashreplace") as sys.stderr:
        try:
            yield
        finally:
            sys.stderr = python
            os.dup2(before, 2)
            os.close(before)
            with suppress(subprocess.TimeoutExpired):  # a process that was started within may still have the pipe
                reader.wait(1)
