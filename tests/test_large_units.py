"""Units large enough to lie on huge pages, with real numbers, against one fp64 process.

Small integer rigs cannot see a view that starts at the wrong place of a large buffer.
"""

import pytest
import torch
from torch import nn

from onefold.wire.buffer import HUGE_PAGE_BYTES
from tests.harness import RankContext, distributed
from tests.rig import STAGES, counts, start

WIDTH, BACKWARDS = 600, 3


def make() -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
    return nn.Sequential(*layers).double()


def batch(rank: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + k)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def reference(world_size: int) -> dict[str, torch.Tensor]:
    """Averaged gradients of one process that sees every rank's batches."""
    model = make()
    for rank in range(world_size):
        for k in range(BACKWARDS):
            (model(batch(rank, k)).square().sum() / world_size).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", ["bare", "window", "armed"])
def test_large_units_match_one_process(ctx: RankContext, stage: int, mode: str) -> None:
    model = make()
    engine = start(ctx, model, stage)
    sizes = [unit.layout.numel * 8 for unit in engine.plan.units]
    assert max(sizes) > HUGE_PAGE_BYTES
    if mode == "bare":
        for k in range(BACKWARDS):
            engine.backward(engine(batch(ctx.rank, k)).square().sum())
    else:
        with engine.coalesce_grad_reduction(backwards=BACKWARDS if mode == "armed" else None):
            for k in range(BACKWARDS):
                engine.backward(engine(batch(ctx.rank, k)).square().sum())
    engine.reduce_gradients()
    for name, wanted in reference(ctx.world_size).items():
        found = engine.full_grad(model.get_parameter(name))
        assert found is not None, name
        # fp64 sums in another order: a few hundred terms of order one
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-11)
    before = {name: tensor.clone() for name, tensor in engine.full_state_dict().items()}
    engine.step()
    for name, tensor in engine.full_state_dict().items():
        wanted = before[name] - reference(ctx.world_size)[name]
        torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-11)


@distributed(world_size=2)
def test_a_bound_gradient_is_a_view_of_the_buffer_that_travels(ctx: RankContext) -> None:
    model = nn.Linear(1024, 1024, bias=False)
    engine = start(ctx, model, 0)
    mark = engine.ledger.mark()
    with engine.coalesce_grad_reduction():
        engine.backward(engine(ctx.data(8, 1024)).square().sum())
        assert model.weight.grad is not None
        local = model.weight.grad.clone()
    engine.reduce_gradients()
    other = ctx.data(8, 1024, rank=1 - ctx.rank)
    assert local.abs().sum() > 0
    assert counts(engine, mark) == {"all_reduce": 1}
    averaged = engine.full_grad(model.get_parameter("weight"))
    assert averaged is not None
    theirs = 2 * averaged - local
    check = model.weight.detach().clone().requires_grad_()
    nn.functional.linear(other, check).square().sum().backward()
    assert check.grad is not None
    torch.testing.assert_close(theirs, check.grad, rtol=1e-4, atol=1e-2)  # fp32 products
