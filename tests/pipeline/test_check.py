"""Checking a data set before a run: what is reported of it, and what the run then knows."""

import json
import shutil
import signal
import tarfile
import threading
import time

import numpy as np
import pytest
from conftest import photo

from pipeline import Index, trial
from pipeline.check import _duplicates, check, main
from run.images import open_data
from run.recipes import ImagesConfig
from tests.pipeline.test_trial import jpeg
from tests.run.test_loop import ALONE


@pytest.fixture
def data(tmp_path):
    """22 images of two classes, two of them the same."""
    for number in range(20):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(number, 20 + number, 30).save(path)
    root = tmp_path / "data"
    shutil.copy(root / "a" / "00.png", root / "b" / "copy.png")
    photo(99).save(root / "a" / "cut.jpg")
    return root


def test_what_is_there_is_reported_and_what_is_bad_is_known_to_the_run(data, tmp_path, capsys):
    output, report = tmp_path / "run", tmp_path / "report.json"
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(data, "")
    assert main([str(tmp_path / "all.tar"), "--processes", "1"]) == 0  # and leaves nothing behind
    assert f"{tmp_path}/all.tar: 22 of 22 files are good" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.tar", "data"]
    (data / "a" / "cut.jpg").write_bytes((data / "a" / "cut.jpg").read_bytes()[:-400])
    (data / "b" / "text.jpg").write_text("text")
    (data / "b" / "killer.jpg").write_bytes(jpeg(1, 6))
    photo(98).save(data / "b" / "rot.tif", compression="tiff_lzw")  # which the decoder shows, as far as it unpacks
    rot = (data / "b" / "rot.tif").read_bytes()
    (data / "b" / "rot.tif").write_bytes(rot[:4000] + bytes(2000) + rot[6000:])
    capsys.readouterr()
    assert main([str(data), "--output", str(output), "--json", str(report), "--processes", "2"]) == 1
    said, found = capsys.readouterr().out, json.loads(report.read_text())
    assert found["files"] == 25 and found["good"] == 21 and found["bad"] == 4
    assert set(found["bad_files"]) == {"a/cut.jpg", "b/text.jpg", "b/killer.jpg", "b/rot.tif"}
    assert found["formats"].pop("PNG") == 21 and found["classes"].keys() == {"a", "b"}
    assert found["sizes"]["width"]["median"] == 30 and found["sizes"]["height"]["min"] == 20
    assert found["duplicates"]["largest"] == [["a/00.png", "b/copy.png"]]
    assert found["duplicates"]["groups_of_several_classes"] == found["duplicates"]["copies"] == 1
    assert "21 of 25 files are good, 4 bad" in said and "b/text.jpg: not an image" in said
    index, bad, _ = open_data(ImagesConfig(output=output, data=data), ALONE)
    known = {index.paths[i] for i in bad} | set(index.rejected)
    assert known == set(found["bad_files"])


def test_other_pixels_than_the_header_says_are_bad_and_an_outage_is_not_remembered(data, tmp_path, monkeypatch):
    """By a stand-in for the process that decodes."""

    class Stand:
        def __init__(self, **_):
            pass

        def decode(self, files):
            assert len(files) <= 16
            answers = []
            for path, *_ in files:
                height = 20 + int(path[-6:-4]) if path[-6:-4].isdigit() else 20
                size = [height, 31] if path.endswith("07.png") else [60, 80] if path.endswith("jpg") else [height, 30]
                unread = ["Connection refused", None, None, None, None]
                answers.append(unread if path.endswith("08.png") else [None, size, "0f" * 16, "PNG", 1])
            return answers

        def close(self):
            pass

    monkeypatch.setattr(trial, "Decoder", Stand)
    output, report = tmp_path / "run", tmp_path / "report.json"
    assert main([str(data), "--output", str(output), "--json", str(report)]) == 1
    found = json.loads(report.read_text())
    said = "decodes as 27x31; its header says 27x30"
    assert found["bad_files"] == {"a/08.png": "Connection refused", "b/07.png": said}
    index, bad, _ = open_data(ImagesConfig(output=output, data=data), ALONE)
    assert {index.paths[i]: reason for i, reason in bad.items()} == {"b/07.png": said}


def test_ctrl_c_does_not_wait_for_a_decoder(data, monkeypatch):
    """By a stand-in that answers when it is closed, as one does whose store hangs."""
    closed = threading.Event()

    class Hangs:
        def __init__(self, **_):
            self.close = closed.set

        def decode(self, files):
            closed.wait(20)

    monkeypatch.setattr(trial, "Decoder", Hangs)
    index, handler = Index.scan(data), signal.signal(signal.SIGALRM, signal.default_int_handler)
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            check(index, 1, str(data))
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert time.monotonic() - start < 10


def test_wrong_input_is_one_line(tmp_path, capsys):
    for arguments in ([str(tmp_path / "nowhere")], [str(tmp_path)], [str(tmp_path), "--processes", "-1"]):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("pipeline.check: ") and said.count("\n") == 1, said
    assert main([str(tmp_path), "--json", str(tmp_path / "no/x.json")]) == 2
    assert "--json" in capsys.readouterr().err, "not behind all the decoding"
    for arguments in ([""], ["x", "--output", ""]):  # of variables that are not set
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and "got nothing" in capsys.readouterr().err


def test_equal_bytes_are_found_by_their_digests():
    rows = np.random.default_rng(0).integers(0, 2, (500, 16)).astype(np.uint8) * (np.arange(16) < 7)
    rows[:3] = 0  # not read
    groups = _duplicates(rows)
    keys = [bytes(row) for row in rows]
    there = {key for key in keys if any(key) and keys.count(key) > 1}
    assert {keys[group[0]] for group in groups} == there and len(groups) == len(there)
    assert all([i for i, key in enumerate(keys) if key == keys[group[0]]] == group for group in groups)
    assert [len(group) for group in groups] == sorted(map(len, groups), reverse=True)
