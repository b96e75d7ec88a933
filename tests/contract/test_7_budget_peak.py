"""Contract 7, ``max_bytes``: at every rung sums are exact, and the peak is below its bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.budget import Kept
from tests.contract.budget import (
    EQUAL,
    HOUSES,
    SHARDED,
    assert_gradients,
    keeps_blocks,
    run,
    rungs_in_use,
    sample,
    terrace,
    watched,
)
from tests.contract.helpers import arena, start, x_of
from tests.harness import RankContext, distributed
from tests.rig import assert_ranks_equal, counts

UNEQUAL = tuple(300 + 40 * (5 * i % HOUSES) for i in range(HOUSES))


def full_bytes(engine: onefold.Engine, block: int) -> int:
    """Of a block's full parameters."""
    return sum(engine._units[index].full_bytes for index in engine.plan.blocks[block].units)


def sent_bytes(ctx: RankContext, engine: onefold.Engine, kept: Kept, n: int) -> int:
    """V per reduction and V per gather of what is sent, V = full bytes x (W-1)/W."""
    total = 0
    for unit in engine._units:
        total += unit.gradients.full_bytes * (1 if unit.index in kept.units else n)
    for index, block in enumerate(engine.plan.blocks):
        if engine._units[block.units[0]].frees_parameters:
            total += full_bytes(engine, index) * (1 if index in kept.blocks else 2 * n)
    return total * (ctx.world_size - 1) // ctx.world_size


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("numels", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("stage", SHARDED)
def test_every_rung_is_exact_and_stays_below_its_bytes(
    ctx: RankContext, stage: int, numels: tuple[int, ...]
) -> None:
    engine = terrace(ctx, stage, numels)
    num_units = len(engine.plan.units)
    rungs = rungs_in_use(engine)
    assert len(rungs) > 5
    assert not keeps_blocks(engine, rungs[0].kept) or stage == 2
    for number, rung in enumerate(sample(rungs)):
        n = 1 + number % 3
        mark = engine.ledger.mark()
        with watched(engine) as peak:
            run(ctx, engine, n, max_bytes=rung.num_bytes)
        assert peak.num_bytes <= rung.num_bytes, (rung, n)
        window = engine.last_window
        assert window is not None
        blocks, units = rung.kept.blocks, rung.kept.units
        wanted = {"reduce_scatter": len(units) + n * (num_units - len(units))}
        if stage == 3:
            wanted["all_gather"] = len(blocks) + 2 * n * (num_units - len(blocks))
        assert counts(engine, mark) == window.collectives == wanted, (rung, n)
        assert window.bytes_sent == sent_bytes(ctx, engine, rung.kept, n)
        nothing = Kept(frozenset(), frozenset(), arms=False)
        assert window.bytes_sent_per_backward == sent_bytes(ctx, engine, nothing, n)
        held = sum(unit.gradients.full_bytes for unit in engine._units if unit.index in units)
        if stage == 3:
            held += sum(full_bytes(engine, index) for index in blocks)
        assert window.bytes_held == held <= rung.num_bytes
        assert_gradients(ctx, engine, n)
        engine.step()
        assert arena(engine).leased_bytes == 0
    assert_ranks_equal(engine)


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_without_a_budget_a_window_holds_more(ctx: RankContext, stage: int) -> None:
    """The negative control of the peaks above: the budget is what keeps them down."""
    engine = terrace(ctx, stage)
    least, *_, most = rungs_in_use(engine)
    with watched(engine) as peak:
        run(ctx, engine, 2)
    assert least.num_bytes < peak.num_bytes <= most.num_bytes
    engine.step()


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"config": {"bf16": {"enabled": True}}},
    "bf16 sums": {
        "config": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    },
    "fp16": {"config": {"fp16": {"enabled": True, "loss_scale": 2.0}}},
    "offloaded": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "native": {"config": {"onefold": {"transport": "native"}}},
    "mesh": {},
}


@distributed(world_size=4)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("stage", SHARDED)
def test_the_peak_holds_in_every_setting(ctx: RankContext, stage: int, setting: str) -> None:
    """Also with backwards outside before the window, and more windows in one step."""
    arguments = dict(SETTINGS[setting])
    if setting == "mesh":
        arguments["mesh"] = ctx.device_mesh(2, 2, names=("replicate", "shard"))
    engine = terrace(ctx, stage, UNEQUAL, **arguments)
    rungs = rungs_in_use(engine)
    for rung in sample(rungs)[::2]:
        with watched(engine) as peak:
            for first in (0, 2):
                with engine.coalesce_grad_reduction(max_bytes=rung.num_bytes) as window:
                    for k in range(first, first + 2):
                        engine.backward(engine(x_of(ctx.rank, k)))
                assert window.outcome == "flushed"
        assert peak.num_bytes <= rung.num_bytes, rung
        engine.step()
    assert_ranks_equal(engine)


class Layers(nn.Sequential):
    """Layers that are nothing but one after another, plain or recomputed in backward."""

    def __init__(self, recompute: str) -> None:
        super().__init__(*(nn.Linear(16, 16) for _ in range(HOUSES)))
        self._recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            if self._recompute == "none":
                x = layer(x)
            else:
                reentrant = self._recompute == "reentrant"
                x = checkpoint(layer, x, use_reentrant=reentrant)
        return x


@distributed(world_size=2)
@pytest.mark.parametrize("recompute", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("stage", SHARDED)
def test_the_peak_holds_with_recomputation(ctx: RankContext, stage: int, recompute: str) -> None:
    """Also in the first pass, whose order nobody knows, and after passes of another order."""
    torch.manual_seed(0)
    model = Layers(recompute)
    zero = {"reduce_bucket_size": 272}
    engine = start(ctx, model, stage, zero=zero, optimizer=nothing_learnt)
    for rung in sample(rungs_in_use(engine))[::2]:
        with (
            watched(engine) as peak,
            engine.coalesce_grad_reduction(max_bytes=rung.num_bytes),
        ):
            for k in range(2):
                loss = engine(ctx.data(4, 16, key=k).requires_grad_()).square().mean()
                with torch.no_grad():
                    for layer in [*model][:: (-1) ** k]:
                        layer(torch.ones(16))
                engine.backward(loss)
        assert peak.num_bytes <= rung.num_bytes, rung
        engine.step()
    assert_ranks_equal(engine)


def nothing_learnt(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)
