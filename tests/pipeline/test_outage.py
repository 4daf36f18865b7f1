"""What cannot be reached is not what cannot be decoded: it is waited for, said, and never a bad file."""

import errno
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import jpeg, photo

from pipeline import Augmentation, Index, Loader, evaluation_batches, graph, headers, readers, sources, waiting
from pipeline.walk import statuses
from tests.pipeline.test_sources import write_tar

N, GONE = 6, 4


class Clock:
    """In place of the module ``time``: time passes in pauses only, in the first of which ``then`` happens."""

    def __init__(self):
        self.now, self.pauses, self.then = 0.0, [], None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        if not seconds:  # a look at whether to stop
            return
        self.now += seconds
        self.pauses.append(seconds)
        then, self.then = self.then, None
        if then:
            then()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "pause", clock.sleep)
    return clock


@pytest.fixture
def local(tmp_path):
    """An index of 6 files, of which number 4 has gone since."""
    for i in range(N):
        (tmp_path / f"{i:02}.jpg").write_bytes(jpeg(i))
    index = Index.scan(tmp_path)
    os.remove(index.file(GONE))
    return index


@pytest.fixture
def remote(bucket, tmp_path):
    """An index of 6 objects, of which number 4 is not there, and of 6 files."""
    bucket.files = {f"/b/{i}.jpg": jpeg(i) for i in range(N) if i != GONE}
    lines = [f"s3://b/{i}.jpg\t\t40\t50\n" for i in range(N)]
    for i in range(N):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
        lines.append(f"{i}.jpg\n")
    (tmp_path / "list.txt").write_text("".join(lines))
    return Index.scan(tmp_path / "list.txt")


def epoch(index):
    """The first 6 in batches of 3, and the bad files."""
    bad, how = {}, {"image_size": 16, "batch_size": 3, "device": torch.device("cpu"), "threads": 1}
    batches = list(evaluation_batches(index, np.arange(N), bad=bad, **how))
    return [t for images, sample, _ in batches for t in (images, sample)], bad


def assert_waited_for(index, clock, begin, end, capfd):
    """An outage from ``begin``, before the first batch, until ``end`` changes nothing and is said."""
    expected, bad = epoch(index)
    assert list(bad) == [GONE]
    begin()
    clock.then, clock.pauses = end, []
    capfd.readouterr()
    got, found = epoch(index)
    assert found == bad and all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    said = [line for line in capfd.readouterr().err.splitlines() if " be read" in line]  # not decoders' own
    assert len(said) == 2 and " cannot be read (" in said[0] and " can be read again, after 1 s" in said[1], said
    assert clock.pauses == [1]


@pytest.mark.parametrize("answer", [301, 400, 403, 429, 501, 503, "nothing", "part"])
def test_a_store_that_fails_is_waited_for(bucket, remote, clock, capfd, answer):
    assert_waited_for(remote, clock, lambda: bucket.answers.update(GET=answer), bucket.answers.clear, capfd)


def test_a_store_that_refuses_connections_is_waited_for(bucket, remote, clock, capfd):
    assert_waited_for(remote, clock, bucket.stop, bucket.start, capfd)


def test_a_store_that_stays_away_ends_the_run(bucket, remote, clock, monkeypatch):
    monkeypatch.setattr(graph, "_AHEAD", 2)
    how = {"image_size": 16, "batch_size": 3, "seed": 7, "device": torch.device("cpu"), "threads": 1}
    load = Loader(remote, Augmentation(), **how)
    bucket.stop()
    message = r"^s3://b/\d.jpg cannot be read \(.*onnect.*\), nor could it for 8 minutes$"
    with pytest.raises(OSError, match=message) as caught:
        list(load.batches(0, 4))
    bucket.start()
    assert caught.value.errno is None, "which could be that of a full disk"
    assert not load.bad and clock.pauses[:7] == [1, 2, 4, 8, 16, 30, 30] and clock.now == 480
    assert len(list(load.batches(0, 4))) == 4 and list(load.bad) == [GONE], "it goes on"


def test_an_object_that_alone_is_forbidden_is_looked_at_again(bucket, remote, clock):
    """Which S3 also says of what is not there, to who may not list the bucket."""
    bucket.answers["/b/1.jpg"] = 403
    assert epoch(remote)[1] == {1: "403 Forbidden: AccessDenied: text", GONE: "no such object"}
    assert clock.pauses == [1, 1]
    clock.then = bucket.answers.clear
    assert list(epoch(remote)[1]) == [GONE]


