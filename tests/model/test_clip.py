import torch

from model import FlatParameters, QueryNetwork, clip_units, create_encoder


def test_flat_parameters_are_views_and_keep_their_values():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = FlatParameters([[module[1].weight, module[1].bias], [module[0].weight, module[0].bias]])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert flat.bounds == [0, 128, 256] and flat.values.count_nonzero() == 15 + 5 + 12
    flat.values.zero_()
    assert not any(parameter.any() for parameter in module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    torch.testing.assert_close(flat.norms(flat.collect())[0, 0], torch.tensor(2.0).sqrt())


def test_units_are_blocks_and_the_parts_around_them():
    encoder = create_encoder("vit_tiny_patch16_224", sincos=False, frozen_patch_embed=False, seed=0, img_size=16, patch_size=4, depth=3, num_classes=0)  # fmt: skip # noqa: E501
    network = QueryNetwork(encoder, hidden=16, out=8, projector_layers=2, predictor_layers=2, seed=0)
    units = clip_units(network)
    assert sorted(name for unit in units for name in unit) == sorted(name for name, _ in network.named_parameters())
    assert all(name.startswith("predictor") for name in units[-1])
    found = {frozenset(name.removeprefix("encoder.").split(".")[0] for name in unit) for unit in units}
    assert found == {frozenset(unit) for unit in ({"cls_token", "pos_embed", "patch_embed"}, {"blocks"}, {"norm"}, {"projector"}, {"predictor"})}  # fmt: skip # noqa: E501
    assert len(units) == 4 + 3
