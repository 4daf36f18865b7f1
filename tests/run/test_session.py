"""Output folders: new ones, those of the same run, and all that are neither; ranks; how a program begins and ends."""

import errno
import json
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import on_ranks

from pipeline import TooManyBadFiles
from run import checkpoint, program, signals
from run.progress import TooManySkipped
from run.ranks import Ranks
from run.recipes import Config, RunConfig
from run.session import OURS, check_share, describe, named, open_output, summarise_rejected
from run.signals import GPU_EVERY, STOPPED, StopRequest
from tests.run.test_loop import ALONE, Data


def refused(said, config, data=None):
    with pytest.raises(ValueError) as error:
        open_output(config, data or Data(), ALONE)
    assert said in str(error.value) and "expected" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", OURS)
def test_what_a_run_may_have_left_is_not_adopted_without_its_config(tmp_path, name):
    """An empty folder is nothing; what others have put there is none of ours."""
    (tmp_path / "notes.txt").write_text("mine")
    if name == "checkpoints":
        (tmp_path / name).mkdir()
        assert open_output(RunConfig(output=tmp_path), Data(), ALONE).state is None
        (tmp_path / "config.json").unlink()
        (tmp_path / name / "step-00000001.pt").touch()
    else:
        (tmp_path / name).touch()
    refused(f"{tmp_path} holds {name} but no config.json", RunConfig(output=tmp_path))


def test_the_same_run_goes_on_and_no_other(tmp_path):
    config = Config(output=tmp_path, lr=0.25)
    opened = open_output(config, Data(), ALONE)
    assert opened.state is None and not opened.damaged
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["program"] == "train.py" and stored["config"]["lr"] == 0.25
    assert stored["data"] == {"images": 40, "classes": 2, "fingerprint": "f"}
    assert stored["versions"].keys() == {"python", "torch", "timm", "numpy"}
    checkpoint.save(tmp_path / "checkpoints", 3, {"step": 3})
    checkpoint.save(tmp_path / "checkpoints", 4, {"step": 4}).write_bytes(b"torn")
    free = Config(output=tmp_path, lr=0.25, max_steps=7, max_bad=0.5, keep_last=9, threads=3)
    opened = open_output(free, Data(), ALONE)
    assert (
        opened.state == {"step": 3} and len(opened.damaged) == 1 and "step-00000004.pt is damaged" in opened.damaged[0]
    )
    assert json.loads((tmp_path / "config.json").read_text())["config"]["max_steps"] == 7

    before = (tmp_path / "config.json").read_bytes()
    refused("holds another run (lr 0.25 there and 0.5 now)", Config(output=tmp_path, lr=0.5))
    refused("--resume never", Config(output=tmp_path, lr=0.25, resume="never"))
    refused("holds a run of train.py", type("Other", (Config,), {"PROGRAM": "other.py"})(output=tmp_path, lr=0.25))
    other = Data(41)
    other.differing = lambda path, images: f"other data ({path.name}, {images} there); expected the same"
    refused("holds a run on other data (run.npz, 40 there)", config, other)
    assert (tmp_path / "config.json").read_bytes() == before
    for content in ("{", "[]", '{"config": {}, "data": {"images": "many"}}', '{"config": {}}'):
        (tmp_path / "config.json").write_text(content)
        refused("is not the config of a run", config)


def test_folders_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    refused("is a file", RunConfig(output=tmp_path / "file"))
    refused("is below", RunConfig(output=tmp_path / "file" / "run"))
    if os.geteuid():  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        refused("cannot be written to", RunConfig(output=tmp_path / "locked"))
    (tmp_path / "config.json").touch()
    (tmp_path / "checkpoints").touch()
    refused("cannot be made (File exists)", RunConfig(output=tmp_path))


def test_shares_of_bad_files_and_how_they_are_named(tmp_path):
    """At most 20, or a share of all files, those counted that have no number."""
    data = Data(999)
    for count, share, right in (
        (49, 0.05, True),
        (50, 0.05, False),
        (19, 0.001, True),
        (20, 0.001, False),
        (0, 0, False),
    ):
        bad = dict.fromkeys(range(count), "why\n")
        if right:
            check_share(RunConfig(max_bad=share), "--data X", data, bad)
        else:
            with pytest.raises(ValueError, match=rf"--data X: {count + 1} of 1,000 files cannot be used, at most "):
                check_share(RunConfig(max_bad=share), "--data X", data, bad)
    assert summarise_rejected(data, {}, tmp_path).startswith("left out 1 of 1,000 files")
    data.rejected = {}
    assert summarise_rejected(data, {}, tmp_path) == ""
    assert named([("a\n", "b")] * 10).count("; ") == 9 and named([("a\n", "b")] * 12).endswith("a\\n: b; and 2 more")
    assert describe(RunConfig(), data)["data"]["images"] == 999


