import pytest
import torch

from model import AdaptiveClip, QueryNetwork, clip_units, create_encoder


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


@pytest.mark.parametrize("variant", ["vector", "norm"])
def test_clip_is_the_formula(variant):
    torch.manual_seed(0)
    unit = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(4))]
    steady = [torch.nn.Parameter(torch.zeros(2))]  # a unit of its own that is never clipped
    gradients = [torch.randn(10) * scale for scale in (1, 1.2, 9, 0.1, 0.1, 30, 1, 1)]
    clip = AdaptiveClip([steady, unit], momentum=0.4, alpha=1.05, variant=variant)
    clipped = 0
    for gradient, expected in zip(gradients, restated(gradients, 0.4, 1.05, variant), strict=True):
        unit[0].grad, unit[1].grad = gradient[:6].view(3, 2).clone(), gradient[6:].clone()
        steady[0].grad = torch.ones(2)
        clip()
        assert torch.equal(steady[0].grad, torch.ones(2))
        result = torch.cat([parameter.grad.flatten() for parameter in unit])
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-7)
        clipped += not torch.allclose(result, gradient)
    assert 0 < clipped < len(gradients)


def test_state_carries_over():
    def three_steps(stop_after):
        parameter = torch.nn.Parameter(torch.zeros(5))
        clip, out = AdaptiveClip([[parameter]], momentum=0.4, alpha=1.05, variant="vector"), []
        for step in range(3):
            if step == stop_after:
                state, clip = clip.state_dict(), AdaptiveClip([[parameter]], momentum=0.4, alpha=1.05, variant="vector")
                clip.load_state_dict(state)
            parameter.grad = torch.arange(5.0) * 3**step
            clip()
            out.append(parameter.grad)
        return torch.stack(out)

    for stop_after in (0, 1, 2):
        assert torch.equal(three_steps(stop_after), three_steps(None))


def test_units_are_blocks_and_the_parts_around_them():
    encoder = create_encoder("vit_tiny_patch16_224", sincos=False, frozen_patch_embed=False, seed=0, img_size=16, patch_size=4, depth=3, num_classes=0)  # fmt: skip # noqa: E501
    network = QueryNetwork(encoder, hidden=16, out=8, projector_layers=2, predictor_layers=2, seed=0)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    units = [[names[id(parameter)] for parameter in unit] for unit in clip_units(network)]
    assert sorted(name for unit in units for name in unit) == sorted(names.values())
    found = {frozenset(name.removeprefix("encoder.").split(".")[0] for name in unit) for unit in units}
    assert found == {frozenset(unit) for unit in ({"cls_token", "pos_embed", "patch_embed"}, {"blocks"}, {"norm"}, {"projector"}, {"predictor"})}  # fmt: skip # noqa: E501
    assert len(units) == 4 + 3
