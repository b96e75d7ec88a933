"""B79: a reduction waits for another stream than the one that makes the gradient, and sends what is
not there yet.

A long kernel comes before every gradient: reducing while backward runs must give the same bits as
reducing after it, with everything on one stream, with every other layer on a second one, and with
the whole step on a side stream.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.streams import Late, on_side, side_stream, sleep
from tests import rig
from tests.cases.gpu import (
    NUM_ROOMS,
    NUMEL,
    LateRooms,
    run_on_gpus,
    train,
)
from tests.harness import RankContext, distributed

KINDS: dict[str, dict[str, Any]] = {
    "one_stream": {},
    "two_streams": {"alternates": True},
    "side_stream": {"backward_on_side": True},
    "both": {"alternates": True, "backward_on_side": True},
}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_late_gradients(tmp_path: Path, kind: str) -> None:
    run_on_gpus(partial(train, **KINDS[kind]), tmp_path)


@pytest.mark.gpu
def test_a_missing_wait_would_show() -> None:
    """Negative control: a reader on a stream that does not wait finds what was there before."""
    device = torch.device("cuda", torch.cuda.current_device())
    weight = torch.ones(NUMEL, device=device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    seen = torch.full_like(weight, -1.0)
    torch.cuda.synchronize()
    reader = side_stream(device)
    weight.register_post_accumulate_grad_hook(lambda param: _read(reader, param, seen))
    Late.apply(weight).sum().backward()
    torch.cuda.synchronize()
    assert torch.equal(seen, torch.zeros_like(seen)), "the long kernel was not long enough"
    assert torch.equal(weight.grad, torch.ones_like(weight))


def _read(reader: "torch.cuda.Stream", param: torch.Tensor, seen: torch.Tensor) -> None:
    with torch.cuda.stream(reader):
        assert param.grad is not None
        seen.copy_(param.grad)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_the_numbers_on_the_cpu(ctx: RankContext, stage: int) -> None:
    """The same body where there are no streams, so that its expectations are known to hold."""
    train(ctx, **KINDS["both"], numel=64, stages=[stage])


@distributed(world_size=2)
def test_a_unit_takes_from_both_streams(ctx: RankContext) -> None:
    """At stages 0-2 two neighbouring rooms are one unit, and one of them is the side stream's."""
    model = LateRooms(ctx.device, alternates=True)
    engine = rig.start(ctx, model, 2, zero={"reduce_bucket_size": 2 * NUMEL})
    assert [len(unit.slots) for unit in engine.plan.units] == [2] * (NUM_ROOMS // 2)
    assert [room.is_on_side for room in model.rooms][:4] == [True, False, True, False]
    with on_side(ctx.device):  # without a GPU this, and sleep, are nothing
        sleep(ctx.device)
