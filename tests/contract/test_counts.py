"""Traffic by formula: how many collectives and how many bytes, for every way to run a step."""

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import onefold
from tests.contract.helpers import STAGES, WORLDS, Program, Tower, run_program, start, trainable
from tests.harness import CommLog, RankContext, distributed

MODES: dict[str, Program] = {
    "bare": ["n"],
    "window": [("window", ["n"])],
    "armed": [("armed", ["n"])],
    "no_sync": [("no_sync", ["n"])],
    "two windows": [("window", ["n"]), ("armed", ["n"])],
    "no_sync, window": [("no_sync", ["n"]), ("window", ["n"])],
}


class Sent(NamedTuple):
    calls: int
    num_bytes: int


def tower(ctx: RankContext, stage: int, **arguments: Any) -> onefold.Engine:
    """A tower with a frozen embedding: a unit that is gathered and never reduced."""
    torch.manual_seed(0)
    model = Tower(dtype=torch.float32)
    model.embed.requires_grad_(False)
    arguments.setdefault("zero", {"reduce_bucket_size": 30})
    arguments.setdefault("optimizer", lambda params: torch.optim.SGD(params, lr=1e-3))
    engine = start(ctx, model, stage, model_parameters=filter_(model), **arguments)
    assert len(engine._units) > len(trainable(engine)) >= 3
    return engine


