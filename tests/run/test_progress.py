"""What a run says of itself, by a clock of the tests' own."""

import contextlib
import json
import math
import os
import pty
import re
import sys
import warnings
from multiprocessing import connection
from types import SimpleNamespace

import forks
import numpy as np
import pytest
import torch
from forks import ROOT

from run import progress
from run.progress import Report, TooManySkipped
from run.ranks import Ranks

CPU = Ranks(0, 1, 1, torch.device("cpu"))
GPU = Ranks(0, 1, 1, torch.device("cuda"))


@pytest.fixture
def clock(monkeypatch):
    """Seconds, as a list of one."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def report(folder, start=0, **more):
    options = {"figures": ("loss", "similarity"), "rates": {"pairs_per_second": 8, "images_per_second": 2}}
    options |= {"every": 4, "start": start, "total": 10, "steps_per_epoch": 6} | more
    return Report(folder, CPU, **options)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def step(report, number, finite=True):
    value = torch.tensor(float(number) if finite else math.nan)
    report.step(number, [value, value / 10], torch.tensor(finite), 0.1 * number)


def test_a_line_holds_means_rates_and_waiting(tmp_path, clock, capsys):
    """Of the steps since the last line, of those with a finite gradient; what is done aside has not been."""
    one = report(tmp_path)

    def batches():
        for number in range(1, 11):
            clock[0] += 1  # it is waited for
            yield number

    with one:
        for number in one.waiting_for(batches()):
            clock[0] += 2
            step(one, number, number not in (2, 3))
            if number == 6:
                with one.aside():
                    clock[0] += 1000
    lines = records(tmp_path)
    first, *lines = lines  # step 1 by itself, without the speed, which says nothing of the others
    assert first == {
        "step": 1, "epoch": 0.1667, "loss": 1.0, "similarity": pytest.approx(0.1), "learning_rate": 0.1, "skipped": 0,
    }  # fmt: skip
    assert [line["step"] for line in lines] == [4, 8, 10]
    assert [line["epoch"] for line in lines] == [0.6667, 1.3333, 1.6667]
    assert [line["loss"] for line in lines] == [2.5, 6.5, 9.5]  # (1 + 4) / 2; (5 + 6 + 7 + 8) / 4; (9 + 10) / 2
    assert [round(line["similarity"], 6) for line in lines] == [0.25, 0.65, 0.95]
    assert [line["pairs_per_second"] for line in lines] == [2.6667] * 3 and lines[0]["images_per_second"] == 0.66667
    assert [line["data_wait"] for line in lines] == [0.3333] * 3
    assert [line["skipped"] for line in lines] == [2, 2, 2]
    assert lines[1]["learning_rate"] == pytest.approx(0.8)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "epoch 0.17  step 1/10  loss 1.0000  similarity 0.100" and len(said) == 4
    assert re.fullmatch(
        r"epoch 0\.67  step 4/10  loss 2\.5000  0\.67 images/s  0:00:0\d left  2 steps skipped  similarity 0\.250  "
        r"waiting for data 33\.3%  2\.67 pairs/s",
        said[1],
    )


def test_a_gpu_waits_only_while_it_has_nothing_to_do(tmp_path, clock, monkeypatch):
    """A device that runs 3 s a step, by its own clock. Batches that take the host 1 s are not waited for, though the
    host is held up for each; one that takes 10 s is, from the end of what was queued."""
    device = SimpleNamespace(free=100.0)  # when all that is queued will be done

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = device.free = max(device.free, clock[0])

        def elapsed_time(self, end):
            return (end.at - self.at) * 1000

    one = report(tmp_path, rates={})
    monkeypatch.setattr(progress.torch.cuda, "Event", Event)
    one.ranks = SimpleNamespace(device=torch.device("cuda"), first=True, mean=CPU.mean)

    def batches():
        for number in range(1, 9):
            clock[0] += 10 if number == 6 else 1
            yield number

    for number in one.waiting_for(batches()):
        device.free = max(device.free, clock[0]) + 3  # a step is queued
        if number % 4 == 0:
            clock[0] = device.free  # a line looks at the sums, which waits for the device
        step(one, number)
    # 1 s before the first step, 4 x 3 s. Then 1 s again; in the 10 s until there is batch 6, 3 s are left to be done.
    assert [line["data_wait"] for line in records(tmp_path)[1:]] == [round(1 / 13, 4), round((1 + 7) / (12 + 8), 4)]


@pytest.mark.gpu
def test_of_a_gpu_only_the_figures_of_a_line_are_waited_for(tmp_path):
    """Their means and the skipped steps, two copies; no step between two lines waits."""
    one = Report(tmp_path, GPU, figures=("loss",), rates={}, every=4, start=0, total=8, steps_per_epoch=6)
    value, finite = torch.ones((), device="cuda"), torch.ones((), dtype=torch.bool, device="cuda")
    one.step(1, [value], finite, 0.1)  # is told of by itself
    waits = []
    for number in range(2, 8):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            one.step(number, [value], finite, 0.1)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("called a synchronizing" in str(warning.message) for warning in said))
    assert waits == [0, 0, 2, 0, 0, 0]


def test_five_steps_in_a_row_without_a_finite_gradient_are_too_many(tmp_path):
    """Said by the first line behind them, wherever they lie; and all of them are counted."""
    ended = set()
    for seed in range(40):
        bad = np.random.default_rng(seed).random(31) < 0.6
        bad[0] = False  # steps count from 1
        rows = [t for t in range(5, 31) if bad[t - 4 : t + 1].all()]
        lines = [line for line in (*range(4, 30, 4), 30) if rows and line >= rows[0]]
        one = report(tmp_path, total=30)
        try:
            for number in range(1, 31):
                step(one, number, not bad[number])
            end = None
        except TooManySkipped as error:
            end = number
            assert f"steps in a row until step {number} had no" in str(error)
        assert end == (lines[0] if lines else None), (seed, bad)
        for line in records(tmp_path):
            assert line["skipped"] == bad[: line["step"] + 1].sum()
        ended.add(end)
    assert len(ended) > 5 and None in ended


def test_a_report_goes_on_where_it_was(tmp_path, clock):
    """Saved between two lines, also within a row; lines of steps that are taken again are dropped, and torn ones. The
    speed is that of the steps that were taken since."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    one = report(whole)
    for number in range(1, 11):
        clock[0] += 1
        step(one, number, number not in (5, 6))
    one = report(parts)
    for number in range(1, 9):
        clock[0] += 1
        step(one, number, number not in (5, 6))
        if number == 6:
            saved = {name: v.clone() if torch.is_tensor(v) else v for name, v in one.state_dict().items()}
    one.record({"step": 10, "top1": 3.0})
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": "3", "loss": 1}\n{"step": null}\n' + "[" * 100_000 + '\n{"step": 3, "lo')
    other = report(parts, start=6)
    assert [line["step"] for line in records(parts)] == [1, 4]
    other.load_state_dict(saved)
    for number in range(7, 11):
        clock[0] += 1
        step(other, number)
    assert [line.get("pairs_per_second") for line in records(parts)[2:]] == [8, 8]
    kept = [{k: v for k, v in line.items() if "second" not in k and k != "data_wait"} for line in records(parts)]
    clocked = [{k: v for k, v in line.items() if "second" not in k and k != "data_wait"} for line in records(whole)]
    assert kept == clocked
    one.record({"step": 9, "top1": 2.0})
    one.record({"step": 10, "top1": 3.0})
    report(parts, start=10)  # at the end all lines of steps stay, the last evaluation is done anew
    assert [line.get("top1") for line in records(parts)] == [None, None, None, None, 2.0]


def test_each_rank_goes_on_with_its_own_sums(tmp_path):
    """A mean in their place would be rounded, and the next line another."""
    ranks = [report(tmp_path) for _ in range(2)]
    for rank, one in enumerate(ranks):
        one.sums += rank + 0.1
        every = [of.sums for of in ranks]
        one.ranks = SimpleNamespace(rank=rank, count=2, all=lambda _, every=every: every)
    saved, alone = ranks[0].state_dict(), report(tmp_path)
    for one in (*ranks, alone):
        one.sums.zero_()
        one.load_state_dict(saved)
    assert [one.sums[0].item() for one in (*ranks, alone)] == pytest.approx([0.1, 1.1, 0.6])
    assert torch.equal(torch.stack([one.sums for one in ranks]), saved["sums"])


def test_what_is_not_finite_is_recorded_as_nothing(tmp_path):
    one = report(tmp_path)
    one.record({"step": 1, "loss": math.nan, "epoch": 2, "other": -math.inf, "name": "a"})
    assert records(tmp_path) == [{"step": 1, "loss": None, "epoch": 2, "other": None, "name": "a"}]


def test_lines_are_said_as_they_are_and_the_bar_counts_epochs(tmp_path, capsys):
    one = report(tmp_path, start=3)
    assert one.bar.tasks[0].fields["epoch"] == 0.5 and one.bar.tasks[0].completed == 3
    step(one, 4)
    assert one.bar.tasks[0].fields["epoch"] == pytest.approx(4 / 6) and one.bar.tasks[0].completed == 4
    capsys.readouterr()
    one.say("[red]1[/red] " + "long " * 40)
    one.say("")
    second = Report.__new__(Report)
    second.ranks, second.bar = Ranks(1, 2, 1, torch.device("cpu")), one.bar
    second.say("nothing")
    assert capsys.readouterr().out == "[red]1[/red] " + "long " * 40 + "\n"


class Board:
    """What TensorBoard shows of a folder, by a stand-in, for it need not be installed: a new writer has it forget all
    from a step on."""

    def __init__(self, monkeypatch):
        self.shown = []  # (tag, value, step)
        writer = SimpleNamespace(add_scalar=lambda *what: self.shown.append(what), flush=lambda: None)

        def opened(folder, purge_step):
            self.folder, self.shown = folder, [what for what in self.shown if what[2] < purge_step]
            return writer

        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=opened))


