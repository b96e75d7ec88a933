"""Experts under the engine: gradients, norms and weights equal those of one process with them all.

Every rank has its own tokens, and capacity is counted per rank, so the reference runs each rank's
batch through a whole model of its own forward, and adds.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.experts import ExpertParallel
from onefold.moe import MoE
from tests import rig
from tests.cases.modes import MODES
from tests.cases.wire_formula import scope
from tests.harness import RankContext, distributed, pool_for
from tests.rig import STAGES, start

WIDTH = 8
GRIDS = [(1, 2), (2, 2), (1, 4), (2, 4), (4, 4)]  # (ep, ranks)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(rows)))


class Block(nn.Module):
    def __init__(self, ep_size: int, **settings: Any) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, Expert, 4, ep_size=ep_size, k=2, **settings)
        self.balance: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        output, self.balance, _ = self.moe(torch.tanh(self.mix(hidden)))
        return hidden + output


class Model(nn.Module):
    def __init__(self, ep_size: int, recompute: bool = False, **settings: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(ep_size, **settings) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self._recompute = recompute

    def forward(self, hidden: Tensor) -> Tensor:
        """A loss, with a part of each layer's load-balancing loss."""
        total = torch.zeros((), dtype=hidden.dtype)
        for layer in self.layers:
            if self._recompute:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
            assert layer.balance is not None
            total = total + 0.01 * layer.balance
        return self.head(hidden).square().mean() + total


def make(ep_size: int, **settings: Any) -> Model:
    torch.manual_seed(3)
    return Model(ep_size, **settings).double()


def tokens(rank: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + k)
    return torch.randn(6 + rank, WIDTH, generator=generator, dtype=torch.float64)


def reference(world_size: int, backwards: int, **settings: Any) -> Model:
    """One process with all experts; ``.grad`` is the mean over ranks of the sum over backwards."""
    model = make(1, **settings)
    for rank in range(world_size):
        for k in range(backwards):
            model(tokens(rank, k)).backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= world_size
    return model


def assert_gradients(engine: onefold.Engine, wanted: Model) -> None:
    named = dict(wanted.named_parameters())
    for name, param in engine.module.named_parameters():
        found = engine.full_grad(param)
        gradient = named[name].grad
        assert (found is None) == (gradient is None), name
        if found is not None and gradient is not None:
            torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-14, msg=name)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("ep_size", "world_size"), GRIDS)
def test_gradients_norm_and_weights(
    stage: int, mode: str, recompute: bool, ep_size: int, world_size: int
) -> None:
    pool_for(world_size).run(check, stage=stage, mode=mode, recompute=recompute, ep_size=ep_size)


def check(ctx: RankContext, stage: int, mode: str, recompute: bool, ep_size: int) -> None:
    engine = start(
        ctx, make(ep_size, recompute=recompute), stage, config={"gradient_clipping": 0.05}
    )
    wanted = reference(ctx.world_size, 3)
    with scope(engine, mode, 3):
        for k in range(3):
            engine.backward(engine(tokens(ctx.rank, k)))
    engine.reduce_gradients()
    assert_gradients(engine, wanted)
    squares = [param.grad.square().sum() for param in wanted.parameters() if param.grad is not None]
    norm = torch.stack(squares).sum().sqrt()
    assert abs(engine.get_global_grad_norm() - float(norm)) < 1e-6 * float(norm)
    engine.step()
    assert engine.clip_factor == pytest.approx(0.05 / float(norm), rel=1e-4)
    state = engine.full_state_dict()
    assert state.keys() == wanted.state_dict().keys()
    for name, param in wanted.named_parameters():
        assert param.grad is not None
        after = param.detach() - engine.clip_factor * param.grad
        torch.testing.assert_close(state[name], after, rtol=1e-10, atol=1e-12, msg=name)
    with engine.full_parameters():
        pass  # raises if replicas differ
