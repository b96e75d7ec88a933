"""Cell: what is measured side by side, as plain data that the command and its ranks share."""

from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict

STAGES_OF: Final[dict[str, tuple[int, ...]]] = {
    "floor": (),
    "wire_floor": (),
    "bare": (0, 1, 2, 3),
    "window": (0, 1, 2, 3),
    "armed": (0, 1, 2, 3),
    "ddp": (),
    "ddp_no_sync": (),
    "fsdp2": (2, 3),
    "fsdp2_deferred": (2, 3),
    "deepspeed": (0, 1, 2, 3),
    "deepspeed_coalesced": (1, 2, 3),
}
"""Engines, and the stages that each has; none for those that have no such choice."""

OWN: Final = ("bare", "window", "armed")

LABELS: Final = {
    "floor": "compute floor",
    "wire_floor": "wire floor",
    "bare": "onefold bare",
    "window": "onefold window",
    "armed": "onefold armed window",
    "ddp": "DDP",
    "ddp_no_sync": "DDP no_sync",
    "fsdp2": "FSDP2",
    "fsdp2_deferred": "FSDP2 deferred",
    "deepspeed": "DeepSpeed",
    "deepspeed_coalesced": "DeepSpeed coalesced",
}


class EngineName(NamedTuple):
    """Which engine, at which stage; written ``window@3``. FSDP2 at "stage 2" keeps parameters."""

    name: str
    stage: int | None

    @classmethod
    def parse(cls, text: str, stage: int | None = None) -> "EngineName":
        """Read ``window@3``, or ``window`` with ``stage`` as default.

        Raises:
            ValueError: no such engine, or it does not have this stage.
        """
        name, _, suffix = text.strip().partition("@")
        if name not in STAGES_OF:
            raise ValueError(f"engine {name!r}: expected one of {', '.join(STAGES_OF)}.")
        stages = STAGES_OF[name]
        if not stages:
            if suffix:
                raise ValueError(f"engine {text!r}: {name} has no stages. Write {name!r}.")
            return cls(name, None)
        wanted = int(suffix) if suffix.isdecimal() else stage if not suffix else None
        if wanted not in stages:
            told = suffix or stage
            raise ValueError(f"engine {text!r}: {name} has the stages {stages}, got {told}.")
        return cls(name, wanted)

    def __str__(self) -> str:
        return self.name if self.stage is None else f"{self.name}@{self.stage}"

    @property
    def label(self) -> str:
        """For people."""
        label = LABELS[self.name]
        if self.name.startswith("fsdp2"):
            return f"{label}, {'fully sharded' if self.stage == 3 else 'parameters kept'}"
        return label if self.stage is None else f"{label}, stage {self.stage}"

    @property
    def family(self) -> str:
        """Engines of one family share their processes. DeepSpeed replaces functions of torch."""
        return "deepspeed" if self.name.startswith("deepspeed") else "shared"


class Cell(BaseModel):
    """Engines that are measured side by side on one workload.

    Attributes:
        workload: a key of ``workloads.WORKLOADS``.
        world_size: ranks, on this machine.
        num_backwards: per step.
        engines: in the order of a round, as ``EngineName`` writes them.
        rounds: how often every engine is timed; 0 leaves only the untimed step.
        steps: timed steps per engine and round; a round's sample is their median.
        dtype: of the model.
        transport: onefold's, by the name of its config key.
        keeps_timeline: the untimed step's collectives are kept one by one, for the picture.
    """

    model_config = ConfigDict(frozen=True)

    workload: str
    world_size: int = 2
    num_backwards: int = 8
    engines: tuple[str, ...]
    rounds: int = 3
    steps: int = 1
    dtype: str = "float32"
    transport: str = "auto"
    keeps_timeline: bool = False

    @property
    def names(self) -> list[EngineName]:
        """The engines, parsed."""
        return [EngineName.parse(text) for text in self.engines]

    @property
    def title(self) -> str:
        """For people."""
        extra = "" if self.dtype == "float32" else f", {self.dtype}"
        extra += "" if self.transport == "auto" else f", transport {self.transport}"
        return f"{self.workload}, W = {self.world_size}, n = {self.num_backwards}{extra}"


class HostCell(BaseModel):
    """Backwards in a window against the same backwards in plain autograd, paired."""

    model_config = ConfigDict(frozen=True)

    workload: str
    world_size: int = 2
    stage: int = 3
    pairs: int = 50
    dtype: str = "float32"

    @property
    def title(self) -> str:
        """For people."""
        extra = "" if self.dtype == "float32" else f", {self.dtype}"
        return f"{self.workload}, W = {self.world_size}, stage {self.stage}{extra}"
