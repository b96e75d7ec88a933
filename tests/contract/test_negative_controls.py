"""Negative controls: with one thing broken, the parity checks must fail.

Each fault is a patch of one method inside the worker, undone after the test. The check is the same
code with and without it.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.grad.reduce import Reducer
from onefold.gradients import Gradients
from onefold.wire.collectives import Collectives
from tests.contract.helpers import STAGES, House, Program, Tower, run_program, start, x_of
from tests.harness import RankContext, distributed
from tests.rig import assert_change, expected


def patch(ctx: RankContext, owner: type, name: str, function: Callable[..., Any]) -> Any:
    """Replace a method for this test; the original."""
    original = getattr(owner, name)
    setattr(owner, name, function)
    ctx.cleanup(setattr, owner, name, original)
    return original


class Done:
    """A collective that was never started."""

    def wait(self) -> None:
        pass


def skip_the_reduction(ctx: RankContext) -> None:
    """Every rank keeps its own term of the sum."""

    def scatter(self: Collectives, source: Tensor, out: Tensor, *_: object) -> "Done":
        rank, numel = self.mesh.shard.rank, out.numel()
        out.copy_(source[rank * numel : (rank + 1) * numel])
        return Done()

    patch(ctx, Collectives, "start_reduce_scatter", scatter)
    patch(ctx, Collectives, "start_all_reduce", lambda self, *_: Done())


def lose_a_reduction(ctx: RankContext) -> None:
    """What arrives is not added."""
    patch(
        ctx,
        Gradients,
        "add_reduced",
        lambda self, summed, _clears: setattr(self, "grad_shard", torch.zeros_like(summed)),
    )


def reduce_twice(ctx: RankContext) -> None:
    """The sum arrives a second time."""

    def twice(self: Gradients, summed: Tensor, clears: Any) -> None:
        again = summed.clone()
        original(self, summed, clears)
        assert self.grad_shard is not None
        self.grad_shard.add_(again)

    original = patch(ctx, Gradients, "add_reduced", twice)


def leave_the_last_unit_out(ctx: RankContext) -> None:
    """The flush forgets a unit."""

    def reduce(self: Reducer, units: Any) -> None:
        original(self, list(units)[:-1])

    original = patch(ctx, Reducer, "reduce", reduce)


def divide_by(change: Callable[[float], float]) -> Callable[[RankContext], None]:
    def apply(ctx: RankContext) -> None:
        def divide(self: Gradients, divisor: float) -> None:
            original(self, change(divisor) if divisor != 1.0 else divisor)

        original = patch(ctx, Gradients, "divide", divide)

    return apply


FAULTS: dict[str, Callable[[RankContext], None]] = {
    "reduction skipped": skip_the_reduction,
    "reduction lost": lose_a_reduction,
    "reduced twice": reduce_twice,
    "unit left out": leave_the_last_unit_out,
    "not divided": divide_by(lambda _divisor: 1.0),
    "divided by twice as much": divide_by(lambda divisor: 2 * divisor),
    "divided twice": divide_by(lambda divisor: divisor * divisor),
}
SCOPED: Program = [("window", [3])]


def check_house(ctx: RankContext, stage: int) -> None:
    """The house rig: SGD at lr 1, so that the change of the weights is minus the gradient."""
    engine = start(ctx, House(), stage)
    run_program(engine, SCOPED, lambda k: engine.backward(engine(12 * x_of(ctx.rank, k))))
    engine.step()
    assert_change(engine, 12 * expected(ctx.world_size, 3))


def batch(ctx: RankContext, rank: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + k)
    tokens = torch.randint(11, (4, 5), generator=generator)
    return tokens, ctx.data(4, key=k, rank=rank, dtype=torch.float64)


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor, target: Tensor) -> Tensor:
    return (model(tokens) - target).square().mean()


def reference_gradients(ctx: RankContext, model: nn.Module) -> dict[str, Tensor]:
    """One process, fp64, every rank's batches: the mean over ranks of the sum of backwards."""
    for rank in range(ctx.world_size):
        for k in range(3):
            (loss_of(model, *batch(ctx, rank, k)) / ctx.world_size).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_tower(ctx: RankContext, stage: int) -> None:
    """Gradients of a ``Tower``, before any optimizer."""
    torch.manual_seed(3)
    model = Tower()
    wanted = reference_gradients(ctx, copy.deepcopy(model))
    engine: onefold.Engine = start(ctx, model, stage)
    run_program(
        engine, SCOPED, lambda k: engine.backward(loss_of(engine, *batch(ctx, ctx.rank, k)))
    )
    engine.reduce_gradients()
    for name, param in model.named_parameters():
        found = engine.full_grad(param)
        assert found is not None
        # Sums of fewer than 2**7 fp64 terms of about 1 in another order: 2**7 * 2**-53 * few.
        torch.testing.assert_close(found, wanted[name], rtol=1e-12, atol=1e-13, msg=name)


CHECKS = {"house": check_house, "tower": check_tower}


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_without_a_fault_every_check_passes(ctx: RankContext, stage: int) -> None:
    for check in CHECKS.values():
        check(ctx, stage)


@distributed(world_size=2)
@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("stage", STAGES)
def test_with_a_fault_every_check_fails(ctx: RankContext, stage: int, fault: str) -> None:
    FAULTS[fault](ctx)
    for check in CHECKS.values():
        with pytest.raises(AssertionError):
            check(ctx, stage)
