"""Encoders for tests of contrastive training, a step, and the one process with the whole batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from onefold.contrastive import GradCache
from tests.harness import RankContext
from tests.rig import start

ROWS = (5, 3, 4, 6)
"""Of each rank."""


class Tower(nn.Module):
    """``[B, T]`` numbers and their mask -> ``[B, 6]``."""

    def __init__(self, seed: int, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        weights = (attention_mask / attention_mask.sum(dim=1, keepdim=True))[..., None]
        hidden = (self.embed(tokens) * weights.to(self.embed.weight.dtype)).sum(dim=1)
        for layer in self.layers:
            hidden = hidden + self.dropout(torch.tanh(layer(hidden)))
        return self.norm(hidden)


class TwoTowers(nn.Module):
    """Queries and documents, and whatever the loss trains."""

    def __init__(self, loss: nn.Module | None = None, **settings: Any) -> None:
        super().__init__()
        self.query = Tower(1, **settings)
        self.document = Tower(2, **settings)
        self.loss = loss

    def encode_query(self, chunk: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.query(**chunk)
        return found

    def encode_document(self, chunk: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.document(**chunk)
        return found


def batch_of(ctx: RankContext, rank: int, key: int = 0) -> list[dict[str, Tensor]]:
    """Two columns of one rank, with rows of 1 to 4 tokens."""
    columns = []
    for column in range(2):
        numbers = ctx.data(ROWS[rank], 5, key=2 * key + column, rank=rank, dtype=torch.float64)
        lengths = (numbers[:, 4:].abs() * 91).long() % 4 + 1
        mask = (torch.arange(4) < lengths).long()
        columns.append({"tokens": (numbers[:, :4].abs() * 97).long() % 13, "attention_mask": mask})
    return columns


def whole_batch(ctx: RankContext, key: int = 0) -> list[dict[str, Tensor]]:
    """The columns of all ranks."""
    parts = [batch_of(ctx, rank, key) for rank in range(ctx.world_size)]
    return [
        {name: torch.cat([part[column][name] for part in parts]) for name in parts[0][column]}
        for column in range(2)
    ]


def reference(
    ctx: RankContext, model: TwoTowers, loss: Callable[..., Tensor], keys: Sequence[int] = (0,)
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process: no ranks, no chunks, no engine."""
    total = torch.zeros((), dtype=torch.float64)
    for key in keys:
        queries, documents = whole_batch(ctx, key)
        total = total + loss(model.encode_query(queries), model.encode_document(documents))
    total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(total), grads


def plain(queries: Tensor, documents: Tensor) -> Tensor:
    """A loss that knows nothing of ranks."""
    logits = queries @ documents.T
    return nn.functional.cross_entropy(logits, torch.arange(len(logits))) + queries.square().mean()


def cached(
    ctx: RankContext, stage: int, loss: Any, model: TwoTowers, **settings: Any
) -> tuple[onefold.Engine, GradCache]:
    config = settings.pop("config", {})
    engine = start(ctx, model, stage, config=config, zero={"reduce_bucket_size": 50})
    encoders = settings.pop("encoders", [model.query, model.document])
    return engine, GradCache(engine, loss, encoders=encoders, **settings)


def assert_is(engine: onefold.Engine, wanted: dict[str, Tensor], tolerance: float) -> None:
    engine.reduce_gradients()
    seen = 0
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        grad = engine.full_grad(param)
        if name not in wanted:
            assert grad is None or not grad.any(), name
            continue
        assert grad is not None, name
        seen += 1
        error = (grad - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error <= tolerance, (name, float(error))
    assert seen == len(wanted) > 4
