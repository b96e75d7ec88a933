"""Cell: which ways of saving and loading are measured side by side, and what comes of it."""

import statistics
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict

from benchmarks.cell import Cell, EngineName
from benchmarks.results import rounded


class Kind(NamedTuple):
    """One way of saving, at any stage.

    Attributes:
        engine: whose state it is, by the name of ``benchmarks.cell``.
        stages: of that engine.
        label: for people.
        is_async: the call returns before the checkpoint is on disk.
        flushes: fsync is part of the time until it is on disk.
    """

    engine: str
    stages: tuple[int, ...]
    label: str
    is_async: bool
    flushes: bool


KINDS: Final[dict[str, Kind]] = {
    "onefold": Kind("bare", (0, 1, 2, 3), "onefold", False, True),
    "onefold_async": Kind("bare", (0, 1, 2, 3), "onefold async", True, True),
    "dcp": Kind("fsdp2", (3,), "DCP of FSDP2", False, True),
    "dcp_unflushed": Kind("fsdp2", (3,), "DCP of FSDP2, sync_files=False", False, False),
    "dcp_async": Kind("fsdp2", (3,), "DCP of FSDP2 async", True, True),
    "deepspeed": Kind("deepspeed", (1, 2, 3), "DeepSpeed", False, False),
    "deepspeed_flushed": Kind("deepspeed", (1, 2, 3), "DeepSpeed and fsync", False, True),
}


class Way(NamedTuple):
    """A kind at a stage; written ``onefold@3``."""

    name: str
    stage: int

    @classmethod
    def parse(cls, text: str) -> "Way":
        """Read what ``str`` writes.

        Raises:
            ValueError: no such kind, or it does not have this stage.
        """
        name, _, suffix = text.strip().partition("@")
        if name not in KINDS:
            raise ValueError(f"way {text!r}: expected one of {', '.join(KINDS)}, each with @STAGE.")
        stages = KINDS[name].stages
        if not suffix.isdecimal() or int(suffix) not in stages:
            raise ValueError(f"way {text!r}: {name} has the stages {stages}. Write {name}@STAGE.")
        return cls(name, int(suffix))

    def __str__(self) -> str:
        return f"{self.name}@{self.stage}"

    @property
    def kind(self) -> Kind:
        """All but the stage."""
        return KINDS[self.name]

    @property
    def label(self) -> str:
        """For people."""
        is_fsdp2 = self.kind.engine == "fsdp2"
        return self.kind.label if is_fsdp2 else f"{self.kind.label}, stage {self.stage}"

    @property
    def engine(self) -> EngineName:
        """Whose state it is."""
        return EngineName(self.kind.engine, self.stage)

    @property
    def base(self) -> "Way":
        """The way of onefold's that its savings are compared with."""
        return Way("onefold_async" if self.kind.is_async else "onefold", self.stage)


class CheckpointCell(BaseModel):
    """Ways that are measured side by side on one model.

    Attributes:
        workload: a key of ``workloads.WORKLOADS``.
        world_size: ranks, on this machine.
        ways: in the order of the first round, as ``Way`` writes them.
        rounds: how often every way is timed.
        steps: timed before an asynchronous save, to compare the steps during it with.
    """

    model_config = ConfigDict(frozen=True)

    workload: str
    world_size: int = 2
    ways: tuple[str, ...]
    rounds: int = 5
    steps: int = 3

    @property
    def parsed(self) -> list[Way]:
        """The ways, parsed."""
        return [Way.parse(text) for text in self.ways]

    @property
    def title(self) -> str:
        """For people."""
        stages = " and ".join(map(str, sorted({way.stage for way in self.parsed})))
        return f"{self.workload}, W = {self.world_size}, stage {stages}"

    @property
    def engines(self) -> Cell:
        """The cell that the engines are built from; one backward in a step."""
        names = tuple(dict.fromkeys(str(way.engine) for way in self.parsed))
        return Cell(
            workload=self.workload, world_size=self.world_size, num_backwards=1, engines=names
        )


