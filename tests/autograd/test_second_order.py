"""Gradients of gradients: the graph of a backward reads the parameters again.

Where parameters are Shard and nobody else holds them, a backward under ``create_graph`` keeps its
blocks unsharded until the step: nothing of the engine runs before the first node of the backward
through such a graph, so what that reads must be there already.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.autograd.helpers import (
    LR,
    MODES,
    Forward,
    Net,
    Twin,
    assert_near,
    batch,
    check,
    check_modes,
    engine_and_twin,
    finish,
    loss_of,
    plain,
    scoped,
)
from tests.cases.modes import during
from tests.harness import RankContext, distributed
from tests.rig import STAGES, counts, start

KINDS = ["penalty", "create_graph", "both", "hvp", "third"]


def _gradient(out: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return gradient


def _penalty(_module: nn.Module, forward: Forward, rank: int, k: int) -> None:
    """The norm of the gradient at the inputs is pulled towards 1."""
    x = batch(rank, k)
    out = forward(x)
    slack = _gradient(out, x).norm(dim=1) - 1
    (loss_of(out) + slack.square().mean()).backward()


def _create_graph(_module: nn.Module, forward: Forward, rank: int, k: int) -> None:
    """The first order only, under ``create_graph``, which replaces `.grad`."""
    loss_of(forward(batch(rank, k))).backward(create_graph=True)


def _both(_module: nn.Module, forward: Forward, rank: int, k: int) -> None:
    """A loss under ``create_graph``, then the penalty through the inputs' gradient."""
    x = batch(rank, k)
    loss_of(forward(x)).backward(create_graph=True)
    assert x.grad is not None
    x.grad.square().sum().backward()


def _hvp(module: nn.Module, forward: Forward, rank: int, k: int) -> None:
    """A Hessian-vector product at the parameters becomes the gradient; no input takes part."""
    params = list(module.parameters())
    loss = loss_of(forward(batch(rank, k).detach()))
    gradients = torch.autograd.grad(loss, params, create_graph=True)
    _dot(gradients).backward()


def _third(_module: nn.Module, forward: Forward, rank: int, k: int) -> None:
    """The penalty of the gradient of a penalty."""
    x = batch(rank, k)
    first = _gradient(forward(x), x)
    _gradient(first.square().sum(), x).square().sum().backward()


def _dot(gradients: tuple[Tensor, ...]) -> Tensor:
    """With a fixed direction in the space of the parameters."""
    parts = [
        (g * torch.linspace(0.5, 1.5, g.numel(), dtype=g.dtype).view(g.shape)).sum()
        for g in gradients
    ]
    return torch.stack(parts).sum()


