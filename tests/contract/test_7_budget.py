"""Contract 7, ``max_bytes``: what is kept, what is sent instead, and the peak of live bytes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.budget import Kept, Rung
from tests.contract.helpers import Fault, arena, gathered, start, x_of
from tests.harness import RankContext, distributed
from tests.rig import assert_ranks_equal, counts

HOUSES = 16
SHARDED = [2, 3]


class House(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel))

    def forward(self, before: Tensor, x: float) -> Tensor:
        return before + (self.w * x).sum()


class Terrace(nn.Module):
    """Houses one after another, each on what the one before it returned; and a root parameter.

    The gradient of every element, house or gate, is x.
    """

    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(40))
        self.houses = nn.ModuleList(House(numel) for numel in numels)

    def forward(self, x: float, which: Iterable[int] = range(HOUSES)) -> Tensor:
        total = (self.gate * x).sum()
        for index in which:
            total = self.houses[index](total, x)
        return total


EQUAL = (512,) * HOUSES
UNEQUAL = tuple(300 + 40 * (5 * i % HOUSES) for i in range(HOUSES))


def terrace(
    ctx: RankContext, stage: int, numels: Sequence[int] = EQUAL, **arguments: Any
) -> onefold.Engine:
    zero = {"reduce_bucket_size": 1, **arguments.pop("zero", {})}
    return start(ctx, Terrace(numels), stage, zero=zero, **arguments)


def rungs_in_use(engine: onefold.Engine) -> list[Rung]:
    """The rungs that some ``max_bytes`` picks, each with the least that does."""
    used: list[Rung] = []
    for rung in reversed(engine._transaction.budget.ladder()):
        if not used or rung.num_bytes < used[-1].num_bytes:
            used.append(rung)
    return used[::-1]


def sample(rungs: list[Rung]) -> list[Rung]:
    """The first and last ones, and every third between."""
    return [*rungs[:2], *rungs[2:-2:3], *rungs[-2:]]


def between(engine: onefold.Engine) -> int:
    """A budget for which all parameters are kept, and not all gradients."""
    rungs = [rung for rung in rungs_in_use(engine) if keeps_blocks(engine, rung.kept)]
    assert len(rungs) > 2
    return rungs[len(rungs) // 2].num_bytes


def keeps_blocks(engine: onefold.Engine, kept: Kept) -> bool:
    return kept.blocks == engine._transaction.budget.everything.blocks


class Peak:
    """The most live bytes on this rank above those between steps: leases and full parameters."""

    def __init__(self, engine: onefold.Engine) -> None:
        self._engine = engine
        self._home = self._live()
        self.num_bytes = 0

    def _live(self) -> int:
        leases = arena(self._engine)
        units = self._engine._units
        params = sum(unit.param_full.untyped_storage().nbytes() for unit in units)
        return params + leases.leased_bytes + leases.kept_bytes

    def look(self) -> None:
        self.num_bytes = max(self.num_bytes, self._live() - self._home)


@contextmanager
def watched(engine: onefold.Engine) -> Iterator[Peak]:
    """Look after everything that may add live bytes: a lease, and the start of a gather."""
    peak = Peak(engine)
    leases = arena(engine)

    def looking(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            peak.look()
            return result

        return wrapped

    owners: list[tuple[Any, str]] = [(leases, "lease")]
    owners += [(unit, "start_unshard") for unit in engine._units]
    for owner, name in owners:
        setattr(owner, name, looking(getattr(owner, name)))
    try:
        yield peak
    finally:
        for owner, name in owners:
            delattr(owner, name)


def run(ctx: RankContext, engine: onefold.Engine, n: int, **arguments: Any) -> onefold.Engine:
    with engine.coalesce_grad_reduction(**arguments):
        for k in range(n):
            engine.backward(engine(x_of(ctx.rank, k)))
    return engine


def assert_gradients(ctx: RankContext, engine: onefold.Engine, n: int) -> None:
    """Every gradient is exactly the mean, before any optimizer."""
    engine.reduce_gradients()
    total = sum(x_of(rank, k) for rank in range(ctx.world_size) for k in range(n))
    for name, param in engine.module.named_parameters():
        found = engine.full_grad(param)
        wanted = torch.full(found.shape, total / ctx.world_size)  # type: ignore[union-attr]
        assert torch.equal(found, wanted), name  # type: ignore[arg-type]


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


# The ladder: exact, counted, and below its bytes at every rung.


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


# What the ladder is.


@distributed(world_size=2)
def test_parameters_come_before_gradients_and_the_root_first(ctx: RankContext) -> None:
    engine = terrace(ctx, 3)
    ladder = engine._transaction.budget.ladder()
    roots = {index for index, block in enumerate(engine.plan.blocks) if block.is_root}
    assert ladder[0].kept.blocks == roots
    for rung in ladder:
        assert keeps_blocks(engine, rung.kept) or rung.kept.units == ladder[0].kept.units
    sizes = [(len(rung.kept.blocks), len(rung.kept.units)) for rung in ladder]
    assert sizes == sorted(set(sizes))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1])
def test_where_gradients_are_partial_there_is_nothing_to_trade(
    ctx: RankContext, stage: int
) -> None:
    engine = terrace(ctx, stage)
    run(ctx, engine, 3, max_bytes=1)
    assert_gradients(ctx, engine, 3)
    assert engine.last_window is not None
    assert engine.last_window.kept == engine._transaction.budget.everything


@distributed(world_size=2)
@pytest.mark.parametrize("stage", SHARDED)
def test_the_least_is_said_before_any_collective(ctx: RankContext, stage: int) -> None:
    engine = terrace(ctx, stage)
    least = rungs_in_use(engine)[0].num_bytes
    exchanges = engine._world.control.count
    mark = engine.ledger.mark()
    with pytest.raises(ValueError, match=rf"at least {least} bytes.* got {least - 1}\."):
        engine.coalesce_grad_reduction(max_bytes=least - 1)
    with pytest.raises(ValueError, match=r"across='replicate'.*max_bytes"):
        engine.coalesce_grad_reduction(across="replicate", max_bytes=least)
    assert engine._world.control.count == exchanges
    assert counts(engine, mark) == {}


@distributed(world_size=2)
@pytest.mark.parametrize("stage", SHARDED)
def test_ranks_that_pass_different_budgets_learn_it_at_the_entry(
    ctx: RankContext, stage: int
) -> None:
    engine = terrace(ctx, stage)
    rungs = rungs_in_use(engine)
    mine = rungs[0 if ctx.rank else -1].num_bytes
    with pytest.raises(onefold.RankMismatchError, match=rf"max_bytes.*{rungs[0].num_bytes}"):
        run(ctx, engine, 1, max_bytes=mine)
    assert arena(engine).leased_bytes == 0
    run(ctx, engine, 1, max_bytes=rungs[0].num_bytes)
    assert_gradients(ctx, engine, 1)
    engine.step()


@distributed(world_size=2)
def test_a_budget_on_one_rank_only_does_not_hang(ctx: RankContext) -> None:
    engine = terrace(ctx, 2)
    arguments = {"max_bytes": between(engine)} if ctx.rank else {}
    with pytest.raises(onefold.RankMismatchError, match=r"different places.*entry of coalesce"):
        run(ctx, engine, 1, **arguments)
    engine.zero_grad()
    run(ctx, engine, 2)
    assert_gradients(ctx, engine, 2)
    engine.step()


# Beside the rest of the contract.


@distributed(world_size=2)
@pytest.mark.parametrize("stage", SHARDED)
def test_kept_units_have_no_hooks(ctx: RankContext, stage: int) -> None:
    engine = terrace(ctx, stage)
    budget, hooks = between(engine), engine._transaction._hooks
    with engine.coalesce_grad_reduction(max_bytes=budget) as window:
        assert 0 < len(window.kept.units) < len(engine._trainable)
        for unit in engine._trainable:
            is_kept = unit.index in window.kept.units
            assert (unit.index in hooks._watches) is not is_kept
            for param in unit.params:
                assert (param.grad is not None) is is_kept, "bound beforehand"
    assert set(hooks._watches) == {unit.index for unit in engine._trainable}


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("transport", ["direct", "native"])
@pytest.mark.parametrize("stage", SHARDED)
def test_ranks_may_use_different_kept_units(ctx: RankContext, stage: int, transport: str) -> None:
    engine = terrace(ctx, stage, config={"onefold": {"transport": transport}})
    budget = between(engine)
    sums = [0.0] * HOUSES
    with engine.coalesce_grad_reduction(max_bytes=budget, backwards=2) as window:
        params = list(engine.module.houses)  # type: ignore[arg-type]
        kept_params = {id(p) for i in window.kept.units for p in engine._units[i].params}
        kept = [i for i, house in enumerate(params) if id(house.w) in kept_params]
        assert 2 <= len(kept) < HOUSES
        for k in range(2):
            for rank in range(ctx.world_size):
                used = [i for i in range(HOUSES) if i not in kept or (i + rank + k) % 2]
                for i in used:
                    sums[i] += x_of(rank, k)
                if rank == ctx.rank:
                    engine.backward(engine(x_of(rank, k), used))
    engine.reduce_gradients()
    for house, total in zip(params, sums, strict=True):
        found = engine.full_grad(house.w)
        assert found is not None
        assert torch.equal(found, torch.full_like(found, total / ctx.world_size))
    engine.step()


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_it_is_armed_only_where_everything_on_the_wire_fits(ctx: RankContext, stage: int) -> None:
    engine = terrace(ctx, stage)
    rungs = rungs_in_use(engine)
    reducer = engine._transaction.reducer
    armed = engine._transaction.budget._armed_bytes()
    assert armed > rungs[-1].num_bytes
    for max_bytes, on_wire in ((armed, len(engine._trainable)), (rungs[-1].num_bytes, 0)):
        for marks in (True, False):
            with watched(engine) as peak:
                declared = None if marks else 2
                with engine.coalesce_grad_reduction(backwards=declared, max_bytes=max_bytes):
                    engine.backward(engine(x_of(ctx.rank, 0)))
                    if marks:
                        engine.set_gradient_accumulation_boundary(True)
                    engine.backward(engine(x_of(ctx.rank, 1)))
                    assert len(reducer._in_flight) == on_wire
            assert peak.num_bytes <= max_bytes
            assert_gradients(ctx, engine, 2)
            engine.step()


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_scopes_around_and_inside(ctx: RankContext, stage: int) -> None:
    """What any open scope keeps is kept; ranks run different backwards where everything is."""
    engine = terrace(ctx, stage)
    num_units = len(engine.plan.units)
    least = rungs_in_use(engine)[0]
    xs = [0.0]

    def backward(k: int) -> None:
        engine.backward(engine(x_of(ctx.rank, k)))
        xs[0] += x_of(ctx.rank, k)

    with engine.no_sync():
        mark = engine.ledger.mark()
        for _ in range(ctx.rank):
            with engine.coalesce_grad_reduction(max_bytes=least.num_bytes):
                backward(0)
        assert counts(engine, mark) == {}
    with engine.coalesce_grad_reduction(max_bytes=least.num_bytes) as window:
        backward(1)
        mark = engine.ledger.mark()
        with engine.no_sync():
            for k in range(1 + ctx.rank):
                backward(2 + k)
        with engine.coalesce_grad_reduction():
            backward(8)
        gathers = 2 * (num_units - len(least.kept.blocks)) if stage == 3 else 0
        assert counts(engine, mark).get("reduce_scatter", 0) == 0
        assert counts(engine, mark).get("all_gather", 0) == gathers
        backward(9)
    assert window.outcome == "flushed"
    backward(10)  # and outside
    engine.reduce_gradients()
    total = sum(gathered(xs[0]))
    for param in engine.module.parameters():
        found = engine.full_grad(param)
        assert found is not None
        assert torch.equal(found, torch.full_like(found, total / ctx.world_size))
    engine.step()


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_a_body_that_raises_on_one_rank_drops_everything_on_all(
    ctx: RankContext, stage: int
) -> None:
    engine = terrace(ctx, stage)

    def body(max_bytes: int) -> None:
        with engine.coalesce_grad_reduction(max_bytes=max_bytes):
            for k in range(2):
                engine.backward(engine(x_of(ctx.rank, k)))
            if ctx.rank == 1:
                raise Fault("on one rank")

    for rung in sample(rungs_in_use(engine))[::2]:
        with pytest.raises(Fault if ctx.rank == 1 else onefold.WindowAborted):
            body(rung.num_bytes)
        assert arena(engine).leased_bytes == 0
        run(ctx, engine, 2, max_bytes=rung.num_bytes)
        assert_gradients(ctx, engine, 2)
        engine.step()


def fail(_grad: Tensor) -> None:
    raise Fault("half-way")


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_a_rank_that_launched_less_follows(ctx: RankContext, stage: int) -> None:
    """Its backward raises before the last few units; the others launch them and wait."""
    engine = terrace(ctx, stage)
    budget = between(engine)
    launched: list[int] = []

    def body() -> None:
        with engine.coalesce_grad_reduction(max_bytes=budget) as window:
            launched.append(len(engine._trainable) - len(window.kept.units))
            x = x_of(ctx.rank, 0)
            total = engine(x, range(2)) * 1.0
            if ctx.rank == 1:
                total.register_hook(fail)
            for house in engine.module.houses[2:]:  # type: ignore[index]
                total = house(total, x)
            try:
                engine.backward(total)
            finally:
                launched.append(len(engine._transaction.reducer.log))

    with pytest.raises(Fault if ctx.rank == 1 else onefold.WindowAborted):
        body()
    dropped, seen = launched
    missed = 2 if stage == 3 else 3  # two houses, and the gate where it is not in a root block
    assert seen == (dropped - missed if ctx.rank == 1 else dropped)
    assert arena(engine).leased_bytes == 0
    run(ctx, engine, 1, max_bytes=budget)
    assert_gradients(ctx, engine, 1)
    engine.step()
