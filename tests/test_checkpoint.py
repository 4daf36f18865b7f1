import os

import pytest
import torch

from run import checkpoint


def test_what_is_saved_comes_back_and_old_ones_go(tmp_path):
    for step in (5, 10, 15, 1_000_000_000):
        checkpoint.save(tmp_path, step, {"step": step, "weights": torch.full((3,), step), "name": "a"})
    assert len(list(tmp_path.iterdir())) == checkpoint.KEPT
    state = checkpoint.load(checkpoint.newest(tmp_path))
    assert state["step"] == 1_000_000_000 and torch.equal(state["weights"], torch.full((3,), 1_000_000_000))


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path, 1, {"step": 1})
    before = path.read_bytes()

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, 1, {"step": 2})
    assert path.read_bytes() == before


def test_a_torn_or_foreign_file_is_named_and_never_executed(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"weights": torch.zeros(1000)})
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"step-00000001\.pt is no readable checkpoint"):
        checkpoint.load(path)

    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    torch.save(Harm(), path)
    with pytest.raises(ValueError, match="no readable checkpoint"):
        checkpoint.load(path)
    assert not (tmp_path / "harm").exists()
