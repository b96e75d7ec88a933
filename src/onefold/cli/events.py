"""Events: what ranks tell the command while they run, as JSON lines in one file.

A file, because ranks under torchrun inherit no pipe. Each event is one short append, so that lines
of different ranks do not mix.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventWriter:
    """The rank's end."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        event = {"kind": kind, "rank": self._rank, "at": time.time(), **fields}
        line = (json.dumps(event) + "\n").encode()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


class EventReader:
    """The command's end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """The events since the last call, whole lines only."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read()
        except FileNotFoundError:
            return []
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
