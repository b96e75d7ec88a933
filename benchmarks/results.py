"""Results: what a run leaves behind, in JSON."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from benchmarks.cell import Cell, HostCell


class Timing(BaseModel):
    """Timed steps of one engine on one rank, or the slowest of all ranks."""

    seconds: list[float]
    exposed_s: list[float] | None = None


class Probe(BaseModel):
    """One untimed step of one rank. Bytes and collectives are per rank and step.

    Attributes:
        losses: of two steps on the same data, this rank's.
        sent_bytes: by the ledger.
        expected_bytes: by the formula.
        loopback_bytes: over the loopback interface, all ranks, divided by their number.
        collectives: by kind; from the ledger, else the calls of torch's c10d layer.
        held_bytes: unique memory between steps, above what there was before the engine.
        peak_bytes: the most within the step, above what there was before the engine.
        table_bytes: the peak of a window by the buffer table.
        record: a step as the demo records it, for the timeline.
    """

    losses: list[float]
    sent_bytes: int | None = None
    expected_bytes: int | None = None
    loopback_bytes: int | None = None
    collectives: dict[str, int]
    held_bytes: int
    peak_bytes: int
    table_bytes: int | None = None
    record: dict[str, Any] | None = None

    @property
    def told_bytes(self) -> int | None:
        """By the ledger if there is one, else as the interface counted them."""
        if self.sent_bytes is not None:
            return self.sent_bytes
        # The floor sends nothing; what the interface counts then is somebody else's.
        return 0 if self.expected_bytes == 0 else self.loopback_bytes


class EngineResult(BaseModel):
    """One engine in one cell.

    Attributes:
        seconds: per round, the slowest rank's.
        exposed_s: per round, of the rank that waited most; None where no ledger says so.
        deviation: the distance of the second step's loss from that of the reference, as a part of
            the reference's progress; the worst rank's. 1 is an engine that does not train.
        probe: rank 0's, with the memory of the rank that had most.
        failure: why there is no more.
    """

    seconds: list[float] = []
    exposed_s: list[float] | None = None
    deviation: float | None = None
    probe: Probe | None = None
    failure: str | None = None


class CellResult(BaseModel):
    """What came of a cell."""

    cell: Cell
    engines: dict[str, EngineResult] = {}
    load: float = 0.0
    """The machine's load average over one minute before it began."""
    took_s: float = 0.0
    failure: str | None = None


class HostResult(BaseModel):
    """Milliseconds of paired backwards and forwards, one entry per pair, of the slowest rank."""

    cell: HostCell
    plain_ms: list[float] = []
    window_ms: list[float] = []
    plain_forward_ms: list[float] = []
    window_forward_ms: list[float] = []
    failure: str | None = None


class Run(BaseModel):
    """One run of the command.

    Attributes:
        kind: ``full``, ``quick`` or ``cell``.
        left_out: cells for which there was no time.
    """

    kind: str
    started: str
    took_s: float = 0.0
    machine: dict[str, str] = {}
    versions: dict[str, str] = {}
    cells: list[CellResult] = []
    host: list[HostResult] = []
    left_out: list[str] = []

    def save(self, path: Path) -> None:
        """Write it, rounded."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (
            type(self).model_validate(rounded(self.model_dump())).model_dump_json(exclude_none=True)
        )
        path.write_text(_one_line_per_engine(text) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Read what ``save`` wrote."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def find(self, workload: str, num_backwards: int, world_size: int = 2) -> list[CellResult]:
        """Cells of fp32 on the default transport."""
        return [
            result
            for result in self.cells
            if result.cell.workload == workload
            and result.cell.num_backwards == num_backwards
            and result.cell.world_size == world_size
            and result.cell.dtype == "float32"
            and result.cell.transport == "auto"
        ]


def rounded(value: Any) -> Any:
    """Five digits: more is noise and makes the file long."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def _one_line_per_engine(text: str) -> str:
    return text.replace('{"seconds":', '\n{"seconds":').replace('{"cell":', '\n{"cell":')
