"""The loop around the steps of every program, with a network that only counts them."""

import dataclasses
import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline import TooManyBadFiles, waiting
from run import checkpoint, progress
from run.loop import Loop, planned, running
from run.progress import TooManySkipped
from run.ranks import Ranks
from run.recipes import RunConfig
from run.session import CHANGED, GONE, open_output
from run.signals import STOPPED

ALONE = Ranks(0, 1, 1, torch.device("cpu"))


class Data:
    """Files that are called by their numbers."""

    root, classes, fingerprint, reader = Path("/data"), ("a", "b"), "f", "numpy"

    def __init__(self, count=40):
        self.paths, self.rejected = [f"{number}.jpg" for number in range(count)], {"text.jpg": "not an image"}

    def __len__(self):
        return len(self.paths)

    def keep(self, path, *, anew):
        pass


class Loader:
    """Batch b holds files 2 b and 2 b + 1 of the epoch."""

    def __init__(self, batches_per_epoch=5):
        self.index, self.bad, self.batches_per_epoch, self.asked = Data(), {}, batches_per_epoch, None

    def batches(self, first, last):
        self.asked = first, last
        yield from range(first, last)

    def samples(self, number):
        return [2 * number % 40, (2 * number + 1) % 40]


class Training:
    """Its state is the list of what it was trained on."""

    FIGURES = ("loss",)

    def __init__(self):
        self.seen = []

    def step(self, *what, finite=True):
        self.seen.append(what)
        return [torch.tensor(float(len(self.seen)))], torch.tensor(finite)

    def state_dict(self, *, keep=True):
        return {"seen": [list(what) for what in self.seen]}

    def load_state_dict(self, state):
        self.seen = [tuple(what) for what in state["seen"]]


def run(
    output, *, groups=1, window=1, stop_after=math.inf, training=None, loader=None, finite=lambda step: True, **options
):
    """A run to its end, or until it was asked to stop after a step: the exit code, and what it was trained on."""
    config = RunConfig(output=output, **{"log_every": 4} | options)
    training, loader = training or Training(), loader or Loader()
    opened = open_output(config, loader.index, ALONE)
    try:
        with running(
            config, ALONE, loader, training, opened, about="of a test", rates={"images_per_second": 2}, groups=groups,
            window=window,
        ) as loop:  # fmt: skip
            for first, batches, turns in loop.windows():
                batches, each = list(batches), loader.batches_per_epoch
                assert batches == [*range(first, first + window)][: each - first % each]  # always a whole window
                for place, group in turns:
                    what = batches[place], group, round(loop.epoch, 6)
                    figures, good = training.step(*what, finite=finite(loop.step + 1))
                    loop.took(figures, good, 0.5)
                    if loop.step >= stop_after:
                        loop.stop.asked = 1.0
        return 0, training.seen
    except SystemExit as end:
        return end.code, training.seen


def steps_saved(output):
    return sorted(checkpoint.step_of(path) for path in (output / "checkpoints").iterdir())


def test_a_request_to_stop_while_files_are_waited_for_saves_too(tmp_path):
    class Waits(Loader):
        def batches(self, first, last):
            for number in super().batches(first, last):
                if number == 3:
                    signal.raise_signal(signal.SIGTERM)
                    waiting.pause(300)
                yield number

    code, seen = run(tmp_path / "run", groups=2, loader=Waits())
    assert code == STOPPED and len(seen) == 6
    assert run(tmp_path / "run", groups=2) == (0, run(tmp_path / "other", groups=2)[1])
    assert waiting.asked_to_stop() is False, "afterwards"


