"""Contract 3, the plan orders the collectives: in scopes ranks may do what they like."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import RankMismatchError
from tests.contract.helpers import (
    STAGES,
    Books,
    House,
    run_program,
    start,
    street,
    trainable,
    x_of,
)
from tests.harness import RankContext, distributed
from tests.rig import assert_change, assert_ranks_equal, expected

SCOPES = ["window", "armed", "no_sync"]

# What rank r of W uses in its backwards: one tuple of house numbers for each backward.
Chosen = Callable[[int, int], list[tuple[int, ...]]]
CHOICES: dict[str, Chosen] = {
    "other numbers of backwards": lambda r, _w: [(0, 1, 2, 3)] * (r + 1),
    "none on rank 0": lambda r, _w: [(0, 1, 2, 3)] * r,
    "none but on the last": lambda r, w: [(0, 1, 2, 3)] * (2 if r == w - 1 else 0),
    "other parameters": lambda r, _w: [(r % 4,), ((r + 1) % 4,)],
    "another order": lambda r, _w: [tuple((r + i) % 4 for i in range(4))] * 2,
    "one of them on one rank only": lambda r, w: [(0, 3), (2,) if r == w - 1 else (0,)],
    "house 1 nowhere": lambda _r, _w: [(0, 2, 3), (3,)],
    "nothing anywhere": lambda _r, _w: [],
    "last backward uses less": lambda r, _w: [(0, 1, 2, 3), (r % 2,)],
}


def use(ctx: RankContext, engine: onefold.Engine, books: Books, scope: str, choice: Chosen) -> None:
    """Run this rank's part of ``choice`` inside one scope, and enter every rank's."""
    mine = choice(ctx.rank, ctx.world_size)

    def backward(k: int) -> None:
        engine.backward(engine(x_of(ctx.rank, k), mine[k]))

    run_program(engine, [(scope, [len(mine)])], backward)
    for rank in range(ctx.world_size):
        for k, which in enumerate(choice(rank, ctx.world_size)):
            books.add(x_of(rank, k), which)


@distributed(world_size=[2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_do_different_things(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for scope, (name, choice) in product(SCOPES, CHOICES.items()):
        use(ctx, engine, books, scope, choice)
        engine.step()
        books.close()
        books.check(engine, (scope, name))
    assert_ranks_equal(engine)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_different_things_in_several_scopes_of_one_step(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for scopes in (SCOPES, ["no_sync", "window"], ["armed", "armed"], ["no_sync", "armed"]):
        choices = list(CHOICES.values())
        for position, scope in enumerate(scopes):
            use(ctx, engine, books, scope, choices[position])
            use(ctx, engine, books, scope, choices[-1 - position])
        engine.step()
        books.close()
        books.check(engine, scopes)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_wrong_declaration_is_no_wrong_sum(ctx: RankContext, stage: int, off: int) -> None:
    """More or fewer backwards than declared, on one rank only."""
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for _ in range(2):
        with engine.coalesce_grad_reduction(backwards=3):
            for k in range(3 + (off if ctx.rank == 1 else 0)):
                engine.backward(engine(x_of(ctx.rank, k)))
        for rank in range(ctx.world_size):
            for k in range(3 + (off if rank == 1 else 0)):
                books.add(x_of(rank, k))
        engine.step()
        books.close()
        books.check(engine)


@distributed(world_size=[2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_house_with_the_rig_s_own_arithmetic(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(), stage)
    own = [range(2 * rank + 1) for rank in range(ctx.world_size)]
    with engine.coalesce_grad_reduction():
        for k in own[ctx.rank]:
            engine.backward(engine(12 * x_of(ctx.rank, k)))
    engine.step()
    assert_change(engine, 12 * expected(ctx.world_size, own))


class Fork(nn.Module):
    """A trunk, a trainable branch and a frozen one, which is not even in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = House(5)
        self.branches = nn.ModuleList([House(6), House(9)])
        self.branches[1].requires_grad_(False)

    def forward(self, x: float, branch: int, *, uses_trunk: bool = True) -> torch.Tensor:
        y = self.branches[branch](x)
        return self.trunk(x) + y if uses_trunk else y


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_end_on_a_frozen_branch(ctx: RankContext, stage: int, scope: str) -> None:
    """Rank 0's last backward reaches the trunk only, the others' reach the branch only."""
    engine = start(ctx, Fork(), stage, zero={"reduce_bucket_size": 1})
    x = 6.0 * (1 + ctx.rank)

    def backward(k: int) -> None:
        if k == 0:
            engine.backward(engine(x, 0))
        elif ctx.rank == 0:
            engine.backward(engine(x, 1))
        else:
            engine.backward(engine(x, 0, uses_trunk=False))

    run_program(engine, [(scope, [2])], backward)
    engine.step()
    others = sum(6.0 * (1 + rank) for rank in range(1, ctx.world_size))
    state = engine.full_state_dict()
    trunk, branch = (12.0 + others) / ctx.world_size, (6.0 + 2 * others) / ctx.world_size
    assert torch.equal(state["trunk.w"], torch.full((5,), -trunk))
    assert torch.equal(state["branches.0.w"], torch.full((6,), -branch))
    assert torch.equal(state["branches.1.w"], torch.zeros(9))


