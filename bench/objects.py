"""Reading from an object store, as training does and by DALI's own client: images per second and processor time by the
number of requests at a time, and how many requests an image takes.

The store is a stand-in: a process of this machine that answers each request after ``--latency``. For a bucket's own
figures: ``python -m bench pipeline --images LIST``.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import statistics
import time

import numpy as np

from bench import environment
from bench.findings import finding, number
from bench.pipeline import skip, without_dali
from pipeline.readers import ObjectReader

REQUESTS = 8, 32, 128, ObjectReader.threads  # at a time
DALI = 8, 32  # threads, each of which waits for one
NAME = "s3://bucket/{:06}.jpg"


def main(arguments: list[str]) -> int:
    parser = environment.parser("objects", "Images from an object store, by this reader and by DALI's.")
    parser.add_argument("--latency", type=float, default=30, help="milliseconds until the store answers")
    parser.add_argument("--bytes", type=int, default=110_000, help="of an image")
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement, at least")
    parser.add_argument("--rounds", type=int, default=3, help="of all measurements, in turns")
    options = parser.parse_args(arguments)
    if reason := without_dali():
        return skip(options, reason)
    if options.smoke:
        options.latency, options.seconds, options.rounds = 1, 0, 1
    result = {"latency_ms": options.latency, "bytes": options.bytes}
    with store(options.latency / 1000, options.bytes) as asked:
        ways = {("this reader", n): read_here(n) for n in REQUESTS} | {
            ("DALI's client", n): read_by_dali(n) for n in DALI
        }
        measured = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, read in ways.items():
                measured[way].append(timed(read, way[1], options.seconds, asked))
    result["rows"] = [
        {"reader": reader, "at a time": n} | {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for (reader, n), rows in measured.items()
    ]
    environment.save(options, result | conclusions(result))
    environment.print_table(result["rows"])
    return 0


def conclusions(d: dict) -> dict:
    found = []
    for reader, rows in itertools.groupby(d["rows"], lambda row: row["reader"]):
        rows = list(rows)
        rates = ", ".join(f"{row['at a time']}: {number(row['images/s'])}" for row in rows)
        spent = [row["CPU ms/image"] for row in rows]
        found.append(finding(
            f"a store that answers after {d['latency_ms']:g} ms, images of {d['bytes'] / 1000:.0f} kB, {reader}",
            f"{rates} images/s, by images at a time",
            f"{min(spent):.2f} to {max(spent):.2f} ms of processor time an image",
            f"requests an image: {rows[0]['requests an image']:.3g}",
        ))  # fmt: skip
    return {"findings": found}


def timed(read, at_a_time: int, seconds: float, asked) -> dict[str, float]:
    """Images per second; milliseconds of this process's processor time, and requests, an image."""
    numbers, names = itertools.count(), lambda: [NAME.format(next(numbers)) for _ in range(4 * at_a_time)]
    read(names())  # connections
    before, start, spent = asked.value, time.perf_counter(), time.process_time()
    images = 0
    while not images or time.perf_counter() - start < seconds:
        images += read(names())
    wall, spent = time.perf_counter() - start, time.process_time() - spent
    asked = asked.value - before
    return {"images/s": images / wall, "CPU ms/image": 1000 * spent / images, "requests an image": asked / images}


def read_here(requests: int):
    class Reader(ObjectReader):
        threads = requests

    names: list[str] = []
    reader = Reader(lambda sample: (names[sample],))

    def read(these):
        names[:] = these
        files = reader.begin(list(range(len(names))))()
        assert all(len(file) > 1 for file in files)
        return len(files)

    return read


def read_by_dali(threads: int):
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=4 * threads, num_threads=threads, device_id=None, prefetch_queue_depth=1)
    def graph():
        return fn.io.file.read(fn.external_source(name="name", batch=True), dont_use_mmap=True)

    pipeline = graph()

    def read(names):
        (files,) = pipeline.run(name=[np.frombuffer(os.fsencode(name), np.uint8) for name in names])
        return len(files)

    return read


# ---- The stand-in


@contextlib.contextmanager
def store(latency: float, size: int):
    """A store, to which the environment leads; yields the number of requests so far, as ``.value``."""
    spawn = multiprocessing.get_context("spawn")
    asked, port = spawn.Value("q", 0), spawn.Queue()
    process = spawn.Process(target=serve, args=(latency, size, asked, port), daemon=True)
    process.start()
    where = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port.get(timeout=60)}", "AWS_EC2_METADATA_DISABLED": "true"}
    os.environ.update(where, AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none")
    try:
        yield asked
    finally:
        process.terminate()
        process.join()


def serve(latency: float, size: int, asked, port) -> None:
    """Answers every GET by so many bytes, and HEAD, after so many seconds."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    body = os.urandom(size)
    about = f"Content-Length: {size}\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n".encode()

    async def connection(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while request := await reader.readuntil(b"\r\n\r\n"):
                asked.value += 1  # by this process alone
                await asyncio.sleep(latency)
                ranged = b"\r\nrange:" in request.lower()  # the whole of it, by DALI
                head = b"HTTP/1.1 206 Partial Content\r\n" if ranged else b"HTTP/1.1 200 OK\r\n"
                head += about + (f"Content-Range: bytes 0-{size - 1}/{size}\r\n".encode() if ranged else b"")
                writer.write(head + b"\r\n" + (b"" if request.startswith(b"HEAD") else body))
                await writer.drain()

    async def run():
        server = await asyncio.start_server(connection, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())
