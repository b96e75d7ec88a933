"""Killed, or out of space, while saving: what was there before is still there, whole."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from onefold.errors import CheckpointError
from tests.harness import RankContext, pool_for
from tests.harness.pool import WorkerError, WorkerPool
from tests.rig import gathered, start
from tests.state.run import make, no_space, train


def killed(ctx: RankContext, folder: str) -> int:
    """Children that save as fast as they can are killed; what is left always loads whole."""
    engine = start(ctx, nn.Linear(300, 300), 3, optimizer=None)
    numbers, loaded = random.Random(0), set()
    newest = -1
    begin = time.monotonic()
    engine.save_checkpoint(Path(folder) / "timed")
    one_s = time.monotonic() - begin
    for _ in range(50):
        pid = os.fork()
        if pid == 0:
            try:
                for value in range(newest + 1, newest + 1000):
                    with engine.full_parameters(), torch.no_grad():
                        for param in engine.module.parameters():
                            param.fill_(value)
                    engine.save_checkpoint(folder, f"s{value}", {"value": value}, keep_last=2)
            finally:
                os._exit(1)
        time.sleep(numbers.uniform(0.0, 4 * one_s))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        path, client_state = engine.load_checkpoint(folder)
        if path is not None:
            assert client_state["value"] >= newest, "an older one came back"
            newest = client_state["value"]
            for tensor in engine.full_state_dict().values():
                assert torch.equal(tensor, torch.full_like(tensor, newest))
        loaded.add(newest)
    return len(loaded)


def test_killed_at_any_moment_the_last_whole_one_loads(tmp_path: Path) -> None:
    assert pool_for(1).run(killed, folder=str(tmp_path))[0] > 5


def saving(ctx: RankContext, folder: str, first: int, victims: list[int], saves: float) -> None:
    """Save as fast as possible; when about ``saves`` more than one are done, the victims die."""
    engine = start(ctx, nn.Linear(120, 120), 3, optimizer=None)
    begin = time.monotonic()
    for value in range(first, first + 10_000):
        with engine.full_parameters(), torch.no_grad():
            for param in engine.module.parameters():
                param.fill_(value)
        tag = "same" if value % 3 == 0 else f"s{value}"  # one of the same tag is replaced
        engine.save_checkpoint(
            folder, tag, {"value": value}, keep_last=2, async_save=value % 2 == 0
        )
        if value == first + 1 and ctx.rank in victims:
            after_s = saves * (time.monotonic() - begin) / 2
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def loaded(ctx: RankContext, folder: str) -> int:
    engine = start(ctx, nn.Linear(120, 120), 0, optimizer=None)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None
    for tensor in engine.full_state_dict().values():
        assert torch.equal(tensor, torch.full_like(tensor, client_state["value"]))
    value: int = client_state["value"]
    return value


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "rounds"), [(2, 30), (3, 20)])
def test_ranks_are_killed_at_any_moment(tmp_path: Path, world_size: int, rounds: int) -> None:
    """50 kills of one rank or several; each leaves a whole state, and never an older one."""
    numbers = random.Random(world_size)
    newest, distances = -1, set()
    for _ in range(rounds):
        victims = numbers.sample(range(world_size), numbers.randint(1, world_size))
        with pytest.raises(WorkerError, match="SIGKILL"):
            WorkerPool(world_size).run(
                saving,
                folder=str(tmp_path),
                first=newest + 1,
                victims=victims,
                saves=numbers.uniform(0.0, 5.0),
            )
        (value,) = pool_for(1).run(loaded, folder=str(tmp_path))
        assert value > newest  # the first save had ended
        distances.add(value - newest)
        newest = value
    assert len(distances) > 1


def full_disk(ctx: RankContext, folder: str) -> None:
    engine = make(ctx, 3)
    train(ctx, engine, 0, 1)
    engine.save_checkpoint(folder)
    with no_space(0, ctx), pytest.raises((OSError, CheckpointError), match="File too large"):
        engine.save_checkpoint(folder, "full")
    gathered(None)  # rank 0 tidies up
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        ".lock", "global_step1", "latest"
    ]  # fmt: skip
    assert engine.load_checkpoint(folder)[0] == Path(folder) / "global_step1"
    engine.save_checkpoint(folder, "after")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    pool_for(2).run(full_disk, folder=str(tmp_path))
