"""DeepSpeed's own combinations for a window of several backwards, and those that it refuses.

The first half: both switches of its gradient buffers, offload, precisions, small buckets, experts
and clipping, at stages 1 to 3. The second half: stage 0, bf16 and fp16 at stages 0 and 1, nested
windows, and accumulation by hand. Every config is written in DeepSpeed's keys.

Gradients are small integers on purpose: sums, means and weights are exact in every dtype here, so
what is compared is bits. Experts are compared with one fp64 process.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.wire.grid import DENSE
from tests import rig
from tests.cases.wire_formula import reduction_kind, wire
from tests.harness import RankContext, distributed, pool_for
from tests.moe import test_engine as experts

N = 4
"""Backwards of one window, as in DeepSpeed's table."""

STEPS = 3
SWITCHES = list(product([False, True], [False, True]))  # contiguous_gradients, overlap_comm
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "param": {"offload_param": {"device": "cpu", "pin_memory": True}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 4}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 sums": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    },
    "fp16": {"fp16": FP16},
}


def offloads(stage: int) -> list[str]:
    """What DeepSpeed offers at a stage."""
    return ["none", "optimizer", "param", "both"][: {0: 1, 1: 2, 2: 2, 3: 4}[stage]]


class Street(nn.Module):
    """Three houses and a root weight; the gradient of house i is (i + 2) x, that of the root x."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.zeros(9))
        self.houses = nn.ModuleList(rig.House(40) for _ in range(3))

    def forward(self, x: float) -> Tensor:
        total = (self.root * x).sum()
        for number, house in enumerate(self.houses, start=2):
            total = total + house(number * x)
        return total


def factors(engine: onefold.Engine) -> Iterator[tuple[str, nn.Parameter, float]]:
    """Every parameter, and its gradient as a multiple of x."""
    for number, (name, param) in enumerate(engine.module.named_parameters(), start=1):
        yield name, param, float(number)


def x_of(rank: int, step: int, k: int) -> float:
    return 1.0 + 3 * rank + k + step


def mean_x(world_size: int, step: int, n: int = N) -> float:
    """The sum over backwards of the mean over ranks."""
    return sum(x_of(r, step, k) for r in range(world_size) for k in range(n)) / world_size


def start(ctx: RankContext, stage: int, offload: str = "none", **config: Any) -> onefold.Engine:
    """An engine as a DeepSpeed user's JSON describes it."""
    zero = config.pop("zero", {})
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2000,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "allgather_bucket_size": 100,
            "stage3_param_persistence_threshold": 0,
            **OFFLOADS[offload],
            **zero,
        },
        **config,
    }
    engine = onefold.initialize(model=Street(), config=settings).engine
    ctx.cleanup(engine.destroy)
    return engine


def backwards(ctx: RankContext, engine: onefold.Engine, step: int, n: int = N) -> None:
    for k in range(n):
        engine.backward(engine(x_of(ctx.rank, step, k)))


def window(ctx: RankContext, engine: onefold.Engine, step: int) -> None:
    with engine.coalesce_grad_reduction():
        backwards(ctx, engine, step)


def assert_gradients(engine: onefold.Engine, wanted: float) -> None:
    for name, param, factor in factors(engine):
        found = engine.full_grad(param)
        assert found is not None, name
        assert torch.equal(found, torch.full_like(found, factor * wanted)), name


def assert_weights(engine: onefold.Engine, moved: float) -> None:
    state = engine.full_state_dict()
    for name, _, factor in factors(engine):
        expected = torch.full_like(state[name], -factor * moved)
        assert torch.equal(state[name], expected), (name, state[name][0], expected[0])


def assert_trains(ctx: RankContext, engine: onefold.Engine) -> None:
    """Several steps in a row are exact, and send by formula, fewer than without the window."""
    moved = 0.0
    sent: dict[str, dict[str, int]] = {}
    for step in range(STEPS):
        mode = "bare" if step == 1 else "window"
        mark = engine.ledger.mark()
        if mode == "bare":
            backwards(ctx, engine, step)
        else:
            window(ctx, engine, step)
        engine.step()
        moved += mean_x(ctx.world_size, step)
        sent[mode] = rig.counts(engine, mark)
        assert sent[mode] == formula(engine, mode), mode
        assert engine.was_step_applied()
        assert_weights(engine, moved)
        rig.assert_ranks_equal(engine)
    window(ctx, engine, 0)
    engine.reduce_gradients()
    assert_gradients(engine, mean_x(ctx.world_size, 0))
    kind = reduction_kind(engine)
    assert sent["bare"][kind] > sent["window"][kind]
    assert sum(sent["bare"].values()) > sum(sent["window"].values())