def test_a_store_that_forbids_all_within_a_batch_is_waited_for(bucket, remote, clock, capfd):
    """What was read of it before says nothing for the store."""

    class Answers(dict):
        def get(self, path, default=None):
            return 403 if path == "/b/1.jpg" or len(bucket.asked) > N else default

    bucket.answers, clock.then = Answers(), lambda: setattr(bucket, "answers", {})
    assert list(epoch(remote)[1]) == [GONE]
    assert "s3://b/1.jpg cannot be read (403 Forbidden" in capfd.readouterr().err


def test_a_store_that_fails_batches_only_is_waited_for(bucket, remote, clock, monkeypatch):
    """It fails now and then, so that each image can be read but never all of a batch."""
    monkeypatch.setattr(graph, "probe", lambda images, device: (None for _ in images))
    bucket.files[f"/b/{GONE}.jpg"] = jpeg(GONE)
    clock.then = bucket.start
    bucket.stop()
    (_, *rest), bad = epoch(remote)
    assert len(rest) == 3 and not bad and clock.pauses == [1]


# ---- Files


READING = [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.EACCES, errno.ENOENT]


@pytest.mark.parametrize("number", READING, ids=errno.errorcode.get)
def test_a_file_system_that_fails_is_waited_for(local, clock, capfd, monkeypatch, number):
    """Its files cannot be opened: moved away, for DALI, and with the true error, for the probe."""
    away = local.root.with_name("away")

    def fails(path, *_, **__):
        raise OSError(number, os.strerror(number), path)

    def begin():
        local.root.rename(away)
        monkeypatch.setattr(graph, "open", fails, raising=False)

    def end():
        away.rename(local.root)
        monkeypatch.delattr(graph, "open")

    assert_waited_for(local, clock, begin, end, capfd)


def test_an_error_while_a_file_is_read_is_waited_for(local, clock, capfd):
    """A real EIO: numpy takes it for the end of the file."""
    path = Path(local.file(1))
    content = path.read_bytes()

    def begin():
        path.unlink()
        path.symlink_to("/proc/self/mem")

    def end():
        path.unlink()
        path.write_bytes(content)

    assert_waited_for(local, clock, begin, end, capfd)


def test_what_fails_alone_is_bad_in_the_end(local, clock, monkeypatch):
    """No permission for one file, while others can be read: it is the file."""
    os.remove(local.file(1))

    def fails(path, *arguments, opened=open, **more):
        if path == local.file(1):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **more)

    monkeypatch.setattr(graph, "open", fails, raising=False)
    assert epoch(local)[1] == {1: "Permission denied", GONE: "No such file or directory"}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_shard_that_fails_is_waited_for_and_opened_anew(tmp_path, clock, capfd, monkeypatch, number):
    write_tar(tmp_path / "a.tar", [(f"{i}.jpg", jpeg(i)[: -200 if i == GONE else None]) for i in range(N)])
    down, stale, pread = [], [], os.pread

    def reads(descriptor, *where):
        if down or any(descriptor is one for one in stale):
            stale.append(descriptor)
            raise OSError(number, os.strerror(number))
        return pread(descriptor, *where)

    monkeypatch.setattr(os, "pread", reads)
    assert_waited_for(Index.scan(tmp_path), clock, lambda: down.append(1), down.clear, capfd)


# ---- Probing


def test_files_are_read_ahead_some_at_a_time_and_judged_in_order(monkeypatch):
    monkeypatch.setattr(graph, "_AHEAD", 4)
    begun, most, together = [], 0, threading.Barrier(4)

    def image(i):
        def read():
            begun.append(i)
            together.wait(60)
            if i == 2:
                raise FileNotFoundError(errno.ENOENT, "gone")
            return np.frombuffer(b"text" if i == 5 else jpeg(i), np.uint8)

        return read

    reasons = []
    for reason in graph.probe(map(image, range(16)), None):
        most = max(most, len(begun) - len(reasons))
        reasons.append(reason)
    assert [i for i, reason in enumerate(reasons) if reason] == [2, 5] and reasons[2].strerror == "gone"
    assert most <= 4, "in memory"


def test_opencv_is_silent(tmp_path, capfd):
    photo(0).save(tmp_path / "a.bmp")
    os.truncate(tmp_path / "a.bmp", 5000)
    assert list(graph.probe([str(tmp_path / "a.bmp")], None)) != [None]
    assert "OpenCV" not in capfd.readouterr().err


# ---- A scan


