"""B96: on a hybrid mesh every micro-batch paid the all-reduce between replicas, though only the
last one's is needed. With ``across="replicate"`` N backwards cost N reduce-scatters and one
all-reduce, of shards that were added after the one and before the other.
"""

import pytest
import torch

import onefold
from tests import rig
from tests.cases.modes import TINY, Rooms, num_units
from tests.harness import RankContext, distributed

W = R = 2
SIZES = (40, 7, 3)


def _start(ctx: RankContext, stage: int, precision: str) -> onefold.Engine:
    mesh = ctx.device_mesh(R, W, names=("replicate", "shard"))
    config = {"bf16": {"enabled": precision == "bf16"}}
    return rig.start(ctx, Rooms(*SIZES), stage, config=config, zero=TINY, mesh=mesh)


def _backwards(ctx: RankContext, engine: onefold.Engine, backwards: int) -> float:
    """Returns the averaged gradient of the first room; small, so that bf16 is exact."""
    factors = [(1.0, 0.0, 2.0)[k % 3] for k in range(backwards)]
    for factor in factors:
        engine.backward(engine((ctx.rank + 1) * factor))
    return sum(factors) * sum(range(1, W * R + 1)) / (W * R)


def _reductions(engine: onefold.Engine, mark: object) -> dict[str, tuple[int, int]]:
    """Count and bytes by kind, gathers left out."""
    found = engine.ledger.since(mark)  # type: ignore[arg-type]
    return {kind: (t.count, t.bytes_out) for kind, t in found.items() if kind != "all_gather"}


def _formula(engine: onefold.Engine, inner: int, outer: int) -> dict[str, tuple[int, int]]:
    """``inner`` reduce-scatters and ``outer`` all-reduces of every unit."""
    shards = sum(u.layout.shard_numel * u.wire_dtype.itemsize for u in engine.plan.units)
    units = num_units(engine)
    return {
        "reduce_scatter": (inner * units, inner * shards * (W - 1)),
        "all_reduce": (outer * units, outer * 2 * shards * (R - 1) // R),
    }


@distributed(world_size=4)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("backwards", [3, 5, 7])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_all_reduce(ctx: RankContext, stage: int, backwards: int, precision: str) -> None:
    engine = _start(ctx, stage, precision)
    for _ in range(2):
        mark = engine.ledger.mark()
        with engine.coalesce_grad_reduction(across="replicate") as window:
            wanted = _backwards(ctx, engine, backwards)
            assert _reductions(engine, mark).keys() == {"reduce_scatter"}
        assert _reductions(engine, mark) == _formula(engine, backwards, 1)
        assert window.collectives["all_reduce"] == num_units(engine)
        engine.reduce_gradients()
        assert _reductions(engine, mark) == _formula(engine, backwards, 1)  # nothing is left
        for index, param in enumerate(engine.module.parameters()):
            found = engine.full_grad(param)
            assert found is not None
            assert torch.equal(found, torch.full_like(found, (index + 1) * wanted))
        engine.step()
        rig.assert_ranks_equal(engine)


@distributed(world_size=4)
@pytest.mark.parametrize("stage", [2, 3])
def test_without_it_every_backward_pays(ctx: RankContext, stage: int) -> None:
    """The control: bare backwards, and a window that defers both axes."""
    engine = _start(ctx, stage, "fp32")
    mark = engine.ledger.mark()
    _backwards(ctx, engine, 3)
    engine.reduce_gradients()
    assert _reductions(engine, mark) == _formula(engine, 3, 3)
    engine.zero_grad()
    mark = engine.ledger.mark()
    with engine.coalesce_grad_reduction():
        _backwards(ctx, engine, 3)
    assert _reductions(engine, mark) == _formula(engine, 1, 1)
