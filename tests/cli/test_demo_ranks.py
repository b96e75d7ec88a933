"""``onefold demo``: what its ranks do: bare steps, events, and how all end when one fails."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from onefold.cli.events import EventReader, EventWriter
from onefold.cli.job import Job
from onefold.wire.launch import RankFailed, run_ranks

JOB = Job(
    model="m",
    stage=3,
    steps=16,
    bare_steps=3,
    batch_size=64,
    mini_batch_size=32,
    max_tokens=64,
    learning_rate=5e-5,
    folder="scratch",
    model_folder="out",
)


# -- which steps are bare, and events -----------------------------------------------------------


@pytest.mark.parametrize(("steps", "bare_steps"), [(2, 1), (4, 1), (16, 3), (7, 6), (100, 2)])
def test_bare_steps_lie_among_the_others(steps: int, bare_steps: int) -> None:
    job = replace(JOB, steps=steps, bare_steps=bare_steps)
    bare = [step for step in range(steps) if job.is_bare(step)]
    assert len(bare) == bare_steps
    assert 0 not in bare  # the first step is slower than the others


def test_events_arrive_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.read() == []
    EventWriter(path, 1).emit("step", loss=0.5)
    with path.open("ab") as file:
        file.write(b'{"kind": "ha')
    (event,) = reader.read()
    assert (event["kind"], event["rank"], event["loss"]) == ("step", 1, 0.5)
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(b'lf"}\n')
    assert reader.read() == [{"kind": "half"}]


# -- launching ----------------------------------------------------------------------------------

FAIL = "import os, sys, time; rank = os.environ['RANK']; print('hello from', rank, flush=True)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("sys.exit(3) if rank == '1' else time.sleep(60)", "rank 1 ended with exit code 3"),
        (
            "os.kill(os.getpid(), 9) if rank == '0' else time.sleep(60)",
            "rank 0 was ended by SIGKILL",
        ),
    ],
)
def test_a_failing_rank_ends_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str, ending: str
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    variables = dict(os.environ)
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=ending):
        run_ranks(
            [sys.executable, "-c", FAIL + code],
            num_ranks=2,
            log_folder=tmp_path / "log",
            environment={"ONEFOLD_TEST": "1"},
        )
    assert time.monotonic() - begin < 50, "the other rank was waited for"
    assert capfd.readouterr() == ("", "")
    said = "".join(path.read_text() for path in (tmp_path / "log").rglob("stdout.log"))
    assert "hello from" in said
    assert "failed" in (tmp_path / "log" / "agent.log").read_text()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert dict(os.environ) == variables
