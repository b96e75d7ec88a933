"""Launch: the ranks of one job under torchrun, and what became of them in one line."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import onefold.wire.launch as torchrun
from onefold.cli.events import Event, EventReader
from onefold.cli.failure import Failure
from onefold.cli.job import Job

POLL_S: Final = 0.1


def launch(job: Job, num_ranks: int, on_event: Callable[[Event], None], log_path: Path) -> None:
    """Run the ranks of ``job`` until they end.

    Args:
        job: saved before the ranks start.
        num_ranks: processes on this machine.
        on_event: called on another thread, with every event in the order of arrival.
        log_path: gets everything that the launcher and the ranks have printed.

    Raises:
        Failure: a rank failed; one line, which names ``log_path``.
        KeyboardInterrupt: the ranks have been stopped.
    """
    job.save()
    follower = _Follower(job.events_path, on_event)
    follower.start()
    try:
        torchrun.run_ranks(
            [sys.executable, "-m", "onefold.cli.demo_worker", str(job.path)],
            num_ranks=num_ranks,
            log_folder=job.log_folder,
            environment=_environment(),
        )
    except torchrun.RankFailed as error:
        follower.finish()
        raise Failure(f"{_told(follower, error)} Details: {log_path}") from None
    finally:
        follower.finish()
        _collect_log(job.log_folder, log_path)


def _told(follower: "_Follower", error: torchrun.RankFailed) -> str:
    """What the first rank that failed has said; a killed rank says nothing."""
    if follower.failure is not None:
        message = follower.failure["message"].rstrip(".")
        return f"rank {follower.failure['rank']}: {message}."
    return f"{error}."


def _environment() -> dict[str, str]:
    package_root = str(Path(torchrun.__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join([package_root, inherited] if inherited else [package_root]),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",  # bars of other libraries, in a log
    }


class _Follower(threading.Thread):
    """Passes events on while the main thread waits for the ranks."""

    def __init__(self, path: Path, on_event: Callable[[Event], None]) -> None:
        super().__init__(name="onefold-demo-events", daemon=True)
        self._reader = EventReader(path)
        self._on_event = on_event
        self._ended = threading.Event()
        self.failure: Event | None = None

    def run(self) -> None:
        while not self._ended.wait(POLL_S):
            self._pass_on()
        self._pass_on()

    def _pass_on(self) -> None:
        for event in self._reader.read():
            if event["kind"] == "failed":
                self.failure = self.failure or event
            else:
                self._on_event(event)

    def finish(self) -> None:
        """Pass the last events on and end; once is enough."""
        self._ended.set()
        self.join()


def _collect_log(folder: Path, log_path: Path) -> None:
    """One file of everything that was printed, with a heading per source."""
    with log_path.open("w", encoding="utf-8") as log:
        for path in sorted(folder.rglob("*.log")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                is_agent = path.name == torchrun.AGENT_LOG
                source = "launcher" if is_agent else f"rank {path.parent.name}, {path.stem}"
                log.write(f"== {source}\n{text.rstrip()}\n\n")
