"""B22: the context is silently a no-op for some wrapper: the value is right, and everything is sent
once per backward.

What is counted is collectives: a scope of an engine is never without effect, an engine's scope says
nothing about another engine, and what is no module is refused on every rank.
"""

from contextlib import ExitStack
from typing import Any

import pytest
from torch import nn

import onefold
from tests import rig
from tests.cases.modes import (
    MODES,
    SCOPES,
    TINY,
    Rooms,
    assert_rooms,
    assert_traffic,
    num_units,
    scope,
    usual,
)
from tests.harness import RankContext, distributed


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@distributed(world_size=2)
def test_a_scope_saves_what_it_says(ctx: RankContext, stage: int, mode: str) -> None:
    """Bare is the control: there the same loop does reduce n times where gradients are Shard."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    total = 0.0
    for backwards in (3, 5, 7):
        mark = engine.ledger.mark()
        with scope(engine, mode, backwards):
            for k in range(backwards):
                engine.backward(engine(rig.x_of(ctx.rank, k)))
        engine.step()
        wanted = usual(ctx, engine, stage, mode, backwards)
        kind = "all_reduce" if stage == 0 else "reduce_scatter"
        times = backwards if mode == "bare" and stage >= 2 else 1
        assert wanted[kind] == times * num_units(engine)
        assert_traffic(engine, mark, wanted)
        total += rig.expected(ctx.world_size, backwards)
        assert_rooms(engine, [total, 2 * total])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=2)
def test_a_list_of_two(ctx: RankContext, stage: int, mode: str) -> None:
    """A scope of the first alone leaves the second bare; a scope of each defers both."""
    engines = [rig.start(ctx, Rooms(3, 17), stage, zero=TINY) for _ in range(2)]
    for is_both, modes in ((False, [mode, "bare"]), (True, [mode, mode])):
        marks = [engine.ledger.mark() for engine in engines]
        with ExitStack() as stack:
            for engine, own in zip(engines, modes, strict=True):
                stack.enter_context(scope(engine, own, 3))
            for k in range(3):
                for engine in engines:
                    engine.backward(engine(rig.x_of(ctx.rank, k)))
        for engine, mark, own in zip(engines, marks, modes, strict=True):
            engine.step()
            assert_traffic(engine, mark, usual(ctx, engine, stage, own, 3))
            gradient = (1 + is_both) * rig.expected(ctx.world_size, 3)
            assert_rooms(engine, [gradient, 2 * gradient])


@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
@pytest.mark.parametrize("kind", ["list", "engine"])
@distributed(world_size=2, timeout_s=20)
def test_what_is_no_module_is_refused(ctx: RankContext, kind: str, where: str) -> None:
    """A list of modules, or an engine, as the model; also when only one rank passes it."""
    module = Rooms(3, 17)
    model: Any = module
    if where == "everywhere" or ctx.rank == 1:
        other = rig.House() if kind == "list" else Rooms(3, 17)
        model = [module, other] if kind == "list" else _Engine(module)
    with pytest.raises((ValueError, onefold.RankMismatchError), match="model"):
        rig.start(ctx, model, 2)


class _Engine:
    """What an engine looks like from outside: not a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
