"""The benchmarks run and say what they promise; their figures are no business of a test."""

import argparse
import contextlib
import json
import os
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, run_program
from PIL import Image

import kernels
from bench import all as everything
from bench import big, collectives, counters, embed, environment, labels, learning, pipeline, sanitizer, train
from bench.__main__ import main
from bench.gpu_tests import Outcomes
from bench.kernels import GROUPS, POWER, SMOKE_SIZES, Size, batch_of_boxes, sample_one_by_one, sample_with_multinomial
from bench.report import tables
from bench.report.results import read
from bench.timing import NO_KERNEL, summary
from bench.train import balance
from pipeline import Index
from run.recipes import RECIPES

TESTS = {"passed", "failed", "skipped", "tests", "not_run"}
STEP = {"recipe", "flop_per_pair", "peak_flop_per_second", "eager"}
STAGES = {  # keys that the result of each part has to have, where it is run
    1: {
        "machine": {"copy_bytes_per_second", "flop_per_second"}, "gpu_tests": TESTS, "step_vit_s": STEP,
        "kernels": {"copy_bytes_per_second", "rows"}, "passes": {"copy_bytes_per_second", "rows"},
    },
    2: {},
    3: {
        "data_tests": TESTS, "train": {"pairs_per_second", "data_wait", "metrics"},
        "pipeline": {"recipe", "rates", "stages", "parity"},
    },
    4: {
        "products": {"rows", "best_flop_per_second"}, "sanitizer": {"rows", "not_run"},
        "counters": {"rows", "not_run"}, "collectives": {"alone", "two"},
    },
    5: {"program_tests": TESTS, "kinds": {"rows"}, "step_vit_b": STEP},
    6: {"waits": {"runs"}},
}  # fmt: skip
# All parts in one process, where each would import torch again, and what they start in forks of it; first those that
# have to do without DALI and tyro. ``--variants`` is run by a test of its own, and what differs from an earlier part in
# sizes alone is only parsed.
IN_ONE = """
import contextlib, io, multiprocessing, os, shutil, subprocess, sys
blocked = dict.fromkeys(["tyro", "nvidia.dali"])
sys.modules |= blocked
sys.path.insert(0, "tests")
import forks
from bench import all as everything, step, timing
from bench.__main__ import main
from torch.distributed.run import parse_args

steps, started, forks._CONTEXT = [], subprocess.run, multiprocessing.get_context("fork")
timing.ON_CPU = 2**20, (64, 128)

def stream(command, limit, say):
    said, (subject, *arguments) = io.StringIO(), command[3:]
    if subject == "step" and "--trace" not in arguments:
        steps.append(step.parse(arguments).json)
        if "--variants" in arguments:
            steps.pop()
            return 0
        if len(steps) > 1:
            shutil.copy(steps[0], steps[-1])
            return 0
    with contextlib.redirect_stdout(said):
        code = main([subject, *arguments])
    for line in said.getvalue().splitlines():
        say(line)
    return code

def forked(command, **how):
    if command[0] != sys.executable:
        return started(command, **how)
    words, ranks = command[1:], 1
    if words[:2] == ["-m", "torch.distributed.run"]:
        given = parse_args(words[2:])
        assert given.module and given.standalone
        words, ranks = ["-m", given.training_script, *given.training_script_args], int(given.nproc_per_node)
    return forks.run(words, [{**os.environ}] * ranks, [forks.ROOT] * ranks, 600)

everything.stream, subprocess.run = stream, forked
for stage in (1, 2, 4, 3, 5, 6):
    print("STAGE", stage)
    if stage == 3:
        for name in blocked:
            del sys.modules[name]
        from bench import waits
        waits.alone = lambda work, *arguments: work(*arguments)
    if everything.main(["--smoke", "--limit", "600", "--stage", str(stage), "--out", "{folder}/" + str(stage)]):
        sys.exit(1)
"""


