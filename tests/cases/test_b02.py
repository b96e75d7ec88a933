"""B02: the last backward alone survives, but only with the optimizer on the CPU: an accumulator was
filled only where the configured accumulation was above 1.

This version has no offload, so this is the case's control without it, and the refusal of the
setting: on every rank, before anything is sent, rather than a silent no-op.
"""

import pytest

from tests import rig
from tests.cases.modes import MODES, assert_traffic, during, house, run, usual
from tests.harness import RankContext, distributed

BACKWARDS = 4


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_control_without_offload(ctx: RankContext, stage: int) -> None:
    zero = {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}
    config = {"gradient_accumulation_steps": 1}
    engine = rig.start(ctx, rig.House(), stage, config=config, zero=zero)
    total = 0.0
    for mode in MODES:
        with during(mode):
            mark = engine.ledger.mark()
            run(engine, mode, house(engine, ctx.rank, range(BACKWARDS)))
            engine.step()
            assert_traffic(engine, mark, usual(ctx, engine, stage, mode, BACKWARDS, declared=1))
            total += rig.expected(ctx.world_size, BACKWARDS)
            rig.assert_change(engine, total)
            rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
@distributed(world_size=2)
def test_offload_is_refused_not_ignored(ctx: RankContext, stage: int, section: str) -> None:
    with pytest.raises(ValueError, match=section):
        rig.start(ctx, rig.House(), stage, zero={section: {"device": "cpu"}})
