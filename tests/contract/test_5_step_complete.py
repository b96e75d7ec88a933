"""Contract 5, step() is complete: it begins with reduce_gradients(), and refuses in a scope."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onefold
from onefold.errors import StateError
from tests.contract.helpers import (
    STAGES,
    WORLDS,
    Books,
    Program,
    feed,
    params_of,
    run_program,
    street,
    x_of,
)
from tests.harness import RankContext, distributed
from tests.rig import counts

PROGRAMS: list[Program] = [
    [2],
    [("no_sync", [2])],
    [("window", [2])],
    [("armed", [2])],
    [("no_sync", [1]), ("window", [1]), 1],
]


def norm_of(engine: onefold.Engine, books: Books) -> float:
    """The 2-norm of the averaged gradient, in fp64, rounded to fp32."""
    square = sum(
        param.numel() * float(books.mean(i)) ** 2 for i, param in enumerate(params_of(engine))
    )
    return float(torch.tensor(square, dtype=torch.float64).sqrt().float())


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_reduce_gradients_by_hand_then_read_then_step(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    assert engine.get_global_grad_norm() is None
    for program in PROGRAMS:
        run_program(engine, program, lambda k: feed(ctx, engine, books, k))
        engine.reduce_gradients()
        for i, param in enumerate(params_of(engine)):
            found = engine.full_grad(param)
            assert found is not None
            assert torch.equal(found, books.mean(i).expand_as(found)), (program, i)
        assert engine.get_global_grad_norm() == norm_of(engine, books), program
        mark = engine.ledger.mark()
        engine.reduce_gradients()
        assert counts(engine, mark) == {}, "there was nothing left"
        engine.step()
        assert counts(engine, mark).keys() <= {"all_gather"}, "step() only publishes"
        books.close()
        books.check(engine, program)
        assert [engine.full_grad(param) for param in params_of(engine)] == [None] * 4


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_step_alone_reduces_whatever_is_pending(ctx: RankContext, stage: int) -> None:
    """Also units that a bare backward has left incomplete, and backwards after a reduction."""
    engine = street(ctx, stage, zero={"reduce_bucket_size": 1000})
    books = Books(ctx.world_size)
    feed(ctx, engine, books, 0, (0, 2))
    engine.reduce_gradients()
    feed(ctx, engine, books, 1)
    with engine.no_sync():
        feed(ctx, engine, books, 2, (3,))
    engine.reduce_gradients()
    feed(ctx, engine, books, 3, (1, 3))
    norm = norm_of(engine, books)
    engine.step()
    assert engine.get_global_grad_norm() == norm
    books.close()
    books.check(engine)
    assert engine.global_steps == 1


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_with_nothing_to_do_leaves_everything_alone(ctx: RankContext, stage: int) -> None:
    """No gradient is None to the optimizer: no weight decay, no moments, no step count."""
    make = lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)  # noqa: E731
    engine = street(ctx, stage, optimizer=make)
    with engine.full_parameters(), torch.no_grad():
        for param in params_of(engine):
            param.fill_(1.0)
    engine.step()
    engine.backward(engine(1.0, (0,)))
    engine.step()
    state = engine.full_state_dict()
    assert torch.equal(state["houses.1.w"], torch.ones(1))
    assert torch.equal(state["gate"], torch.ones(3))
    assert not torch.equal(state["houses.0.w"], torch.ones(7))
    touched = [s for s in engine.optimizer.state.values() if s]
    assert all(int(s["step"]) == 1 for s in touched)


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_full_grad_before_the_reduction_is_refused(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    with engine.no_sync():
        engine.backward(engine(1.0))
    for param in params_of(engine):
        with pytest.raises(StateError, match="pending"):
            engine.full_grad(param)
    engine.reduce_gradients()
    assert all(engine.full_grad(param) is not None for param in params_of(engine))


# Refusals.


def _calls(engine: onefold.Engine) -> list[Callable[[], Any]]:
    return [engine.step, engine.optimizer.step, engine.reduce_gradients]


def refuses(engine: onefold.Engine) -> None:
    """All ways to step are refused before any collective, also if one rank alone tries."""
    mark, exchanges = engine.ledger.mark(), engine._world.control.count
    for call in _calls(engine):
        with pytest.raises(StateError, match="inside"):
            call()
    assert counts(engine, mark) == {}
    assert engine._world.control.count == exchanges


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("kind", ["armed", "no_sync"])
@pytest.mark.parametrize("stage", STAGES)
def test_step_inside_a_scope_is_refused_and_harms_nothing(
    ctx: RankContext, stage: int, kind: str
) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for nested in ([2], [1, (kind, [1])], [("no_sync", [1]), ("window", [1])]):

        def backward(k: int) -> None:
            if ctx.rank == 0:
                refuses(engine)
            feed(ctx, engine, books, k)
            if ctx.rank == ctx.world_size - 1:
                refuses(engine)

        run_program(engine, [(kind, nested)], backward)
        engine.step()
        books.close()
        books.check(engine, nested)
    assert engine.micro_steps == engine.global_steps == 3


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_step_inside_a_backward_is_refused_and_harms_nothing(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for x in (x_of(rank, 0) for rank in range(ctx.world_size)):
        books.add(x)
    refused: list[int] = []

    def hook(_grad: torch.Tensor) -> None:
        for call in _calls(engine):
            with pytest.raises(StateError, match="inside a backward"):
                call()
            refused.append(1)

    loss = engine(x_of(ctx.rank, 0)) * 1.0
    loss.register_hook(hook)
    loss.backward()
    assert len(refused) == 3
    engine.step()
    books.close()
    books.check(engine)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_step_with_a_closure_is_refused(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    engine.backward(engine(1.0))
    with pytest.raises(StateError, match="closure"):
        engine.optimizer.step(lambda: 0.0)
    engine.step()


@distributed(world_size=[2])
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_of_no_gradient_is_zero(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    engine.step()
    assert engine.get_global_grad_norm() == 0.0
