"""bf16: what model, masters, accumulators and wire hold, and how exact the sum is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests import rig
from tests.cases.modes import MODES, TINY, Rooms, run
from tests.cases.wire_formula import scope
from tests.harness import RankContext, distributed

ENABLED = {"bf16": {"enabled": True}}
TRANSPORTS = ["cross-memory", "direct", "native"]
UNIT_ROUNDOFF = 2.0**-8
"""Of bf16: 8 bits of significand, rounded to nearest."""
NUMEL = 300


class Layers(nn.Module):
    """Parameters and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize(("section", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_model_is_cast(ctx: RankContext, stage: int, section: str, dtype: torch.dtype) -> None:
    model = Layers()
    before = dict(model.named_parameters())
    engine = rig.start(ctx, model, stage, config={section: {"enabled": True}})
    assert dict(model.named_parameters()) == before  # the user's own objects
    assert {param.dtype for param in model.parameters()} == {dtype}
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    assert floating
    assert {buffer.dtype for buffer in floating} == {dtype}
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.dtype == torch.int64
    pieces = [piece for group in engine.optimizer.param_groups for piece in group["params"]]
    assert {piece.dtype for piece in pieces} == {torch.float32}
    assert engine.full_state_dict()["linear.weight"].dtype == dtype


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_masters_start_unrounded_and_keep_tiny_steps(ctx: RankContext, stage: int) -> None:
    """1 + 2**-10 is 1 in bf16; with 13 steps of 2**-12 it becomes 1 + 2**-7, the next number."""
    start, step = 1 + 2.0**-10, 2.0**-12
    house = rig.House(numel=40)
    with torch.no_grad():
        house.w.fill_(start)
    sgd = lambda params: torch.optim.SGD(params, lr=step)  # noqa: E731
    engine = rig.start(ctx, house, stage, optimizer=sgd, config=ENABLED)
    for count in range(15):
        wanted = torch.tensor(start + count * step)
        for piece in engine.optimizer.param_groups[0]["params"]:
            assert torch.equal(piece, wanted.expand(piece.shape))
        assert torch.equal(rig.weights(engine)["w"], wanted.bfloat16().expand(40))
        engine.backward(engine(-0.5 - ctx.rank))  # -1 on average
        engine.step()
    assert float(rig.weights(engine)["w"][0]) == 1 + 2.0**-7
    assert float((torch.tensor(1.0) + 15 * step).bfloat16()) == 1.0  # from rounded masters


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_the_optimizer_steps_on_fp32(ctx: RankContext, stage: int) -> None:
    """AdamW over whole fp32 copies gives the masters' bits; the model has them rounded."""
    make = lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)  # noqa: E731
    house = rig.House(numel=40)
    with torch.no_grad():
        house.w.copy_(torch.linspace(-1, 1, 40))
    reference = house.w.detach().clone().requires_grad_(True)
    optimizer, engine = (
        make([reference]),
        rig.start(ctx, house, stage, optimizer=make, config=ENABLED),
    )
    for backwards in (3, 1, 5):
        run(engine, "window", [lambda k=k: engine(rig.x_of(ctx.rank, k)) for k in range(backwards)])  # type: ignore[misc]
        engine.step()
        reference.grad = torch.full((40,), rig.expected(2, backwards))
        optimizer.step()
        assert torch.equal(rig.weights(engine)["w"], reference.detach().bfloat16())
    for piece in engine.optimizer.param_groups[0]["params"]:
        if piece.numel():
            state = engine.optimizer.state[piece]
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    unit = engine._units[0]
    masters = unit.gather(unit.master)[:40]
    assert torch.equal(masters, reference.detach())


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize(
    ("asked", "dtype"),
    [(None, torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)],
)
def test_the_accumulator_has_its_own_dtype(
    ctx: RankContext, stage: int, asked: str | None, dtype: torch.dtype
) -> None:
    house = rig.House()
    types = {"data_types": {"grad_accum_dtype": asked}} if asked else {}
    engine = rig.start(ctx, house, stage, config={**ENABLED, **types})
    for mode in ("window", "no_sync"):
        with scope(engine, mode, 2):
            for k in range(2):
                engine.backward(engine(rig.x_of(ctx.rank, k)))
                assert house.w.grad is not None
                assert house.w.grad.dtype == dtype
        engine.reduce_gradients()
        for piece in engine.optimizer.param_groups[0]["params"]:
            assert piece.grad is None or piece.grad.dtype == torch.float32
        engine.zero_grad()


def _itemsize(name: str) -> int:
    return {"bf16": 2, "fp16": 2, "fp32": 4}[name]


@distributed(world_size=[2, 3, 4])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("model", "wire", "travels"),
    [
        ("bf16", None, "bf16"),
        ("bf16", "fp32", "fp32"),
        ("bf16", "fp16", "fp16"),
        ("fp32", None, "fp32"),
        ("fp32", "bf16", "bf16"),
    ],
)
def test_bytes_on_the_wire(
    ctx: RankContext, stage: int, transport: str, model: str, wire: str | None, travels: str
) -> None:
    """Gradients in the model's dtype unless told otherwise; weights always in the model's."""
    config: dict[str, Any] = {"bf16": {"enabled": model == "bf16"}}
    config["onefold"] = {"transport": transport}
    if wire is not None:
        config["communication_data_type"] = wire
    engine = rig.start(ctx, Rooms(100, 7, 33), stage, config=config, zero=TINY)
    size, sent, held = ctx.world_size, _itemsize(travels), _itemsize(model)
    mark = engine.ledger.mark()
    with engine.coalesce_grad_reduction():
        for k in range(3):
            engine.backward(engine(rig.x_of(ctx.rank, k) / 4))
    engine.step()
    found = {kind: total.bytes_out for kind, total in engine.ledger.since(mark).items()}
    shards = [unit.layout.shard_numel for unit in engine.plan.units]
    if stage == 0:
        wanted = {"all_reduce": sum(2 * shard * sent * (size - 1) // size for shard in shards)}
    else:
        wanted = {
            "reduce_scatter": sum(shards) * sent * (size - 1),
            "all_gather": sum(shards) * held * (size - 1),
        }
    assert found == wanted
    rig.assert_ranks_equal(engine)


# -- how exact the deferred sum is -----------------------------------------------------------------


class Weighted(nn.Module):
    """The gradient of ``w`` is what is fed in, which bf16 holds exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def _terms(rank: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + k)
    return torch.randn(NUMEL, generator=generator).bfloat16()


def _local_sums(world_size: int, backwards: int, dtype: torch.dtype) -> list[Tensor]:
    """What each rank has accumulated in ``dtype``."""
    sums = []
    for rank in range(world_size):
        total = torch.zeros(NUMEL, dtype=dtype)
        for k in range(backwards):
            total += _terms(rank, k).to(dtype)
        sums.append(total)
    return sums


def _summed_in_bf16(terms: list[Tensor]) -> Tensor:
    """As a reduction in bf16 does it: every partial sum is rounded."""
    total = terms[0].bfloat16()
    for term in terms[1:]:
        total = total + term.bfloat16()
    return total.double()


def _rms(error: Tensor) -> float:
    return float(error.double().square().mean().sqrt())


@distributed(world_size=[2, 3, 4])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("backwards", [3, 7])
def test_one_rounding_of_each_term(
    ctx: RankContext, stage: int, transport: str, backwards: int
) -> None:
    """The sum's error is that of rounding every term once (and, where all ranks get the whole sum,
    the sum once), which is less than what a sum in bf16 loses.
    """
    size = ctx.world_size
    engine = rig.start(
        ctx, Weighted(), stage, config={**ENABLED, "onefold": {"transport": transport}}
    )
    unit = engine._units[0]
    exact = _local_sums(size, backwards, torch.float64)
    total = torch.stack(exact).sum(dim=0)
    for mode in ("window", "armed", "no_sync"):
        run(engine, mode, [lambda k=k: engine(_terms(ctx.rank, k)) for k in range(backwards)])  # type: ignore[misc]
        engine.reduce_gradients()
        found = engine.full_grad(unit.params[0])
        assert found is not None
        error = (found.double() * size - total).abs()
        bound = _bound(exact, rounds_sum=stage == 0)
        assert bool((error <= bound).all()), float((error / bound).max())
        wanted = _predicted(size, backwards)
        if stage == 0:
            wanted = wanted.bfloat16().float()
        assert torch.equal(found, wanted / size)
        if stage > 0 or size > 2:  # a sum of two in bf16 is rounded once, too
            assert _rms(error) < _rms(_summed_in_bf16(exact) - total)
        narrow = _summed_in_bf16(_local_sums(size, backwards, torch.bfloat16))
        assert _rms(error) < _rms(narrow - total)  # accumulated in bf16 as well
        if stage > 0:
            assert _rms(error) < 0.7 * _rms(narrow - total)
        engine.zero_grad()


def _bound(exact: list[Tensor], *, rounds_sum: bool) -> Tensor:
    """Bf16's roundoff of every term, and of the sum; of fp32 what adding and dividing cost."""
    total = torch.stack([term.abs() for term in exact]).sum(dim=0)
    return UNIT_ROUNDOFF * (total + total * rounds_sum) + 32 * 2.0**-24 * total


def _predicted(world_size: int, backwards: int) -> Tensor:
    """The bits of the sum: of rounded terms, in rank order, in fp32."""
    first, *rest = _local_sums(world_size, backwards, torch.float32)
    total = first.bfloat16().float()
    for term in rest:
        total += term.bfloat16().float()
    return total


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
def test_on_an_fp32_wire_nothing_is_rounded(ctx: RankContext, stage: int, mode: str) -> None:
    config = {**ENABLED, "communication_data_type": "fp32"}
    engine = rig.start(ctx, Weighted(), stage, config=config)
    run(engine, mode, [lambda k=k: engine(_terms(ctx.rank, k)) for k in range(5)])  # type: ignore[misc]
    engine.reduce_gradients()
    found = engine.full_grad(engine._units[0].params[0])
    assert found is not None
    exact = _local_sums(ctx.world_size, 5, torch.float64)
    sizes = torch.stack([term.abs() for term in exact]).sum(dim=0)
    total = torch.stack(exact).sum(dim=0)
    error = (found.double() * ctx.world_size - total).abs()
    # A sum of 5 W terms in fp32 and a division; partial sums stay below a few times the result.
    assert bool((error <= 64 * 2.0**-24 * (sizes + 1)).all())


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_a_model_that_comes_in_bf16(ctx: RankContext, stage: int) -> None:
    """No section in the config: the same masters, accumulators and wire."""
    engine = rig.start(ctx, rig.House(dtype=torch.bfloat16), stage)
    assert isinstance(engine, onefold.Engine)
    spec = engine.plan.units[0]
    dtypes = (spec.dtype, spec.accumulation_dtype, spec.wire_dtype, spec.master_dtype)
    assert dtypes == (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
    for count in range(1, 4):
        run(engine, "window", [lambda k=k: engine(rig.x_of(ctx.rank, k)) for k in range(2)])  # type: ignore[misc]
        engine.step()
        rig.assert_change(engine, 13.0 * count)