def test_stages_run_every_part(tmp_path):
    code = IN_ONE.replace("{folder}", str(tmp_path))
    done = run_program("-c", code, fresh=True, CUDA_VISIBLE_DEVICES="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    _, *stages = re.split(r"^STAGE (\d)$", done.stdout, flags=re.MULTILINE)
    assert sorted(stages[::2]) == [str(stage) for stage in STAGES]
    for stage, said in zip(stages[::2], stages[1::2], strict=True):
        ended = dict(re.findall(r"^(\w+) +\d+ s  (.*)$", said, re.MULTILINE))
        check_stage(int(stage), ended, tmp_path / stage)


def check_stage(stage, ended, folder):
    """``ended``: the state of each part."""
    wanted = STAGES[stage]
    assert set(ended) - {"variants", "variants_later"} == set(wanted)
    for part, state in ended.items():
        assert state.startswith("not run: " if "not_run" in wanted.get(part, ()) else "ok"), (part, state)
    files = {path.name for path in folder.iterdir()}
    assert f"log_{stage}.txt" in files and len(files) <= 8 and ("step_vit_s.trace.json.gz" in files) == (stage == 1)
    for part, keys in wanted.items():
        text = (folder / f"{part}.json").read_text()
        assert not re.search(rf"{ROOT}|/home|/root|/tmp", text), f"{part}.json names a path of this machine"
        result = json.loads(text)
        assert {"subject", "machine"} | keys <= set(result), part
        assert {"device", "driver", "clock_mhz", "versions", "torch_threads", "commit"} <= set(result["machine"])
        assert re.match(rf"OMP_NUM_THREADS=1 python -m bench {result['subject']} --smoke", result["command"])
        for row in result.get("parity", ()):  # of the input path: every operation within its stated limit
            assert row["limit of the mean"] is None or row["mean"] <= row["limit of the mean"], row
    results = read(folder)
    assert not tables.findings(results)  # a smoke run says nothing of speed, but has all that would be said
    for result in results:
        result.data["scale"] = "full"
        assert result.data["findings"] and all(plot["panels"] for plot in result.data.get("plots", ()))
    said = {row["what"] for result in results for row in result.data["findings"]}
    for _, _, table in tables.by_machine(results):
        assert len(table) == 1 + len(said)  # of several with the same words, the newest


def test_host_says_what_a_batch_and_a_checkpoint_take(tmp_path):
    assert main(["host", "--smoke", "--json", str(tmp_path / "host.json")]) == 0
    assert {"next_ms", "checkpoint_ms"} <= set(json.loads((tmp_path / "host.json").read_text()))


def test_the_device_script_takes_a_stage(tmp_path):
    """Its environment and arguments, by an interpreter that says what it got."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR"\n')
    (tmp_path / "python").chmod(0o755)

    def script(*arguments):
        given = {"OUT": "there", "PYTHON": str(tmp_path / "python"), "TRITON_CACHE_DIR": "kept"}
        kept = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        command = [ROOT / "bench/device.sh", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=kept | given)

    done = script("2", "--smoke", "--limit", "9")
    assert done.stdout == f"-m bench all --out there --stage 2 --smoke --limit 9 {ROOT}/runs/compiled/inductor kept\n"
    for wrong in ((), ("7",), ("--smoke",), ("12",)):
        assert script(*wrong).returncode == 2 and "usage" in script(*wrong).stderr


def test_what_sanitizer_and_counters_say():
    """By lines as these tools write them."""
    both = ("sample_views", "update")
    clean = "========= COMPUTE-SANITIZER\nsample_views\nupdate\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer.outcome(clean, 0, both) == {"errors": 0}
    wrong = clean.replace("0 errors", "3 errors")
    assert sanitizer.outcome(wrong, 1, both) == {"errors": 3}
    assert sanitizer.outcome(clean.replace("update\n", ""), 0, both)["not_run"].startswith(
        "ended with exit code 0 after 1"
    )
    assert "Device not supported" in sanitizer.outcome("========= Error: Device not supported\n", 255, both)["not_run"]
    races = "sample_views\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert sanitizer.outcome(races, 0, both[:1]) == {"errors": 0}
    assert sanitizer.outcome("sample_views\n", 124, both) == {"not_run": "out of time after 1 of 2"}
    names = list(counters.METRICS.values())
    page = '==PROF== Connected\n"ID","Kernel Name","' + '","'.join(names) + '"\n"","","byte"\n'
    page += '"0","_gather_kernel","1,000","24","","","3","2","5e3"\n'
    (row,) = counters.counted(page)
    assert row == {
        "kernel": "_gather_kernel", "dram_bytes_read": 1000, "dram_bytes_written": 24, "load_sectors": 3,
        "load_requests": 2, "ns": 5000,
    }  # fmt: skip
    assert counters.counted("==ERROR== LibraryNotLoaded\n") == []
    names = "_down_backward_kernel", "void at::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>(int)"
    assert all(re.search(counters.KERNELS.removeprefix("regex:"), name) for name in names)


def test_a_result_says_what_makes_it(monkeypatch):
    """Each option that has a value, defaults too, lest they change; no path."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    options = environment.parser("step", "")
    options.add_argument("--images", type=Path)
    options.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    options.add_argument("--batch-size", type=int)
    options.add_argument("--power", type=int, default=0)
    options = options.parse_args(["--json", "a/b", "--images", "/a/c", "--smoke"])
    assert environment.command(options) == (
        "OMP_NUM_THREADS=3 python -m bench step --smoke --images IMAGES --ranks 1 2 --power 0"
    )


def test_a_card_says_what_holds_its_clock_down(tmp_path, monkeypatch):
    """From a program that goes on until it is stopped, and may be stopped within a line."""
    card = tmp_path / "nvidia-smi"
    card.write_text(
        "#!/bin/sh\nprintf '1980, 650.10, 700.00, 0x0000000000000000\\n1800, 699.5, 700.00, 0x0000000000000004\\n"
        "1785, 700.3, 700.00, 0x0000000000000024\\n17'\nexec sleep 60\n"
    )
    card.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with environment.watched() as nothing:
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with environment.watched() as found:
        time.sleep(0.5)
    assert nothing == {} == environment.of_card('Field "power.draw.instant" is not a valid field to query.\n')
    assert found == {"clock_mhz": 1800, "watts": 699.5, "watts_limit": 700, "held_down": 2 / 3}


def test_of_large_models_time_and_memory_are_said(tmp_path, monkeypatch):
    options = argparse.Namespace(models=["vit_small_patch16_224"], batch_size=2, smoke=True, worker=tmp_path)
    rows = []
    for copies in (big.COPIES, 10**9):
        monkeypatch.setattr(big, "COPIES", copies)
        assert big.work(options) == 0
        rows.append({"model": "vit_small", "ranks": 1} | json.loads((tmp_path / "0.json").read_text()))
        rows[-1]["peak_gib"] = {part: [peak] for part, peak in rows[-1]["peak_gib"].items()}
    assert 0.8 < rows[0]["checkpoint_bytes"] / (4 * 5 * rows[0]["parameters"]) < 1.1, "as many copies as are said"
    assert [list(row["peak_gib"])[2:] for row in rows] == [["step", "checkpoint"], ["step"]]
    saved, lacking = (row["more"] for row in big.conclusions({"batch_size": 2, "rows": rows})["findings"])
    assert "until training goes on" in saved and "no checkpoint: its copy takes" in lacking


def test_soak_survives_bad_files_and_probes_them_once(tmp_path):
    """Some are cut inside their header, which in a batch of more than four images a thread kills DALI's decoder."""
    run_program("-m", "bench", "soak", "--smoke", "--json", tmp_path / "soak.json")
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["found"] == result["damaged"] and result["probes_in_first_epoch"] and not result["probes_later"]


def test_embedding_gives_the_features_of_the_plain_loop(tmp_path, capsys):
    """And so one of the two is as good as the other; centred features of other images have nothing in common."""
    assert embed.main(["--smoke", "--threads", "1", "--json", str(tmp_path / "embed.json")]) == 0
    result = json.loads((tmp_path / "embed.json").read_text())
    assert result["images"] == 8 and len(result["rows"]) == 4 and result["cosine"]["least"] > 0.9
    assert "cosine of the centred features of both: mean 0.9" in result["findings"][0]["more"]


def test_images_that_are_none_are_said_in_a_line(tmp_path, capsys):
    wrong = str(tmp_path / "gone")
    for subject in (pipeline, train, embed, learning):
        with pytest.raises(SystemExit) as ended:
            subject.main(["runs", "--list", wrong] if subject is learning else ["--smoke", "--images", wrong])
        said = capsys.readouterr()
        assert ended.value.code == 2 and said.err.startswith(f"bench: no folder {wrong}: expected a folder of images")
        assert said.err.count("\n") == 1 and not said.out
    assert learning.main([wrong]) == 2 and "no complete run" in capsys.readouterr().err
    other = tmp_path / "gone.json"
    other.write_text('{"subject": "train", "machine": {}}')
    for words in ([wrong, "--draw", "1"], [wrong, "--probe", wrong], [str(other)]):
        with pytest.raises(SystemExit):
            labels.main(words)
        said = capsys.readouterr().err
        assert said.startswith("bench: ") and wrong in said and said.count("\n") == 1


@pytest.mark.parametrize("words", ["index --folder", "all --out"])
def test_a_file_in_the_place_of_a_folder_is_said_in_a_line(tmp_path, capsys, words):
    (tmp_path / "file").touch()
    assert main([*words.split(), str(tmp_path / "file"), "--smoke"]) == 1
    said = capsys.readouterr().err
    assert said == f"bench: {tmp_path / 'file'} is a file, or below one; expected a folder\n"


def test_images_that_do_not_decode_are_said_in_a_line(tmp_path, photos, capsys):
    """Too many of them: only decoding shows it."""
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))[:32]):
        (tmp_path / path.name).write_bytes(path.read_bytes()[: -200 if number else None])
    assert main(["pipeline", "--smoke", "--images", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("bench: ") and f"of 32 images in {tmp_path} cannot be used" in said
    assert said.count("\n") == 1 and said.endswith("; repair them, or leave them out of --images\n")


def test_an_image_that_one_side_does_not_decode_is_left_out_of_all(tmp_path, photos, capsys):
    """And of those that take its place no more are looked at than are read."""
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))[:6]):
        (tmp_path / f"{number}.jpg").write_bytes(path.read_bytes()[: -200 if number in (1, 5) else None])
    Image.new("RGB", (40, 40)).save(tmp_path / "2.bmp")
    index = pipeline.decodable(Index.scan(tmp_path), 4, Pillow=pipeline.opened, torchvision=pipeline.tensor)
    assert list(index.paths) == ["0.jpg", "2.jpg", "3.jpg", "4.jpg", "5.jpg"]
    said = capsys.readouterr().err
    assert said.startswith("left out: 1.jpg: ") and said.endswith("; 2.bmp: torchvision does not decode it\n")


