"""B75: expert gradients off by the number of expert ranks (2x and 4x were seen). For one global
batch they are the same in one process, with whole experts on two ranks, and with the experts
spread over the ranks.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onefold.moe import MoE
from tests import rig
from tests.cases.wire_formula import MODES, scope
from tests.harness import RankContext, pool_for

WIDTH = 6
GRIDS = [(1, 1), (1, 2), (2, 2), (1, 4), (2, 4)]  # (ep, ranks)
TOKENS = 4


class Routed(nn.Module):
    """Two experts; the sign of a token's first element chooses."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.moe = MoE(
            WIDTH, lambda: nn.Linear(WIDTH, WIDTH), 2, ep_size=ep_size, drop_tokens=False
        )
        with torch.no_grad():
            self.moe.gate.weight.zero_()
            self.moe.gate.weight[:, 0] = torch.tensor([2.0, -2.0])

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean over the tokens of what is theirs; scalar."""
        output = self.moe(tokens * self.scale).output
        return output.square().sum(dim=-1).mean()


def make(ep_size: int) -> Routed:
    torch.manual_seed(5)
    return Routed(ep_size).double()


def batch(k: int) -> Tensor:
    """``[4, H]``: tokens 0 and 3 go to expert 0, tokens 1 and 2 to expert 1."""
    generator = torch.Generator().manual_seed(k)
    tokens = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    tokens[:, 0] = torch.tensor([1.0, -1.0, -2.0, 2.0])
    return tokens


def reference(backwards: int) -> dict[str, Tensor]:
    """One process without an engine, whole batches."""
    model = make(1)
    for k in range(backwards):
        model(batch(k)).backward()
    named = model.named_parameters()
    return {name: param.grad for name, param in named if param.grad is not None}


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("ep_size", "world_size"), GRIDS)
def test_the_same_for_every_ep_size(stage: int, mode: str, ep_size: int, world_size: int) -> None:
    results = pool_for(world_size).run(gradients, stage=stage, mode=mode, ep_size=ep_size)
    wanted, found = reference(3), {}
    for result in results:
        found.update(result)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # Sums of a few dozen products in fp64, taken in another order.
        torch.testing.assert_close(found[name], gradient, rtol=1e-13, atol=1e-14, msg=name)
        assert gradient.abs().max() > 1e-3, name


def gradients(ctx: RankContext, stage: int, mode: str, ep_size: int) -> dict[str, Any]:
    """Full gradients of the parameters that are here; every rank has its share of each batch."""
    engine = rig.start(ctx, make(ep_size), stage)
    own = TOKENS // ctx.world_size
    with scope(engine, mode, 3):
        for k in range(3):
            engine.backward(engine(batch(k)[ctx.rank * own : (ctx.rank + 1) * own]))
    engine.reduce_gradients()
    return {name: engine.full_grad(param) for name, param in engine.module.named_parameters()}
