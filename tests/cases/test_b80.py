"""B80: a buffer is freed, or swapped for the next one, while a collective or a kernel uses it.

As B79, under allocator pressure: between the layers, forward and backward, memory of the sizes that
the engine leases and frees is taken, filled with NaN and let go, on both streams. Whatever the
engine lets go too early then holds NaN.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.streams import on_side
from tests.cases.gpu import NUMEL, run_on_gpus, train
from tests.harness import RankContext, distributed

SIZES = [NUMEL, 2 * NUMEL, NUMEL // 2]
"""What is leased: a unit at stage 3, one at stages 0-2, and a shard."""


class Pressure(torch.autograd.Function):
    """The identity, which fills freed memory with NaN on its way, in both directions."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        spoil(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        spoil(grads[0].device)
        return grads[0].clone()


def spoil(device: torch.device) -> None:
    """Take memory from the allocator, on each stream, fill it with NaN, and give it back."""
    for is_side in (False, True):
        with on_side(device, is_side):
            taken = [
                torch.full((numel,), float("nan"), device=device) for numel in SIZES for _ in "123"
            ]
            del taken


def between(loss: Tensor) -> Tensor:
    found: Tensor = Pressure.apply(loss)
    return found


def on_one_stream(ctx: RankContext) -> None:
    train(ctx, between=between)


def on_two_streams(ctx: RankContext) -> None:
    train(ctx, between=between, alternates=True)


def on_the_side(ctx: RankContext) -> None:
    train(ctx, between=between, alternates=True, backward_on_side=True)


BODIES = [on_one_stream, on_two_streams, on_the_side]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_under_pressure(tmp_path: Path, body: Any) -> None:
    run_on_gpus(body, tmp_path)


@pytest.mark.gpu
def test_freed_memory_is_spoilt() -> None:
    """Control: what was let go on the current stream is what ``spoil`` gets hold of."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    freed = torch.ones(2 * NUMEL, device=device)
    address = freed.data_ptr()
    del freed
    spoil(device)
    again = torch.empty(2 * NUMEL, device=device)
    assert again.data_ptr() == address, "the allocator did not hand out the same memory"
    assert again.isnan().all()


@distributed(world_size=2)
def test_the_numbers_on_the_cpu(ctx: RankContext) -> None:
    """The same body where there are no streams, so that its expectations are known to hold."""
    train(ctx, between=between, numel=64, stages=[2, 3])