def test_alternatives_sample_by_the_same_law():
    """The mean overlap of the patches drawn for view 2 agrees to 5 standard errors: one false alarm in 870,000 runs."""
    size = Size("small", 6, 9, 16, 1500)
    boxes, flips, sample = batch_of_boxes(size.batch, torch.device("cpu"))
    shape = {"grid": size.grid, "keep": size.keep, "groups": GROUPS, "power": POWER, "seed": 0, "epoch": 0}
    torch.manual_seed(0)
    numpy = sample_one_by_one(boxes.numpy(), flips.numpy(), size, np.random.default_rng(0))
    drawn = {
        "sample_views": kernels.sample_views(boxes, flips, sample, **shape),
        "numpy": [torch.from_numpy(view) for view in numpy],
        "torch": sample_with_multinomial(boxes, flips, size),
    }
    overlaps = {}
    for name, (first, second) in drawn.items():
        for view in (first.flatten(1), second):
            assert view.sort(-1).values.diff(dim=-1).min() > 0, f"{name}: a patch twice"
        shares = kernels.patch_overlap(boxes, flips, first.int().contiguous(), grid=size.grid)
        overlaps[name] = shares.gather(2, second.long()).mean((1, 2))  # [B], the same boxes for all three
    for name in ("numpy", "torch"):
        difference = overlaps[name] - overlaps["sample_views"]
        error = difference.std() / size.batch**0.5
        assert abs(difference.mean()) < 5 * error, f"{name}: {difference.mean():.5f} +- {error:.5f}"


