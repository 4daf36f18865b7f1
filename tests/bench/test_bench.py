"""The benchmarks run and say what they promise; their figures are no business of a test."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from conftest import ONE_THREAD, ROOT, run_program
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

import kernels
from bench import baselines, curves, roofline, scaling
from bench.attention import attention_maps, index_of, nearest
from bench.attention import main as attention
from bench.compile import compiled_rows
from bench.kernels import GROUPS, POWER, Size, batch_of_boxes, sample_one_by_one, sample_with_multinomial
from bench.methods import METHODS
from bench.step import Synthetic, saved_bytes
from bench.train import balance
from pipeline import Index
from run.recipes import RECIPES
from run.training import flop_per_pair
from transfer.pretrained import load_encoder

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
        for row in result.get("parity", ()):  # of the input path: every operation within its stated limit
            assert row["limit of the mean"] is None or row["mean"] <= row["limit of the mean"], row


def test_soak_survives_bad_files_and_probes_them_once(tmp_path):
    """Some are cut inside their header, which in a batch of more than four images a thread kills DALI's decoder."""
    run_program("-m", "bench", "soak", "--smoke", "--json", tmp_path / "soak.json")
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["found"] == result["damaged"] and result["probes_in_first_epoch"] and not result["probes_later"]


def test_compiled_kernels():
    rows = list(compiled_rows())
    targets = {row["target"] for row in rows}
    assert len(rows) == 25 and targets == {"sm_80", "sm_90", "sm_100", "sm_120", "gfx942"}
    for row in rows:
        assert row["spilled_bytes"] == row["spill_instructions"] == 0, row
        if row["kernel"] == "gather_patches":  # 8 bytes a load (but for indices), 16 bytes a store, nothing shared
            assert set(row["store_bits"]) == {128} and row["load_bits"][64] >= 3, row
            assert row["shared_bytes"] == row["shared"] == 0, row
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


def test_curves_draw_what_is_there(tmp_path):
    """Two runs of one name, the second still being written; the k-NN record at the end says a step and no epoch."""
    pytest.importorskip("matplotlib")
    steps = [{"step": 4 * i, "epoch": i / 2, "loss": 1 / i, "images_per_second": 9 * i} for i in range(1, 101)]
    knn = {"step": 398, "knn_trained": 60.0, "knn_untrained": 40.0, "knn_bad": {}}
    lines = [json.dumps(record) for record in (*steps, {"step": 404, "epoch": 50.5, "loss": None}, knn)]
    runs = [tmp_path / parent / "run" for parent in "ab"]
    for run, text in zip(runs, ["\n".join(lines), "\n".join(["\0\0", "[1]", *lines[:60]])[:-9]], strict=True):
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(text)
    records = [curves.read(run) for run in runs]
    assert [len(found) for found in records] == [102, 59]
    panels = {panel.name: panel for panel in curves.PANELS}
    x, y = curves.curve(records[0], "epoch", panels["knn_trained"])
    assert x.tolist() == [0, 49.75] and y.tolist() == [40, 60]
    x, y = curves.curve(records[0], "step", panels["loss"])
    assert x.tolist() == [*range(4, 405, 4)] and np.isnan(y[-1]) and y[1] == 0.5
    for deviation in (1, 2.5, 100):  # means of equal figures, beside a gap and at the ends
        level = curves.smooth(np.where(np.isnan(y), y, 3.0), deviation)
        assert np.isnan(level[-1]) and abs(level[:-1] - 3).max() < 1e-12
    assert curves.common_axis({"a": records[0], "b": [{"epoch": 1.0}]}) == "epoch"
    assert curves.common_axis({"a": records[0], "b": [{"step": 1.0}]}) == "step"
    assert curves.labels([*runs, tmp_path / "c"]) == ["a/run", "b/run", "c"]

    picture = tmp_path / "new" / "curves.png"
    run_program("-m", "bench", "curves", *runs, runs[0], "--output", picture)
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3).astype(int)
    for colour in ((63, 144, 218), (255, 169, 14)):  # of the two runs
        assert (abs(pixels - colour).sum(1) < 9).sum() > 2000
    done = run_program("-m", "bench", "curves", runs[0], tmp_path, "--output", picture, check=2)
    assert done.stderr.startswith(f"bench curves: {tmp_path} holds no metrics.jsonl") and done.stderr.count("\n") == 1


