"""What several test files share: images on disk, ranks in processes of their own, and the GPU marker."""

import atexit
import html
import io
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# One thread, unless more are asked for: tests run side by side and start ranks, small steps lose by threads that wait
# for each other, and equal sums need equal numbers of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported

import forks
import numpy as np
import pytest
from forks import ROOT
from PIL import Image


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would begin with the files of most tests, and end with long ones


def pytest_collection_modifyitems(items):
    import torch  # not above: the process that hands out the tests has no use for it, and starts the others first

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none here"))


def photo(seed: int, height: int = 60, width: int = 80) -> Image.Image:
    """A smooth random picture, as photographs are on the scale of a pixel."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(seed: int = 0, height: int = 40, width: int = 50, **how) -> bytes:
    """Such a picture as a file."""
    file = io.BytesIO()
    photo(seed, height, width).save(file, "JPEG", **{"quality": 92} | how)
    return file.getvalue()


def coarse(picture: Image.Image) -> np.ndarray:
    """Mean grey of each part of 8 x 8, float64 [64]."""
    grey = np.asarray(picture.convert("L"), float)
    return np.array([part.mean() for rows in np.array_split(grey, 8) for part in np.array_split(rows, 8, 1)])


@pytest.fixture(scope="session", autouse=True)
def index_cache(tmp_path_factory):
    """Indices of tests are kept among the files of tests."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def no_curves():
    """No run draws its curves, which takes longer than the rest of most, but ``undisturbed``."""
    from run.loop import Loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "draw", lambda self: None)
        yield


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """A folder of 48 JPEGs in three class folders; to be left as it is."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(48):
        folder = root / "abc"[number % 3]
        folder.mkdir(exist_ok=True)
        photo(number, 40 + number % 5 * 9, 50 + number % 7 * 6).save(folder / f"{number:02}.jpg", quality=92)
    return root


class Bucket:
    """A server on this machine that answers as S3 does: ``files`` {path: content}, ``asked`` the (method, path) so far.

    ``answers`` {"GET" or path: how} is how it answers instead: by an HTTP status, "nothing", or "part" of the content;
    a GET "hangs" until that is no answer any more.
    """

    def __init__(self):
        names = {301: "PermanentRedirect", 400: "ExpiredToken", 403: "AccessDenied", 404: "NoSuchKey"}
        names |= {429: "TooManyRequests", 501: "NotImplemented", 503: "SlowDown"}
        self.files, self.answers, self.asked, self.port = {}, {}, [], 0
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                bucket.asked.append((self.command, self.path))
                content = bucket.files.get(self.path)
                if "list-type=2" in self.path:
                    content = bucket.listing(urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query))
                how = bucket.answers.get(self.path, bucket.answers.get("GET", 200)) if content is not None else 404
                while bucket.answers.get("GET") == "hangs":
                    time.sleep(0.05)
                if how in ("nothing", "hangs"):
                    return
                body, first, ranged = content or b"", 0, self.headers.get("Range")
                if how in names:
                    body = f"<Error><Code>{names[how]}</Code><Message>text</Message></Error>".encode()
                elif ranged and not body:
                    how, ranged = 416, None
                elif ranged:
                    first, last = ranged.removeprefix("bytes=").split("-")
                    first, body = int(first), body[int(first) : int(last) + 1]
                self.send_response(how if how in names or how == 416 else 206 if ranged else 200)
                self.send_header("Content-Type", "application/xml" if how in names else "image/jpeg")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
                if ranged:
                    self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(content or b'')}")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body[: len(body) // 2] if how == "part" else body)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self.handler = Handler
        self.start()

    def listing(self, query):
        """A page of two of what there is in bucket b."""
        prefix, start = query.get("prefix", [""])[0], int(query.get("continuation-token", ["0"])[0])
        keys = sorted(urllib.parse.unquote(path).removeprefix("/b/") for path in self.files)
        keys = [key for key in keys if key.startswith(prefix)]
        found = "".join(
            f"<Contents><Key>{html.escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<Size>{len(self.files['/b/' + urllib.parse.quote(key)])}</Size></Contents>"
            for key in keys[start : start + 2]
        )
        more = f"<NextContinuationToken>{start + 2}</NextContinuationToken>" if start + 2 < len(keys) else ""
        return f"<ListBucketResult>{found}{more}</ListBucketResult>".encode()

    def forget(self):
        """What was asked so far, also what a reader that is closed had begun to ask, which may still be on its way."""
        for thread in threading.enumerate():
            if thread.name.endswith("(_work)"):  # of pipeline.latency.Threads
                thread.join(30)
        self.asked.clear()

    def start(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), self.handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        """Connections are refused from now on."""
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="session")
def server():
    """The one server of this process: what reads from it keeps the address that it finds at first."""
    pytest.importorskip("obstore", reason="needs pip install -e '.[s3]'")
    from pipeline import objects

    bucket = Bucket()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{bucket.port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
            patch.setenv(name, "true")
        patch.setattr(objects, "RETRIES", 0)  # with pauses
        yield bucket
    bucket.stop()


@pytest.fixture
def bucket(server) -> Bucket:
    """An empty bucket that works."""
    server.files, server.answers = {}, {}
    server.forget()
    return server


LIMIT = 900  # seconds for a program: the longest takes one minute, and ten on a machine that does much else


def run_program(
    *arguments, check: int | None = 0, ranks: int = 1, nodes: tuple[Path, ...] = (), fresh: bool = False, **environment
) -> subprocess.CompletedProcess:
    """``python`` with a program of the repository, from its root, on the CPU, or as so many ranks.

    ``nodes``: so many ranks on each of several machines: each works in one of these folders, where its caches are, at a
    path that for the others leads to their own. ``fresh``: by an interpreter of its own, where what it imports matters.
    """
    words, environment = [*map(str, arguments)], os.environ | environment
    if fresh or "cuda" in words:  # no GPU can be used in a fork of what may have looked for one
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, env=environment)
    else:
        given = environment | {"LOCAL_WORLD_SIZE": str(ranks)} | ({"XDG_CACHE_HOME": "/proc/self/cwd"} if nodes else {})
        folders = [node for node in nodes or [ROOT] for _ in range(ranks)]
        local = [given | {"LOCAL_RANK": str(number % ranks)} for number in range(len(folders))]
        done = forks.run(words, local, folders, LIMIT)
    if check is not None:
        assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def start_program(said: Path, *arguments) -> multiprocessing.Process:
    """The same in the background; what it says is in the files ``out`` and ``err`` of the folder ``said``."""
    said.mkdir()
    running = forks.start([*map(str, arguments)], {**os.environ}, ROOT, said)
    atexit.register(running.kill)  # where a test fails it may go on for long, and this process would wait for it
    return running


SMALL = (
    "--recipe", "toy",
    "--device", "cpu", "--precision", "float32", "--threads", "1", "--depth", "1", "--image-size", "32",
    "--batch-size", "12", "--epochs", "2", "--warmup-epochs", "0.5", "--log-every", "3", "--checkpoint-every", "5",
    "--head-hidden", "32", "--head-out", "16",
)  # fmt: skip
MORE = ("--ema", "0.9", "--clip", "vector", "--window", "3", "--redeal")


def train(data, output, *more, **how):
    return run_program("train.py", *SMALL, "--data", data, "--output", output, *more, **how)


def metrics(output):
    """The logged steps without what depends on the clock."""
    clocked = {"images_per_second", "pairs_per_second", "mfu", "data_wait"}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in clocked} for line in lines]


@pytest.fixture(scope="session")
def undisturbed(photos, tmp_path_factory):
    """A run from start to end: 48 images, batches of 12, 2 epochs of 4 batches, 4 groups each: 32 steps."""
    output = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = train(photos, output, "--eval-data", photos, *MORE, DRAWN="1")
    return output, done.stdout


def on_ranks(ranks: int, code: str, folder: Path) -> None:
    """Runs ``code`` on gloo ranks; there, ``rank``, ``folder``, ``torch`` and ``dist`` are at hand."""
    script = folder / "on_ranks.py"
    script.write_text(
        "import os, sys, pathlib, torch, torch.distributed as dist\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import run.ranks\n"  # before there is a group: it says why
        'dist.init_process_group("gloo")\n'
        f"rank, folder = dist.get_rank(), pathlib.Path({str(folder)!r})\n"
        f"{textwrap.dedent(code)}\n"
        "dist.destroy_process_group()\n"
    )
    run_program(script, ranks=ranks)
