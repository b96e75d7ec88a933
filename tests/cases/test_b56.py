"""B56. A loss object that was built with the bare model, before the engine existed, keeps calling
that model; its gradients must be reduced like the engine's own.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.cases.wire_formula import MODES, assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import (
    STAGES,
    House,
    assert_change,
    assert_ranks_equal,
    counts,
    expected,
    start,
    x_of,
)


class Loss(nn.Module):
    """As contrastive losses are written: the model is an attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: float) -> Tensor:
        return self.model(x)


def _stale(model: nn.Module) -> list[Callable[[float], Tensor]]:
    """What holds the model from before ``initialize``."""
    return [
        Loss(model),
        Loss(Loss(model)),
        functools.partial(nn.Module.__call__, model),
        model.forward,
    ]


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stale_reference_is_reduced(ctx: RankContext, stage: int, mode: str) -> None:
    model = House()
    losses = _stale(model)
    engine = start(ctx, model, stage)
    steps = 0
    for loss in losses:
        if loss is losses[-1] and stage == 3 and mode == "bare":
            continue  # forward() without __call__ bypasses every hook of torch
        steps += 1
        mark = engine.ledger.mark()
        with scope(engine, mode, 2):
            for k in range(2):
                loss(x_of(ctx.rank, k)).backward()
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, mode, backwards=2))
        assert_change(engine, steps * expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_engine_and_stale_reference_in_one_step(ctx: RankContext, stage: int) -> None:
    model = House()
    loss = Loss(model)
    engine = start(ctx, model, stage)
    assert engine.module is model
    for steps, mode in enumerate(MODES, start=1):
        mark = engine.ledger.mark()
        with scope(engine, mode, 2):
            engine.backward(loss(x_of(ctx.rank, 0)))
            engine.backward(engine(x_of(ctx.rank, 1)))
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, mode, backwards=2))
        assert_change(engine, steps * expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


@distributed()
def test_weights_live_in_the_users_own_parameter(ctx: RankContext) -> None:
    """The loss's model and the engine's read the same memory, so neither can be stale."""
    model = House()
    parameter = model.w
    engine = start(ctx, model, 2)
    assert engine.module.w is parameter
    engine.backward(Loss(model)(x_of(ctx.rank, 0)))
    engine.step()
    assert torch.equal(parameter.detach(), torch.full((7,), -expected(2, 1)))
    assert_ranks_equal(engine)
