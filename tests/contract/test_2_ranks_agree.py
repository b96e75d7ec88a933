"""Contract 2, ranks agree: after step() all ranks hold bit-equal parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onefold
from tests.contract.helpers import STAGES, WORLDS, Program, Tower, run_program, start
from tests.harness import RankContext, distributed
from tests.rig import assert_ranks_equal, gathered

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}
PROGRAMS: list[Program] = [
    [1],
    [("window", [3])],
    [("armed", [2])],
    [("no_sync", [2]), 1],
    [1, ("window", [1, ("no_sync", [1])]), ("armed", [1])],
]


def tower(ctx: RankContext) -> Tower:
    """Other weights on every rank: rank 0's win."""
    torch.manual_seed(100 + ctx.rank)
    return Tower(dtype=torch.float32)


def train(ctx: RankContext, engine: onefold.Engine, program: Program, key: int) -> None:
    def backward(k: int) -> None:
        tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(key + k))
        tokens = (tokens + ctx.rank) % 11
        engine.backward((engine(tokens) - ctx.data(3, key=key + k)).square().mean())

    run_program(engine, program, backward)


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_bit_equal_after_every_step(ctx: RankContext, stage: int) -> None:
    check_every_step(ctx, stage, "adamw")


@distributed(world_size=2)
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
@pytest.mark.parametrize("stage", STAGES)
def test_bit_equal_with_other_optimizers(ctx: RankContext, stage: int, optimizer: str) -> None:
    check_every_step(ctx, stage, optimizer)


def check_every_step(ctx: RankContext, stage: int, optimizer: str) -> None:
    config = {"gradient_clipping": 0.5}
    engine = start(ctx, tower(ctx), stage, optimizer=OPTIMIZERS[optimizer], config=config)
    assert_ranks_equal(engine)
    first = engine.full_state_dict()
    for key, program in enumerate(PROGRAMS):
        train(ctx, engine, program, 100 * key)
        engine.step()
        assert_ranks_equal(engine)
    last = engine.full_state_dict()
    assert all(not torch.equal(first[name], last[name]) for name in first), "something stood still"


@distributed(world_size=3)
@pytest.mark.parametrize("transport", ["cross-memory", "direct", "native"])
@pytest.mark.parametrize("stage", STAGES)
def test_bit_equal_with_every_transport(ctx: RankContext, stage: int, transport: str) -> None:
    config = {"onefold": {"transport": transport}}
    engine = start(ctx, tower(ctx), stage, optimizer=OPTIMIZERS["sgd"], config=config)
    for key, program in enumerate(PROGRAMS):
        train(ctx, engine, program, 100 * key)
        engine.step()
        assert_ranks_equal(engine)


@distributed(world_size=[2, 3, 4])
@pytest.mark.parametrize("scope", ["window", "armed", "no_sync"])
@pytest.mark.parametrize("stage", STAGES)
def test_bit_equal_where_ranks_did_different_things(
    ctx: RankContext, stage: int, scope: str
) -> None:
    """Other numbers of backwards and other layers; a rank that did nothing follows."""
    engine = start(ctx, tower(ctx), stage, optimizer=OPTIMIZERS["adamw"])
    for key in range(3):
        train(ctx, engine, [(scope, [(ctx.rank + key) % ctx.world_size])], 100 * key)
        engine.step()
        assert_ranks_equal(engine)
    with engine.coalesce_grad_reduction():
        layer = engine.module.layers[ctx.rank % 3]  # type: ignore[index]
        engine.backward(layer(ctx.data(2, 6)).sum())  # type: ignore[operator]
    engine.step()
    assert_ranks_equal(engine)


class WithBuffers(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((2,), value))
        self.register_buffer("hidden", torch.full((), value), persistent=False)
        self.register_buffer("flags", torch.full((3,), value > 0))
        self.register_buffer("numbers", torch.full((3,), int(value)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.get_buffer("scale")


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_and_buffers_of_rank_0_win_at_start(ctx: RankContext, stage: int) -> None:
    torch.manual_seed(100 + ctx.rank)
    module = WithBuffers(2.0 - ctx.rank)
    mine = {name: value.clone() for name, value in module.state_dict().items()}
    mine["hidden"] = module.get_buffer("hidden").clone()
    of_rank_0 = gathered(mine)[0]
    engine = start(ctx, module, stage)
    with engine.full_parameters():
        found = {**module.state_dict(), "hidden": module.get_buffer("hidden")}
        for name, value in of_rank_0.items():
            assert torch.equal(found[name], value), name
