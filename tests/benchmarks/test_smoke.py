"""Every own engine and torch's, once, on a small workload; and what a failure looks like."""

import pytest

from benchmarks.cell import Cell, HostCell
from benchmarks.pool import JobFailed, Pool
from benchmarks.rank import probe, reference, time_host, time_steps
from benchmarks.results import Probe
from benchmarks.schedule import deviation
from tests.harness import RankContext, distributed

OWN = [f"{mode}@{stage}" for mode in ("bare", "window", "armed") for stage in range(4)]


def cell_of(engine: str, **changes: object) -> Cell:
    return Cell.model_validate(
        {"workload": "tiny", "num_backwards": 3, "engines": (engine,), "rounds": 1} | changes
    )


@distributed(world_size=2)
@pytest.mark.parametrize("engine", OWN)
def test_own_engines_train_and_send_what_the_formula_says(ctx: RankContext, engine: str) -> None:
    cell = cell_of(engine)
    found: Probe = probe(cell, engine)
    assert deviation(found.losses, reference("tiny", 2, 3)) < 1e-3
    assert found.sent_bytes == found.expected_bytes
    assert sum(found.collectives.values()) > 0


@distributed(world_size=2)
@pytest.mark.parametrize("engine", ["ddp", "ddp_no_sync"])
def test_peers_train(ctx: RankContext, engine: str) -> None:
    found = probe(cell_of(engine), engine)
    assert deviation(found.losses, reference("tiny", 2, 3)) < 1e-3
    assert sum(found.collectives.values()) > 0


@distributed(world_size=2)
@pytest.mark.parametrize("engine", ["floor", "wire_floor", "window@3"])
def test_steps_are_timed(ctx: RankContext, engine: str) -> None:
    timing = time_steps(cell_of(engine, steps=3), engine)
    assert len(timing.seconds) == 1
    assert timing.seconds[0] > 0
    assert (timing.exposed_s is None) is (engine == "floor")


@distributed(world_size=2)
def test_the_floor_sends_nothing(ctx: RankContext) -> None:
    assert probe(cell_of("floor"), "floor").collectives == {}


@distributed(world_size=2)
def test_host_time_is_paired(ctx: RankContext) -> None:
    result = time_host(HostCell(workload="tiny", pairs=3))
    assert len(result.plain_ms) == len(result.window_ms) == 3


@pytest.mark.slow
def test_a_failure_says_why_and_the_pool_starts_again() -> None:
    with Pool(1) as pool:
        with pytest.raises(JobFailed, match="KeyError: 'nothing'"):
            pool.run(
                "probe", cell_of("floor", workload="nothing", world_size=1), "floor", timeout_s=60
            )
        with pytest.raises(JobFailed, match="timed out"):
            pool.run("probe", cell_of("floor", world_size=1), "floor", timeout_s=0.01)
