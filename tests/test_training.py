"""The optimizer step by itself."""

import dataclasses

import pytest
import torch

from pipeline import Batch
from run.progress import IN_A_ROW, Report, TooManySkipped
from run.ranks import Ranks
from run.recipes import RECIPES, momentum_coefficient
from run.training import Training

CONFIG = dataclasses.replace(
    RECIPES["toy"], batch_size=4, image_size=32, depth=1, head_hidden=16, head_out=8, ema=0.9, clip="vector",
    warmup_epochs=0.0, log_every=4, precision="float32",
)  # fmt: skip
CPU = torch.device("cpu")


def batch(device=CPU):
    generator = torch.Generator().manual_seed(0)
    crops = tuple(torch.randint(0, 256, (4, 32, 32, 3), generator=generator).byte() for _ in range(2))
    boxes = torch.tensor([[[0, 0, 40, 40], [10, 10, 30, 40]]] * 4).int()
    rest = torch.zeros(4, 2).bool(), torch.arange(4), torch.zeros(4).long()
    return Batch(tuple(x.to(device) for x in crops), boxes.to(device), *(x.to(device) for x in rest))


def state(training):
    """Copies of everything that a step changes."""
    tensors = torch.utils._pytree.tree_leaves(training.state_dict())
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_step_moves_both_networks():
    training, loaded = Training(CONFIG, CPU), batch()
    chosen = training.sample(loaded, 0)
    assert chosen.shape == (2, 4, 4, training.keep)
    before = {name: value.clone() for name, value in training.network.named_parameters()}
    (loss, similarity, spread), finite = training.step(loaded.views, chosen[:, :, 0], 0.5)
    assert loss > 0 and -1 <= similarity <= 1 and 0 < spread < 1 and finite
    share = momentum_coefficient(CONFIG, 0.5)
    now = dict(training.network.named_parameters())
    assert all(p.grad is None for p in now.values())
    for name, value in now.items():
        assert torch.equal(value, before[name]) != value.requires_grad, name
    for name, key in training.key_network.named_parameters():
        assert not key.requires_grad
        torch.testing.assert_close(key, share * before[name] + (1 - share) * now[name], msg=name)


def check_a_poisoned_step(config, device, compiled):
    """A step without a finite gradient changes nothing, and nothing that comes after: as if it had not been."""
    runs = []
    for poisoned in (True, False):
        training, loaded = Training(config, device, compiled=compiled), batch(device)
        chosen = training.sample(loaded, 0)
        assert training.step(loaded.views, chosen[:, :, 0], 0.5)[1]
        if poisoned:
            before = state(training)
            weight = training.network.predictor[0].weight
            kept = weight.detach().clone()
            with torch.no_grad():
                weight[0, 0] = float("nan")
            assert not training.step(loaded.views, chosen[:, :, 1], 0.5)[1]
            with torch.no_grad():
                weight.copy_(kept)
            assert same(state(training), before)
        training.step(loaded.views, chosen[:, :, 2], 0.5)
        runs.append(state(training))
    return runs


def test_a_step_without_a_finite_gradient_changes_nothing():
    assert same(*check_a_poisoned_step(CONFIG, CPU, False))


@pytest.mark.parametrize(
    "device, compiled",
    [("cpu", False), *(pytest.param("cuda", compiled, marks=pytest.mark.gpu) for compiled in (False, True))],
)
def test_bfloat16_trains_alike(device, compiled):
    """Without DALI: gradient of a step and losses of four near those in float32 on a CPU; a poisoned step skipped.

    At a low learning rate: with four images to a batch norm, steps of the usual size part from each other soon.
    """
    exact = dataclasses.replace(CONFIG, lr=1e-5)
    half, losses, gradients = dataclasses.replace(exact, precision="bfloat16"), [], []
    for config, place in ((exact, CPU), (half, torch.device(device))):
        training, loaded = Training(config, place, compiled=compiled and place != CPU), batch(place)
        chosen = training.sample(loaded, 0)
        losses.append([training.step(loaded.views, chosen[:, :, 0], 0.01)[0][0].item()])
        gradients.append(training.flat.gradient.cpu().clone())
        losses[-1] += [training.step(loaded.views, chosen[:, :, r], 0.01)[0][0].item() for r in range(1, 4)]
    assert losses[1] != losses[0] and losses[1] == pytest.approx(losses[0], rel=0.05)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.98
    check_a_poisoned_step(half, torch.device(device), compiled)


def test_skipped_steps_are_counted_and_too_many_stop_the_run(tmp_path):
    report = Report(
        tmp_path, Ranks(0, 1, 1, CPU), figures=("loss", "similarity"), rates={"pairs_per_second": 4}, every=10, start=0,
        total=100, steps_per_epoch=10,
    )  # fmt: skip
    value, nothing = torch.tensor(2.0), torch.tensor(float("nan"))
    with report:
        for step in range(1, 11):
            bad = step in (3, 4, 5, 8)
            report.step(step, [nothing] * 2 if bad else [value, value / 4], torch.tensor(not bad), 0.1)
        assert '"loss": 2.0, "similarity": 0.5' in report.path.read_text()
        assert '"skipped": 4' in report.path.read_text()
        with pytest.raises(TooManySkipped, match=f"{IN_A_ROW} steps in a row"):
            for step in range(11, 21):
                report.step(step, [nothing] * 2, torch.tensor(step > 10 + IN_A_ROW), 0.1)
