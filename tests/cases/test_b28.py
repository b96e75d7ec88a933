"""B28: a parameter without elements at the end of a group is not found when its gradient comes.

It trains as the model without it does, wherever it stands: last, first, alone in its unit.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests import rig
from tests.cases.modes import (
    MODES,
    TINY,
    Reference,
    Rooms,
    assert_rooms,
    assert_traffic,
    assert_weights,
    house,
    num_units,
    run,
    usual,
)
from tests.harness import RankContext, distributed


class Report(nn.Module):
    """The report's shape: a linear layer, and one without outputs last."""

    def __init__(self) -> None:
        super().__init__()
        self.full = nn.Linear(4, 4)
        self.empty = nn.Linear(4, 0)
        with torch.no_grad():
            for index, param in enumerate(self.full.parameters()):
                param.copy_(torch.arange(float(param.numel())).view_as(param) % 3 + index)

    def forward(self, x: Tensor) -> Tensor:
        return self.full(x).sum() + 0 * self.empty(x).sum()


def loss_of(module: nn.Module, rank: int, k: int) -> Tensor:
    loss: Tensor = module(torch.arange(8.0).view(2, 4) + rig.x_of(rank, k))
    return loss


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=[1, 2])
def test_a_layer_without_outputs(ctx: RankContext, stage: int, mode: str) -> None:
    reference = Reference(Report(), ctx.world_size)
    reference.backward(loss_of, 2)
    engine = rig.start(ctx, Report(), stage)
    mark = engine.ledger.mark()
    run(engine, mode, [partial(loss_of, engine.module, ctx.rank, k) for k in range(2)])
    engine.reduce_gradients()
    empty = engine.full_grad(engine.module.get_parameter("empty.weight"))
    assert empty is not None
    assert empty.shape == (0, 4)
    reading = {} if stage == 0 or ctx.world_size == 1 else {"all_gather": 1}
    engine.step()
    wanted = usual(ctx, engine, stage, mode, 2)
    for kind, count in reading.items():
        wanted[kind] = wanted.get(kind, 0) + count
    assert_traffic(engine, mark, wanted)
    assert_weights(engine, reference.after_sgd())


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("numels", [(5, 0), (4, 0, 5), (0,)], ids=str)
@distributed(world_size=[2, 4])
def test_a_unit_without_elements(ctx: RankContext, stage: int, numels: tuple[int, ...]) -> None:
    """Alone in its unit, at every place, in every way; the empty unit takes part like any other."""
    engine = rig.start(ctx, Rooms(*numels), stage, zero=TINY)
    total = 0.0
    for mode in MODES:
        mark = engine.ledger.mark()
        run(engine, mode, house(engine, ctx.rank, range(2)))
        engine.step()
        assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
        total += rig.expected(ctx.world_size, 2)
        assert_rooms(engine, [total * (index + 1) for index in range(len(numels))])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("numels", [(5, 0), (0, 5)], ids=str)
@distributed(world_size=2)
def test_without_its_use(ctx: RankContext, stage: int, numels: tuple[int, ...]) -> None:
    """The empty one is in no backward: the others do not wait for it."""
    engine = rig.start(ctx, Rooms(*numels), stage, zero=TINY)
    used = numels.index(5)
    assert num_units(engine) == 2
    for mode in MODES:
        run(engine, mode, [lambda: engine(rig.x_of(ctx.rank, 0), [used])])
        engine.step()
    gradients = [0.0, 0.0]
    gradients[used] = 4 * 6.0 * (used + 1)
    assert_rooms(engine, gradients)
