"""The benchmarks run and say what they promise; their figures are no business of a test."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ONE_THREAD, ROOT, run_program

import kernels
from bench import environment
from bench.compile import compiled_rows
from bench.kernels import GROUPS, POWER, Size, batch_of_boxes, sample_one_by_one, sample_with_multinomial
from bench.report import tables
from bench.report.results import read
from bench.train import balance

RESULTS = {
    "machine": {"copy_bytes_per_second", "flop_per_second"},
    "gpu_tests": {"passed", "failed", "skipped", "tests"},
    "kernels": {"copy_bytes_per_second", "rows"},
    "step_vit_b": {"recipe", "flop_per_pair", "peak_flop_per_second", "plain", "eager"},
    "pipeline": {"recipe", "rates", "stages", "parity"},
    "train": {"pairs_per_second", "data_wait", "metrics"},
}


def device_script(*arguments, **environment):
    return subprocess.run(
        [ROOT / "bench/device.sh", *arguments],
        capture_output=True, text=True, timeout=300, env=os.environ | ONE_THREAD | environment,
    )  # fmt: skip


def test_device_script_runs_every_part(tmp_path):
    done = device_script("--smoke", OUT=str(tmp_path), PYTHON=sys.executable)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr}"
    ended = re.findall(r"^(\w+) +\d+ s  (.*)$", done.stdout, re.MULTILINE)
    assert ended == [(part, "ok") for part in RESULTS]
    assert (tmp_path / "log.txt").read_text() == done.stdout
    for part, keys in RESULTS.items():
        text = (tmp_path / f"{part}.json").read_text()
        assert not re.search(rf"{ROOT}|/home|/root|/tmp", text), f"{part}.json names a path of this machine"
        result = json.loads(text)
        assert {"subject", "machine"} | keys <= set(result), part
        assert {"device", "driver", "clock_mhz", "versions", "torch_threads", "commit"} <= set(result["machine"])
        assert re.match(rf"OMP_NUM_THREADS=1 python -m bench {result['subject']} --smoke", result["command"])
        for row in result.get("parity", ()):  # of the input path: every operation within its stated limit
            assert row["limit of the mean"] is None or row["mean"] <= row["limit of the mean"], row
    results = read(tmp_path)
    assert not tables.findings(results)  # a smoke run says nothing of speed, but has all that would be said
    for result in results:
        result.data["scale"] = "full"
        assert result.data["findings"] and all(plot["panels"] for plot in result.data.get("plots", ()))
    ((_, _, table),) = tables.by_machine(results)
    assert len(table) == 1 + sum(len(result.data["findings"]) for result in results)


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


def test_soak_survives_bad_files_and_probes_them_once(tmp_path):
    """Some are cut inside their header, which in a batch of more than four images a thread kills DALI's decoder."""
    run_program("-m", "bench", "soak", "--smoke", "--json", tmp_path / "soak.json")
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["found"] == result["damaged"] and result["probes_in_first_epoch"] and not result["probes_later"]


def test_compiled_kernels():
    rows = list(compiled_rows())
    targets = {row["target"] for row in rows}
    assert len(rows) == 45 and targets == {"sm_80", "sm_90", "sm_100", "sm_120", "gfx942"}
    for row in rows:
        assert row["spilled_bytes"] == row["spill_instructions"] == 0, row
        if row["kernel"] == "gather_patches":  # 8 bytes a load (but for indices), 16 bytes a store, nothing shared
            assert set(row["store_bits"]) == {128} and row["load_bits"][64] >= 3, row
            assert row["shared_bytes"] == row["shared"] == 0, row
        if row["kernel"] == "update":  # of six tensors the block is read, and written of five and of the copies
            assert max(row["load_bits"]) == max(row["store_bits"]) == 128, row
            assert row["load_bits"][128] >= 6 and row["store_bits"][128] >= 5, row
        if "attention" in row["kernel"]:
            assert row["matrix"] and max(row["load_bits"]) == 128 and max(row["store_bits"]) >= 64, row


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


def test_step_and_kernels_need_no_dali_and_no_tyro():
    code = (
        "import sys; sys.modules |= {'nvidia.dali': None, 'tyro': None}\n"
        "import bench.attention, bench.compile, bench.kernels, bench.machine\n"
        "import bench.pipeline, bench.soak, bench.step, bench.train\n"
    )
    assert run_program("-W", "error::UserWarning", "-c", code).stdout == ""


@pytest.mark.parametrize("arguments, code", [([], 0), (["nothing"], 2)])
def test_usage(arguments, code):
    assert "python -m bench SUBJECT" in run_program("-m", "bench", *arguments, check=code).stdout


def test_balance_names_what_limits():
    """Steps that take 1,000 images/s and wait half of the time need 2,000; six threads give 1,000."""
    found = balance(4000, 0.5, 4, alone=1000, threads=6)
    assert [found[name] for name in ("images_per_second_needed", "threads_to_balance", "ranks_fed")] == [2000, 12, 0.5]
    assert found["limited_by"] == "input"
    assert balance(4000, 0, 4, alone=4000, threads=6) | {"limited_by": "steps", "threads_to_balance": 2} == balance(
        4000, 0, 4, alone=4000, threads=6
    )
