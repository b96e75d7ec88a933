"""B37: a parameter is frozen for a step by clearing its gradient, and a sharded optimizer updates
it all the same: weight decay, moments and step count move where torch would leave them.

``.grad = None`` before the step, whether the gradient is still pending or was already reduced,
leaves weight and state of that parameter untouched.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onefold
from tests import rig
from tests.cases.modes import (
    TINY,
    Rooms,
    Shadow,
    assert_num_reductions,
    assert_rooms,
    assert_traffic,
    assert_weights,
    during,
    house,
    run,
    scope,
    traffic,
    usual,
)
from tests.harness import RankContext, distributed

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.125, weight_decay=0.25),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.125, weight_decay=0.25),
}
# Which scope the backwards run in, and where the user clears the gradient. At stages 2-3 it was
# reduced already after a window or a bare backward; after reduce_gradients() it was at every stage.
PLACES = [
    ("bare", "after"),
    ("bare", "reduced"),
    ("window", "inside"),
    ("window", "after"),
    ("armed", "after"),
    ("no_sync", "inside"),
    ("no_sync", "after"),
    ("no_sync", "reduced"),
]


def state_of(engine: onefold.Engine, index: int) -> dict[str, Tensor]:
    """Copies of this rank's piece of parameter ``index`` and of its optimizer state."""
    piece = engine.optimizer.param_groups[0]["params"][index]
    state = {key: value.clone() for key, value in engine.optimizer.state[piece].items()}
    return {"piece": piece.detach().clone(), **state}


def clear(engine: onefold.Engine) -> None:
    engine.module.get_parameter("rooms.0.w").grad = None


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("name", list(MAKERS))
@distributed(world_size=2)
def test_a_cleared_gradient_leaves_everything_alone(
    ctx: RankContext, stage: int, name: str
) -> None:
    model = Rooms(3, 17)
    shadow = Shadow(model, MAKERS[name])
    engine = rig.start(ctx, model, stage, zero=TINY, optimizer=MAKERS[name])
    for mode, where in PLACES:
        with during(mode, where):
            mark = engine.ledger.mark()
            run(engine, mode, house(engine, ctx.rank, range(2)))
            engine.step()
            assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
            shadow.step({"rooms.0.w": 13.0, "rooms.1.w": 26.0})
            assert_weights(engine, shadow.weights())

            before = state_of(engine, 0)
            # the piece, two moments and the step count; a rank that holds no element has no state
            assert len(before) == (4 if before["piece"].numel() else 1)
            backwards_and_clear(ctx, engine, mode, where)
            engine.step()
            shadow.step({"rooms.0.w": None, "rooms.1.w": 26.0})
            assert_weights(engine, shadow.weights())
            after = state_of(engine, 0)
            assert before.keys() == after.keys()
            for key, value in before.items():
                assert torch.equal(value, after[key]), f"{key} moved"


def backwards_and_clear(ctx: RankContext, engine: onefold.Engine, mode: str, where: str) -> None:
    with scope(engine, mode, 2):
        for k in range(2):
            engine.backward(engine(rig.x_of(ctx.rank, k)))
        if where == "inside":
            clear(engine)
    if where == "reduced":
        engine.reduce_gradients()
    if where != "inside":
        clear(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_what_comes_after_the_clearing_counts(ctx: RankContext, stage: int) -> None:
    """Backward 0, clear, backward 1: the cleared parameter has backward 1 only, 7 instead of 13."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    cases = itertools.product(["bare", "window", "no_sync"], [False, True])
    for steps, (mode, reduces) in enumerate(cases, start=1):
        with during(mode, reduces):
            mark = engine.ledger.mark()
            run(engine, mode, house(engine, ctx.rank, [0]))
            if reduces:
                engine.reduce_gradients()
            clear(engine)
            run(engine, mode, house(engine, ctx.rank, [1]))
            engine.step()
            is_twice = reduces or (stage >= 2 and mode != "no_sync")
            assert_num_reductions(engine, stage, mark, 4 if is_twice else 2)
            assert_rooms(engine, [steps * 7.0, steps * 26.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["window", "no_sync"])
@distributed(world_size=2)
def test_pending_and_cleared_on_one_rank_only(ctx: RankContext, stage: int, mode: str) -> None:
    """Nothing of it was reduced yet, so this rank's share is absent and counts as zero."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    mark = engine.ledger.mark()
    with scope(engine, mode, 2):
        for k in range(2):
            engine.backward(engine(rig.x_of(ctx.rank, k)))
        if ctx.rank == 0:
            clear(engine)
    engine.step()
    assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=2, gathers=2))
    assert_rooms(engine, [rig.expected(2, [[], [0, 1]]), 26.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_reduced_and_cleared_on_one_rank_only(ctx: RankContext, stage: int) -> None:
    """That rank's part cannot be taken out of the sum any more: refused, on both ranks."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    run(engine, "window", house(engine, ctx.rank, range(2)))
    engine.reduce_gradients()
    if ctx.rank == 0:
        clear(engine)
    with pytest.raises(onefold.RankMismatchError, match="dropped"):
        engine.step()
    assert_rooms(engine, [0.0, 0.0])
