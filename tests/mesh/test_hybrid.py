"""Hybrid meshes: shards along one axis, replicas along the other, on a 2 x 2 grid of ranks."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import onefold
from tests import rig
from tests.harness import RankContext, distributed
from tests.rig import STAGES, House, Tower, start, x_of

SCOPES = ["bare", "window", "across", "no_sync", "across in window", "window in across"]
W = R = 2


def mesh_of(ctx: RankContext) -> DeviceMesh:
    """Ranks 0 1 are one shard group, 2 3 the other; 0 2 and 1 3 are replicas."""
    return ctx.device_mesh(R, W, names=("replicate", "shard"))


def play(ctx: RankContext, engine: onefold.Engine, scope: str, backwards: int) -> None:
    def run(ks: range) -> None:
        for k in ks:
            engine.backward(engine(x_of(ctx.rank, k)))

    window = engine.coalesce_grad_reduction
    if scope == "bare":
        run(range(backwards))
    elif scope == "window":
        with window():
            run(range(backwards))
    elif scope == "across":
        with window(across="replicate"):
            run(range(backwards))
    elif scope == "no_sync":
        with engine.no_sync():
            run(range(backwards))
    elif scope == "across in window":
        with window():
            run(range(1))
            with window(across="replicate"):
                run(range(1, backwards))
    else:
        with window(across="replicate"):
            run(range(1))
            with window():
                run(range(1, backwards - 1))
            run(range(backwards - 1, backwards))


def wire(engine: onefold.Engine, scope: str, backwards: int) -> dict[str, int]:
    """Collectives of one step: reductions over each axis, gathers over the shard axis."""
    home, units = engine.plan.home, len(engine.plan.units)
    inner = outer = 1
    if home.shards_gradients:
        inner = {"bare": backwards, "across": backwards, "window in across": 2}.get(scope, 1)
        outer = backwards if scope == "bare" else 1
    expected = {"all_reduce": outer * units}
    if home.shards_optimizer:
        expected["reduce_scatter"] = inner * units
        expected["all_gather"] = units
    if home.shards_parameters:
        # "window in across": one pass before the inner window, one in it, one after it.
        gathers = {"bare": 2 * backwards, "across": 2 * backwards, "window in across": 5}
        expected["all_gather"] = gathers.get(scope, 1) * units
    return expected


@distributed(world_size=4)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("backwards", [3, 5])
def test_sum_and_collectives(ctx: RankContext, stage: int, scope: str, backwards: int) -> None:
    engine = start(ctx, House(100), stage, mesh=mesh_of(ctx))
    for _ in range(2):
        mark = engine.ledger.mark()
        before = rig.weights(engine)["w"][0].item()
        mark = engine.ledger.mark()
        play(ctx, engine, scope, backwards)
        engine.step()
        assert rig.counts(engine, mark) == wire(engine, scope, backwards)
        rig.assert_change(engine, rig.expected(4, backwards), before)
        rig.assert_ranks_equal(engine)


@distributed(world_size=4)
@pytest.mark.parametrize("stage", STAGES)
def test_shards_lie_along_the_shard_axis(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(100), stage, mesh=mesh_of(ctx))
    assert engine.plan.num_shards == (1 if stage == 0 else W)
    assert engine.plan.num_replicas == (W * R if stage == 0 else R)
    play(ctx, engine, "across", 3)
    engine.reduce_gradients()
    unit = engine._units[0]
    wanted = rig.expected(4, 3)
    shard = unit.gradients.grad_shard
    assert shard is not None
    piece = unit.gradients.piece(0)
    assert piece is not None
    assert torch.equal(piece, torch.full_like(piece, wanted))
    assert engine.get_global_grad_norm() == wanted * 10.0  # counted once


@distributed(world_size=4)
@pytest.mark.parametrize("stage", [2, 3])
def test_across_holds_a_shard_and_reads_pending(ctx: RankContext, stage: int) -> None:
    house = House(100)
    engine = start(ctx, house, stage, mesh=mesh_of(ctx))
    with engine.coalesce_grad_reduction(across="replicate") as window:
        for k in range(3):
            engine.backward(engine(x_of(ctx.rank, k)))
        with pytest.raises(onefold.StateError, match="still pending"):
            engine.full_grad(house.w)
    full = engine.full_grad(house.w)
    assert full is not None
    assert torch.equal(full, torch.full((100,), rig.expected(4, 3)))
    assert window.bytes_held == engine._units[0].layout.shard_numel * 4
    assert window.outcome == "flushed"


@distributed(world_size=4)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("failing", [0, 3])
def test_a_failed_body_drops_the_parts_everywhere(
    ctx: RankContext, stage: int, failing: int
) -> None:
    engine = start(ctx, House(100), stage, mesh=mesh_of(ctx))
    wanted: type[Exception] = ArithmeticError if ctx.rank == failing else onefold.WindowAborted
    with pytest.raises(wanted):
        fail_across(ctx, engine, failing)
    play(ctx, engine, "across", 3)
    engine.step()
    rig.assert_change(engine, rig.expected(4, 3))


def fail_across(ctx: RankContext, engine: onefold.Engine, failing: int) -> None:
    with engine.coalesce_grad_reduction(across="replicate"):
        for k in range(2):
            engine.backward(engine(x_of(ctx.rank, k)))
        if ctx.rank == failing:
            raise ArithmeticError


@distributed(world_size=4)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scope", ["bare", "window", "across"])
def test_real_model_equals_one_process(ctx: RankContext, stage: int, scope: str) -> None:
    torch.manual_seed(7)
    model = Tower()
    reference = Tower()
    reference.load_state_dict(model.state_dict())
    for rank in range(4):
        for k in range(3):
            reference(tokens(rank, k)).square().mean().backward()
    engine = start(ctx, model, stage, mesh=mesh_of(ctx))
    scopes: dict[str, Any] = {
        "bare": nullcontext,
        "window": engine.coalesce_grad_reduction,
        "across": partial(engine.coalesce_grad_reduction, across="replicate"),
    }
    with scopes[scope]():
        for k in range(3):
            engine.backward(engine(tokens(ctx.rank, k)).square().mean())
    engine.reduce_gradients()
    for (name, param), own in zip(
        reference.named_parameters(), engine.module.parameters(), strict=True
    ):
        found = engine.full_grad(own)
        assert found is not None, name
        assert param.grad is not None
        torch.testing.assert_close(found, param.grad / 4, rtol=1e-12, atol=1e-14)


def tokens(rank: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * rank + k)
    return torch.randint(0, 11, (3, 4), generator=generator)


@distributed(world_size=4)
def test_axes_that_mean_nothing_are_refused(ctx: RankContext) -> None:
    mesh = ctx.device_mesh(2, 2, names=("pipeline", "data"))
    with pytest.raises(ValueError, match="expected axes named 'replicate', 'shard'"):
        start(ctx, House(), 2, mesh=mesh)
    with pytest.raises(ValueError, match="nothing to arm"):
        start(ctx, House(), 0).coalesce_grad_reduction(across="replicate", backwards=2)
    with pytest.raises(ValueError, match="would defer nothing"):
        start(ctx, House(), 2).coalesce_grad_reduction(across="replicate")
    engine = start(ctx, House(), 2, mesh=mesh["data"])
    play(ctx, engine, "window", 3)
    engine.step()
    group = [0, 1] if ctx.rank < 2 else [2, 3]
    total = sum(x_of(rank, k) for rank in group for k in range(3))
    rig.assert_change(engine, total / 2)