def test_ranks_share_machines_and_cards(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert [Ranks(0, 8, n, torch.device("cpu")).threads() for n in (1, 3, 32)] == [16, 5, 1]
    assert Ranks(0, 8, 3, torch.device("cpu")).threads(7) == 7 and Ranks(0, 1, 1, torch.device("cpu")).first
    assert not Ranks(1, 2, 1, torch.device("cpu")).first
    for cards, wanted, local, place in ((0, "auto", 1, "cpu"), (2, "cpu", 4, "cpu"), (2, "auto", 2, "cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda cards=cards: cards)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        monkeypatch.setenv("LOCAL_RANK", str(min(1, local - 1)))
        ranks = Ranks.join(wanted)
        assert (str(ranks.device), ranks.rank, ranks.count, ranks.local_count) == (place, 0, 1, local)
    for cards, wanted, said in ((0, "cuda", "sees no GPU"), (1, "auto", "2 ranks on a machine with 1 GPUs")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda cards=cards: cards)
        with pytest.raises(ValueError, match=said):
            Ranks.join(wanted)


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
        for error in (ValueError, OSError):
            try:
                ranks.on_first(lambda: (_ for _ in ()).throw(error("wrong")))
                raise SystemExit("nothing was raised")
            except error as found:
                assert str(found) == "wrong"
        stop = StopRequest(ranks)
        assert not stop.agreed(1)
        stop.asked = 1.0 * rank
        assert stop.agreed(2) and stop.agreed(0)
        ranks.leave()
        dist.init_process_group = dist.destroy_process_group = lambda *_: None
        """,
        tmp_path,
    )


def test_gpus_agree_to_stop_every_few_steps_only(monkeypatch):
    stop = StopRequest(SimpleNamespace(device=torch.device("cuda"), count=2))
    stop.asked, asked = 1.0, []
    monkeypatch.setattr(signals.torch, "tensor", lambda value, device: torch.zeros(1) + value)
    monkeypatch.setattr(signals.dist, "all_reduce", lambda *_: asked.append(True))
    assert [step for step in range(31) if stop.agreed(step)] == [0, GPU_EVERY, 2 * GPU_EVERY, 3 * GPU_EVERY]
    assert len(asked) == 4


ENDS = [
    (TooManyBadFiles("21 of 50 images cannot be used"), "a.py: 21 of 50 images cannot be used; see rejected.jsonl."),
    (TooManySkipped("5 steps in a row"), "a.py: 5 steps in a row. Lower --lr"),
    (OSError(errno.ENOSPC, "No space left"), "a.py: [Errno 28] No space left in the output folder; what was saved"),
    (OSError(errno.ENOSPC, "No space left", "x.pt"), "a.py: [Errno 28] No space left: 'x.pt'; what was saved before"),
    (OSError(errno.ENOENT, "None there"), "a.py: [Errno 2] None there; what was saved before is intact"),
    (RuntimeError("[/gloo/pair.cc] Connection closed"), "a.py: most likely another rank has ended (Connection closed)"),
]


@pytest.mark.parametrize(("error", "said"), ENDS, ids=lambda value: type(value).__name__)
def test_what_ends_a_program_is_one_line(monkeypatch, error, said):
    monkeypatch.setattr("sys.argv", ["a.py", "x"])

    def main(arguments):
        assert arguments == ["x"]
        raise error

    with pytest.raises(SystemExit) as end:
        program.run("a.py", main)
    assert end.value.code.startswith(said) and "\n" not in end.value.code


def test_other_errors_are_not_hidden_and_wrong_input_is_said_by_one_rank(monkeypatch, capsys):
    def broken(_):
        raise RuntimeError("a bug")

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="a bug"):
        program.run("a.py", broken)
    with pytest.raises(SystemExit) as end:
        program.run("a.py", interrupted)
    assert end.value.code == STOPPED and capsys.readouterr().err.startswith("a.py: interrupted; the same command")
    for rank, said in (("0", "a.py: wrong\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end, program.opening("a.py"):
            raise ValueError("wrong")
        assert end.value.code == 2 and capsys.readouterr().err == said
