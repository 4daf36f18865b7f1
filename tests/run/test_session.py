"""Output folders: new ones, those of the same run, and all that are neither."""

import json
import multiprocessing
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader

from pipeline.stream import Augmentation
from run import checkpoint
from run.recipes import Config, RunConfig
from run.session import OURS, check_share, describe, lock, named, open_output, summarise_rejected
from tests.run.test_loop import ALONE, Data
from transfer.detection.batches import apart


def refused(said, config, data=None):
    with pytest.raises(ValueError) as error:
        open_output(config, data or Data(), ALONE)
    assert said in str(error.value) and "expected" in str(error.value) and "\n" not in str(error.value)


def save(output, step, run):
    state = {"step": step, "run": json.dumps(run)}
    checkpoint.save(output / "checkpoints", step, state, last=9, every=0)
    return state


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
    saved = save(tmp_path, 3, stored)
    save(tmp_path, 4, stored)
    (tmp_path / "checkpoints" / "step-00000004.pt").write_bytes(b"torn")
    free = Config(output=tmp_path, lr=0.25, max_steps=7, max_bad=0.5, keep_last=9, threads=3)
    opened = open_output(free, Data(), ALONE)
    assert opened.state == saved and len(opened.damaged) == 1 and "step-00000004.pt is damaged" in opened.damaged[0]
    assert json.loads((tmp_path / "config.json").read_text())["config"]["max_steps"] == 7

    (tmp_path / "checkpoints" / "step-00000004.pt").unlink()
    for change, said in (
        ({"program": "other.py"}, "of other.py"), ({"config": stored["config"] | {"lr": 1.0}}, "lr 1.0 there and 0.25"),
        ({"data": stored["data"] | {"fingerprint": "g"}}, "other data"),
    ):  # fmt: skip
        save(tmp_path, 5, stored | change)  # copied in from somewhere else
        refused(f"step-00000005.pt is of another run ({said}", config)
    for step, run in ((4, stored), (5, []), (5, {"config": 1})):
        torch.save({"step": step, "run": json.dumps(run)}, tmp_path / "checkpoints" / "step-00000005.pt")
        refused("step-00000005.pt does not hold what a run saves after that step; expected its removal", config)
    (tmp_path / "checkpoints" / "step-00000005.pt").unlink()

    before = (tmp_path / "config.json").read_bytes()
    changed = Config(output=tmp_path, lr=0.5, augmentation=Augmentation(hue=0.2))
    refused("holds another run (lr 0.25 there and 0.5 now; hue 0.1 there and 0.2 now)", changed)
    refused("--resume never", Config(output=tmp_path, lr=0.25, resume="never"))
    refused("holds a run of train.py", type("Other", (Config,), {"PROGRAM": "other.py"})(output=tmp_path, lr=0.25))
    other = Data(41)
    other.differing = lambda path, images: f"other data ({path.name}, {images} there); expected the same"
    refused("holds a run on other data (run.index, 40 there)", config, other)
    assert (tmp_path / "config.json").read_bytes() == before
    many = [json.dumps({"config": {}, "data": {"images": images}}) for images in ("many", float("inf"))]
    for content in ("{", "[]", "[" * 100_000, *many, '{"config": {}}'):
        (tmp_path / "config.json").write_text(content)
        refused("is not the config of a run", config)


def test_folders_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    refused("is a file", RunConfig(output=tmp_path / "file"))
    refused("is below", RunConfig(output=tmp_path / "file" / "run"))
    if os.geteuid():  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        refused("locked cannot be written to", RunConfig(output=tmp_path / "locked"))
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoints").mkdir(mode=0o500)
        refused("checkpoints cannot be written to", RunConfig(output=tmp_path / "run"))
    (tmp_path / "config.json").touch()
    (tmp_path / "checkpoints").touch()
    refused("cannot be made (File exists)", RunConfig(output=tmp_path))


def test_shares_of_bad_files_and_how_they_are_named(tmp_path):
    """At most 20, or a share of all files, those counted that have no number."""
    data = Data(999)
    cases = (49, 0.05, True), (50, 0.05, False), (19, 0.001, True), (20, 0.001, False), (0, 0, False)
    for count, share, right in cases:
        bad = dict.fromkeys(range(count), "why\n")
        if right:
            check_share(RunConfig(max_bad=share), "--data X", data, bad)
        else:
            with pytest.raises(ValueError, match=rf"--data X: {count + 1} of 1,000 files cannot be used, at most "):
                check_share(RunConfig(max_bad=share), "--data X", data, bad)
    assert summarise_rejected(data, {}, tmp_path).startswith("left out 1 of 1,000 files")
    data.rejected = {}
    assert summarise_rejected(data, {}, tmp_path) == ""
    for count, more in ((10, ""), (11, "and 1 more"), (1210, "and 1,200 more")):
        said = named([("a\n", "b")] * count)
        assert said.count("a\\n: b") == 10 and said.endswith(more or "b") and said.count("; ") == 9 + bool(more)
    assert describe(RunConfig(), data)["data"]["images"] == 999


def die(output):
    lock(output)
    images = iter(DataLoader(range(9), num_workers=1, worker_init_fn=apart))
    next(images)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_folder_of_a_killed_program_is_free_at_once(tmp_path):
    """Its image workers notice that it is gone after seconds only."""
    killed = multiprocessing.get_context("fork").Process(target=die, args=(tmp_path,))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    lock(tmp_path)
