"""Contract 4, a step is a transaction: a body that fails on any rank drops it on all ranks."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.errors import StateError, WindowAborted
from tests.contract.helpers import (
    STAGES,
    WORLDS,
    Books,
    Fault,
    arena,
    failing,
    feed,
    params_of,
    run_program,
    see_arrivals,
    street,
    x_of,
)
from tests.harness import RankContext, distributed
from tests.rig import assert_ranks_equal

WHENS = ["before", "between", "during", "after"]


def run_window(engine: onefold.Engine, kind: str, body: Callable[[int], None]) -> None:
    """Two backwards, then ``body(2)`` which may raise after them."""
    with engine.coalesce_grad_reduction(backwards=2 if kind == "armed" else None):
        body(0)
        body(1)
        body(2)


def body_of(
    ctx: RankContext, engine: onefold.Engine, when: str, fails: bool, error: BaseException
) -> Callable[[int], None]:
    """Two backwards; on a failing rank ``error`` is raised at ``when``."""

    def body(k: int) -> None:
        if fails and (k, when) in ((0, "before"), (1, "between"), (2, "after")):
            raise error
        if fails and (k, when) == (1, "during"):
            half = engine(3.0, (0, 1)) * 1.0
            half.register_hook(_raises(error))
            engine.backward(half + engine(3.0, (2, 3)))
        if k < 2:
            engine.backward(engine(x_of(ctx.rank, k)))

    return body


def _raises(error: BaseException) -> Callable[[torch.Tensor], None]:
    def hook(_grad: torch.Tensor) -> None:
        raise error

    return hook


BACKWARDS = {"before": 0, "between": 1, "during": 1, "after": 2}
"""Complete backwards of a failing rank."""


def abort(ctx: RankContext, engine: onefold.Engine) -> None:
    """A window whose body raises at once on rank 0."""
    with pytest.raises(Fault if ctx.rank == 0 else WindowAborted):
        run_window(engine, "window", body_of(ctx, engine, "before", ctx.rank == 0, Fault("stop")))


def feed_kth(
    ctx: RankContext, engine: onefold.Engine, books: Books, k: int, _position: int
) -> None:
    """``feed`` whose k does not depend on the program's own count."""
    feed(ctx, engine, books, k)


