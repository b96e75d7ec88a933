"""B02: the last backward alone survives, but only with the optimizer on the CPU: an accumulator was
filled only where the configured accumulation was above 1.

Exact with and without offload, at every stage that has something to offload.
"""

import pytest

from tests import rig
from tests.cases.modes import MODES, assert_traffic, during, house, run, usual
from tests.harness import RankContext, distributed

BACKWARDS = 4


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
@distributed(world_size=2)
def test_every_backward_counts(ctx: RankContext, stage: int, offload: str) -> None:
    on_cpu, off = {"device": "cpu"}, {"device": "none"}
    if (offload == "optimizer" and stage == 0) or (offload == "parameters" and stage < 3):
        return  # nothing there to offload: refused, see tests/test_config_refused.py
    zero = {
        "offload_optimizer": off if offload == "none" else on_cpu,
        "offload_param": on_cpu if offload == "parameters" else off,
    }
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
