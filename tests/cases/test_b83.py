"""B83. Ranks that run different numbers of backwards, down to none: inside a scope, and where a
bare backward reduces nothing, the sum is right and nothing hangs.
"""

import pytest

from tests.cases.wire_formula import SCOPES, assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import (
    STAGES,
    House,
    Tower,
    assert_change,
    assert_ranks_equal,
    counts,
    expected,
    start,
    x_of,
)

# How many backwards each rank runs, for two ranks and for three.
UNEVEN: dict[int, list[tuple[int, ...]]] = {
    2: [(3, 1), (1, 3), (0, 2), (4, 0)],
    3: [(3, 1, 0), (0, 1, 2)],
}


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("mode", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_uneven_backwards(ctx: RankContext, stage: int, mode: str) -> None:
    engine = start(ctx, House(), stage)
    moved = 0.0
    for numbers in UNEVEN[ctx.world_size]:
        mark = engine.ledger.mark()
        own = numbers[ctx.rank]
        with scope(engine, mode, max(own, 1)):
            for k in range(own):
                engine.backward(engine(x_of(ctx.rank, k)))
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, mode))
        moved += expected(ctx.world_size, [range(number) for number in numbers])
        assert_change(engine, moved)
        assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_three_and_one_are_eight_and_a_half(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(), stage)
    mark = engine.ledger.mark()
    with engine.coalesce_grad_reduction() as window:
        for k in range(3 if ctx.rank == 0 else 1):
            engine.backward(engine(x_of(ctx.rank, k)))
    engine.step()
    assert window.backwards == (3 if ctx.rank == 0 else 1)
    assert_wire(counts(engine, mark), wire(engine, "window"))
    assert_change(engine, 8.5)
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", [0, 1])
def test_bare_where_gradients_wait(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(), stage)
    mark = engine.ledger.mark()
    for k in range(3 if ctx.rank == 0 else 1):
        engine.backward(engine(x_of(ctx.rank, k)))
    engine.step()
    assert_wire(counts(engine, mark), wire(engine, "bare"))
    assert_change(engine, 8.5)
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("mode", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_uneven_over_many_units(ctx: RankContext, stage: int, mode: str) -> None:
    """Several units, an announced number that holds on one rank only, two steps."""
    engine = start(ctx, Tower(), stage, zero={"reduce_bucket_size": 20})
    mark = engine.ledger.mark()
    for step in range(2):
        with scope(engine, mode, 2):
            for k in range(2 if ctx.rank == step else 1):
                tokens = (ctx.data(4, 3, key=10 * step + k).abs() * 97).long() % 11
                engine.backward(engine(tokens).sum())
        engine.step()
    assert_wire(counts(engine, mark), wire(engine, mode, steps=2))
    assert_ranks_equal(engine)
