"""torch_autocast: the gradients of plain ``torch.autocast`` around the forward, in fp32."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from tests import rig
from tests.cases.modes import MODES, during, scope
from tests.harness import RankContext, distributed

BF16 = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
WIDTH = 24
BACKWARDS = 3
RECOMPUTES = ["none", "reentrant", "non-reentrant"]


class Net(nn.Module):
    """Layers that autocast narrows, and a norm that it does not; remembers what it saw."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.recompute = recompute
        self.seen: set[torch.dtype] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            if self.recompute == "none":
                output = layer(hidden)
            else:
                is_reentrant = self.recompute == "reentrant"
                output = checkpoint(layer, hidden, use_reentrant=is_reentrant)
            self.seen.add(output.dtype)
            hidden = hidden + torch.tanh(output)
        return self.head(self.norm(hidden))


def _net(recompute: str = "none") -> Net:
    torch.manual_seed(1)
    return Net(recompute)


def _data(ctx: RankContext, k: int, rank: int | None = None) -> Tensor:
    return ctx.data(5, WIDTH, key=k, rank=rank).requires_grad_(True)


def _loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


def _plain(ctx: RankContext, model: Net, backwards: int) -> dict[str, Tensor]:
    """Rank by rank under plain autocast; the ranks' sums are added in rank order and divided."""
    totals: dict[str, Tensor] = {}
    for rank in range(ctx.world_size):
        own = copy.deepcopy(model)
        for k in range(backwards):
            with torch.autocast("cpu", torch.bfloat16):
                output = own(_data(ctx, k, rank))
            _loss(output).backward()
        for name, param in own.named_parameters():
            assert param.grad is not None
            totals[name] = totals[name] + param.grad if name in totals else param.grad
    return {name: total / ctx.world_size for name, total in totals.items()}


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_the_bits_of_plain_autocast(ctx: RankContext, stage: int, recompute: str) -> None:
    """Added locally, then over ranks in rank order, in fp32: no rounding differs."""
    model = _net(recompute)
    wanted = _plain(ctx, model, BACKWARDS)
    engine = rig.start(ctx, model, stage, config=BF16)
    assert not engine.loss_scaler.is_active
    for mode in ("window", "armed", "no_sync"):
        with during(mode):
            with scope(engine, mode, BACKWARDS):
                for k in range(BACKWARDS):
                    output = engine(_data(ctx, k))
                    assert output.dtype == torch.bfloat16
                    assert not torch.is_autocast_enabled("cpu")
                    engine.backward(_loss(output))
            engine.reduce_gradients()
            for name, param in model.named_parameters():
                found = engine.full_grad(param)
                assert found is not None
                assert found.dtype == param.dtype == torch.float32
                assert torch.equal(found, wanted[name]), name
            engine.zero_grad()
    assert model.seen == {torch.bfloat16}


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_the_module_itself_is_as_good(ctx: RankContext, stage: int) -> None:
    """Through the module, a bare backward; and training follows plain torch, step by step."""
    model = _net()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    sgd = lambda params: torch.optim.SGD(params, lr=0.5)  # noqa: E731
    engine = rig.start(ctx, model, stage, optimizer=sgd, config=BF16)
    for _ in range(3):
        for name, gradient in _plain(ctx, plain, 1).items():
            plain.get_parameter(name).grad = gradient
        optimizer.step()
        engine.module(_data(ctx, 0)).float().square().mean().backward()
        engine.step()
        for name, tensor in rig.weights(engine).items():
            assert torch.equal(tensor, plain.state_dict()[name]), name


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_is_autocast(ctx: RankContext, stage: int, when: str) -> None:
    """The same bits as eager: dynamo neither traces the hooks nor forgets the state they leave."""
    found = []
    for compiles in (False, True):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        torch.manual_seed(1)
        for param in model.parameters():
            nn.init.uniform_(param)
        if compiles and when == "before":
            model.compile(backend="aot_eager")
        engine = rig.start(ctx, model, stage, config=BF16)
        if compiles and when == "after":
            model.compile(backend="aot_eager")
        for k in range(2):
            output = engine(_data(ctx, k))
            assert output.dtype == torch.bfloat16
            engine.backward(_loss(output))
        assert not torch.is_autocast_enabled("cpu")
        engine.reduce_gradients()
        found.append([engine.full_grad(param) for param in model.parameters()])
        engine.destroy()
    for eager, compiled in zip(*found, strict=True):
        assert eager is not None
        assert compiled is not None
        assert torch.equal(eager, compiled)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_gradients_travel_as_fp32(ctx: RankContext, stage: int) -> None:
    engine = rig.start(ctx, _net(), stage, config=BF16)
    assert {unit.wire_dtype for unit in engine.plan.units} == {torch.float32}
    mark = engine.ledger.mark()
    with engine.coalesce_grad_reduction():
        engine.backward(_loss(engine(_data(ctx, 0))))
    engine.reduce_gradients()
    moved = engine.ledger.since(mark)["all_reduce" if stage == 0 else "reduce_scatter"]
    assert moved.bytes_out == sum(u.layout.numel * 4 // 2 for u in engine.plan.units) * (
        2 if stage == 0 else 1
    )


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_a_forward_that_raises_leaves_autocast(ctx: RankContext, stage: int) -> None:
    engine = rig.start(ctx, _net(), stage, config=BF16)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            engine(torch.zeros(5, WIDTH + 1))
        assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert engine(_data(ctx, 0)).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")  # the caller's setting is back
    engine.zero_grad()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_destroyed_it_is_gone(ctx: RankContext, stage: int) -> None:
    model = _net()
    engine = onefold.initialize(
        model=model,
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        config={**BF16, "zero_optimization": {"stage": stage}},
    ).engine
    assert model(_data(ctx, 0)).dtype == torch.bfloat16
    engine.destroy()
    assert model(_data(ctx, 0)).dtype == torch.float32