# What a flush consists of.


def started(engine: onefold.Engine, body: Callable[[], Any]) -> list[str]:
    """Names of the units whose reductions ``body`` starts, in their order."""
    before = len(engine.ledger.recent)
    body()
    return [
        entry.unit
        for entry in list(engine.ledger.recent)[before:]
        if entry.kind in ("reduce_scatter", "all_reduce")
    ]


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_flush_reduces_what_is_pending_anywhere_in_plan_order(
    ctx: RankContext, stage: int
) -> None:
    engine = street(ctx, stage)
    units = trainable(engine)
    assert len(units) == 4
    numbers = {"houses.0.w": 0, "houses.1.w": 1, "houses.2.w": 2, "gate": 3}
    order = [numbers[unit.slots[0].name] for unit in units]
    for choice in CHOICES.values():
        used = {
            i for rank in range(ctx.world_size) for w in choice(rank, ctx.world_size) for i in w
        }
        names = [unit.name for unit, i in zip(units, order, strict=True) if i in used]

        def step(choice: Chosen = choice) -> None:
            use(ctx, engine, Books(ctx.world_size), "window", choice)
            engine.step()

        assert started(engine, step) == names


@distributed(world_size=[2])
@pytest.mark.parametrize("stage", STAGES)
def test_armed_reductions_leave_in_plan_order(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    names = [unit.name for unit in trainable(engine)]
    for which in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):

        def step(which: tuple[int, ...] = which) -> None:
            with engine.coalesce_grad_reduction(backwards=1):
                engine.backward(engine(1.0, which))
            engine.step()

        assert started(engine, step) == names


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_flush_begins_with_one_exchange(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    control = engine._world.control
    window = engine.coalesce_grad_reduction()
    with window:
        engine.backward(engine(1.0))
        before = control.count
    assert control.count == before + 1
    with engine.no_sync():
        engine.backward(engine(1.0))
    assert control.count == before + 1, "no_sync exchanges nothing"
    engine.step()
    # The norm is a second one, where it has to be summed over ranks.
    assert control.count == before + 2 + (ctx.world_size > 1 and stage > 0)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_sizes_come_from_the_plan(ctx: RankContext, stage: int) -> None:
    """A rank that has nothing sends as much as any other."""
    engine = street(ctx, stage)
    with engine.coalesce_grad_reduction():
        if ctx.rank == 0:
            engine.backward(engine(1.0))
        mark = engine.ledger.mark()
    engine.step()
    sent = engine.ledger.since(mark)
    kind = "all_reduce" if stage == 0 else "reduce_scatter"
    ranks, times = ctx.world_size, 2 if stage == 0 else 1
    sizes = [times * (ranks - 1) * unit.layout.numel * 4 // ranks for unit in trainable(engine)]
    assert sent[kind].count == 4
    assert sent[kind].bytes_out == sum(sizes)


@distributed(world_size=[2])
@pytest.mark.parametrize("transport", ["cross-memory", "direct", "native"])
@pytest.mark.parametrize("stage", [2, 3])
def test_outside_a_window_other_reductions_are_a_loud_error(
    ctx: RankContext, stage: int, transport: str
) -> None:
    """Where a backward reduces as it goes ranks must run the same backwards.

    Both ranks reduce one unit, not the same one but of the same padded size.
    """
    settings = {"transport": transport, "timeout_s": 1}
    engine = street(ctx, stage, config={"onefold": settings})
    with engine.full_parameters():  # so that stage 3 has nothing to gather in the backward
        engine.backward(engine(1.0, (ctx.rank,)))
    with pytest.raises(RankMismatchError, match="same"):
        engine.step()
