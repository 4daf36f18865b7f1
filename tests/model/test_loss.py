import math

import pytest
import torch
from conftest import on_ranks

from model import contrastive_loss


def restated(queries, keys, tau):
    """The docstring's formula, pair by pair, in float64."""
    q, k = (rows.double() / rows.double().norm(dim=-1, keepdim=True) for rows in (queries, keys))
    total = 0.0
    for a, b in ((0, 1), (1, 0)):
        for i in range(q.shape[1]):
            s = [(q[a, i] @ k[b, j] / tau).exp() for j in range(q.shape[1])]
            total = total - (s[i] / sum(s)).log() / q.shape[1]
    return tau * total


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_loss_and_gradient_are_the_formula(tau):
    torch.manual_seed(0)
    queries = torch.randn(2, 5, 7, requires_grad=True)
    keys = torch.randn(2, 5, 7, requires_grad=True)
    loss, similarity = contrastive_loss(queries, keys, tau)
    loss.backward()
    assert keys.grad is None  # stop-gradient
    expected_by = queries.detach().double().requires_grad_()
    expected = restated(expected_by, keys.detach(), tau)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected)
    torch.testing.assert_close(queries.grad.double(), expected_by.grad, rtol=1e-4, atol=1e-6)
    pairs = torch.nn.functional.cosine_similarity(queries, keys.flip(0), dim=-1)
    torch.testing.assert_close(similarity, pairs.mean())


def test_known_values():
    same = torch.eye(4).expand(2, 4, 4)
    loss, similarity = contrastive_loss(same, same, 0.1)
    assert loss.item() == pytest.approx(2 * 0.1 * math.log1p(3 * math.exp(-10)), abs=1e-6)
    assert similarity.item() == pytest.approx(1)
    collapsed = torch.ones(2, 4, 4)
    assert contrastive_loss(collapsed, collapsed, 0.1)[0].item() == pytest.approx(2 * 0.1 * math.log(4))


def test_ranks_share_their_keys(tmp_path):
    """The mean over three ranks of loss and gradient is that of one process with all thirds of the batch."""
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 6, 5, requires_grad=True), torch.randn(2, 6, 5)
    loss, similarity = contrastive_loss(queries, keys, 0.2)
    loss.backward()
    torch.save([queries.detach(), keys], tmp_path / "in.pt")
    on_ranks(
        3,
        """
        from model import contrastive_loss
        queries, keys = (rows[:, 2 * rank : 2 * rank + 2] for rows in torch.load(folder / "in.pt"))
        queries = queries.clone().requires_grad_()
        loss, similarity = contrastive_loss(queries, keys, 0.2)
        loss.backward()
        torch.save([loss.detach(), similarity, queries.grad], folder / f"out{rank}.pt")
        """,
        tmp_path,
    )
    parts = [torch.load(tmp_path / f"out{rank}.pt") for rank in range(3)]
    losses, similarities, gradients = zip(*parts, strict=True)
    torch.testing.assert_close(sum(losses) / 3, loss.detach())
    torch.testing.assert_close(sum(similarities) / 3, similarity)
    torch.testing.assert_close(torch.cat(gradients, 1) / 3, queries.grad)
