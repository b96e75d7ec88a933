"""Programs that were wrong once, at every stage; found by ``test_programs``, cut down by hand."""

from dataclasses import replace

import pytest

from tests.harness import pool_for
from tests.programs.drawn import Op, Setting
from tests.programs.player import run
from tests.programs.reference import Reference
from tests.rig import STAGES

SETTING = Setting(
    world_size=2,
    stage=0,
    precision_name="fp64",
    steps=None,
    offload=(),
    recompute="none",
    transport="direct",
    scale_power=0,
    hysteresis=1,
    scale_window=1,
)


def backward(k: int, *masks: int) -> Op:
    return ("backward", k, masks, "engine", None)


PROGRAMS: dict[str, list[Op]] = {
    # One rank's armed unit has left, all ranks drop, and the other's leaves after the drop.
    "launched before and after a drop": [
        ("window", 1, [backward(1, 8, 0), ("zero", "engine"), backward(2, 0, 8)]),
        ("step",),
    ],
    # The same, but the other rank's gradient is found pending when it follows the first.
    "followed after a drop": [
        (
            "window",
            2,
            [backward(1, 8, 0), backward(2, 8, 0), ("zero", "engine"), backward(3, 0, 8)],
        ),
        ("step",),
    ],
    # `.grad` is set to None in a scope, where nobody watches, and accumulated into outside of it.
    "dropped by hand in a scope": [
        ("window", None, [backward(1, 1, 1)]),
        ("no_sync", None, [("zero", "module"), backward(2, 1, 1)]),
        backward(3, 15, 15),
        ("step",),
    ],
    # The same between two backwards outside of scopes, the first of which left its unit incomplete.
    "dropped by hand between bare backwards": [
        backward(1, 3, 3),
        backward(2, 1, 1),
        ("zero", "module"),
        backward(3, 3, 3),
        ("step",),
    ],
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_exact(name: str, stage: int) -> None:
    check(replace(SETTING, stage=stage), PROGRAMS[name])


def check(setting: Setting, program: list[Op]) -> None:
    reference = Reference(setting)
    reference.play(program)
    for outcomes in pool_for(setting.world_size).run(run, setting=setting, program=program):
        assert outcomes == reference.outcomes
