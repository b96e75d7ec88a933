"""B38: a whole submodule goes unused for a step, and the engine crashes, waits, or steps it with
the gradient of an earlier step.

The rule: a parameter that no rank touched since the last step is left alone, as torch leaves one
without a gradient (no decay, no moments); nothing is stale when it is used again.
"""

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from tests import rig
from tests.cases.modes import (
    MODES,
    TINY,
    Pairs,
    Rooms,
    Shadow,
    assert_reductions,
    assert_traffic,
    assert_weights,
    during,
    num_units,
    run,
    traffic,
)
from tests.harness import RankContext, distributed

USES = ([0, 1, 2], [0, 2], [1], [0, 1, 2])


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.125, weight_decay=0.25)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=[2, 3])
def test_unused_submodules(ctx: RankContext, stage: int) -> None:
    model = Rooms(3, 17, 1)
    shadow = Shadow(model, adam)
    engine = rig.start(ctx, model, stage, zero=TINY, optimizer=adam)
    gradient = rig.expected(ctx.world_size, 2)
    for mode, use in itertools.product(MODES, USES):
        with during(mode, use):
            mark = engine.ledger.mark()
            run(engine, mode, [partial(engine, rig.x_of(ctx.rank, k), use) for k in range(2)])
            engine.step()
            if mode == "bare":
                reductions = len(use) * (2 if stage >= 2 else 1)
                assert_reductions(ctx, engine, stage, mark, reductions, 2 * 2 * len(use))
            else:
                wanted = traffic(ctx, engine, stage, reductions=len(use), gathers=3)
                assert_traffic(engine, mark, wanted)
            used = {f"rooms.{room}.w": (room + 1) * gradient for room in use}
            shadow.step({name: used.get(name) for name in shadow.params})
            assert_weights(engine, shadow.weights())


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_unused_beside_used_in_one_unit(ctx: RankContext, stage: int, mode: str) -> None:
    """Half of every unit is unused: it is incomplete, so a bare backward leaves it to step()."""
    model = Pairs()
    shadow = Shadow(model, adam)
    engine = rig.start(ctx, model, stage, zero={"reduce_bucket_size": 8}, optimizer=adam)
    assert num_units(engine) == 4
    for use_v in (True, False, True):
        mark = engine.ledger.mark()
        run(engine, mode, [partial(engine, rig.x_of(ctx.rank, k), use_v) for k in range(2)])
        engine.step()
        times = 2 if mode == "bare" and stage >= 2 and use_v else 1
        gathers = 4 * (2 * 2 if mode == "bare" else 1)
        wanted = traffic(ctx, engine, stage, reductions=4 * times, gathers=gathers)
        assert_traffic(engine, mark, wanted)
        gradients: dict[str, float | None] = {}
        for index in range(4):
            gradients[f"pairs.{index}.w"] = 13.0
            gradients[f"pairs.{index}.v"] = 26.0 if use_v else None
        shadow.step(gradients)
        assert_weights(engine, shadow.weights())


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_a_step_without_any_backward(ctx: RankContext, stage: int) -> None:
    """Everything is unused: nothing is reduced, decayed or counted."""
    model = Rooms(3, 17, 1)
    shadow = Shadow(model, adam)
    engine = rig.start(ctx, model, stage, zero=TINY, optimizer=adam)
    run(engine, "bare", [partial(engine, rig.x_of(ctx.rank, k)) for k in range(2)])
    engine.step()
    shadow.step({f"rooms.{i}.w": (i + 1) * 13.0 for i in range(3)})
    mark = engine.ledger.mark()
    engine.step()
    with engine.coalesce_grad_reduction():
        pass
    engine.step()
    assert_traffic(
        engine,
        mark,
        {"all_gather": {1: 6, 2: 6, 3: 3}[stage]} if stage else {},  # two publishes; one window
    )
    assert_weights(engine, shadow.weights())