@pytest.mark.parametrize("arguments, code", [([], 0), (["nothing"], 2)])
def test_usage(arguments, code):
    assert "python -m bench SUBJECT" in run_program("-m", "bench", *arguments, check=code).stdout


def test_one_turn_has_no_spread():
    assert summary([2.0]) == {"p20": 2.0, "p50": 2.0, "p80": 2.0, "runs": 1}


def test_what_a_run_logged_until_it_was_cut_off_is_kept(tmp_path, monkeypatch):
    """At a limit, and where it fails; not the first line with a speed, in which compiling counts."""

    def run(how, file):
        def ended(command, **_):
            lines = [{"step": 1}, *({"step": n, "pairs_per_second": 30 * n, "data_wait": n / 8} for n in (1, 2, 4, 6))]
            output = Path(command[command.index("--output") + 1])
            (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:until]))
            return how()

        monkeypatch.setattr(train, "subprocess", SimpleNamespace(run=ended))
        return main(["train", "--smoke", "--json", str(tmp_path / file)])

    def cut_off():
        raise KeyboardInterrupt

    until = 5
    assert run(cut_off, "cut.json") == 130 and run(lambda: SimpleNamespace(returncode=3), "failed.json") == 1
    for file in "cut.json", "failed.json":
        result = json.loads((tmp_path / file).read_text())
        assert round(result["pairs_per_second"]) == 144 and len(result["metrics"]) == 5  # one over (1/120 + 1/180) / 2
        (said,) = result["findings"]
        assert said["result"] == "144 pairs/s, 60.0 % of the time waiting for data"  # 0.5 of 3 parts, 0.75 of 2
        assert said["more"] == "after warm-up; lines of the log: 120-180, 50.0-75.0 %; until step 6 of 8"
    until = 2
    assert run(cut_off, "early.json") == 130 and not (tmp_path / "early.json").exists()


