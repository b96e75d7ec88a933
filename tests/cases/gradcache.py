"""A toy GradCache, and the full batch it must equal; for the cases about cached losses.

Scale rule: every rank's loss is the mean over its own rows against all ranks' documents, and
gathering hands a row the sum of all ranks' gradients; so the engine's mean over ranks is the mean
over the whole batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import RankContext

ROWS, TOKENS = 8, 3  # of one rank's column
Encoder = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor], object]


class Encode(nn.Module):
    """``[B, T]`` token numbers -> ``[B, width]``; repeated layers, root parameters around them."""

    def __init__(self, seed: int, dropout: float = 0.0, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.dropout = dropout
        self.recomputes = False
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).mean(dim=1)
        for layer in self.layers:
            if self.recomputes:
                hidden = torch.utils.checkpoint.checkpoint(
                    self._block, layer, hidden, use_reentrant=False
                )
            else:
                hidden = self._block(layer, hidden)
        return self.norm(hidden)

    def _block(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        return hidden + F.dropout(torch.tanh(layer(hidden)), self.dropout)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def info_nce(queries: Tensor, documents: Tensor, first: int) -> Tensor:
    """Mean over the query rows; row i's own document is ``first + i``."""
    labels = torch.arange(first, first + len(queries))
    return F.cross_entropy(queries @ documents.T, labels)


def columns(ctx: RankContext, key: int, rank: int | None = None) -> list[Tensor]:
    """One rank's queries and documents: two columns of token numbers."""
    numbers = ctx.data(2, ROWS, TOKENS, key=key, rank=rank, dtype=torch.float64)
    return list((numbers.abs() * 97).long() % 11)


def grad_cache(
    encoders: Sequence[Encoder],
    batch: Sequence[Tensor],
    backward: Backward,
    *,
    chunk: int = 2,
    is_nested: bool = False,
) -> Tensor:
    """Accumulate the gradients of the whole batch, a chunk at a time.

    Args:
        encoders: one per column; may be one and the same.
        batch: this rank's columns.
        backward: of a scalar.
        chunk: rows encoded at once.
        is_nested: replay inside the backward of the returned loss, which then also scales it.

    Returns:
        The rank's loss.
    """
    chunks = [
        (encoder, part)
        for encoder, column in zip(encoders, batch, strict=True)
        for part in column.split(chunk)
    ]
    states: list[Tensor] = []
    cached: list[Tensor] = []
    for encoder, part in chunks:
        states.append(torch.get_rng_state())
        with torch.no_grad():
            cached.append(encoder(part).requires_grad_())
    half = len(cached) // 2
    queries, documents = torch.cat(cached[:half]), torch.cat(cached[half:])
    gathered = _GatherRows.apply(documents)
    loss = info_nce(queries, gathered, dist.get_rank() * len(queries))
    loss.backward()

    def replay(scale: Tensor | float = 1.0) -> None:
        after = torch.get_rng_state()
        for (encoder, part), state, leaf in zip(chunks, states, cached, strict=True):
            torch.set_rng_state(state)
            assert leaf.grad is not None
            with torch.enable_grad():
                surrogate = (encoder(part) * leaf.grad).sum() * scale
                surrogate.backward() if is_nested else backward(surrogate)
        torch.set_rng_state(after)

    if not is_nested:
        replay()
        return loss.detach()
    total = loss.detach().requires_grad_() * 1.0
    total.register_hook(replay)
    backward(total)
    return loss.detach()


def num_chunks(chunk: int = 2) -> int:
    """Chunks of both columns of one rank."""
    return 2 * ROWS // chunk


def full_batch(
    ctx: RankContext, towers: Sequence[nn.Module], keys: Sequence[int]
) -> list[dict[str, Tensor]]:
    """Weights after one SGD step at lr 1 on the whole batch, in one process; steps the towers.

    The loss is the mean over ranks and ``keys``; towers without dropout.
    """
    for key in keys:
        batches = [columns(ctx, key, rank) for rank in range(ctx.world_size)]
        queries = [towers[0](batch[0]) for batch in batches]
        documents = torch.cat([towers[-1](batch[1]) for batch in batches])
        losses = [info_nce(own, documents, rank * ROWS) for rank, own in enumerate(queries)]
        (torch.stack(losses).mean() / len(keys)).backward()
    for tower in towers:
        torch.optim.SGD(tower.parameters(), lr=1.0).step()
    return [tower.state_dict() for tower in towers]


def assert_state(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal up to the rounding of fp64 sums of some hundred terms in another order."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-12, atol=1e-12, msg=f"{name} differs"
        )
