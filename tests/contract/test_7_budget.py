"""Contract 7, ``max_bytes``: what is kept and what is sent instead, in every kind of scope."""

import pytest
import torch
from torch import Tensor

import onefold
from tests.contract.budget import (
    HOUSES,
    SHARDED,
    assert_gradients,
    keeps_blocks,
    run,
    rungs_in_use,
    sample,
    terrace,
    watched,
)
from tests.contract.helpers import Fault, arena, gathered, x_of
from tests.harness import RankContext, distributed
from tests.rig import counts


def between(engine: onefold.Engine) -> int:
    """A budget for which all parameters are kept, and not all gradients."""
    rungs = [rung for rung in rungs_in_use(engine) if keeps_blocks(engine, rung.kept)]
    assert len(rungs) > 2
    return rungs[len(rungs) // 2].num_bytes


# What the ladder is.


@distributed(world_size=2)
def test_parameters_come_before_gradients_and_the_root_first(ctx: RankContext) -> None:
    engine = terrace(ctx, 3)
    ladder = engine._transaction.budget.ladder()
    roots = {index for index, block in enumerate(engine.plan.blocks) if block.is_root}
    assert ladder[0].kept.blocks == roots
    for rung in ladder:
        assert keeps_blocks(engine, rung.kept) or rung.kept.units == ladder[0].kept.units
    sizes = [(len(rung.kept.blocks), len(rung.kept.units)) for rung in ladder]
    assert sizes == sorted(set(sizes))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1])
def test_where_gradients_are_partial_there_is_nothing_to_trade(
    ctx: RankContext, stage: int
) -> None:
    engine = terrace(ctx, stage)
    run(ctx, engine, 3, max_bytes=1)
    assert_gradients(ctx, engine, 3)
    assert engine.last_window is not None
    assert engine.last_window.kept == engine._transaction.budget.everything


@distributed(world_size=2)
@pytest.mark.parametrize("stage", SHARDED)
def test_the_least_is_said_before_any_collective(ctx: RankContext, stage: int) -> None:
    engine = terrace(ctx, stage)
    least = rungs_in_use(engine)[0].num_bytes
    exchanges = engine._world.control.count
    mark = engine.ledger.mark()
    with pytest.raises(ValueError, match=rf"at least {least} bytes.* got {least - 1}\."):
        engine.coalesce_grad_reduction(max_bytes=least - 1)
    with pytest.raises(ValueError, match=r"across='replicate'.*max_bytes"):
        engine.coalesce_grad_reduction(across="replicate", max_bytes=least)
    assert engine._world.control.count == exchanges
    assert counts(engine, mark) == {}


@distributed(world_size=2)
@pytest.mark.parametrize("stage", SHARDED)
def test_ranks_that_pass_different_budgets_learn_it_at_the_entry(
    ctx: RankContext, stage: int
) -> None:
    engine = terrace(ctx, stage)
    rungs = rungs_in_use(engine)
    mine = rungs[0 if ctx.rank else -1].num_bytes
    with pytest.raises(onefold.RankMismatchError, match=rf"max_bytes.*{rungs[0].num_bytes}"):
        run(ctx, engine, 1, max_bytes=mine)
    assert arena(engine).leased_bytes == 0
    run(ctx, engine, 1, max_bytes=rungs[0].num_bytes)
    assert_gradients(ctx, engine, 1)
    engine.step()


@distributed(world_size=2)
def test_a_budget_on_one_rank_only_does_not_hang(ctx: RankContext) -> None:
    engine = terrace(ctx, 2)
    arguments = {"max_bytes": between(engine)} if ctx.rank else {}
    with pytest.raises(onefold.RankMismatchError, match=r"different places.*entry of coalesce"):
        run(ctx, engine, 1, **arguments)
    engine.zero_grad()
    run(ctx, engine, 2)
    assert_gradients(ctx, engine, 2)
    engine.step()


# Beside the rest of the contract.


