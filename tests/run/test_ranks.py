import os
import re

import pytest
import torch
from conftest import on_ranks

from run.ranks import Ranks


def see(monkeypatch, cards):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)


def test_ranks_share_machines_and_cards(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert [Ranks(0, 8, n, torch.device("cpu")).threads() for n in (1, 3, 16, 32)] == [16, 5, 1, 1]
    assert Ranks(0, 8, 3, torch.device("cpu")).threads(7) == 7 and Ranks(0, 1, 1, torch.device("cpu")).first
    assert [Ranks(0, 8, n, torch.device("cuda")).threads() for n in (1, 2, 3, 4, 6, 16)] == [8, 6, 3, 2, 1, 1]
    assert Ranks(0, 8, 3, torch.device("cuda")).threads(16) == 16
    assert not Ranks(1, 2, 1, torch.device("cpu")).first
    for cards, wanted, local, place in ((0, "auto", 1, "cpu"), (2, "cpu", 4, "cpu"), (2, "auto", 2, "cuda:1")):
        see(monkeypatch, cards)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        monkeypatch.setenv("LOCAL_RANK", str(min(1, local - 1)))
        ranks = Ranks.join(wanted)
        assert (str(ranks.device), ranks.rank, ranks.count, ranks.local_count) == (place, 0, 1, local)
    for cards, wanted, said in ((0, "cuda", "sees no GPU"), (1, "auto", "2 ranks on a machine with 1 GPU; ")):
        see(monkeypatch, cards)
        with pytest.raises(ValueError, match=said):
            Ranks.join(wanted)


@pytest.mark.parametrize(
    "given",
    [{"RANK": "x"}, {"LOCAL_RANK": ""}, {"LOCAL_WORLD_SIZE": "0"}, {"RANK": "8", "WORLD_SIZE": "8", "LOCAL_RANK": "7"}],
)
def test_ranks_that_are_none_end_the_process_with_a_line(monkeypatch, capsys, given):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        Ranks.join("cpu")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(f"{name}={value}" in said for name, value in given.items())


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023"
GPUS = [
    ({}, None, "13.0", None),
    (
        {},
        CLOSED,
        "13.0",
        "CUDA 13.0, for which torch is built, needs driver 580 or newer, and this is 535.129.03; docs/in",
    ),
    ({}, CLOSED, "12.6", "NVIDIA's driver is here, but torch says: No CUDA GPUs are available"),
    ({}, OPEN, "13.0", "NVIDIA's driver is here, but torch says: No CUDA GPUs are available"),
    ({}, OPEN, None, f"torch {torch.__version__} is built without CUDA"),
    ({"CUDA_VISIBLE_DEVICES": ""}, CLOSED, "13.0", None),
]


@pytest.mark.parametrize("environment, driver, cuda, why", GPUS)
def test_a_gpu_that_torch_cannot_use_is_said(tmp_path, monkeypatch, capsys, environment, driver, cuda, why):
    def init():
        raise RuntimeError("No CUDA GPUs are available. And\nmore")

    see(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # NVML's count
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("run.ranks._DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if driver:
        (tmp_path / "version").write_text(f"{driver}\nGCC version:  gcc version 12.3.0\n")
    assert Ranks.join("auto").device.type == "cpu"
    said = capsys.readouterr().out
    assert said.startswith(f"on the CPU, not on a GPU: {why}") and said.count("\n") == 1 if why else not said
    with pytest.raises(ValueError, match=re.escape(f"--device cuda: {why or 'torch sees no GPU here; expected one'}")):
        Ranks.join("cuda")
    assert Ranks.join("cpu").device.type == "cpu" and not capsys.readouterr().out


def test_two_ranks_agree(tmp_path):
    """Sums, means, objects, what the first does or finds wrong, and the wish of one of them to stop."""
    on_ranks(
        2,
        """
        from run.ranks import Ranks
        from run.signals import StopRequest
        ranks = Ranks(rank, 2, 2, torch.device("cpu"))
        assert ranks.sum(torch.tensor([1.0 + rank])).item() == 3
        assert ranks.mean(torch.tensor([1.0 + rank])).item() == 1.5
        assert ranks.gather({rank: "x"}) == [{0: "x"}, {1: "x"}]
        assert ranks.on_first(lambda: ("done", rank)) == ("done", 0)
        assert ranks.on_first(lambda: bytes(9 << 20)) == bytes(9 << 20), "more than the store takes"
        there = torch.tensor([2.0 * rank])
        assert torch.cat(ranks.all(there)).tolist() == [0, 2] and ranks.broadcast(there, 1).item() == 2
        (folder / str(rank)).touch()
        ranks.meet()
        assert (folder / "0").exists() and (folder / "1").exists()
        for error in (ValueError, OSError):
            try:
                ranks.on_first(lambda: (_ for _ in ()).throw(error("wrong")))
                raise SystemExit("nothing was raised")
            except error as found:
                assert str(found) == "wrong"
        stop = StopRequest(ranks, print)
        assert not stop.agreed(1)
        stop.asked = 1.0 * rank
        assert stop.agreed(2) and stop.agreed(0)
        ranks.leave()
        dist.init_process_group = dist.destroy_process_group = lambda *_: None
        """,
        tmp_path,
    )
