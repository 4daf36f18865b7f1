import errno
import os
import zipfile
from types import SimpleNamespace

import pytest
import torch

from run import checkpoint

KEEP = {"last": 3, "every": 0}


def test_what_is_saved_comes_back_and_old_ones_go(tmp_path):
    tmp_path /= os.fsdecode(b"caf\xe9")  # torch opens no file in a folder whose name is not UTF-8
    tmp_path.mkdir()
    (tmp_path / "step-best.pt").touch()  # a user's copy
    for step in (5, 10, 15, 20, 25, 1_000_000_000):
        state = {"step": step, "weights": torch.full((3,), step), "name": "a"}
        checkpoint.save(tmp_path, step, state, last=2, every=10)
    steps = sorted(path.stem[5:].lstrip("0") for path in tmp_path.iterdir())
    assert steps == ["10", "1000000000", "20", "25", "best"]
    path, damaged = checkpoint.newest(tmp_path)
    state = checkpoint.load(path)
    assert state["step"] == 1_000_000_000 and torch.equal(state["weights"], torch.full((3,), 1_000_000_000))
    assert not damaged and checkpoint.newest(tmp_path / "nothing") == (None, [])


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, monkeypatch):
    """One bit of the weights, and a torn file; not one that may be whole."""
    first, flipped, torn = (checkpoint.save(tmp_path, i, {"weights": torch.randn(10_000)}, **KEEP) for i in range(3))
    data = bytearray(flipped.read_bytes())
    data[20_000] ^= 1
    flipped.write_bytes(data)
    torn.write_bytes(torn.read_bytes()[:-100])
    saved = [checkpoint.save(tmp_path, 0, {}, last=1, every=0), flipped, torn]
    assert sorted(tmp_path.iterdir()) == saved  # what is saved stays, whatever is left of later steps
    path, damaged = checkpoint.newest(tmp_path)
    assert path == first and [line.split(" is damaged")[0] for line in damaged] == [str(torn), str(flipped)]

    def refuse(path):
        raise OSError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=rf"^{torn} cannot be read \(Permission denied\)"):
        patch.setattr("zipfile.ZipFile", refuse)
        checkpoint.newest(tmp_path)

    def fill(*_, **__):
        raise RuntimeError("unable to mmap 200 bytes from file: Cannot allocate memory (12)")

    with monkeypatch.context() as patch:
        patch.setattr("torch.load", fill)
        for read, what in ((checkpoint.load, torn), (checkpoint.newest, tmp_path)):
            with pytest.raises(OSError, match=r" cannot be read \(Cannot allocate memory\)"):
                read(what)
    first.write_bytes(b"")
    with pytest.raises(ValueError, match="no other is left"):
        checkpoint.newest(tmp_path)


def test_a_checkpoint_that_a_run_removes_meanwhile_is_not_called_damaged(tmp_path, monkeypatch):
    old, opened = checkpoint.save(tmp_path, 1, {}, **KEEP), zipfile.ZipFile

    def removed(path):
        if path == old:
            checkpoint.save(tmp_path, 2, {}, last=1, every=0)
        return opened(path)

    monkeypatch.setattr("zipfile.ZipFile", removed)
    assert checkpoint.newest(tmp_path) == (tmp_path / "step-00000002.pt", [])
    with pytest.raises(OSError, match=r"step-00000001.pt cannot be read \(No such file or directory\)"):
        checkpoint.load(old)


def test_no_damaged_bit_is_a_traceback_or_goes_unseen(tmp_path):
    """In headers zipfile takes it for encryption, for compression, or for names in another encoding; or only torch
    reads it."""
    path = checkpoint.save(tmp_path, 1, {"weights": torch.arange(4.0)}, **KEEP)
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            found, _ = checkpoint.newest(tmp_path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert checkpoint.load(found)["weights"].tolist() == [0, 1, 2, 3]


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path, 1, {"step": 1}, **KEEP)
    before = path.read_bytes()

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, 1, {"step": 2}, **KEEP)
    assert path.read_bytes() == before