def formula(engine: onefold.Engine, mode: str, *, is_declared: bool = True) -> dict[str, int]:
    """Collectives of one step of N backwards.

    Where gradients are Partial one backward is declared (``gradient_accumulation_steps`` is 1), and
    its reduction hides behind it; so of N bare ones the others need a second.
    """
    expected = wire(engine, mode, backwards=N)
    if mode == "bare" and is_declared and not engine.plan.home.shards_gradients:
        expected[reduction_kind(engine)] *= 2
    return expected


# -- what DeepSpeed allows ----------------------------------------------------------------------


@distributed(world_size=2)
@pytest.mark.parametrize(("stage", "offload"), [(s, o) for s in (1, 2, 3) for o in offloads(s)])
@pytest.mark.parametrize(("contiguous", "overlap"), SWITCHES)
def test_switches_and_offload(
    ctx: RankContext, stage: int, offload: str, contiguous: bool, overlap: bool
) -> None:
    zero = {"contiguous_gradients": contiguous, "overlap_comm": overlap, "reduce_bucket_size": 50}
    assert_trains(ctx, start(ctx, stage, offload, zero=zero))


@distributed(world_size=2)
@pytest.mark.parametrize(("stage", "offload"), [(s, o) for s in rig.STAGES for o in offloads(s)])
@pytest.mark.parametrize("precision", ["bf16", "bf16, fp32 sums", "fp16"])
def test_precisions_and_offload(ctx: RankContext, stage: int, offload: str, precision: str) -> None:
    """Stages 0 and 1 are those of DeepSpeed's wrapper optimizers, which have no window."""
    engine = start(ctx, stage, offload, **PRECISIONS[precision])
    assert engine.module.root.dtype == (torch.float16 if precision == "fp16" else torch.bfloat16)
    assert_trains(ctx, engine)


@distributed(world_size=2)
@pytest.mark.parametrize(("stage", "offload"), [(s, o) for s in rig.STAGES for o in offloads(s)])
def test_dynamic_scale_finds_its_place(ctx: RankContext, stage: int, offload: str) -> None:
    """Steps that overflow are skipped; at 2**12 the largest gradient would be above 65504."""
    fp16 = {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}
    engine = start(ctx, stage, offload, fp16=fp16, communication_data_type="fp32")
    largest = max(factor for *_, factor in factors(engine)) * x_of(1, 0, N - 1)
    skips = 0
    while largest * engine.loss_scaler.scale > torch.finfo(torch.float16).max:
        window(ctx, engine, 0)
        engine.step()
        skips += 1
        assert not engine.was_step_applied()
        assert engine.loss_scaler.scale == 2.0 ** (16 - skips)
        assert_weights(engine, 0.0)
    window(ctx, engine, 0)
    engine.step()
    assert_weights(engine, mean_x(2, 0))
    assert (engine.skipped_steps, engine.global_steps) == (skips, 1)
    assert skips > 0


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 45, 100, 5e8])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_small_buckets(ctx: RankContext, stage: int, bucket: float, precision: str) -> None:
    zero = {"reduce_bucket_size": bucket, "contiguous_gradients": True, "overlap_comm": True}
    engine = start(ctx, stage, zero=zero, **PRECISIONS[precision])
    assert len(engine.plan.units) == 4  # the largest bucket here is a quarter of the model
    assert_trains(ctx, engine)


@distributed(world_size=2)
@pytest.mark.parametrize(("stage", "offload"), [(s, o) for s in rig.STAGES for o in offloads(s)])
@pytest.mark.parametrize("largest", [1.0, 1e6])
def test_clipping(ctx: RankContext, stage: int, offload: str, largest: float) -> None:
    engine = start(ctx, stage, offload, gradient_clipping=largest)
    window(ctx, engine, 0)
    engine.step()
    mean = mean_x(ctx.world_size, 0)
    squares = sum((factor * mean) ** 2 * param.numel() for _, param, factor in factors(engine))
    norm = float(torch.tensor(math.sqrt(squares)))  # of integers, so exact until it is rounded
    assert engine.get_global_grad_norm() == norm
    clipped = min(1.0, largest / (norm + 1e-6))
    assert engine.clip_factor == clipped
    assert (clipped < 1.0) == (largest == 1.0)
    state = engine.full_state_dict()
    for name, _, factor in factors(engine):
        expected = -torch.full_like(state[name], factor * mean).mul_(clipped)
        assert torch.equal(state[name], expected), name


