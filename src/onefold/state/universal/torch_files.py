"""Torch files: what ``torch.save`` wrote, read as data. No class that a file names is looked up.

``torch.load(weights_only=True)`` builds tensors, numbers, strings, lists and dicts, and refuses the
rest. ``torch.save`` writes a zip file, whose records have checksums (CRC-32) that ``torch.load``
does not look at.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from onefold.errors import CheckpointError
from onefold.state.files import CHUNK_BYTES


class Attributes:
    """Stands for an object of DeepSpeed's: has the attributes that the file says, and no code."""

    def __init__(self, *args: object) -> None:
        self.args = args


# DeepSpeed keeps the loss scale as an object of one of its classes, beside what a load needs. Given
# to ``torch.load`` by name, they are built as ``Attributes``; DeepSpeed need not be installed.
_STAND_INS: Final = [
    (Attributes, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Attributes, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Attributes, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def load_data(path: Path) -> Any:
    """The data in a file; its tensors are mapped, and take memory when they are read.

    Raises:
        CheckpointError: it is missing or damaged, or has objects of a class; names them.
    """
    with torch.serialization.safe_globals(_STAND_INS):  # type: ignore[arg-type]
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            found = _classes_in(path)
            if not found:
                # torch's advice, which is long and about weights_only, follows the first line.
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise CheckpointError(
                    f"{path}: expected data that torch.load(weights_only=True) reads: {reason}"
                ) from error
            raise CheckpointError(
                f"{path}: expected numbers, strings, lists, dicts and tensors, got objects of "
                f"{', '.join(found)}, and loading never unpickles. Save again without them (a "
                "client_state of plain data); or, if you trust the file, read it with "
                "torch.load(weights_only=False), take them out, and torch.save the rest."
            ) from error


def _classes_in(path: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # no such file, or a damaged one: the first error says more
        return []


def damage_of(path: Path) -> str | None:
    """Why the file is damaged; None if it is not. Reads all of it.

    Where it was saved without checksums (``torch.serialization.set_crc32_options(False)``), what
    its records hold cannot be checked.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            has_checksums = any(record.CRC for record in archive.infolist())
            if has_checksums and (record := archive.testzip()) is not None:
                return f"{path}: its bytes are not those that were written (CRC-32 of {record})"
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    except Exception as error:
        return f"{path}: expected a whole zip file, as torch.save writes it, got damage: {error}"
    return None


class Place(NamedTuple):
    """Where a tensor is."""

    path: Path
    keys: tuple[str, ...]
    """Down the dicts in the file."""


def tensor_in(data: Any, place: Place) -> Tensor:
    """The tensor at a place in the file's data.

    Raises:
        CheckpointError: there is none.
    """
    for key in place.keys:
        data = data[key] if isinstance(data, Mapping) and key in data else None
    if isinstance(data, Tensor) and data.layout is torch.strided and not data.is_quantized:
        return data.detach()
    where = "".join(f"[{key!r}]" for key in place.keys)
    raise CheckpointError(f"{place.path}: expected a tensor{where and f' at {where}'}, got none.")


class TorchReader:
    """Reads ranges of the tensors of one folder; see ``files.Reader`` for what its methods do.

    Args:
        places: by file and name, as the index has them.
    """

    def __init__(self, places: Mapping[tuple[str, str], Place]) -> None:
        self._places = places
        self._path: Path | None = None
        self._data: Any = None

    def read(self, file: str, name: str, begin: int, out: Tensor) -> None:
        """Fill ``out`` ``[K]`` with elements ``begin`` to ``begin + K``, in row-major order.

        Memory: ``CHUNK_BYTES``; where the file has other strides, the whole tensor.
        """
        source = self._tensor(file, name).reshape(-1)
        step = max(1, CHUNK_BYTES // out.element_size())
        for offset in range(0, out.numel(), step):
            part = out[offset : offset + step]
            part.copy_(source[begin + offset : begin + offset + part.numel()])

    def read_whole(self, file: str, name: str, out: Tensor) -> None:
        """Fill ``out`` with a tensor of its shape."""
        out.copy_(self._tensor(file, name))

    def close(self) -> None:
        """Unmap everything."""
        self._path = self._data = None

    def _tensor(self, file: str, name: str) -> Tensor:
        place = self._places[file, name]
        if place.path != self._path:  # one at a time, as a model has thousands
            self._path, self._data = place.path, load_data(place.path)
        return tensor_in(self._data, place)
