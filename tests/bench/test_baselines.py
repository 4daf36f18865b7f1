"""What other methods cost: by formula, by torch's counter and in real steps."""

import dataclasses
import json
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import baselines
from bench.methods import IBOT, METHODS
from bench.step import saved_bytes
from run.recipes import RECIPES
from run.training import flop_per_pair


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """A head of iBOT, and blocks of MAE's decoder, of a quarter of their widths."""
    monkeypatch.setattr(IBOT, "WIDTHS", (512, 512, 256, 1024))
    monkeypatch.setattr(METHODS["MAE"], "decoder", lambda self: (2, 512, 16))


@pytest.mark.parametrize("name, recipe", [*((name, "cifar-vit-t") for name in METHODS), ("APS", "imagenet-vit-s")])
def test_baselines_cost_what_is_counted(name, recipe):
    """By formula, by torch's counter without memory, and in a real step, which saves the same bytes as well."""
    small = {"image_size": 32, "patch_size": 4, "depth": 2, "head_hidden": 48, "head_out": 24}
    config = dataclasses.replace(RECIPES[recipe], **small)
    kind, batch = METHODS[name], 3
    torch.manual_seed(0)
    step = baselines.Step(kind, config, batch, torch.device("cpu"))
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


def test_baselines_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baselines, "counted_flop", lambda kind, config, batch: 7 * batch)  # which has a test of its own
    assert baselines.main(["--smoke", "--json", str(tmp_path / "baselines.json")]) == 0
    result, out = json.loads((tmp_path / "baselines.json").read_text()), capsys.readouterr().out
    methods = result["sizes"]["T/2"]
    assert list(methods) == list(METHODS)
    for found in methods.values():
        assert found["flop"] == 7 and found["flop_by_formula"] == sum(found["flop_of_parts"].values())
        assert found["step_seconds"]["runs"] == 3
        assert 0 < found["kept_bytes"] < found["kept_bytes_unfused"]
    blocks = 4 * 65 / (3 * 17)  # passes of tokens
    assert re.search(rf"^MoCo v3's compute +1/5 +blocks +5.2 to 5.4 +{blocks:.1f} +- +holds$", out, re.MULTILINE)
    assert len(result["claims"]) == len(result["findings"]) == 8