def test_tensorboard_has_what_the_file_has_in_groups_and_once(tmp_path, monkeypatch):
    """Whether a run goes on from a checkpoint older than its last line, or is given again when it has ended."""
    board = Board(monkeypatch)
    for start, stop in ((0, 7), (5, 9), (5, 10), (10, 10)):
        one = report(tmp_path, start=start)
        for number in range(start + 1, stop + 1):
            step(one, number, number != 9)
            if number == 6:
                one.record({"step": 6, "epoch": 1.0, "knn_trained": 50.0})
        if stop == 10:
            one.record({"step": 10, "epoch": 10 / 6, "knn_trained": 60.0})
    assert board.folder == str(tmp_path / "tensorboard")
    group = {
        **dict.fromkeys(("loss", "similarity", "learning_rate", "skipped", "epoch"), "train"),
        "knn_trained": "evaluation",
        **dict.fromkeys(("images_per_second", "pairs_per_second", "data_wait"), "speed"),
    }  # fmt: skip
    expected = [
        (f"{group[name]}/{name}", value, line["step"])
        for line in records(tmp_path) for name, value in line.items()
        if name != "step" and not (name == "epoch" and "knn_trained" in line)
    ]  # fmt: skip
    assert sorted(board.shown) == sorted(expected)
    assert [(tag, at) for tag, _, at in board.shown if tag in ("train/loss", "evaluation/knn_trained")] == [
        *[("train/loss", at) for at in (1, 4)], ("evaluation/knn_trained", 6), ("train/loss", 8), ("train/loss", 10),
        ("evaluation/knn_trained", 10),
    ]  # fmt: skip


