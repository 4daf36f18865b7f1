"""Files that end the decoder, and the process with it: found by a run that comes after."""

import dataclasses
import io
import os
import shutil
import signal
import struct

import numpy as np
import pytest
from conftest import photo, run_program
from PIL import Image

from pipeline import Index, Loader, inflight, known, trial
from run.images import open_data, record
from run.recipes import Augmentation, ImagesConfig
from tests.run.test_loop import ALONE


def jpeg(*orientations):
    """A portrait with a block of EXIF for each; of 1 and then 6 DALI 2.4 writes where it should not."""
    file, blocks = io.BytesIO(), b""
    Image.new("RGB", (100, 4000), (128, 128, 128)).save(file, "JPEG", quality=95)
    for orientation in orientations:
        body = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHIHHI", 1, 274, 3, 1, orientation, 0, 0)
        blocks += b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
    spare = bytes(100 - len(blocks))  # so that all are as long
    return file.getvalue()[:2] + blocks + file.getvalue()[2:] + spare


@pytest.fixture
def data(tmp_path):
    """36 images of two classes, each of which is like one that kills, but for its EXIF; 17 is turned as that is."""
    for number in range(36):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(6) if number == 17 else jpeg())
    return tmp_path / "data"


def spoil(path):
    """Makes a killer of a file behind the back of its index, which goes by size and time."""
    status = os.stat(path)
    path.write_bytes(jpeg(1, 6))
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_who_ends_a_decoder_is_found_and_nobody_else(tmp_path):
    good, killer, text = (tmp_path / name for name in ("good.jpg", "killer.jpg", "text.jpg"))
    photo(1).save(good)
    killer.write_bytes(jpeg(1, 6))
    text.write_text("text")
    good, killer, text, gone = ((str(path), 0, -1) for path in (good, killer, text, tmp_path / "gone"))
    with trial.Decoder(batch=4) as decoder:
        (_, size, _, kind, pixels), (reason, *_, nothing), unread = decoder.decode([good, text, gone])
        assert size == [60, 80] and kind == "JPEG" and pixels and reason == "not an image" and nothing is None
        assert unread == ["No such file or directory", None, None, None, None]
        try:
            decoder.decode([good, killer])
        except trial.Died as died:
            assert str(died) == "ends the decoder: SIGSEGV"
        else:
            pytest.skip("this version of DALI survives it")
        assert decoder.decode([good])[0][-1] == pixels  # by another process


def test_what_hangs_and_what_takes_a_batch(monkeypatch):
    """By a stand-in that dies of 2 in a batch with a large number, of 7 in any, and of 9 at the file after it."""

    class Stand:
        def __init__(self, **_):
            self.bitten = False

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def decode(self, files):
            if self.bitten or 7 in files or (2 in files and len(files) > 3):
                raise trial.Died("of it")
            self.bitten |= 9 in files

    monkeypatch.setattr(trial, "Decoder", Stand)
    assert trial.killers([[1, 3], [4, 5]], batch=4) == {}
    assert trial.killers([[1, 3], [4, 7], [7, 1], [5, 6]], batch=4) == {7: "of it"}
    assert trial.killers([[1, 2, 3, 4], [5, 6]], batch=4) == {2: "of it"}
    assert trial.killers([[1, 7, 2, 3], [4, 5, 6, 8]], batch=4) == {2: "of it", 7: "of it"}
    assert trial.killers([[1, 9], [3]], batch=1) == {9: "of it"}  # not 3, before which it was decoded


def test_a_run_that_died_names_the_file_to_the_next_one(data, tmp_path, capsys):
    cache = tmp_path / "cache"
    config = ImagesConfig(
        output=tmp_path / "run", data=data, eval_data=data, batch_size=6, threads=1, index_cache=cache
    )
    index, bad, tests = open_data(config, ALONE)
    assert not bad and len(index) == len(tests) == 36
    killer = data / "b" / "17.jpg"
    spoil(killer)
    code = (
        "import sys, torch; from pathlib import Path; from pipeline import *; from run.recipes import Augmentation\n"
        "data, cache, record = map(Path, sys.argv[1:])\n"
        "loader = Loader(Index.scan(data, cache), Augmentation(), image_size=16, batch_size=6, seed=0,\n"
        "    device=torch.device('cpu'), threads=1, record=record)\n"
        "list(loader.batches(0, 6))\n"
    )
    place = record(config, ALONE, "train")
    assert run_program("-c", code, data, cache, place, check=-signal.SIGSEGV) and place.exists()
    (tmp_path / "run" / "lock").touch()
    _, bad, _ = open_data(dataclasses.replace(config, eval_data=None, dry_run=True), ALONE)
    assert bad == {index.paths.index("b/17.jpg"): "ends the decoder: SIGSEGV"}, "a dry run tries them too"
    assert place.exists() and not (tmp_path / "run" / "index").exists(), "and notes nothing"
    capsys.readouterr()
    for _ in range(2):  # once found it is known, with no checkpoint to remember it
        now, bad, tests = open_data(config, ALONE)
        assert now.fingerprint == index.fingerprint and not place.exists()
        assert bad == {now.paths.index("b/17.jpg"): "ends the decoder: SIGSEGV"}
        assert len(tests) == 35 and tests.rejected == {"b/17.jpg": "ends the decoder: SIGSEGV"}
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "b/17.jpg: ends the decoder: SIGSEGV" in said
    shutil.copy(data / "b" / "19.jpg", killer)  # repaired
    (tmp_path / "run" / "inflight" / "probe-7-0").touch()  # of one that died before its first batch
    assert open_data(config, ALONE)[1] == {} and not list((tmp_path / "run" / "inflight").iterdir())
    assert not capsys.readouterr().out


def test_a_record_is_there_as_long_as_something_is_in_flight(data, tmp_path):
    import torch

    index, path = Index.scan(data), tmp_path / "run" / "inflight" / "train-0"
    settings = {"image_size": 16, "batch_size": 6, "seed": 0, "device": torch.device("cpu"), "threads": 1}
    loader = Loader(index, Augmentation(), **settings, record=path)
    batches = loader.batches(0, 6)
    for number in range(3):
        next(batches)
        noted = inflight.suspects(path, index.fingerprint, len(index))
        ahead = [loader.samples(n).tolist() for n in range(number, number + 2)]
        assert all(batch in noted for batch in ahead) and len(noted) <= 4
    assert inflight.suspects(path, "0" * 64, len(index)) is None
    assert not any(map(any, inflight.suspects(path, index.fingerprint, 1)))  # no number that the index has not
    torn = path.read_bytes()[:-60]
    path.write_bytes(torn)
    assert all(set(batch) <= set(range(36)) for batch in inflight.suspects(path, index.fingerprint, 36))
    batches.close()
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), inflight.Record(path, "f" * 64) as kept:
        kept.note(np.arange(3))
        assert path.exists() and 1 / 0
    assert not path.exists()


def test_known_files_are_known_until_they_change(data, tmp_path):
    index, path = Index.scan(data), tmp_path / "run" / "index" / known.FILE
    assert known.read(path, index) == {}
    known.add(path, index, {3: "why", 5: "so"})
    known.add(path, index, {7: "too"})
    assert known.read(path, index) == {3: "why", 5: "so", 7: "too"}
    (data / index.paths[5]).touch()
    (data / index.paths[7]).unlink()
    with path.open("ab") as file:
        file.write(b'\xff\n{"path": ["x"], "reason": "", "state": 1}\n{"path": "torn')
    assert known.read(path, index) == {3: "why"}
