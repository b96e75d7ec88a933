"""Contract 1, once: every gradient between two steps is in the sum exactly once."""

import random
from itertools import product
from typing import Any

import pytest
import torch

import onefold
from onefold.errors import StateError, WindowAborted
from tests.contract.helpers import (
    STAGES,
    WAYS,
    WORLDS,
    Books,
    Fault,
    House,
    Program,
    Way,
    by_engine,
    fail,
    failing,
    feed,
    mixed,
    params_of,
    run_program,
    start,
    street,
    x_of,
)
from tests.harness import RankContext, distributed
from tests.rig import assert_change, assert_ranks_equal, expected

MIXTURES: list[Program] = [
    [1],
    [4],
    [("window", [1])],
    [("window", [4])],
    [("armed", [1])],
    [("armed", [4])],
    [("window", [])],
    [("no_sync", [3])],
    [("window", [2]), ("window", [3])],
    [("armed", [2]), ("armed", [1]), ("armed", [2])],
    [2, ("window", [2]), 1],
    [1, ("armed", [2]), 1],
    [("window", [1, ("window", [2]), 1])],
    [("armed", [("armed", [1]), ("window", [("window", [1])]), 1])],
    [("no_sync", [2]), 1],
    [1, ("no_sync", [2])],
    [("no_sync", [1]), ("window", [2])],
    [("no_sync", [1]), ("armed", [2]), ("no_sync", [1])],
    [("no_sync", [1, ("window", [2]), ("armed", [1]), 1])],
    [("window", [1, ("no_sync", [2]), 1])],
    [("armed", [("no_sync", [1]), 1]), 1],
    [("no_sync", [("no_sync", [1]), 1])],
    ["mark", 1],
    [1, "mark", 1],
    [("window", [2, "mark", 1])],
    [("window", [1, "mark", 1, 1])],
    [1, ("no_sync", [1, "mark", 1]), 1],
]


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_mixture_of_scopes_is_exact(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for program in MIXTURES:
        run_program(engine, program, lambda k: feed(ctx, engine, books, k))
        engine.step()
        books.close()
        books.check(engine, program)


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_house_is_exact_for_any_number_of_backwards(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(), stage)
    total = 0.0
    for n in (1, 2, 5):
        with engine.coalesce_grad_reduction():
            for k in range(n):
                engine.backward(engine(12 * x_of(ctx.rank, k)))
        engine.step()
        total += 12 * expected(ctx.world_size, n)
        assert_change(engine, total)


PLACES: list[Program] = [[2], [("window", [2])], [("armed", [2])], [("no_sync", [2])], ["mark", 1]]


@distributed(world_size=[1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_whichever_api_ran_the_backward(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for name, way in WAYS.items():

        def backward(k: int, way: Way = way) -> None:
            way(engine, x_of(ctx.rank, k))
            for rank in range(ctx.world_size):
                books.add(x_of(rank, k))

        for program in PLACES:
            run_program(engine, program, backward)
            engine.step()
            books.close()
            books.check(engine, (name, program))


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("loss", ["linear", "curved"])
@pytest.mark.parametrize("stage", STAGES)
def test_create_graph(ctx: RankContext, stage: int, loss: str) -> None:
    """Autograd then replaces `.grad` instead of adding to it, with or without a grad_fn."""
    engine = street(ctx, stage)
    books = Books(ctx.world_size)

    def backward(k: int) -> None:
        value = engine(x_of(ctx.rank, k))
        if loss == "curved":
            value = value + 0.0 * engine(1.0) ** 2
        value.backward(create_graph=k % 2 == 0)
        for rank in range(ctx.world_size):
            books.add(x_of(rank, k))

    for program in (
        [3],
        [("window", [3])],
        [("armed", [3])],
        [("no_sync", [3])],
        [2, ("window", [2])],
    ):
        run_program(engine, program, backward)
        engine.step()
        books.close()
        books.check(engine, program)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("seed", range(2))
def test_random_programs_are_exact(ctx: RankContext, stage: int, seed: int) -> None:
    """The same random scopes, ways and subsets of parameters on every rank, for many steps."""
    draw = random.Random(seed).randrange
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    subsets = [(0, 1, 2, 3), (0, 1, 2, 3), (1,), (3, 0), (2, 1)]

    def backward(k: int) -> None:
        way = draw(3)
        if way == 0:
            feed(ctx, engine, books, k, subsets[draw(len(subsets))])
            return
        list(WAYS.values())[draw(len(WAYS))](engine, x_of(ctx.rank, k))
        for rank in range(ctx.world_size):
            books.add(x_of(rank, k))

    for step in range(8):
        program = list(mixed(["bare", "window", "armed", "no_sync", "bare"], 3, draw))
        run_program(engine, program, backward)
        engine.step()
        books.close()
        books.check(engine, (seed, step, program))


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_boundaries(ctx: RankContext, stage: int, managed: bool) -> None:
    """Micro-steps of different shapes; the flag ends a step early or puts it off."""
    config: dict[str, Any] = {"gradient_accumulation_steps": 3}
    if not managed:
        config["managed_gradient_accumulation"] = False
    engine = street(ctx, stage, config=config)
    books = Books(ctx.world_size)
    shapes: list[Program] = [[1], [("window", [2])], [("no_sync", [1]), 1], [("armed", [2])], []]
    flags = [None, None, None, None, True, False, None, None, None, False, True]
    taken = 0
    for turn, flag in enumerate(flags):
        if flag is not None:
            engine.set_gradient_accumulation_boundary(flag)
        steps = (taken == 2 or not managed) if flag is None else flag
        assert engine.is_gradient_accumulation_boundary() is steps
        run_program(engine, shapes[turn % len(shapes)], lambda k: feed(ctx, engine, books, k))
        before = engine.global_steps
        engine.step()
        assert engine.global_steps == before + steps, f"turn {turn}"
        taken += 1
        if steps:
            books.close(taken if managed else 1)
            taken = 0
        books.check(engine, f"turn {turn}")


# `.grad` is the truth: what the user does to it is in the sum, once.


@distributed(world_size=[1, 3])
@pytest.mark.parametrize("scope", ["window", "no_sync"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_the_user_makes_of_grad_is_taken(ctx: RankContext, stage: int, scope: str) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for edit in ("none", "replace", "scale", "in_place"):

        def body(k: int, edit: str = edit) -> None:
            engine.backward(engine(4 * x_of(ctx.rank, k)))
            if k == 1:
                _edit(params_of(engine)[0], edit)

        run_program(engine, [(scope, [3])], body)
        factor = {"none": 0.0, "replace": 2.0, "scale": 0.5, "in_place": 0.5}[edit]
        for rank in range(ctx.world_size):
            for k in range(3):
                books.add(4 * x_of(rank, k), (1, 2, 3))
                books.add(4 * x_of(rank, k) * (factor if k < 2 else 1.0), (0,))
        engine.step()
        books.close()
        books.check(engine, edit)


def _edit(param: torch.nn.Parameter, edit: str) -> None:
    assert param.grad is not None
    if edit == "none":
        param.grad = None
    elif edit == "in_place":
        param.grad.mul_(0.5)
    else:
        param.grad = param.grad * (2.0 if edit == "replace" else 0.5)


# A backward that raised.


def _break(engine: onefold.Engine, how: str) -> None:
    """Run a backward that raises half-way, and catch the error."""
    if how == "submodule":
        houses = engine.module.houses
        poisoned = houses[1](5.0) * 1.0  # type: ignore[index,operator]
        poisoned.register_hook(fail)
        loss = poisoned + houses[2](5.0)  # type: ignore[index,operator]
    elif how == "nested":
        inner = failing(engine, 5.0)
        loss = engine(5.0) * 1.0
        loss.register_hook(lambda _grad: inner.backward())
    else:
        loss = failing(engine, 5.0)
    with pytest.raises(Fault):
        engine.backward(loss) if how == "engine" else loss.backward()


HOWS = ["engine", "loss", "submodule", "nested"]


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("kind", ["window", "armed"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_caught_failure_dooms_the_window(ctx: RankContext, stage: int, kind: str) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    culprit = ctx.world_size - 1
    for how, position in product(HOWS, (0, 2)):

        def body(k: int, how: str = how, position: int = position) -> None:
            if k == position and ctx.rank == culprit:
                _break(engine, how)
            else:
                engine.backward(engine(x_of(ctx.rank, k)))

        with pytest.raises(WindowAborted, match=f"rank {culprit}"):
            run_program(engine, [(kind, [3])], body)
        with pytest.raises(StateError, match="aborted"):
            engine.step()
        books.check(engine, "nothing has moved")
        run_program(engine, [(kind, [2])], lambda k: feed(ctx, engine, books, k))
        engine.step()
        books.close()
        books.check(engine, (how, position))


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_outside_a_caught_failure_is_refused_until_zero_grad(ctx: RankContext, stage: int) -> None:
    """On every rank, because outside windows ranks run the same backwards."""
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for how in HOWS:
        by_engine(engine, 2.0)
        _break(engine, how)
        for _ in range(2):
            with pytest.raises(StateError, match=r"zero_grad\(\)"):
                engine.step()
            with pytest.raises(StateError, match=r"zero_grad\(\)"):
                engine.reduce_gradients()
            by_engine(engine, 3.0)  # a good backward does not mend it
        books.check(engine, "nothing has moved")
        _go_on(ctx, engine, books, how)


def _go_on(ctx: RankContext, engine: onefold.Engine, books: Books, note: str) -> None:
    """After ``zero_grad()`` the next step is right, and so is a window after it."""
    engine.zero_grad()
    feed(ctx, engine, books, 1)
    engine.step()
    books.close()
    books.check(engine, note)
    run_program(engine, [("armed", [2])], lambda k: feed(ctx, engine, books, k))
    engine.step()
    books.close()
    books.check(engine, f"{note}, then a window")


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", [0, 1])
def test_outside_a_failure_of_one_rank_is_refused_on_all(ctx: RankContext, stage: int) -> None:
    """Where nothing is gathered or reduced in the backward the other ranks do not depend on it."""
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for how in HOWS:
        if ctx.rank == 1:
            _break(engine, how)
        else:
            by_engine(engine, 3.0)
        for _ in range(2):
            with pytest.raises(StateError, match="rank 1"):
                engine.step()
        _go_on(ctx, engine, books, how)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_inside_no_sync_is_refused_until_zero_grad(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    for how in HOWS:
        with engine.no_sync():
            by_engine(engine, 3.0)
            if ctx.rank == 0:
                _break(engine, how)
        with pytest.raises(StateError, match="rank 0"):
            engine.step()
        _go_on(ctx, engine, books, how)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("later", ["window", "no_sync"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_before_a_scope_is_never_stepped_on(
    ctx: RankContext, stage: int, later: str
) -> None:
    """Partial sums that a bare backward left do not slip into the step through a later scope."""
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    _break(engine, "loss")
    with pytest.raises((StateError, WindowAborted)):  # noqa: PT012 (either place may refuse)
        run_program(engine, [(later, [2])], lambda k: by_engine(engine, x_of(ctx.rank, k)))
        engine.step()
    books.check(engine, "nothing has moved")
    _go_on(ctx, engine, books, later)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("outer", ["window", "armed", "no_sync"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_nested_window_that_raised_dooms_the_outermost(
    ctx: RankContext, stage: int, outer: str
) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)

    def body(k: int) -> None:
        by_engine(engine, x_of(ctx.rank, k))
        if k == 1 and ctx.rank == 0:
            with pytest.raises(Fault), engine.coalesce_grad_reduction():  # noqa: PT012
                with engine.coalesce_grad_reduction():
                    pass
                raise Fault("inner")

    if outer == "no_sync":
        run_program(engine, [(outer, [3])], body)
    else:
        with pytest.raises(WindowAborted, match=r"rank 0.*inner"):
            run_program(engine, [(outer, [3])], body)
    with pytest.raises(StateError):
        engine.step()
    _go_on(ctx, engine, books, outer)
    assert_ranks_equal(engine)
