"""Contract 7, memory is what the page says: live bytes at each station, against its arithmetic."""

import gc
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.grad.reduce import MAX_IN_FLIGHT
from onefold.unit import Unit
from tests.contract.helpers import (
    STAGES,
    WORLDS,
    Fault,
    House,
    Program,
    Tower,
    arena,
    run_program,
    see_arrivals,
    start,
)
from tests.harness import RankContext, distributed

N_BACKWARDS = [2, 16]


def tower(ctx: RankContext, stage: int, *, layers: int = 4) -> onefold.Engine:
    torch.manual_seed(0)
    model = Tower(width=16, layers=layers, dtype=torch.float32)
    optimizer = lambda params: torch.optim.SGD(params, lr=0.01)  # noqa: E731
    return start(ctx, model, stage, optimizer=optimizer, zero={"reduce_bucket_size": 256})


def backward(ctx: RankContext, engine: onefold.Engine, k: int) -> None:
    tokens = (torch.arange(8).reshape(2, 4) + k + ctx.rank) % 11
    engine.backward(engine(tokens).square().mean())


def full_bytes(units: list[Unit]) -> int:
    """N elements of the accumulation dtype for each unit."""
    return sum(unit.layout.numel * 4 for unit in units)


def shard_bytes(units: list[Unit]) -> int:
    """S elements of it."""
    return sum(unit.layout.shard_numel * 4 for unit in units)


def resident_bytes(engine: onefold.Engine) -> int:
    """Live storage of every unit's full parameters."""
    return sum(unit.param_full.untyped_storage().nbytes() for unit in engine._units)


