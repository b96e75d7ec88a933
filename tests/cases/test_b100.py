"""B100. Deferral that needs more memory than it says: the peak is one full gradient, its shard and
what is on the wire, for 2 backwards and for 8 alike, and nothing is held between steps.
"""

import pytest
import torch
from torch import Tensor, nn

from onefold.grad.reduce import MAX_IN_FLIGHT
from tests.cases.wire_formula import MODES, assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import (
    STAGES,
    assert_ranks_equal,
    counts,
    expected,
    start,
    weights,
    x_of,
)

NUM, NUMEL = 8, 256  # equal parameters, one unit each
BYTES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w.sum() * x.detach()


class Stack(nn.Module):
    """The gradient of every element is x."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM))

    def forward(self, x: float) -> Tensor:
        start_of = torch.tensor(x, requires_grad=True)
        hidden = start_of * 1.0
        return sum((block(hidden) - hidden for block in self.blocks), torch.zeros(()))


def _peak(ctx: RankContext, stage: int, mode: str, backwards: int) -> int:
    """Bytes of full-size buffers at the worst moment of two steps."""
    engine = start(ctx, Stack(), stage, zero={"reduce_bucket_size": NUMEL})
    assert len(engine.plan.units) == NUM
    arena = engine._transaction._arena
    for steps in range(1, 3):
        mark = engine.ledger.mark()
        with scope(engine, mode, backwards):
            for k in range(backwards):
                engine.backward(engine(x_of(ctx.rank, k)))
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, mode, backwards=backwards))
        assert arena.leased_bytes == 0, "something is held between steps"
        for name, w in weights(engine).items():
            wanted = -steps * expected(ctx.world_size, backwards)
            assert torch.equal(w, torch.full_like(w, wanted)), name
    assert_ranks_equal(engine)
    return arena.peak_bytes


def _most(ctx: RankContext, stage: int, mode: str) -> int:
    """The promise, in bytes."""
    full = NUM * NUMEL * BYTES
    shard = full if stage == 0 else full // ctx.world_size
    # On the wire: N sent, S received into, and at most N of receive buffers.
    flight = (MAX_IN_FLIGHT + 1) * (NUMEL + NUMEL // ctx.world_size + NUMEL) * BYTES
    if mode == "bare" and stage >= 2:
        return shard + flight + NUMEL * BYTES
    return full + (0 if stage == 0 else shard) + flight


@distributed()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_peak_does_not_grow_with_backwards(ctx: RankContext, stage: int, mode: str) -> None:
    few, many = (_peak(ctx, stage, mode, backwards) for backwards in (2, 8))
    assert few == many, f"peak of {few} bytes with 2 backwards, {many} with 8"
    most = _most(ctx, stage, mode)
    assert few <= most, f"peak of {few} bytes, by the formula at most {most}"


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_window_says_it_holds(ctx: RankContext, stage: int) -> None:
    """All gradients, and all parameters where those are freed outside."""
    engine = start(ctx, Stack(), stage, zero={"reduce_bucket_size": NUMEL})
    with engine.coalesce_grad_reduction() as window:
        for k in range(3):
            engine.backward(engine(x_of(ctx.rank, k)))
        gradients = sum(p.grad.numel() for p in engine.module.parameters() if p.grad is not None)
        assert gradients == NUM * NUMEL
    gathered = NUM * NUMEL * BYTES if stage == 3 else 0
    assert window.bytes_held == NUM * NUMEL * BYTES + gathered
    if stage == 3:
        held = sum(p.untyped_storage().nbytes() for p in engine.module.parameters())
        assert held == NUM * BYTES, "parameters stay full after the window"
    engine.step()
    assert_ranks_equal(engine)
