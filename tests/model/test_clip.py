import math

import pytest
import torch

from model import AdaptiveClip, FlatParameters, QueryNetwork, clip_units, create_encoder


def restated(gradients, m, alpha, variant):
    """Equations 9 and 10 for one unit, in float64: the sequence of clipped gradients."""
    average, out = None, []
    for g in gradients:
        g = g.double()
        measured = g if variant == "vector" else g.norm()
        if average is None:
            average = measured
        else:
            previous = average.norm()
            average = m * average + (1 - m) * measured
            if g.norm() > alpha * previous:
                g = g * previous / g.norm()
        out.append(g)
    return out


def step(flat, clip, gradients):
    """One call of the clip as in training: the clipped gradients of the parameters."""
    for parameter, gradient in zip(flat.parameters, gradients, strict=True):
        parameter.grad = gradient.view(parameter.shape)
    flat.collect()
    norms = flat.norms(flat.gradient)
    finite = norms.isfinite().all()
    flat.gradient.masked_fill_(~finite, 0)
    clip(flat.gradient, norms, finite)
    return [view.flatten().clone() for view in flat._gradients]


@pytest.mark.parametrize("variant", ["vector", "norm"])
def test_clip_is_the_formula(variant):
    """A unit of two parameters beside one that never needs clipping; a step that is not finite leaves no trace."""
    torch.manual_seed(0)
    steady, *unit = (torch.nn.Parameter(torch.randn(shape)) for shape in ((2,), (3, 2), (70,)))
    flat = FlatParameters([[steady], unit])
    scales = torch.cat([torch.tensor([0.01, 9.0]), torch.empty(40).uniform_(0.6, 1.8)]).cumprod(0)
    gradients = [torch.randn(76) * scale for scale in scales]
    clip = AdaptiveClip(flat, momentum=0.4, alpha=1.05, variant=variant)
    clipped = 0
    for gradient, expected in zip(gradients, restated(gradients, 0.4, 1.05, variant), strict=True):
        step(flat, clip, [torch.ones(2), gradient[:6] * math.inf, gradient[6:]])
        first, *rest = step(flat, clip, [torch.ones(2), gradient[:6], gradient[6:]])
        assert torch.equal(first, torch.ones(2))
        result = torch.cat(rest)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-7)
        clipped += not torch.allclose(result, gradient)
    assert 0 < clipped < len(gradients)


def test_a_gradient_at_the_limit_passes():
    """Eq. 10 clips what is longer than alpha times the average, in numbers without rounding."""
    flat = FlatParameters([[torch.nn.Parameter(torch.zeros(2))]])
    clip = AdaptiveClip(flat, momentum=0.4, alpha=1.25, variant="vector")
    assert step(flat, clip, [torch.tensor([0.0, 4.0])])[0].tolist() == [0, 4]
    assert step(flat, clip, [torch.tensor([3.0, -4.0])])[0].tolist() == [3, -4]


def test_state_carries_over():
    def three_steps(stop_after):
        flat = FlatParameters([[torch.nn.Parameter(torch.zeros(5))]])
        clip, out = AdaptiveClip(flat, momentum=0.4, alpha=1.05, variant="vector"), []
        for number in range(3):
            if number == stop_after:
                state, clip = clip.state_dict(), AdaptiveClip(flat, momentum=0.4, alpha=1.05, variant="vector")
                clip.load_state_dict(state)
            out += step(flat, clip, [torch.arange(5.0) * 3**number])
        return torch.stack(out)

    for stop_after in (0, 1, 2):
        assert torch.equal(three_steps(stop_after), three_steps(None))


def test_flat_parameters_are_views_and_keep_their_values():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = FlatParameters([[module[1].weight, module[1].bias], [module[0].weight, module[0].bias]])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [unit.stop - unit.start for unit in flat.units] == [128, 128] and flat.values.count_nonzero() == 15 + 5 + 12
    flat.values.zero_()
    assert not any(parameter.any() for parameter in module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    torch.testing.assert_close(flat.norms(flat.collect())[0], torch.tensor(2.0).sqrt())


def test_units_are_blocks_and_the_parts_around_them():
    encoder = create_encoder("vit_tiny_patch16_224", sincos=False, frozen_patch_embed=False, seed=0, img_size=16, patch_size=4, depth=3, num_classes=0)  # fmt: skip # noqa: E501
    network = QueryNetwork(encoder, hidden=16, out=8, projector_layers=2, predictor_layers=2, seed=0)
    units = clip_units(network)
    assert sorted(name for unit in units for name in unit) == sorted(name for name, _ in network.named_parameters())
    assert all(name.startswith("predictor") for name in units[-1])
    found = {frozenset(name.removeprefix("encoder.").split(".")[0] for name in unit) for unit in units}
    assert found == {frozenset(unit) for unit in ({"cls_token", "pos_embed", "patch_embed"}, {"blocks"}, {"norm"}, {"projector"}, {"predictor"})}  # fmt: skip # noqa: E501
    assert len(units) == 4 + 3
