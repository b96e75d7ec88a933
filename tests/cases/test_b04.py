"""B04: with an accumulator of its own dtype the reduction ran before the last micro-batch was added
to it, so that share stayed local: 8 on rank 0 and 18 on rank 1 where both must have 13.
"""

import itertools

import pytest
import torch

import onefold
from tests import rig
from tests.cases.modes import MODES, assert_traffic, during, house, run, usual
from tests.harness import RankContext, distributed

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_the_last_micro_batch_is_averaged_too(ctx: RankContext, stage: int) -> None:
    engine = rig.start(ctx, rig.House(), stage, config=BF16)
    for mode, backwards in itertools.product(MODES, (2, 3, 4)):
        with during(mode, backwards):
            before = rig.weights(engine)["w"][0].item()
            mark = engine.ledger.mark()
            run(engine, mode, house(engine, ctx.rank, range(backwards)))
            engine.step()
            assert_traffic(engine, mark, usual(ctx, engine, stage, mode, backwards))
            rig.assert_change(engine, rig.expected(2, backwards), before)
            rig.assert_ranks_equal(engine)
            _back_to_zero(engine)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("steps", [2, 4])
def test_at_a_counted_boundary(ctx: RankContext, stage: int, steps: int) -> None:
    """The report's own shape: the engine counts, and the boundary's micro-batch is armed."""
    config = {**BF16, "gradient_accumulation_steps": steps}
    engine = rig.start(ctx, rig.House(), stage, config=config)
    for _ in range(2):
        for loss in house(engine, ctx.rank, range(steps)):
            engine.backward(loss())
            engine.step()
        assert engine.was_step_applied()
        wanted = torch.tensor(-rig.expected(ctx.world_size, steps, divisor=steps))
        assert torch.equal(rig.weights(engine)["w"], wanted.bfloat16().expand(7))
        rig.assert_ranks_equal(engine)
        _back_to_zero(engine)


@distributed(world_size=2)
def test_the_rig_sees_a_local_share(ctx: RankContext) -> None:
    """Negative control: the second share added after the reduction, by hand, is 8 and 18."""
    engine = rig.start(ctx, rig.House(), 0, config=BF16)
    engine.backward(engine(rig.x_of(ctx.rank, 0)))
    engine.reduce_gradients()
    for param in engine.optimizer.param_groups[0]["params"]:
        param.grad += rig.x_of(ctx.rank, 1)
    engine.step()
    rig.assert_change(engine, (8.0, 18.0)[ctx.rank])
    with pytest.raises(onefold.RankMismatchError), engine.full_parameters():
        pass


def _back_to_zero(engine: onefold.Engine) -> None:
    """Small numbers again, which bf16 holds exactly."""
    with engine.full_parameters(), torch.no_grad():
        for param in engine.module.parameters():
            param.zero_()
