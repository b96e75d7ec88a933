"""Asynchronous saves: on disk is what was there at the call, whatever training does then."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

import onefold
from onefold.cli import app
from onefold.errors import CheckpointError
from onefold.state.files import write_tensors
from tests.harness import RankContext, pool_for
from tests.rig import STAGES, gathered
from tests.state.run import k_and_m, m, make, no_space, told, train


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Writing waits, on this rank, until the event is set."""
    gate = threading.Event()

    def slow(*args: Any) -> Any:
        assert gate.wait(60)
        return write_tensors(*args)

    with patch("onefold.state.saver.write_tensors", slow):
        try:
            yield gate
        finally:
            gate.set()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def saved_while_training(ctx: RankContext, stage: int, folder: str) -> dict[str, Any]:
    """As ``k_and_m``, but the file is written when the steps after it are done."""
    engine = make(ctx, stage)
    torch.manual_seed(ctx.rank)
    train(ctx, engine, 0, 3)
    at = told(engine)
    with held_back() as gate:
        path = engine.save_checkpoint(folder, client_state={"epoch": 7}, async_save=True)
        assert not path.exists()
        train(ctx, engine, 3, 3)
        assert not path.exists()
        end = told(engine)
        before = engine._world.control.count
        train(ctx, engine, 6, 1)
        while_in_flight = engine._world.control.count - before
        gate.set()
        until(path.exists)
    until(lambda: engine._saver._in_flight is None or engine._saver._in_flight.done())
    gathered(None)
    train(ctx, engine, 7, 1)  # finds that it has ended
    before = engine._world.control.count
    train(ctx, engine, 8, 1)
    assert while_in_flight - (engine._world.control.count - before) == 1
    return {"at": at, "end": end}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_saved_is_the_moment_of_the_call(
    tmp_path: Path, stage: int, world_size: int
) -> None:
    pool = pool_for(world_size)
    straight = pool.run(k_and_m, stage=stage, folder=str(tmp_path / "straight"), config={})
    found = pool.run(saved_while_training, stage=stage, folder=str(tmp_path / "async"))
    assert found == straight
    resumed = pool.run(m, stage=stage, folder=str(tmp_path / "async"), config={})
    assert resumed == straight
    names = [
        sorted(path.name for path in (tmp_path / one / "global_step3").iterdir())
        for one in ("straight", "async")
    ]
    assert names[0] == names[1]


def one_in_flight(ctx: RankContext, folder: str) -> None:
    engine = make(ctx, 3)
    with held_back() as gate:
        first = engine.save_checkpoint(folder, "first", async_save=True)
        threading.Timer(0.2, gate.set).start()
        second = engine.save_checkpoint(folder, "second", async_save=True)  # waits for the first
        assert first.exists()
    assert engine.load_checkpoint(folder)[0] == second  # and this for the second
    engine.save_checkpoint(folder, "third", keep_last=1, async_save=True)
    engine.destroy()
    if ctx.rank == 0:
        assert sorted(path.name for path in Path(folder).iterdir()) == [".lock", "latest", "third"]


def test_at_most_one_is_in_flight_and_destroy_waits(tmp_path: Path) -> None:
    pool_for(2).run(one_in_flight, folder=str(tmp_path))


def fails(ctx: RankContext, folder: str, meets: str) -> None:
    engine = make(ctx, 2)
    train(ctx, engine, 0, 1)
    engine.save_checkpoint(folder, async_save=True)  # makes the group, too, through a file here
    engine._saver.wait()
    calls = {
        "step": lambda: train(ctx, engine, 1, 1),
        "save": lambda: engine.save_checkpoint(folder, "next"),
        "load": lambda: engine.load_checkpoint(folder),
        "destroy": engine.destroy,
    }
    with no_space(ctx.world_size - 1, ctx):
        engine.save_checkpoint(folder, "full", async_save=True)
        until(engine._saver._in_flight.done)  # type: ignore[union-attr]
        gathered(None)
    with pytest.raises((OSError, CheckpointError), match="File too large"):
        calls[meets]()
    gathered(None)
    assert engine._saver._in_flight is None
    assert sorted(p.name for p in Path(folder).iterdir()) == [".lock", "global_step1", "latest"]
    if meets != "destroy":
        assert engine.global_steps == 1 + (meets == "step")
        train(ctx, engine, 2, 1)
        engine.save_checkpoint(folder, "after", async_save=True)
        engine.destroy()
        gathered(None)
        assert (Path(folder) / "after").exists()


@pytest.mark.parametrize("meets", ["step", "save", "load", "destroy"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_is_met_on_all_ranks_at_once(tmp_path: Path, world_size: int, meets: str) -> None:
    pool_for(world_size).run(fails, folder=str(tmp_path), meets=meets)


def logs(ctx: RankContext, folder: str) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onefold.state.saver")
    logger.addHandler(handler)
    engine: onefold.Engine = make(ctx, 0)
    try:
        engine.save_checkpoint(folder, async_save=True)
        engine._saver.wait()
        with no_space(ctx.world_size - 1, ctx):
            engine.save_checkpoint(folder, async_save=True)
            with pytest.raises((OSError, CheckpointError)):
                engine.destroy()
    finally:
        logger.removeHandler(handler)
    return texts


SCRIPT = """
import sys
import torch
from typer.testing import CliRunner
import onefold
from onefold.cli import app

model = torch.nn.Linear(2000, 2000)
engine, *_ = onefold.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()))
engine.save_checkpoint(sys.argv[1], async_save=True)
"""


def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, timeout=120)
    told = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "global_step0", "latest"]


def test_an_error_is_logged_where_nobody_meets_it(tmp_path: Path) -> None:
    for texts in pool_for(2).run(logs, folder=str(tmp_path)):
        assert len(texts) == 1
        assert "save_checkpoint() has failed" in texts[0]