BACKWARDS = {
    "penalty": _penalty,
    "create_graph": _create_graph,
    "both": _both,
    "hvp": _hvp,
    "third": _third,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_second_order_in_every_mode(ctx: RankContext, stage: int, kind: str) -> None:
    check_modes(ctx, Net(), stage, BACKWARDS[kind])


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_what_autograd_grad_returns(ctx: RankContext, stage: int) -> None:
    """A Hessian-vector product is this rank's own, and leaves nothing in the step."""
    engine, twin = engine_and_twin(ctx, Net(), stage)
    for mode in MODES:
        with during(mode):
            own = _product(twin.module, twin.module, ctx.rank)
            twin.accumulate(plain, 1)
            with scoped(engine, mode, 1):
                found = _product(engine.module, engine, ctx.rank)
                plain(engine.module, engine, ctx.rank, 0)
            for (name, _), mine, theirs in zip(
                twin.module.named_parameters(), own, found, strict=True
            ):
                assert_near(theirs, mine, f"product for {name}")
            finish(engine, twin)


def _product(module: nn.Module, forward: Forward, rank: int) -> tuple[Tensor, ...]:
    params = list(module.parameters())
    loss = loss_of(forward(batch(rank, 9)))
    return torch.autograd.grad(
        _dot(torch.autograd.grad(loss, params, create_graph=True)), params, materialize_grads=True
    )


SPLITS: dict[str, tuple[str, str]] = {
    "bare both": ("bare", "bare"),
    "one window": ("same window", "bare"),
    "a window around the second only": ("bare", "window"),
    "zero_grad in between": ("bare", "zero_grad"),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_the_second_backward_runs_elsewhere(ctx: RankContext, stage: int, split: str) -> None:
    """And forwards, which free what they gathered, come in between."""
    engine, twin = engine_and_twin(ctx, Net(), stage)
    first, second = SPLITS[split]
    outer = "window" if first == "same window" else "bare"
    first = "bare" if first == "same window" else first

    def backward(_module: nn.Module, forward: Forward, rank: int, k: int) -> None:
        x = batch(rank, k)
        is_twin = forward is twin.module
        with scoped(engine, "bare" if is_twin else first, 1):
            gradient = _gradient(forward(x), x)
        with torch.no_grad():
            forward(x)
        if second == "zero_grad" and not is_twin:
            engine.zero_grad()
        where = "bare" if is_twin or second == "zero_grad" else second
        with scoped(engine, where, 1):
            gradient.square().sum().backward()

    for _ in range(2):
        check(ctx, engine, twin, outer, backward, backwards=1)


@pytest.mark.parametrize("scope", ["window", "no_sync", "nested"])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_the_scope_ends_before_the_second_backward(
    ctx: RankContext, stage: int, scope: str
) -> None:
    """Right where parameters are Replicate; where they are freed torch refuses the graph.

    Only one rank makes such a graph, as ranks may inside a scope, and no later gather hangs.
    """
    engine, twin = engine_and_twin(ctx, Net(), stage)
    with scoped(engine, scope, 1):
        x = batch(ctx.rank, 0)
        out = engine(x)
        gradient = _gradient(out, x) if ctx.rank == 0 else out
    engine(x)
    if stage == 3 and ctx.rank == 0:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient.square().sum().backward()
    elif stage < 3 and ctx.rank == 0:
        own = batch(0, 0)
        (mine,) = torch.autograd.grad(_gradient(twin.module(own), own).square().sum(), own)
        (theirs,) = torch.autograd.grad(gradient.square().sum(), x)
        assert_near(theirs, mine, "second order")
    engine.zero_grad()
    check(ctx, engine, twin, "bare", plain, backwards=1)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_a_graph_older_than_the_step_is_refused(ctx: RankContext, stage: int) -> None:
    """As in torch: its parameters have been modified in place."""
    engine, twin = engine_and_twin(ctx, Net(), stage)
    x = batch(ctx.rank, 0)
    gradient = _gradient(engine(x), x)
    check(ctx, engine, twin, "bare", plain, backwards=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient.square().sum().backward()
    engine.zero_grad()
    check(ctx, engine, twin, "window", plain, backwards=1)


@distributed(world_size=2)
def test_what_is_kept_is_gathered_once(ctx: RankContext) -> None:
    """Stage 3, bare: a forward and a backward gather every unit; the second order gathers none."""
    engine, twin = engine_and_twin(ctx, Net(), 3)
    num_units = len(engine.plan.units)
    for _ in range(2):
        mark = engine.ledger.mark()
        check(ctx, engine, twin, "bare", _first_of_penalty, backwards=1)
        # One more for reading the weights, and one reduction and one reading per gradient.
        first = counts(engine, mark)
        mark = engine.ledger.mark()
        check(ctx, engine, twin, "bare", _penalty, backwards=1)
        assert counts(engine, mark)["all_gather"] <= first["all_gather"], (
            f"{counts(engine, mark)} with the second order, {first} without, {num_units} units"
        )


def _first_of_penalty(_module: nn.Module, forward: Forward, rank: int, k: int) -> None:
    loss_of(forward(batch(rank, k))).backward()


Judge = Callable[[Tensor], Tensor]


def _judge_loss(judge: Judge, real: Tensor, fake: Tensor) -> Tensor:
    """Wasserstein with a gradient penalty between real and fake."""
    middle = (0.25 * real + 0.75 * fake).detach().requires_grad_()
    slack = _gradient(judge(middle), middle).norm(dim=1) - 1
    return judge(fake).mean() - judge(real).mean() + slack.square().mean()


class Maker(nn.Module):
    """``[B, WIDTH]`` -> ``[B, WIDTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Net(seed=3).layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("mode", ["bare", "window"])
@pytest.mark.parametrize("stages", [(0, 2), (2, 3), (3, 1), (3, 3)])
@distributed(world_size=2)
def test_a_gan_with_a_gradient_penalty(
    ctx: RankContext, stages: tuple[int, int], mode: str
) -> None:
    """Three rounds, maker and judge at different stages, against one process."""
    maker, make_twin = engine_and_twin(ctx, Maker(), stages[0])
    judge, judge_twin = engine_and_twin(ctx, Net(seed=4), stages[1])
    for turn in range(3):

        def judging(_module: nn.Module, forward: Forward, rank: int, k: int, t: int = turn) -> None:
            make: Forward = maker if forward is judge else make_twin.module
            with torch.no_grad():
                fake = make(batch(rank, 10 * t + k))
            _judge_loss(forward, batch(rank, 50 + 10 * t + k), fake).backward()

        def making(_module: nn.Module, forward: Forward, rank: int, k: int, t: int = turn) -> None:
            through: Forward = judge if forward is maker else judge_twin.module
            with scoped(judge, "bare" if mode == "bare" or forward is not maker else "no_sync", 1):
                (-through(forward(batch(rank, 10 * t + k))).mean()).backward()

        check(ctx, judge, judge_twin, mode, judging, backwards=2)
        check(ctx, maker, make_twin, mode, making, backwards=2)
        judge.zero_grad()
        judge_twin.module.zero_grad()
    assert judge.global_steps == maker.global_steps == 3


@distributed(world_size=2)
def test_the_oracle_sees_a_lost_second_order(ctx: RankContext) -> None:
    """Negative control: without the penalty's own term the comparison fails."""
    module = Net()
    twin = Twin(module, ctx.world_size)
    engine = start(ctx, module, 2, optimizer=lambda p: torch.optim.SGD(p, lr=LR))
    twin.accumulate(_penalty, 1)
    plain(engine.module, engine, ctx.rank, 0)
    with pytest.raises(AssertionError, match="off by"):
        finish(engine, twin)
