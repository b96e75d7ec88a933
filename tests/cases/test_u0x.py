"""U01-U07. Holes of the upstream context manager: a reduction on the way out of an exception, ranks
that flush different parameters, a second window that overwrites the first, refused combinations,
reentrant recomputation, tolerances that hide a missing update, and "one collective" that is many.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold import StateError, WindowAborted
from tests.cases.wire_formula import (
    MODES,
    SCOPES,
    assert_wire,
    num_trainable,
    reduction_kind,
    run_house,
    scope,
    wire,
)
from tests.harness import RankContext, distributed
from tests.rig import (
    STAGES,
    House,
    Tower,
    assert_change,
    assert_ranks_equal,
    counts,
    expected,
    start,
    weights,
    x_of,
)


class Halves(nn.Module):
    """Two houses, each a block."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(House() for _ in range(2))

    def forward(self, x: float, half: int) -> Tensor:
        return self.halves[half](x)


def _reductions(found: dict[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in found.items() if kind != "all_gather"}


# -- U01: the exit reduces in a finally, so after an exception too -----------------------------


def _raises_on_rank_0(ctx: RankContext, engine: onefold.Engine) -> None:
    with engine.coalesce_grad_reduction():
        engine.backward(engine(x_of(ctx.rank, 0)))
        if ctx.rank == 0:
            raise KeyError("of the body")
        engine.backward(engine(x_of(ctx.rank, 1)))


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_u01_an_exception_reduces_nothing(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(), stage)
    mark = engine.ledger.mark()
    error: type[Exception] = KeyError if ctx.rank == 0 else WindowAborted
    with pytest.raises(error):
        _raises_on_rank_0(ctx, engine)
    assert engine.last_window is not None
    assert engine.last_window.outcome == "aborted"
    with pytest.raises(StateError, match="aborted"):
        engine.step()
    assert_wire(_reductions(counts(engine, mark)), {})
    assert_change(engine, 0.0)
    run_house(ctx, engine, "window", 2)
    engine.step()
    assert_change(engine, expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


# -- U02: a parameter whose gradient is None on some ranks -------------------------------------


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("mode", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_u02_ranks_use_different_parameters(ctx: RankContext, stage: int, mode: str) -> None:
    """Rank 0 uses half 0, the others half 1; each half is the mean over all ranks."""
    engine = start(ctx, Halves(), stage, zero={"reduce_bucket_size": 1})
    mark = engine.ledger.mark()
    with scope(engine, mode):
        engine.backward(engine(x_of(ctx.rank, 0), min(ctx.rank, 1)))
    engine.step()
    assert_wire(counts(engine, mark), wire(engine, mode))
    sums = x_of(0, 0), sum(x_of(rank, 0) for rank in range(1, ctx.world_size))
    for half, total in enumerate(sums):
        w = weights(engine)[f"halves.{half}.w"]
        wanted = torch.zeros(7) - torch.full((7,), total) / ctx.world_size
        assert torch.equal(w, wanted), f"half {half}: {w.tolist()}, expected {wanted.tolist()}"
    assert_ranks_equal(engine)


# -- U03: two windows in one accumulation step --------------------------------------------------


@distributed()
@pytest.mark.parametrize("first", ["window", "armed"])
@pytest.mark.parametrize("stage", STAGES)
def test_u03_two_windows_add_up(ctx: RankContext, stage: int, first: str) -> None:
    engine = start(ctx, House(), stage)
    for steps, second in enumerate(MODES, start=1):
        mark = engine.ledger.mark()
        for k, mode in enumerate((first, second)):
            with scope(engine, mode):
                engine.backward(engine(x_of(ctx.rank, k)))
        engine.step()
        # At stages 0-1 an armed backward has left when more comes: that takes a second round.
        rounds = 2 if stage >= 2 or first == "armed" else 1
        found = _reductions(counts(engine, mark))
        assert_wire(found, {reduction_kind(engine): rounds * num_trainable(engine)})
        assert_change(engine, steps * expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


# -- U04: combinations that are refused ---------------------------------------------------------


@distributed()
@pytest.mark.parametrize("outer", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_u04_every_nesting_runs(ctx: RankContext, stage: int, outer: str) -> None:
    engine = start(ctx, House(), stage)
    for steps, inner in enumerate(SCOPES, start=1):
        mark = engine.ledger.mark()
        with scope(engine, outer, 2):
            for k in range(2):
                with scope(engine, inner):
                    engine.backward(engine(x_of(ctx.rank, k)))
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, outer))
        assert_change(engine, steps * expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


OWNERS: list[tuple[dict[str, Any], float]] = [
    ({}, 1),
    ({"gradient_accumulation_steps": 2}, 2),
    ({"gradient_accumulation_steps": 2, "managed_gradient_accumulation": False}, 1),
]


@distributed()
@pytest.mark.parametrize("mode", ["bare", *SCOPES])
@pytest.mark.parametrize("stage", STAGES)
def test_u04_every_owner_of_the_boundary(ctx: RankContext, stage: int, mode: str) -> None:
    """Two micro-steps; the engine counts them, or the caller marks the boundary."""
    for config, divisor in OWNERS:
        engine = start(ctx, House(), stage, config=config)
        mark = engine.ledger.mark()
        for k in range(2):
            if divisor == 1:
                engine.set_gradient_accumulation_boundary(k == 1)
            with scope(engine, mode):
                engine.backward(engine(x_of(ctx.rank, k)))
            engine.step()
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
        # One round per backward where gradients are Shard; else, also armed, one per step.
        rounds = 2 if stage >= 2 and mode != "no_sync" else 1
        if stage < 2 and mode == "armed":
            rounds = 2
        found = _reductions(counts(engine, mark))
        assert_wire(found, {reduction_kind(engine): rounds * num_trainable(engine)})
        assert_change(engine, expected(ctx.world_size, 2, divisor=divisor))
        assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("key", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", SCOPES)
def test_u04_low_precision(ctx: RankContext, mode: str, stage: int, key: str) -> None:
    """13 and 26 are exact in both."""
    low = {"enabled": True} if key == "bf16" else {"enabled": True, "initial_scale_power": 4}
    engine = start(ctx, House(), stage, config={key: low})
    run_house(ctx, engine, mode, 2)
    engine.step()
    assert_change(engine, expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


# -- U05: reentrant recomputation inside a window -----------------------------------------------


class Recomputed(nn.Module):
    """One block inside two checkpoints; its gradient is 3 x."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([House()])
        self._reentrant = reentrant

    def forward(self, x: float) -> Tensor:
        inputs = [torch.tensor(factor * x, requires_grad=True) for factor in (1.0, 2.0)]
        parts = [checkpoint(self.blocks[0], one, use_reentrant=self._reentrant) for one in inputs]
        return parts[0] + parts[1]


@distributed()
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])
@pytest.mark.parametrize("mode", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_u05_recomputation(ctx: RankContext, stage: int, mode: str, reentrant: bool) -> None:
    engine = start(ctx, Recomputed(reentrant), stage)
    mark = engine.ledger.mark()
    with scope(engine, mode, 2):
        for k in range(2):
            engine.backward(engine(x_of(ctx.rank, k)))
    engine.step()
    assert_wire(counts(engine, mark), wire(engine, mode))
    w = weights(engine)["blocks.0.w"]
    assert torch.equal(w, torch.full((7,), -3 * expected(ctx.world_size, 2)))
    assert_ranks_equal(engine)


# -- U06: a tolerance that hides a missing update -------------------------------------------------


@distributed()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_u06_many_steps_exactly(ctx: RankContext, stage: int, mode: str) -> None:
    """And a run that lost one backward of five steps is told apart."""
    engine = start(ctx, House(), stage)
    moved = 0.0
    for step in range(5):
        run_house(ctx, engine, mode, 1 + step % 3)
        engine.step()
        moved += expected(ctx.world_size, 1 + step % 3)
        assert_change(engine, moved)
    assert_ranks_equal(engine)
    run_house(ctx, engine, mode, 1)
    engine.zero_grad()
    engine.step()
    with pytest.raises(AssertionError):
        assert_change(engine, moved + expected(ctx.world_size, 1))
    assert_change(engine, moved)


# -- U07: "one collective" is one per unit ---------------------------------------------------------


def _bytes(engine: onefold.Engine, kind: str) -> int:
    """What one rank sends for one collective of ``kind`` per trainable unit."""
    plan = engine.plan
    total = 0
    for unit in plan.units:
        if unit.is_trainable:
            shard = unit.layout.shard_numel * unit.dtype.itemsize
            if kind == "all_reduce":
                total += 2 * shard * (plan.num_replicas - 1) // plan.num_replicas
            else:
                total += shard * (plan.num_shards - 1)
    return total


@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("bucket", [20, 10**6])
@pytest.mark.parametrize("stage", STAGES)
def test_u07_the_formula(ctx: RankContext, stage: int, bucket: int) -> None:
    engine = start(ctx, Tower(), stage, zero={"reduce_bucket_size": bucket})
    mark = engine.ledger.mark()
    with engine.coalesce_grad_reduction() as window:
        for k in range(3):
            tokens = (ctx.data(4, 3, key=k).abs() * 97).long() % 11
            engine.backward(engine(tokens).sum())
    at_exit = counts(engine, mark)
    engine.step()
    found = engine.ledger.since(mark)
    assert_wire(counts(engine, mark), wire(engine, "window", backwards=3))
    for kind, total in found.items():
        assert total.bytes_out == total.bytes_in == _bytes(engine, kind), kind
    assert window.collectives == at_exit
    assert window.bytes_sent == sum(_bytes(engine, kind) for kind in at_exit)
    assert_ranks_equal(engine)
