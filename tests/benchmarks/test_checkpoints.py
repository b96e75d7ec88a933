"""The benchmark of checkpoints: ways without DeepSpeed, the numbers, and the page's section."""

import inspect
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import onefold
from benchmarks import page
from benchmarks.checkpoints.__main__ import app
from benchmarks.checkpoints.cell import (
    CheckpointCell,
    CheckpointResult,
    CheckpointRun,
    Visit,
    Way,
    WayResult,
    merged,
)
from benchmarks.checkpoints.savers import OnefoldSaver
from benchmarks.checkpoints.schedule import check_space, stages
from benchmarks.checkpoints.table import SECTION, load_rows, save_rows, tables
from benchmarks.checkpoints.visit import visit
from benchmarks.results import Run
from tests.harness import RankContext, WorkerError, pool_for

WAYS = ["onefold@3", "onefold@1", "dcp@3", "dcp_unflushed@3", "dcp_async@3"]
if "async_save" in inspect.signature(onefold.Engine.save_checkpoint).parameters:
    WAYS += ["onefold_async@3", "onefold_async@1"]


def cell_of(*ways: str, rounds: int = 1) -> CheckpointCell:
    return CheckpointCell(workload="tiny", ways=ways, rounds=rounds)


def visit_on_rank(ctx: RankContext, way: str, folder: str, is_probe: bool) -> Visit:
    return visit(cell_of(way), way, folder, is_probe)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, way: str) -> None:
    ranks = pool_for(2).run(visit_on_rank, way=way, folder=str(tmp_path), is_probe=True)
    found = merged(ranks)
    assert 0 < found.pause_s <= found.on_disk_s
    assert found.load_s > 0
    assert found.state_bytes == pytest.approx(2 * 33_280 * 12, rel=0.01)
    assert found.state_bytes < found.file_bytes < 2 * found.state_bytes
    assert found.save_peak_bytes is not None
    assert found.load_peak_bytes is not None
    is_async = Way.parse(way).kind.is_async
    assert len(found.steps_before_s) == (3 if is_async else 0)


def load_nothing(ctx: RankContext, folder: str) -> None:
    """The control: a load that leaves everything as it is."""
    right = OnefoldSaver.load
    OnefoldSaver.load = lambda *_: None  # type: ignore[method-assign]
    try:
        visit(cell_of("onefold@3"), "onefold@3", folder, False)
    finally:
        OnefoldSaver.load = right  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_load_that_does_nothing_is_found(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="what was loaded is not what was saved"):
        pool_for(2).run(load_nothing, folder=str(tmp_path))


@pytest.mark.slow
def test_the_quick_form_runs(tmp_path: Path) -> None:
    options = ["--quick", "--rounds", "1", "--folder", str(tmp_path)]
    done = CliRunner().invoke(app, [*options, "--ways", "onefold@3,dcp@3,dcp_async@3"])
    assert done.exit_code == 0, done.output
    assert "DCP of FSDP2 async" in done.output
    assert list(tmp_path.iterdir()) == [], "checkpoints are deleted"


def test_a_way_that_fails_is_said() -> None:
    result = CheckpointResult(
        cell=cell_of("onefold@3", "deepspeed@3"),
        rounds=1,
        ways={
            "onefold@3": WayResult(visits=[visited()]),
            "deepspeed@3": WayResult(failure="rank 0: ModuleNotFoundError: deepspeed\nmore"),
        },
    )
    cut_short = result.model_copy(update={"cell": cell_of("onefold@3", rounds=5)})
    good, bad = save_rows(result)
    assert good[1] == "2.00 [2.00, 2.00]"
    assert bad[0] == "DeepSpeed, stage 3 FAILED: rank 0: ModuleNotFoundError: deepspeed"
    assert set(bad[1:]) == {"-", "not flushed"}
    assert result.rounds_text == "1 rounds"
    assert cut_short.rounds_text == "1 rounds of 5, for lack of time"


# -- numbers ------------------------------------------------------------------------------------


def visited(pause_s: float = 2.0, load_s: float = 1.0, state_bytes: int = 12) -> Visit:
    return Visit(
        pause_s=pause_s, on_disk_s=pause_s, load_s=load_s, file_bytes=13, state_bytes=state_bytes
    )


