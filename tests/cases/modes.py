"""What the cases share: ways to run the backwards of one step, small exact models, and formulas."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from tests import rig
from tests.harness import RankContext

MODES = ["bare", "window", "armed", "no_sync"]
SCOPES = ["window", "armed", "no_sync"]
TINY = {"reduce_bucket_size": 1}
"""One unit per parameter at stages 0-2."""


class Room(nn.Module):
    """One weight; a repeated block of ``Rooms``."""

    def __init__(self, numel: int, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((numel,), start))

    def forward(self, x: float | Tensor) -> Tensor:
        return self.w * x


class Rooms(nn.Module):
    """Repeated blocks, of which a forward uses some: the gradient of room i is ``(i + 1) * x``."""

    def __init__(self, *numels: int) -> None:
        super().__init__()
        self.rooms = nn.ModuleList(Room(numel) for numel in numels)

    def forward(self, x: float, use: Iterable[int] | None = None) -> Tensor:
        loss = torch.zeros(())
        for index in range(len(self.rooms)) if use is None else use:
            loss = loss + self.rooms[index](x * (index + 1)).sum()
        return loss


class Pair(nn.Module):
    """Two weights that lie in one unit; a forward may leave out the second."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel))
        self.v = nn.Parameter(torch.zeros(numel))

    def forward(self, x: float, use_v: bool) -> Tensor:
        loss = (self.w * x).sum()
        return loss + (self.v * (2 * x)).sum() if use_v else loss


class Pairs(nn.Module):
    """Four pairs; a bucket of two weights is a quarter of the model, so a pair is a unit."""

    def __init__(self, numel: int = 4) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair(numel) for _ in range(4))

    def forward(self, x: float, use_v: bool = True) -> Tensor:
        return torch.stack([pair(x, use_v) for pair in self.pairs]).sum()


def scope(engine: onefold.Engine, mode: str, backwards: int) -> AbstractContextManager[Any]:
    """The with-block of one of ``MODES``."""
    if mode == "window":
        return engine.coalesce_grad_reduction()
    if mode == "armed":
        return engine.coalesce_grad_reduction(backwards=backwards)
    if mode == "no_sync":
        return engine.no_sync()
    return contextlib.nullcontext()


@contextlib.contextmanager
def during(*names: object) -> Iterator[None]:
    """A failure of the body says what it ran: a test may go through several modes on one engine."""
    try:
        yield
    except Exception as error:
        error.add_note(f"during {', '.join(map(str, names))}")
        raise


def run(engine: onefold.Engine, mode: str, losses: Sequence[Callable[[], Tensor]]) -> None:
    """Forward and backward of each loss, all in one with-block."""
    with scope(engine, mode, max(1, len(losses))):
        for loss in losses:
            engine.backward(loss())


def house(engine: onefold.Engine, rank: int, ks: Iterable[int]) -> list[Callable[[], Tensor]]:
    """The house rig's losses of the backwards ``ks``."""
    return [lambda k=k: engine(rig.x_of(rank, k)) for k in ks]  # type: ignore[misc]


def num_units(engine: onefold.Engine, *, trainable: bool = True) -> int:
    """Units of the plan, trainable ones or all."""
    return sum(unit.is_trainable or not trainable for unit in engine.plan.units)


def traffic(
    ctx: RankContext, engine: onefold.Engine, stage: int, *, reductions: int, gathers: int
) -> dict[str, int]:
    """Data collectives of one step by kind.

    ``gathers`` counts where parameters are sharded; at stages 1-2 step() gathers every trainable
    unit once, at stage 0 nothing is gathered. One rank alone sends nothing.
    """
    if ctx.world_size == 1:
        return {}
    kind = "all_reduce" if stage == 0 else "reduce_scatter"
    by_stage = {0: 0, 1: num_units(engine), 2: num_units(engine), 3: gathers}
    found = {kind: reductions, "all_gather": by_stage[stage]}
    return {kind: count for kind, count in found.items() if count}


def usual(
    ctx: RankContext,
    engine: onefold.Engine,
    stage: int,
    mode: str,
    backwards: int,
    *,
    declared: int | None = None,
) -> dict[str, int]:
    """``traffic`` of a step whose backwards all use the whole model.

    One reduction per trainable unit, and per backward too where a bare one reduces as it goes
    (stages 2-3). At stages 0-1 a bare backward that the config declares to be the last is reduced
    at once; what follows it goes with step(). Stage 3 gathers every unit once per scope, bare twice
    per backward.
    """
    trainable, every = num_units(engine), num_units(engine, trainable=False)
    is_bare = mode == "bare"
    times = 1
    if is_bare and stage >= 2:
        times = backwards
    elif is_bare and declared is not None and backwards > declared:
        times = 2
    gathers = every * (2 * backwards if is_bare else 1)
    return traffic(ctx, engine, stage, reductions=trainable * times, gathers=gathers)


