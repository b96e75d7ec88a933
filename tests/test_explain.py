"""``Engine.explain``: its numbers by formulas of their own, and its words by what was chosen."""

import re
from typing import Any

import pytest
import torch

import onefold
from tests.harness import RankContext, distributed
from tests.rig import STAGES, House, Tower, start
from tests.scale.world import LAYER_NUMEL, Stack, engine_of

LAYERS = 3
NUMEL = (LAYERS + 1) * LAYER_NUMEL
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def said(engine: onefold.Engine) -> str:
    """As one line, so that it does not matter where lines were broken."""
    text = engine.explain()
    lines = text.splitlines()
    assert len(lines) <= 40, "one screen"
    assert all(len(line) <= 100 for line in lines)
    return " ".join(text.split())


def number(pattern: str, text: str) -> float:
    """The bytes that stand where ``#`` stands in ``pattern``."""
    amount = r"([\d.]+) (B|KiB|MiB|GiB)"
    found = re.search(re.escape(pattern).replace(re.escape("#"), amount), text)
    assert found is not None, f"{pattern} is not in: {text}"
    return float(found[1]) * UNITS[found[2]]


def near(value: float) -> Any:
    """To the one decimal that is printed of at least 1."""
    return pytest.approx(value, rel=0.05)


@pytest.mark.parametrize("size", [8, 64, 4096])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_numbers(size: int, stage: int, wire: str) -> None:
    itemsize = 2 if wire == "bf16" else 4
    held = NUMEL * itemsize // (size if stage == 3 else 1)
    held += NUMEL * 4 // (size if stage else 1) if wire == "bf16" else 0
    volume = NUMEL * itemsize * (size - 1) / size
    with engine_of(size, stage, Stack(LAYERS), **(BF16 if wire == "bf16" else {})) as engine:
        before = engine._world.control.count, engine.ledger.mark()
        text = said(engine)
        assert (engine._world.control.count, engine.ledger.mark()) == before
    assert f"rank 1 of {size} " in text
    assert f"{LAYERS + 1} of " in text
    assert f"{LAYERS + 1} parameter(s), 0.0% padding" in text
    assert number("between steps: # of parameters and masters", text) == near(held)
    assert number("a window adds: # of gradients", text) == near(4 * NUMEL)
    assert number("until the step: # of reduced", text) == near(4 * NUMEL // (size if stage else 1))
    if stage == 3:
        assert number("gradients and # of parameters, whatever n", text) == near(NUMEL * itemsize)
        assert number("without a window: n x #", text) == near(3 * volume)
        assert number("in a window: #", text) == near(2 * volume)
    elif stage == 2:
        assert number("without a window: n x #", text) == near(volume)
        assert number(f"{text.split('n x ')[1].split(' + ')[0]} + # in a", text) == near(volume)
        assert number("in a window: #", text) == near(2 * volume)
    else:
        assert number("with or without a window: #", text) == near(2 * volume)


IN_ORDER = "added in rank order, one after another: the same bits in every run"
ALGORITHMS = {
    (8, "fp32"): "float32: the backend's own reduce-scatter, which adds in an order of its own",
    (8, "bf16"): f"bfloat16: all-to-all, summed in float32 by the owner; {IN_ORDER}",
    (64, "bf16"): f"bfloat16: all-to-all, summed in float32 by the owner; {IN_ORDER}",
    (65, "bf16"): "in one call: the same bits in every run, but above 64 ranks not in rank order",
    (2, "fp32"): "of two ranks there is one sum",
}


@pytest.mark.parametrize(("size", "wire"), list(ALGORITHMS))
def test_the_algorithm_by_world_and_wire(size: int, wire: str) -> None:
    with engine_of(size, 2, Stack(1), **(BF16 if wire == "bf16" else {})) as engine:
        text = said(engine)
    for key, words in ALGORITHMS.items():
        assert (words in text) == (words == ALGORITHMS[size, wire]), key
    assert f"shard: {size} ranks, transport native (as onefold.transport says)" in text


@pytest.mark.parametrize(("size", "is_small"), [(8, False), (64, True), (512, True)])
def test_small_messages_are_said(size: int, is_small: bool) -> None:
    with engine_of(size, 3, Stack(1), **BF16) as engine:
        text = said(engine)
    assert number("# to each other rank", text) == near(LAYER_NUMEL * 2 / size)
    assert ("that is small" in text) == is_small


def test_above_64_ranks_auto_is_native_and_says_why() -> None:
    with engine_of(65, 1, Stack(1), onefold_config={}) as engine:
        assert "native (auto: too many ranks for connections in pairs)" in said(engine)


@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("choice", ["auto", "direct", "native"])
@pytest.mark.parametrize("stage", STAGES)
def test_transports_of_real_groups(ctx: RankContext, choice: str, stage: int) -> None:
    engine = start(
        ctx, Tower(dtype=torch.float32), stage, config={"onefold": {"transport": choice}}
    )
    text = said(engine)
    assert f"rank {ctx.rank} of {ctx.world_size} " in text
    assert ("reduction of dense" in text) == (ctx.world_size > 1)
    if ctx.world_size > 1:
        axis = "shard" if stage else "replicate"
        group = getattr(engine.parts.wires[0].mesh, axis)
        assert f"{axis}: {ctx.world_size} ranks, transport {group.transport.name} (" in text
        assert ("auto: " in text) == (choice == "auto")
        assert (IN_ORDER in text) == (choice != "native")


@distributed(world_size=4)
@pytest.mark.parametrize("stage", STAGES)
def test_two_axes(ctx: RankContext, stage: int) -> None:
    mesh = ctx.device_mesh(2, 2, names=("replicate", "shard"))
    engine = start(ctx, House(1024), stage, mesh=mesh)
    text = said(engine)
    shards, replicas = (2, 2) if stage else (1, 4)
    assert f"dense parameters: {shards} shard(s) x {replicas} replica(s)" in text
    assert f"replicate: {replicas} ranks" in text
    # 4 KiB: half of it over shard, and 2 x 1/2 of the shard over replicate.
    reduction = 4096 * 2 * 3 / 4 if stage == 0 else 2048 + 2048
    publish = 2048 if stage in (1, 2) else 0
    sent = "with or without a window: #" if stage < 2 else "in a window: #"
    gather = 2048 if stage == 3 else 0
    assert number(sent, text) == near(reduction + publish + gather)


@distributed(world_size=2)
def test_what_is_offloaded_and_what_is_frozen(ctx: RankContext) -> None:
    model = Tower(width=16, dtype=torch.bfloat16)
    model.embed.requires_grad_(False)
    zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    engine = start(ctx, model, 3, zero=zero, config=BF16)
    text = said(engine)
    assert "parameter(s)" in text
    assert "frozen" in text
    shards = sum(unit.layout.shard_numel for unit in engine.plan.units)
    masters = sum(u.layout.shard_numel for u in engine.plan.units if u.is_trainable)
    assert number("and # in host memory", text) == near(2 * shards + 4 * masters)
    assert "between steps: 0 B of parameters" in text
