"""Memory in worlds of any size: 1/W of what is sharded, and the window's buffers, by arithmetic."""

from typing import Any

import pytest
from torch import Tensor

import onefold
from onefold.grad.reduce import MAX_IN_FLIGHT
from tests.scale.world import LAYER_NUMEL, SIZES, STAGES, Stack, engine_of, run_step

LAYERS = 3
NUMEL = (LAYERS + 1) * LAYER_NUMEL
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def home_bytes(engine: onefold.Engine) -> int:
    """Bytes of all that the units hold, each memory counted once."""
    held: dict[int, int] = {}
    for unit in engine._units:
        gradients = unit.gradients
        buffers: list[Tensor | None] = [unit.param_full, unit.param_shard, unit.master]
        buffers += [gradients.grad_full, gradients.grad_shard, gradients.grad_part]
        for buffer in buffers:
            if buffer is not None:
                storage = buffer.untyped_storage()
                held[storage._cdata] = storage.nbytes()
    return sum(held.values())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("is_narrow", [False, True], ids=["fp32", "bf16"])
def test_what_is_held_between_steps(size: int, stage: int, is_narrow: bool) -> None:
    parameters = NUMEL * (2 if is_narrow else 4) // (size if stage == 3 else 1)
    masters = NUMEL * 4 // (size if stage else 1) if is_narrow else 0
    with engine_of(size, stage, Stack(LAYERS), **(BF16 if is_narrow else {})) as engine:
        for n in (1, 4):
            run_step(engine, n)
            assert home_bytes(engine) == parameters + masters
            arena = engine.parts.arena
            assert (arena.leased_bytes, arena.kept_bytes) == (0, 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_window_leases(size: int, stage: int) -> None:
    """All full gradients, and the shards of the reductions that are in flight beside them."""
    shards = MAX_IN_FLIGHT * LAYER_NUMEL // size if stage else 0  # stage 0 reduces in place
    with engine_of(size, stage, Stack(LAYERS)) as engine:
        arena = engine.parts.arena
        for n in (1, 4, 16) if size < 4096 else (1, 4):
            run_step(engine, n)
            assert arena.peak_bytes == 4 * (NUMEL + shards), n


@pytest.mark.parametrize("size", SIZES)
def test_a_unit_is_padded_by_less_than_a_line_for_each_rank(size: int) -> None:
    """Alignment costs a unit at most 64 bytes per rank: units of a few numbers are not for many."""
    with engine_of(size, 3, Stack(1, width=3)) as engine:
        for unit in engine.plan.units:
            padding = 4 * (unit.layout.numel - sum(unit.layout.numels))
            assert 0 <= padding < 64 * size
