"""B33: with a weight that two modules share, the result depends on the stage, the norm counts it
twice, or one of its gradients is missing.

One weight is one optimizer entry, one place in one reduction and one term of the norm, at every
stage, and both modules go on sharing it.
"""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests import rig
from tests.cases.modes import (
    TINY,
    Reference,
    Room,
    assert_num_reductions,
    assert_traffic,
    assert_weights,
    num_units,
    run,
    usual,
)
from tests.harness import RankContext, distributed

VOCABULARY, WIDTH = 7, 3
FP32_ROUNDING = 2.0**-23


class Flat(nn.Module):
    """Embedding and head beside a weight of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = Room(WIDTH, 2.0)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        _tie(self.embed, self.head)

    def forward(self, tokens: Tensor) -> Tensor:
        return _weighted(self.head(self.middle(self.embed(tokens))))


class Blocks(nn.Module):
    """The same as repeated blocks, so that the tie crosses the border of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.Sequential(embed, Room(WIDTH, 2.0), head)
        _tie(embed, head)

    def forward(self, tokens: Tensor) -> Tensor:
        return _weighted(self.layers(tokens))


def _tie(embed: nn.Embedding, head: nn.Linear) -> None:
    head.weight = embed.weight
    with torch.no_grad():
        embed.weight.copy_(torch.arange(float(embed.weight.numel())).view(-1, WIDTH) % 5 - 2)


def _weighted(logits: Tensor) -> Tensor:
    return (logits * (torch.arange(float(VOCABULARY)) - 2)).sum()


def loss_of(module: nn.Module, rank: int, k: int) -> Tensor:
    loss: Tensor = module(torch.tensor([rank + 1, k, 3 * rank + k, 6]))
    return loss


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "armed", "no_sync"])
@pytest.mark.parametrize("kind", [Flat, Blocks], ids=["flat", "blocks"])
@distributed(world_size=2)
def test_embedding_tied_to_head(
    ctx: RankContext, stage: int, mode: str, kind: type[nn.Module]
) -> None:
    reference = Reference(kind(), ctx.world_size)
    reference.backward(loss_of, 2)
    grads = reference.gradients()
    assert len(grads) == 2
    model = kind()
    engine = rig.start(ctx, model, stage, zero=TINY)
    assert len([p for group in engine.optimizer.param_groups for p in group["params"]]) == 2
    assert sum(len(unit.slots) for unit in engine.plan.units) == 2
    mark = engine.ledger.mark()
    run(engine, mode, [partial(loss_of, model, ctx.rank, k) for k in range(2)])
    engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
    norm = math.sqrt(sum(float((grad.double() ** 2).sum()) for grad in grads.values()))
    found = engine.get_global_grad_norm()
    assert found is not None
    assert math.isclose(found, norm, rel_tol=FP32_ROUNDING), f"{found}, expected {norm}"
    assert_weights(engine, reference.after_sgd())
    shared = {id(param) for _, param in model.named_parameters(remove_duplicate=False)}
    assert len(shared) == 2, "the weight is no longer shared"


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_one_of_its_two_uses(ctx: RankContext, stage: int, mode: str) -> None:
    """Backward 0 goes through both uses and backward 1 through the head alone."""

    def loss_of_some(module: nn.Module, rank: int, k: int) -> Tensor:
        if k == 0:
            return loss_of(module, rank, k)
        assert isinstance(module, Flat)
        return _weighted(module.head(torch.arange(float(WIDTH)) + rig.x_of(rank, k)))

    reference = Reference(Flat(), ctx.world_size)
    reference.backward(loss_of_some, 2)
    model = Flat()
    engine = rig.start(ctx, model, stage)
    mark = engine.ledger.mark()
    run(engine, mode, [partial(loss_of_some, model, ctx.rank, k) for k in range(2)])
    engine.step()
    reductions = num_units(engine)
    if mode == "bare" and stage >= 2:
        # Stage 2: both units, then the tied one. Stage 3: they are one unit, whole in backward 0
        # and incomplete in backward 1, which leaves it to step().
        reductions = 3 if stage == 2 else 2
    assert_num_reductions(engine, stage, mark, reductions)
    assert_weights(engine, reference.after_sgd())
