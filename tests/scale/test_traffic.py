"""Calls and bytes in worlds of any size: the formulas, whatever the number of backwards."""

import pytest

from tests.rig import counts
from tests.scale.world import LAYER_NUMEL, SIZES, STAGES, Stack, engine_of, run_step

LAYERS = 1
UNITS = LAYERS + 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("windowed", [True, False], ids=["window", "bare"])
def test_a_step_sends_what_the_formula_says(size: int, stage: int, windowed: bool) -> None:
    volume = UNITS * LAYER_NUMEL * 4 * (size - 1) // size
    with engine_of(size, stage, Stack(LAYERS)) as engine:
        for n in (1, 4, 16) if size < 4096 else (1, 4):
            mark = engine.ledger.mark()
            run_step(engine, n, windowed=windowed)
            reductions = n if stage >= 2 and not windowed else 1
            gathers = {0: 0, 1: 1, 2: 1, 3: 1 if windowed else 2 * n}[stage]
            kind = "reduce_scatter" if stage else "all_reduce"
            wanted = {kind: reductions * UNITS, "all_gather": gathers * UNITS}
            assert counts(engine, mark) == {name: count for name, count in wanted.items() if count}
            sent = sum(total.bytes_out for total in engine.ledger.since(mark).values())
            assert sent == ((reductions if stage else 2) + gathers) * volume


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_exchanges_do_not_depend_on_the_world_or_on_the_backwards(size: int, stage: int) -> None:
    """One at the window's exit, one in step(), and one for the norm of shards."""
    with engine_of(size, stage, Stack(1)) as engine:
        for n in (1, 4, 16):
            before = engine._world.control.count
            run_step(engine, n)
            assert engine._world.control.count - before == (3 if stage else 2)
