"""Offload: masters, the optimizer's state and parameter shards in host memory of their own, with
the bits of what is not offloaded.

The devices are the CPU here, so that "host memory" is told by the plan and by addresses.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests import rig
from tests.cases.modes import MODES, Shadow, during, run
from tests.harness import RankContext, distributed

CPU = {"device": "cpu"}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": CPU},
    "param": {"offload_param": CPU},
    "both": {"offload_optimizer": CPU, "offload_param": CPU},
}
FIELDS = [
    *((stage, "optimizer") for stage in (1, 2)),
    *((3, offload) for offload in ("optimizer", "param", "both")),
]
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Rows(nn.Module):
    """A repeated block and a root parameter; the gradient of every element is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(rig.House(40) for _ in range(2))
        self.w = nn.Parameter(torch.zeros(5))
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.linspace(0.5, 1.0, param.numel()))

    def forward(self, x: float) -> Tensor:
        loss = (self.w * x).sum()
        for block in self.blocks:
            loss = loss + block(x)
        return loss


def adamw(**choices: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, **choices)


def start(
    ctx: RankContext,
    stage: int,
    offload: str,
    *,
    precision: str = "fp32",
    optimizer: Any = None,
    model: nn.Module | None = None,
    **config: Any,
) -> onefold.Engine:
    model = Rows() if model is None else model
    config = {**PRECISIONS[precision], **config}
    return rig.start(ctx, model, stage, optimizer=optimizer, zero=OFFLOADS[offload], config=config)


def step(ctx: RankContext, engine: onefold.Engine, mode: str, backwards: int) -> None:
    run(engine, mode, [lambda k=k: engine(rig.x_of(ctx.rank, k)) for k in range(backwards)])  # type: ignore[misc]
    engine.step()


def masters(engine: onefold.Engine) -> dict[str, Tensor]:
    """Whole masters by parameter name, on every rank."""
    found = {}
    for unit in engine._units:
        flat = unit.gather(unit.master)
        for slot, view in zip(unit.slots, unit.views_of(flat), strict=True):
            found[slot.name] = view.clone()
    return found


def memories(engine: onefold.Engine) -> list[tuple[int, int]]:
    """Address and length of what the optimizer updates and keeps on this rank."""
    found = []
    for group in engine.optimizer.param_groups:
        for piece in group["params"]:
            state = engine.optimizer.state.get(piece, {})
            tensors = [piece, *(t for t in state.values() if isinstance(t, Tensor))]
            found += [(t.data_ptr(), t.nbytes) for t in tensors if t.numel()]
    return found


