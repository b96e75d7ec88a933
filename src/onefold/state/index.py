"""Index: the JSON file that says what a checkpoint holds, and where.

Legend: a part is a contiguous range of a parameter's elements, counted in the order in which they
lie in memory (``stride``). The parts of a parameter do not overlap and cover it. A rank has at most
one part of a parameter, under the parameter's name in ``master-RANK``, and as ``NAME/KEY`` for
every elementwise optimizer state in ``optimizer-RANK``.
"""

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from onefold.errors import CheckpointError
from onefold.state.files import FileEntry, digest_of

FORMAT: Final = "onefold checkpoint"
FORMAT_VERSION: Final = 1
INDEX: Final = "index.json"
DIGEST: Final = "index.json.sha256"
"""In the form of ``sha256sum``, which can check it."""

LATEST_UNIVERSAL: Final = "latest_universal"
"""Beside DeepSpeed's universal checkpoints, the tag of the newest one."""

LOAD_UNIVERSAL: Final = '"checkpoint": {"load_universal": true}'
"""What a config says that means to load one."""

Part = tuple[int, int, int]
"""Rank, first element, number of elements."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ParamEntry(_Strict):
    """One parameter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """Of its master: fp32 or wider if it is trainable."""
    model_dtype: str
    is_trainable: bool
    group: int | None
    """Its param group."""
    parts: tuple[Part, ...]
    state: dict[str, str]
    """Elementwise optimizer states, and their dtypes."""
    scalars: dict[str, Any]
    """The other optimizer states."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(numel for _, _, numel in self.parts)


class BufferEntry(_Strict):
    """One persistent buffer."""

    shape: tuple[int, ...]
    dtype: str
    ranks: tuple[int, ...]
    """Who wrote its own; the others' were as that of the first."""


class World(_Strict):
    """The ranks that wrote it."""

    size: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]


class Progress(_Strict):
    """The engine's counters."""

    global_steps: int
    skipped_steps: int
    micro_steps: int

    @property
    def counters(self) -> tuple[int, int, int]:
        """The three, in order."""
        return self.global_steps, self.skipped_steps, self.micro_steps


class Index(_Strict):
    """All of a checkpoint but its tensors."""

    # A best loss is inf at first: as Python's own json module, which is what reads it, writes it.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    format: Literal["onefold checkpoint"] = FORMAT
    format_version: Literal[1] = FORMAT_VERSION
    onefold: str
    torch: str
    config: dict[str, Any]
    world: World
    progress: Progress
    optimizer: str
    """The class."""
    groups: list[dict[str, Any]]
    """Settings of the param groups."""
    scheduler: Any
    """Its state; None if the engine has none."""
    loss_scaler: dict[str, Any]
    params: dict[str, ParamEntry]
    tied: dict[str, str]
    """Further names of parameters and buffers, and the name that each has here."""
    buffers: dict[str, BufferEntry]
    rng: list[dict[str, Any]]
    """By rank."""
    dataloader: list[Any]
    """By rank, the place in the data; None where the engine has no loader."""
    client_state: dict[str, Any]
    files: dict[str, FileEntry]

    def to_json(self) -> str:
        """The file's text."""
        return self.model_dump_json(indent=1) + "\n"


def file_of(kind: Literal["master", "optimizer"], rank: int) -> str:
    """The name of one rank's file."""
    return f"{kind}-{rank:05d}.safetensors"


def read_index(folder: Path) -> Index:
    """Read and verify the index of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
    """
    path = folder / INDEX
    try:
        expected = (folder / DIGEST).read_text().split()[:1]
        if [digest_of(path)] != expected:
            raise CheckpointError(
                f"{path}: its bytes are not those that were written (SHA-256 differs)"
            )
        return Index.model_validate_json(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder}: no readable index ({error}){_whose(folder)}") from error
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: expected version {FORMAT_VERSION} of onefold's format, got something else: "
            f"{error}"
        ) from error


def _whose(folder: Path) -> str:
    """What to do with a folder of DeepSpeed's."""
    if (folder / "zero").is_dir():
        return f". It is a universal checkpoint of DeepSpeed's: load it with {LOAD_UNIVERSAL}"
    if any(folder.glob("*_optim_states.pt")):
        return (
            ". It is a checkpoint of DeepSpeed's: convert it with DeepSpeed's ds_to_universal.py, "
            f"and load that with {LOAD_UNIVERSAL}"
        )
    return ""
