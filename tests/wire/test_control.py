"""The exchanges, in pairs and, as above 64 ranks, by one collective: the same answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from onefold.wire import control as module
from onefold.wire.control import Control
from onefold.wire.groups import host_backend
from tests.harness import RankContext, distributed

WAYS = ["pairs", "collective"]


@contextmanager
def control(ctx: RankContext, way: str) -> Iterator[Control]:
    with patch.object(module, "MAX_PAIRWISE_RANKS", 64 if way == "pairs" else 0):
        yield Control(ctx.new_group(), ctx.rank, ctx.world_size)


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_largest(ctx: RankContext, way: str) -> None:
    with control(ctx, way) as exchange:
        found = exchange.largest([ctx.rank, -ctx.rank, 2**31 - 1, -(2**31)])
        assert found == [ctx.world_size - 1, 0, 2**31 - 1, -(2**31)]
        assert exchange.count == 1


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_floats_come_in_rank_order(ctx: RankContext, way: str) -> None:
    with control(ctx, way) as exchange:
        found = exchange.gather_floats([ctx.rank + 2.0**-50, float("inf")])
        every = torch.arange(ctx.world_size, dtype=torch.float64)
        assert torch.equal(found[:, 0], every + 2.0**-50)
        assert found[:, 1].isposinf().all()


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_values_of_different_length(ctx: RankContext, way: str) -> None:
    with control(ctx, way) as exchange:
        found = exchange.gather({"rank": ctx.rank, "text": "x" * 100 * ctx.rank})
        assert found == [{"rank": r, "text": "x" * 100 * r} for r in range(ctx.world_size)]


@distributed(world_size=1)
@pytest.mark.parametrize(
    ("default", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "gloo"),
        ("cuda:nccl", "gloo"),
        ("cpu:mpi,cuda:mpi", "mpi"),
        ("cpu:fake,cuda:fake", "fake"),
    ],
)
def test_host_tensors_travel_over_the_default_group_s_own_backend(
    ctx: RankContext, default: str, expected: str
) -> None:
    """And over gloo where it has none for them."""
    with patch.object(dist, "get_backend_config", lambda: default):
        assert host_backend() == expected
