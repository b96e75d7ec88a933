"""Record: what one training step sent, read from the engine's ledger, and how long it took."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from onefold.engine import Engine

GRADIENTS: Final = "gradients"
PARAMETERS: Final = "parameters"
_LANES: Final = {"reduce_scatter": GRADIENTS, "all_reduce": GRADIENTS, "all_gather": PARAMETERS}


@dataclass(slots=True)
class Transfer:
    """One collective; seconds since the step began."""

    lane: str
    """``gradients`` or ``parameters``."""
    unit: str
    started_s: float
    finished_s: float


@dataclass(slots=True)
class StepRecord:
    """One step of one rank.

    Attributes:
        is_bare: it ran without the window.
        backwards: backward passes through the model.
        collectives: by lane.
        bytes_sent: by lane.
        transfers: every collective, as far back as the ledger keeps them.
    """

    is_bare: bool
    seconds: float = 0.0
    backwards: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "StepRecord":
        """The inverse of ``to_json``."""
        transfers = [Transfer(**transfer) for transfer in row.pop("transfers")]
        return cls(**row, transfers=transfers)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Recorder:
    """Records the steps of one engine.

    Args:
        engine: whose ledger is read.
        num_backwards: counts backward passes through the model, from any point on.
    """

    def __init__(self, engine: Engine, num_backwards: Callable[[], int]) -> None:
        self._ledger = engine.ledger
        self._num_backwards = num_backwards

    @contextmanager
    def step(self, *, is_bare: bool) -> Iterator[StepRecord]:
        """Yield a record that is complete when the block has ended."""
        record = StepRecord(is_bare)
        mark, backwards, begin = self._ledger.mark(), self._num_backwards(), time.perf_counter()
        yield record
        end = time.perf_counter()
        record.seconds = end - begin
        record.backwards = self._num_backwards() - backwards
        record.collectives = {GRADIENTS: 0, PARAMETERS: 0}
        record.bytes_sent = {GRADIENTS: 0, PARAMETERS: 0}
        for kind, total in self._ledger.since(mark).items():
            if kind in _LANES:
                record.collectives[_LANES[kind]] += total.count
                record.bytes_sent[_LANES[kind]] += total.bytes_out
        record.transfers = [
            Transfer(
                _LANES[entry.kind],
                entry.unit,
                entry.started_s - begin,
                (end if entry.finished_s is None else entry.finished_s) - begin,
            )
            for entry in self._ledger.recent
            if entry.started_s >= begin and entry.kind in _LANES
        ]


def typical(records: Sequence[StepRecord]) -> StepRecord:
    """The one whose duration is the median, or next to it."""
    median = statistics.median_low(record.seconds for record in records)
    return next(record for record in records if record.seconds == median)