def in_flight_bytes(units: list[Unit], ranks: int, at_once: int) -> int:
    """The most that ``at_once`` reductions lease beside ``grad_full``: S, and (W-1) S received."""
    sizes = sorted((unit.layout.shard_numel * 4 for unit in units), reverse=True)
    return ranks * sum(sizes[:at_once])


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("scope", ["window", "armed", "no_sync"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_scope_holds_full_gradients_and_parameters(
    ctx: RankContext, stage: int, scope: str
) -> None:
    """At every station, however many backwards there are."""
    engine = tower(ctx, stage)
    units, leases = engine._trainable, arena(engine)
    assert leases.leased_bytes == 0
    home = resident_bytes(engine)
    assert home == (0 if stage == 3 else full_bytes(units))
    for n in N_BACKWARDS:

        def body(k: int, n: int = n) -> None:
            backward(ctx, engine, k)
            assert resident_bytes(engine) == full_bytes(units)
            if scope != "armed" or k < n - 1:
                assert leases.leased_bytes == full_bytes(units), f"backward {k} of {n}"

        leases.peak_bytes = 0
        run_program(engine, [(scope, [n])], body)
        flushed = scope != "no_sync" and stage >= 2
        if scope != "armed" or flushed:
            wanted = shard_bytes(units) if flushed else full_bytes(units)
            assert leases.leased_bytes == wanted
        assert resident_bytes(engine) == home, "parameters went home"
        engine.step()
        assert leases.leased_bytes == 0, "the step has consumed them"
        assert not leases._kept, "between steps the arena holds nothing"
        # Every unit's grad_full; an armed backward may have all of them on the wire at once.
        at_once = len(units) if scope == "armed" else MAX_IN_FLIGHT + 1
        bound = full_bytes(units) + shard_bytes(units)
        bound += in_flight_bytes(units, ctx.world_size, at_once)
        assert full_bytes(units) <= leases.peak_bytes <= bound


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_the_peak_does_not_depend_on_n(ctx: RankContext, stage: int) -> None:
    engine = tower(ctx, stage)
    peaks = []
    for n in N_BACKWARDS:
        arena(engine).peak_bytes = 0
        run_program(engine, [("window", [n])], lambda k: backward(ctx, engine, k))
        engine.step()
        peaks.append(arena(engine).peak_bytes)
    assert peaks[0] == peaks[1]


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_outside_a_window_gradients_are_freed_as_they_go(ctx: RankContext, stage: int) -> None:
    """The shards stay, and at most a few units are full or on their way."""
    engine = tower(ctx, stage, layers=12)
    units, leases = engine._trainable, arena(engine)
    for n in (1, 4):
        leases.peak_bytes = 0
        for k in range(n):
            backward(ctx, engine, k)
            assert sum(unit.gradients.grad_full is not None for unit in units) == 0
            assert len(engine._transaction.reducer._in_flight) <= MAX_IN_FLIGHT
        # The arena keeps what came back, by size, for the next unit of that size.
        bound = shard_bytes(units)
        for numel, count in Counter(unit.layout.numel for unit in units).items():
            # Being filled, or on the wire; the last ones of a backward meet the next one's first.
            bound += min(count + 1, MAX_IN_FLIGHT + 2) * 4 * numel
            bound += min(count, MAX_IN_FLIGHT + 1) * 4 * numel  # sums and what is received
        assert leases.peak_bytes <= bound
        engine.step()
        assert leases.leased_bytes == 0


class Row(nn.Module):
    """Houses of 24 different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.houses = nn.ModuleList(House(1024 + 64 * i) for i in range(24))

    def forward(self, x: float) -> Tensor:
        return torch.stack([house(x) for house in self.houses]).sum()


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_units_of_different_sizes_are_freed_as_they_go_too(ctx: RankContext, stage: int) -> None:
    """What came back and fits nobody else must not add up to the full gradients."""
    engine = start(ctx, Row(), stage, zero={"reduce_bucket_size": 1})
    units, leases = engine._trainable, arena(engine)
    engine.backward(engine(1.0))
    largest = max(unit.layout.numel * 4 for unit in units)
    # On the wire, and one being filled; for each the unit itself, its sum and what is received.
    bound = shard_bytes(units) + (MAX_IN_FLIGHT + 2) * 2 * largest
    assert leases.peak_bytes <= bound, f"full gradients are {full_bytes(units)} bytes"
    engine.step()  # so that no rank takes its groups away while another still sends


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("arrives", [True, False], ids=["arrives", "never seen to"])
def test_an_armed_backward_frees_what_has_arrived(
    ctx: RankContext, stage: int, arrives: bool
) -> None:
    """Of a reduction that has arrived its sum is held, and its full gradients are not.

    Here each has arrived before the next one leaves, or is never seen to (the control).
    """
    settings = {"onefold": {"transport": "cross-memory"}}  # no receive buffers
    engine = start(ctx, Row(), stage, zero={"reduce_bucket_size": 1}, config=settings)
    units, leases = engine._trainable, arena(engine)
    see_arrivals(ctx, arrives=arrives)
    for step in range(2):
        with engine.coalesce_grad_reduction(backwards=2):
            engine.backward(engine(1.0 + ctx.rank))
            leases.peak_bytes = 0
            engine.backward(engine(3.0 + step))
            on_the_wire = full_bytes(units[-1:] if arrives else units)
            assert leases.leased_bytes == on_the_wire + shard_bytes(units)
            sums = shard_bytes(units[:1] if arrives else units)
            assert leases.peak_bytes == full_bytes(units) + sums
        engine.reduce_gradients()
        for unit in units:
            found = engine.full_grad(unit.params[0])
            assert found is not None
            assert torch.equal(found, torch.full_like(found, 4.5 + step))
        engine.step()
        assert leases.leased_bytes == 0


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_are_flat_over_steps(ctx: RankContext, stage: int) -> None:
    """Leases, parameters, and Python's own tensors, over 30 steps of every kind."""
    engine = tower(ctx, stage, layers=2)
    programs: list[Program] = [[("window", [2])], [1], [("no_sync", [1]), 1], [("armed", [2])]]
    seen: list[tuple[int, int, int]] = []
    for step in range(30):
        arena(engine).peak_bytes = 0
        program = programs[0] if step < 2 or step > 27 else programs[step % 4]
        run_program(engine, program, lambda k: backward(ctx, engine, k))
        engine.step()
        if step in (1, 29):
            gc.collect()
            tensors = sum(isinstance(found, Tensor) for found in gc.get_objects())
            seen.append((arena(engine).peak_bytes, resident_bytes(engine), tensors))
        assert arena(engine).leased_bytes == 0
    (peak, resident, tensors), last = seen
    assert (peak, resident) == last[:2]
    # Autograd's own thread may drop a few of the last step's late; one kept a step would be 28.
    assert abs(tensors - last[2]) < 10


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_an_aborted_window_gives_everything_back(ctx: RankContext, stage: int) -> None:
    engine = tower(ctx, stage)
    home = resident_bytes(engine)

    def body(k: int) -> None:
        backward(ctx, engine, k)
        if k == 1:
            raise Fault("on every rank")

    for kind in ("window", "armed"):
        with pytest.raises(Fault):
            run_program(engine, [1, (kind, [2])], lambda k: body(k - 1))
        assert arena(engine).leased_bytes == 0
        assert resident_bytes(engine) == home


# Stage 3: between uses a rank holds 1/W.


@distributed(world_size=WORLDS)
def test_between_uses_a_rank_holds_its_share_of_the_parameters(ctx: RankContext) -> None:
    engine = tower(ctx, 3)
    for k in range(3):
        for unit in engine._units:
            assert unit.param_full.untyped_storage().nbytes() == 0
            assert unit.param_shard.untyped_storage().nbytes() == unit.layout.shard_numel * 4
            assert unit.layout.shard_numel * ctx.world_size == unit.layout.numel
            for param in unit.params:
                assert param.untyped_storage().nbytes() == 4, "one NaN"
                assert bool(param.isnan().all())
        backward(ctx, engine, k)
        engine.step()


@distributed(world_size=[1, 2, 3])
def test_forward_and_backward_gather_at_most_one_block_ahead(ctx: RankContext) -> None:
    """The root block, the block in use and the next one; from the second pass on, when it knows."""
    engine = tower(ctx, 3, layers=6)
    blocks: dict[str, list[Unit]] = {}
    for unit in engine._units:
        blocks.setdefault(unit.name, []).append(unit)
    assert len(blocks) == 7
    live: list[set[str]] = []

    def look(*_: object) -> None:
        live.append(
            {
                name
                for name, units in blocks.items()
                if units[0].param_full.untyped_storage().nbytes()
            }
        )

    def look_in_backward(_module: object, _args: object, output: Tensor) -> None:
        output.register_hook(look)

    handles = []
    for layer in engine.module.layers:  # type: ignore[union-attr]
        handles.append(layer.register_forward_pre_hook(look))  # after the engine's own
        handles.append(layer.register_forward_hook(look_in_backward))
    for k in range(3):
        live.clear()
        backward(ctx, engine, k)
        assert len(live) == 12
        assert all(len(names - {"root"}) <= 2 for names in live), live
        if k:
            ahead = [len(names - {"root"}) == 2 for names in live]
            assert sum(ahead) == 10, "the next block is on its way while this one computes"
        look()
        assert live[-1] == set()
        engine.step()
    for handle in handles:
        handle.remove()
