import torch
from conftest import on_ranks

from model import QueryNetwork, create_encoder
from model.heads import BatchNorm, mlp, spread


def network(**heads):
    encoder = create_encoder("vit_tiny_patch16_224", sincos=True, frozen_patch_embed=True, seed=0, img_size=16, patch_size=4, depth=1, num_classes=0)  # fmt: skip # noqa: E501
    return QueryNetwork(
        encoder, **{"hidden": 32, "out": 8, "projector_layers": 3, "predictor_layers": 2, "seed": 0} | heads
    )


def test_head_is_as_moco_v3_describes():
    head = mlp(12, 20, 6, 3)
    assert [type(part).__name__ for part in head] == ["Linear", "BatchNorm", "ReLU"] * 2 + ["Linear", "BatchNorm"]
    assert all(part.bias is None for part in head if isinstance(part, torch.nn.Linear))
    assert head[1].weight is not None and head[-1].weight is None
    assert [tuple(part.weight.shape) for part in head[::3]] == [(20, 12), (20, 20), (6, 20)]
    [out] = head(torch.randn(1, 64, 12))
    torch.testing.assert_close(out.mean(0), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(0, unbiased=False), torch.ones(6), atol=1e-3, rtol=0)


def test_batch_norm_sees_each_view_alone():
    net = network()
    patches, index = torch.randn(2, 6, 4, 48), torch.randint(16, (2, 6, 4))
    queries, projections, _ = net(patches, index)
    patches[1] *= 3
    changed, *_ = net(patches, index)
    assert queries.shape == projections.shape == (2, 6, 8)
    torch.testing.assert_close(changed[0], queries[0])
    assert not torch.allclose(changed[1], queries[1])


def test_batch_norm_and_its_gradients_are_the_formula():
    """(x - mean) / sqrt(variance + eps) * weight + bias over the batch, in float64; differentiated by hand."""
    torch.manual_seed(0)
    x = (torch.randn(7, 5) * 3 + 1).requires_grad_()
    norm, upstream = BatchNorm(5), torch.randn(7, 5)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    [out] = norm(x[None])
    out.backward(upstream)
    values, weight, bias, gradient = (t.detach().double() for t in (x, norm.weight, norm.bias, upstream))
    deviation = (values.square().mean(0) - values.mean(0).square() + 1e-5).sqrt()
    normal = (values - values.mean(0)) / deviation
    torch.testing.assert_close(out.double(), normal * weight + bias, rtol=1e-5, atol=1e-6)
    expected = weight / deviation * (gradient - gradient.mean(0) - normal * (gradient * normal).mean(0))
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norm.weight.grad.double(), (gradient * normal).sum(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.bias.grad.double(), gradient.sum(0), rtol=1e-5, atol=1e-6)


def test_heads_start_as_torch_starts_linear_layers():
    """As in MoCo v3, which gives its own initial weights to the encoder alone: uniform, to 1 / sqrt(inputs)."""
    net = network(hidden=256)
    for head in (net.projector, net.predictor):
        for part in head:
            if isinstance(part, torch.nn.Linear):
                bound = part.in_features**-0.5
                assert 0.99 * bound < part.weight.abs().max() <= bound
                torch.testing.assert_close(part.weight.std().item(), bound / 3**0.5, rtol=0.05, atol=0)
            elif isinstance(part, BatchNorm) and part.weight is not None:
                assert (part.weight == 1).all() and (part.bias == 0).all()


def test_heads_follow_from_the_seed_and_disturb_nothing():
    state = torch.random.get_rng_state()
    first, again, other = (network(seed=seed).predictor[0].weight for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_key_network_is_a_frozen_copy_of_encoder_and_projector():
    net = network()
    keys = net.key_network()
    assert not any(parameter.requires_grad for parameter in keys.parameters())
    before = {name: value.clone() for name, value in keys.state_dict().items()}
    patches, index = torch.randn(2, 6, 4, 48), torch.randint(16, (2, 6, 4))
    torch.testing.assert_close(keys(patches, index), net(patches, index)[1])  # torch 2.11 sums in another order
    for parameter in net.parameters():
        parameter.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in keys.state_dict().items())


def test_spread_is_the_standard_deviation_of_directions():
    """Of [B, D] in float64, over the images (not B - 1); of bfloat16 too, and 0 where all have one direction."""
    torch.manual_seed(0)
    features = torch.randn(3, 5) + 1
    rows = features.double() / features.double().norm(dim=1, keepdim=True)
    expected = ((rows - rows.mean(0)) ** 2).mean(0).sqrt().mean() * 5**0.5
    torch.testing.assert_close(spread(features).double(), expected, rtol=1e-5, atol=0)
    assert spread(features.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(spread(torch.ones(8, 16) * torch.rand(8, 1)), torch.tensor(0.0), rtol=0, atol=1e-6)
    assert 0.99 < spread(torch.randn(4000, 16)) <= 1


def test_batch_norm_over_ranks_is_that_of_the_whole_batch(tmp_path):
    """Outputs and all gradients of two ranks with half the batch each are those of one process with all of it, of two
    views with sums of one collective."""
    torch.manual_seed(0)
    x = (torch.randn(2, 10, 6) * torch.linspace(0.3, 3, 12).view(2, 1, 6) + 1).requires_grad_()
    norm = BatchNorm(6)
    torch.nn.init.normal_(norm.weight)
    weights = torch.randn(2, 10, 6)
    out = norm(x)
    (out * weights).sum().backward()
    torch.save({"x": x.detach(), "norm": norm.state_dict(), "weights": weights}, tmp_path / "in.pt")
    on_ranks(
        2,
        """
        from torch.distributed.tensor.debug import CommDebugMode
        from model.heads import BatchNorm, spread
        given = torch.load(folder / "in.pt")
        half = slice(5 * rank, 5 * rank + 5)
        x = given["x"][:, half].requires_grad_()
        norm = BatchNorm(6)
        norm.load_state_dict(given["norm"])
        with CommDebugMode() as comm:
            out = norm(x)
        assert sum(comm.get_comm_counts().values()) == 1
        (out * given["weights"][:, half]).sum().backward()
        same = torch.tensor([[1.0, 2, 3]]) * (1 + torch.rand(5, 1))
        spreads = torch.stack([spread(x.detach()[0]), spread(same)])
        torch.save([out.detach(), x.grad, norm.weight.grad, norm.bias.grad, spreads], folder / f"out{rank}.pt")
        """,
        tmp_path,
    )
    first, second = (torch.load(tmp_path / f"out{rank}.pt") for rank in range(2))
    torch.testing.assert_close(torch.cat([first[0], second[0]], 1), out.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([first[1], second[1]], 1), x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first[2] + second[2], norm.weight.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first[3] + second[3], norm.bias.grad, rtol=1e-4, atol=1e-5)
    for found in (first[4], second[4]):
        torch.testing.assert_close(found, torch.stack([spread(x.detach()[0]), torch.tensor(0.0)]), rtol=1e-5, atol=1e-3)
