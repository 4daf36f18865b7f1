"""The plain form of the step does the same work; its FLOPs, bytes and roofline are those that formulas say."""

import contextlib
import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from bench import roofline, step
from bench.step import Synthetic
from run.recipes import RECIPES

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
    """Losses of four steps from the same weights on the same patches.

    Of random crops, one set in thirty parts by 1e-3: class tokens begin near 0, and norms blow up what they differ by.
    """
    torch.manual_seed(4)
    config = dataclasses.replace(STEP, precision="float32", clip_momentum=0.7, clip_alpha=0.8, **changes)
    ours, plain = (Synthetic(config, CPU, mode=mode) for mode in ("float32", "plain"))
    network = ours.training.network
    plain.training.network.load_state_dict(network.state_dict())
    for one, other in zip(network.parameters(), plain.training.network.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad
    if config.ema is not None:
        plain.training.key_network.load_state_dict(network.state_dict())
    chosen = ours.training.sample(ours.loaded, 0)
    for ours_given, plain_given in zip(*(
        zip(*form.training.gather(ours.loaded.views, chosen), strict=True) for form in (ours, plain)
    ), strict=True):  # fmt: skip
        (loss, *_), _ = ours.training.step(*ours_given, 0.5)
        expected = plain.training.step(*plain_given, 0.5)
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
        # The last block's attention keeps its weights where it is plain products: 2 T D less, of a token, backward.
        assert formula == counted - loss + 2 * config.batch_size * 2 * (synthetic.training.keep + 1) * 192
        logged = synthetic.training.flop_per_pair * config.batch_size  # attention is not computed again there
        assert logged == pytest.approx(formula, rel=0.01)


def test_idle_is_what_kernels_leave_of_the_time_without_a_profiler(monkeypatch, capsys):
    """Kernels of 3, 4 and 1 ms of the 10 ms that a batch takes; with the profiler it would have taken longer."""
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    rows = (
        ("_sample_kernel", 3e3, cuda),
        ("product", 4e3, cuda),
        ("_gather_kernel", 1e3, cuda),
        ("aten::mm", 9e3, cpu),
    )
    events = [
        SimpleNamespace(key=name, self_device_time_total=us, count=1, device_type=where, is_user_annotation=False)
        for name, us, where in rows
    ]
    profiler = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(step, "profile", lambda activities: contextlib.nullcontext(profiler))
    monkeypatch.setattr(step, "wait", lambda _: None)
    found = step.where_time_goes(lambda: time.sleep(0.02), torch.device("cuda"), 0.01)
    assert found["idle_share"] == pytest.approx(0.2) and found["sampling_and_gathering_share"] == pytest.approx(0.5)
    assert [row["name"] for row in found["top"]] == ["product", "_sample_kernel", "_gather_kernel"]
    del events[:3]  # where CUPTI may not be used
    found = step.where_time_goes(lambda: None, torch.device("cuda"), 0.01)
    step.show_profile("graph", found)
    assert set(found) == {"not_run"} and found["not_run"] in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{"position_embedding": "learned"}, {"frozen_patch_embed": True, "ema": 0.9}])
def test_autograd_keeps_what_the_formula_says(precision, changes):
    config = dataclasses.replace(STEP, precision=precision, **changes)
    formula = roofline.kept(config, {"float32": 4, "bfloat16": 2}[precision])
    assert Synthetic(config, CPU, mode="eager").kept() == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize("recipe, gflop, pairs", [("imagenet-vit-s", 16.7, 30_200), ("imagenet-vit-b", 64.7, 10_050)])
def test_roofline_of_an_h100(recipe, gflop, pairs):
    """Work per pair, as worked out by hand, and the roofline for 790 TFLOP/s and 3.0 TB/s, without the update."""
    config = dataclasses.replace(RECIPES[recipe], batch_size=512)
    found = roofline.operations(config, 2)
    assert sum(operation.flop for operation in found) / 512e9 == pytest.approx(gflop, rel=0.01)
    step = [operation for operation in found if operation.part != "update"]
    assert 512 / roofline.seconds(step, peak=790e12, bandwidth=3.0e12) == pytest.approx(pairs, rel=0.03)
