"""B14: the mean over micro-batches and ranks of token means is taken for the mean over all tokens.

A caller can say "sum, and divide by this global count", and neither the average over ranks nor the
one over micro-steps is applied on top of it.
"""

import pytest
import torch
from torch import Tensor

from tests import rig
from tests.cases.modes import MODES, assert_num_reductions, assert_traffic, during, scope, usual
from tests.harness import RankContext, distributed

MICRO_STEPS = 2


def num_tokens(rank: int, k: int) -> int:
    """1, 3, 5, 7, ... valid tokens; their total is a power of two at 1, 2 and 4 ranks."""
    return 1 + 2 * (MICRO_STEPS * rank + k)


class Tokens(rig.House):
    """One loss per token."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """``[T]`` -> ``[T]``."""
        return (self.w * x[:, None]).sum(dim=1)


def tokens(rank: int, k: int) -> Tensor:
    """The gradient of each token's loss is ``x_of(rank, k)``."""
    return torch.full((num_tokens(rank, k),), rig.x_of(rank, k))


def global_mean(world_size: int) -> tuple[float, int]:
    """The gradient of the mean over all tokens, and their number."""
    every = [(rank, k) for rank in range(world_size) for k in range(MICRO_STEPS)]
    total = sum(num_tokens(rank, k) for rank, k in every)
    return sum(num_tokens(r, k) * rig.x_of(r, k) for r, k in every) / total, total


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=[2, 4])
def test_sum_over_ranks_and_a_global_count(ctx: RankContext, stage: int) -> None:
    """gradient_allreduce_op "sum" and no k: nothing is divided but by the caller."""
    engine = rig.start(ctx, Tokens(), stage, config={"gradient_allreduce_op": "sum"})
    wanted, total = global_mean(ctx.world_size)
    for steps, mode in enumerate(MODES, start=1):
        with during(mode):
            mark = engine.ledger.mark()
            with scope(engine, mode, MICRO_STEPS):
                for k in range(MICRO_STEPS):
                    engine.backward(engine(tokens(ctx.rank, k)).sum() / total)
            engine.step()
            assert_traffic(engine, mark, usual(ctx, engine, stage, mode, MICRO_STEPS))
            rig.assert_change(engine, steps * wanted)
            rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_micro_steps_and_a_global_count(ctx: RankContext, stage: int, mode: str) -> None:
    """With k declared, scale_wrt_gas=False says so; W in the loss cancels the mean over ranks."""
    engine = rig.start(ctx, Tokens(), stage, config={"gradient_accumulation_steps": MICRO_STEPS})
    wanted, total = global_mean(ctx.world_size)
    mark = engine.ledger.mark()
    for k in range(MICRO_STEPS):
        loss = engine(tokens(ctx.rank, k)).sum() * ctx.world_size / total
        with scope(engine, mode, 1):
            engine.backward(loss, scale_wrt_gas=False)
        engine.step()
    assert_num_reductions(engine, stage, mark, MICRO_STEPS if stage >= 2 else 1)
    rig.assert_change(engine, wanted)
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_the_case_sees_a_mean_of_means(ctx: RankContext, stage: int) -> None:
    """Negative control: token means, averaged over micro-steps and ranks, are something else."""
    engine = rig.start(ctx, Tokens(), stage, config={"gradient_accumulation_steps": MICRO_STEPS})
    for k in range(MICRO_STEPS):
        engine.backward(engine(tokens(ctx.rank, k)).mean())
        engine.step()
    wanted, _ = global_mean(ctx.world_size)
    mean_of_means = rig.expected(ctx.world_size, MICRO_STEPS, divisor=MICRO_STEPS)
    assert (wanted, mean_of_means) == (9.125, 6.5)
    rig.assert_change(engine, mean_of_means)
    rig.assert_ranks_equal(engine)
