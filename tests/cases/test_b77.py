"""B77: with experts, a part of the model was never updated: a fraction of the dense weights, or the
router. After three steps every element of every trainable parameter has changed, on every rank.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.moe import MoE
from tests import rig
from tests.cases.wire_formula import MODES, scope
from tests.harness import RankContext, pool_for

WIDTH = 8
GRIDS = [(1, 2), (2, 2), (4, 4), (2, 4)]  # (ep, ranks)
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0),
}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(rows)))


class Mixed(nn.Module):
    """Dense layers before, between and after two layers of experts; one dense layer is frozen."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.moes = nn.ModuleList(
            MoE(WIDTH, Expert, 4, ep_size=ep_size, k=2, drop_tokens=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, balance = self.frozen(self.embed(tokens)), torch.zeros((), dtype=tokens.dtype)
        for norm, moe in zip(self.norms, self.moes, strict=True):
            output, loss, _ = moe(norm(hidden))
            hidden, balance = hidden + output, balance + loss
        return (self.head(hidden) - 1.0).square().mean() + 0.1 * balance


def make(ep_size: int) -> Mixed:
    torch.manual_seed(11)
    model = Mixed(ep_size).double()
    with torch.no_grad():  # so that it is no loss that a weight of one cannot move
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", list(MAKERS))
@pytest.mark.parametrize(("ep_size", "world_size"), GRIDS)
def test_everything_moves(
    stage: int, mode: str, optimizer: str, ep_size: int, world_size: int
) -> None:
    pool_for(world_size).run(check, stage=stage, mode=mode, optimizer=optimizer, ep_size=ep_size)


def check(ctx: RankContext, stage: int, mode: str, optimizer: str, ep_size: int) -> None:
    start = {name: param.detach().clone() for name, param in make(ep_size).named_parameters()}
    engine = rig.start(ctx, make(ep_size), stage, optimizer=MAKERS[optimizer])
    for step in range(3):
        with scope(engine, mode, 2):
            for k in range(2):
                engine.backward(engine(ctx.data(24, WIDTH, key=7 * step + k, dtype=torch.float64)))
        engine.step()
    _assert_moved(engine, start)
    state = engine.full_state_dict()
    assert state.keys() == start.keys()  # all experts, of all ranks
    for name, tensor in state.items():
        assert bool((tensor != start[name]).all()) is not name.startswith("frozen"), name


def _assert_moved(engine: onefold.Engine, start: dict[str, Tensor]) -> None:
    """As this rank's own forward would read them."""
    names = set()
    with engine.full_parameters():
        for name, param in engine.module.named_parameters():
            names.add(name)
            same = param.detach() == start[name]
            if param.requires_grad:
                assert not same.any(), f"{int(same.sum())} elements of {name} never moved"
            else:
                assert same.all(), name
    assert {"embed.weight", "moes.0.gate.weight", "head.bias"} < names
    assert any("experts" in name for name in names)
