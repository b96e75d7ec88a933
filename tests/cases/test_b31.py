"""B31: a parameter has fewer elements than there are ranks, some ranks hold none of it, and a
multi-tensor optimizer fails on empty tensors or on a gradient that is not there.

Parameters of 1, 2 and 3 elements on 4 ranks train as whole ones do, bit for bit.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import rig
from tests.cases.modes import (
    MODES,
    TINY,
    Rooms,
    Shadow,
    assert_traffic,
    assert_weights,
    house,
    num_units,
    run,
    usual,
)
from tests.harness import RankContext, distributed

BY_NAME: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25},
    "Adam": {"lr": 0.125, "weight_decay": 0.25},
    "AdamW": {"lr": 0.125, "weight_decay": 0.25},
}


def maker(name: str, kind: str) -> Callable[[Any], torch.optim.Optimizer]:
    """The torch optimizer class with one of its multi-tensor implementations."""
    return lambda params: getattr(torch.optim, name)(params, **BY_NAME[name], **{kind: True})


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("name", list(BY_NAME))
@pytest.mark.parametrize("kind", ["foreach", "fused"])
@distributed(world_size=4)
def test_one_two_three_elements_on_four_ranks(
    ctx: RankContext, stage: int, name: str, kind: str
) -> None:
    make = maker(name, kind)
    model = Rooms(1, 2, 3)
    shadow = Shadow(model, make)
    engine = rig.start(ctx, model, stage, zero=TINY, optimizer=make)
    assert num_units(engine) == 3
    for mode in MODES:
        mark = engine.ledger.mark()
        run(engine, mode, house(engine, ctx.rank, range(2)))
        engine.step()
        assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
        gradient = rig.expected(ctx.world_size, 2)
        shadow.step({f"rooms.{i}.w": (i + 1) * gradient for i in range(3)})
        assert_weights(engine, shadow.weights())


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("kind", ["foreach", "fused"])
@distributed(world_size=4)
def test_all_of_them_on_one_rank(ctx: RankContext, stage: int, kind: str) -> None:
    """One bucket: 64-byte alignment puts each small parameter whole on one rank, none on others."""
    make = maker("AdamW", kind)
    model = Rooms(1, 3)
    shadow = Shadow(model, make)
    engine = rig.start(ctx, model, stage, optimizer=make)
    held = [p.numel() for group in engine.optimizer.param_groups for p in group["params"]]
    everywhere = rig.gathered(held)
    totals = [sum(rank[i] for rank in everywhere) for i in range(2)]
    assert totals == ([4, 12] if stage == 0 else [1, 3])
    assert stage == 0 or any(0 in rank for rank in everywhere)
    for _ in range(2):
        mark = engine.ledger.mark()
        run(engine, "window", house(engine, ctx.rank, range(2)))
        engine.step()
        assert_traffic(engine, mark, usual(ctx, engine, stage, "window", 2))
        gradient = rig.expected(ctx.world_size, 2)
        shadow.step({"rooms.0.w": gradient, "rooms.1.w": 2 * gradient})
        assert_weights(engine, shadow.weights())
