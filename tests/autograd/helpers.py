"""What the autograd tests share: a small fp64 net, its twin in one process, and the ways to scope.

Gradients are compared before the optimizer, and once more by what a step of SGD makes of them.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from tests.cases.modes import during, scope
from tests.harness import RankContext
from tests.rig import start

WIDTH = 5
LR = 2.0**-7
MODES = ["bare", "window", "armed", "no_sync", "nested"]
ROUNDINGS = 1000
"""More fp64 roundings in a row than any gradient here has: additions, products and tanh."""

Forward = Callable[[Tensor], Tensor]
Backward = Callable[[nn.Module, Forward, int, int], object]
"""``(module, forward, rank, k)``: one forward and backward; ``forward`` is the module or engine."""


class Block(nn.Module):
    """A matrix, whose transposed view autograd saves, and a vector, which it saves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x)) * self.gain


class Net(nn.Module):
    """``[B, WIDTH]`` -> ``[B]``: repeated blocks and a head in the root block."""

    def __init__(self, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)


def batch(rank: int, k: int, rows: int = 3) -> Tensor:
    """Rows that no other rank or backward has; they require a gradient."""
    generator = torch.Generator().manual_seed(1 + 1000 * k + rank)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def loss_of(out: Tensor) -> Tensor:
    """Curved, so that its gradient depends on everything."""
    return out.square().mean() + out.mean()


def plain(_module: nn.Module, forward: Forward, rank: int, k: int) -> None:
    """One forward and backward."""
    loss_of(forward(batch(rank, k))).backward()


def scoped(engine: onefold.Engine, mode: str, backwards: int) -> AbstractContextManager[Any]:
    """The with-block of one of ``MODES``; nested is a window in a no_sync in an armed window."""
    if mode != "nested":
        return scope(engine, mode, backwards)
    stack = ExitStack()
    for inner in ("armed", "no_sync", "window"):
        stack.enter_context(scope(engine, inner, backwards))
    return stack


class Twin:
    """The same module in one process: it sees every rank's backwards, and divides by W."""

    def __init__(self, module: nn.Module, world_size: int) -> None:
        self.module = copy.deepcopy(module)
        self._world_size = world_size
        self._sgd = torch.optim.SGD(self.module.parameters(), lr=LR)

    def accumulate(self, backward: Backward, backwards: int) -> None:
        """Every rank's ``backwards``, one after another."""
        for rank in range(self._world_size):
            for k in range(backwards):
                backward(self.module, self.module, rank, k)

    def mean(self) -> dict[str, Tensor | None]:
        """The averaged gradient by parameter."""
        named = self.module.named_parameters()
        return {n: None if p.grad is None else p.grad / self._world_size for n, p in named}

    def step(self) -> dict[str, Tensor]:
        """SGD over the averaged gradient; the new state dict."""
        for param in self.module.parameters():
            if param.grad is not None:
                param.grad /= self._world_size
        self._sgd.step()
        self._sgd.zero_grad()
        return self.module.state_dict()


def engine_and_twin(
    ctx: RankContext, module: nn.Module, stage: int, **arguments: Any
) -> tuple[onefold.Engine, Twin]:
    """Both over equal weights."""
    twin = Twin(module, ctx.world_size)
    return engine_over(ctx, module, stage, **arguments), twin


def engine_over(
    ctx: RankContext, module: nn.Module, stage: int, **arguments: Any
) -> onefold.Engine:
    """With a twin's optimizer; a unit is as small as it can be, so that order matters."""
    sgd = lambda params: torch.optim.SGD(params, lr=LR)  # noqa: E731
    return start(ctx, module, stage, optimizer=sgd, zero={"reduce_bucket_size": 1}, **arguments)


def own_name(name: str) -> str:
    """Without what torch.compile's wrapper puts into it."""
    return name.replace("_orig_mod.", "")


def assert_near(found: Tensor, wanted: Tensor, what: str) -> None:
    """Equal up to ``ROUNDINGS`` of fp64, relative to the largest element."""
    bound = ROUNDINGS * 2.0**-53 * max(1.0, float(wanted.abs().max()))
    error = float((found - wanted).abs().max())
    assert error <= bound, f"{what}: off by {error}, at most {bound} allowed"  # NaN fails


def assert_gradients(engine: onefold.Engine, wanted: dict[str, Tensor | None]) -> None:
    """The reduced gradients, before any optimizer."""
    engine.reduce_gradients()
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue  # frozen since before initialize
        found, due = engine.full_grad(param), wanted[own_name(name)]
        if due is None or found is None:
            assert found is None, f"gradient of {name}: {found} where none is due"
            assert due is None, f"gradient of {name}: none"
        else:
            assert_near(found, due, f"gradient of {name}")


def finish(engine: onefold.Engine, twin: Twin) -> None:
    """Compare gradients, step both, compare weights; nothing may stay unsharded or held.

    The twin goes on from the engine's weights, so that differences do not add up over steps.
    """
    assert_gradients(engine, twin.mean())
    engine.step()
    wanted = twin.step()
    state = {own_name(name): tensor for name, tensor in engine.full_state_dict().items()}
    for name, tensor in state.items():
        assert_near(tensor, wanted[name], f"weight {name}")
    twin.module.load_state_dict(state)
    for unit in engine._units:
        assert not unit.holds, f"unit {unit.name} is still held {unit.holds} times"
        assert not (unit.frees_parameters and unit.is_unsharded), f"unit {unit.name} is not freed"


def check(
    ctx: RankContext,
    engine: onefold.Engine,
    twin: Twin,
    mode: str,
    backward: Backward,
    *,
    backwards: int = 3,
) -> None:
    """One step of ``backwards`` calls of ``backward`` in the scope ``mode``."""
    with during(mode):
        twin.accumulate(backward, backwards)
        with scoped(engine, mode, backwards):
            for k in range(backwards):
                backward(engine.module, engine, ctx.rank, k)
        finish(engine, twin)


def check_modes(ctx: RankContext, module: nn.Module, stage: int, backward: Backward) -> None:
    """``check`` in every mode, one step after another on one engine."""
    engine, twin = engine_and_twin(ctx, module, stage)
    for mode in MODES:
        check(ctx, engine, twin, mode, backward)
