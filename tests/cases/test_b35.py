"""B35: releasing parameters after forward shrinks the very tensor that a non-reentrant checkpoint
keeps, because a frozen weight needs no gradient and so is kept as it is; the recompute then finds
shape 0.

A frozen norm and a trained layer inside a checkpoint: the gradient of one process, at every stage.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import rig
from tests.cases.modes import Reference, assert_num_reductions, num_units, run
from tests.harness import RankContext, distributed

WIDTH, ROWS, BACKWARDS = 5, 2, 3
SHAPES = ["block", "norm", "inside", "everything"]


class Layer(nn.Module):
    """A frozen norm and a frozen scale before a trained layer; one repeated block.

    ``shape`` says what is recomputed: the block, called from outside; the norm alone; all that is
    inside the block's forward; or the whole model, in which case nothing here.
    """

    def __init__(self, shape: str, is_checkpointed: bool) -> None:
        super().__init__()
        self.shape = shape if is_checkpointed else "nothing"
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.linear = nn.Linear(WIDTH, WIDTH)
        for param in (*self.norm.parameters(), self.scale):
            param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.shape == "inside":
            return x + recompute(self._body, x)
        if self.shape == "norm":
            return x + torch.tanh(self.linear(self.scale * recompute(self.norm, x)))
        return x + self._body(x)

    def _body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.scale * self.norm(x)))


class Stack(nn.Module):
    """Two layers between a frozen embedding, as under adapters, and a frozen head."""

    def __init__(self, shape: str, *, is_checkpointed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape = shape if is_checkpointed else "nothing"
        self.embed = nn.Embedding(11, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(shape, is_checkpointed) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1).requires_grad_(False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        if self.shape == "everything":
            return recompute(self._body, hidden)
        return self._body(hidden)

    def _body(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = recompute(layer, hidden) if self.shape == "block" else layer(hidden)
        loss: Tensor = self.head(hidden).square().mean()
        return loss


def recompute(body: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    found: Tensor = checkpoint(body, x, use_reentrant=False)
    return found


def loss_of(model: nn.Module, rank: int, k: int) -> Tensor:
    loss: Tensor = model((torch.arange(3 * ROWS).view(ROWS, 3) * 7 + 5 * rank + 3 * k) % 11)
    return loss


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window", "armed"])
@pytest.mark.parametrize("shape", SHAPES)
@distributed(world_size=2)
def test_frozen_and_recomputed(ctx: RankContext, stage: int, mode: str, shape: str) -> None:
    reference = Reference(Stack(shape, is_checkpointed=False), ctx.world_size)
    frozen = {n: p.clone() for n, p in reference.module.named_parameters() if not p.requires_grad}
    engine = rig.start(ctx, Stack(shape), stage)
    for step in range(2):
        reference.module.zero_grad()
        reference.backward(partial(_shifted, 10 * step), BACKWARDS)
        mark = engine.ledger.mark()
        model = engine.module
        run(
            engine,
            mode,
            [partial(loss_of, model, ctx.rank, 10 * step + k) for k in range(BACKWARDS)],
        )
        engine.reduce_gradients()
        times = BACKWARDS if mode == "bare" and stage >= 2 else 1
        assert_num_reductions(engine, stage, mark, times * num_units(engine))
        wanted = reference.gradients()
        assert len(wanted) == 4
        for name, param in model.named_parameters():
            if name in wanted:
                found = engine.full_grad(param)
                # the rounding of fp64 sums of some ten terms below 1, in another order
                torch.testing.assert_close(found, wanted[name], rtol=1e-12, atol=1e-13)
                assert wanted[name].abs().sum() > 0
        engine.step()
        reference.after_sgd()
    found_state = rig.weights(engine)
    for name, tensor in frozen.items():
        assert torch.equal(found_state[name], tensor), name
    rig.assert_ranks_equal(engine)


def _shifted(shift: int, model: nn.Module, rank: int, k: int) -> Tensor:
    return loss_of(model, rank, shift + k)


@distributed(world_size=2)
def test_the_frozen_parts_are_freed_in_between(ctx: RankContext) -> None:
    """Control: at stage 3, bare, between forward and backward they really are gone."""
    engine = rig.start(ctx, Stack("block"), 3)
    loss = loss_of(engine.module, ctx.rank, 0)
    for name, param in engine.module.named_parameters():
        assert param.isnan().all(), f"{name} was not freed, so the case would test nothing"
    engine.backward(loss)
    engine.step()