def test_a_checkpoint_of_another_version_is_one_line_and_stays(tmp_path, capsys, monkeypatch):
    class Other(Training):
        def load_state_dict(self, state):
            raise ValueError("loaded state dict has a different number of parameter groups\nmore")

    run(tmp_path, stop_after=3)
    kept = [path.read_bytes() for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert run(tmp_path, training=Other()) == (2, [])
    (said,) = capsys.readouterr().err.splitlines()
    assert "do not fit this version of the program (ValueError: loaded state dict has" in said and "--output" in said
    with monkeypatch.context() as patch:
        patch.setattr(progress.Report, "load_state_dict", lambda self, state: state["another's"])
        assert run(tmp_path)[0] == 2 and '(KeyError: "another\'s")' in capsys.readouterr().err
    assert [path.read_bytes() for path in sorted((tmp_path / "checkpoints").iterdir())] == kept


@pytest.mark.parametrize(
    "groups, window, options",
    [
        (1, 1, {"epochs": 2}), (3, 1, {"epochs": 1}), (4, 1, {"epochs": 1.5, "max_steps": 22}),
        (1, 3, {"epochs": 1}), (3, 2, {"epochs": 1.5, "max_steps": 17}), (2, 4, {"epochs": 2}), (2, 9, {"epochs": 1}),
        (2, 3, {"epochs": 2, "max_steps": 11}),
    ],
)  # fmt: skip
def test_wherever_a_run_is_stopped_it_takes_each_step_once_and_in_order(tmp_path, groups, window, options):
    """Windows begin with every epoch, of five batches; within one, the first groups of its batches come first."""
    options |= {"checkpoint_every": 6, "keep_last": 100}
    total = min(round(5 * options["epochs"]) * groups, options.get("max_steps", 99))
    order = [
        (number, group)
        for epoch in range(3) for start in range(0, 5, window)
        for group in range(groups) for number in range(5 * epoch + start, 5 * epoch + min(start + window, 5))
    ]  # fmt: skip
    expected = [(*order[step], round(step / groups / 5, 6)) for step in range(total)]
    how = {"groups": groups, "window": window}
    assert run(tmp_path / "whole", **how, **options) == (0, expected)
    saved = [step for step in range(1, total + 1) if step % 6 == 0 or step == total]
    assert steps_saved(tmp_path / "whole") == saved
    first = order[total - 1][0] // 5 * 5 + order[total - 1][0] % 5 // window * window
    last = min(first + window, first // 5 * 5 + 5)
    for stop in range(1, total + 1):
        output = tmp_path / str(stop)
        code, seen = run(output, stop_after=stop, **how, **options)
        assert (code, seen) == (STOPPED, expected[:stop])
        assert steps_saved(output) == sorted({*saved, stop} - set(range(stop + 1, 99)))
        loader = Loader()
        assert run(output, loader=loader, **how, **options) == (0, expected)
        if stop < total:  # and no batch is decoded for nothing
            needed = order[stop // (5 * groups) * 5 * groups :][: 5 * groups]
            part = stop % (5 * groups) // (window * groups) * window * groups
            assert loader.asked == (min(number for number, _ in needed[part : part + window * groups]), last)
    assert run(output, **how, **options) == (0, expected)  # there is nothing left to do


@pytest.mark.parametrize(
    "steps, taken, epochs, time",
    [
        (20, 6, "2.00", "0:00:50, from 2.5 s a step, waiting for data 20.0%"),
        (3, 3, "0.30", "0:00:09, from 3 s a step, waiting for data 33.3%"),
        (1, 1, "0.10", "0:01:03, from 63 s a step, waiting for data 1.6%"),
    ],
)
def test_a_dry_run_measures_steps_and_no_first_one(tmp_path, capsys, monkeypatch, steps, taken, epochs, time):
    """Steps of 2 s, the first of which takes a minute more, and 1 s for each batch, which is good for two."""
    now = [0.0]

    class Slow(Loader):
        def batches(self, first, last):
            for number in super().batches(first, last):
                now[0] += 1
                yield number

    class Steps(Training):
        def step(self, *what, **how):
            now[0] += 2 if self.seen else 62
            return super().step(*what, **how)

    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    loader, how = Slow(), {"groups": 2, "epochs": 2, "max_steps": steps, "dry_run": True}
    code, seen = run(tmp_path / "run", loader=loader, training=Steps(), **how)
    assert not code and [what[:2] for what in seen] == [(step // 2, step % 2) for step in range(taken)]
    assert loader.asked == (0, (steps + 1) // 2)  # what is behind is loaded too, beside the steps
    printed = capsys.readouterr().out
    assert f"to come: steps 1 to {steps}, epoch 0.00 to {epochs} of 2, 10 steps each\n" in printed
    assert f"time: an estimate of {time}" in printed
    assert "left out 1 of 41 files: text.jpg: not an image" in printed and not list(tmp_path.iterdir())


def test_steps_of_one_group_are_the_batches(tmp_path, capsys):
    config, training = RunConfig(output=tmp_path, epochs=1, log_every=2), Training()
    opened = open_output(config, Loader().index, ALONE)
    with running(config, ALONE, Loader(6), training, opened, about="a test", rates={}) as loop:
        for batch in loop.steps():
            loop.took(*training.step(batch), 0.5)
            loop.record({"top1": 1.0} if loop.due(1 / 3) else {})
    assert training.seen == [(0,), (1,), (2,), (3,), (4,), (5,)] and loop.step == loop.total == 6 and not loop.stopped
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0] == "a test; steps 1 to 6"
        and "loss 1.0000" in said[1]
        and "loss 1.5000" in said[2]
        and "step 6/6" in said[4]
    )
    run(tmp_path, training=training, loader=Loader(6), epochs=1, log_every=2)
    assert "of a test; step 6 was the last" in capsys.readouterr().out
    assert said[5].startswith("left out 1 of 41 files") and said[5].endswith("text.jpg: not an image")
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records if "top1" in record] == [0.3333, 0.6667]


@pytest.mark.parametrize("epochs", [0, 0.25, 0.75, 1, 1.5])
@pytest.mark.parametrize("per_epoch", [4, 5])
def test_what_is_due_every_so_many_epochs(epochs, per_epoch):
    """At the first step at which that many more have passed; the last step is not one of them."""
    loop = Loop.__new__(Loop)
    loop.steps_per_epoch, loop.total = per_epoch, 4 * per_epoch
    due = []
    for step in range(1, loop.total + 1):
        loop.step = step
        if loop.due(epochs):
            due.append(step)
    times = int(4 / epochs + 1e-9) if epochs else 0
    expected = [math.ceil(number * epochs * per_epoch - 1e-9) for number in range(1, times + 1)]
    assert due == [step for step in expected if step < loop.total]


def test_planned_steps_are_whole_batches_and_at_least_one():
    config = RunConfig(epochs=0.01)
    assert planned(config, Loader()) == 1 and planned(config, Loader(), 4) == 4
    assert planned(dataclasses.replace(config, epochs=1.5), Loader(), 4) == 32  # 7.5 batches: to the even number


def test_hopeless_gradients_end_a_run_and_name_the_files(tmp_path):
    """From step 6 on none is finite; lines come every four steps, so step 12 is the first to see five in a row."""
    loader = Loader()
    with pytest.raises(
        TooManySkipped, match=r"until step 12 had no finite gradient; \S+skipped\.json names the images"
    ):
        run(tmp_path, groups=3, epochs=4, loader=loader, finite=lambda step: step < 6, seed=7)
    dumped = json.loads((tmp_path / "skipped.json").read_text())
    assert dumped["seed"] == 7
    assert dumped["batches"] == [  # steps 9 to 12 are of batches 2 and 3
        {"batch": 2, "first_step": 7, "images": ["4.jpg", "5.jpg"]},
        {"batch": 3, "first_step": 10, "images": ["6.jpg", "7.jpg"]},
    ]
    with pytest.raises(
        TooManySkipped, match="5 steps in a row until step 5 had no"
    ):  # the last step, and the first line; of a window, any batch may have had images in it
        run(tmp_path / "short", epochs=5 / 8, log_every=20, window=8, loader=Loader(8), finite=lambda step: False)
    batches = json.loads((tmp_path / "short" / "skipped.json").read_text())["batches"]
    assert [(batch["batch"], batch["first_step"]) for batch in batches] == [(n, n + 1) for n in range(8)]


def test_bad_files_are_remembered_but_for_those_that_had_changed(tmp_path):
    loader = Loader()
    loader.bad = {3: "does not decode", 4: CHANGED, 5: GONE}
    assert run(tmp_path, loader=loader, epochs=1, max_steps=2)[0] == 0
    rejected = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    reasons = {"text.jpg": "not an image", "3.jpg": "does not decode", "4.jpg": CHANGED, "5.jpg": GONE}
    assert {one["path"]: one["reason"] for one in rejected} == reasons
    again = Loader()
    assert run(tmp_path, loader=again, epochs=1)[0] == 0
    assert again.bad == {3: "does not decode"}
    state = checkpoint.load(checkpoint.newest(tmp_path / "checkpoints")[0])
    assert state["bad"] == again.bad and state["step"] == 5
    assert json.loads(state["run"]) == json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("dry, rank", [(False, 0), (True, 0), (False, 1)])
def test_too_many_bad_files_are_said_to_be_named_where_they_are(tmp_path, monkeypatch, dry, rank):
    """Each rank counts its own, and the first writes: another one's are not in the file."""
    monkeypatch.setitem(globals(), "ALONE", dataclasses.replace(ALONE, rank=rank))

    class Bad(Loader):
        def batches(self, first, last):
            raise TooManyBadFiles("21 of 50 images")

    with pytest.raises(TooManyBadFiles, match="21 of 50 images") as error:
        run(tmp_path, loader=Bad(), dry_run=dry)
    file = tmp_path / "rejected.jsonl"
    assert (str(file) in str(error.value)) == file.exists() == (not dry and not rank)


def test_what_one_rank_finds_bad_all_know(tmp_path):
    """Of two ranks this is the second, which writes nothing; what all know is not said again."""
    said = []

    class Second(SimpleNamespace):
        def gather(self, value):
            said.append(value)
            return [{1: "of the first"}, value]

    loop = Loop.__new__(Loop)
    loop.ranks, loop.loader, loop.training = Second(first=False), Loader(), Training()
    loop.report = SimpleNamespace(state_dict=dict)
    loop.loader.bad, loop.told = {2: "of the second"}, set()
    loop.save()
    assert loop.loader.bad == {1: "of the first", 2: "of the second"}
    loop.loader.bad[3] = "new"
    loop.save()
    assert said == [{2: "of the second"}, {3: "new"}]