class Visit(BaseModel):
    """One checkpoint of one way, saved and loaded, on one rank or over all of them.

    Attributes:
        pause_s: until the call that saves returned.
        on_disk_s: until the checkpoint was complete in its folder, flushed if the way flushes.
        load_s: until the call that loads returned.
        steps_before_s: steps without a save in flight, before an asynchronous one.
        steps_meanwhile_s: steps that began while the save was in flight.
        file_bytes: of all files of the checkpoint, all ranks'.
        state_bytes: masters and moments of this rank; of all ranks in a merged one.
        save_peak_bytes: anonymous memory while saving, above what there was before it.
        load_peak_bytes: the same of loading.
    """

    pause_s: float
    on_disk_s: float
    load_s: float
    steps_before_s: list[float] = []
    steps_meanwhile_s: list[float] = []
    file_bytes: int
    state_bytes: int
    save_peak_bytes: int | None = None
    load_peak_bytes: int | None = None

    @property
    def usual_step_s(self) -> float | None:
        """The median step without a save in flight; None if none was timed."""
        return statistics.median(self.steps_before_s) if self.steps_before_s else None

    @property
    def slowdown(self) -> float | None:
        """The mean step while the save was in flight, in usual ones; None if there was none."""
        usual, count = self.usual_step_s, len(self.steps_meanwhile_s)
        return sum(self.steps_meanwhile_s) / count / usual if usual and count else None

    @property
    def lost_s(self) -> float:
        """What training lost: the pause, and what the steps meanwhile took longer than usual."""
        usual = self.usual_step_s or 0.0
        return self.pause_s + sum(step - usual for step in self.steps_meanwhile_s)


class WayResult(BaseModel):
    """One way in one cell.

    Attributes:
        probe: the untimed visit, under the instrument; of every field the worst rank's.
        visits: per round; of every field the slowest rank's.
        failure: why there is no more.
    """

    probe: Visit | None = None
    visits: list[Visit] = []
    failure: str | None = None


class CheckpointResult(BaseModel):
    """What came of a cell.

    Attributes:
        rounds: those that were run; fewer than planned where time ran out.
        took_s: with the untimed visits.
    """

    cell: CheckpointCell
    ways: dict[str, WayResult] = {}
    rounds: int = 0
    load: float = 0.0
    """The machine's load average over one minute before it began."""
    took_s: float = 0.0

    @property
    def rounds_text(self) -> str:
        """For people."""
        planned = self.cell.rounds
        short = "" if self.rounds == planned else f" of {planned}, for lack of time"
        return f"{self.rounds} rounds{short}"


class CheckpointRun(BaseModel):
    """One run of the command.

    Attributes:
        file_system: the type of the one that the checkpoints lay on.
    """

    started: str
    took_s: float = 0.0
    file_system: str = "unknown"
    machine: dict[str, str] = {}
    versions: dict[str, str] = {}
    cells: list[CheckpointResult] = []

    def save(self, path: Path) -> None:
        """Write it, rounded."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (
            type(self).model_validate(rounded(self.model_dump())).model_dump_json(exclude_none=True)
        )
        lines = text.replace('{"pause_s":', '\n{"pause_s":').replace('{"cell":', '\n{"cell":')
        path.write_text(lines + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "CheckpointRun":
        """Read what ``save`` wrote."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


def merged(ranks: list[Visit]) -> Visit:
    """Of every field the slowest rank's, or the largest; the state of all ranks together."""

    def worst(field: str) -> float | None:
        values = [value for rank in ranks if (value := getattr(rank, field)) is not None]
        return max(values) if values else None

    def slowest(field: str) -> list[float]:
        return [max(step) for step in zip(*(getattr(rank, field) for rank in ranks), strict=True)]

    steps = ("steps_before_s", "steps_meanwhile_s")
    fields = set(Visit.model_fields) - {*steps, "state_bytes"}
    return Visit.model_validate(
        {field: worst(field) for field in fields}
        | {field: slowest(field) for field in steps}
        | {"state_bytes": sum(rank.state_bytes for rank in ranks)}
    )
