"""What the contract's tests share: a street of houses, programs of scopes, exact bookkeeping."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from onefold.wire.buffer import Arena
from onefold.wire.collectives import Handle
from tests.harness import RankContext
from tests.rig import STAGES, House, Tower, gathered, start, weights, x_of

WORLDS = [1, 2, 3, 4]
NUMELS = (7, 1, 20)
"""Not divisible by any world size, fewer than ranks, and more than one 64-byte line."""

__all__ = ["STAGES", "WORLDS", "House", "Tower", "gathered", "start", "weights", "x_of"]


class Street(nn.Module):
    """Houses in a row, each a block at stage 3 and a unit at every stage, and a root parameter.

    With input x the gradient of every element of house i is (i + 1) x, of the gate (i = 3) 4 x.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(3))
        self.houses = nn.ModuleList(House(numel) for numel in NUMELS)

    def forward(self, x: float, which: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
        terms = [
            (self.gate * (4 * x)).sum() if i == 3 else self.houses[i]((i + 1) * x) for i in which
        ]
        return torch.stack(terms).sum()


def street(ctx: RankContext, stage: int, **arguments: Any) -> onefold.Engine:
    """An engine over a ``Street`` that has one unit per house and one for the gate."""
    zero = {"reduce_bucket_size": 1, **arguments.pop("zero", {})}
    return start(ctx, Street(), stage, zero=zero, **arguments)


def params_of(engine: onefold.Engine) -> list[nn.Parameter]:
    """Houses 0, 1, 2 and the gate, in the order of ``Street.forward``'s numbers."""
    module = engine.module
    assert isinstance(module, Street)
    named = dict(module.named_parameters())
    return [*(named[f"houses.{i}.w"] for i in range(3)), module.gate]


class Books:
    """The weights that a ``Street`` must have, kept in the same fp32 arithmetic by hand.

    ``add`` what each rank feeds to each backward; ``close`` is the step.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.values = [torch.zeros(()) for _ in range(4)]
        self.sums = [0.0] * 4

    def add(self, x: float, which: Sequence[int] = (0, 1, 2, 3)) -> None:
        """One backward of one rank."""
        for i in which:
            self.sums[i] += (i + 1) * x

    def mean(self, i: int, micro_steps: int = 1) -> Tensor:
        """The averaged gradient of house i; sums are small integers, so one division is exact."""
        return torch.tensor(self.sums[i]) / torch.tensor(float(self.world_size * micro_steps))

    def drop(self) -> None:
        """What ``zero_grad()`` or an abort does."""
        self.sums = [0.0] * 4

    def close(self, micro_steps: int = 1) -> None:
        """Step at lr 1."""
        self.values = [value - self.mean(i, micro_steps) for i, value in enumerate(self.values)]
        self.drop()

    def check(self, engine: onefold.Engine, note: object = "") -> None:
        """The engine's weights are exactly these."""
        state = weights(engine)
        names = ["houses.0.w", "houses.1.w", "houses.2.w", "gate"]
        for name, value in zip(names, self.values, strict=True):
            wanted = value.expand_as(state[name])
            assert torch.equal(state[name], wanted), (
                f"{note}: {name} is {state[name].tolist()}, expected {value.item()} each"
            )


# Programs. A program is a list of items, run with a counter k of backwards per rank:
#   n                  n bare backwards
#   ("window", [..])   a window around a program; ("armed", [..]) one that declares its backwards
#   ("no_sync", [..])  a no_sync around a program
#   "mark"             the boundary flag: the next backward is the last
Program = list[Any]


def count(program: Program) -> int:
    """Backwards in a program."""
    return sum(
        item if isinstance(item, int) else 0 if item == "mark" else count(item[1])
        for item in program
    )


def run_program(
    engine: onefold.Engine, program: Program, backward: Callable[[int], object], first: int = 0
) -> int:
    """Run ``program``, calling ``backward(k)`` with k from ``first``; the next k."""
    for item in program:
        if item == "mark":
            engine.set_gradient_accumulation_boundary(True)
        elif isinstance(item, int):
            for k in range(first, first + item):
                backward(k)
            first += item
        else:
            kind, inner = item
            declared = count(inner) or None if kind == "armed" else None
            scope: Any = (
                engine.no_sync()
                if kind == "no_sync"
                else engine.coalesce_grad_reduction(backwards=declared)
            )
            with scope:
                first = run_program(engine, inner, backward, first)
    return first


# Ways of running one backward whose gradient is that of engine(x).


def by_engine(engine: onefold.Engine, x: float) -> None:
    engine.backward(engine(x))


def by_loss(engine: onefold.Engine, x: float) -> None:
    engine(x).backward()


def by_module(engine: onefold.Engine, x: float) -> None:
    engine.module(x).backward()


def by_tensor(engine: onefold.Engine, x: float) -> None:
    vector = torch.stack([engine(x), engine(x)])
    vector.backward(torch.tensor([0.25, 0.75]))


def by_autograd(engine: onefold.Engine, x: float) -> None:
    torch.autograd.backward([engine(x - 1.0), engine(1.0)])


def by_hook(engine: onefold.Engine, x: float) -> None:
    """A backward inside a hook of another backward."""
    inner = engine(1.0)
    outer = engine(x - 1.0) * 1.0
    outer.register_hook(lambda _grad: inner.backward())
    outer.backward()


def by_engine_in_hook(engine: onefold.Engine, x: float) -> None:
    """A forward and an ``engine.backward`` inside a hook of another, half of which has run."""

    def nested(_grad: Tensor) -> None:
        with torch.enable_grad():
            engine.backward(engine(1.0))

    half = engine(x - 1.0, (0, 1)) * 1.0
    half.register_hook(nested)
    # Made later, so autograd runs it first.
    engine.backward(half + engine(x - 1.0, (2, 3)))


class BackwardInForward(torch.autograd.Function):
    """Runs a whole forward and backward of its own inside its forward (as cached losses do)."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, run: Callable[[], Tensor]) -> Tensor:
        with torch.enable_grad():
            run().backward()
        return trigger.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def by_function(engine: onefold.Engine, x: float) -> None:
    """A backward inside a custom Function's forward, and the outer one after it."""
    loss = BackwardInForward.apply(engine(x - 1.0), lambda: engine(1.0))
    loss.backward()


class ReplayInBackward(torch.autograd.Function):
    """Runs a forward and backward inside its backward (as reentrant checkpoints do)."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, run: Callable[[], Tensor]) -> Tensor:
        ctx.run = run
        return trigger.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        with torch.enable_grad():
            ctx.run().backward(grad)
        return None, None


def by_replay(engine: onefold.Engine, x: float) -> None:
    """The whole graph of the engine is built and run inside the backward of another."""
    trigger = torch.zeros((), requires_grad=True)
    ReplayInBackward.apply(trigger, lambda: engine(x)).backward()


def by_retained(engine: onefold.Engine, x: float) -> None:
    """Two backwards over one graph."""
    loss = engine(x / 2)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


Way = Callable[[onefold.Engine, float], None]
WAYS: dict[str, Way] = {
    "engine": by_engine,
    "loss": by_loss,
    "module": by_module,
    "tensor": by_tensor,
    "autograd": by_autograd,
    "hook": by_hook,
    "engine_in_hook": by_engine_in_hook,
    "function": by_function,
    "replay": by_replay,
    "retained": by_retained,
}


def see_arrivals(ctx: RankContext, *, arrives: bool) -> None:
    """Whoever asks whether a collective is done waits until it is, or is told that it is not.

    Real answers depend on timing. Waiting is right only where all ranks run the same backwards.
    """
    ctx.cleanup(setattr, Handle, "is_done", Handle.is_done)
    setattr(Handle, "is_done", lambda self: arrives and self.wait() is None)  # noqa: B010


class Fault(Exception):
    """What the tests raise on purpose."""


def fail(_grad: Tensor) -> None:
    raise Fault("on purpose")


def failing(engine: onefold.Engine, x: float) -> Tensor:
    """A loss whose backward accumulates some gradients of the street and then raises."""
    poisoned = engine(x, (0, 1)) * 1.0
    poisoned.register_hook(fail)
    # The gate and house 2 are made later, so autograd runs them first.
    return poisoned + engine(x, (2, 3))


def feed(
    ctx: RankContext,
    engine: onefold.Engine,
    books: Books,
    k: int,
    which: Sequence[int] = (0, 1, 2, 3),
) -> None:
    """The same backward on every rank with each rank's own x; entered for all of them."""
    engine.backward(engine(x_of(ctx.rank, k), which))
    for rank in range(ctx.world_size):
        books.add(x_of(rank, k), which)


def trainable(engine: onefold.Engine) -> list[Any]:
    """The trainable units' specs, in plan order."""
    return [unit.spec for unit in engine._units if unit.spec.is_trainable]


def arena(engine: onefold.Engine) -> Arena:
    """Where the engine leases its full-size buffers."""
    return engine._transaction._arena


def mixed(parts: Sequence[Any], depth: int, draw: Callable[[int], int]) -> Iterator[Any]:
    """Random items of a program, at most ``depth`` scopes deep; ``draw(n)`` is below n."""
    for _ in range(1 + draw(3)):
        kind = parts[draw(len(parts))]
        if kind == "bare" or depth == 0:
            yield draw(3)
        else:
            yield kind, list(mixed(parts, depth - 1, draw))