def test_balance_names_what_limits():
    """Steps that take 1,000 images/s and wait half of the time need 2,000; six threads give 1,000."""
    found = balance(4000, 0.5, 4, alone=1000, threads=6)
    assert [found[name] for name in ("images_per_second_needed", "threads_to_balance", "ranks_fed")] == [2000, 12, 0.5]
    assert found["limited_by"] == "input"
    assert balance(4000, 0, 4, alone=4000, threads=6) | {"limited_by": "steps", "threads_to_balance": 2} == balance(
        4000, 0, 4, alone=4000, threads=6
    )


def test_a_kernel_that_fails_stops_no_other(tmp_path, monkeypatch, capsys):
    """Ours, what is fed by it, and an alternative to another: each is a row that says why, and the exit code is 1."""

    def broken(*_, **__):
        raise RuntimeError("broken\nand more")

    monkeypatch.setattr("kernels.sample_views", broken)
    monkeypatch.setattr("bench.kernels.normalise", broken)
    monkeypatch.setattr("bench.kernels.SMOKE_SIZES", SMOKE_SIZES[1:])
    assert main(["kernels", "--smoke", "--json", str(tmp_path / "k.json")]) == 1
    result = json.loads((tmp_path / "k.json").read_text())
    rows = {(row["operation"], row.get("provider")): row for row in result["rows"]}
    failed = {of for of, row in rows.items() if row.get("failed") == "RuntimeError: broken" and "p50_us" not in row}
    assert failed == {
        ("sampling", "sample_views"), ("overlap", None), ("gathering", "torch indexing"),
        ("gathering", "normalise all, index"), ("embedding", "embed all, gather"),
    }  # fmt: skip
    assert all("p50_us" in rows[of] for of in rows.keys() - failed) and ("updating", "update_parameters") in rows
    assert "times_ours" not in rows["sampling", "torch.multinomial"]
    said = {row["what"]: row["result"] for row in result["findings"]}
    assert said["sampling (cifar 16x16, P 2, batch 8)"] == "- ms"
    assert said["overlap (cifar 16x16, P 2, batch 8)"] == "failed: RuntimeError: broken"


