"""Several engines in one loss, at different stages, and one backward through all of them."""

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.autograd.helpers import (
    MODES,
    Block,
    Forward,
    Net,
    Twin,
    batch,
    engine_and_twin,
    finish,
    loss_of,
    scoped,
)
from tests.cases.modes import during
from tests.cases.test_b45 import CHUNKS
from tests.harness import RankContext, distributed
from tests.rig import STAGES

Pair = tuple[Forward, Forward]


class Trunk(nn.Module):
    """``[B, WIDTH]`` -> ``[B, WIDTH]``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = Net(seed=seed).layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _engines(
    ctx: RankContext, modules: list[nn.Module], stages: tuple[int, ...]
) -> tuple[list[onefold.Engine], list[Twin]]:
    both = [engine_and_twin(ctx, m, stage) for m, stage in zip(modules, stages, strict=True)]
    return [engine for engine, _ in both], [twin for _, twin in both]


def _chain(forwards: list[Forward], rank: int, k: int) -> Tensor:
    """Every engine reads what the one before made, and all of it is in the loss."""
    x: Tensor = batch(rank, k)
    losses = []
    for forward in forwards:
        x = forward(x)
        losses.append(loss_of(x))
    return torch.stack(losses).sum()


def _beside(forwards: list[Forward], rank: int, k: int) -> Tensor:
    """Every engine reads the same input; the loss is their product."""
    outs = [forward(batch(rank, k)) for forward in forwards]
    return loss_of(torch.stack([out.flatten()[:3] for out in outs]).prod(dim=0))


def _circle(forwards: list[Forward], rank: int, k: int) -> Tensor:
    """The first trunk is used again after the second."""
    first, second = forwards[:2]
    return loss_of(first(second(first(batch(rank, k)))))


LOSSES = {"chain": _chain, "beside": _beside, "circle": _circle}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("stages", [(0, 3), (3, 2), (2, 1), (3, 3), (1, 3, 2)])
@distributed(world_size=2)
def test_one_backward_through_several_engines(
    ctx: RankContext, stages: tuple[int, ...], kind: str
) -> None:
    """All in the same scope; then scopes on the first, or on the last, while the rest is bare."""
    engines, twins = _engines(ctx, [Trunk(seed) for seed, _ in enumerate(stages)], stages)
    last = len(engines) - 1
    ways = [(mode, range(last + 1)) for mode in ("bare", "window", "armed", "no_sync")]
    ways += [("window", range(1)), ("armed", range(last, last + 1))]
    for mode, scoped_engines in ways:
        with during(mode, "on", list(scoped_engines)):
            for rank in range(ctx.world_size):
                for k in range(3):
                    LOSSES[kind]([twin.module for twin in twins], rank, k).backward()
            with ExitStack() as stack:
                for index in scoped_engines:
                    stack.enter_context(scoped(engines[index], mode, 3))
                for k in range(3):
                    loss = LOSSES[kind](list(engines), ctx.rank, k)
                    # Any of the engines may run it, or none.
                    engines[k].backward(loss) if k <= last else loss.backward()
            for engine, twin in zip(engines, twins, strict=True):
                finish(engine, twin)


@pytest.mark.parametrize("freezes", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stages", [(0, 3), (3, 2), (1, 3)])
@distributed(world_size=2)
def test_a_gan_of_different_stages(
    ctx: RankContext, stages: tuple[int, int], mode: str, freezes: bool
) -> None:
    """Three rounds; the maker learns through the judge, frozen meanwhile or not."""
    (maker, judge), twins = _engines(ctx, [Trunk(1), Net(seed=2)], stages)
    make_twin, judge_twin = twins
    for turn in range(3):
        keys = (10 * turn, 10 * turn + 1)
        for rank in range(ctx.world_size):
            for k in keys:
                (-judge_twin.module(make_twin.module(batch(rank, k))).mean()).backward()
        judge_twin.module.zero_grad()
        judge.module.requires_grad_(not freezes)
        with scoped(maker, mode, 2), scoped(judge, "bare" if mode == "bare" else "no_sync", 2):
            for k in keys:
                maker.backward(-judge(maker(batch(ctx.rank, k))).mean())
        judge.module.requires_grad_(True)
        judge.zero_grad()
        finish(maker, make_twin)
        for rank in range(ctx.world_size):
            for k in keys:
                _judging(judge_twin.module, make_twin.module, rank, k).backward()
        with scoped(judge, mode, 2):
            for k in keys:
                judge.backward(_judging(judge, maker, ctx.rank, k))
        finish(judge, judge_twin)
    assert maker.global_steps == judge.global_steps == 3


def _judging(judge: Forward, make: Forward, rank: int, k: int) -> Tensor:
    with torch.no_grad():
        fake = make(batch(rank, k))
    return judge(fake).mean() + loss_of(judge(batch(rank, 50 + k)))


# -- a head whose backwards run inside a forward, on an engine of its own --------------------------


class ChunkedHead(torch.autograd.Function):
    """The loss of a head, a chunk of rows at a time; its gradients are a side effect."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, head: Forward) -> Tensor:
        gradients, total = [], hidden.new_zeros(())
        for rows in hidden.chunk(CHUNKS):
            with torch.enable_grad():
                leaf = rows.detach().requires_grad_()
                loss = head(leaf).square().sum()
                loss.backward()
            assert leaf.grad is not None
            gradients.append(leaf.grad)
            total += loss.detach()
        ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0] * gradient, None


class Head(nn.Module):
    """``[B, WIDTH]`` -> ``[B]``; ``block`` may be shared with the trunk."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.head = Net(seed=7).head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x)).squeeze(-1)


class Whole(nn.Module):
    """Trunk and head; the head's block is one of the trunk's, or its own."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.trunk = Trunk(1)
        first = self.trunk.layers[0]
        self.head = Head(first if shares else Block().double())
        self.chunks = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        if self.chunks:
            return ChunkedHead.apply(hidden, self.head)
        return self.head(hidden).square().sum()


@pytest.mark.parametrize("shares", [False, True], ids=["own block", "shared block"])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_chunked_forwards_before_their_backwards(
    ctx: RankContext, stage: int, shares: bool
) -> None:
    """Forward, forward, forward, then backwards: the head has its gradients long before."""
    engine, twin = engine_and_twin(ctx, Whole(shares), stage)
    twin.module.chunks = False  # type: ignore[assignment]
    for mode in MODES:
        with during(mode):
            for rank in range(ctx.world_size):
                for k in range(3):
                    twin.module(batch(rank, k)).backward()
            with scoped(engine, mode, 3 * (1 + CHUNKS)):
                losses = [engine(batch(ctx.rank, k)) for k in range(3)]
                for k in (1, 0, 2):
                    losses[k].backward()
            finish(engine, twin)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stages", [(0, 3), (3, 2), (2, 3), (3, 3)])
@distributed(world_size=2)
def test_a_chunked_head_on_its_own_engine(
    ctx: RankContext, stages: tuple[int, int], mode: str
) -> None:
    """The head's backwards run inside a forward, the trunk's after it."""
    engines, twins = _engines(ctx, [Trunk(1), Head(Block().double())], stages)
    trunk, head = engines
    for rank in range(ctx.world_size):
        for k in range(3):
            hidden = twins[0].module(batch(rank, k))
            twins[1].module(hidden).square().sum().backward()
    with scoped(trunk, mode, 3), scoped(head, mode, 3 * CHUNKS):
        for k in range(3):
            trunk.backward(ChunkedHead.apply(trunk(batch(ctx.rank, k)), head))
    for engine, twin in zip(engines, twins, strict=True):
        finish(engine, twin)
