"""B34: frozen parameters are missing from the saved state, are reduced, or cost memory.

They are in ``full_state_dict`` at every stage, and have no gradient buffer, no optimizer entry and
no part in any reduction.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests import rig
from tests.cases.modes import (
    TINY,
    Room,
    Rooms,
    Shadow,
    assert_reductions,
    assert_traffic,
    assert_weights,
    house,
    num_units,
    run,
    traffic,
    usual,
)
from tests.harness import RankContext, distributed


class Adapter(nn.Module):
    """A frozen block, a trainable one, and one that has both; ``how`` says why it is frozen."""

    def __init__(self, rank: int, requires_grad: bool) -> None:
        super().__init__()
        self.base = nn.ModuleList([Room(5, 2.0 + rank), Room(17)])
        self.bias = Room(3, 4.0 + rank)
        self.both = nn.ModuleList([_Both(rank)])
        for param in self.frozen():
            param.requires_grad_(requires_grad)

    def frozen(self) -> list[nn.Parameter]:
        both = self.both[0]
        assert isinstance(both, _Both)
        return [self.base[0].w, self.bias.w, both.frozen]  # type: ignore[list-item]

    def trainable(self) -> list[nn.Parameter]:
        both = self.both[0]
        assert isinstance(both, _Both)
        return [self.base[1].w, both.w]  # type: ignore[list-item]

    def forward(self, x: float) -> Tensor:
        through = self.base[0](x).sum() + self.base[1](x).sum()
        return through + self.bias(x).sum() + self.both[0](x)


class _Both(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((4,), 6.0 + rank))
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, x: float) -> Tensor:
        return (self.w * x + self.frozen * x).sum()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.125, weight_decay=0.25)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "armed"])
@pytest.mark.parametrize("how", ["requires_grad", "no_group"])
@distributed(world_size=2)
def test_frozen_parameters(ctx: RankContext, stage: int, mode: str, how: str) -> None:
    """Not trained, but saved; the values are those of rank 0, which started with others."""
    model = Adapter(ctx.rank, requires_grad=how == "no_group")
    shadow = Shadow(Adapter(0, requires_grad=False), adam)
    engine = rig.start(
        ctx, model, stage, zero=TINY, optimizer=adam, model_parameters=model.trainable()
    )
    assert num_units(engine) == 2
    assert num_units(engine, trainable=False) == 5
    for _ in range(2):
        mark = engine.ledger.mark()
        run(engine, mode, house(engine, ctx.rank, range(2)))
        assert_no_memory(engine)
        engine.step()
        wanted = usual(ctx, engine, stage, mode, 2)
        if stage == 3 and mode == "bare" and how == "requires_grad":
            wanted["all_gather"] -= 2  # nothing goes back through the frozen block of its own
        assert_traffic(engine, mark, wanted)
        moved = {"base.1.w": 13.0, "both.0.w": 13.0}
        shadow.step({name: moved.get(name) for name in shadow.params})
        assert_weights(engine, shadow.weights())
        assert all(param.grad is None for param in model.frozen())
    pieces = [p for group in engine.optimizer.param_groups for p in group["params"]]
    assert len(pieces) == 2
    assert set(map(id, engine.optimizer.state)) <= set(map(id, pieces))
    for param in model.frozen():
        with pytest.raises(ValueError, match="trainable"):
            engine.full_grad(param)


def assert_no_memory(engine: onefold.Engine) -> None:
    """No frozen unit has a gradient buffer, while gradients are pending or reduced."""
    for unit in engine._units:
        if not unit.spec.is_trainable:
            assert unit.gradients.grad_full is None, unit.name
            assert unit.gradients.grad_shard is None, unit.name


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_everything_frozen_but_one_element(ctx: RankContext, stage: int) -> None:
    """What is sent is one unit's: S is 16 elements, however large the frozen part is."""
    model = Rooms(1000, 1)
    model.rooms[0].w.requires_grad_(False)
    engine = rig.start(ctx, model, stage)
    mark = engine.ledger.mark()
    run(engine, "window", house(engine, ctx.rank, range(2)))
    engine.step()
    changes = engine.ledger.since(mark)
    sent = changes["all_reduce" if stage == 0 else "reduce_scatter"]
    assert (sent.count, sent.bytes_out) == (1, 16 * 4)  # 2 (R-1)/R S, or (W-1) S; both 2 ranks
    assert_weights(engine, {"rooms.0.w": torch.zeros(1000), "rooms.1.w": torch.full((1,), -26.0)})


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_frozen_for_one_step(ctx: RankContext, stage: int, mode: str) -> None:
    """requires_grad may be switched at any time; while it is off weight and moments rest."""
    model = Rooms(3, 17)
    shadow = Shadow(model, adam)
    engine = rig.start(ctx, model, stage, zero=TINY, optimizer=adam)
    for is_on in (True, False, True):
        model.rooms[0].w.requires_grad_(is_on)
        mark = engine.ledger.mark()
        run(engine, mode, house(engine, ctx.rank, range(2)))
        engine.step()
        if is_on:
            assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
        elif mode == "bare":  # two backwards through one unit, and two forwards through the other
            times = 2 if stage >= 2 else 1
            assert_reductions(ctx, engine, stage, mark, reductions=times, gathers=2 * 2 + 2)
        else:
            assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=1, gathers=2))
        shadow.step({"rooms.0.w": 13.0 if is_on else None, "rooms.1.w": 26.0})
        assert_weights(engine, shadow.weights())
