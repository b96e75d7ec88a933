"""The host's work per step, in Python instructions of our package: what it grows with.

Counted, not timed: the numbers are the same on every machine. ``counted`` sees loops, so a loop
over ranks or backwards that comes back anywhere fails here.
"""

from typing import Any

import pytest
from torch import nn

from onefold.wire.control import MAX_PAIRWISE_RANKS
from tests.scale.world import (
    LAYER_NUMEL,
    STAGES,
    Many,
    Stack,
    Work,
    differences,
    engine_of,
    work_of_step,
)

WIRES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
PER_UNIT = 6000
"""Instructions of a step and one backward per unit of one parameter, modules' hooks included."""
PER_PARAM = 1200
"""Instructions of a step per parameter of a unit."""


def work_in(size: int, stage: int, model: nn.Module, n: int = 2, **arguments: Any) -> Work:
    with engine_of(size, stage, model, **arguments) as engine:
        return work_of_step(engine, n)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", list(WIRES))
def test_work_does_not_grow_with_the_world(stage: int, wire: str) -> None:
    """Of 8 ranks each sends to every other in the exchanges; of many all call one collective."""
    few, many, most = (work_in(size, stage, Stack(2), **WIRES[wire]) for size in (8, 512, 4096))
    assert not differences(many, most)
    assert most.total() <= few.total(), differences(few, most)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_count_sees_loops_over_ranks(stage: int) -> None:
    """The control: up to 64 ranks exchange in pairs, and that does grow."""
    few, many = (work_in(size, stage, Stack(1)) for size in (8, MAX_PAIRWISE_RANKS))
    exchanges = 3 if stage else 2
    assert many.total() - few.total() >= exchanges * 2 * (MAX_PAIRWISE_RANKS - 8)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [8, 4096])
def test_every_backward_of_a_window_is_the_same_work(stage: int, size: int) -> None:
    with engine_of(size, stage, Stack(2)) as engine:
        one, four, sixteen = (work_of_step(engine, n).total() for n in (1, 4, 16))
    assert sixteen - four == 4 * (four - one)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_in_a_window_does_nothing_per_parameter(stage: int) -> None:
    """Where the module is one, as many parameters as you like."""
    increments = []
    for params in (4, 64):
        with engine_of(512, stage, Many(params), bucket_numel=10**9) as engine:
            one, two = (work_of_step(engine, n) for n in (1, 2))
            increments.append(two.total() - one.total())
    assert increments[0] == increments[1]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("windowed", [True, False], ids=["window", "bare"])
def test_work_is_linear_in_units(stage: int, windowed: bool) -> None:
    few, some, many = (
        units_work(stage, layers, windowed=windowed, size=512).total() for layers in (8, 16, 32)
    )
    assert many - some == 2 * (some - few)
    assert (some - few) / 8 <= PER_UNIT


def units_work(stage: int, layers: int, *, windowed: bool, size: int) -> Work:
    with engine_of(size, stage, Stack(layers, width=16), bucket_numel=256) as engine:
        return work_of_step(engine, 1, windowed=windowed, width=16)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("windowed", [True, False], ids=["window", "bare"])
def test_work_is_linear_in_parameters(stage: int, windowed: bool) -> None:
    totals = []
    for params in (48, 96, 192):
        with engine_of(512, stage, Many(params), bucket_numel=LAYER_NUMEL * 10**4) as engine:
            totals.append(work_of_step(engine, 1, windowed=windowed).total())
    few, some, many = totals
    assert many - some == 2 * (some - few)
    assert (some - few) / 48 <= PER_PARAM
