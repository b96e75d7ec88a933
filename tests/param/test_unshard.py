"""Stage 3 outside windows: what is gathered, when, and what is freed."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import onefold
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


# Gathering ahead.

LAYERS = 4


def rootless(ctx: RankContext) -> onefold.Engine:
    """A model that owns no parameters itself, so no block is its own."""
    engine = start(ctx, nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS))), 3)
    assert not any(block.is_root for block in engine.plan.blocks)
    return engine


@contextmanager
def gathers_at_uses(engine: onefold.Engine) -> Iterator[list[int]]:
    """How many gathers have been started whenever a layer begins its forward, since the first."""
    found: list[int] = []
    mark = engine.ledger.mark()

    def look(*_: object) -> None:
        found.append(counts(engine, mark)["all_gather"])

    layers = list(engine.module.children())
    handles = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


IN_TIME = list(range(1, LAYERS + 1))
AHEAD = [*range(2, LAYERS + 1), LAYERS]


@distributed(world_size=2)
def test_a_model_without_parameters_of_its_own_is_gathered_ahead(ctx: RankContext) -> None:
    engine = rootless(ctx)
    for k in range(3):
        mark = engine.ledger.mark()
        with gathers_at_uses(engine) as found:
            loss = engine(ctx.data(2, 4, key=k)).square().sum()
        assert found == (AHEAD if k else IN_TIME)
        engine.backward(loss)
        assert gathered_bytes(engine) == 0
        assert counts(engine, mark) == {"all_gather": 2 * LAYERS, "reduce_scatter": LAYERS}
        engine.step()


@distributed(world_size=2)
@pytest.mark.parametrize("knows_order", [False, True])
def test_layers_that_the_user_calls_are_gathered_once(ctx: RankContext, knows_order: bool) -> None:
    """Each is a pass: no order is seen in them, but one that is known is followed."""
    engine = rootless(ctx)
    if knows_order:
        engine(ctx.data(2, 4))
    for k in range(2):
        with gathers_at_uses(engine) as found:
            hidden = ctx.data(2, 4, key=k)
            for layer in engine.module.children():
                hidden = layer(hidden)
        assert found == (AHEAD if knows_order else IN_TIME)
    assert gathered_bytes(engine) == 0


@distributed(world_size=2)
def test_what_was_gathered_ahead_does_not_outlive_a_step(ctx: RankContext) -> None:
    """A forward that ends early leaves the next block on its way, with the values of before."""
    engine = rootless(ctx)
    x = ctx.data(2, 4)
    engine.backward(engine(x).square().sum())
    first = next(engine.module.children())
    with torch.no_grad():
        first(x)
        assert gathered_bytes(engine) > 0, "the second layer is on its way"
        engine.step()
        assert gathered_bytes(engine) == 0
        with engine.coalesce_grad_reduction():
            windowed = engine(x)
        bare = engine(x)
    assert torch.equal(bare, windowed)
    with engine.full_parameters():
        assert torch.equal(bare, engine.module(x))
