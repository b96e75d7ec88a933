"""A backward that comes to freed parameters past the hooks raises; it reads no lost memory."""

import pytest
import torch
from torch import nn

from tests.harness import RankContext, distributed
from tests.rig import start


class Blocks(nn.Module):
    """Two blocks of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@distributed(world_size=[1, 2])
def test_a_graph_that_nobody_watches_raises(ctx: RankContext) -> None:
    """The graph of a pure function of the weights ends in no module's output."""
    engine = start(ctx, Blocks(), 3, config={"onefold": {"block_classes": ["Sequential"]}})
    x = ctx.data(4, 8).requires_grad_()
    with engine.coalesce_grad_reduction():
        engine.backward(engine(ctx.data(4, 8, key=1)).square().sum())
        weight = next(engine.module.parameters())
        unwatched = nn.functional.linear(x, weight).square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unwatched.backward()


@distributed(world_size=[1, 2])
def test_a_graph_survives_free_and_gather(ctx: RankContext) -> None:
    """Versions come back with the memory: forward in a window, backward after it."""
    engine = start(ctx, Blocks(), 3, config={"onefold": {"block_classes": ["Sequential"]}})
    x = ctx.data(4, 8).requires_grad_()
    with engine.coalesce_grad_reduction():
        loss = engine(x).square().sum()
    engine.backward(loss)
    assert x.grad is not None
    first = x.grad.clone()
    x.grad = None
    with engine.coalesce_grad_reduction():
        engine.backward(engine(x).square().sum())
    assert x.grad is not None
    assert torch.equal(x.grad, first)