def filter_(model: Tower) -> list[torch.nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def filled(program: Program, n: int) -> Program:
    return [n if item == "n" else (item[0], filled(item[1], n)) for item in program]


def backward(ctx: RankContext, engine: onefold.Engine, k: int) -> None:
    tokens = (torch.arange(8).reshape(2, 4) + k + ctx.rank) % 11
    engine.backward(engine(tokens).square().mean())


def formula(engine: onefold.Engine, stage: int, ranks: int, mode: str, n: int) -> dict[str, Sent]:
    """Reductions are of the trainable units, gathers of all, publishing of the trainable."""
    if ranks == 1:
        return {}
    reduced = [unit.layout.numel * unit.dtype.itemsize for unit in trainable(engine)]
    gathered = [unit.spec.layout.numel * unit.spec.dtype.itemsize for unit in engine._units]
    part = (ranks - 1) / ranks
    # A replica's all-reduce cuts each buffer; whole bytes, so rounded down one by one.
    all_reduced = sum(2 * (ranks - 1) * num_bytes // ranks for num_bytes in reduced)
    windows = sum(1 for item in MODES[mode] if item != "n" and item[0] != "no_sync")
    scopes = sum(1 for item in MODES[mode] if item != "n")
    flushes = 1 if stage < 2 else n if mode == "bare" else max(1, windows)
    if mode == "no_sync, window":
        flushes = 1
    gathers = 0 if stage < 3 else scopes or 2 * n
    sent: dict[str, Sent] = {}
    if stage == 0:
        sent["all_reduce"] = Sent(len(reduced), all_reduced)
    else:
        sent["reduce_scatter"] = Sent(flushes * len(reduced), round(flushes * part * sum(reduced)))
    if stage in (1, 2):
        sent["all_gather"] = Sent(len(reduced), round(part * sum(reduced)))
    if stage == 3:
        sent["all_gather"] = Sent(gathers * len(gathered), round(gathers * part * sum(gathered)))
    return sent


def found(engine: onefold.Engine, mark: Any) -> dict[str, Sent]:
    changes = engine.ledger.since(mark)
    assert all(total.bytes_out == total.bytes_in for total in changes.values())
    return {kind: Sent(total.count, total.bytes_out) for kind, total in changes.items()}


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_sends_what_the_formula_says(ctx: RankContext, stage: int) -> None:
    engine = tower(ctx, stage)
    for mode, program in MODES.items():
        for n in (1, 4):
            mark = engine.ledger.mark()
            run_program(engine, filled(program, n), lambda k: backward(ctx, engine, k))
            engine.step()
            wanted = formula(engine, stage, ctx.world_size, mode, n)
            assert found(engine, mark) == wanted, (mode, n)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_the_window_reports_what_it_sent(ctx: RankContext, stage: int) -> None:
    engine = tower(ctx, stage)
    for n in (1, 4):
        mark = engine.ledger.mark()
        with engine.coalesce_grad_reduction() as window:
            for k in range(n):
                backward(ctx, engine, k)
        sent = found(engine, mark)
        assert engine.last_window is window
        assert window.backwards == n
        assert window.collectives == {kind: total.calls for kind, total in sent.items()}
        assert window.bytes_sent == sum(total.num_bytes for total in sent.values())
        assert window.outcome == ("kept" if stage < 2 else "flushed")
        assert len(str(window).splitlines()) == 1
        bare = formula(engine, stage, ctx.world_size, "bare", n)
        published = stage in (1, 2)
        wanted = {kind: s for kind, s in bare.items() if not (published and kind == "all_gather")}
        assert window.bytes_sent_per_backward == sum(total.num_bytes for total in wanted.values())
        engine.step()


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_volume_is_independent_of_n_and_at_the_floor(ctx: RankContext, stage: int) -> None:
    """Two volumes V = model bytes x (W-1)/W, whatever n (all units are trainable here)."""
    torch.manual_seed(0)
    engine = start(ctx, Tower(dtype=torch.float32), stage)
    for n in (1, 7):
        mark = engine.ledger.mark()
        run_program(engine, [("armed", [n])], lambda k: backward(ctx, engine, k))
        engine.step()
        size = sum(unit.layout.numel * 4 for unit in trainable(engine))
        volume = size * (ctx.world_size - 1) / ctx.world_size
        sent = sum(s.num_bytes for s in found(engine, mark).values())
        # An all-reduce is not cut at whole elements, so a byte may be lost for each.
        assert 2 * volume - len(trainable(engine)) < sent <= 2 * volume


# A second witness: torch's own.

OPS = {
    "allreduce_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "_allgather_base_": "all_gather",
}
LINE = 64
"""Every unit's buffer is whole 64-byte lines, and the exchanges of this model are not."""


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_torch_s_own_witness_sees_the_same(ctx: RankContext, stage: int) -> None:
    torch.manual_seed(0)
    engine = start(
        ctx,
        Tower(width=48, dtype=torch.float32),
        stage,
        zero={"reduce_bucket_size": 2000},
        config={"onefold": {"transport": "native"}},
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    )
    for mode, program in MODES.items():
        mark = engine.ledger.mark()
        with CommLog() as log:
            run_program(engine, filled(program, 2), lambda k: backward(ctx, engine, k))
            engine.step()
        seen: dict[str, Sent] = {}
        for record in log.records:
            if record.op in OPS and record.largest_bytes % LINE == 0:
                count, num_bytes = seen.get(OPS[record.op], (0, 0))
                times = 2 if record.op == "allreduce_" else 1
                moved = times * record.largest_bytes * (ctx.world_size - 1) // ctx.world_size
                seen[OPS[record.op]] = Sent(count + 1, num_bytes + moved)
        assert seen == found(engine, mark), mode
        assert seen == formula(engine, stage, ctx.world_size, mode, 2), mode


@distributed(world_size=[2])
@pytest.mark.parametrize("stage", STAGES)
def test_comm_debug_mode_counts_the_same(ctx: RankContext, stage: int) -> None:
    """It sees the plan's collectives, and not the exchanges, which go from rank to rank."""
    engine = tower(ctx, stage, config={"onefold": {"transport": "native"}})
    # The witness puts torch's own backward hooks on every module, and they say so.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    mark = engine.ledger.mark()
    with CommDebugMode() as witness:
        run_program(engine, [("armed", [1])], lambda k: backward(ctx, engine, k))
        engine.step()
    mine = sum(sent.calls for sent in found(engine, mark).values())
    assert witness.get_total_counts() == mine > 0


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_alone_gathers_every_unit_once(ctx: RankContext, grad: bool) -> None:
    """Stage 3; also once the order of use is known and units are gathered ahead."""
    engine = tower(ctx, 3)
    for k in range(3):
        mark = engine.ledger.mark()
        with torch.set_grad_enabled(grad):
            engine((torch.arange(8).reshape(2, 4) + k) % 11)
        wanted = sum(unit.full_bytes for unit in engine._units)
        part = (ctx.world_size - 1) / ctx.world_size
        assert found(engine, mark) == {"all_gather": Sent(len(engine._units), round(wanted * part))}