def check_refused(engine: onefold.Engine) -> None:
    for call in (engine.step, engine.optimizer.step, engine.reduce_gradients):
        with pytest.raises(StateError, match="aborted"):
            call()


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("kind", ["window", "armed"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_body_that_raises_drops_the_step_everywhere(
    ctx: RankContext, stage: int, kind: str
) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    culprits = [{ctx.world_size - 1}, set(range(ctx.world_size))]
    for when, culprit in product(WHENS, culprits):
        note = (when, culprit)
        error = Fault(f"on purpose, {when}")
        if ctx.rank in culprit:
            with pytest.raises(Fault) as caught:
                run_window(engine, kind, body_of(ctx, engine, when, True, error))
            assert caught.value is error, note
            assert error.__cause__ is None
            assert error.__context__ is None
            assert not getattr(error, "__notes__", [])
        else:
            with pytest.raises(WindowAborted) as aborted:
                run_window(engine, kind, body_of(ctx, engine, when, False, error))
            assert aborted.value.rank == min(culprit), note
            assert "Fault" in aborted.value.reason
            assert f"on purpose, {when}" in aborted.value.reason
            assert aborted.value.dropped_backwards == 2
            for said in (f"rank {min(culprit)}", f"on purpose, {when}", "2 backward"):
                assert said in str(aborted.value)
        assert engine.last_window is not None
        assert engine.last_window.outcome == "aborted"
        check_refused(engine)
        assert all(param.grad is None for param in params_of(engine)), note
        assert arena(engine).leased_bytes == 0, note
        books.check(engine, "nothing has moved")
        run_program(engine, [(kind, [2])], lambda k: feed(ctx, engine, books, k))
        engine.step()
        books.close()
        books.check(engine, note)
    assert_ranks_equal(engine)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("kind", ["window", "armed"])
@pytest.mark.parametrize("stage", STAGES)
def test_everything_since_the_last_step_is_dropped(ctx: RankContext, stage: int, kind: str) -> None:
    """Also what an earlier window, no_sync or bare backward of the same step has reduced."""
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for earlier in (
        [("window", [2])],
        [("armed", [2])],
        [("no_sync", [1])],
        [2],
        [1, ("window", [1])],
    ):
        run_program(engine, earlier, lambda k: engine.backward(engine(x_of(ctx.rank, k))))
        error = Fault("late")
        with pytest.raises(Fault if ctx.rank == 1 else WindowAborted):
            run_window(engine, kind, body_of(ctx, engine, "after", ctx.rank == 1, error))
        assert all(unit.gradients.grad_shard is None for unit in engine._trainable)
        check_refused(engine)
        run_program(engine, [("window", [1]), 1], lambda k: feed(ctx, engine, books, k))
        engine.step()
        books.close()
        books.check(engine, earlier)


@distributed(world_size=[2])
@pytest.mark.parametrize("stage", STAGES)
def test_micro_steps_that_were_counted_are_dropped_too(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage, config={"gradient_accumulation_steps": 2})
    books = Books(ctx.world_size)
    engine.backward(engine(3.0))
    engine.step()  # counts
    abort(ctx, engine)
    for k in range(2):
        run_program(engine, [("window", [1])], partial(feed_kth, ctx, engine, books, k))
        engine.step()
    books.close(micro_steps=2)
    books.check(engine)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_step_is_refused_until_a_backward_has_run_on_any_rank(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    abort(ctx, engine)
    check_refused(engine)
    with engine.coalesce_grad_reduction():
        pass
    check_refused(engine)
    with engine.no_sync():
        pass
    check_refused(engine)
    with engine.coalesce_grad_reduction():
        if ctx.rank == 1:
            engine.backward(engine(6.0))
    books.add(6.0)
    engine.step()
    books.close()
    books.check(engine)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_any_kind_of_error_propagates_unchanged(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    errors = [KeyboardInterrupt("stop"), SystemExit(3), MemoryError(), WindowAborted(0, "mine", 1)]
    for error in errors:
        with pytest.raises(type(error) if ctx.rank == 0 else WindowAborted) as caught:
            run_window(engine, "armed", body_of(ctx, engine, "between", ctx.rank == 0, error))
        assert ctx.rank or caught.value is error
        run_program(engine, [("armed", [2])], lambda k: feed(ctx, engine, books, k))
        engine.step()
        books.close()
        books.check(engine, error)


@distributed(world_size=[2])
@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_names_the_first_that_failed(ctx: RankContext, stage: int) -> None:
    """A caught failure and a raised one in the same window."""
    engine = street(ctx, stage)
    error = Fault("raised")

    def body(k: int) -> None:
        if ctx.rank == 1:
            raise error
        with pytest.raises(Fault):
            failing(engine, 3.0).backward()

    with pytest.raises(Fault if ctx.rank else WindowAborted) as caught:
        run_window(engine, "window", body)
    if ctx.rank == 0:
        assert isinstance(caught.value, WindowAborted)
        assert caught.value.rank == 0
    else:
        assert caught.value is error


# Before the exchange.


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_added_before_the_exchange(ctx: RankContext, stage: int) -> None:
    """Armed reductions have left, and no rank has added one."""
    engine = street(ctx, stage)
    mark = engine.ledger.mark()
    with engine.coalesce_grad_reduction(backwards=1):
        engine.backward(engine(1.0))
        sent = engine.ledger.since(mark)
        kind = "all_reduce" if stage == 0 else "reduce_scatter"
        assert sent[kind].count == 4, "armed"
        assert all(unit.gradients.grad_shard is None for unit in engine._trainable)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arrives", [True, False], ids=["arrives", "never seen to"])
def test_what_arrives_in_an_armed_backward_is_not_added_before_the_exchange(
    ctx: RankContext, stage: int, arrives: bool
) -> None:
    """And is dropped where a body fails, or somebody drops it, after it has arrived."""
    see_arrivals(ctx, arrives=arrives)
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for end in ("fails", "drops", "goes on", "ends"):
        error = Fault("late")

        def body(k: int, end: str = end, error: Fault = error) -> None:
            feed(ctx, engine, books, k)
            if k > 0:
                assert all(unit.gradients.grad_shard is None for unit in engine._trainable)
            if k == 1 and end == "fails" and ctx.rank == 1:
                raise error
            if k == 1 and end == "drops":
                engine.zero_grad()
                books.drop()

        raised: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if end == "fails":
            raised = pytest.raises(Fault if ctx.rank == 1 else WindowAborted)
        with raised, engine.coalesce_grad_reduction(backwards=2):
            for k in range(3 if end in ("drops", "goes on") else 2):
                body(k)
        if end == "fails":
            books.drop()
            assert arena(engine).leased_bytes == 0
            continue
        engine.step()
        books.close()
        books.check(engine, end)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_rank_completes_what_the_plan_prescribes(ctx: RankContext, stage: int) -> None:
    """All ranks have started the same collectives: entry gathers and armed reductions."""
    engine = street(ctx, stage)
    fails = ctx.rank == 0
    for when in WHENS:
        mark = engine.ledger.mark()
        with pytest.raises(Fault if fails else WindowAborted):
            run_window(engine, "armed", body_of(ctx, engine, when, fails, Fault("stop")))
        counts = {kind: total.count for kind, total in engine.ledger.since(mark).items()}
        kind = "all_reduce" if stage == 0 else "reduce_scatter"
        assert counts == {kind: 4} | ({"all_gather": 4} if stage == 3 else {}), when


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_the_control_group_waits_longest(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage, config={"onefold": {"timeout_s": 100}})
    mesh, control = engine.parts.wires[0].mesh, engine._world.control._group
    data = mesh.shard.process_group or mesh.replicate.process_group
    if ctx.world_size == 1:
        assert data is None
        assert control is None
        return
    assert data is not None
    assert control is not None
    assert timeout_of(data) == timedelta(seconds=100)
    assert timeout_of(control) > timeout_of(data)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    options: Any = group._get_backend(torch.device("cpu")).options
    return options._timeout


# A collective of the user's own.


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_peer_blocked_in_the_user_s_collective_learns_after_its_timeout(
    ctx: RankContext, stage: int
) -> None:
    """Rank 0 fails; rank 1 waits for it in a group of the user's; a third rank learns at once."""
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1), backend="gloo")
    if ctx.rank < 2:
        assert isinstance(group, dist.ProcessGroup)
        ctx.cleanup(dist.destroy_process_group, group)
    expected = {0: Fault, 1: RuntimeError}.get(ctx.rank, WindowAborted)

    def body(k: int) -> None:
        if k == 1 and ctx.rank == 0:
            raise Fault("before the user's collective")
        if k == 1 and ctx.rank == 1:
            dist.all_reduce(torch.ones(1), group=group)
        if k < 2:
            engine.backward(engine(1.0))

    with pytest.raises(expected) as caught:
        run_window(engine, "armed", body)
    assert not isinstance(caught.value, WindowAborted) or caught.value.rank == 0
    check_refused(engine)
    for _ in range(2):
        run_program(engine, [("armed", [2]), 1], lambda k: feed(ctx, engine, books, k))
        engine.step()
        books.close()
        books.check(engine)
