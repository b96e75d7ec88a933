"""Several graphs at once, graphs that are kept, and the user's own hooks in them."""

import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

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
    assert_gradients,
    batch,
    check,
    check_modes,
    engine_and_twin,
    loss_of,
    plain,
    scoped,
)
from tests.cases.modes import during
from tests.harness import RankContext, distributed
from tests.rig import STAGES, start

# -- orders of forwards and backwards ------------------------------------------------------------


def _orders(num: int) -> list[tuple[int, ...]]:
    """All legal orders: the first k is a forward, the second its backward; forwards ascend."""
    twice = sorted([*range(num), *range(num)])
    found = {order for order in itertools.permutations(twice) if _ascends(order)}
    return sorted(found)


def _ascends(order: tuple[int, ...]) -> bool:
    firsts = list(dict.fromkeys(order))
    return firsts == sorted(firsts)


ORDERS = _orders(3)


def _interleave(engine: onefold.Engine, rank: int, order: tuple[int, ...]) -> None:
    losses: dict[int, Tensor] = {}
    for k in order:
        if k in losses:
            losses[k].backward()
        else:
            losses[k] = loss_of(engine(batch(rank, k)))


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_every_order_of_three_forwards_and_backwards(ctx: RankContext, stage: int) -> None:
    """Bare and in a window each, and in one of the other scopes in turn."""
    assert len(ORDERS) == 15
    engine, twin = engine_and_twin(ctx, Net(layers=1), stage)
    twin.accumulate(plain, 3)
    wanted = twin.mean()
    others = [mode for mode in MODES if mode not in ("bare", "window")]
    for position, order in enumerate(ORDERS):
        for mode in ("bare", "window", others[position % len(others)]):
            with during(order, mode):
                with scoped(engine, mode, 3):
                    _interleave(engine, ctx.rank, order)
                assert_gradients(engine, wanted)
                engine.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_forwards_and_backwards_on_both_sides_of_a_window(ctx: RankContext, stage: int) -> None:
    """Forward 0 | window: forward 1, backward 0, forward 2 | backward 2, backward 1."""
    engine, twin = engine_and_twin(ctx, Net(), stage)
    twin.accumulate(plain, 3)
    wanted = twin.mean()
    for scope in ("window", "no_sync", "nested"):
        with during(scope):
            losses = {0: loss_of(engine(batch(ctx.rank, 0)))}
            with scoped(engine, scope, 1):
                losses[1] = loss_of(engine(batch(ctx.rank, 1)))
                losses[0].backward()
                losses[2] = loss_of(engine(batch(ctx.rank, 2)))
            losses[2].backward()
            losses[1].backward()
            assert_gradients(engine, wanted)
            engine.zero_grad()


# -- a graph that is kept ------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """A trunk and two heads: ``[B, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        trunk, other = Net(), Net(layers=1, seed=5)
        self.layers, self.heads = trunk.layers, nn.ModuleList([trunk.head, other.head])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.cat([head(x) for head in self.heads], dim=1)


def _kept(order: tuple[int, ...]) -> Callable[[nn.Module, Forward, int, int], None]:
    def backward(_module: nn.Module, forward: Forward, rank: int, k: int) -> None:
        out = forward(batch(rank, k))
        losses = [loss_of(out[:, 0]), loss_of(out[:, 1]), out.prod(dim=1).sum()]
        for position, head in enumerate(order):
            losses[head].backward(retain_graph=position < len(order) - 1)

    return backward


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 1), (0, 0, 2)])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_backwards_over_one_kept_graph(
    ctx: RankContext, stage: int, order: tuple[int, ...]
) -> None:
    """Of several losses and of one loss twice; some leave the other head without a gradient."""
    check_modes(ctx, TwoHeads(), stage, _kept(order))


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_a_kept_graph_outlives_its_window(ctx: RankContext, stage: int) -> None:
    """One backward inside, the second outside, and the other way round."""
    engine, twin = engine_and_twin(ctx, Net(), stage)
    twin.accumulate(_kept_twice, 1)
    wanted = twin.mean()
    for first, second in [("window", "bare"), ("bare", "window"), ("no_sync", "window")]:
        with during(first, second):
            with scoped(engine, first, 1):
                loss = loss_of(engine(batch(ctx.rank, 0)))
                loss.backward(retain_graph=True)
            with scoped(engine, second, 1):
                loss.backward()
            assert_gradients(engine, wanted)
            engine.zero_grad()


def _kept_twice(_module: nn.Module, forward: Forward, rank: int, k: int) -> None:
    (2 * loss_of(forward(batch(rank, k)))).backward()


# -- the user's hooks ----------------------------------------------------------------------------


def _hook_params(module: nn.Module) -> None:
    """Every second parameter's gradient is changed, by the parameter's size."""
    for index, param in enumerate(module.parameters()):
        if index % 2 == 0:
            param.register_hook(partial(operator.mul, 1 + 1 / param.numel()))


def _hook_modules(module: nn.Module) -> None:
    """A hook on a hidden activation, and full backward hooks that change what flows."""
    blocks = [child for child in module.modules() if isinstance(child, Block)]
    for block in blocks:
        block.register_forward_hook(_double_what_comes_back)
    blocks[0].register_full_backward_hook(_halve)
    blocks[-1].register_full_backward_pre_hook(_treble)


def _halve(_module: nn.Module, into: Any, _out: Any) -> Any:
    return (into[0] * 0.5,)


def _treble(_module: nn.Module, out: Any) -> Any:
    return (out[0] * 3.0,)


def _double_what_comes_back(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
    if out.requires_grad:
        out.register_hook(lambda g: g * 2)
    return out.clone()


HOOKS: dict[str, Callable[[nn.Module], None]] = {"params": _hook_params, "modules": _hook_modules}


@pytest.mark.parametrize("when", ["before", "after", "both"])
@pytest.mark.parametrize("what", HOOKS)
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_hooks_that_change_gradients(ctx: RankContext, stage: int, what: str, when: str) -> None:
    """Registered before ``initialize``, after it, or both."""
    module = Net()
    twin = Twin(module, ctx.world_size)
    for _ in range(2 if when == "both" else 1):
        HOOKS[what](twin.module)
    if when != "after":
        HOOKS[what](module)
    engine, _ = engine_and_twin(ctx, module, stage)
    if when != "before":
        HOOKS[what](module)
    for mode in MODES:
        check(ctx, engine, twin, mode, plain)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_post_accumulate_hooks(ctx: RankContext, stage: int, mode: str, when: str) -> None:
    """They run once per parameter and backward; inside a scope they may write into `.grad`."""
    module = Net()
    calls: list[int] = []
    writes = when == "before" or mode != "bare" or stage < 2  # else it is home already

    def hook(param: Tensor) -> None:
        calls.append(id(param))
        assert param.grad is not None
        if writes:
            param.grad.mul_(2)

    def attach() -> None:
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(hook)

    twin = Twin(module, ctx.world_size)
    if when == "before":
        attach()
    engine = start(ctx, module, stage)
    if when == "after":
        attach()
    twin.accumulate(_kept_twice if writes else plain, 1)
    with scoped(engine, mode, 2):
        plain(module, engine, ctx.rank, 0)
    assert sorted(calls) == sorted(map(id, module.parameters()))
    assert_gradients(engine, twin.mean())
