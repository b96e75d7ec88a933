"""B82: one reduction of everything that a window has kept needs as much again in one piece: two
vocabulary tables at once took 9.5 GiB.

A flush goes unit by unit. No collective is larger than the bucket (or one parameter that is larger
itself) at stages 0-2, or than one block at stage 3, and few are on the wire at once.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.grad.reduce import MAX_IN_FLIGHT
from tests import rig
from tests.cases.modes import SCOPES, assert_traffic, num_units, scope, usual
from tests.harness import CommLog, RankContext, distributed

WORDS, WIDTH, LAYERS = 24, 16, 6
TABLE, BUCKET = WORDS * WIDTH, 96
LINE, BYTES = 16, 4
"""Elements of 64 bytes, to which every parameter and shard is padded; bytes of an element."""


class Part(nn.Module):
    def __init__(self, *numels: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for numel in numels)

    def forward(self, x: float) -> Tensor:
        return torch.cat([part * x for part in self.parts]).sum()


class TwoTables(nn.Module):
    """Input and output tables around layers of several parameters; the gradient is x everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [Part(TABLE), *(Part(40, 40, 8) for _ in range(LAYERS)), Part(TABLE)]
        )

    def forward(self, x: float) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum()


def cap(stage: int, world_size: int) -> int:
    """The most elements of one reduction, padding included."""
    largest = [40, 40, 8] if stage == 3 else [BUCKET]
    one_table, several = TABLE, sum(math.ceil(numel / LINE) * LINE for numel in largest)
    step = LINE * world_size
    return math.ceil(max(one_table, several) / step) * step


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=[2, 3])
def test_no_collective_is_larger_than_its_cap(ctx: RankContext, stage: int, mode: str) -> None:
    """By the ledger and, through the backend's own collectives, by torch's record of them."""
    config = {"onefold": {"transport": "native"}}
    zero = {"reduce_bucket_size": BUCKET}
    engine = rig.start(ctx, TwoTables(), stage, zero=zero, config=config)
    mark, first = engine.ledger.mark(), len(engine.ledger.recent)
    with CommLog() as log:
        with scope(engine, mode, 3):
            for k in range(3):
                engine.backward(engine(rig.x_of(ctx.rank, k)))
        engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 3))
    most = cap(stage, ctx.world_size)
    assert most * BYTES < 2 * TABLE * BYTES, "two tables would fit under the cap"
    seen = [record for record in log.records if "reduce" in record.op]
    assert len(seen) >= num_units(engine)
    assert max(record.largest_bytes for record in seen) <= most * BYTES
    _assert_ledger(engine, first, stage, ctx.world_size)
    for name, tensor in rig.weights(engine).items():
        gradient = rig.expected(ctx.world_size, 3)
        assert torch.equal(tensor, torch.full_like(tensor, -gradient)), name


def _assert_ledger(engine: onefold.Engine, first: int, stage: int, world_size: int) -> None:
    kind = "all_reduce" if stage == 0 else "reduce_scatter"
    sent = [entry.bytes_out for entry in list(engine.ledger.recent)[first:] if entry.kind == kind]
    # of N elements a rank sends (W-1)/W in a reduce-scatter, twice that in an all-reduce
    share = (2 if stage == 0 else 1) * (world_size - 1) / world_size
    assert max(sent) <= cap(stage, world_size) * BYTES * share
    small = sum(bytes_out < TABLE * BYTES * share for bytes_out in sent)
    assert len(sent) - small == 2, "each table travels alone"


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_the_flush_is_pipelined(ctx: RankContext, stage: int) -> None:
    """Beside the gradients that the window holds, a flush needs what is on the wire: a few units'
    shards and what arrives for them, not a second copy of everything.
    """
    engine = rig.start(ctx, TwoTables(), stage, zero={"reduce_bucket_size": BUCKET})
    arena: Any = engine._transaction._arena
    with engine.coalesce_grad_reduction():
        engine.backward(engine(rig.x_of(ctx.rank, 0)))
        held = arena.leased_bytes
        assert held == sum(unit.layout.numel * BYTES for unit in engine.plan.units)
    engine.reduce_gradients()
    most = cap(stage, ctx.world_size) * BYTES
    # Per unit on the wire S and (W-1) S, at most N together; and the shards that are home, which
    # replace a gradient W times as large.
    assert arena.peak_bytes <= held + MAX_IN_FLIGHT * most
    assert arena.peak_bytes < 2 * held
    engine.step()
    assert arena.leased_bytes == 0
