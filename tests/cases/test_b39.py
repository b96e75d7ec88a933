"""B39: ranks use different parameters in one step, their collectives no longer match, and the job
hangs or dies.

Inside windows and no_sync (and outside them where a backward sends nothing) ranks agree at the
flush on what is pending anywhere; absent gradients count as zero.
"""

from functools import partial
from typing import Any

import pytest
import torch

import onefold
from tests import rig
from tests.cases.modes import (
    SCOPES,
    TINY,
    Pairs,
    Rooms,
    Shadow,
    assert_traffic,
    assert_weights,
    during,
    num_units,
    run,
    traffic,
)
from tests.harness import RankContext, distributed

# Rooms that each rank uses in each backward; the last of the four rooms is used by nobody, and a
# third rank runs no backward at all.
USES: list[list[list[int]]] = [[[0, 1], [1]], [[2], [1, 2], [2]], []]


def modes(stage: int) -> list[str]:
    """Where ranks may differ: in scopes, and bare where a backward sends nothing."""
    return SCOPES if stage >= 2 else [*SCOPES, "bare"]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.125, weight_decay=0.25)


def averages(world_size: int) -> list[float | None]:
    """By room; None for what nobody used."""
    sums: list[float | None] = [None] * 4
    for rank in range(world_size):
        for k, use in enumerate(USES[rank]):
            for room in use:
                sums[room] = (sums[room] or 0.0) + (room + 1) * rig.x_of(rank, k)
    return [None if total is None else total / world_size for total in sums]


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=[2, 3])
def test_ranks_use_different_submodules(ctx: RankContext, stage: int) -> None:
    """Also in different numbers of backwards, and in another order."""
    model = Rooms(3, 17, 1, 5)
    shadow = Shadow(model, adam)
    engine = rig.start(ctx, model, stage, zero=TINY, optimizer=adam)
    assert num_units(engine) == 4
    for mode in modes(stage):
        with during(mode):
            mark = engine.ledger.mark()
            uses = USES[ctx.rank]
            losses = [partial(engine, rig.x_of(ctx.rank, k), use) for k, use in enumerate(uses)]
            run(engine, mode, losses)
            engine.step()
            assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=3, gathers=4))
            means = averages(ctx.world_size)
            shadow.step({f"rooms.{room}.w": mean for room, mean in enumerate(means)})
            assert_weights(engine, shadow.weights())


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_ranks_use_different_halves_of_a_unit(ctx: RankContext, stage: int) -> None:
    """An extra branch on rank 0 only, in the same units."""
    model = Pairs()
    shadow = Shadow(model, adam)
    engine = rig.start(ctx, model, stage, zero={"reduce_bucket_size": 8}, optimizer=adam)
    assert num_units(engine) == 4
    halves = {f"pairs.{pair}.v": 2 * rig.expected(2, [[0, 1], []]) for pair in range(4)}
    for mode in modes(stage):
        with during(mode):
            mark = engine.ledger.mark()
            use_v = ctx.rank == 0
            run(engine, mode, [partial(engine, rig.x_of(ctx.rank, k), use_v) for k in range(2)])
            engine.step()
            assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=4, gathers=4))
            shadow.step({name: halves.get(name, 13.0) for name in shadow.params})
            assert_weights(engine, shadow.weights())


@distributed(world_size=2, timeout_s=15)
def test_bare_backwards_that_differ_are_reported(ctx: RankContext) -> None:
    """Stage 2 outside a window: not supported, and said on both ranks instead of a wrong sum."""
    engine = rig.start(ctx, Rooms(3, 17), 2, zero=TINY)
    engine.backward(engine(rig.x_of(ctx.rank, 0), [ctx.rank]))
    with pytest.raises(onefold.RankMismatchError, match="coalesce_grad_reduction"):
        engine.step()
