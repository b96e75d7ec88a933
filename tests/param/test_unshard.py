"""Stage 3 outside windows: what is gathered, when, and what is freed."""

import pytest
import torch
from torch import Tensor, nn

from tests.harness import RankContext, distributed
from tests.rig import Tower, counts, start


def gathered_bytes(engine: object) -> int:
    """Live bytes of full parameters on this rank."""
    units = engine._units  # type: ignore[attr-defined]
    return sum(unit.param_full.untyped_storage().nbytes() for unit in units)


class Features(nn.Module):
    """Takes a dict and puts its outputs into it, as sentence-transformers' modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = features["x"] * self.scale
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) + hidden
        features["tokens"] = hidden * self.scale
        features["embedding"] = features["tokens"].mean(dim=0)
        return features


@distributed(world_size=2)
@pytest.mark.parametrize("model", [Features, Tower])
def test_every_unit_is_gathered_once_per_forward_and_backward(
    ctx: RankContext, model: type[nn.Module]
) -> None:
    engine = start(ctx, model(), 3)
    for repeat in range(3):
        mark = engine.ledger.mark()
        if model is Features:
            loss = engine({"x": ctx.data(4, 6, key=repeat)})["embedding"].square().sum()
        else:
            loss = engine(torch.arange(6).reshape(2, 3) + ctx.rank).square().sum()
        assert gathered_bytes(engine) == 0
        engine.backward(loss)
        assert gathered_bytes(engine) == 0
        num_units = len(engine.plan.units)
        assert counts(engine, mark) == {
            "all_gather": 2 * num_units,
            "reduce_scatter": num_units,
        }
        engine.step()


@distributed(world_size=2)
def test_a_forward_that_raises_frees_what_it_held(ctx: RankContext) -> None:
    class Breaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("on purpose")

    engine = start(ctx, nn.Sequential(nn.Linear(4, 4), Breaks(4, 4), nn.Linear(4, 4)), 3)
    for _ in range(2):
        with pytest.raises(KeyError):
            engine(ctx.data(2, 4))
    assert all(unit.holds == 0 for unit in engine._units)


@distributed(world_size=2)
def test_a_backward_that_raises_frees_what_it_held(ctx: RankContext) -> None:
    engine = start(ctx, nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), 3)
    hidden = engine.module[:2](ctx.data(2, 4))  # type: ignore[index]
    hidden.register_hook(lambda _grad: 1 / 0)
    loss = engine.module[2](hidden).sum()  # type: ignore[index]
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    engine.zero_grad()
    engine(ctx.data(2, 4))  # the next forward finds the backward that never ended
    assert all(unit.holds == 0 for unit in engine._units)
