"""B54. A cached loss runs one backward per chunk and column; the reductions of a step must not
multiply with them: one round per step, over all columns and all engines, none where an outer scope
defers.
"""

from contextlib import ExitStack

import pytest

import onefold
from tests.cases.gradcache import (
    Encode,
    assert_state,
    columns,
    full_batch,
    grad_cache,
    num_chunks,
)
from tests.cases.wire_formula import MODES, assert_wire, num_trainable, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_ranks_equal, counts, start, weights


def _train(
    ctx: RankContext, engines: list[onefold.Engine], mode: str, *, is_nested: bool, key: int = 0
) -> None:
    """One step of a cached loss over the engines, one per column."""
    backwards = 1 if is_nested else num_chunks() // len(engines)
    pair = [engines[0], engines[-1]]
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(scope(engine, mode, backwards))
        grad_cache(pair, columns(ctx, key), engines[0].backward, is_nested=is_nested)
    for engine in engines:
        engine.step()


@distributed()
@pytest.mark.parametrize(
    ("mode", "is_nested"),
    [*((mode, False) for mode in MODES), ("bare", True), ("armed", True)],
)
@pytest.mark.parametrize("stage", STAGES)
def test_one_tower(ctx: RankContext, stage: int, mode: str, is_nested: bool) -> None:
    wanted = full_batch(ctx, [Encode(0)], keys=[0])
    engine = start(ctx, Encode(0), stage)
    mark = engine.ledger.mark()
    _train(ctx, [engine], mode, is_nested=is_nested)
    passes = num_chunks()
    # Every chunk is encoded twice, the first time without gradients.
    assert_wire(counts(engine, mark), wire(engine, mode, backwards=passes, forwards=2 * passes))
    assert_state(weights(engine), wanted[0])
    assert_ranks_equal(engine)


@distributed(world_size=3)
@pytest.mark.parametrize("mode", ["window", "no_sync"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_towers_on_two_engines(ctx: RankContext, stage: int, mode: str) -> None:
    towers = [Encode(1), Encode(2)]
    wanted = full_batch(ctx, towers, keys=[0])
    engines = [start(ctx, Encode(1), stage), start(ctx, Encode(2), stage)]
    marks = [engine.ledger.mark() for engine in engines]
    _train(ctx, engines, mode, is_nested=False)
    for engine, mark, state in zip(engines, marks, wanted, strict=True):
        assert_wire(counts(engine, mark), wire(engine, mode))
        assert_state(weights(engine), state)
        assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_an_outer_scope_is_respected(ctx: RankContext, stage: int) -> None:
    """Two cached losses, each in a window of its own, inside no_sync: nothing until step()."""
    wanted = full_batch(ctx, [Encode(0)], keys=[0, 1])
    engine = start(ctx, Encode(0), stage, config={"gradient_accumulation_steps": 2})
    mark = engine.ledger.mark()
    with engine.no_sync():
        at_entry = counts(engine, mark)
        for key in range(2):
            with engine.coalesce_grad_reduction():
                grad_cache([engine, engine], columns(ctx, key), engine.backward)
            if key == 0:
                _refuses_to_step(engine)
        assert counts(engine, mark) == at_entry
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    assert counts(engine, mark) == at_entry
    engine.step()
    assert_wire(counts(engine, mark), wire(engine, "no_sync"))
    assert_state(weights(engine), wanted[0])
    assert_ranks_equal(engine)


def _refuses_to_step(engine: onefold.Engine) -> None:
    with pytest.raises(onefold.StateError, match="with-block"):
        engine.step()


@distributed()
@pytest.mark.parametrize("stage", [2, 3])
def test_the_saving_is_the_number_of_chunks(ctx: RankContext, stage: int) -> None:
    """Negative control: without a window every chunk does reduce, so the counts can tell."""
    engine = start(ctx, Encode(0), stage)
    found = {}
    for mode in ("bare", "window"):
        mark = engine.ledger.mark()
        _train(ctx, [engine], mode, is_nested=True)
        found[mode] = counts(engine, mark)["reduce_scatter"]
    assert found["window"] == num_trainable(engine)
    assert found["bare"] == num_trainable(engine) * num_chunks()
    assert_ranks_equal(engine)