TERMINAL = """
import fcntl, os, pathlib, struct, sys, termios, time, torch
for number in range(3):
    os.dup2(os.open(sys.argv[2], os.O_RDWR), number)
sys.stdout, sys.stderr = (open(number, "w", 1) for number in (1, 2))
from pipeline.shown import shown
from run import progress
from run.ranks import Ranks
now = [0.0]
progress.time = type("clock", (), {"perf_counter": lambda: now[0]})
for columns in (80, 120):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    print("begin", columns)
    pathlib.Path(sys.argv[1], str(columns)).mkdir()
    with progress.Report(
        pathlib.Path(sys.argv[1], str(columns)), Ranks(0, 1, 1, torch.device("cpu")), start=599_998,
        figures=("loss", "similarity", "feature_std"), rates={"images_per_second": 1_500, "pairs_per_second": 6_000},
        every=3, total=800_000, steps_per_epoch=1000,
    ) as report:
        report.bar.refresh()
        for step in range(599_999, 600_004):
            now[0] += 0.1
            report.step(step, [torch.tensor(value) for value in (0.12, 0.5, 0.9)], torch.tensor(True), 0.1)
            time.sleep(0.01)  # another clock tells how much time is left
        report.bar.refresh()
        print("a warning", file=sys.stderr)
        with report.aside(), shown("k-NN accuracy", "embedding images") as done:
            for part in (1_000, 2_000):
                done(part, 2_000)
                time.sleep(0.2)
        report.bar.refresh()
print("end")
"""