def one_by_one(
    ctx: RankContext, engine: onefold.Engine, stage: int, mode: str, backwards: int
) -> dict[str, int]:
    """``usual``, where each backward has a with-block of its own.

    A window flushes at its end at stages 2-3; at stages 0-1 its armed backward is reduced at once,
    and what follows it before the next step() goes with that.
    """
    times = 1
    if stage >= 2 and mode != "no_sync":
        times = backwards
    elif stage < 2 and mode == "armed" and backwards > 1:
        times = 2
    gathers = num_units(engine, trainable=False) * backwards * (2 if mode == "bare" else 1)
    return traffic(ctx, engine, stage, reductions=times * num_units(engine), gathers=gathers)


def assert_traffic(engine: onefold.Engine, mark: Any, wanted: dict[str, int]) -> None:
    """The collectives since ``mark`` are the ``wanted`` ones."""
    found = rig.counts(engine, mark)
    assert found == wanted, f"collectives {found}, expected {wanted}"


def assert_num_reductions(engine: onefold.Engine, stage: int, mark: Any, wanted: int) -> None:
    """The same for reductions alone, where the test itself gathers in between."""
    found = rig.counts(engine, mark).get("all_reduce" if stage == 0 else "reduce_scatter", 0)
    assert found == wanted, f"{found} reductions, expected {wanted}"


def assert_weights(engine: onefold.Engine, wanted: dict[str, Tensor]) -> None:
    """The full weights are exactly ``wanted``, on every rank."""
    found = rig.weights(engine)
    assert found.keys() == wanted.keys(), f"{sorted(found)} instead of {sorted(wanted)}"
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{name}: {found[name]}, expected {tensor}"
    rig.assert_ranks_equal(engine)


def assert_rooms(engine: onefold.Engine, gradients: Sequence[float]) -> None:
    """Rooms that started at 0 moved by exactly minus ``gradients``."""
    model = engine.module
    assert isinstance(model, Rooms)
    wanted = {
        f"rooms.{index}.w": torch.full(room.w.shape, -gradient)  # type: ignore[arg-type]
        for index, (room, gradient) in enumerate(zip(model.rooms, gradients, strict=True))
    }
    assert_weights(engine, wanted)


class Reference:
    """The same model in one process, which sums over all ranks and backwards, and divides by W.

    With integer data and weights every sum is exact, so its dtype and order do not matter.
    """

    def __init__(self, module: nn.Module, world_size: int) -> None:
        self.module = copy.deepcopy(module)
        self._world_size = world_size

    def backward(self, loss_of: Callable[[nn.Module, int, int], Tensor], backwards: int) -> None:
        """Accumulate ``loss_of(module, rank, k)`` over all ranks and k < backwards."""
        for rank in range(self._world_size):
            for k in range(backwards):
                loss_of(self.module, rank, k).backward()
        for param in self.module.parameters():
            if param.grad is not None:
                param.grad /= self._world_size

    def gradients(self) -> dict[str, Tensor]:
        """By the name under which ``named_parameters`` has them."""
        named = self.module.named_parameters()
        return {name: param.grad for name, param in named if param.grad is not None}

    def after_sgd(self) -> dict[str, Tensor]:
        """The state dict after one step of SGD at lr 1."""
        torch.optim.SGD(self.module.parameters(), lr=1.0).step()
        return self.module.state_dict()


class Shadow:
    """A plain torch optimizer over whole copies of the parameters, fed with averaged gradients.

    An elementwise update has the same bits wherever shards are cut, because they are cut at 64
    bytes (``wire/layout.py``), so engine and shadow are compared with torch.equal.
    """

    def __init__(self, module: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.params = {name: p.detach().clone() for name, p in module.named_parameters()}
        for param in self.params.values():
            param.requires_grad_(True)
        self.optimizer = make(list(self.params.values()))

    def step(self, gradients: dict[str, float | None]) -> None:
        """One step with every element's gradient; None leaves the parameter alone."""
        for name, param in self.params.items():
            value = gradients[name]
            param.grad = None if value is None else torch.full_like(param, value)
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """What ``full_state_dict`` of the engine must be."""
        return {name: param.detach() for name, param in self.params.items()}


def assert_reductions(
    ctx: RankContext, engine: onefold.Engine, stage: int, mark: Any, reductions: int, gathers: int
) -> None:
    """For bare passes at stage 3 that use less than the pass before: the reductions exactly.

    Such a pass may gather what the one before it used next, so ``gathers`` is a lower bound there,
    and a second gather of every unit used the upper one.
    """
    found = rig.counts(engine, mark)
    wanted = traffic(ctx, engine, stage, reductions=reductions, gathers=gathers)
    if stage == 3:
        guessed = found.pop("all_gather", 0) - wanted.pop("all_gather", 0)
        assert 0 <= guessed <= gathers, f"{guessed} gathers more than {gathers}"
    assert found == wanted, f"collectives {found}, expected {wanted}"
