"""B97: a backend's AVG returned the SUM.

The wire only ever sums, and the divisor is applied once, after it: 1 and 2 give 1.5 through every
transport, by all-reduce and by reduce-scatter, and 3 where a sum was asked for.
"""

from functools import partial

import pytest
import torch
from torch import nn

from tests import rig
from tests.cases.modes import assert_traffic, during, run, usual
from tests.harness import CommLog, RankContext, distributed

TRANSPORTS = ["cross-memory", "direct", "native"]


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("op", "wanted"), [("mean", 1.5), ("sum", 3.0)])
@distributed(world_size=2)
def test_one_and_two(ctx: RankContext, stage: int, transport: str, op: str, wanted: float) -> None:
    config = {"onefold": {"transport": transport}, "gradient_allreduce_op": op}
    engine = rig.start(ctx, rig.House(), stage, config=config)
    param = engine.module.w
    assert isinstance(param, nn.Parameter)
    for steps, mode in enumerate(["bare", "window", "armed"], start=1):
        with during(mode):
            mark = engine.ledger.mark()
            with CommLog() as log:
                run(engine, mode, [partial(engine, 1.0 + ctx.rank)])
                engine.reduce_gradients()
            native = "allreduce_" if stage == 0 else "_reduce_scatter_base_"
            assert log.counts[native] == (1 if transport == "native" else 0)  # which one it was
            found = engine.full_grad(param)
            assert found is not None
            assert torch.equal(found, torch.full_like(found, wanted)), f"{op}: {found.tolist()}"
            engine.step()
            total = usual(ctx, engine, stage, mode, 1)
            if stage:  # full_grad read the unit once
                total["all_gather"] += 1
            assert_traffic(engine, mark, total)
            rig.assert_change(engine, steps * wanted)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_size=3)
def test_with_micro_steps_on_top(ctx: RankContext, stage: int, transport: str) -> None:
    """1, 2 and 3 in two micro-steps: ranks and micro-steps both divide, once."""
    config = {"onefold": {"transport": transport}, "gradient_accumulation_steps": 2}
    engine = rig.start(ctx, rig.House(), stage, config=config)
    for _ in range(2):
        engine.backward(engine(1.0 + ctx.rank))
        engine.step()
    rig.assert_change(engine, 2.0)
    assert engine.global_steps == 1