@distributed(world_size=2)
@pytest.mark.parametrize("stage", SHARDED)
def test_kept_units_have_no_hooks(ctx: RankContext, stage: int) -> None:
    engine = terrace(ctx, stage)
    budget, hooks = between(engine), engine._transaction._hooks
    with engine.coalesce_grad_reduction(max_bytes=budget) as window:
        assert 0 < len(window.kept.units) < len(engine._trainable)
        for unit in engine._trainable:
            is_kept = unit.index in window.kept.units
            assert (unit.index in hooks._watches) is not is_kept
            for param in unit.params:
                assert (param.grad is not None) is is_kept, "bound beforehand"
    assert set(hooks._watches) == {unit.index for unit in engine._trainable}


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("transport", ["direct", "native"])
@pytest.mark.parametrize("stage", SHARDED)
def test_ranks_may_use_different_kept_units(ctx: RankContext, stage: int, transport: str) -> None:
    engine = terrace(ctx, stage, config={"onefold": {"transport": transport}})
    budget = between(engine)
    sums = [0.0] * HOUSES
    with engine.coalesce_grad_reduction(max_bytes=budget, backwards=2) as window:
        params = list(engine.module.houses)  # type: ignore[arg-type]
        kept_params = {id(p) for i in window.kept.units for p in engine._units[i].params}
        kept = [i for i, house in enumerate(params) if id(house.w) in kept_params]
        assert 2 <= len(kept) < HOUSES
        for k in range(2):
            for rank in range(ctx.world_size):
                used = [i for i in range(HOUSES) if i not in kept or (i + rank + k) % 2]
                for i in used:
                    sums[i] += x_of(rank, k)
                if rank == ctx.rank:
                    engine.backward(engine(x_of(rank, k), used))
    engine.reduce_gradients()
    for house, total in zip(params, sums, strict=True):
        found = engine.full_grad(house.w)
        assert found is not None
        assert torch.equal(found, torch.full_like(found, total / ctx.world_size))
    engine.step()


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_it_is_armed_only_where_everything_on_the_wire_fits(ctx: RankContext, stage: int) -> None:
    engine = terrace(ctx, stage)
    rungs = rungs_in_use(engine)
    reducer = engine._transaction.reducer
    armed = engine._transaction.budget._armed_bytes()
    assert armed > rungs[-1].num_bytes
    for max_bytes, on_wire in ((armed, len(engine._trainable)), (rungs[-1].num_bytes, 0)):
        for marks in (True, False):
            with watched(engine) as peak:
                declared = None if marks else 2
                with engine.coalesce_grad_reduction(backwards=declared, max_bytes=max_bytes):
                    engine.backward(engine(x_of(ctx.rank, 0)))
                    if marks:
                        engine.set_gradient_accumulation_boundary(True)
                    engine.backward(engine(x_of(ctx.rank, 1)))
                    assert len(reducer._in_flight) == on_wire
            assert peak.num_bytes <= max_bytes
            assert_gradients(ctx, engine, 2)
            engine.step()


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_scopes_around_and_inside(ctx: RankContext, stage: int) -> None:
    """What any open scope keeps is kept; ranks run different backwards where everything is."""
    engine = terrace(ctx, stage)
    num_units = len(engine.plan.units)
    least = rungs_in_use(engine)[0]
    xs = [0.0]

    def backward(k: int) -> None:
        engine.backward(engine(x_of(ctx.rank, k)))
        xs[0] += x_of(ctx.rank, k)

    with engine.no_sync():
        mark = engine.ledger.mark()
        for _ in range(ctx.rank):
            with engine.coalesce_grad_reduction(max_bytes=least.num_bytes):
                backward(0)
        assert counts(engine, mark) == {}
    with engine.coalesce_grad_reduction(max_bytes=least.num_bytes) as window:
        backward(1)
        mark = engine.ledger.mark()
        with engine.no_sync():
            for k in range(1 + ctx.rank):
                backward(2 + k)
        with engine.coalesce_grad_reduction():
            backward(8)
        gathers = 2 * (num_units - len(least.kept.blocks)) if stage == 3 else 0
        assert counts(engine, mark).get("reduce_scatter", 0) == 0
        assert counts(engine, mark).get("all_gather", 0) == gathers
        backward(9)
    assert window.outcome == "flushed"
    backward(10)  # and outside
    engine.reduce_gradients()
    total = sum(gathered(xs[0]))
    for param in engine.module.parameters():
        found = engine.full_grad(param)
        assert found is not None
        assert torch.equal(found, torch.full_like(found, total / ctx.world_size))
    engine.step()


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_a_body_that_raises_on_one_rank_drops_everything_on_all(
    ctx: RankContext, stage: int
) -> None:
    engine = terrace(ctx, stage)

    def body(max_bytes: int) -> None:
        with engine.coalesce_grad_reduction(max_bytes=max_bytes):
            for k in range(2):
                engine.backward(engine(x_of(ctx.rank, k)))
            if ctx.rank == 1:
                raise Fault("on one rank")

    for rung in sample(rungs_in_use(engine))[::2]:
        with pytest.raises(Fault if ctx.rank == 1 else onefold.WindowAborted):
            body(rung.num_bytes)
        assert arena(engine).leased_bytes == 0
        run(ctx, engine, 2, max_bytes=rung.num_bytes)
        assert_gradients(ctx, engine, 2)
        engine.step()


def fail(_grad: Tensor) -> None:
    raise Fault("half-way")


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_a_rank_that_launched_less_follows(ctx: RankContext, stage: int) -> None:
    """Its backward raises before the last few units; the others launch them and wait."""
    engine = terrace(ctx, stage)
    budget = between(engine)
    launched: list[int] = []

    def body() -> None:
        with engine.coalesce_grad_reduction(max_bytes=budget) as window:
            launched.append(len(engine._trainable) - len(window.kept.units))
            x = x_of(ctx.rank, 0)
            total = engine(x, range(2)) * 1.0
            if ctx.rank == 1:
                total.register_hook(fail)
            for house in engine.module.houses[2:]:  # type: ignore[index]
                total = house(total, x)
            try:
                engine.backward(total)
            finally:
                launched.append(len(engine._transaction.reducer.log))

    with pytest.raises(Fault if ctx.rank == 1 else onefold.WindowAborted):
        body()
    dropped, seen = launched
    missed = 2 if stage == 3 else 3  # two houses, and the gate where it is not in a root block
    assert seen == (dropped - missed if ctx.rank == 1 else dropped)
    assert arena(engine).leased_bytes == 0
    run(ctx, engine, 1, max_bytes=budget)
    assert_gradients(ctx, engine, 1)
    engine.step()