# -- experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("contiguous", "overlap"), SWITCHES)
@pytest.mark.parametrize(("ep_size", "world_size"), [(1, 2), (2, 2), (2, 4)])
def test_experts(
    stage: int, contiguous: bool, overlap: bool, ep_size: int, world_size: int
) -> None:
    zero = {"contiguous_gradients": contiguous, "overlap_comm": overlap}
    pool_for(world_size).run(train_experts, stage=stage, zero=zero, ep_size=ep_size)


def train_experts(ctx: RankContext, stage: int, zero: dict[str, Any], ep_size: int) -> None:
    engine = rig.start(ctx, experts.make(ep_size), stage, zero=zero)
    sent: dict[str, dict[str, int]] = {}
    wanted = experts.reference(ctx.world_size, N)
    for mode in ("bare", "window"):
        mark = engine.ledger.mark()
        with engine.coalesce_grad_reduction() if mode == "window" else nullcontext():
            for k in range(N):
                engine.backward(engine(experts.tokens(ctx.rank, k)))
        engine.reduce_gradients()
        sent[mode] = rig.counts(engine, mark)
        experts.assert_gradients(engine, wanted)
        engine.zero_grad()
    kind = reduction_kind(engine)
    groups = [
        ctx.world_size if u.reduce_group == DENSE else ctx.world_size // ep_size
        for u in engine.plan.units
    ]
    num_units = sum(size > 1 for size in groups)  # others have nobody to reduce with
    assert sent["window"][kind] == num_units
    assert sent["bare"][kind] == num_units * (N if stage > 1 else 1)
    if stage > 1:
        assert sum(sent["window"].values()) < sum(sent["bare"].values())


# -- what DeepSpeed refuses ---------------------------------------------------------------------


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_nested_windows(ctx: RankContext, stage: int, precision: str) -> None:
    engine = start(ctx, stage, **PRECISIONS[precision])
    mark = engine.ledger.mark()
    with engine.coalesce_grad_reduction() as outer:
        backwards(ctx, engine, 0, n=1)
        with engine.coalesce_grad_reduction() as inner:
            for k in range(1, N):
                engine.backward(engine(x_of(ctx.rank, 0, k)))
        assert inner.outcome == "kept"
    assert outer.backwards == N
    engine.step()
    assert rig.counts(engine, mark) == wire(engine, "window", backwards=N)
    assert_weights(engine, mean_x(ctx.world_size, 0))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_accumulation_by_hand(ctx: RankContext, stage: int, precision: str) -> None:
    """``managed_gradient_accumulation`` false: every step() steps, and nothing divides by 4."""
    config = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": N}
    engine = start(ctx, stage, **{**config, **PRECISIONS[precision]})
    for step, mode in enumerate(["window", "bare", "window"]):
        mark = engine.ledger.mark()
        with engine.coalesce_grad_reduction() if mode == "window" else nullcontext():
            backwards(ctx, engine, step)
        engine.step()
        assert engine.global_steps == step + 1
        assert rig.counts(engine, mark) == formula(engine, mode, is_declared=False)
        assert_weights(engine, sum(mean_x(ctx.world_size, one) for one in range(step + 1)))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_window_in_every_micro_step(ctx: RankContext, stage: int, precision: str) -> None:
    """The engine counts: two windows, two calls of step(), one step of their mean."""
    engine = start(ctx, stage, gradient_accumulation_steps=2, **PRECISIONS[precision])
    for micro_step in range(2):
        window(ctx, engine, 0)
        engine.step()
        assert engine.was_step_applied() == (micro_step == 1)
    assert_weights(engine, mean_x(ctx.world_size, 0))
    assert (engine.micro_steps, engine.global_steps) == (2, 1)


@distributed(world_size=2)
def test_stage_0_in_fp32(ctx: RankContext) -> None:
    assert_trains(ctx, start(ctx, 0))