@distributed(world_size=[1, 2])
@pytest.mark.parametrize(("stage", "offload"), FIELDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_things_are(ctx: RankContext, stage: int, offload: str, precision: str) -> None:
    engine = start(ctx, stage, offload, precision=precision, optimizer=adamw())
    has_optimizer, has_param = offload in ("optimizer", "both"), offload in ("param", "both")
    for unit in engine._units:
        spec = unit.spec
        assert (spec.offloads_optimizer, spec.offloads_parameters) == (has_optimizer, has_param)
        assert unit.master.dtype == torch.float32
        assert unit.param_shard.dtype == DTYPES[precision]
        assert spec.has_own_master is (has_optimizer != has_param or precision == "bf16")
        is_own = unit.master.data_ptr() != unit.param_shard.data_ptr()
        assert is_own is spec.has_own_master
        if stage < 3:
            assert unit.param_shard.data_ptr() == unit._own_slice.start * spec.dtype.itemsize + (
                unit.param_full.data_ptr()
            )
    step(ctx, engine, "window", 3)
    spans = [(u.param_full.data_ptr(), u.full_bytes) for u in engine._units if u.is_unsharded]
    if has_optimizer:
        for address, length in memories(engine):
            assert all(
                address + length <= begin or begin + size <= address for begin, size in spans
            )


@distributed(world_size=2)
@pytest.mark.parametrize(("stage", "offload"), FIELDS)
def test_the_fused_kernel_is_chosen(ctx: RankContext, stage: int, offload: str) -> None:
    """Where pieces are on the host, unless the user chose."""
    engine = start(ctx, stage, offload, optimizer=adamw())
    chosen = engine.optimizer.param_groups[0]["fused"]
    assert chosen is (True if offload in ("optimizer", "both") else None)
    for choice in ({"fused": False}, {"foreach": True}, {"foreach": False}):
        engine = start(ctx, stage, offload, optimizer=adamw(**choice))
        for name, value in choice.items():
            assert engine.optimizer.param_groups[0][name] is value
        assert engine.optimizer.param_groups[0]["fused"] in (None, False)
        step(ctx, engine, "window", 2)
    engine = start(ctx, stage, offload, optimizer=adamw(fused=True))
    assert engine.optimizer.param_groups[0]["fused"] is True
    step(ctx, engine, "window", 2)


@distributed(world_size=2)
def test_only_groups_without_a_choice_are_fused(ctx: RankContext) -> None:
    model = Rows()
    groups: list[dict[str, Any]] = [
        {"params": [model.w]},
        {"params": list(model.blocks.parameters()), "foreach": True},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine = start(ctx, 2, "optimizer", model=model, optimizer=optimizer)
    assert [group["fused"] for group in engine.optimizer.param_groups] == [True, None]
    step(ctx, engine, "window", 2)
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
@pytest.mark.parametrize(("stage", "offload"), FIELDS)
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_of_not_offloaded(
    ctx: RankContext, stage: int, offload: str, precision: str, mode: str
) -> None:
    """By the same kernel; masters, weights and state after steps of several sizes, and clipping."""
    engine, other = (
        start(
            ctx,
            stage,
            each,
            precision=precision,
            optimizer=adamw(fused=True),
            gradient_clipping=9.0,
        )
        for each in (offload, "none")
    )
    for backwards in (3, 1, 5):
        for one in (engine, other):
            step(ctx, one, mode, backwards)
        assert engine.get_global_grad_norm() == other.get_global_grad_norm()
        pairs = zip(_everything(engine), _everything(other), strict=True)
        for (name, mine), (_, theirs) in pairs:
            assert torch.equal(mine, theirs), name
    rig.assert_ranks_equal(engine)


def _everything(engine: onefold.Engine) -> list[tuple[str, Tensor]]:
    found = [*rig.weights(engine).items(), *masters(engine).items()]
    for group in engine.optimizer.param_groups:
        for piece in group["params"]:
            state = engine.optimizer.state.get(piece, {})
            found += [(key, torch.as_tensor(state[key])) for key in sorted(state)]
    return found


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize(("stage", "offload"), FIELDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [True, False])
def test_steps_equal_one_process(
    ctx: RankContext, stage: int, offload: str, precision: str, fused: bool
) -> None:
    """A plain AdamW over whole fp32 tensors, fed with the averaged gradients."""
    if offload == "param" and fused:
        fused = False  # masters stay on the device: the default kernel
    choice = {} if fused else {"fused": False}
    shadow = Shadow(Rows(), adamw(fused=fused))
    engine = start(ctx, stage, offload, precision=precision, optimizer=adamw(**choice))
    for mode, backwards in (("window", 3), ("no_sync", 1), ("bare", 2), ("armed", 5)):
        with during(mode, backwards):
            step(ctx, engine, mode, backwards)
            gradient = rig.expected(ctx.world_size, backwards)
            if ctx.world_size == 3:
                gradient = float(torch.tensor(gradient * 3) / 3)
            shadow.step(dict.fromkeys(shadow.params, gradient))
            found, state = masters(engine), rig.weights(engine)
            for name, tensor in shadow.weights().items():
                assert torch.equal(found[name], tensor), name
                assert torch.equal(state[name], tensor.to(DTYPES[precision])), name
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
@pytest.mark.parametrize(("stage", "offload"), FIELDS)
def test_accumulates_over_steps(ctx: RankContext, stage: int, offload: str) -> None:
    """Micro-steps that the engine counts, each with several backwards, in and out of windows."""
    engine = rig.start(
        ctx,
        rig.House(),
        stage,
        zero=OFFLOADS[offload],
        config={"gradient_accumulation_steps": 3},
    )
    total = 0.0
    for sizes in ((1, 2, 1), (3, 0, 2)):
        k = 0
        for position, (mode, size) in enumerate(
            zip(("bare", "window", "no_sync"), sizes, strict=True)
        ):
            run(engine, mode, [lambda k=k + i: engine(rig.x_of(ctx.rank, k)) for i in range(size)])  # type: ignore[misc]
            k += size
            engine.step()
            assert engine.was_step_applied() is (position == 2)
        total += rig.expected(2, k) / 3
        w = rig.weights(engine)["w"]
        torch.testing.assert_close(w, torch.full((7,), -total), rtol=2.0**-22, atol=0)
    rig.assert_ranks_equal(engine)


@distributed(world_size=[2, 4])
@pytest.mark.parametrize(("stage", "offload"), FIELDS)
def test_the_state_is_this_ranks_share(ctx: RankContext, stage: int, offload: str) -> None:
    """Two moments of a W-th of the parameters in fp32, and a master: nothing grows after step 1."""
    engine = start(ctx, stage, offload, precision="bf16", optimizer=adamw())
    numel = sum(param.numel() for param in Rows().parameters())
    held = []
    for _ in range(3):
        step(ctx, engine, "window", 3)
        pieces = [p for group in engine.optimizer.param_groups for p in group["params"]]
        moments = [
            tensor
            for piece in pieces
            for key, tensor in engine.optimizer.state.get(piece, {}).items()
            if key != "step"
        ]
        held.append((sum(p.nbytes for p in pieces), sum(t.nbytes for t in moments)))
        assert {tensor.device.type for tensor in (*pieces, *moments)} == {"cpu"}
        assert all(unit.gradients.grad_shard is None for unit in engine._units)
        assert engine.parts.arena.leased_bytes == 0
    masters_bytes, state_bytes = held[0]
    assert set(held) == {(masters_bytes, 2 * masters_bytes)}
    assert state_bytes == 2 * masters_bytes
    assert sum(own for own, _ in rig.gathered(held[0])) == 4 * numel


# -- writes into parameters ------------------------------------------------------------------------

WRITES = [("full_parameters", stage) for stage in (1, 2, 3)] + [("plain", 1), ("plain", 2)]


def _write(engine: onefold.Engine, how: str) -> None:
    """Set element 3 of each parameter to 2, in place, as both kinds of user code do."""
    if how == "plain":
        _set_third(engine.module)
        return
    with engine.full_parameters():
        _set_third(engine.module)


@torch.no_grad()
def _set_third(module: nn.Module) -> None:
    for param in module.parameters():
        param[3] = 2.0


@distributed(world_size=2)
@pytest.mark.parametrize(("how", "stage"), [*WRITES, ("plain", 0), ("full_parameters", 0)])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_writes_reach_the_masters(
    ctx: RankContext, how: str, stage: int, offload: str, precision: str
) -> None:
    """What was written is what the next step starts from; elsewhere the masters keep their bits,
    those that the model's dtype has no room for included.
    """
    if stage == 0 and offload == "optimizer":
        offload = "none"  # there is nothing to offload
    fused = offload == "optimizer"
    shadow = Shadow(Rows(), adamw(fused=fused))
    choice = {} if fused else {"fused": False}
    engine = start(ctx, stage, offload, precision=precision, optimizer=adamw(**choice))
    for backwards in (3, 1, 2):
        step(ctx, engine, "window", backwards)
        shadow.step(dict.fromkeys(shadow.params, rig.expected(2, backwards)))
        with torch.no_grad():
            for tensor in shadow.params.values():
                tensor[3] = 2.0
        _write(engine, how)
    step(ctx, engine, "window", 5)
    shadow.step(dict.fromkeys(shadow.params, rig.expected(2, 5)))
    found, state = masters(engine), rig.weights(engine)
    for name, tensor in shadow.weights().items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(state[name], tensor.to(DTYPES[precision])), name
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
@pytest.mark.parametrize(("stage", "offload"), FIELDS)
def test_a_write_before_the_first_step(ctx: RankContext, stage: int, offload: str) -> None:
    """Masters that came from unrounded values take what was written, not the rounded rest."""
    engine = start(ctx, stage, offload, precision="bf16")
    before = masters(engine)
    _write(engine, "full_parameters")
    for name, master in masters(engine).items():
        wanted = before[name].clone()
        wanted[3] = 2.0
        assert torch.equal(master, wanted), name
        if name != "w":  # five numbers that bf16 has
            assert not torch.equal(master, master.bfloat16().float()), name
