"""B11: gradients were accumulated in fp32, and then a copy in the model's dtype was reduced, which
had missed the small ones.

Every rank adds ``f`` once and ``f / 512`` 16 times, with an ``f`` of its own: the sum, 33/32 f, is
exact in bf16; an accumulator in bf16 stays at f, because f + f/512 rounds to f.
"""

import pytest
import torch

import onefold
from tests import rig
from tests.cases.modes import MODES, during, run
from tests.harness import RankContext, distributed

SMALL = [2.0**-9] * 16
SUM = 33 / 32


def _f(rank: int) -> float:
    return 1.0 + 2.0 * rank


def _run(ctx: RankContext, engine: onefold.Engine, mode: str) -> None:
    xs = [_f(ctx.rank) * part for part in (1.0, *SMALL)]
    run(engine, mode, [lambda x=x: engine(x) for x in xs])  # type: ignore[misc]


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("wire", ["fp32", None])
def test_the_fp32_sum_is_reduced(ctx: RankContext, stage: int, wire: str | None) -> None:
    house = rig.House()
    config = {"bf16": {"enabled": True}, "communication_data_type": wire}
    engine = rig.start(ctx, house, stage, config={k: v for k, v in config.items() if v})
    mean = sum(map(_f, range(ctx.world_size))) / ctx.world_size
    for mode in MODES:
        with during(mode):
            _run(ctx, engine, mode)
            engine.reduce_gradients()
            found = engine.full_grad(house.w)
            assert found is not None
            assert torch.equal(found, torch.full((7,), SUM * mean)), found
            engine.zero_grad()
    _run(ctx, engine, "window")
    engine.step()
    rig.assert_change(engine, SUM * mean)
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_the_rig_sees_a_sum_in_bf16(ctx: RankContext, stage: int) -> None:
    """Negative control: accumulated in bf16, the small ones are lost, and 2.0625 becomes 2."""
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    engine = rig.start(ctx, rig.House(), stage, config=config)
    _run(ctx, engine, "window")
    engine.step()
    rig.assert_change(engine, 2.0)