def _fp16(**scaling: float) -> dict[str, Any]:
    section = {"enabled": True, "dtype": "float16"}
    return {"torch_autocast": section, **({"fp16": scaling} if scaling else {})}


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
def test_fp16_autocast_scales(ctx: RankContext, stage: int, mode: str) -> None:
    """A dynamic scaler over an fp32 model; gradients near those in fp32."""
    model = _net()
    plain = copy.deepcopy(model)
    engine = rig.start(ctx, model, stage, config=_fp16(initial_scale_power=8))
    assert engine.loss_scaler.is_active
    assert engine.loss_scaler.is_dynamic
    assert engine.loss_scaler.scale == 2.0**8
    for rank in range(ctx.world_size):
        for k in range(2):
            (_loss(plain(_data(ctx, k, rank))) / ctx.world_size).backward()
    with scope(engine, mode, 2):
        for k in range(2):
            engine.backward(_loss(engine(_data(ctx, k))))
    assert model.seen == {torch.float16}
    engine.reduce_gradients()
    for name, param in plain.named_parameters():
        found = engine.full_grad(model.get_parameter(name))
        assert found is not None
        assert param.grad is not None
        # A handful of roundings to 11 bits, relative to the largest element.
        largest = float(param.grad.abs().max())
        assert float((found - param.grad).abs().max()) < 2.0**-7 * largest, name
    engine.step()
    assert engine.was_step_applied()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_fp16_autocast_skips_and_refuses(ctx: RankContext, stage: int) -> None:
    engine = rig.start(ctx, _net(), stage, config=_fp16(initial_scale_power=8))
    before = rig.weights(engine)
    for skips in (1, 2, 3):
        data = _data(ctx, 0).detach()
        data[0, 0] = math.inf if ctx.rank == 1 else 1.0
        engine.backward(_loss(engine(data)))
        engine.step()
        assert (engine.was_step_applied(), engine.skipped_steps) == (False, skips)
        # The second overflow is the first that halves.
        assert rig.gathered(engine.loss_scaler.scale) == [2.0 ** (9 - max(1, skips))] * 2
    for name, tensor in rig.weights(engine).items():
        assert torch.equal(tensor, before[name]), name
    _refused(engine, lambda: _loss(engine(_data(ctx, 0))).backward())
    engine.zero_grad()
    engine.backward(_loss(engine(_data(ctx, 0))))
    engine.step()
    assert engine.was_step_applied()
    rig.assert_ranks_equal(engine)


def _refused(engine: onefold.Engine, call: Callable[[], None]) -> None:
    with pytest.raises(onefold.StateError, match=r"engine.backward\(loss\)"):
        call()