def test_a_torn_or_foreign_file_is_named_and_never_executed(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"weights": torch.zeros(1000)}, **KEEP)
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


def test_what_fails_in_the_background_is_raised(tmp_path):
    saver = checkpoint.Saver(tmp_path, last=1, every=0)
    for step in (1, 2):
        saver.save(step, {"step": step})
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.pt"]
    (tmp_path / "step-00000001.pt.partial").touch()  # of a process that was killed
    (tmp_path / "step-00000003.pt.partial").mkdir()
    saver.save(3, {"step": 3})
    with pytest.raises(OSError, match="directory"):
        saver.save(4, {"step": 4})
    saver.save(4, {"step": 4})
    saver.wait()
    assert checkpoint.load(checkpoint.newest(tmp_path)[0]) == {"step": 4}
    assert not (tmp_path / "step-00000001.pt.partial").exists()


def test_a_full_disk_is_told_from_other_errors_of_torch(tmp_path, monkeypatch):
    """Its writer raises a RuntimeError over the OSError; the folder, which may not be there yet, stays as it was."""
    folder = tmp_path / "new" / "folder"
    checkpoint.save(folder, 1, {"step": 1}, **KEEP)

    def fails(state, file):
        try:
            raise state
        except OSError:
            raise RuntimeError("torch's") from None
        except RuntimeError as error:
            raise error from None

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError) as full:
        checkpoint.save(folder, 2, OSError(errno.ENOSPC, "No space left"), **KEEP)
    assert full.value.errno == errno.ENOSPC and full.value.filename == str(folder / "step-00000002.pt")
    with pytest.raises(RuntimeError, match="a bug"):
        checkpoint.save(folder, 2, RuntimeError("a bug"), **KEEP)
    assert [path.name for path in folder.iterdir()] == ["step-00000001.pt"]


def test_what_fails_first_is_what_is_said(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("the first")

    monkeypatch.setattr(type(tmp_path), "write_bytes", fails)
    with pytest.raises(OSError, match="the first"):
        checkpoint.write_atomically(tmp_path / "a.json", b"")

    def torn(*_):
        raise EOFError

    checkpoint.save(tmp_path, 1, {"step": 1}, **KEEP)
    monkeypatch.setattr(checkpoint.zipfile, "ZipFile", torn)
    with pytest.raises(ValueError, match=r"is damaged \(EOFError\)"):
        checkpoint.newest(tmp_path)


def test_a_copy_leaves_a_gpu_half_of_what_nobody_has(monkeypatch):
    """Played on a CPU, where ``cpu()`` copies nothing."""
    flat = torch.arange(64.0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for free, fits in ((511, False), (512, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 0))
        copy = checkpoint.copied(part=SimpleNamespace(state_dict=lambda: {"flat": flat}))["part"]["flat"]
        assert torch.equal(copy, flat) and (copy.data_ptr() != flat.data_ptr()) == fits


@pytest.mark.parametrize(
    "device, free", [("cpu", 0), *(pytest.param("cuda", free, marks=pytest.mark.gpu) for free in (0, 2**20))]
)
def test_copies_stay_as_they_are_and_a_storage_is_one_copy(tmp_path, monkeypatch, device, free):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 0))
    flat = torch.arange(4096.0, device=device)
    module = torch.nn.Linear(2, 2, device=device)
    module.weight.data, module.bias.data = flat[64:68].view(2, 2).T, flat[128:130]  # one has strides
    before = {name: value.cpu().clone() for name, value in module.state_dict().items()}
    if device == "cuda":
        torch.cuda._sleep(100_000_000)  # a queue, in which the copies have their turn
    state = checkpoint.copied(module=module, nothing=None)
    flat.zero_()
    assert state.keys() == {"module"} and state["module"]["weight"].device.type == (device if free else "cpu")
    assert len({value.untyped_storage().data_ptr() for value in state["module"].values()}) == 1
    saver = checkpoint.Saver(tmp_path, last=1, every=0)
    saver.save(1, state)
    saver.wait()
    found = checkpoint.load(checkpoint.newest(tmp_path)[0])["module"]
    assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in before)
