"""Random programs: any mixture of scopes, backwards, boundaries, drops and failures is exact.

Hypothesis draws a setting and a program; every rank runs its own side of it; a few lines of
single-process arithmetic say what the weights must be after every step. All gradients are small
integers, so the comparison is one of bits.

Fresh programs, and more of them:

    ONEFOLD_PROGRAMS_SEED=7 ONEFOLD_PROGRAMS=100 pytest tests/programs
"""

import os
import zlib

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from tests.harness import pool_for
from tests.programs.drawn import PRECISIONS, programs, settings_of
from tests.programs.player import run
from tests.programs.reference import Reference
from tests.rig import STAGES

SEED = int(os.environ.get("ONEFOLD_PROGRAMS_SEED", "0"))
EXAMPLES = int(os.environ.get("ONEFOLD_PROGRAMS", "12"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_random_programs_are_exact(precision: str, stage: int) -> None:
    @seed(zlib.crc32(f"{precision}, {stage}, {SEED}".encode()))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=False,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        setting = data.draw(settings_of(stage, precision), label="setting")
        program = data.draw(programs(setting), label="program")
        reference = Reference(setting)
        reference.play(program)
        assume(reference.largest <= setting.precision.largest)
        results = pool_for(setting.world_size).run(run, setting=setting, program=program)
        for rank, outcomes in enumerate(results):
            wanted = reference.outcomes
            assert outcomes == wanted, f"rank {rank}: {outcomes}, expected {wanted}"

    check()