def by_hand(vit, images):
    """Attention weights of the last block from its projections, [B, heads, T, T]."""
    tokens = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
    for block in vit.blocks[:-1]:
        tokens = block(tokens)
    last = vit.blocks[-1]
    queries, keys, _ = last.attn.qkv(last.norm1(tokens)).unflatten(2, (3, 3, 64)).permute(2, 0, 3, 1, 4)
    return (queries @ keys.transpose(-2, -1) / 64**0.5).softmax(-1)


@pytest.mark.parametrize("tokens, first", [({}, 1), ({"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, 2)])
def test_attention_maps(tokens, first):
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), patch_size=8, depth=2, **tokens).eval()
    images = torch.randn(2, 3, 32, 48)
    maps = attention_maps(vit, images)
    weights = by_hand(vit, images)
    expected = weights[:, :, 0] if not tokens else sum(weights[:, :, row] for row in range(first, 26)) / 24
    assert maps.shape == (2, 3, 4, 6)
    torch.testing.assert_close(maps.flatten(2), expected[..., first:])
    with pytest.raises(ValueError, match="expected timm's Attention in every block, got a ParallelThingsBlock"):
        attention_maps(timm.create_model("vit_small_patch16_18x2_224", img_size=32, depth=1), images)


def test_attention_sheet(undisturbed, photos, tmp_path, capsys):
    """Of a file that the bank holds twice, the copy is its nearest neighbour, and the file itself is not shown."""
    pytest.importorskip("matplotlib")
    bank = shutil.copytree(photos, tmp_path / "bank")
    (bank / "a" / "cut.jpg").write_bytes((bank / "a" / "00.jpg").read_bytes()[:-200])
    shutil.copy(bank / "a" / "00.jpg", bank / "b" / "copy.jpg")
    vit, description = load_encoder(undisturbed[0])
    given, index = index_of([bank / "a" / "00.jpg", bank / "c" / "02.jpg"]), Index.scan(bank)
    how = {"mean": description["mean"], "std": description["std"], "device": torch.device("cpu"), "threads": 1}
    found = nearest(vit.eval(), given, index, 1000, **how)
    names = [[index.paths[sample] for sample, _ in row] for row in found]
    assert names[0][0] == "b/copy.jpg" and 1.00001 > found[0][0][1] > 0.99999 > found[0][1][1]
    assert "a/00.jpg" not in names[0] and "c/02.jpg" not in names[1] and len(names[1]) == 5
    output = tmp_path / "sheet.png"
    more = ["--bank", bank, "--image-size", "64", "--output", output]
    assert attention([*map(str, [undisturbed[0], bank / "a" / "00.jpg", bank / "c" / "02.jpg", *more])]) == 0
    with Image.open(output) as sheet:
        assert sheet.width > 1500 and len(sheet.getcolors(10**7)) > 1000
    assert attention([*map(str, [undisturbed[0], bank / "a" / "cut.jpg", ROOT / "README.md"])]) == 2
    assert re.search(r"bench attention: expected images, got .*README.md: ", capsys.readouterr().err)


def test_scaling_starts_from_what_was_measured():
    config, how = RECIPES["imagenet-vit-s"], {"step_seconds": 0.0356, "compress": False}
    one, node, nodes = (scaling.predict(config, 43_000_000, gpus=n, images=512, **how) for n in (1, 8, 64))
    assert one["step_ms"] == pytest.approx(35.6) and one["efficiency"] == pytest.approx(1)
    assert 1 > node["efficiency"] > nodes["efficiency"] > 0.5
    ring = node["gradients_ms"] / 1e3 * scaling.WITHIN  # bytes that a GPU sends: all but one of eight parts, twice
    assert ring == pytest.approx(2 * 7 / 8 * 4 * 43_000_000)
    half = scaling.predict(config, 43_000_000, gpus=64, images=512, **how | {"compress": True})
    assert half["gradients_ms"] == pytest.approx(nodes["gradients_ms"] / 2)
    assert node["node_images_per_second"] * 4 == pytest.approx(node["pairs_per_second"])


STEP = dataclasses.replace(
    RECIPES["toy"], batch_size=8, image_size=32, depth=2, head_hidden=48, head_out=24, lr=1e-4, warmup_epochs=0.0
)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "changes",
    [{}, {"ema": 0.5, "clip": "vector", "frozen_patch_embed": True, "predictor_layers": 3}, {"clip": "norm"}],
    ids=["own keys", "momentum keys, vector", "norm"],
)
def test_plain_form_takes_the_steps_of_training(changes):
    """Losses of four steps from the same weights on the same patches."""
    config = dataclasses.replace(STEP, precision="float32", clip_momentum=0.7, clip_alpha=0.8, **changes)
    ours, plain = (Synthetic(config, CPU, mode=mode) for mode in ("float32", "plain"))
    network = ours.training.network
    plain.training.network.load_state_dict(network.state_dict())
    for one, other in zip(network.parameters(), plain.training.network.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad
    if config.ema is not None:
        plain.training.key_network.load_state_dict(network.state_dict())
    chosen = ours.training.sample(ours.loaded, 0)
    for group in range(4):
        (loss, *_), _ = ours.training.step(ours.loaded.views, chosen[:, :, group], 0.5)
        expected = plain.training.step(ours.loaded.views, chosen[:, :, group], 0.5)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)


def test_roofline_does_the_work_that_torch_counts():
    """In one step of each kind: products by torch's own formulas, our attention by the number of its products."""

    @register_flop_formula(torch.ops.aps.attention)
    def forward(qkv, heads, out_shape=None, **_):
        return 2 * 2 * qkv[0] * qkv[1] ** 2 * qkv[2] // 3

    @register_flop_formula(torch.ops.aps.attention_backward)
    def backward(qkv, gradient, heads, out_shape=None, **_):
        return 5 * 2 * qkv[0] * qkv[1] ** 2 * qkv[2] // 3

    for ema, frozen in ((None, False), (0.9, True)):
        config = dataclasses.replace(STEP, precision="bfloat16", ema=ema, frozen_patch_embed=frozen)
        synthetic = Synthetic(config, CPU, mode="eager")
        with FlopCounterMode(display=False) as counter:
            synthetic.batch()
        counted = counter.get_total_flops() / config.groups
        loss = 2 * (2 * 2 * config.batch_size**2 * config.head_out)  # queries with keys, forward and backward
        formula = sum(operation.flop for operation in roofline.operations(config, 2))
        assert formula == counted - loss
        logged = synthetic.training.flop_per_pair * config.batch_size  # attention is not computed again there
        assert logged == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{"position_embedding": "learned"}, {"frozen_patch_embed": True, "ema": 0.9}])
