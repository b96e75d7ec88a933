"""What the tests of ``max_bytes`` share: a terrace of houses, its rungs, the peak of live bytes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from onefold.budget import Kept, Rung
from tests.contract.helpers import arena, start, x_of
from tests.harness import RankContext

HOUSES = 16
SHARDED = [2, 3]


class House(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel))

    def forward(self, before: Tensor, x: float) -> Tensor:
        return before + (self.w * x).sum()


class Terrace(nn.Module):
    """Houses one after another, each on what the one before it returned; and a root parameter.

    The gradient of every element, house or gate, is x.
    """

    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(40))
        self.houses = nn.ModuleList(House(numel) for numel in numels)

    def forward(self, x: float, which: Iterable[int] = range(HOUSES)) -> Tensor:
        total = (self.gate * x).sum()
        for index in which:
            total = self.houses[index](total, x)
        return total


EQUAL = (512,) * HOUSES


def terrace(
    ctx: RankContext, stage: int, numels: Sequence[int] = EQUAL, **arguments: Any
) -> onefold.Engine:
    zero = {"reduce_bucket_size": 1, **arguments.pop("zero", {})}
    return start(ctx, Terrace(numels), stage, zero=zero, **arguments)


def rungs_in_use(engine: onefold.Engine) -> list[Rung]:
    """The rungs that some ``max_bytes`` picks, each with the least that does."""
    used: list[Rung] = []
    for rung in reversed(engine._transaction.budget.ladder()):
        if not used or rung.num_bytes < used[-1].num_bytes:
            used.append(rung)
    return used[::-1]


def sample(rungs: list[Rung]) -> list[Rung]:
    """The first and last ones, and every third between."""
    return [*rungs[:2], *rungs[2:-2:3], *rungs[-2:]]


def keeps_blocks(engine: onefold.Engine, kept: Kept) -> bool:
    return kept.blocks == engine._transaction.budget.everything.blocks


class Peak:
    """The most live bytes on this rank above those between steps: leases and full parameters."""

    def __init__(self, engine: onefold.Engine) -> None:
        self._engine = engine
        self._home = self._live()
        self.num_bytes = 0

    def _live(self) -> int:
        leases = arena(self._engine)
        units = self._engine._units
        params = sum(unit.param_full.untyped_storage().nbytes() for unit in units)
        return params + leases.leased_bytes + leases.kept_bytes

    def look(self) -> None:
        self.num_bytes = max(self.num_bytes, self._live() - self._home)


@contextmanager
def watched(engine: onefold.Engine) -> Iterator[Peak]:
    """Look after everything that may add live bytes: a lease, and the start of a gather."""
    peak = Peak(engine)
    leases = arena(engine)

    def looking(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            peak.look()
            return result

        return wrapped

    owners: list[tuple[Any, str]] = [(leases, "lease")]
    owners += [(unit, "start_unshard") for unit in engine._units]
    for owner, name in owners:
        setattr(owner, name, looking(getattr(owner, name)))
    try:
        yield peak
    finally:
        for owner, name in owners:
            delattr(owner, name)


def run(ctx: RankContext, engine: onefold.Engine, n: int, **arguments: Any) -> onefold.Engine:
    with engine.coalesce_grad_reduction(**arguments):
        for k in range(n):
            engine.backward(engine(x_of(ctx.rank, k)))
    return engine


def assert_gradients(ctx: RankContext, engine: onefold.Engine, n: int) -> None:
    """Every gradient is exactly the mean, before any optimizer."""
    engine.reduce_gradients()
    total = sum(x_of(rank, k) for rank in range(ctx.world_size) for k in range(n))
    for name, param in engine.module.named_parameters():
        found = engine.full_grad(param)
        wanted = torch.full(found.shape, total / ctx.world_size)  # type: ignore[union-attr]
        assert torch.equal(found, wanted), name  # type: ignore[arg-type]
