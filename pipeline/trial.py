"""Decoding in a process of its own, which may die of it: what files hold, and which of them end a decoder.

This file is also the program of that process. It reads a line [file, ...] and answers it by a line [answer, ...]. A
file is (path or URI, offset, bytes; -1: to its end). An answer is (reason or None, [height, width] as decoded or None,
a hash of the bytes or None where they cannot be had, the format by its first bytes, a checksum of the pixels or None).
"""

import contextlib
import hashlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import types
import zlib

_START = 300.0  # seconds for a process to be ready: it loads DALI, perhaps over a network, and may take a GPU
_BATCH, _FILE = 60.0, 1.0  # seconds for a batch, and for each file in it, until a decoder counts as one that hangs
# What a decoder dies of by itself. Anything else, such as SIGKILL where memory runs out, says nothing about a file.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS)


class Died(Exception):
    """A file, or several, ended the decoder, or kept it for ever; says how."""


class Decoder:
    """A process that decodes up to ``batch`` files at a time; ``with`` ends it. One that has died is replaced."""

    def __init__(self, *, batch: int, threads: int = 1, device_id: int | None = None, seconds: float | None = None):
        """``seconds``: for a batch, until it counts as one that hangs; default: by the number of files."""
        self._command = [sys.executable, __file__, json.dumps([batch, threads, device_id])]
        self._seconds, self._process = seconds, None

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None  # at once: a thread that waits for an answer closes it too
        if process:
            process.kill()
            process.communicate()

    def decode(self, files) -> list:
        """The answers to ``files``; ``Died`` where they end the process or hang it, RuntimeError for another cause."""
        if self._process is None:
            pipe = subprocess.PIPE  # nobody reads what a decoder says of the files that it dislikes
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            try:
                self._ask([], _START)
            except Died as death:
                raise RuntimeError(f"a process that is to decode does not start ({death})") from None
        return self._ask(files, self._seconds or _BATCH + _FILE * len(files))

    def _ask(self, files, seconds):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(files).encode() + b"\n")
            self._process.stdin.flush()
        ready = select.poll()
        ready.register(self._process.stdout, select.POLLIN)
        ready = ready.poll(1000 * seconds)
        answer = self._process.stdout.readline() if ready else b""
        if answer.endswith(b"\n"):
            return json.loads(answer)
        process = self._process
        if ready:
            process.wait()
        self.close()
        if not ready:
            raise Died(f"hangs the decoder for {seconds:.0f} s")
        if -process.returncode not in _CRASHES:
            killed = process.returncode == -signal.SIGKILL
            how = "been killed, as where memory runs out: fewer processes, or threads, take less" if killed else "ended"
            raise RuntimeError(f"a process that decodes has {how} (exit code {process.returncode})")
        raise Died(f"ends the decoder: {signal.Signals(-process.returncode).name}")


def killers(batches, *, decoder=None, **how) -> dict:
    """{file: how it ends a decoder} of ``batches``, lists of files, which are decoded one after the other.

    A file that ends a decoder by itself is found by decoding each alone; one that does so only in a large batch by
    halving, in batches filled up with copies. Where it takes several different files, none is named. ``how``: the
    arguments of ``Decoder``, or of ``decoder``, a class like it.
    """

    def death(batches):
        """(position, how) of the batch at which a new process dies, or None."""
        with (decoder or Decoder)(**how) as alive:
            for position, batch in enumerate(batches):
                try:
                    alive.decode(batch)
                except Died as died:
                    return position, str(died)
        return None

    def filled(files, count):
        return [files[i % len(files)] for i in range(count)] if files else []

    def halved(files):
        size = how["batch"]
        many = filled(files, -(-len(files) // size) * size * 2)  # twice: some die of what they do next
        died = death(many[i : i + size] for i in range(0, len(many), size))
        if died is None or len(files) == 1:
            return {files[0]: died[1]} if died else {}
        half = len(files) // 2
        return halved(files[:half]) | halved(files[half:])

    found, alone = {}, []
    while died := death([*([file] for file in alone), *batches, *batches]):  # twice, as chance has a part in it
        position, by = died
        if not alone and not found:  # now each of them by itself
            alone = list(dict.fromkeys(file for batch in batches for file in batch))
        elif position < len(alone) and death([[alone[position]]]):
            found[alone[position]] = by
            alone = alone[position + 1 :]
            batches = [filled([file for file in batch if file not in found], len(batch)) for batch in batches]
        else:  # none dies of itself, or it died of one before
            return found | halved(list(dict.fromkeys(file for batch in batches for file in batch)))
    return found


# ---- The program


class _Files:
    """Decodes files as training does."""

    def __init__(self, batch, threads, device_id):
        from pipeline import graph, latency, pictures

        self.graph, self.pictures, self.settings, self.device_id = graph, pictures, (batch, threads), device_id
        self.concurrently = latency.concurrently
        self.pipeline = self.new()

    def new(self):
        from nvidia.dali import fn, pipeline_def

        batch, threads = self.settings

        @pipeline_def(batch_size=batch, num_threads=threads, device_id=self.device_id, prefetch_queue_depth=1)
        def decoded():
            return self.graph.decode(fn.external_source(name="encoded", batch=True), self.device_id is not None)

        return decoded()

    def answers(self, files):
        """An answer to each file."""
        contents = self.concurrently(lambda file: self.content(*file), files)
        good = iter(self.decode([content for content in contents if not isinstance(content, str) and content.size]))
        answers = []
        for content in contents:
            if isinstance(content, str):
                answers.append([content, None, None, None, None])
            else:
                digest = hashlib.blake2b(content, digest_size=16).hexdigest()
                kind = self.graph.formats.named(content[:12].tobytes())
                reason, size, checksum = next(good) if content.size else ("empty file", None, None)
                if kind == "TIFF" and not reason:
                    reason = self.damage(content)
                answers.append([reason, size, digest, kind, checksum])
        return answers

    def content(self, path, offset, length):
        """The bytes of a file, uint8, or why there are none."""
        try:
            content = self.graph.read(path, offset, length)
        except OSError as error:
            return error.strerror or "not readable"
        return "the shard ends before the image does" if length > len(content) else content

    def damage(self, content):
        """What is wrong with the data of a TIFF, or None: its decoder goes on where they do not unpack, in black."""
        try:
            self.pictures.read(content.tobytes())
        except ValueError as error:
            return str(error)
        return None

    def decode(self, contents):
        """(reason or None, size, checksum) of each file's bytes."""
        import numpy as np

        if not contents:
            return []
        try:
            (images,) = self.pipeline.run(encoded=contents)
        except RuntimeError:
            self.pipeline = self.new()
            if len(contents) > 1:
                return [self.decode([content])[0] for content in contents]
            (reason,) = self.graph.probe([lambda: contents[0]], self.device_id)
            return [(reason or "does not decode each time", None, None)]
        images = images.as_cpu() if self.device_id is not None else images
        images = [np.ascontiguousarray(images[i]) for i in range(len(contents))]
        return [(None, image.shape[:2], zlib.crc32(image)) for image in images]


def _main(batch, threads, device_id):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else speaks there
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The package without what it loads by itself: torch takes three times as long as DALI.
    package = types.ModuleType("pipeline")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["pipeline"] = package
    files = _Files(batch, threads, device_id)
    for line in sys.stdin:
        print(json.dumps(files.answers(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _main(*json.loads(sys.argv[1]))