def test_autograd_keeps_what_the_formula_says(precision, changes):
    config = dataclasses.replace(STEP, precision=precision, **changes)
    formula = roofline.kept(config, {"float32": 4, "bfloat16": 2}[precision])
    assert Synthetic(config, CPU, mode="eager").kept() == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize("recipe, gflop, pairs", [("imagenet-vit-s", 17.9, 28_900), ("imagenet-vit-b", 69.4, 9_450)])
def test_roofline_of_an_h100(recipe, gflop, pairs):
    """Work per pair and roofline as they were worked out by hand for 790 TFLOP/s and 3.0 TB/s, without the update."""
    config = dataclasses.replace(RECIPES[recipe], batch_size=512)
    found = roofline.operations(config, 2)
    assert sum(operation.flop for operation in found) / 512e9 == pytest.approx(gflop, rel=0.01)
    step = [operation for operation in found if operation.part != "update"]
    assert 512 / roofline.seconds(step, peak=790e12, bandwidth=3.0e12) == pytest.approx(pairs, rel=0.03)


@pytest.mark.parametrize(
    "name, recipe",
    [*((name, "cifar-vit-t") for name in METHODS), ("APS", "imagenet-vit-s"), ("MoCo v3", "imagenet-vit-s")],
)
def test_baselines_cost_what_is_counted(name, recipe):
    """By formula, by torch's counter without memory, and in a real step, which saves the same bytes as well."""
    small = {"image_size": 32, "patch_size": 4, "depth": 2, "head_hidden": 48, "head_out": 24}
    config = dataclasses.replace(RECIPES[recipe], **small)
    kind, batch = METHODS[name], 3
    torch.manual_seed(0)
    step = baselines.Step(kind, config, batch, CPU)
    method = step.method
    formula = batch * sum(part.flop * part.times for part in method.parts(batch))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(baselines.SDPBackend.MATH):
        loss = method(*step.inputs)
        loss.backward()
    assert formula == counter.get_total_flops() == baselines.counted_flop(kind, config, batch)
    assert torch.isfinite(loss)
    for key, parameter in method.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, key
    with torch.autocast("cpu", torch.bfloat16):
        kept = saved_bytes(lambda: method(*step.inputs), method.parameters())
    expected = baselines.kept_bytes(kind, config, batch, fused=True)  # less: statistics of norms are float32 in truth
    assert kept == pytest.approx(expected, rel=0.005)
    before = [[p.detach().clone() for p in average.parameters()] for _, average in method.averages]
    step()
    for old, (network, average) in zip(before, method.averages, strict=True):
        for then, target, now in zip(old, network.parameters(), average.parameters(), strict=True):
            torch.testing.assert_close(now, then.lerp(target, 0.01))
    if name == "APS":
        loss = sum(part.flop * part.times for part in method.parts(batch) if part.name == "loss")
        logged = flop_per_pair(method.network, method.keep, momentum=config.ema is not None)
        assert formula / batch - loss == logged


