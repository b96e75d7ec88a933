"""B91. The engine's optimizer is not a torch optimizer, so schedulers and scalers refuse it or step
around it: it must be one, of the user's own class, and do the engine's work when they step it.
"""

from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import onefold
from onefold import StateError
from tests.cases.wire_formula import assert_wire, run_house, wire
from tests.harness import RankContext, distributed
from tests.rig import (
    STAGES,
    House,
    assert_change,
    assert_ranks_equal,
    counts,
    expected,
    start,
    weights,
    x_of,
)


def _momentum(params: object) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=1.0, momentum=0.9)  # type: ignore[arg-type]


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_the_users_optimizer(ctx: RankContext, stage: int) -> None:
    model = House()
    mine = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, optimizer, _, _ = onefold.initialize(
        model=model, optimizer=mine, config={"zero_optimization": {"stage": stage}}
    )
    ctx.cleanup(engine.destroy)
    assert optimizer is mine
    assert optimizer is engine.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, torch.optim.SGD)
    with pytest.raises(StateError, match="save_checkpoint"):
        optimizer.state_dict()
    mark = engine.ledger.mark()
    run_house(ctx, engine, "window", 2)
    optimizer.step()
    assert_wire(counts(engine, mark), wire(engine, "window"))
    assert_change(engine, expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


def _halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.5**step)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_lambda_lr(ctx: RankContext, stage: int) -> None:
    """Powers of two: steps of 13, 6.5 and 3.25 are exact."""
    engine = start(ctx, House(), stage)
    scheduler = _halving(engine.optimizer)
    moved = 0.0
    for step in range(3):
        mark = engine.ledger.mark()
        run_house(ctx, engine, "window", 2)
        engine.step()
        scheduler.step()
        assert_wire(counts(engine, mark), wire(engine, "window"))
        moved += expected(ctx.world_size, 2) * 0.5**step
        assert_change(engine, moved)
    assert scheduler.get_last_lr() == [0.125]
    assert_ranks_equal(engine)


def _one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=5)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_one_cycle_with_momentum(ctx: RankContext, stage: int) -> None:
    """Against torch alone, fed the averaged gradient: elementwise, so the bits are equal."""
    alone = House()
    optimizer = _momentum(alone.parameters())
    reference = _one_cycle(optimizer)
    engine = start(ctx, House(), stage, optimizer=_momentum)
    scheduler = _one_cycle(engine.optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        alone(expected(ctx.world_size, 2)).backward()
        optimizer.step()
        reference.step()
        run_house(ctx, engine, "bare", 2)
        engine.step()
        scheduler.step()
        assert scheduler.get_last_lr() == reference.get_last_lr()
    assert torch.equal(weights(engine)["w"], alone.w.detach())
    assert_ranks_equal(engine)


def _scaled_step(
    ctx: RankContext,
    engine: onefold.Engine,
    scaler: torch.amp.GradScaler,
    poison: Callable[[int], float],
) -> None:
    with engine.coalesce_grad_reduction():
        for k in range(2):
            loss = engine(x_of(ctx.rank, k)) * poison(k)
            engine.backward(scaler.scale(loss))
    engine.reduce_gradients()
    scaler.unscale_(engine.optimizer)
    scaler.step(engine.optimizer)
    scaler.update()
    engine.zero_grad()


@distributed(world_size=[2, 3])
@pytest.mark.parametrize(
    ("numel", "bad"),
    [(96, float("inf")), (96, float("nan")), (1, float("inf"))],
    ids=["inf", "nan", "fewer elements than ranks"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_grad_scaler(ctx: RankContext, stage: int, numel: int, bad: float) -> None:
    """Good, bad on the last rank only, good: all ranks skip the second step and halve the scale."""
    engine = start(ctx, House(numel), stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    once = expected(ctx.world_size, 2)
    mark = engine.ledger.mark()
    _scaled_step(ctx, engine, scaler, lambda _k: 1.0)
    assert_wire(counts(engine, mark), wire(engine, "window"))
    assert_change(engine, once)
    assert engine.get_global_grad_norm() is not None

    is_last = ctx.rank == ctx.world_size - 1
    _scaled_step(ctx, engine, scaler, lambda k: bad if is_last and k == 0 else 1.0)
    assert_change(engine, once)
    assert_ranks_equal(engine)
    assert engine.global_steps == 1
    assert scaler.get_scale() == 512.0

    _scaled_step(ctx, engine, scaler, lambda _k: 1.0)
    assert_change(engine, 2 * once)
    assert_ranks_equal(engine)
    assert engine.global_steps == 2
