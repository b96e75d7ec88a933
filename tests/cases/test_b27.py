"""B27: with offload, gradients could be accumulated inside no_sync only, or not at all: the three
places of two backwards (inside, outside, one each) must all give 13.
"""

import pytest
import torch

import onefold
from tests import rig
from tests.cases.modes import SCOPES, during, house, scope
from tests.harness import RankContext, distributed

OFFLOADS = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "param": {"offload_param": {"device": "cpu"}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
FIELDS = [
    *((stage, offload) for stage in (1, 2) for offload in ("none", "optimizer")),
    *((3, offload) for offload in OFFLOADS),
]
PLACES = {"all inside": (0, 2), "all outside": (2, 2), "out, in": (1, 2), "in, out": (0, 1)}
"""Which of two backwards run inside: from the first number up to the second."""


def _run(ctx: RankContext, engine: onefold.Engine, mode: str, place: str) -> None:
    begin, end = PLACES[place]
    losses = house(engine, ctx.rank, range(2))
    for loss in losses[:begin]:
        engine.backward(loss())
    if end > begin:
        with scope(engine, mode, end - begin):
            for loss in losses[begin:end]:
                engine.backward(loss())
    for loss in losses[max(begin, end) :]:
        engine.backward(loss())


@distributed(world_size=[2, 3])
@pytest.mark.parametrize(("stage", "offload"), FIELDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulates_wherever_backward_runs(
    ctx: RankContext, stage: int, offload: str, precision: str
) -> None:
    config = {"bf16": {"enabled": precision == "bf16"}}
    engine = rig.start(ctx, rig.House(), stage, zero=OFFLOADS[offload], config=config)
    wanted, steps = rig.expected(ctx.world_size, 2), 0
    for place in PLACES:
        for mode in SCOPES:
            if steps * wanted > 200:  # bf16 holds whole numbers up to 256
                _back_to_zero(engine)
                steps = 0
            with during(place, mode):
                _run(ctx, engine, mode, place)
                engine.step()
                steps += 1
                rig.assert_change(engine, wanted * steps)
    rig.assert_ranks_equal(engine)


def _back_to_zero(engine: onefold.Engine) -> None:
    with engine.full_parameters(), torch.no_grad():
        for param in engine.module.parameters():
            param.zero_()