def screens(raw):
    """What a terminal shows: the lines that stay, and all that the line below them has been. For what rich writes: it
    begins a line anew, goes up by one, shows and hides the cursor, sets colours."""
    stay, line, seen = [], "", []
    for part in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r\n|\r|[^\r\x1b]+", raw):
        if part == "\r\n":
            stay.append(line)
            line = ""
        elif part == "\x1b[1A":
            line = stay.pop()
        elif part in ("\r", "\x1b[2K"):
            seen.append(line.rstrip())
            line = ""
        elif part[0] != "\x1b":
            line += part
        else:
            assert re.fullmatch(r"\x1b\[(\?25[lh]|[\d;]*m)", part), part
    return [line.rstrip() for line in stay], [line for line in seen if line]


def test_a_terminal_of_80_columns_has_what_matters_and_one_of_120_more(tmp_path):
    """In a pseudo-terminal: lines stay above the bar, which fits its width and is gone when there is another."""
    master, slave = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}  # go before its size
    words = ["-c", TERMINAL, str(tmp_path), os.ttyname(slave)]
    process = forks.start(words, env | {"TERM": "xterm"}, ROOT, tmp_path)
    connection.wait([master, process.sentinel])  # until it has opened the terminal, which without a user is at its end
    os.close(slave)
    raw = b""
    with contextlib.suppress(OSError):  # EIO is the end
        while part := os.read(master, 65536):
            raw += part
    os.close(master)
    process.join()
    assert process.exitcode == 0, raw.decode()
    for columns, part in zip((80, 120), raw.decode().split("begin ")[1:], strict=True):
        stay, seen = screens(part)
        wide = columns == 120
        figures, left = r"loss 0\.1200  spread 0\.900", r"  \d+:\d\d:\d\d left"
        more = left + r"  similarity 0\.500" if wide else ""
        expected = [
            str(columns), rf"epoch 600\.00  step 599999/800000  {figures}  similarity 0\.500",
            rf"epoch 600\.00  step 600000/800000  {figures}  15,000 images/s{more}",
            rf"epoch 600\.00  step 600003/800000  {figures}  15,000 images/s{more}", "a warning", *["end"] * wide,
        ]  # fmt: skip
        assert len(stay) == len(expected) and all(map(re.fullmatch, expected, stay)), stay
        more = r"  similarity 0\.500  waiting for data 0\.0%" if wide else ""
        bar = rf"epoch 600\.00 [━╸╺]+ {figures}  15,000 images/s{left}{more}"
        assert max(map(len, seen)) <= columns and re.fullmatch(r"epoch 600\.00 [━╸╺]+ the first step", seen[0])
        assert re.fullmatch(bar, seen[-1]), seen[-1]
        asides = [s for s in seen if s.startswith("k-NN accuracy: embedding images")]
        assert "1,000/2,000" in asides[0] and "2,000/2,000" in asides[-1]
        assert part.count("\x1b[?25l") == part.count("\x1b[?25h") == 3