def test_blocks_of_aps_and_moco_as_in_the_paper():
    """4.14 and 21.83 GFLOP are those of blocks of ViT-T/2 worked out by hand; the paper says 4.2 and 21.9."""
    work = {}
    for size in ("T/2", "S/2", "B/2"):
        for name, by_hand in (("APS", 4.1406), ("MoCo v3", 21.828)):
            with torch.device("meta"):
                parts = METHODS[name](RECIPES[baselines.SIZES[size]]).parts(1)
            work[name] = sum(part.flop * part.times for part in parts if part.name == "blocks")
            assert work[name] / 1e9 == pytest.approx(by_hand * {"T": 1, "S": 4, "B": 16}[size[0]], rel=1e-4)
        assert work["MoCo v3"] / work["APS"] == pytest.approx(5.27, abs=0.005)


def test_verdicts_on_claims():
    assert baselines.verdict([4.6, 5.4], 5, 5) == "holds" == baselines.verdict([4.6, 6.5], 5, 6)
    assert baselines.verdict([4.4, 3], 5, 6) == "less than claimed"
    assert baselines.verdict([17, 18], 15, 15) == "more than claimed"
    assert baselines.verdict([17, 9], 15, 15) == "at some sizes" == baselines.verdict([15, 9], 15, 15)


def test_baselines_report(tmp_path, capsys):
    assert baselines.main(["--smoke", "--json", str(tmp_path / "baselines.json")]) == 0
    result, out = json.loads((tmp_path / "baselines.json").read_text()), capsys.readouterr().out
    methods = result["sizes"]["T/2"]
    assert list(methods) == list(METHODS)
    for found in methods.values():
        assert found["flop"] == found["flop_by_formula"] and found["step_seconds"]["runs"] == 3
        assert 0 < found["kept_bytes"] < found["kept_bytes_unfused"]
    blocks = 4 * 65 / (3 * 17)  # passes of tokens
    assert re.search(rf"^MoCo v3's compute +1/5 +blocks +5.2 to 5.4 +{blocks:.1f} +- +holds$", out, re.MULTILINE)
    assert len(result["claims"]) == 8


def test_balance_names_what_limits():
    """Steps that take 1,000 images/s and wait half of the time need 2,000; six threads give 1,000."""
    found = balance(4000, 0.5, 4, alone=1000, threads=6)
    assert [found[name] for name in ("images_per_second_needed", "threads_to_balance", "ranks_fed")] == [2000, 12, 0.5]
    assert found["limited_by"] == "input"
    assert balance(4000, 0, 4, alone=4000, threads=6) | {"limited_by": "steps", "threads_to_balance": 2} == balance(
        4000, 0, 4, alone=4000, threads=6
    )