@pytest.mark.parametrize("by", ["open a file", "open a shard", "read a shard", "list a folder", "look at a file"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT], ids=errno.errorcode.get)
def test_a_scan_waits_for_what_cannot_be_read_and_remembers_nothing_of_it(
    tmp_path, clock, capfd, monkeypatch, by, number
):
    root, cache, down = tmp_path / "data", tmp_path / "cache", []
    (root / "a").mkdir(parents=True)
    if "shard" in by:
        write_tar(root / "a" / "0.tar", [(f"{i}.jpg", jpeg(i)) for i in range(N)])
    else:
        for i in range(3):
            (root / "a" / f"{i}.jpg").write_bytes(jpeg(i))
        (root / "list.txt").write_text("a/0.jpg\na/1.jpg\n")
        (root / "a" / "text.jpg").write_text("text")
    module, name = {
        "open a file": (os, "open"), "open a shard": (headers, "open"), "read a shard": (os, "pread"),
        "list a folder": (os, "listdir"), "look at a file": (os, "stat"),
    }[by]  # fmt: skip
    data = root / "list.txt" if by == "look at a file" else root
    real = getattr(module, name, open)

    def fails(what, *more, **how):
        at_data = isinstance(what, int) or "/a/" in os.path.join(os.fsdecode(what), "")
        if down and at_data and str(cache) not in str(what):
            raise OSError(number, os.strerror(number), what)
        return real(what, *more, **how)

    def looks(folder, names):  # by statx, and where that fails again by os.stat, which says why
        kinds, stamps = statuses(folder, names)
        return kinds * (not down), stamps

    expected = Index.scan(data)
    monkeypatch.setattr(module, name, fails, raising=False)
    monkeypatch.setattr(sources, "statuses", looks)
    down.append(1)
    with pytest.raises(OSError, match=rf"a/.* cannot be read \({os.strerror(number)}\), nor could it for 8 minutes"):
        Index.scan(data, cache)
    assert clock.now == 480 and not list(cache.glob("*.index")), "nothing is remembered"
    clock.then, clock.now = down.clear, 0
    capfd.readouterr()
    got = Index.scan(data, cache)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and " cannot be read (" in said[0] and said[1].endswith("can be read again, after 1 s")
    assert got.fingerprint == expected.fingerprint and got.rejected == expected.rejected


def test_a_request_to_stop_ends_the_waiting(monkeypatch):
    slept = []
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: slept.append(seconds))
    monkeypatch.setattr(waiting, "asked_to_stop", lambda: len(slept) == 3)
    with pytest.raises(waiting.Stopped):
        waiting.pause(30)
    assert max(slept) <= 0.2
    monkeypatch.undo()
    start = time.monotonic()
    waiting.pause(0.3)
    assert time.monotonic() - start >= 0.3


def test_a_request_to_stop_does_not_wait_for_what_hangs(monkeypatch):
    """Nor does anything begin to be read behind it; what comes soon is still taken."""
    answer, asked, others = threading.Event(), [], set(threading.enumerate())

    class Hangs(readers.Reader):
        threads = 2

        def read(self, sample):
            asked.append(sample)
            answer.wait(60)
            return np.zeros(sample, np.uint8)

    monkeypatch.setattr(waiting, "asked_to_stop", lambda: True)
    with Hangs() as reader:
        soon = threading.Timer(0.5, answer.set)
        soon.start()
        assert [len(file) for file in reader.begin([1, 2, 3])()] == [1, 2, 3]
        answer.clear(), asked.clear()
        monkeypatch.setattr(waiting, "_SOON", 0.1)
        for wait in (reader.begin([4, 5, 6, 7]), lambda: next(graph.probe([lambda: reader.read(8)], None))):
            with pytest.raises(waiting.Stopped):
                wait()
    answer.set()
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
    assert sorted(asked) == [4, 5, 8]


def test_ctrl_c_does_not_wait_for_a_store_that_hangs(bucket, tmp_path):
    """In a scan of objects, nor in one of a bucket; nor does the process at its end, by the threads that do."""
    bucket.files, bucket.answers["GET"] = {f"/b/{i}": jpeg(i) for i in range(4)}, "hangs"
    (tmp_path / "list.txt").write_text("".join(f"s3://b/{i}\n" for i in range(4)))
    others, handler = set(threading.enumerate()), signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for source in (tmp_path / "list.txt", "s3://b"):
            start = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                Index.scan(source)
            assert time.monotonic() - start < 10, "a request is given up after 20 s and more"
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert all(thread.daemon for thread in set(threading.enumerate()) - others)