def test_what_training_lost_is_the_pause_and_the_slower_steps() -> None:
    found = visited().model_copy(
        update={"steps_before_s": [1.0, 1.0, 9.0], "steps_meanwhile_s": [1.5, 2.0]}
    )
    assert found.slowdown == 1.75
    assert found.lost_s == 2.0 + 0.5 + 1.0
    assert visited().slowdown is None
    assert visited().lost_s == 2.0


def test_the_slowest_rank_counts() -> None:
    ranks = [visited(1.0, 5.0), visited(2.0, 4.0)]
    ranks[0].steps_meanwhile_s, ranks[1].steps_meanwhile_s = [1.0, 4.0], [2.0, 3.0]
    found = merged(ranks)
    assert (found.pause_s, found.load_s, found.steps_meanwhile_s) == (2.0, 5.0, [2.0, 4.0])
    assert (found.file_bytes, found.state_bytes) == (13, 24), "files are counted over all ranks"
    assert found.save_peak_bytes is None


def test_ratios_are_within_rounds_and_to_the_like() -> None:
    ways = {
        "onefold@3": [visited(1.0, 1.0), visited(2.0, 2.0)],
        "onefold_async@3": [visited(0.5, 1.0), visited(1.0, 2.0)],
        "dcp@3": [visited(3.0, 1.0), visited(6.0, 2.0)],
        "dcp_async@3": [visited(1.0, 2.0), visited(2.0, 4.0)],
    }
    result = CheckpointResult(
        cell=cell_of(*ways, rounds=2),
        ways={name: WayResult(visits=visits) for name, visits in ways.items()},
    )
    saving = [row[2] for row in save_rows(result)]
    assert saving == ["-", "-", "3.00 [3.00, 3.00]", "2.00 [2.00, 2.00]"]
    loading = [row[2] for row in load_rows(result)]
    assert loading == ["-", "1.00 [1.00, 1.00]", "1.00 [1.00, 1.00]", "2.00 [2.00, 2.00]"]
    assert [table.row_count for table in tables(result)] == [4, 4]


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = stages("77m", 1)
    free = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(OSError, match=r"1.0 GB are free, and 2.7 GB are needed"):
        check_space(cells, tmp_path)


@pytest.mark.parametrize("text", ["onefold", "onefold@4", "dcp@1", "deepspeed@0", "zero@3"])
def test_wrong_ways_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="way"):
        Way.parse(text)


# -- the page -----------------------------------------------------------------------------------


def a_run(pause_s: float) -> CheckpointRun:
    cell = CheckpointResult(
        cell=cell_of("onefold@3"), ways={"onefold@3": WayResult(visits=[visited(pause_s)])}
    )
    return CheckpointRun(started="today", file_system="ext4", cells=[cell])


def test_only_the_section_changes() -> None:
    method = page._METHOD.read_text(encoding="utf-8")
    above, below = "# Performance\n\nText.\n\n", "## Every cell\n\nRows.\n\n## Failed\n\nNothing.\n"
    stale = f"{above}## How it is measured\n\n- Otherwise.\n\n{below}"
    once = page.with_checkpoints(stale, a_run(2.0))
    assert once.startswith(f"{above}{method}\n{SECTION}\n")
    assert once.endswith(f"\n\n{below}")
    assert "file system ext4" in once
    twice = page.with_checkpoints(once, a_run(3.0))
    assert "3.00 [3.00, 3.00]" in twice
    assert "2.00 [2.00, 2.00]" not in twice
    assert page.with_checkpoints(twice, a_run(2.0)) == once
    with pytest.raises(ValueError, match="write all of it"):
        page.with_checkpoints("# Performance\n", a_run(2.0))


def test_both_ways_of_writing_the_page_agree() -> None:
    full = Run(kind="full", started="today")
    whole = page.write(full, [], a_run(2.0))
    assert SECTION in whole
    assert page.with_checkpoints(page.write(full, []), a_run(2.0)) == whole


def test_results_survive_the_file(tmp_path: Path) -> None:
    run = a_run(1.23456789)
    run.save(tmp_path / "checkpoints.json")
    loaded = CheckpointRun.load(tmp_path / "checkpoints.json")
    assert loaded.cells[0].ways["onefold@3"].visits[0].pause_s == 1.2346
    assert loaded.cells[0].cell == run.cells[0].cell
