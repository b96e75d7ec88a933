"""What the benchmarks compute without ranks: the cover, the statistics, the verdicts, the page."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import charts, page, suite
from benchmarks.cell import Cell, EngineName, HostCell
from benchmarks.cover import cover, pairs_of
from benchmarks.results import CellResult, EngineResult, HostResult, Probe, Run
from benchmarks.schedule import deviation
from benchmarks.stats import median_of, paired
from benchmarks.table import cell_table, rows_of
from benchmarks.targets import judge, memory_ratio

# -- the cover ----------------------------------------------------------------------------------


def all_pairs(factors: dict[str, Any], is_valid: Any) -> set[Any]:
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return set().union(*(pairs_of(row) for row in rows if is_valid(row)))


def test_a_cover_has_every_pair_that_can_be_had_and_few_rows() -> None:
    factors = {"a": range(4), "b": range(4), "c": range(4), "d": range(2)}

    def is_valid(row: dict[str, Any]) -> bool:
        return not (row["a"] == 0 and row["b"] == 0)

    rows = cover(factors, is_valid=is_valid)
    assert all(map(is_valid, rows))
    assert set().union(*map(pairs_of, rows)) == all_pairs(factors, is_valid)
    assert len(rows) <= 24, "of 120"


def test_a_cover_leaves_out_what_is_covered() -> None:
    factors = {"a": (0, 1), "b": (0, 1)}
    first = {"a": 0, "b": 0}
    rows = cover(factors, covered=pairs_of(first))
    assert first not in rows
    assert len(rows) == 3


def test_a_cover_prefers_cheap_rows() -> None:
    factors = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    rows = cover(factors, cost=lambda row: 100.0 if sum(row.values()) == 3 else 1.0)
    assert {"a": 1, "b": 1, "c": 1} not in rows


def test_the_suite_covers_the_grid() -> None:
    met = set()
    for cell in suite.full():
        if isinstance(cell, Cell) and cell.rounds and cell.dtype == "float32":
            for name in cell.names:
                met |= pairs_of(suite._row(cell, name))
    for workload, n in product(suite.WORKLOADS, suite.NUM_BACKWARDS):
        if (workload, n) != ("minilm", 1):
            assert frozenset({("workload", workload), ("num_backwards", n)}) in met
    for stage, world_size in product(range(4), suite.WORLD_SIZES):
        assert frozenset({("stage", stage), ("world_size", world_size)}) in met
    for engine, workload in product(("bare", "window", "deepspeed", "fsdp2"), suite.WORKLOADS):
        assert frozenset({("engine", engine), ("workload", workload)}) in met


def test_the_suites_fit_their_time() -> None:
    assert sum(map(suite.estimate_s, suite.quick())) < suite.QUICK_S
    assert sum(map(suite.estimate_s, suite.full())) < suite.FULL_S


# -- statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "low", "high"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (8, 0, 7), (9, 1, 7), (15, 3, 11)]
)
def test_the_interval_is_of_order_statistics(count: int, low: int, high: int) -> None:
    """The ranks are those of the published tables for 95%."""
    values = list(range(count))
    random.Random(0).shuffle(values)
    found = median_of([float(value) for value in values])
    assert (found.low, found.high) == (low, high)
    assert (found.confidence >= 0.95) is (count >= 6)


def test_ratios_are_taken_within_rounds() -> None:
    """A drift of the whole machine cancels; medians of the columns would not see that."""
    drift = [1.0, 2.0, 4.0]
    found = paired([1.1 * each for each in drift], drift)
    assert found is not None
    assert found.low == pytest.approx(found.high) == pytest.approx(1.1)
    assert paired([], drift) is None


def test_deviation_is_a_part_of_the_progress() -> None:
    assert deviation([2.0, 1.5], [2.0, 1.5]) == 0
    assert deviation([2.0, 2.0], [2.0, 1.5]) == 1, "an engine that does not train"


# -- names --------------------------------------------------------------------------------------


def test_engine_names() -> None:
    assert EngineName.parse("window", 3) == EngineName("window", 3)
    assert EngineName.parse("window@2", 3) == EngineName("window", 2)
    assert EngineName.parse("floor", 3) == EngineName("floor", None)
    assert str(EngineName.parse("fsdp2@2")) == "fsdp2@2"


@pytest.mark.parametrize(
    "text", ["windows", "window", "window@4", "window@x", "floor@3", "fsdp2@1"]
)
def test_wrong_engine_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="engine"):
        EngineName.parse(text)


# -- verdicts and the page ----------------------------------------------------------------------


def probe(**changes: Any) -> Probe:
    values: dict[str, Any] = {
        "losses": [2.0, 1.0],
        "sent_bytes": 100,
        "expected_bytes": 100,
        "loopback_bytes": 101,
        "collectives": {"reduce_scatter": 8},
        "held_bytes": 1_000_000,
        "peak_bytes": 3_000_000,
        "table_bytes": 2_900_000,
    }
    return Probe(**(values | changes))


def made(**engines: float) -> CellResult:
    """A cell of 25m with 8 backwards; each engine takes so many seconds in each of 15 rounds."""
    names = [name.replace("_at_", "@") for name in engines]
    results = {
        name: EngineResult(seconds=[value] * 15, deviation=0.0, probe=probe())
        for name, value in zip(names, engines.values(), strict=True)
    }
    return CellResult(cell=Cell(workload="25m", engines=tuple(names), rounds=15), engines=results)


def verdicts(run: Run) -> dict[str, str]:
    return {line.what: line.verdict for line in judge(run)}


def a_run(*cells: CellResult) -> Run:
    return Run(kind="full", started="today", cells=list(cells), machine={"cores": "2"})


def test_targets_are_judged_by_the_median_ratio() -> None:
    cell = made(floor=1.0, window_at_3=1.07, window_at_2=1.09)
    found = verdicts(a_run(cell))
    assert found["25m, n = 8, onefold window, stage 3 / compute floor"] == "reached"
    assert found["25m, n = 8, onefold window, stage 2 / compute floor"] == "missed"
    assert found["25m, n = 8, onefold window, stage 1 / compute floor"] == "not measured"
    assert found["25m, n = 8, onefold window, stage 3 / DDP no_sync"] == "not measured"


def test_the_faster_fsdp2_counts() -> None:
    cell = made(window_at_3=1.0, fsdp2_deferred_at_2=1.8, fsdp2_deferred_at_3=2.5)
    name = "FSDP2 deferred, the faster kind / 25m, n = 8, onefold window, stage 3"
    assert verdicts(a_run(cell))[name] == "missed"


def test_a_byte_too_many_is_a_miss() -> None:
    cell = made(window_at_3=1.0)
    assert verdicts(a_run(cell))["Bytes sent are the formula's"] == "reached"
    cell.engines["window@3"].probe = probe(sent_bytes=101)
    assert verdicts(a_run(cell))["Bytes sent are the formula's"] == "missed"


def test_collectives_that_grow_with_n_are_a_miss() -> None:
    cells = [made(window_at_3=1.0), made(window_at_3=1.0)]
    cells[1].cell = cells[1].cell.model_copy(update={"num_backwards": 4})
    name = "Collectives of a window do not depend on n"
    assert verdicts(a_run(*cells))[name] == "reached"
    cells[1].engines["window@3"].probe = probe(collectives={"reduce_scatter": 4})
    assert verdicts(a_run(*cells))[name] == "missed"
    assert verdicts(a_run(cells[0]))[name] == "not measured", "one n says nothing"


def test_an_engine_that_does_not_train_is_a_miss() -> None:
    cell = made(window_at_3=1.0)
    name = "Every engine trains"
    assert verdicts(a_run(cell))[name] == "reached"
    cell.engines["window@3"].deviation = 1.0
    assert verdicts(a_run(cell))[name] == "missed"


def test_the_floor_s_activations_are_part_of_the_allowance() -> None:
    cell = made(floor=1.0, window_at_3=1.0)
    cell.engines["floor"].probe = probe(table_bytes=2_000_000)
    cell.engines["window@3"].probe = probe(peak_bytes=3_900_000)
    assert memory_ratio(cell, "window@3") == pytest.approx(1.0)


def test_the_page_says_what_failed_and_what_was_left_out() -> None:
    cell = made(floor=1.0, window_at_3=1.0)
    cell.engines["deepspeed@3"] = EngineResult(failure="rank 1: RuntimeError: no such thing\nmore")
    run = a_run(cell)
    run.left_out = ["77m, W = 4, n = 16"]
    text = page.write(run, [])
    assert "deepspeed@3: rank 1: RuntimeError: no such thing\n" in text
    assert "77m, W = 4, n = 16" in text
    assert "| onefold window, stage 3 | 1,000 [1,000, 1,000] | 0% | 1.000 [1.000, 1.000] |" in text
    assert all(len(row) == len(rows_of(cell)[0]) for row in rows_of(cell))
    assert cell_table(cell).row_count == 3


def test_results_survive_the_file(tmp_path: Path) -> None:
    run = a_run(made(floor=1.23456789, window_at_3=1.0))
    run.host = [HostResult(cell=HostCell(workload="800"), plain_ms=[0.123456], window_ms=[0.2])]
    nothing = dict.fromkeys(("sent_bytes", "expected_bytes", "loopback_bytes", "table_bytes"))
    run.cells[0].engines["floor"].probe = probe(**nothing)
    run.save(tmp_path / "full.json")
    loaded = Run.load(tmp_path / "full.json")
    assert loaded.cells[0].engines["floor"].seconds[0] == 1.2346
    assert loaded.cells[0].cell == run.cells[0].cell
    assert judge(loaded) == judge(run)


def test_charts_are_drawn_from_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [made(floor=1.0, window_at_3=1.0), made(floor=0.5, window_at_3=0.6)]
    cells[1].cell = cells[1].cell.model_copy(update={"num_backwards": 4})
    assert charts.draw(a_run(*cells), tmp_path) == [charts.TIME, charts.MEMORY]
    transfer = {"lane": "gradients", "unit": "root", "started_s": 0.1, "finished_s": 0.2}
    record = {
        "is_bare": False,
        "seconds": 1.0,
        "backwards": 8,
        "collectives": {"gradients": 1, "parameters": 0},
        "bytes_sent": {"gradients": 100, "parameters": 0},
        "transfers": [transfer],
    }
    cell = made(window_at_3=1.0, bare_at_3=1.0)
    for own in cell.engines.values():
        own.probe = probe(record=record)
    assert charts.draw(a_run(cell), tmp_path / "new") == [charts.MEMORY, charts.TIMELINE]
    assert charts.draw(a_run(), tmp_path) == []