def test_two_ranks_are_tried_where_the_library_of_one_fails(tmp_path, monkeypatch, capsys):
    def reduced(*_):
        raise RuntimeError("NCCL error\nwhat it is")

    monkeypatch.setattr(collectives, "_reduced", reduced)
    monkeypatch.setattr(collectives, "two", lambda *_: {"difference": 0.0, "tolerance": 1e-3, "within": True})
    try:
        assert collectives.main(["--smoke", "--json", str(tmp_path / "c.json")]) == 1
    finally:
        torch.distributed.destroy_process_group()
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["two"]["within"] and result["findings"][0]["result"] == "failed: RuntimeError: what it is"


def test_rates_are_kept_as_they_come(monkeypatch):
    """On a GPU one number of threads after the other, of which a limit may cut off the last."""
    rates = iter([(30.0, 1.0), (20.0, 1.0)])
    monkeypatch.setattr(pipeline, "Loader", lambda *_, **__: SimpleNamespace(batches=lambda *_: ()))
    monkeypatch.setattr(pipeline, "drain", lambda *_: next(rates))
    noted = []
    with pytest.raises(StopIteration):
        pipeline.rates(None, RECIPES["toy"], 8, 40, 1, torch.device("cuda"), 16, noted.append)
    assert [[row["images/s"] for row in rows] for rows in noted] == [[30], [30, 20]]


def test_a_kind_of_images_that_fails_stops_no_other(tmp_path, monkeypatch):
    def row_of(kind, *_):
        if kind == "progressive":
            raise RuntimeError("no engine\nand more")
        return {"kind": kind, "height": 1, "width": 2, "batch_size": 3, "images/s": 4.0, "memory_bytes": None}

    monkeypatch.setattr("bench.kinds.row_of", row_of)
    assert main(["kinds", "--json", str(tmp_path / "kinds.json")]) == 1
    said = [row["result"] for row in json.loads((tmp_path / "kinds.json").read_text())["findings"]]
    assert said == ["4 images/s", "failed: RuntimeError: no engine", "4 images/s"]


def test_tests_that_cannot_be_run_are_not_run(tmp_path, monkeypatch):
    """And stop no speed, as those that fail do."""
    monkeypatch.setattr("bench.gpu_tests.find_spec", lambda _: None)
    assert main(["gpu_tests", "--json", str(tmp_path / "tests.json")]) == 0
    state = everything.ended(0, tmp_path / "tests.json")
    assert state == "not run: pytest is not installed"
    assert everything.tests_said(state, tmp_path / "tests.json") == "not run"
    outcomes = Outcomes(argparse.Namespace(json=tmp_path / "tests.json", subject="gpu_tests"))
    why = "Skipped: could not import 'pycocotools'"
    outcomes.pytest_collectreport(pytest.CollectReport("test_detect.py", "skipped", ("test_detect.py", 20, why), []))
    state = everything.ended(0, tmp_path / "tests.json")
    assert state == "not run: 1 tests (could not import 'pycocotools')"


def test_kernels_of_the_input_path_are_none_where_the_profiler_sees_none(monkeypatch, capsys):
    """Not 0 ms."""
    profiler = SimpleNamespace(key_averages=lambda: [])
    monkeypatch.setattr(pipeline, "profile", lambda activities: contextlib.nullcontext(profiler))
    batches = SimpleNamespace(batches=lambda first, last: (number for number in range(first, last)))
    monkeypatch.setattr(pipeline, "Loader", lambda *_, **__: batches)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert pipeline.kernel_time(None, RECIPES["toy"], 8, torch.device("cpu")) == []
    assert NO_KERNEL in capsys.readouterr().out
