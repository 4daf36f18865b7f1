"""The symmetric contrastive loss."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def contrastive_loss(queries: Tensor, keys: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """InfoNCE in both directions, against the keys of all ranks.

    For queries q and keys k of views 1 and 2, rows normalised, s(q, k) = q.k / tau over the global batch::

        L = tau * sum over (a, b) in {(1, 2), (2, 1)} of
            mean_i( -log( exp s(q_a,i , k_b,i) / sum_j exp s(q_a,i , k_b,j) ) )

    No gradient reaches the keys. ``queries``, ``keys``: [2, B, E], B the images of this rank. Returns the loss of this
    rank's queries (their mean over ranks is the loss of the global batch, whose gradient is the mean of theirs) and the
    mean cosine similarity of the positive pairs, both float32 scalars. Computed in float32 whatever autocast says.
    """
    with torch.autocast(queries.device.type, enabled=False):
        queries = F.normalize(queries.float(), dim=-1)
        keys = F.normalize(keys.detach().float(), dim=-1)
        local, rank = keys.shape[1], 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            rank = dist.get_rank()
            gathered = keys.new_empty(dist.get_world_size() * 2, *keys.shape[1:])
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer and older name
            gather(gathered, keys)
            keys = gathered.unflatten(0, (-1, 2)).transpose(0, 1).flatten(1, 2)  # [W, 2, B, E] to [2, W*B, E]
        similarity = queries @ keys.flip(0).transpose(1, 2)  # [2, B, W*B]: view 1 against keys of view 2, and back
        positive = torch.arange(local, device=queries.device) + rank * local
        mean = F.cross_entropy((similarity / temperature).flatten(0, 1), positive.repeat(2))  # over both directions
        matched = similarity.detach().gather(2, positive.expand(2, -1).unsqueeze(2)).mean()
        return 2 * temperature * mean, matched
